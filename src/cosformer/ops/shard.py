"""A shard: the part of one sequence that a process holds, and what the processes tell one another of theirs.

Processes hold consecutive parts in the order of their ranks, of any length, even 0. The size of messages does
not depend on the length, except for `whole`, which is for softmax.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

LIMIT = 4 * 2**30  # bytes


@dataclass(frozen=True, eq=False)
class Shard:
    """This process's part of a sequence, or of packed ones: tokens offset ... offset + length of each row.

    lengths      the number of tokens in each process of the group
    places       (B, L), if sequences are packed: each token's place in its sequence, from 0
    boundaries   of the packed sequences, with this process's rows laid end to end; on the CPU
    limit        the most bytes of keys and values that `whole` may gather
    """

    group: dist.ProcessGroup
    lengths: tuple[int, ...]
    places: Tensor | None = None
    boundaries: Tensor | None = None
    limit: int = LIMIT

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, x: Tensor, *, places: Tensor | None = None, limit: int = LIMIT
    ) -> "Shard":
        """For x (B, L, ...); the processes exchange their lengths."""
        lengths = _gather(group, torch.tensor([x.shape[1]], device=x.device))().flatten().tolist()
        if places is None:
            return cls(group, tuple(lengths), limit=limit)
        return cls(group, tuple(lengths), places, _boundaries(places == 0), limit)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return len(self.lengths)

    @property
    def offset(self) -> int:
        """The position of the first token here."""
        return sum(self.lengths[: self.rank])

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def first(self) -> Tensor | None:
        """(B, L), if sequences are packed: which tokens begin one."""
        return None if self.places is None else self.places == 0

    def gather(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        """Start to exchange tensors of one dtype, in one message. The function returned waits, and gives
        each tensor with a new first dimension, the ranks."""
        wait = _gather(self.group, torch.cat([t.flatten() for t in tensors]))
        sizes = [t.numel() for t in tensors]

        def arrived() -> list[Tensor]:
            parts = wait().split(sizes, 1)
            return [part.unflatten(1, t.shape) for part, t in zip(parts, tensors, strict=True)]

        return arrived

    def halo(self, x: Tensor, before: int, after: int) -> tuple[Tensor, Tensor]:
        """The tokens (B, before, C) and (B, after, C) beside x (B, L, C); 0 beyond the ends of a sequence."""
        left, right = self._beside(x, before, after)
        if self.places is None:
            return left, right
        theirs = self._beside(self.places[..., None], 0, after)[1][..., 0] if after else self.places[:, :0]
        if not x.shape[1]:
            return left, right
        own = torch.arange(before, 0, -1, device=x.device) <= self.places[:, :1]
        following = self.places[:, -1:] + torch.arange(1, after + 1, device=x.device)
        return left.masked_fill(~own[..., None], 0), right.masked_fill((theirs != following)[..., None], 0)

    def _beside(self, x: Tensor, before: int, after: int) -> tuple[Tensor, Tensor]:
        sent = torch.cat([_last(x, before), _first(x, after)], 1)
        tails, heads = gathered(sent, self.group).split([before, after], 2)
        left = [_last(t, min(n, before)) for t, n in zip(tails[: self.rank], self.lengths, strict=False)]
        later = self.lengths[self.rank + 1 :]
        right = [t[:, :n] for t, n in zip(heads[self.rank + 1 :], later, strict=True)]
        return _last(torch.cat([x[:, :0], *left], 1), before), _first(torch.cat([x[:, :0], *right], 1), after)

    def last(self, x: Tensor, count: int) -> Tensor:
        """The last tokens (B, count, C) of the whole sequence, the same in every process."""
        tails = gathered(_last(x, count), self.group)
        ends = [_last(t, min(n, count)) for t, n in zip(tails, self.lengths, strict=True)]
        return _last(torch.cat(ends, 1), count)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """x of the whole sequence, gathered along its dimension `dim`; differentiable."""
        longest = max(self.lengths)
        missing = [0, 0] * (x.ndim - dim - 1) + [0, longest - x.shape[dim]]
        parts = gathered(F.pad(x, missing), self.group)
        return torch.cat([t.narrow(dim, 0, n) for t, n in zip(parts, self.lengths, strict=True)], dim)

    def with_halo(self, x: Tensor, before: int, after: int) -> tuple[Tensor, Tensor | None]:
        """x with the tokens beside it; packed sequences come as one row, with their boundaries."""
        left, right = self.halo(x, before, after)
        seen = torch.cat([left, x, right], 1)
        if self.places is None:
            return seen, None
        begins = F.pad(self.places[:, 1:] == 0, (before + 1, after))  # tokens beside x are of its sequences
        return seen.flatten(0, 1)[None], _boundaries(begins[:, : seen.shape[1]])

    def check_whole(self, *tensors: Tensor) -> None:
        """Refuse to gather more than the limit."""
        needed = sum(B * H * D * t.itemsize for t in tensors for B, H, _, D in [t.shape]) * self.total
        if needed > self.limit:
            raise ValueError(
                f"softmax needs the keys and values of all {self.total:,} tokens in every process, "
                f"{needed:,} bytes a layer, and at most {self.limit:,} are allowed (limit); "
                "use a model of linear mixers alone, shorter sequences, or a higher limit"
            )


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x of every rank, in a new first dimension; differentiable."""
    return _Gathered.apply(x, group)


def _boundaries(begins: Tensor) -> Tensor:
    """Boundaries of sequences that begin at `begins` (B, L), rows laid end to end; each row begins one."""
    begins = begins.clone()
    begins[:, :1] = True  # even if it continues one from the process before
    at = begins.flatten().nonzero().flatten().cpu()
    return torch.cat([at if len(at) else torch.zeros(1, dtype=at.dtype), torch.tensor([begins.numel()])])


def _gather(group: dist.ProcessGroup, x: Tensor) -> Callable[[], Tensor]:
    """Start an all-gather of x (n,); the function returned waits and gives (ranks, n)."""
    size = dist.get_world_size(group)
    out = x.new_empty(size * x.numel())
    work = dist.all_gather_single(out, x.contiguous(), group=group, async_op=True)

    def arrived() -> Tensor:
        work.wait()
        return out.unflatten(0, (size, -1)) if x.numel() else out.unflatten(0, (size, 0))

    return arrived


def refuse_second_derivative() -> None:
    """Raise if a backward should itself be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError("a sequence in several processes has no second derivative: leave create_graph out")


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        sent = x.to(torch.uint8) if x.dtype == torch.bool else x
        return _gather(group, sent.flatten())().unflatten(1, x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx, dout: Tensor):
        """Every rank read all parts, so the gradient of one is the sum over ranks."""
        refuse_second_derivative()
        sums = dout.to(torch.promote_types(dout.dtype, torch.float32))
        dx = sums.new_empty(dout[0].numel())
        if dx.numel():
            dist.reduce_scatter_single(dx, sums.flatten(), group=ctx.group)
        return dx.view(dout.shape[1:]).to(dout.dtype), None


def _last(x: Tensor, count: int) -> Tensor:
    """The last `count` tokens of x (B, L, C), with 0 in front if there are fewer."""
    x = x[:, max(0, x.shape[1] - count) :]
    return F.pad(x, (0, 0, count - x.shape[1], 0))


def _first(x: Tensor, count: int) -> Tensor:
    x = x[:, :count]
    return F.pad(x, (0, 0, 0, count - x.shape[1]))
