"""Triton's interpreter for the operator's whole suite: every test on the triton backend, as fast as it goes.

    COSFORMER_TEST_BACKEND=triton TRITON_INTERPRET=1 python -m pytest tests/test_operator.py -n 0

The interpreter spends most of its time patching Triton's language anew in every function of a kernel,
checking every sum for overflow, describing every type from scratch, and working out what the operands of
every binary operation become. None of that is under test, except overflow where tensors are large enough for
it. Tiles are large, since a program costs nearly the same whatever its size; tests/test_triton.py uses small
ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from cosformer.ops import operator
from cosformer.ops.triton import blocks as table
from cosformer.ops.triton.blocks import Blocks, Tiles

LARGE = Blocks(128, 1, *(Tiles(128, 128, 4, 1) for _ in range(3)))


def hasten() -> None:
    """Patch the language once per launch, describe each type once, do not check for overflow."""
    _patch_once()
    _remember_types()
    _remember_agreements()
    _look_for_overflows(False)


def _look_for_overflows(look: bool) -> None:
    for option in ("sanitize_overflow", "debug"):  # without the second it checks, but says nothing
        object.__setattr__(interpreter.interpreter_builder.options, option, look)


@contextmanager
def overflows() -> Iterator[None]:
    """Checks every 32-bit sum and product for overflow."""
    _look_for_overflows(True)
    try:
        yield
    finally:
        _look_for_overflows(False)


def _patch_once() -> None:
    """Patches the language once per launch and module."""
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


def _remember_types() -> None:
    """Describes each type, block of it and tensor of it only once."""
    numpys, block, tensor = interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__
    of_numpy, of_block, of_tensor = {}, {}, {}

    def dtype(kind):
        name = kind.scalar.name
        if name not in of_numpy:
            of_numpy[name] = numpys(kind)
        return of_numpy[name]

    def make_block(self, element_ty, shape):
        key = element_ty.name, *(getattr(n, "value", n) for n in shape)  # numbers, or Triton's constants
        if key not in of_block:
            block(self, element_ty, shape)
            of_block[key] = dict(self.__dict__)
        self.__dict__.update(of_block[key])

    def make_tensor(self, handle, type):
        if type.name not in of_tensor:
            tensor(self, None, type)
            of_tensor[type.name] = dict(self.__dict__)
        self.__dict__.update(of_tensor[type.name], handle=handle)

    interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__ = dtype, make_block, make_tensor


def _remember_agreements() -> None:
    """Works out only once what two operands of given types become before they are added or compared."""
    agree, Handle, known = TritonSemantic.binary_op_type_checking_impl, interpreter.TensorHandle, {}
    Handle.__post_init__ = lambda self: None  # skips the check that an array fits its type

    def described(x):
        return x.type.name if isinstance(x, tl.tensor) else (type(x), x)

    def likeness(before, after):
        """How an operand is converted: a constant is kept, a tensor is cast and broadcast."""
        if not isinstance(before, tl.tensor):
            return after, None, None
        data = after.handle.data
        return after.type, data.dtype, data.shape if data.shape != before.handle.data.shape else None

    def become(x, like):
        type_, dtype, shape = like
        if dtype is None:
            return type_
        data = x.handle.data
        if data.dtype != dtype:
            data = data.astype(dtype)
        if shape is not None:
            data = np.broadcast_to(data, shape)
        return tl.tensor(Handle(data, type_.scalar), type_)

    def agreed(self, lhs, rhs, *options, **more):
        key = described(lhs), described(rhs), options, *more.items()
        if key in known:
            return become(lhs, known[key][0]), become(rhs, known[key][1])
        made = agree(self, lhs, rhs, *options, **more)
        if not any("bf16" in str(x.dtype) for x in (lhs, rhs, *made) if isinstance(x, tl.tensor)):
            known[key] = likeness(lhs, made[0]), likeness(rhs, made[1])  # numpy cannot cast to bfloat16
        return made

    TritonSemantic.binary_op_type_checking_impl = agreed


def serve() -> None:
    """Makes triton the first choice, with large tiles; numpy may multiply NaN and infinity unwarned."""
    hasten()
    np.seterr(all="ignore")
    table.INTERPRETED = LARGE
    operator.BACKENDS = ("triton", *(name for name in operator.BACKENDS if name != "triton"))
