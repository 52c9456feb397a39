"""Random-feature mixers: softmax's kernel as the mean of a product of random features, at linear cost.

    performer    exp(x . y) = E_w[ exp(w.x - |x|^2/2) exp(w.y - |y|^2/2) ]                  w ~ N(0, I)
    rfa          exp(-s^2 |x - y|^2 / 2) = E_w[ sin(w.x) sin(w.y) + cos(w.x) cos(w.y) ]     w ~ N(0, s^2 I)

performer's features are positive; rfa's are of directions, |x| = |y| = 1.

The draws are buffers: drawn from the option `seed`, saved with the module, and replaced by `redraw`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.linear import State, linear_attention, linear_stream
from . import Mixer, Sizes, register
from .contract import generator
from .keys import all_kept

TINY = 1e-20  # the smallest normaliser of positive features, whose sums may be tiny but meaningful


def orthogonal(rows: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """(rows, size) Gaussian vectors, orthogonal within each block of `size`; each alone is N(0, I)."""
    blocks = []
    for _ in range(-(-rows // size)):
        basis, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
        blocks.append((basis * r.diagonal().sign()).T)  # without r's signs directions would not be uniform
    lengths = torch.randn(rows, size, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    return (torch.cat(blocks)[:rows] * lengths).float()


@dataclass(frozen=True)
class Shifted:
    """A state whose sums are scaled by exp(-shift); shift (B, Hk, 1) is the largest exponent seen so far."""

    state: State
    shift: Tensor

    @property
    def position(self) -> int:
        return self.state.position

    def index_select(self, index: Tensor) -> "Shifted":
        """The state with batch rows chosen by `index`, as `State.index_select`."""
        return Shifted(self.state.index_select(index), self.shift.index_select(0, index))


@register("performer")
class Performer(Mixer):
    """Performer, FAVOR+ (Choromanski et al., 2021, arXiv:2009.14794): softmax by positive features.

        s_ij = phi(q_i) . phi(k_j)      phi(x) = exp(W y - |y|^2 / 2) / sqrt(F)      y = x / D^(1/4)

    Exponents are shifted so that nothing overflows. A query's own maximum cancels in its row. The keys' shift
    must be the same for all keys a query sees: their maximum or, if causal, the running maximum m_i, so that
    no later key can make an earlier row underflow. exp(-(m_i - m_j)) between key and query is
    the core's decay with rates m_t - m_(t-1), so this is exact.
    """

    streaming = True
    grouped = True
    projection: Tensor

    def __init__(self, sizes: Sizes, *, features: int = 256, seed: int = 0):
        super().__init__(sizes)
        if features < 1:
            raise ValueError(f"features must be at least 1; got {features}")
        self.register_buffer("projection", torch.empty(features, sizes.head_dim))  # one draw for all heads
        self.redraw(seed)

    def redraw(self, seed: int | None = None) -> None:
        """Draw new features, from `seed` or from torch's own generator."""
        rows, size = self.projection.shape
        self.projection.copy_(orthogonal(rows, size, generator(seed)))

    def exponents(self, x: Tensor) -> Tensor:
        """log of sqrt(F) phi(x), (..., F), in float32 or better."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        y = x.to(dtype) * self.head_dim**-0.25
        return y @ self.projection.to(dtype).mT - y.square().sum(-1, keepdim=True) / 2

    def mix(self, q, k, v, *, x, causal, key_mask):
        if causal:
            k, v, key_mask = _aligned(q.shape[2], k, v, key_mask)
            k, rates, _ = self._running(k, key_mask, None)
            options: dict[str, Any] = {"causal": True, "decay": rates}
        else:
            e = self._key_exponents(k, key_mask)
            top = F.pad(e.detach(), (0, 0, 0, 1), value=-math.inf).amax(
                (-2, -1), keepdim=True
            )  # of no keys, too
            k, options = torch.exp(e - top.masked_fill(top.isinf(), 0)), {}
        options |= {"key_mask": key_mask, "eps": TINY}
        return linear_attention(self._queries(q), k, v.to(k.dtype), **options).to(v.dtype)

    def step(self, q, k, v, state, *, x, key_mask):
        k, rates, shift = self._running(k, key_mask, None if state is None else state.shift)
        options = {"key_mask": key_mask, "decay": rates, "eps": TINY}
        before = None if state is None else state.state
        out, after = linear_stream(self._queries(q), k, v.to(k.dtype), before, **options)
        return out.to(v.dtype), Shifted(after, shift)

    def _queries(self, q: Tensor) -> Tensor:
        e = self.exponents(q)
        return torch.exp(e - e.detach().amax(-1, keepdim=True))

    def _key_exponents(self, k: Tensor, key_mask: Tensor | None) -> Tensor:
        e = self.exponents(k)
        return e if key_mask is None else e.masked_fill(~key_mask[:, None, :, None], -math.inf)

    def _running(
        self, k: Tensor, key_mask: Tensor | None, before: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The keys' features relative to the running maximum m, the rates m_t - m_(t-1) per query head, and
        the last m.

        Before the first unmasked key there is nothing to scale, and m is that key's (0 if there is none).
        """
        e = self._key_exponents(k, key_mask)
        top = e.detach().amax(-1)  # (B, Hk, S)
        before = top.new_full((*top.shape[:2], 1), -math.inf) if before is None else before
        m = torch.cat([before, top], -1).cummax(-1).values
        first = m.masked_fill(m.isinf(), math.inf).amin(-1, keepdim=True)
        filled = torch.where(m.isinf(), first.masked_fill(first.isinf(), 0), m)
        rates = filled.diff(dim=-1).repeat_interleave(self.heads // k.shape[1], 1)
        return torch.exp(e - filled[..., 1:, None]), rates, m[..., -1:]


@register("rfa")
class RandomFeatureAttention(Mixer):
    """Random Feature Attention (Peng et al., 2021, arXiv:2103.02143): softmax of directions, or gated.

        s_ij = phi(q_i) . phi(k_j)      phi(x) = [sin(W y), cos(W y)] / sqrt(F)
        y    = sigma * x / |x|          W ~ N(0, I)

    sigma, one number per head and dimension, is learned from the option's value. Sums may be negative by
    chance, so the normaliser keeps its sign and its magnitude is clamped. With `gate`, which is causal,

        [S_t, z_t] = g_t [S_(t-1), z_(t-1)] + (1 - g_t) phi(k_t) [v_t, 1]^T        g_t = sigmoid(w . k_t + b)

    which is the core's decay with rates -log g_t and keys scaled by 1 - g_t. The paper's gate reads the
    layer's input; this one reads the head's key. b starts at 2: g = 0.88, a memory of about eight tokens.
    """

    streaming = True
    projection: Tensor

    def __init__(
        self, sizes: Sizes, *, features: int = 64, sigma: float = 1.0, gate: bool = False, seed: int = 0
    ):
        super().__init__(sizes)
        if features < 1:
            raise ValueError(f"features must be at least 1; got {features}")
        if not sigma > 0:
            raise ValueError(f"sigma must be greater than 0; got {sigma}")
        H, D = sizes.heads, sizes.head_dim
        self.sigma = nn.Parameter(torch.full((H, 1, D), float(sigma)))
        self.gate_weight = nn.Parameter(torch.zeros(H, 1, D)) if gate else None
        self.gate_bias = nn.Parameter(torch.full((H, 1), 2.0)) if gate else None
        if gate:
            self.bidirectional = "with gate=True it is a recurrence over the past"
        self.register_buffer("projection", torch.empty(features, sizes.head_dim))  # one draw for all heads
        self.redraw(seed)

    def redraw(self, seed: int | None = None) -> None:
        """Draw new features, from `seed` or from torch's own generator."""
        self.projection.copy_(torch.randn(self.projection.shape, generator=generator(seed)))

    def phi(self, x: Tensor) -> Tensor:
        """The features (..., 2 F) in float32 or better."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        angle = (F.normalize(x.to(dtype), dim=-1) * self.sigma.to(dtype)) @ self.projection.to(dtype).mT
        return torch.cat([angle.sin(), angle.cos()], -1) / math.sqrt(len(self.projection))

    def mix(self, q, k, v, *, x, causal, key_mask):
        if causal:
            k, v, key_mask = _aligned(q.shape[2], k, v, key_mask)
        k, rates = self._gated(k)
        options = {"causal": causal, "key_mask": key_mask, "decay": rates}
        return linear_attention(self.phi(q), k, v.to(k.dtype), signed=True, **options).to(v.dtype)

    def step(self, q, k, v, state, *, x, key_mask):
        k, rates = self._gated(k)
        options = {"signed": True, "key_mask": key_mask, "decay": rates}
        out, state = linear_stream(self.phi(q), k, v.to(k.dtype), state, **options)
        return out.to(v.dtype), state

    def _gated(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        phi = self.phi(k)
        if self.gate_weight is None or self.gate_bias is None:
            return phi, None
        weight, bias = self.gate_weight.to(phi.dtype), self.gate_bias.to(phi.dtype)
        logit = (k.to(phi.dtype) * weight).sum(-1) + bias  # of g
        return phi * torch.sigmoid(-logit).unsqueeze(-1), F.softplus(-logit)  # 1 - g, and -log g


def _aligned(
    length: int, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As many keys as queries, as rates per position need: unseen keys are cut, masked ones added."""
    k, v, key_mask = k[:, :, :length], v[:, :, :length], None if key_mask is None else key_mask[:, :length]
    if missing := length - k.shape[2]:
        key_mask = F.pad(all_kept(k, key_mask), (0, missing))
        k, v = (F.pad(t, (0, 0, 0, missing)) for t in (k, v))
    return k, v, key_mask
