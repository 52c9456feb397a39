"""Packed sequences for a backend without a kernel for them: those of like length run as one padded batch.

"Like" means within a factor of two, so that padding at most doubles work and memory, and a thousand short
sequences are a few calls, not a thousand. The boundaries are on the CPU; the indices made from them move to
the device without waiting for it.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .call import Call, Grads, Inputs, Outputs, Upstream


class _Bucket(NamedTuple):
    """n sequences of like length as the rows of a padded batch."""

    named: Tensor  # (n, longest): indices of one sequence's tokens per row, padded with its first
    valid: Tensor  # (n, longest) bool: not padding
    tokens: Tensor  # (m,): the indices that are not padding ...
    places: Tensor  # (m,): ... and their places in the flattened batch

    def gather(self, x: Tensor) -> Tensor:
        """(1, H, total, ...) -> (n, H, longest, ...)."""
        return x[0][:, self.named].transpose(0, 1)

    def scatter(self, x: Tensor, total: Tensor) -> None:
        """(n, H, longest, ...) -> its tokens' places in (1, H, total, ...)."""
        total[0][:, self.tokens] = x.transpose(0, 1).flatten(1, 2)[:, self.places]

    def inputs(self, x: Inputs) -> Inputs:
        q, k, v = map(self.gather, (x.q, x.k, x.v))
        mask, rates = self.valid, x.decay
        if x.key_mask is not None:
            mask = mask & x.key_mask[0][self.named]
        if rates is not None and rates.ndim == 3:
            rates = self.gather(rates).masked_fill(~self.valid[:, None], 0)
        return Inputs(q, k, v, rates, mask)


def _buckets(cu_seqlens: Tensor, device: torch.device) -> Iterator[_Bucket]:
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    power = torch.tensor([(n - 1).bit_length() if n else -1 for n in lengths.tolist()], device="cpu")
    for p in sorted(set(power.tolist()) - {-1}):
        chosen = power == p
        at = torch.arange(int(lengths[chosen].max()), device="cpu")
        valid = at < lengths[chosen, None]
        index = starts[chosen, None] + at * valid
        made = (index, valid, index[valid], valid.flatten().nonzero()[:, 0])
        yield _Bucket._make(t.to(device, non_blocking=True) for t in made)


def forward(run: Callable[[Inputs, Call], Outputs], x: Inputs, call: Call) -> Outputs:
    y = Outputs.empty(x, call)
    assert x.cu_seqlens is not None
    for bucket in _buckets(x.cu_seqlens, x.q.device):
        part = run(bucket.inputs(x), call)
        bucket.scatter(part.out, y.out)
        bucket.scatter(part.norm, y.norm)
    return y


def backward(
    run: Callable[[Upstream, Inputs, Outputs, Call], Grads],
    upstream: Upstream,
    x: Inputs,
    y: Outputs,
    call: Call,
) -> Grads:
    grads = Grads.empty(x)
    if grads.decay is not None:
        grads.decay.zero_()
    assert x.cu_seqlens is not None
    for bucket in _buckets(x.cu_seqlens, x.q.device):
        dout = bucket.gather(upstream.dout)
        dout = dout.masked_fill(~bucket.valid[:, None, :, None], 0)  # padding has no gradient
        part_y = Outputs(bucket.gather(y.out), bucket.gather(y.norm), y.after)
        part = run(Upstream(dout, None), bucket.inputs(x), part_y, call)
        for whole, piece in zip(grads, part, strict=True):
            if whole is None or piece is None:
                continue
            if whole.ndim == 1:  # one rate per head
                whole += piece
            else:
                bucket.scatter(piece, whole)
    return grads
