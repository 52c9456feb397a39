"""Training steps on absent GPUs: the kernels they launch, and what tells these apart."""

import ast
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from cosformer.ops.call import Call, Inputs, Upstream
from cosformer.ops.triton import device, kernels, run, tiles

TARGETS = {  # and bytes of shared memory per program
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
SIZES = [32, 64, 128, 256]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CALLS = {  # causal, gated decay
    "causal, gated decay": (True, True),
    "bidirectional": (False, False),
    "bidirectional, gated decay": (False, True),
}


class Absent:
    """An absent device: answers what Triton asks before a launch."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return str(self.target)

    def get_current_stream(self, device):
        return 0


@contextmanager
def absent(target: str, launch: Callable) -> Iterator[None]:
    """The backend on an absent device; each launch calls `launch(kernel, grid, *arguments, **options)`."""
    chip, shared = TARGETS[target]
    with (
        patch.object(driver, "_active", Absent(chip)),
        patch.object(run, "_launch", launch),
        patch.object(device, "described", lambda _: (target, shared)),
        patch.object(device, "has_tf32", lambda _: True),
    ):
        yield


def training_step(call: str, dtype: str, size: int) -> None:
    """Forward and backward, with tensors laid out as projections are; their values are never read."""
    causal, gated = CALLS[call]
    x = torch.empty(2, 1024, 4, size, dtype=DTYPES[dtype]).transpose(1, 2)
    inputs = Inputs(x, x, x, torch.empty(2, 4, 1024) if gated else None)
    options = Call((2048.0,), causal=causal, relu=True)
    y = run.forward(inputs, options)
    run.backward(Upstream(x, None), inputs, y, options)


@cache
def sources() -> str:
    """The kernels and what they are made of, without comments and docstrings."""
    functions = []
    for module in (tiles, kernels):
        for node in ast.parse(Path(module.__file__).read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                if ast.get_docstring(node) is not None:
                    del node.body[0]
                functions.append(ast.dump(node))
    return "\n".join(functions)


def identity(kernel, arguments: tuple, options: dict) -> str:
    """A hash of all that Triton compiles a kernel from: the sources, its own specialisation of the arguments,
    and the options."""
    *_, target, _, bind = kernel.device_caches[driver.active.get_current_device()]
    _, granted, chosen = bind(*arguments, **options)
    text = f"{sources()}\n{kernel.__name__} {target} {granted} {chosen}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def identities(target: str, call: str, dtype: str, size: int) -> list[str]:
    """The identities of a training step's kernels; nothing is compiled."""
    found = []

    def launch(kernel, grid, *arguments, **options):
        found.append(identity(kernel, arguments, options))

    with absent(target, launch):
        training_step(call, dtype, size)
    return list(dict.fromkeys(found))
