"""How far each backend is from the definition here: outputs, gradients and streams, as rows of results."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..ops import cosformer_attention, cosformer_stream
from ..ops.operator import BACKENDS, backend_problem, declared
from ..results import Exactness

SHAPE = (1, 4, 300, 32)  # an odd length: the last chunk is not full
ALLOWED = {"float32": 2e-5, "float64": 1e-12}  # relative to the largest value


def rows() -> Iterator[Exactness]:
    """The largest difference from the definition in float64, relative to the largest value."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(4)]
    for causal in (False, True):
        options: dict[str, Any] = {"horizon": SHAPE[2], "causal": causal}
        want = with_gradients(partial(reference.attention, **options), *drawn)
        for backend in BACKENDS:
            if backend_problem(backend) is not None:
                continue
            for dtype in (d for d in ALLOWED if getattr(torch, d) in declared(backend).dtypes):
                cast = [x.to(getattr(torch, dtype)) for x in drawn]
                got = with_gradients(partial(cosformer_attention, backend=backend, **options), *cast)
                row = partial(Exactness, backend=backend, dtype=dtype, allowed=ALLOWED[dtype])
                mode = "causal" if causal else "bidirectional"
                yield row(mode=mode, what="output", difference=_difference(got[:1], want[:1]))
                yield row(mode=mode, what="gradient", difference=_difference(got[1:], want[1:]))
                if causal:
                    out = _streamed(*cast[:3], horizon=SHAPE[2], backend=backend)
                    yield row(mode="stream", what="output", difference=_difference([out], want[:1]))


def with_gradients(call, *tensors: Tensor) -> list[Tensor]:
    """The output of call(*tensors[:-1]) and the gradients of its sum weighted by the last tensor."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:-1]]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[-1].to(out.dtype))]


def _streamed(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """Token by token, then in pieces, as in decoding."""
    parts, state, at = [], None, 0
    for size in [1] * 20 + [7] * 40:
        piece = slice(at, at + size)
        out, state = cosformer_stream(q[:, :, piece], k[:, :, piece], v[:, :, piece], state, **options)
        parts.append(out)
        at += size
    return torch.cat(parts, 2)


def _difference(got: list[Tensor], want: list[Tensor]) -> float:
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
