"""Positional companions, after a + in a mixer's name: changes of q and k that make q . k tell the distance.

    rope        q_m . k_n -> (R_m q_m) . (R_n k_n) = q_m . R_(n-m) k_n
    sine_spe    q_m . k_n -> E = sum_d q_md k_nd P_d(m - n),   P_d(t) = sum_s a_ds^2 cos(2 pi f_ds t + b_ds)
    conv_spe    the same with P_d(t) = sum_p x_d(p) y_d(p - t) for filters x, y

Rotary positions are by Su et al. (2021, arXiv:2104.09864), stochastic positional encoding (SPE) by Liutkus et
al. (2021, arXiv:2105.08399). SPE gives each position a random vector with that covariance, so q and k stay
separate factors and linear mixers can use it. One draw is exact only on average: its error falls with
the square root of the number of realisations, here head_dim, so that shapes stay the same.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import modes
from .contract import generator


def companion(name: str) -> "type[Rope | SineSPE | ConvSPE]":
    """The class of a companion by name."""
    known: dict[str, Any] = {"rope": Rope, "sine_spe": SineSPE, "conv_spe": ConvSPE}
    if name not in known:
        raise ValueError(f"positions {name!r} is unknown; one of {', '.join(known)}, or None")
    return known[name]


class Rope(nn.Module):
    """Rotary positions: the pair (x_i, x_(i + D/2)) is turned by position * base^(-2i/D)."""

    kind = "rope"

    def __init__(self, heads: int, head_dim: int, max_length: int, *, base: float = 10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rope, which turns pairs; got {head_dim}")
        self.base = base

    def forward(self, q: Tensor, k: Tensor, *, offset: int = 0, key_offset: int = 0) -> tuple[Tensor, Tensor]:
        return self.turn(q, offset), self.turn(k, key_offset)

    def turn(self, x: Tensor, offset: int = 0) -> Tensor:
        """x (..., N, D) with its first row at position `offset`."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = _tables(x.shape[-1], self.base, offset, x.shape[-2], dtype, x.device)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


def _tables(*of) -> tuple[Tensor, Tensor]:
    """Cosine and sine (count, size / 2) of the angles from position start on; cached in eager mode."""
    return _angles(*of) if modes.tracing() else _kept_angles(*of)


@torch.inference_mode(False)  # a cached table may be used under autograd next
def _angles(size: int, base: float, start: int, count: int, dtype: torch.dtype, device: torch.device):
    at = torch.arange(start, start + count, dtype=torch.float64, device="cpu")
    angle = at[:, None] * speeds(size, base)  # float64: exact at any position
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def speeds(size: int, base: float) -> Tensor:
    """How far each pair turns per position, in radians: (size / 2,) in float64."""
    return base ** (-torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size)


_kept_angles = lru_cache(maxsize=16)(_angles)  # the same for every layer of a model


