"""What the operators accept: each check names the argument, what was given and what is accepted."""

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Horizon = float | Sequence[float] | Tensor
Rates = float | Sequence[float] | Tensor


def autocasting(x: object) -> bool:
    return (
        isinstance(x, Tensor)
        and torch.amp.is_autocast_available(x.device.type)
        and torch.is_autocast_enabled(x.device.type)
    )


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast q, k and v enter in the autocast dtype, as in scaled_dot_product_attention; sums stay in float32."""
    if not autocasting(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if isinstance(x, Tensor) and x.dtype in DTYPES[1:] else x for x in (q, k, v))
    return q, k, v


def check_tensors(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, heads, length, size); got shape {tuple(x.shape)}"
            )
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
        if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
            given = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
            raise TypeError(f"key_mask must be a bool tensor, True = keep; got {given}")
        if key_mask.shape != (k.shape[0], k.shape[2]):
            raise ValueError(
                f"key_mask must have shape (batch, keys) = {(k.shape[0], k.shape[2])}; got {tuple(key_mask.shape)}"
            )
        if key_mask.device != k.device:
            raise ValueError(f"key_mask must be on k's device {k.device}; got {key_mask.device}")


def check_packed(q: Tensor, k: Tensor, cu_seqlens: Tensor, q_offset: int) -> None:
    if (
        not isinstance(cu_seqlens, Tensor)
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
        or cu_seqlens.ndim != 1
    ):
        raise TypeError(
            f"cu_seqlens must be a 1-D int32 or int64 tensor of sequence boundaries; got {shown(cu_seqlens)}"
        )
    if q.shape[0] != 1 or q.shape[2] != k.shape[2] or q_offset != 0:
        raise ValueError(
            "cu_seqlens packs sequences into one batch row, with as many queries as keys and q_offset 0; "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, q_offset {q_offset}"
        )


def check_boundaries(cu_seqlens: Tensor, length: int, horizons: list[float]) -> Tensor:
    """The boundaries on the CPU, after the checks that need their values."""
    cu = cu_seqlens.to("cpu", torch.int64)
    if len(cu) < 2 or cu[0] != 0 or cu[-1] != length or bool((cu.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must rise from 0 to the packed length {length}; got {cu.tolist()}")
    check_reach(horizons, int(cu.diff().max()) - 1)
    return cu


def horizon_list(horizon: Horizon, heads: int) -> list[float]:
    """The horizon as a list of one number, or of one per head."""
    if isinstance(horizon, Tensor):
        if horizon.ndim > 1:
            raise ValueError(
                f"horizon must be one number or one per head ({heads}); got shape {tuple(horizon.shape)}"
            )
        horizon = horizon.tolist()
    if isinstance(horizon, Sequence) and not isinstance(horizon, str):
        if len(horizon) not in (1, heads):
            raise ValueError(
                f"horizon must be one number or one per head ({heads}); got {len(horizon)} numbers"
            )
        values = [float(h) for h in horizon]
    elif isinstance(horizon, Real | torch.SymInt | torch.SymFloat) and not isinstance(horizon, bool):
        values = [float(horizon)]
    else:
        raise TypeError(f"horizon must be a number, or one per head; got {shown(horizon)}")
    for value in values:
        if not value > 0:
            raise ValueError(f"horizon must be greater than 0; got {value}")
    return values


def check_reach(horizons: list[float], back: int, ahead: int = 0, *, remedy: str = "pass") -> None:
    """Beyond the horizon the cosine is negative and the normaliser meaningless, so such a call has no answer.

    A key exactly at the horizon weighs nothing. Behind the query that is harmless; ahead of it, where positions themselves can
    pass the horizon, float32 cannot tell that nothing from less than nothing.
    """
    for value in horizons:
        if back > value or ahead >= value:
            distance = max(back, ahead)
            raise ValueError(
                f"horizon is {value:g}, but positions can lie {distance} apart here; {remedy} a horizon of more than {distance} "
                "(or math.inf, which drops the cosine)"
            )


def check_eps(eps: float) -> None:
    if not eps > 0:
        raise ValueError(f"eps must be greater than 0, the smallest normaliser; got {eps}")


def rate_list(decay: Rates, heads: int) -> list[float]:
    """One rate per head as a list, from one number or one per head."""
    given = decay.tolist() if isinstance(decay, Tensor) and decay.ndim < 2 else decay
    values = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * heads
    if not all(isinstance(r, Real | torch.SymFloat) and not isinstance(r, bool) for r in values):
        raise TypeError(f"decay must be one rate, or one per head ({heads}), as numbers; got {shown(decay)}")
    if len(values) != heads or not all(0 <= r < math.inf for r in values):
        raise ValueError(
            f"decay must be one rate, or one per head ({heads}), finite and 0 or more; got {given}"
        )
    return [float(r) for r in values]


def rates_of(decay: Rates | None, q: Tensor, k: Tensor, *, self_attention: bool) -> Tensor | None:
    if decay is None:
        return None
    (B, H, _, _), S = q.shape, k.shape[2]
    if not isinstance(decay, Tensor):
        decay = torch.tensor(rate_list(decay, H), dtype=torch.float64, device=q.device)
    if not decay.is_floating_point():
        raise TypeError(f"decay must be a floating-point tensor of rates; got {shown(decay)}")
    if decay.shape != (H,) and decay.shape != (B, H, S):
        raise ValueError(
            f"decay must have shape (heads,) = {(H,)} or (batch, heads, keys) = {(B, H, S)}; got {tuple(decay.shape)}"
        )
    if decay.ndim == 3 and not self_attention:
        raise ValueError(
            "decay with one rate per position needs self-attention (as many queries as keys, q_offset 0)"
        )
    if decay.device != q.device:
        raise ValueError(f"decay must be on q's device {q.device}; got {decay.device}")
    return decay.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def check_rate_values(decay: Tensor) -> None:
    if not bool(((decay >= 0) & (decay < math.inf)).all()):
        least, most = decay.min().item(), decay.max().item()
        raise ValueError(
            f"decay rates must be finite and 0 or more; those given reach from {least:g} to {most:g}"
        )


def check_state(tensor: Tensor, q: Tensor, v: Tensor, horizons: list[float]) -> None:
    expected = state_shape(q, v, horizons)
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"state must have shape (batch, heads, features, value size + 1) = {expected}; got {tuple(tensor.shape)}"
        )
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if tensor.dtype != dtype or tensor.device != q.device:
        raise TypeError(f"state must be {dtype} on {q.device}; got {tensor.dtype} on {tensor.device}")


def check_state_horizons(made: Sequence[float] | None, horizons: list[float]) -> None:
    """A state's sums hold the cosine of the horizon it was made with; under another they mean nothing. None is not known."""
    if made is None:
        return
    heads = max(len(made), len(horizons))
    if list(made) * (heads // len(made)) != horizons * (
        heads // len(horizons)
    ):  # one for all is the same as one per head
        raise ValueError(
            f"horizon is {_numbers(horizons)}, but the state was made with {_numbers(made)} and is bound to it; "
            f"pass {_numbers(made)}, or start again, without a state, with {_numbers(horizons)}"
        )


def _numbers(values: Sequence[float]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else f"[{', '.join(f'{x:g}' for x in values)}]"


def state_shape(q: Tensor, v: Tensor, horizons: list[float]) -> tuple[int, int, int, int]:
    return q.shape[0], q.shape[1], q.shape[3] * (1 if no_cosine(horizons) else 2), v.shape[3] + 1


def no_cosine(horizons: Sequence[float]) -> bool:
    return all(h == math.inf for h in horizons)


def shown(x: object) -> str:
    return (
        f"a {x.dtype} tensor of shape {tuple(x.shape)}"
        if isinstance(x, Tensor)
        else f"{type(x).__name__} {x!r}"
    )
