"""Triton's interpreter for the operator's whole suite: every test on the triton backend, as fast as it goes.

    COSFORMER_TEST_BACKEND=triton TRITON_INTERPRET=1 python -m pytest tests/test_operator.py -n 0

The interpreter patches Triton's language anew in every function of a kernel, asks of every sum whether it
overflows, and builds a table for every dtype: two thirds of its time. Nothing of that is tested here, but for
overflows, which tests/test_triton.py looks at with the check on. Tiles are large, since a program costs the
same whatever its size; tests/test_triton.py takes small ones.
"""

import numpy as np
from triton.runtime import interpreter

from cosformer.ops import operator
from cosformer.ops.triton import blocks as table
from cosformer.ops.triton.blocks import Blocks, Tiles

LARGE = Blocks(64, 1, *(Tiles(64, 64, 4, 1) for _ in range(3)))


def hasten(*, overflows: bool) -> None:
    """Patch the language once a launch for each module and keep the tables; look for overflows or not."""
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def once(function):
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch(function)

    def launched(*args, **options):
        patched.clear()
        return launch(*args, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched
    found, known = interpreter._get_np_dtype, {}

    def dtype(kind):
        name = kind.scalar.name
        if name not in known:
            known[name] = found(kind)
        return known[name]

    interpreter._get_np_dtype = dtype
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", overflows)


def serve() -> None:
    """The triton backend is the first choice, with large tiles; NaN and infinity are numpy's to multiply."""
    hasten(overflows=False)
    np.seterr(all="ignore")
    table.INTERPRETED = LARGE
    operator.BACKENDS = ("triton", *(name for name in operator.BACKENDS if name != "triton"))
