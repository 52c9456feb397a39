"""Sparse mixers: softmax over a pattern of keys fixed by position, computed block by block.

    local      |i - j| <= w, or either of i, j global                 Longformer
    sparse     strided: |i - j| <= l or (i - j) mod l = 0             Sparse Transformer
               fixed:   i, j in one block of l, or j mod l >= l - c
    bigbird    blocks: neighbours, global ones, a few random ones     BigBird

Causal adds j <= i. Patterns count positions from the first token, so padding belongs on the right.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import Mixer, Sizes, register
from .blocks import attend, join, kept, merge, places, split, take
from .contract import generator
from .keys import extend

ONE_SEQUENCE = "its pattern is laid out on the positions of one sequence"
FROM_THE_FIRST = "its pattern is laid out from the first place of a row"


@register("local")
class Local(Mixer):
    """Longformer (Beltagy et al., 2020, arXiv:2004.05150): `window` keys on each side, O(N window).

    The first `globals` tokens see and are seen by all. Longformer gives them projections of their own; a
    mixer has none, so here they share those of the other tokens.
    """

    cross = ONE_SEQUENCE
    streaming = True
    layer_type = "sliding_attention"

    def __init__(self, sizes: Sizes, *, window: int = 256, globals: int = 0):
        super().__init__(sizes)
        for name, count in (("window", window), ("globals", globals)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ValueError(f"{name} must be an int of 0 or more; got {count!r}")
        self.window, self.globals = window, globals
        if globals:
            self.left_padding = FROM_THE_FIRST

    def mix(self, q, k, v, *, x, causal, key_mask):
        L = q.shape[2]
        C = max(1, min(self.window, L))  # a block's window then lies in the block and its neighbours
        rows, inside = split(q, C), kept(k, key_mask, C)
        i = torch.arange(rows.shape[2] * C, device=q.device).view(-1, C, 1)

        def wanted(lag, j):
            return (lag.abs() <= self.window) & (j >= self.globals)

        parts = [_near(rows, split(k, C), split(v, C), inside, i, causal, wanted)]
        if g := min(self.globals, L):
            j = torch.arange(g, device=q.device).view(1, 1, 1, g)
            allowed = _past(_keys(key_mask, g, q), i, j, causal)
            parts.append(attend(rows, k[:, :, None, :g], v[:, :, None, :g], allowed))
        out = join(merge(*parts), L)
        if g and not causal:  # if causal, they see only global tokens, as above
            seen, _ = attend(q[:, :, :g], k, v, _keys(key_mask, L, q).squeeze(2))
            out = torch.cat([seen, out[:, :, g:]], 2)
        return out.to(q.dtype)

    def step(self, q, k, v, state, *, x, key_mask):
        keys = extend(state, k, v, key_mask)
        if q.shape[2] == 0:
            return v, keys  # no queries: v is empty, too
        lag = keys.at[-q.shape[2] :, None] - keys.at
        allowed = (lag >= 0) & ((lag <= self.window) | (keys.at < self.globals))
        if keys.key_mask is not None:
            allowed = allowed & keys.key_mask[:, None, None, :]
        out, _ = attend(q, keys.k, keys.v, allowed)
        near = (keys.at >= keys.position - self.window) | (keys.at < self.globals)
        return out.to(q.dtype), keys.keep(near.nonzero().squeeze(1))


@register("sparse")
class Sparse(Mixer):
    """Sparse Transformer (Child et al., 2019, arXiv:1904.10509): the union of a pattern's two factors.

        strided    A1 = {j : |i - j| <= l}                     A2 = {j : (i - j) mod l = 0}
        fixed      A1 = {j : floor(j / l) = floor(i / l)}      A2 = {j : j mod l >= l - c}

    O(N (l + c N / l)), so O(N sqrt N) at l = sqrt(max_length), the default `stride`. `columns` is c, 8 by
    default (or l).
    """

    cross = ONE_SEQUENCE
    left_padding = FROM_THE_FIRST

    def __init__(
        self, sizes: Sizes, *, pattern: str = "fixed", stride: int | None = None, columns: int | None = None
    ):
        super().__init__(sizes)
        if pattern not in ("fixed", "strided"):
            raise ValueError(f"pattern must be 'fixed' or 'strided'; got {pattern!r}")
        self.pattern = pattern
        self.stride = max(1, round(sizes.max_length**0.5)) if stride is None else stride
        self.columns = min(8, self.stride) if columns is None else columns
        least = 1 if pattern == "fixed" else 0  # the strided pattern has no columns
        if self.stride < 1 or not least <= self.columns <= self.stride:
            given = f"stride {stride}, columns {columns}"
            raise ValueError(f"stride must be at least 1, columns {least} to stride; got {given}")

    def mix(self, q, k, v, *, x, causal, key_mask):
        L, C = q.shape[2], self.stride
        rows, keys, values, inside = split(q, C), split(k, C), split(v, C), kept(k, key_mask, C)
        i = torch.arange(rows.shape[2] * C, device=q.device).view(-1, C, 1)
        part = self._strided if self.pattern == "strided" else self._fixed
        return join(merge(*part(rows, keys, values, inside, i, causal)), L).to(q.dtype)

    def _strided(self, rows, keys, values, inside, i, causal):
        n, C = rows.shape[2:4]

        def wanted(lag, j):
            return (lag.abs() <= C) & (lag % C != 0)  # multiples of the stride are in the other part

        window = _near(rows, keys, values, inside, i, causal, wanted)
        # Down the columns: position b C + c meets b' C + c. One attention per column c, of n rows.
        down = inside.transpose(1, 2)[:, None, :, None, :]  # (B, 1, C, 1, n)
        if causal:
            down = down & torch.ones(n, n, dtype=torch.bool, device=i.device).tril()
        out, log = attend(rows.transpose(2, 3), keys.transpose(2, 3), values.transpose(2, 3), down)
        return window, (out.transpose(2, 3), log.transpose(2, 3))

    def _fixed(self, rows, keys, values, inside, i, causal):
        n, C = rows.shape[2:4]
        own = attend(rows, keys, values, _past(inside[:, None, :, None], i, i.view(1, 1, n, C), causal))
        # The last columns of every block, for all queries but those of the block, which have them already.
        first = C - self.columns
        k, v = (x[:, :, :, first:].flatten(2, 3)[:, :, None] for x in (keys, values))  # (B, H, 1, n c, D)
        j = i.view(n, C)[:, first:].reshape(1, 1, 1, -1)
        other = (i // C != j[..., None, :] // C) & inside[:, :, first:].flatten(1)[:, None, None, None]
        return own, attend(rows, k, v, _past(other, i, j, causal))


@register("bigbird")
class BigBird(Mixer):
    """BigBird (Zaheer et al., 2020, arXiv:2007.14062), on blocks: O(N block (window + globals + random)).

    A block sees `window` blocks around it (an odd number, itself the middle), the global blocks, and `random`
    others drawn per head and block; a global block sees everything. Negative `global_blocks` count from the
    end of each row's own keys, so padding changes nothing; (0, -1), the first and last, is the released
    model's choice.
    """

    causal = "its global and random blocks look ahead; the paper uses it in encoders"
    cross = ONE_SEQUENCE
    left_padding = FROM_THE_FIRST
    draw: Tensor

    def __init__(
        self,
        sizes: Sizes,
        *,
        block: int = 64,
        window: int = 3,
        global_blocks: Sequence[int] = (0, -1),
        random: int = 3,
        seed: int = 0,
    ):
        super().__init__(sizes)
        if block < 1 or window < 1 or window % 2 == 0 or random < 0:
            raise ValueError(
                "block must be at least 1, window odd, random 0 or more; "
                f"got block {block}, window {window}, random {random}"
            )
        self.block, self.window, self.global_blocks = block, window, tuple(global_blocks)
        # Numbers below 2^31, not blocks: scaled to the number of blocks in a row, they serve every length, in
        # linear memory.
        blocks = -(-sizes.max_length // block)
        self.register_buffer("draw", torch.empty(sizes.heads, blocks, random, dtype=torch.int64))
        self.redraw(seed)

    def redraw(self, seed: int | None = None) -> None:
        """Draw new random blocks, from `seed` or from torch's own generator."""
        self.draw.copy_(torch.randint(2**31, self.draw.shape, generator=generator(seed)))

    def pattern(self, inside: Tensor) -> tuple[Tensor, Tensor]:
        """The global blocks (B, g), and each query block's key blocks (B, H, n, W); -1 is none.

        `inside` is from `kept`.
        """
        n = inside.shape[1]
        block = torch.arange(n, device=inside.device)
        last = (inside.any(-1) * (block + 1)).amax(1)
        count = last.view(-1, 1, 1, 1)  # the blocks of each row, up to its last key
        lead = torch.tensor(self.global_blocks, dtype=torch.int64, device=inside.device).view(1, 1, 1, -1)
        lead = torch.where(lead < 0, lead + count, lead)
        twice = (lead[..., None] == lead[..., None, :]).tril(-1).any(-1)
        lead = lead.masked_fill((lead < 0) | (lead >= count) | twice, -1)
        half = self.window // 2
        near = block[:, None] + torch.arange(-half, half + 1, device=block.device)
        near = torch.where((near >= 0) & (near < count), near, -1)
        far = lead.expand(-1, -1, n, -1)
        far = far.masked_fill((far - block[:, None]).abs() <= half, -1)
        seen = torch.cat([near, far], -1).expand(-1, self.heads, -1, -1)
        for t in range(self.draw.shape[2]):
            free = count[..., 0] - (seen >= 0).sum(-1)
            pick = self.draw[:, :n, t] * free >> 31  # the pick-th of the blocks not seen yet ...
            for taken in seen.sort(-1).values.unbind(-1):
                pick = pick + ((taken >= 0) & (pick >= taken))  # ... as a block's number
            seen = torch.cat([seen, pick.masked_fill(free < 1, -1)[..., None]], -1)
        return lead[:, 0, 0], seen

    def mix(self, q, k, v, *, x, causal, key_mask):
        L, C = q.shape[2], self.block
        if L > self.draw.shape[1] * C:
            told = f"bigbird has random blocks for max_length = {self.max_length} tokens"
            raise ValueError(f"{told}; got q of length {L}")
        rows, inside = split(q, C), kept(k, key_mask, C)
        lead, index = self.pattern(inside)
        _, there = places(index, inside)
        out, _ = attend(rows, take(split(k, C), index), take(split(v, C), index), there[:, :, :, None])
        if self.global_blocks:
            everything = inside.flatten(1)[:, None, None, None, :L]
            seen, _ = attend(take(rows, lead[:, None, None]), k[:, :, None], v[:, :, None], everything)
            seen = seen.view(*seen.shape[:2], seen.shape[3] // C, C, seen.shape[-1])  # (B, H, g, C, E)
            here = lead[:, :, None] == torch.arange(rows.shape[2], device=q.device)  # (B, g, n)
            slot = here.long().argmax(1)[:, None, :, None, None].expand(out.shape)
            out = torch.where(here.any(1)[:, None, :, None, None], seen.gather(2, slot), out)
        return join(out, L).to(q.dtype)


def _near(rows, keys, values, inside, i, causal: bool, wanted) -> tuple[Tensor, Tensor]:
    """Softmax over keys `wanted(lag, j)` of each block, the one before and, unless causal, the one after."""
    around = torch.arange(-1, 1 if causal else 2, device=i.device)
    index = (torch.arange(len(i), device=i.device)[:, None] + around)[None, None]  # (1, 1, n, 2 or 3)
    j, there = places(index, inside)
    allowed = wanted(i - j[:, :, :, None], j[:, :, :, None]) & there[:, :, :, None]
    return attend(rows, take(keys, index), take(values, index), _past(allowed, i, j, causal))


def _past(allowed: Tensor, i: Tensor, j: Tensor, causal: bool) -> Tensor:
    """What causality leaves of `allowed` (.., n, C, K): queries at i (n, C, 1), keys at j (.., n or 1, K)."""
    return allowed & (j[..., None, :] <= i) if causal else allowed


def _keys(key_mask: Tensor | None, length: int, like: Tensor) -> Tensor:
    """Which of the first `length` keys are kept: (B or 1, 1, 1, 1, length)."""
    if key_mask is None:
        return torch.ones(1, 1, 1, 1, length, dtype=torch.bool, device=like.device)
    return key_mask[:, None, None, None, :length]
