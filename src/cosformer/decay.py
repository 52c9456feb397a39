"""Decay: the rates at which attention heads forget; one vocabulary for operator, mixers, modules and models.

weight_ij *= exp(-|A_i - A_j|)      A: the running sum of the rates (rate * position if constant)

None        no decay, the paper's operator
rates       constants: one number, or one per head
"ladder"    constants, one per head, geometric from 1/4 (a few tokens) down to 1/(16 span): the slowest head
            keeps nearly all of the context
"gated"     ladder_h * exp(w_h . x + b_h), one per head and position, computed from the layer's input x;
            starts as the ladder
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .ops.checks import Rates, rate_list, shown

BEYOND = 16  # spans until the slowest head forgets; with 1, recall is learned late in training
LARGEST_EXPONENT = 20.0  # e^20 / 4 forgets everything; an infinite rate would make the running sum NaN

DecaySpec = Rates | str | None


def ladder(heads: int, span: float) -> list[float]:
    """One rate per head, geometric from 1/4 down to 1/(16 span)."""
    step = math.log(4 / (BEYOND * max(span, 1))) / max(heads - 1, 1)
    return [math.exp(head * step) / 4 for head in range(heads)]


def span_of(horizons: Iterable[float], otherwise: float) -> float:
    """The distance a ladder should span: the largest finite horizon, or `otherwise` if there is none."""
    return max((h for h in horizons if h < math.inf), default=otherwise)


class Gate(nn.Linear):
    """A linear layer initialised to zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Decay(nn.Module):
    """The rates of one layer, made from a `spec` as described above and read with `rates(x)`.

    span     the distance that the slowest head of a ladder remembers
    width    the size of the layer's input, which a gate reads
    learn    learn the constants, as logarithms so that they stay positive
    """

    constant: Tensor | None  # (H,), float32 even if the module is cast

    def __init__(self, spec: DecaySpec, *, heads: int, span: float, width: int, learn: bool = False) -> None:
        super().__init__()
        self.spec, self.gated = spec, isinstance(spec, str) and spec == "gated"
        self._numbers = _numbers(spec, heads, span)
        if learn and (self.gated or self._numbers is None):
            raise ValueError(
                f'learn_decay needs constant rates to start from, numbers or "ladder"; decay is {spec!r}'
            )
        if learn and min(self._numbers or [0.0]) == 0:
            raise ValueError(f"decay must be above 0 if it is learned, since its logarithm is; got {spec}")
        values = None if self._numbers is None else self.start()
        self.register_buffer("constant", None if learn else values, persistent=False)
        self.log_rates = nn.Parameter(values.log()) if learn and values is not None else None
        self.gate = Gate(width, heads) if self.gated else None

    @torch.no_grad()
    def reset_parameters(self, copy: Callable[[Tensor, Tensor], Any] = Tensor.copy_) -> None:
        """Restore the given constants; a gate resets itself. `copy(a, b)` writes b into a."""
        if self.constant is not None:
            copy(self.constant, self.start())
        if self.log_rates is not None:
            copy(self.log_rates, self.start().log())

    def rates(self, x: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor | None:
        """Rates (H,); with a gate (B, H, L), from the layer's input x (B, L, C); None without decay.

        key_mask (B, L), True = keep: masked tokens may hold anything, even NaN, and have rate 0.
        """
        if self.gate is None:
            return self.constant if self.log_rates is None else _precise(self.log_rates).exp()
        if x is None:
            raise ValueError(
                'decay="gated" reads its rates from the layer\'s input; pass x (batch, length, width)'
            )
        if x.ndim != 3 or x.shape[-1] != self.gate.in_features:
            raise ValueError(
                f"x must be (batch, length, {self.gate.in_features}), the layer's input; got {shown(x)}"
            )
        scale = _precise(self.gate(x)).clamp_max(LARGEST_EXPONENT).exp()  # (B, L, H)
        assert self.constant is not None
        rates = (scale * self.constant).transpose(1, 2)
        return rates if key_mask is None else rates.masked_fill(~key_mask[:, None], 0.0)

    def extra_repr(self) -> str:
        return repr(self.spec)

    def start(self, device: torch.device | str | None = None) -> Tensor:
        """The constants (H,) as given."""
        return torch.tensor(self._numbers, dtype=torch.float32, device=device)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        if self.constant is not None:  # a cast would round the rates, to_empty would lose them
            self.constant = self.start(self.constant.device)
        return self


def _precise(x: Tensor) -> Tensor:
    """x in float32, or float64 if it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _numbers(spec: DecaySpec, heads: int, span: float) -> list[float] | None:
    if spec is None:
        return None
    if isinstance(spec, str):
        if spec not in ("ladder", "gated"):
            raise ValueError(
                f'decay must be None, "ladder", "gated", one rate, or one per head ({heads}); got {spec!r}'
            )
        return ladder(heads, span)
    return rate_list(spec, heads)