class SineSPE(nn.Module):
    """SPE by sines with learned frequencies f, offsets b and gains a, per head and dimension.

        q_m -> sum_d q_md Q_d(m)      z, z' ~ N(0, I_R)
        Q_d(m) = sum_s a_ds (cos(2 pi f_ds m + b_ds) z_ds + sin(2 pi f_ds m + b_ds) z'_ds) / sqrt(R)

    and the same for k without the offsets b.
    """

    kind = "spe"
    noise: Tensor

    def __init__(self, heads: int, head_dim: int, max_length: int, *, sines: int = 5, seed: int = 0):
        super().__init__()
        # Initial periods from 4 to 4 max_length positions; gains so that P_d(0) = 1 without offsets.
        frequency = torch.linspace(math.log(1 / 4), -math.log(4 * max_length), sines).exp()
        self.frequency = nn.Parameter(frequency.expand(heads, head_dim, sines).clone())
        self.offset = nn.Parameter(torch.zeros(heads, head_dim, sines))
        self.gain = nn.Parameter(torch.full((heads, head_dim, sines), sines**-0.5))
        self.register_buffer("noise", torch.empty(heads, head_dim, sines, 2, head_dim))
        self.redraw(seed)

    def redraw(self, seed: int | None = None) -> None:
        """Draw new noise, from `seed` or from torch's own generator."""
        self.noise.copy_(torch.randn(self.noise.shape, generator=generator(seed)))

    def forward(self, q: Tensor, k: Tensor, *, offset: int = 0, key_offset: int = 0) -> tuple[Tensor, Tensor]:
        none = torch.zeros_like(self.offset)
        return self._encode(q, offset, self.offset), self._encode(k, key_offset, none)

    def _encode(self, x: Tensor, start: int, shift: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        at = torch.arange(start, start + x.shape[2], dtype=torch.float64, device=x.device)[:, None, None]
        angle = 2 * math.pi * self.frequency.double()[:, None] * at + shift.double()[:, None]
        angle = angle.to(dtype)  # (H, N, D, sines)
        wave = torch.stack([angle.cos(), angle.sin()], -1) * self.gain.to(dtype)[:, None, :, :, None]
        noise = self.noise.to(dtype) / math.sqrt(x.shape[-1])  # not expanded over positions; x is:
        spread = x.to(dtype)[..., None, None] * wave  # (B, H, N, D, sines, 2)
        return (spread.flatten(3) @ noise.flatten(1, 3)).to(x.dtype)


class ConvSPE(nn.Module):
    """SPE by convolution: white noise along the positions, through learned filters x and y.

    q_m becomes sum_d q_md Q_d(m), with Q_d(m) = sum_p x_d(p) z_d(m - p) / sqrt(R), and k likewise with y;
    distances beyond the filters have no covariance. The noise (max_length, D, R) is shared by the heads and
    regenerated from its seed; only the seed is saved.
    """

    kind = "spe"
    seed: Tensor

    def __init__(self, heads: int, head_dim: int, max_length: int, *, taps: int = 16, seed: int = 0):
        super().__init__()
        decay = torch.linspace(0, -3, taps).exp()  # at first nearer positions are more alike
        self.query_filter = nn.Parameter((decay / decay.norm()).expand(heads, head_dim, taps).clone())
        self.key_filter = nn.Parameter(self.query_filter.detach().clone())
        self.max_length, self.taps = max_length, taps
        self.register_buffer("seed", torch.tensor(seed))

    def redraw(self, seed: int | None = None) -> None:
        """Draw new noise, from `seed` or from torch's own generator."""
        self.seed.copy_(torch.randint(2**31, ()) if seed is None else torch.tensor(seed))

    def forward(self, q: Tensor, k: Tensor, *, offset: int = 0, key_offset: int = 0) -> tuple[Tensor, Tensor]:
        return self._encode(q, offset, self.query_filter), self._encode(k, key_offset, self.key_filter)

    def _encode(self, x: Tensor, start: int, taps: Tensor) -> Tensor:
        N, D = x.shape[2:]
        if start + N > self.max_length:
            raise ValueError(
                f"conv_spe has noise for max_length = {self.max_length} positions; "
                f"got positions up to {start + N}"
            )
        dtype = torch.promote_types(x.dtype, torch.float32)
        rows = self.max_length + self.taps - 1  # position p has row p + taps - 1
        noise = torch.randn(rows, D, D, generator=generator(int(self.seed)))
        noise = noise[start : start + N + self.taps - 1].to(x.device, dtype) / math.sqrt(D)
        out = torch.zeros_like(x, dtype=dtype)
        for p in range(self.taps):  # one tap at a time: the filtered noise (H, N, D, R) is never held
            near = noise[self.taps - 1 - p : self.taps - 1 - p + N]
            out = out + torch.einsum("bhnd,ndr->bhnr", x.to(dtype) * taps[:, None, :, p].to(dtype), near)
        return out.to(x.dtype)
