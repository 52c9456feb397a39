"""How far each backend is from the definition on this machine: outputs, gradients and streams, as rows of results."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..ops import cosformer_attention, cosformer_stream
from ..ops.operator import BACKENDS, backend_problem, declared

SHAPE = (1, 4, 300, 32)  # an odd length: the last chunk is not full
ALLOWED = {"float32": 2e-5, "float64": 1e-12}  # relative to the largest value


def rows() -> Iterator[dict[str, Any]]:
    """The largest difference from the definition in float64, relative to the largest value."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(4))
    length = SHAPE[2]
    for causal in (False, True):
        want = _with_gradients(
            lambda *x: reference.attention(*x, horizon=length, causal=causal), q, k, v, weight
        )
        for backend in BACKENDS:
            if backend_problem(backend) is not None:
                continue
            for dtype in (d for d in ALLOWED if getattr(torch, d) in declared(backend).dtypes):
                cast = [x.to(getattr(torch, dtype)) for x in (q, k, v, weight)]
                run = lambda *x: cosformer_attention(*x, horizon=length, causal=causal, backend=backend)
                got = _with_gradients(run, *cast)
                about = {"kind": "exactness", "backend": backend, "dtype": dtype, "allowed": ALLOWED[dtype]}
                mode = "causal" if causal else "bidirectional"
                yield {**about, "mode": mode, "what": "output", "difference": _difference(got[:1], want[:1])}
                yield {
                    **about,
                    "mode": mode,
                    "what": "gradient",
                    "difference": _difference(got[1:], want[1:]),
                }
                if causal:
                    out = _streamed(*cast[:3], horizon=length, backend=backend)
                    yield {
                        **about,
                        "mode": "stream",
                        "what": "output",
                        "difference": _difference([out], want[:1]),
                    }


def _with_gradients(call, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def _streamed(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """Token by token, then in pieces: the form decoding has."""
    parts, state, at = [], None, 0
    for size in [1] * 20 + [7] * 40:
        piece = slice(at, at + size)
        out, state = cosformer_stream(q[:, :, piece], k[:, :, piece], v[:, :, piece], state, **options)
        parts.append(out)
        at += size
    return torch.cat(parts, 2)


def _difference(got: list[Tensor], want: list[Tensor]) -> float:
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
