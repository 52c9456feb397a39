"""Reformer: softmax over the keys that fall into the query's hash bucket, found by sorting.

    out_i = sum_{j in A_i} exp(s_ij) v_j / sum_{j in A_i} exp(s_ij)      s_ij = q_i . q_j / |q_j|
    A_i   = the j that share i's bucket in some round, at most C places away if sorted by bucket and position
    bucket(x) = argmax [x R, -x R],  R ~ N(0, I), one per round

In each round a pair counts 1 / (rounds in which it meets), so that all rounds together are one softmax over
A_i. A token attends to itself only if it sees nothing else. O(rounds * N * chunk) and a sort.

The paper cuts the sorted order into chunks of C, and i sees its own chunk and the one before. Where a cut
falls depends on how many later tokens hash into earlier buckets, so its causal form leaks a little of the
future; places within a bucket leak nothing, and need no padding.

    R   rounds      n   chunks of a round      C   chunk size
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import Mixer, Sizes, register
from .blocks import attend, merge
from .contract import generator
from .keys import all_kept

SELF = -1e5  # bias of a token's own score: negligible beside any other key, all there is without one


@register("reformer")
class Reformer(Mixer):
    """Reformer (Kitaev et al., 2020, arXiv:2001.04451): keys are normalised queries; k is not read.

    rounds    the number of hashes; a neighbour is lost only if all of them miss it
    chunk     C, the places of the sorted order that a token sees on each side (causal: before it)
    buckets   per hash, 1 or even; by default two per chunk of max_length, as in the paper, but at most 256,
              since each costs half a dot product per token
    """

    cross = "its queries and keys are the same vectors"
    unread = ("k",)
    rotations: Tensor

    def __init__(
        self, sizes: Sizes, *, rounds: int = 2, chunk: int = 64, buckets: int | None = None, seed: int = 0
    ):
        super().__init__(sizes)
        odd = buckets is not None and buckets != 1 and (buckets < 1 or buckets % 2)
        if rounds < 1 or chunk < 1 or odd:
            raise ValueError(
                "rounds and chunk must be at least 1, buckets 1 or even; "
                f"got rounds {rounds}, chunk {chunk}, buckets {buckets}"
            )
        self.rounds, self.chunk = rounds, chunk
        self.buckets = min(2 * -(-sizes.max_length // chunk), 256) if buckets is None else buckets
        self.register_buffer("rotations", torch.empty(sizes.heads, rounds, sizes.head_dim, self.buckets // 2))
        self.redraw(seed)

    def redraw(self, seed: int | None = None) -> None:
        """Draw new hashes, from `seed` or from torch's own generator."""
        self.rotations.copy_(torch.randn(self.rotations.shape, generator=generator(seed)))

    def hash(self, x: Tensor) -> Tensor:
        """The bucket of each row of x (B, H, N, D) in each round: (B, H, R, N)."""
        if self.buckets == 1:
            return torch.zeros(*x.shape[:2], self.rounds, x.shape[2], dtype=torch.int64, device=x.device)
        turned = x.detach()[:, :, None] @ self.rotations.to(x.dtype)
        return torch.cat([turned, -turned], -1).argmax(-1)

    def mix(self, q, k, v, *, x, causal, key_mask):
        N = q.shape[2]
        C = min(self.chunk, N)
        kept = all_kept(q, key_mask)
        q = q.masked_fill(~kept[:, None, :, None], 0)  # queries are keys, too
        q, v, kept = F.pad(q, (0, 0, 0, -N % C)), F.pad(v, (0, 0, 0, -N % C)), F.pad(kept, (0, -N % C))
        bucket = self.hash(q).masked_fill(~kept[:, None, None], self.buckets)  # masked tokens sort last
        order = bucket.argsort(dim=-1, stable=True)
        place = order.argsort(-1)  # where each position is sorted to
        # Two positions meet in a round if their codes are at most C apart: another bucket adds more. A
        # masked token meets only itself.
        code = torch.where(kept[:, None, None], place + bucket * (C + 1), -(C + 1) * (place + 1))
        i = order.unflatten(-1, (-1, C))  # positions (B, H, R, n, C) of queries
        j = _around(i, causal, fill=order.shape[-1])  # and of their keys (B, H, R, n, K), K = 2 C or 3 C

        lag = i[..., None] - j[..., None, :]
        allowed = _meet(code, i, j, C)
        met = torch.zeros((), device=q.device)  # in how many rounds a pair meets
        for c in code.unbind(2):  # one at a time: each would take as much memory again
            met = met + _meet(c.unsqueeze(2).expand_as(code), i, j, C)
        if causal:
            allowed = allowed & (lag >= 0)
        bias = torch.where(lag == 0, SELF, 0.0) - met.clamp_min(1).log()
        direction = F.normalize(q, dim=-1) * q.shape[-1] ** 0.5  # attend divides by sqrt(D)
        keys, values = (_around(_sort(x, order, C), causal, fill=0) for x in (direction, v))
        out, log = attend(_sort(q, order, C), keys, values, allowed, bias=bias)
        out, log = out.flatten(3, 4), log.flatten(3)
        out, log = out.gather(3, place[..., None].expand(out.shape)), log.gather(3, place)  # back in order
        return merge(*zip(out.unbind(2), log.unbind(2), strict=True))[:, :, :N].to(q.dtype)


def _meet(code: Tensor, i: Tensor, j: Tensor, reach: int) -> Tensor:
    """Which of i (B, H, R, n, C) and j (B, H, R, n, K) have codes (B, H, R, N) at most `reach` apart."""
    no_code = torch.iinfo(code.dtype).max // 2
    code = F.pad(code, (0, 1), value=no_code)  # position N, `_around`'s fill
    mine, theirs = (code.gather(-1, at.flatten(3)).view(at.shape) for at in (i, j))
    return (mine[..., None] - theirs[..., None, :]).abs() <= reach


def _around(x: Tensor, causal: bool, *, fill: int) -> Tensor:
    """Each chunk, that before and, unless causal, that after: (B, H, R, n, C, ...) -> (.., n, K, ...)."""
    ends = torch.full_like(x[:, :, :, :1], fill)
    before, after = torch.cat([ends, x[:, :, :, :-1]], 3), torch.cat([x[:, :, :, 1:], ends], 3)
    return torch.cat([before, x] if causal else [before, x, after], 4)


def _sort(x: Tensor, order: Tensor, size: int) -> Tensor:
    """x (B, H, N, D) in each round's order, in chunks: (B, H, R, n, size, D)."""
    x = x[:, :, None].expand(-1, -1, order.shape[2], -1, -1)
    return x.gather(3, order[..., None].expand(*order.shape, x.shape[-1])).unflatten(3, (-1, size))
