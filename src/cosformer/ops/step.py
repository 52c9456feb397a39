"""One token a row through whole blocks of a decoder at once, in place, by the native kernel.

    x = embeddings[ids]                if token ids are given
    x += o(mixed)                      q, k, v = projections of norm(x), convolved; q and k normed
    x += down(silu(gate n) * up n)     n = norm(x) again
    logits = head(norm(x))             if asked for

In torch one token through a block is thirty short calls, whose overhead exceeds their work.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _native, _rows
from .call import theta

MOST_ROWS = 16  # of a batch; for more, torch's matrix products are faster
DTYPES = (torch.float32, torch.bfloat16)  # of parameters, and of the tokens that a convolution keeps


@dataclass(frozen=True)
class Linear:
    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None  # (rows,), in float32, for a weight in int8

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.weight, self.bias, self.scales) if t is not None]

    def is_taken(self, dtype: torch.dtype) -> bool:
        """Whether the kernel can read it beside other parameters of this dtype."""
        scaled = self.scales is not None
        kinds = [torch.int8 if scaled else dtype, *([] if self.bias is None else [dtype])]
        kinds += [torch.float32] if scaled else []
        return all(map(_is_plain, self.tensors(), kinds))

    def packed(self) -> tuple[int, ...]:
        return _at(self.weight), _at(self.bias), _at(self.scales), len(self.weight)


@dataclass(frozen=True)
class Block:
    """The parts of a block that the kernel reads; None for those it does not have."""

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
    rates: Tensor | None = None  # (heads,), times exp(rate_gate(n)) if there is a gate
    rate_gate: Linear | None = None
    largest_exponent: float = 0.0
    output_gate: Linear | None = None
    conv: tuple[Tensor, ...] = ()  # of q, k, v: (channels, width)
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qk_norm_eps: float = 0.0
    softmax: bool = False  # attends over all keys and values, without a state ...
    turns: Tensor | None = None  # ... with rotary positions: radians per position (size / 2,), in float64

    def linears(self) -> tuple[Linear | None, ...]:
        return self.q, self.k, self.v, self.o, self.gate, self.up, self.down, self.rate_gate, self.output_gate

    def others(self) -> list[Tensor]:
        parts = [self.norm, self.mlp_norm, self.q_norm, self.k_norm, *self.conv]
        return [t for t in parts if t is not None]

    def tensors(self) -> list[Tensor]:
        linears = [t for linear in self.linears() if linear is not None for t in linear.tensors()]
        return [*linears, *self.others(), *([] if self.rates is None else [self.rates])]

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    def kept(self, rows: int, position: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what a stream of `rows` rows keeps after `position` tokens: its state, or its
        keys and values; and the last q, k and v."""
        features = 2 * self.size if min(self.horizons) < math.inf else self.size
        states = [((rows, self.heads, features, self.size + 1), torch.float32)]
        if self.softmax:
            states = [((rows, self.heads, position, self.size), self.dtype)] * 2
        return [*states, *(((rows, taps.shape[1] - 1, taps.shape[0]), self.dtype) for taps in self.conv)]

    def is_taken(self) -> bool:
        """Whether the kernel can read these tensors."""
        if self.dtype not in DTYPES or self.size > 256:
            return False
        plain = self.rates is None or _is_plain(self.rates, torch.float32)
        plain = plain and all(_is_plain(t, self.dtype) for t in self.others())
        return plain and all(linear is None or linear.is_taken(self.dtype) for linear in self.linears())


@dataclass(frozen=True)
class Ends:
    """The parts of a language model before and after its blocks."""

    embeddings: Tensor  # (vocabulary, C)
    norm: Tensor
    norm_eps: float
    head: Linear
    positions: Tensor | None = None  # (most, C): learned positions

    def others(self) -> list[Tensor]:
        return [t for t in (self.embeddings, self.positions, self.norm) if t is not None]

    def tensors(self) -> list[Tensor]:
        return [*self.others(), *self.head.tensors()]

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    def is_taken(self) -> bool:
        plain = all(_is_plain(t, self.dtype) for t in self.others())
        return self.dtype in DTYPES and plain and self.head.is_taken(self.dtype)


