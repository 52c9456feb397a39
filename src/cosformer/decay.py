"""Decay rates for attention heads: the constant ladder, and the gate that scales it by what the layer reads."""

import math

import torch
from torch import Tensor, nn

LARGEST_EXPONENT = (
    20.0  # a rate of e^20 / 4 already forgets everything; an infinite one would turn the running sum into NaN
)


def ladder(heads: int, max_positions: int, *, device: torch.device | None = None) -> Tensor:
    """One rate per head (H,), geometric from 1/4 (a few tokens) down to 1 / max_positions (the whole context)."""
    step = math.log(4 / max_positions) / max(heads - 1, 1)
    return torch.tensor([math.exp(h * step) / 4 for h in range(heads)], device=device)


class DecayGate(nn.Linear):
    """rate_h = ladder_h * exp(w_h . x + b_h): a layer's input (B, L, C) -> rates (B, H, L). Starts as the ladder itself."""

    def __init__(self, size: int, heads: int, *, max_positions: int, device=None, dtype=None):
        super().__init__(size, heads, device=device, dtype=dtype)
        self.max_positions = max_positions

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        scale = super().forward(x).float().clamp_max(LARGEST_EXPONENT).exp()  # (B, L, H)
        return (scale * ladder(self.out_features, self.max_positions, device=x.device)).transpose(1, 2)
