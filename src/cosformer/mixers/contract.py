"""The contract of a mixer: what every mechanism offers, what it declares, what is checked for all.

    out         = mixer(q, k, v, x=x, causal=...)       whole sequences
    out, state  = mixer.stream(q, k, v, state, x=x)     the next tokens of a causal stream
    out, state  = mixer.sharded(q, k, v, shard, x=x)    a part of a sequence that several processes hold
    memory      = mixer.absorb(k, v)                    a source that cross attention reads many times ...
    out         = mixer.read(q, memory)                 ... without computing its keys again

q is (B, H, L, D), k (B, Hk, S, D), v (B, Hk, S, E), the output (B, H, L, E). x (B, L, C) is the layer's
input, from which q was projected; only mixers with `reads_input` use it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..ops.checks import check_tensors
from ..ops.fades import grouped, masked
from ..ops.shard import Shard
from .keys import Keys, extend

Admission = bool | str  # True, or the reason why not


def generator(seed: int | None) -> torch.Generator | None:
    """The generator for a mixer's random draws; None, for no seed, is torch's own."""
    return None if seed is None else torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Sizes:
    """What a mixer is made for: heads, their size, the longest sequence, the width C of a layer's input."""

    heads: int
    head_dim: int
    max_length: int
    width: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1; got {value!r}")


