"""cosFormer attention: ReLU features re-weighted by the cosine of the distance, at linear cost.

out_i = sum_j s_ij v_j / sum_j s_ij        s_ij = relu(q_i) . relu(k_j) * cos(pi/2 * (i - j) / M)
"""

from torch import Tensor

from .checks import Horizon, Rates
from .linear import State, linear_attention, linear_stream


def cosformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    horizon: Horizon | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    q_offset: int = 0,
    decay: Rates | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """cosFormer attention: q (B, H, L, D), k (B, Hk, S, D), v (B, Hk, S, E) -> (B, H, L, E) in q's dtype.

    H must be a multiple of Hk (grouped heads). Query i stands at position `q_offset + i`, key j at j.

    horizon     the distance at which a key stops mattering: a number, or one per head. `None` means
                max(L, S), so the result then depends on the length of the call; give a number wherever
                prefixes, chunks or padded batches must agree. `math.inf` drops the cosine.
    causal      a query sees the keys at its own position and before.
    key_mask    (B, S) bool, True = keep.
    cu_seqlens  boundaries (0, n1, n1 + n2, ...) of sequences packed into one batch row; none sees another.
    decay       rates >= 0: a number, one per head (H,), or in self-attention a tensor (B, H, S), one per
                head and position. Weights are multiplied by exp(-|A_i - A_j|), where A is the running
                sum of the rates (rate * position if constant).
    eps         the smallest normaliser; a query with nothing to attend to gives zeros.
    backend     None for the best that supports the call, or a name: it runs, or raises with the reason.

    >>> q, k, v = (torch.randn(2, 8, 1000, 64) for _ in range(3))
    >>> cosformer_attention(q, k, v, causal=True, horizon=4096).shape
    torch.Size([2, 8, 1000, 64])
    """
    if horizon is None:
        if cu_seqlens is not None:
            raise ValueError(
                "horizon=None has no meaning for packed sequences (cu_seqlens); pass a number for all of them"
            )
        horizon = _longest(q, k)
    return linear_attention(
        q,
        k,
        v,
        horizon=horizon,
        relu=True,
        causal=causal,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        q_offset=q_offset,
        decay=decay,
        eps=eps,
        backend=backend,
    )


def cosformer_stream(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None = None,
    *,
    horizon: Horizon,
    key_mask: Tensor | None = None,
    decay: Rates | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Causal cosFormer attention over the next tokens of a stream: their output, and the state after them.

    Start with `state=None`, then pass the last state returned, with one token or many at a time; however the
    stream is cut, the output is that of `cosformer_attention(..., causal=True)` over the whole. `horizon`
    must be given, since the length is not known, and bounds the stream unless it is `math.inf`.
    """
    if horizon is None:
        raise ValueError(
            "horizon=None has no meaning for a stream, whose length is not known; pass a number, or math.inf"
        )
    return linear_stream(
        q,
        k,
        v,
        state,
        horizon=horizon,
        relu=True,
        key_mask=key_mask,
        decay=decay,
        eps=eps,
        backend=backend,
    )


def _longest(q: Tensor, k: Tensor) -> int:
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.ndim == k.ndim == 4):
        return 1  # the checks to come raise the error
    return max(q.shape[2], k.shape[2], 1)
