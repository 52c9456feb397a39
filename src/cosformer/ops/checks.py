"""What the operators accept: each check names the argument, what was given and what is accepted.

Values (are rates finite, do boundaries rise) are checked only on the CPU: reading them from another device
would make the host wait for it.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypeGuard

import torch
from torch import Tensor

from .call import DTYPES, Call, Inputs, sum_dtype

Horizon = float | Sequence[float] | Tensor
Rates = float | Sequence[float] | Tensor

LEAST_EPS = torch.finfo(torch.float32).tiny  # in sums of float32 less would be 0, or cost digits
MOST_OFFSET = 2**62  # the kernel counts positions in 64 bits
_NUMBERS = (int, float, Real, torch.SymInt, torch.SymFloat)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, heads, length, size); got shape {tuple(x.shape)}"
            )
        if x.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense tensor (torch.strided); got layout {x.layout}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float64, float32, bfloat16 or float16; got {x.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share one dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device} and {v.device}")
    (B, H, _, D), (Bk, Hk, S, Dk) = q.shape, k.shape
    problem = None
    if v.shape[:3] != (Bk, Hk, S):
        problem = "k and v must agree in batch, heads and length"
    elif B != Bk:
        problem = "q and k must have the same batch size"
    elif D != Dk or D == 0:
        problem = "q and k must have the same size of at least 1 in their last dimension"
    elif Hk == 0 or H % Hk or H == 0:
        problem = "q's heads must be a multiple of k's"
    if problem:
        raise ValueError(f"{problem}; got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if key_mask is not None:
        _check_mask(key_mask, k)


def _check_mask(key_mask: Tensor, k: Tensor) -> None:
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        given = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise TypeError(f"key_mask must be a bool tensor, True = keep; got {given}")
    expected = (k.shape[0], k.shape[2])
    if key_mask.shape != expected:
        raise ValueError(f"key_mask must have shape (batch, keys) = {expected}; got {tuple(key_mask.shape)}")
    if key_mask.device != k.device:
        raise ValueError(f"key_mask must be on k's device {k.device}; got {key_mask.device}")


def offset_of(q_offset: int) -> int:
    if not isinstance(q_offset, Integral | torch.SymInt) or isinstance(q_offset, bool):
        raise TypeError(
            f"q_offset must be an int, the position of the first query among the keys; got {shown(q_offset)}"
        )
    if q_offset < 0 or (isinstance(q_offset, Integral) and q_offset >= MOST_OFFSET):
        raise ValueError(
            f"q_offset is {q_offset}; the first query's position among the keys must be 0 or more, and less "
            "than 2^62"
        )
    return int(q_offset) if isinstance(q_offset, Integral) else q_offset


def check_causal(causal: bool) -> None:
    if isinstance(causal, Tensor) or causal not in (True, False):
        raise TypeError(f"causal must be True or False; got {shown(causal)}")


def boundaries(cu_seqlens: Tensor, q: Tensor, k: Tensor, q_offset: int) -> Tensor:
    """The boundaries of packed sequences, on the CPU: the one transfer that waits for a device."""
    kinds = (torch.int32, torch.int64)
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in kinds or cu_seqlens.ndim != 1:
        raise TypeError(
            f"cu_seqlens must be a 1-D int32 or int64 tensor of sequence boundaries; got {shown(cu_seqlens)}"
        )
    if q.shape[0] != 1 or q.shape[2] != k.shape[2] or q_offset != 0:
        raise ValueError(
            "cu_seqlens packs sequences into one batch row, with as many queries as keys and q_offset 0; "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, q_offset {q_offset}"
        )
    return cu_seqlens if cu_seqlens.is_meta else cu_seqlens.to("cpu", torch.int64)


def horizon_list(horizon: Horizon, heads: int) -> list[float]:
    """The horizon as a list of one number, or of one per head."""
    if isinstance(horizon, Tensor):
        if horizon.ndim > 1:
            raise ValueError(
                f"horizon must be one number or one per head ({heads}); got shape {tuple(horizon.shape)}"
            )
        horizon = horizon.tolist()
    if _is_number(horizon):
        values = [float(horizon)]
    elif isinstance(horizon, Sequence) and not isinstance(horizon, str):
        if len(horizon) not in (1, heads):
            raise ValueError(
                f"horizon must be one number or one per head ({heads}); got {len(horizon)} numbers"
            )
        if not all(_is_number(h) or (isinstance(h, Tensor) and h.ndim == 0) for h in horizon):
            raise TypeError(f"horizon must be a number, or one per head, as numbers; got {shown(horizon)}")
        values = [float(h) for h in horizon]
    else:
        raise TypeError(f"horizon must be a number, or one per head; got {shown(horizon)}")
    for value in values:
        if not value > 0:
            raise ValueError(f"horizon must be greater than 0; got {value}")
    return values


def check_reach(horizons: Sequence[float], back: int, ahead: int = 0, *, remedy: str = "pass") -> None:
    """Refuse distances beyond the horizon, where the cosine is negative and the normaliser meaningless.

    A key exactly at the horizon has weight 0. Behind the query that is harmless; ahead of it, where
    positions themselves can pass the horizon, float32 cannot tell 0 from a negative weight.
    """
    for value in horizons:
        if back > value or ahead >= value:
            distance = max(back, ahead)
            raise ValueError(
                f"horizon is {value:g}, but positions can lie {distance} apart here; {remedy} a horizon of "
                f"more than {distance} (or math.inf, which drops the cosine)"
            )


def check_eps(eps: float) -> None:
    if not _is_number(eps):
        raise TypeError(f"eps must be a number, the smallest normaliser; got {shown(eps)}")
    if not eps >= LEAST_EPS:
        raise ValueError(f"eps must be at least {LEAST_EPS:g}, the smallest normaliser; got {eps}")


def rate_list(decay: Rates, heads: int) -> list[float]:
    """One rate per head as a list, from one number or one per head."""
    given = decay.tolist() if isinstance(decay, Tensor) and decay.ndim < 2 else decay
    values = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * heads
    if not all(map(_is_number, values)):
        raise TypeError(f"decay must be one rate, or one per head ({heads}), as numbers; got {shown(decay)}")
    if len(values) != heads or not all(0 <= r < math.inf for r in values):
        raise ValueError(
            f"decay must be one rate, or one per head ({heads}), finite and 0 or more; got {given}"
        )
    return [float(r) for r in values]


def rates_of(decay: Rates, q: Tensor, k: Tensor, *, self_attention: bool) -> Tensor:
    """The rates as a tensor (H,) or (B, H, S) in the dtype of sums."""
    (B, H, _, _), S = q.shape, k.shape[2]
    if not isinstance(decay, Tensor):
        numbers, dtype = rate_list(decay, H), sum_dtype(q.dtype)
        if len(set(numbers)) == 1:  # made on the device: a CUDA graph can capture it
            decay = torch.full((H,), numbers[0], dtype=dtype, device=q.device)
        else:
            decay = torch.tensor(numbers, dtype=dtype, device="cpu").to(q.device, non_blocking=True)
    if not decay.is_floating_point():
        raise TypeError(f"decay must be a floating-point tensor of rates; got {shown(decay)}")
    wanted = (B, H, S) if decay.ndim == 3 else (H,)  # comparing with both would tie a graph's batch to H
    if decay.shape != wanted:
        raise ValueError(
            f"decay must have shape (heads,) = {(H,)} or (batch, heads, keys) = {(B, H, S)}; "
            f"got {tuple(decay.shape)}"
        )
    if decay.ndim == 3 and not self_attention:
        raise ValueError(
            "decay with one rate per position needs self-attention (as many queries as keys, q_offset 0)"
        )
    if decay.device != q.device:
        raise ValueError(f"decay must be on q's device {q.device}; got {decay.device}")
    sums = sum_dtype(q.dtype)
    return decay if decay.dtype == sums else decay.to(sums)


def check_horizons(given: Sequence[float] | None, made: Sequence[float] | None) -> None:
    """`made` is the horizon of a state, whose sums mean nothing under another; None if not known."""
    if made is None or given is None or made == given:
        return
    heads = max(len(made), len(given))  # one for all heads equals one per head
    if list(made) * (heads // len(made)) != list(given) * (heads // len(given)):
        now, bound = _numbers(given), _numbers(made)
        raise ValueError(
            f"horizon is {now}, but the state was made with {bound} and is bound to it; "
            f"pass {bound}, or start again, without a state, with {now}"
        )


def check_state(tensor: Tensor, made: Sequence[float] | None, q: Tensor, v: Tensor, call: Call) -> None:
    check_horizons(call.horizons, made)
    expected = call.state_shape(q, v)
    if tensor.shape != expected:
        raise ValueError(
            f"state must have shape (batch, heads, features, value size + 1) = {expected}; "
            f"got {tuple(tensor.shape)}"
        )
    dtype = sum_dtype(q.dtype)
    if tensor.dtype != dtype or tensor.device != q.device:
        raise TypeError(f"state must be {dtype} on {q.device}; got {tensor.dtype} on {tensor.device}")


def readable(x: Tensor) -> bool:
    """Whether its values can be read without waiting for a device."""
    return x.is_cpu


def check_rates(decay: Tensor | None) -> None:
    """Check the values of rates, if they can be read."""
    if decay is not None and decay.numel() and readable(decay):
        least, most = (bound.item() for bound in decay.aminmax())
        if not (0 <= least and most < math.inf):  # also if one is NaN: then both are
            raise ValueError(
                f"decay rates must be finite and 0 or more; those given reach from {least:g} to {most:g}"
            )


def check_boundaries(x: Inputs, call: Call) -> None:
    """Check the boundaries of packed sequences, which are always on the CPU."""
    if x.cu_seqlens is not None:
        cu, length = x.cu_seqlens.tolist(), x.q.shape[2]
        lengths = [b - a for a, b in zip(cu[:-1], cu[1:], strict=True)]
        if not lengths or cu[0] != 0 or cu[-1] != length or min(lengths) < 0:
            raise ValueError(f"cu_seqlens must rise from 0 to the packed length {length}; got {cu}")
        check_reach(call.horizons, max(lengths) - 1)


def _is_number(x: object) -> TypeGuard[float]:
    return isinstance(x, _NUMBERS) and not isinstance(x, bool)


def _numbers(values: Sequence[float]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else f"[{', '.join(f'{x:g}' for x in values)}]"


def shown(x: object) -> str:
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of shape {tuple(x.shape)}"
    plain = x is None or isinstance(x, str | bytes | bool | int | float | list | tuple | dict)
    return f"{type(x).__name__} {x!r}" if plain else f"a {type(x).__name__}"
