"""Kernel mixers: features of q times features of k, at linear cost, through ops.linear and its backends.

    out_i = sum_j s_ij v_j / sum_j s_ij
    s_ij  = phi(q_i) . phi(k_j) * cos(pi/2 (i - j) / M) * exp(-|A_i - A_j|)

    cosformer     phi = relu, horizon M, decay
    relu          phi = relu, no re-weighting (M infinite)
    identity      phi(x) = x
    leaky_relu    phi = leaky_relu
    elu           phi(x) = elu(x) + 1

relu, identity and leaky_relu are from the cosFormer paper's study of what softmax does (Qin et al., 2022,
arXiv:2202.08791). The last two have weights of both signs, so their normaliser may come near zero or change
sign: the core keeps its sign and clamps its magnitude (`signed`). Clamping it from below, as for the others,
would turn every negative sum into eps.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..decay import Decay, DecaySpec, span_of
from ..ops.checks import Horizon, check_eps, horizon_list
from ..ops.fades import masked
from ..ops.linear import linear_attention, linear_read, linear_state, linear_stream
from ..ops.operator import check_backend
from ..ops.parallel import linear_sharded
from . import Admission, Mixer, Sizes, register
from .keys import Keys

SHORT_CONV = 4  # tokens; it lets a linear layer recall
OWN_HORIZON = (
    'horizon="length" differs from call to call, and what is kept needs one: give a number, or math.inf'
)


class Kernel(Mixer):
    """Abstract: a mixer on ops.linear. A subclass defines its feature map and the core's options."""

    streaming: Admission = True
    sharding: Admission = True
    rope: Admission = "its features do not depend on the dot product, so turning q and k says no distance"
    grouped = True
    relu = False  # ReLU inside the core, where it is free
    signed = False  # weights of both signs
    eps = 1e-6
    backend: str | None = None

    def phi(self, x: Tensor) -> Tensor:
        """The features of queries and of keys."""
        return x

    def rates(self, x: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
        """Decay rates (H,) or, from the layer's input x, (B, H, L)."""
        return None

    def horizon_of(self, length: int) -> Horizon:
        """The horizon of a call whose longer side has this length."""
        return math.inf

    def mix(self, q, k, v, *, x, causal, key_mask):
        options = self._options(max(q.shape[2], k.shape[2]), v, x, key_mask)
        return linear_attention(self.phi(q), self.phi(k), v, causal=causal, **options)

    def mix_packed(self, q, k, v, cu_seqlens, *, x, causal):
        if self.positions is not None or self.own_horizon:  # each sequence counts from its own beginning
            return super().mix_packed(q, k, v, cu_seqlens, x=x, causal=causal)
        q, k, v = self._prepare(q, k, v, None, offset=0)
        options = self._options(q.shape[2], v, x, None)
        return linear_attention(self.phi(q), self.phi(k), v, causal=causal, cu_seqlens=cu_seqlens, **options)

    def mix_sharded(self, q, k, v, shard, *, x, causal, key_mask):
        if self.own_horizon and shard.places is not None:
            raise ValueError(f"mixer {self.name!r} in several processes: {OWN_HORIZON}")
        options = self._options(shard.total, v, x, key_mask)
        return linear_sharded(self.phi(q), self.phi(k), v, shard, causal=causal, **options)

    def step(self, q, k, v, state, *, x, key_mask):
        options = self._options(q.shape[2], v, x, key_mask)
        return linear_stream(self.phi(q), self.phi(k), v, state, **options)

    def absorb(self, k, v, *, key_mask=None):
        self.refuse(cross=True, absorbing=True)
        if self.positions is not None or self.rates(None, None) is not None:
            return super().absorb(k, v, key_mask=key_mask)  # what a key adds depends on the query
        k, v = masked(k, key_mask), masked(v, key_mask)
        options: dict[str, Any] = {"relu": self.relu, "backend": self.backend}
        options["horizon"] = self.horizon_of(self.max_length)
        return linear_state(self.phi(k), v, heads=self.heads, key_mask=key_mask, **options)

    def read(self, q, memory, *, offset=0):
        if isinstance(memory, Keys):
            q, k, v = self._source(q, memory, offset)
            options = self._options(self.max_length, v, None, memory.key_mask)
            return linear_attention(self.phi(q), self.phi(k), v, q_offset=offset, **options)
        options = {"relu": self.relu, "signed": self.signed, "eps": self.eps, "backend": self.backend}
        options["horizon"] = self.horizon_of(self.max_length)
        return linear_read(self.phi(q), memory, q_offset=offset, **options)

    def _options(self, length: int, v: Tensor, x: Tensor | None, key_mask: Tensor | None) -> dict[str, Any]:
        """The core's arguments; for the one-hot values of `weights` any backend may run."""
        backend = self.backend if v.shape[-1] == self.head_dim else None
        core = {"horizon": self.horizon_of(length), "relu": self.relu, "signed": self.signed, "eps": self.eps}
        return {**core, "backend": backend, "decay": self.rates(x, key_mask), "key_mask": key_mask}


@register("cosformer")
@register("cosformer-ladder", decay="ladder")
@register("cosformer-cosine", horizon=None)
@register("cosformer-paper", decay=None, horizon=None)
class Cosformer(Kernel):
    """cosFormer (Qin et al., 2022, arXiv:2202.08791): relu features, a cosine of the distance, decay.

    A cosine that reaches 0 at the context's length hides its beginning, and beside a learned decay it adds
    nothing: the recommended mixer has none, and so half the state and no limit on length.

    horizon       the distance at which a key stops mattering, a number or one per head; None means
                  max_length, "length" the longer side of each call (not for streams), math.inf no cosine
    decay         as in decay.py: "gated" (recommended), "ladder", rates, or None, the paper's operator
    learn_decay   learn the constant rates
    both_signs    features relu([x, -x]) instead of relu(x): twice as many, and twice the state
    eps, backend  as in `cosformer_attention`
    """

    rope = spe = "its re-weighting is its position encoding"
    relu = True

    def __init__(
        self,
        sizes: Sizes,
        *,
        horizon: Horizon | str | None = math.inf,
        decay: DecaySpec = "gated",
        learn_decay: bool = False,
        both_signs: bool = False,
        eps: float = 1e-6,
        backend: str | None = None,
    ):
        super().__init__(sizes)
        check_eps(eps)
        check_backend(backend)
        if not isinstance(both_signs, bool):
            raise TypeError(f"both_signs must be True or False; got {both_signs!r}")
        self.eps, self.backend, self.both_signs = eps, backend, both_signs
        self.horizon = _horizon(horizon, self)
        horizons = self.horizon or ()
        self.reach = min(horizons, default=math.inf)
        span = span_of(horizons, self.max_length)
        self.decay = Decay(decay, heads=self.heads, span=span, width=self.width, learn=learn_decay)
        self.own_horizon = self.horizon is None
        if self.own_horizon:
            self.streaming = self.absorbing = OWN_HORIZON
        self.reads_input = self.decay.gated
        self.learned_positions = decay is None
        if decay is not None:  # the paper's operator stays as it was published
            self.short_conv, self.qk_norm = SHORT_CONV, True
        if self.decay.gated:
            self.cross = 'decay="gated" reads one rate per position from the queries\' own sequence'

    def phi(self, x):
        return torch.cat([x, -x], -1) if self.both_signs else x

    def rates(self, x, key_mask):
        return self.decay.rates(x, key_mask)

    def horizon_of(self, length):
        return max(length, 1) if self.horizon is None else self.horizon


def _horizon(given: Horizon | str | None, mixer: Mixer) -> tuple[float, ...] | None:
    """The horizons, one or one per head; None where each call has its own."""
    if isinstance(given, str):
        if given != "length":
            raise ValueError(f'horizon must be a number, one per head, None or "length"; got {given!r}')
        return None
    return tuple(horizon_list(mixer.max_length if given is None else given, mixer.heads))


@register("relu")
class Relu(Kernel):
    """phi = relu without re-weighting: cosFormer's ablation, `cosformer-paper` with an infinite horizon."""

    relu = True


@register("identity")
class Identity(Kernel):
    """phi(x) = x: s_ij = q_i . k_j, row-normalised; neither non-negative nor concentrated."""

    rope = True
    signed = True


@register("leaky_relu")
class LeakyRelu(Kernel):
    """phi = leaky_relu, nearly non-negative, which the paper finds to matter; `slope` is for x < 0."""

    signed = True

    def __init__(self, sizes: Sizes, *, slope: float = 0.01):
        super().__init__(sizes)
        self.slope = slope

    def phi(self, x):
        return F.leaky_relu(x, self.slope)


@register("elu")
class Elu(Kernel):
    """phi(x) = elu(x) + 1: the Linear Transformer (Katharopoulos et al., 2020, arXiv:2006.16236)."""

    def phi(self, x):
        return F.elu(x) + 1