class Blocks:
    """Consecutive blocks, packed; valid as long as their tensors stay where they are, which `current` says.

    With `ends` a call may begin with token ids and end with logits, even with no block in between.
    """

    def __init__(self, blocks: Sequence[Block], ends: Ends | None = None):
        parts: list[Block | Ends] = [*blocks] if ends is None else [*blocks, ends]
        self._tensors = [t for part in parts for t in part.tensors()]
        self._places, self.dtype = self._now(), (blocks[0] if ends is None else ends).dtype
        cpu = torch.device("cpu")
        self._angles = [
            theta(b.horizons * (b.heads // len(b.horizons)), cpu) if min(b.horizons) < torch.inf else None
            for b in blocks
        ]
        self._packed, self._blocks = b"".join(map(_packed, blocks, self._angles)), list(blocks)
        self._ends = None if ends is None else _packed_ends(ends)

    @property
    def current(self) -> bool:
        return self._now() == self._places

    def _now(self) -> list:  # for every token, so it must be quick; strides and size give the shape
        kinds = [t.dtype for t in self._tensors]
        sizes = (Tensor.data_ptr, Tensor.stride, Tensor.numel)
        return [*(number for of in sizes for number in map(of, self._tensors)), *kinds]

    def parameters(self) -> list[Tensor]:
        """The tensors this reads: keeping the list keeps their memory, even if the model's are replaced."""
        return [t.detach() for t in self._tensors]

    def packed(self, kept: Sequence[tuple[Tensor, ...]]) -> bytes:
        """The addresses of the streams, for `__call__`.

        For each block: its state (B, H, F, E + 1), or for softmax its keys and values (B, H, S, D) with room
        for one more behind them; and the last q, k and v, which its convolution looks back at, (B, width - 1,
        channels) each, contiguous.
        """
        return b"".join(map(_packed_kept, self._blocks, kept))

    def __call__(
        self,
        x: Tensor,
        kept: bytes,
        position: int,
        ids: Tensor | None = None,
        places: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> bool:
        """Update x (B, C), in float32, and the streams in place.

        If ids (B,) are given, x is first made from them, and from places (B,) if positions are learned;
        logits (B, vocabulary), in float32, are filled. False, with the streams unchanged, if there is no row
        for an id or a place.
        """
        ends = self._ends
        count = len(self._blocks)
        return _rows.step(self._packed, kept, count, self.dtype, x, position, ends, ids, places, logits)


def takes(x: Tensor, rows: int) -> bool:
    """Whether the kernel can take `rows` tokens like x now."""
    if not _rows.takes(x) or x.dtype not in DTYPES or rows > MOST_ROWS:
        return False
    return not (torch.is_grad_enabled() or torch._C._is_any_autocast_enabled())


def _is_plain(t: Tensor, dtype: torch.dtype) -> bool:
    return _rows.takes(t, dtypes=(dtype,)) and t.is_contiguous()


def _at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _packed(b: Block, angles: Tensor | None) -> bytes:
    linears = [n for linear in b.linears() for n in ((0, 0, 0, 0) if linear is None else linear.packed())]
    width = b.conv[0].shape[1] if b.conv else 0
    return _native.BLOCK.pack(
        b.heads, b.kv_heads, b.size, len(b.gate.weight), width, b.relu, b.signed, b.softmax,
        b.eps, b.norm_eps, b.qk_norm_eps, b.largest_exponent,
        _at(b.norm), _at(b.mlp_norm), _at(b.q_norm), _at(b.k_norm),
        *linears, *(map(_at, b.conv or (None, None, None))), _at(b.rates), _at(angles), _at(b.turns),
    )  # fmt: skip


def _packed_ends(e: Ends) -> bytes:
    tables = [(0, 0) if t is None else (_at(t), len(t)) for t in (e.embeddings, e.positions)]
    return _native.ENDS.pack(*tables[0], *tables[1], _at(e.norm), e.norm_eps, *e.head.packed())


def _packed_kept(b: Block, tensors: tuple[Tensor, ...]) -> bytes:
    states, last = tensors[: 1 + b.softmax], tensors[1 + b.softmax :] or (None, None, None)
    state = 0 if b.softmax else states[0].data_ptr()
    keys = (*map(Tensor.data_ptr, states), states[0].stride(1) // b.size) if b.softmax else (0, 0, 0)
    return _native.KEPT.pack(state, *map(_at, last), *keys)
