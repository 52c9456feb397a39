"""The triton backend: linear attention on GPUs; its kernels, in triton/, are imported when first called."""

import importlib.util
import os
from functools import cache

import torch

from . import trust
from .call import Backend, Call, Grads, Inputs, Outputs, Upstream

# Triton's own switch, read when kernels are imported: they then run on the CPU, slowly, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def forward(x: Inputs, call: Call) -> Outputs:
    from .triton import run

    return run.forward(x, call)


def backward(upstream: Upstream, x: Inputs, y: Outputs, call: Call) -> Grads:
    from .triton import run

    return run.backward(upstream, x, y, call)


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def problem() -> str | None:
    """Why kernels cannot run on this machine, whatever the call."""
    if os.environ.get("COSFORMER_TRITON") == "0":
        return "COSFORMER_TRITON=0 turns it off"
    if not _installed():
        return "triton is not installed: pip install 'cosformer[gpu]'"
    return None


def info() -> dict[str, object]:
    """Triton's version, and the result of a small trial on this device."""
    from .triton import device

    found: dict[str, object] = {"triton": device.VERSION}
    if not INTERPRETED:
        found["first trial"] = trust.verdict("triton", KERNELS, torch.device("cuda"))
    return found


KERNELS = Backend(
    forward,
    backward,
    devices=("cpu",) if INTERPRETED else ("cuda",),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    sizes=range(1, 257),
    problem=problem,
    info=info,
)
BACKEND = KERNELS if INTERPRETED else trust.tried("triton", KERNELS)
