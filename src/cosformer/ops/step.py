"""One token a row through whole blocks of a decoder at once, in place, by the native kernel.

    x += o(mixed)                      q, k, v = projections of norm(x), convolved; q and k normed
    x += down(silu(gate n) * up n)     n = norm(x) again

A block written in torch is thirty short calls for one token, and their overhead is longer than their work.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _native, _rows
from .call import theta

MOST_ROWS = 16  # of a batch: for more of them torch's products are the better ones
DTYPES = (torch.float32, torch.bfloat16)  # of parameters, and of the tokens that a convolution keeps


@dataclass(frozen=True)
class Linear:
    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Block:
    """What the kernel reads of a block; None for what it does not have."""

    heads: int
    kv_heads: int
    size: int  # of a head
    norm: Tensor
    mlp_norm: Tensor
    norm_eps: float
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    gate: Linear
    up: Linear
    down: Linear
    horizons: tuple[float, ...]
    relu: bool
    signed: bool
    eps: float
    rates: Tensor | None = None  # (heads,), times exp(rate_gate(n)) where that gate is
    rate_gate: Linear | None = None
    largest_exponent: float = 0.0
    output_gate: Linear | None = None
    conv: tuple[Tensor, ...] = ()  # of q, k, v: (channels, width)
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qk_norm_eps: float = 0.0

    def linears(self) -> tuple[Linear | None, ...]:
        return self.q, self.k, self.v, self.o, self.gate, self.up, self.down, self.rate_gate, self.output_gate

    def tensors(self) -> list[Tensor]:
        parts = [t for linear in self.linears() if linear is not None for t in (linear.weight, linear.bias)]
        parts += [self.norm, self.mlp_norm, self.q_norm, self.k_norm, *self.conv, self.rates]
        return [t for t in parts if t is not None]

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    def kept(self, rows: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what a stream of so many rows keeps: its state, and the last of q, k and v."""
        features = 2 * self.size if min(self.horizons) < math.inf else self.size
        state = (rows, self.heads, features, self.size + 1), torch.float32
        return [state, *(((rows, taps.shape[1] - 1, taps.shape[0]), self.dtype) for taps in self.conv)]

    def is_taken(self) -> bool:
        """Whether the kernel reads such tensors."""
        if self.dtype not in DTYPES or self.size > 256:
            return False
        kinds = ((t, torch.float32 if t is self.rates else self.dtype) for t in self.tensors())
        return all(_rows.takes(t) and t.dtype == dtype and t.is_contiguous() for t, dtype in kinds)


class Blocks:
    """Consecutive blocks, packed: good as long as their tensors stay where they are, which `current` says."""

    def __init__(self, blocks: Sequence[Block]):
        self._tensors = [t for block in blocks for t in block.tensors()]
        self._places, self.dtype = self._now(), blocks[0].dtype
        cpu = torch.device("cpu")
        self._angles = [
            theta(b.horizons * (b.heads // len(b.horizons)), cpu) if min(b.horizons) < torch.inf else None
            for b in blocks
        ]
        self._packed = b"".join(map(_packed, blocks, self._angles))

    @property
    def current(self) -> bool:
        return self._now() == self._places

    def _now(self) -> list:  # for every token, so by the quickest way
        kinds = [t.dtype for t in self._tensors]
        return [*map(Tensor.data_ptr, self._tensors), *map(Tensor.stride, self._tensors), *kinds]

    def __call__(self, x: Tensor, kept: Sequence[tuple[Tensor, ...]], position: int) -> None:
        """x (B, C) in float32 and, for each block, its state (B, H, F, E + 1) and the last q, k and v that
        its convolution looks back at, (B, width - 1, channels) each: all contiguous, and changed in place."""
        places = [t.data_ptr() for tensors in kept for t in (*tensors, *(x,) * (4 - len(tensors)))]
        packed_places = struct.pack(f"={len(places)}q", *places)
        _rows.step(self._packed, packed_places, len(kept), self.dtype, x, position)


def takes(x: Tensor) -> bool:
    """Whether the kernel takes the tokens x (B, C) now."""
    if not _rows.takes(x) or x.dtype not in DTYPES or x.shape[0] > MOST_ROWS:
        return False
    return not (torch.is_grad_enabled() or torch._C._is_any_autocast_enabled())


def _at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _packed(b: Block, angles: Tensor | None) -> bytes:
    linears = [
        number
        for linear in b.linears()
        for number in (
            (0, 0, 0) if linear is None else (_at(linear.weight), _at(linear.bias), len(linear.weight))
        )
    ]
    width = b.conv[0].shape[1] if b.conv else 0
    return _native.BLOCK.pack(
        b.heads, b.kv_heads, b.size, len(b.gate.weight), width, b.relu, b.signed,
        b.eps, b.norm_eps, b.qk_norm_eps, b.largest_exponent,
        _at(b.norm), _at(b.mlp_norm), _at(b.q_norm), _at(b.k_norm),
        *linears, *(map(_at, b.conv or (None, None, None))), _at(b.rates), _at(angles),
    )  # fmt: skip
