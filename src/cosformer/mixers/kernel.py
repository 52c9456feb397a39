"""Kernel mixers: features of q times features of k, at linear cost, all through ops.linear and so through the same backends.

    out_i = sum_j s_ij v_j / sum_j s_ij      s_ij = phi(q_i) . phi(k_j) * cos(pi/2 (i - j) / M) * exp(-rate |i - j|)

    cosformer    phi = relu, horizon M, optional rates      relu          phi = relu, no re-weighting (M infinite)
    identity     phi(x) = x                                 leaky_relu    phi = leaky_relu
    elu          phi(x) = elu(x) + 1

relu, identity and leaky_relu are the cosFormer paper's study of what softmax does (Qin et al., 2022, arXiv:2202.08791). The
last two have weights of both signs, so their normaliser may come near zero or change sign: the core keeps it away from zero on
its own side (`signed`). Clamping it from below, as for the others, would turn every negative sum into eps.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.linear import linear_attention, linear_stream
from . import Admission, Mixer, register


class Kernel(Mixer):
    """Abstract: a mixer of ops.linear. A subclass names its feature map and the core's options."""

    streaming = True
    rope: Admission = (
        "its features are not functions of the dot product, so rotating q and k would not encode distances"
    )
    grouped = True
    horizon: float = math.inf
    relu = False  # ReLU inside the core, where it is free
    signed = False  # weights of both signs

    def phi(self, x: Tensor) -> Tensor:
        """The features of queries and keys alike."""
        return x

    def rates(self) -> Tensor | None:
        """Decay rates (H,)."""
        return None

    def mix(self, q, k, v, *, causal, key_mask):
        return linear_attention(self.phi(q), self.phi(k), v, causal=causal, **self._options(key_mask))

    def step(self, q, k, v, state, *, key_mask):
        return linear_stream(self.phi(q), self.phi(k), v, state, **self._options(key_mask))

    def _options(self, key_mask: Tensor | None) -> dict[str, Any]:
        decay, signed = self.rates(), self.signed
        return {
            "horizon": self.horizon,
            "relu": self.relu,
            "signed": signed,
            "decay": decay,
            "key_mask": key_mask,
        }

    def state_size(self):
        features = self.head_dim * (1 if self.horizon == math.inf else 2)
        return self.heads * features * (self.head_dim + 1)


@register("cosformer")
class Cosformer(Kernel):
    """cosFormer (Qin et al., 2022, arXiv:2202.08791): relu features re-weighted by the cosine of the distance.

    horizon   the distance at which a key stops mattering; None means max_length, math.inf drops the cosine.
    decay     None for the paper's operator; "ladder" for fixed rates, one per head, falling geometrically from 1/4 to
              1/max_length; or a list of one rate per head.
    """

    rope = spe = "its re-weighting is its position encoding"
    relu = True
    decay: Tensor | None

    def __init__(
        self,
        heads: int,
        head_dim: int,
        max_length: int,
        *,
        horizon: float | None = None,
        decay: str | Sequence[float] | None = None,
    ):
        super().__init__(heads, head_dim, max_length)
        self.horizon = float(max_length if horizon is None else horizon)
        self.register_buffer("decay", self._rates_of(decay))

    def _rates_of(self, decay: str | Sequence[float] | None) -> Tensor | None:
        if decay is None:
            return None
        if decay == "ladder":
            return torch.linspace(math.log(1 / 4), math.log(1 / max(4, self.max_length)), self.heads).exp()
        if isinstance(decay, str) or len(decay) != self.heads or min(decay) < 0:
            raise ValueError(
                f'decay must be None, "ladder" or one rate >= 0 per head ({self.heads}); got {decay!r}'
            )
        return torch.tensor([float(rate) for rate in decay])

    def rates(self):
        return self.decay


@register("relu")
class Relu(Kernel):
    """phi = relu without re-weighting: cosFormer's ablation, `cosformer` with an infinite horizon."""

    relu = True


@register("identity")
class Identity(Kernel):
    """phi(x) = x: s_ij = q_i . k_j, row-normalised; neither non-negative nor concentrated."""

    rope = True
    signed = True


@register("leaky_relu")
class LeakyRelu(Kernel):
    """phi = leaky_relu: nearly non-negative, which the paper finds to matter. `slope` is that of the negative side."""

    signed = True

    def __init__(self, heads: int, head_dim: int, max_length: int, *, slope: float = 0.01):
        super().__init__(heads, head_dim, max_length)
        self.slope = slope

    def phi(self, x):
        return F.leaky_relu(x, self.slope)


@register("elu")
class Elu(Kernel):
    """phi(x) = elu(x) + 1: the Linear Transformer (Katharopoulos et al., 2020, arXiv:2006.16236)."""

    def phi(self, x):
        return F.elu(x) + 1