class Mixer(nn.Module):
    """A mechanism that mixes values along the sequence. A subclass defines `mix`, and `step` if it streams.

    A mechanism declares what it can do; a request for more raises ValueError with the declared reason. If
    that depends on options, the attribute is set on the instance.
    """

    name: str = ""  # given by @register, or by the name it is built with
    bidirectional: Admission = True  # every query may see every key
    causal: Admission = True  # query i, at position i, sees keys j <= i
    cross: Admission = True  # keys of another sequence, of any length unless the class says otherwise
    streaming: Admission = "it keeps no decode state"
    sharding: Admission = "its tokens must all be in one process"  # sequences that several processes hold
    absorbing: Admission = True  # a source once, for many reads
    left_padding: Admission = True  # models refuse such rows where it would move the pattern
    rope: Admission = True  # rotary positions on q and k
    spe: Admission = True  # stochastic positional encoding of q and k
    unread: tuple[str, ...] = ()  # which of q and k it ignores
    grouped: bool = False  # mix() takes fewer key heads than query heads; else they are repeated first
    reads_input: bool = False  # mix() needs x
    learned_positions: bool = True  # a model around it should add learned positions to its embeddings
    reach: float = math.inf  # the largest distance between two positions
    own_horizon: bool = False  # each call's horizon follows from its lengths
    short_conv: int = 0  # the width of the convolution that it wants in its layer, and ...
    qk_norm: bool = False  # ... whether it wants q and k normed
    layer_type: ClassVar[str] = "linear_attention"  # transformers' name for a layer with this mixer

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads, self.head_dim, self.max_length = sizes.heads, sizes.head_dim, sizes.max_length
        self.width = sizes.width
        self.positions: nn.Module | None = None  # a companion of positions.py, set by build

    # What users call

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, x=None, causal: bool = False, key_mask=None, cu_seqlens=None
    ) -> Tensor:
        """Attend: q (B, H, L, D), k (B, Hk, S, D), v (B, Hk, S, E) -> (B, H, L, E) in q's dtype.

        Query i stands at position i and key j at position j. key_mask is (B, S) bool, True = keep; a masked
        key has no influence, whatever it holds. H must be a multiple of Hk (grouped heads). cu_seqlens are
        the boundaries of sequences packed into one batch row; none sees another.
        """
        self._check(q, k, v, x, key_mask)
        self.refuse(causal=causal, cross=q.shape[2] != k.shape[2])
        if cu_seqlens is not None and key_mask is not None:
            raise ValueError("key_mask with cu_seqlens: packed sequences have no padding; pass one of them")
        if cu_seqlens is not None and q.shape[2]:
            return self.mix_packed(q, k, v, cu_seqlens, x=x, causal=causal)
        if q.shape[2] == 0:  # blocks, segments and maxima need at least one token
            used = sum(t.sum() for t in (k, v, *self.parameters()))  # so that they have gradients, of zero
            return q[..., :1].expand(*q.shape[:3], v.shape[-1]) + used
        q, k, v = self._prepare(q, k, v, key_mask, offset=0)
        return self.mix(q, k, v, x=x, causal=causal, key_mask=key_mask)

    def stream(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any = None, *, x=None, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Causal attention over a stream's next tokens: their output, and the state to pass next time.

        However a stream is cut, its output is that of one causal call over the whole. A state is never
        changed in place.
        """
        self._admit("streaming", "a stream")
        self._check(q, k, v, x, key_mask)
        if q.shape[2] != k.shape[2]:
            told = f"q has length {q.shape[2]} and k has {k.shape[2]}"
            raise ValueError(f"{told}; a stream takes as many queries as keys")
        if q.shape[2] == 0 and state is not None:
            return v.new_empty(*q.shape[:3], v.shape[-1]), state
        q, k, v = self._prepare(q, k, v, key_mask, offset=0 if state is None else state.position)
        return self.step(q, k, v, state, x=x, key_mask=key_mask)

    def sharded(
        self, q: Tensor, k: Tensor, v: Tensor, shard: Shard, *, x=None, causal: bool = False, key_mask=None
    ) -> tuple[Tensor, Any]:
        """`forward` over a sequence of which this process holds a part: this part's output and, if causal and
        not packed, the state of the whole, from which a stream can go on. All processes must call it.
        """
        self._admit("sharding", "one sequence in several processes")
        self._check(q, k, v, x, key_mask)
        self.refuse(causal=causal)
        if shard.places is not None and getattr(self.positions, "kind", None) == "spe":
            raise ValueError(
                f"mixer {self.name!r} draws its positions anew for each packed sequence, which several "
                "processes cannot do; train without packing"
            )
        q, k, v = self._prepare(q, k, v, key_mask, offset=shard.offset)
        return self.mix_sharded(q, k, v, shard, x=x, causal=causal, key_mask=key_mask)

    def absorb(self, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Any:
        """All keys and values of a source, for `read`: as they are, unless a mechanism has a smaller form."""
        self.refuse(cross=True)
        return extend(None, k, v, key_mask)

    def read(self, q: Tensor, memory: Any, *, offset: int = 0) -> Tensor:
        """Cross attention of queries at positions offset, offset + 1, ... over what was absorbed."""
        q, k, v = self._source(q, memory, offset)
        return self.mix(q, k, v, x=None, causal=False, key_mask=memory.key_mask)

    # What a mechanism defines

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *, x, causal: bool, key_mask: Tensor | None) -> Tensor:
        """What `forward` returns. Masked keys and values are 0; key heads are repeated unless `grouped`."""
        raise NotImplementedError(f"{type(self).__name__} must define mix")

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, x, key_mask: Tensor | None
    ) -> tuple[Tensor, Any]:
        """What `stream` returns; arguments are prepared as for `mix`.

        A state is a dataclass of tensors with `position`, the number of tokens seen, and `index_select`.
        """
        raise NotImplementedError(f"{type(self).__name__} declares streaming and must define step")

    def mix_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, x, causal: bool) -> Tensor:
        """Packed sequences, one after the other; a mechanism that can take them at once overrides this."""
        ends, parts = cu_seqlens.tolist(), []
        whole = len(q) == 1 and ends[0] == 0 and ends[-1] == q.shape[2] == k.shape[2]
        if not whole or ends != sorted(ends):
            raise ValueError(
                "cu_seqlens must rise from 0 to the length of the one packed row; "
                f"got {ends} for q {tuple(q.shape)} and k {tuple(k.shape)}"
            )
        sizes = [b - a for a, b in pairwise(ends) if a < b]  # an empty sequence has no output
        # Split, not sliced: the gradient of each slice would be a whole row of zeros.
        inputs: Sequence[Tensor | None] = [None] * len(sizes) if x is None else x.split(sizes, 1)
        rows = zip(inputs, *(t.split(sizes, 2) for t in (q, k, v)), strict=True)
        for own_x, own_q, own_k, own_v in rows:
            prepared = self._prepare(own_q, own_k, own_v, None, offset=0)
            parts.append(self.mix(*prepared, x=own_x, causal=causal, key_mask=None))
        return torch.cat(parts, 2)

    def mix_sharded(self, q: Tensor, k: Tensor, v: Tensor, shard: Shard, *, x, causal: bool, key_mask):
        """What `sharded` returns; arguments are prepared as for `mix`."""
        raise NotImplementedError(f"{type(self).__name__} declares sharding and must define mix_sharded")

    # What all mechanisms share

    def refuse(self, *, causal: bool = False, cross: bool | str = False, absorbing: bool = False) -> None:
        """Raise ValueError with the reason if this mixer does not do what is asked.

        `cross` may be a phrase for the error.
        """
        if cross:
            self._admit("cross", cross if isinstance(cross, str) else "attention to another sequence")
        if absorbing:
            self._admit("absorbing", "the memory of a source")
        if causal:
            self._admit("causal", "causal attention")
        else:
            self._admit("bidirectional", "bidirectional attention")

    def _admit(self, what: str, said: str) -> None:
        if (reason := getattr(self, what)) is not True:
            raise ValueError(f"mixer {self.name!r} does not do {said}: {reason}")

    def _check(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, key_mask: Tensor | None) -> None:
        check_tensors(q, k, v, key_mask)
        if (q.shape[1], q.shape[3]) != (self.heads, self.head_dim):
            raise ValueError(
                f"q must have {self.heads} heads of size {self.head_dim}, as the mixer has; "
                f"got q {tuple(q.shape)}"
            )
        if self.reads_input and (x is None or x.shape != (q.shape[0], q.shape[2], self.width)):
            given = "none" if x is None else f"shape {tuple(x.shape)}"
            raise ValueError(
                f"mixer {self.name!r} reads the layer's input: x must be (batch, length, width) = "
                f"{(q.shape[0], q.shape[2], self.width)}; got {given}"
            )

    def _source(self, q: Tensor, memory: Keys, offset: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and what was absorbed, checked and prepared; its keys stand at 0, 1, ..."""
        self._check(q, memory.k, memory.v, None, memory.key_mask)
        return self._prepare(q, memory.k, memory.v, memory.key_mask, offset=offset, source=True)

    def _prepare(
        self, q, k, v, key_mask, *, offset: int, source: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, v = masked(k, key_mask), masked(v, key_mask)
        if not (self.grouped and self.positions is None):
            k, v = grouped(k, self.heads), grouped(v, self.heads)
        if self.positions is not None:
            q, k = self.positions(q, k, offset=offset, key_offset=0 if source else offset)
        return q, k, v
