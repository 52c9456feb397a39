"""linear_attention: the core that kernel mixers share, over sequences, streams and cross attention's memory.

    out_i = sum_j s_ij v_j / max(sum_j s_ij, eps)
    s_ij  = f(q_i) . f(k_j) * cos(pi/2 (p_i - p_j) / M) * exp(-|A_i - A_j|)

f is the identity (q and k are features already) or ReLU, fused into the backends. An infinite horizon M drops
the cosine. cosFormer is f = ReLU with a finite horizon (cosformer.py). The algorithm is derived in _torch.py.
"""

import math

from torch import Tensor

from .call import Inputs
from .checks import (
    Horizon,
    Rates,
    boundaries,
    check_causal,
    check_reach,
    check_state,
    check_tensors,
    offset_of,
    rates_of,
    shown,
)
from .fades import fades, grouped
from .operator import attend, autocast, call_of
from .plan import find, make
from .state import State, advance


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    horizon: Horizon = math.inf,
    relu: bool = False,
    signed: bool = False,
    causal: bool = False,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    q_offset: int = 0,
    decay: Rates | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """Normalised linear attention over features q, k and values v, shaped as in `cosformer_attention`.

    The arguments are those of `cosformer_attention` and two more: `relu` applies ReLU to q and k first;
    `signed` is for features that can be negative: the normaliser keeps its sign, and only its magnitude is
    held above eps.
    """
    key = None
    if cu_seqlens is None:
        options = (horizon, type(horizon), relu, signed, causal, q_offset, type(q_offset), eps, backend)
        key, plan = find((q, k, v, decay, key_mask, None), options)
        if plan is not None:
            return plan(q, k, v, decay, key_mask)[0]
    q, k, v = _checked(q, k, v, key_mask)
    check_causal(causal)
    q_offset = offset_of(q_offset)
    chosen = {"causal": bool(causal), "q_offset": q_offset, "relu": relu, "signed": signed}
    call = call_of(horizon, q, eps=eps, backend=backend, **chosen)
    L, S = q.shape[2], k.shape[2]
    if cu_seqlens is not None:
        cu_seqlens = boundaries(cu_seqlens, q, k, q_offset)
    elif L > 0 and S > 0:
        check_reach(call.horizons, q_offset + L - 1, 0 if causal else S - 1 - q_offset)
    rates = None if decay is None else rates_of(decay, q, k, self_attention=L == S and q_offset == 0)
    x = Inputs(q, k, v, rates, key_mask, cu_seqlens)
    plan = make(key, x, call, decay)
    return attend(x, call).out if plan is None else plan(q, k, v, decay, key_mask)[0]


def linear_stream(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None = None,
    *,
    horizon: Horizon = math.inf,
    relu: bool = False,
    signed: bool = False,
    key_mask: Tensor | None = None,
    decay: Rates | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Causal `linear_attention` over the next tokens of a stream: their output, and the state after them."""
    if state is not None and not isinstance(state, State):
        raise TypeError(f"state must be a State, as the stream returned it, or None; got {shown(state)}")
    position, tensor, made = (
        (0, None, None) if state is None else (state.position, state.tensor, state.horizons)
    )
    key, plan = None, None
    if state is None or (state.origin is None and not state.start):  # else it carries more than its sums
        options = (horizon, type(horizon), relu, signed, "stream", made, eps, backend)
        key, plan = find((q, k, v, decay, key_mask, tensor), options)
    if plan is not None and position <= plan.last:
        out, after = plan(q, k, v, decay, key_mask, tensor, position)
        return out, State(after, position + q.shape[2], plan.call.horizons)
    q, k, v = _checked(q, k, v, key_mask)
    L, S = q.shape[2], k.shape[2]
    if L != S:
        raise ValueError(f"q has length {L} and k has {S}; a stream takes as many queries as keys")
    chosen = {"causal": True, "position": position, "relu": relu, "signed": signed, "keep_state": True}
    call = call_of(horizon, q, eps=eps, backend=backend, **chosen)
    if state is not None:
        check_state(state.tensor, state.horizons, q, v, call)
    if L > 0:
        remedy = "pass" if state is None else "start the stream again with"
        check_reach(call.horizons, position + L - 1, remedy=remedy)
    rates = None if decay is None else rates_of(decay, q, k, self_attention=True)
    x = Inputs(q, k, v, rates, key_mask, state=tensor)
    plan = make(key, x, call, decay)
    if plan is None:
        return advance(state, x, call)
    out, after = plan(q, k, v, decay, key_mask, tensor, position)
    return out, State(after, position + L, call.horizons)


def linear_state(
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    horizon: Horizon = math.inf,
    relu: bool = False,
    key_mask: Tensor | None = None,
    decay: Rates | None = None,
    position: int = 0,
    backend: str | None = None,
) -> State:
    """The state of all keys: cross attention's memory for `linear_read`, read at constant cost; or a segment
    of a stream that begins at `position`, for `State.then`, with each key faded up to the segment's end.
    """
    no_queries = k[:, :1, :0].expand(-1, heads, -1, -1)
    q, k, v = _checked(no_queries, k, v, key_mask)
    call = call_of(horizon, q, position=position, relu=relu, keep_state=True, backend=backend)
    end, fade = position + k.shape[2], None
    if decay is not None:
        rates = rates_of(decay, q, k, self_attention=True)
        left = fades(rates, k)
        k, v, fade = left.ending(k, key_mask), grouped(v, heads), left.whole
    after = attend(Inputs(q.to(k.dtype), k, v.to(k.dtype), key_mask=key_mask), call).after
    assert after is not None, "a state was asked for"
    return State(after, end, call.horizons, start=position, fade=fade)


def linear_read(
    q: Tensor,
    state: State,
    *,
    horizon: Horizon = math.inf,
    relu: bool = False,
    signed: bool = False,
    q_offset: int = 0,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """What queries at q_offset, q_offset + 1, ... read from a state: attention over all keys in it."""
    B, H, _, columns = state.tensor.shape
    q, k, v = _checked(q, q.new_empty(B, H, 0, q.shape[-1]), q.new_empty(B, H, 0, columns - 1), None)
    call = call_of(horizon, q, position=q_offset, relu=relu, signed=signed, eps=eps, backend=backend)
    check_state(state.tensor, state.horizons, q, v, call)
    if q.shape[2] and state.position:
        check_reach(call.horizons, q_offset + q.shape[2] - 1, state.position - 1 - q_offset)
    return attend(Inputs(q, k, v, state=state.tensor), call).out


def _checked(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v, key_mask)
    return q, k, v
