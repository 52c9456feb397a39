"""The native backend: the operator over the compiled kernel (csrc/), and the choice of an instruction set.

The kernel is a plain C library, one per instruction set, loaded on first use. It works on tensors in place,
with any strides.
"""

import ctypes
import logging
import os
import struct
import sys
from functools import cache, reduce
from operator import is_
from pathlib import Path

import torch  # before the kernel is loaded, so that both use torch's OpenMP runtime
from torch import Tensor

from .call import Backend, Call, Grads, Inputs, Outputs, Run, RunBackward, Upstream, dense, projected, theta
from .checks import check_rates
from .memory import LARGE, leased

ISAS = ("avx512bf16", "avx512", "avx2", "neon", "baseline")  # best first

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CALL = struct.Struct("=13qd6q5q24qq12q")  # struct cosformer_call
_PLACES = struct.Struct("=9q2q")  # struct cosformer_places
_GRADS = struct.Struct("=36q2q")  # struct cosformer_grads
_GRAD_PLACES = struct.Struct("=8q")  # struct cosformer_grad_places
CONVOLUTION = struct.Struct("=8q12q2q")  # struct cosformer_convolution_call
NORM = struct.Struct("=3qdq24qq")  # struct cosformer_norm_call
_ABSENT = (0,) * 6  # a missing tensor
BLOCK = struct.Struct("=8q4d4q36q3q3q")  # struct cosformer_block
KEPT = struct.Struct("=4q2qq")  # struct cosformer_kept
ENDS = struct.Struct("=5qd4q")  # struct cosformer_ends
_STRUCTS = (_CALL, _PLACES, _GRADS, _GRAD_PLACES, CONVOLUTION, NORM, BLOCK, KEPT, ENDS)
_ABI = reduce(lambda abi, struct: (1000 * abi + struct.size) % 1_000_000_007, _STRUCTS, 0)
_CPU = torch.device("cpu")

_log = logging.getLogger("cosformer")


# Loading


def _directory() -> Path:
    """Where the libraries are; the package's path includes that of an editable install's build."""
    places = [Path(p) / "lib" for p in sys.modules[__package__].__path__]
    return next((p for p in places if p.is_dir()), places[-1])


def _path(isa: str) -> Path:
    return _directory() / f"libcosformer_{isa}.so"


class _Kernel:
    """One loaded library."""

    def __init__(self, isa: str):
        self.isa = isa
        library = ctypes.CDLL(str(_path(isa)))
        library.cosformer_abi.restype = ctypes.c_int64
        if library.cosformer_abi() != _ABI:
            raise RuntimeError(
                f"{_path(isa)} was built from other sources than this module; install the package again"
            )
        self.supports = library.cosformer_cpu_supports
        self.forward = library.cosformer_forward
        self.backward = library.cosformer_backward
        self.convolution = library.cosformer_convolution
        self.norm = library.cosformer_norm
        self.step = library.cosformer_step
        self.step.argtypes = [
            *[ctypes.c_char_p] * 2,
            *[ctypes.c_int64] * 2,
            ctypes.c_void_p,
            *[ctypes.c_int64] * 4,
            ctypes.c_char_p,
            *[ctypes.c_void_p] * 3,
        ]
        self.expect = library.cosformer_expect
        self.expect.argtypes, self.expect.restype = [ctypes.c_void_p, ctypes.c_int64], None
        for function in (self.supports, self.convolution, self.norm):
            function.argtypes = [ctypes.c_char_p]
        self.forward.argtypes, self.backward.argtypes = [ctypes.c_char_p] * 2, [ctypes.c_char_p] * 4


def usable() -> list[str]:
    """The instruction sets that are both built and supported by this CPU, best first."""
    built = [isa for isa in ISAS if _path(isa).exists()]
    if not built:
        return []
    any_kernel = _Kernel(built[-1])  # its `supports` uses no special instructions
    return [isa for isa in built if any_kernel.supports(isa.encode())]


def _load() -> _Kernel:
    """The kernel for the instruction set in COSFORMER_ISA, else for the best."""
    found, isa = usable(), os.environ.get("COSFORMER_ISA")
    if isa and isa not in found:
        if _path(isa).exists():
            raise RuntimeError(f"the kernel for {isa!r} is not supported by this CPU")
        others = ", ".join(found) or "none"
        raise RuntimeError(f"the kernel for {isa!r} is not built; these can be used: {others}")
    if not found:
        raise RuntimeError("it was not built when the package was installed: was there a C++ compiler?")
    return _Kernel(isa or found[0])


@cache
def _loaded() -> _Kernel | str:
    """The kernel, or the reason why there is none."""
    try:
        return _load()
    except (OSError, RuntimeError) as error:
        _log.warning(
            "the native CPU kernel cannot be used (%s); the slower torch backend runs instead", error
        )
        return str(error)


def kernel() -> _Kernel:
    loaded = _loaded()
    assert isinstance(loaded, _Kernel), "a call is refused where there is no kernel"
    return loaded


def problem() -> str | None:
    """Why there is no kernel for this machine, or None."""
    kernel = _loaded()
    return kernel if isinstance(kernel, str) else None


def info() -> dict[str, object]:
    """The instruction set in use, and all usable ones."""
    kernel = _loaded()
    return {} if isinstance(kernel, str) else {"instruction set": kernel.isa, "usable": usable()}


# Calling


def described(t: Tensor | None) -> tuple[int, ...]:
    """The fields of struct cosformer_tensor."""
    return _ABSENT if t is None else (t.data_ptr(), DTYPES[t.dtype], *t.stride())


def _rows(t: Tensor | None) -> Tensor | None:
    """The state with its values in memory and contiguous rows; nearly always t itself."""
    if t is None:
        return None
    t = dense(t)
    return t if t.stride(-1) == 1 else t.contiguous()


def _in_memory(x: Inputs) -> Inputs:
    """The inputs as the kernel reads them."""
    decay = None if x.decay is None else dense(x.decay)
    cu_seqlens = None if x.cu_seqlens is None else x.cu_seqlens.contiguous()
    return Inputs(dense(x.q), dense(x.k), dense(x.v), decay, x.key_mask, cu_seqlens, _rows(x.state))


def result_like(t: Tensor) -> Tensor:
    """A tensor like t, about to be filled; large ones are in huge pages, as mapping small ones takes long."""
    return leased(t, lambda new: kernel().expect(new.data_ptr(), new.nbytes))


def _angles(x: Inputs, call: Call) -> Tensor | None:
    """Radians per position, one per head."""
    return theta(call.horizons * (x.q.shape[1] // len(call.horizons)), _CPU) if call.cosine else None


def _packed(x: Inputs, y: Outputs, call: Call, angles: Tensor | None) -> bytes:
    """struct cosformer_call. It holds addresses: the tensors must outlive it."""
    (B, H, L, D), (_, Hk, S, E) = x.q.shape, x.v.shape
    sequences: tuple[int, ...] = (0, 0)
    mask: tuple[int, ...] = (0, 0, 0)
    rates: tuple[int, ...] = (0, 0, 0, 0, 0)
    if x.cu_seqlens is not None:
        sequences = (len(x.cu_seqlens) - 1, x.cu_seqlens.data_ptr())
    if x.key_mask is not None:
        mask = (x.key_mask.data_ptr(), *x.key_mask.stride())
    if x.decay is not None:
        per_position = x.decay.ndim == 3
        strides = x.decay.stride() if per_position else (0, x.decay.stride(0), 0)
        rates = (x.decay.data_ptr(), per_position, *strides)
    return _CALL.pack(
        B, H, Hk, L, S, D, E, call.causal, call.relu, call.signed, call.q_offset, call.position,
        torch.get_num_threads(), call.eps,
        0 if angles is None else angles.data_ptr(), *sequences, *mask, *rates,
        *described(x.q), *described(x.k), *described(x.v), *described(y.out), y.norm.data_ptr(),
        *described(x.state), *described(y.after),
    )  # fmt: skip


def check(failed: int, rates: Tensor | None = None) -> None:
    """Raise the error that a return code of the kernel means."""
    if failed == 1:
        raise MemoryError("the native kernel could not allocate its scratch memory")
    if failed:
        check_rates(rates)  # the kernel found one that is invalid
        raise RuntimeError(f"the native kernel failed with code {failed}")


def _is_added_to(x: Inputs, call: Call) -> bool:
    """Whether the output is summed in float32 first: a second sweep adds to it, and half would round."""
    return call.two_sided(x) and x.q.dtype != torch.float32


def forward(x: Inputs, call: Call) -> Outputs:
    y, x, angles = Outputs.empty(x, call), _in_memory(x), _angles(x, call)
    y = y._replace(out=result_like(y.out))
    if not _is_added_to(x, call):
        check(kernel().forward(_packed(x, y, call, angles), None), x.decay)
        return y
    summed = y._replace(out=result_like(torch.empty_like(y.out, dtype=torch.float32)))
    check(kernel().forward(_packed(x, summed, call, angles), None), x.decay)
    y.out.copy_(summed.out)
    return y


def plan(x: Inputs, call: Call, graph: bool) -> Run | None:
    """`forward`, packed once for all tensors like these; each run fills in only their addresses."""
    if not all(map(is_, x, _in_memory(x))) or x.cu_seqlens is not None or _is_added_to(x, call):
        return None
    y, angles, run_at = Outputs.empty(x, call), _angles(x, call), kernel().forward
    packed, large = _packed(x, y, call, angles), y.out.nbytes >= LARGE
    shape, strides = y.out.shape, y.out.stride()
    state_shape, state_strides = ((), ()) if y.after is None else (y.after.shape, y.after.stride())
    keeps_norm, layout = graph or call.two_sided(x), call.rest(x)
    hidden = 0 if y.after is None or call.keep_state or not graph else y.after.numel()  # for backward only
    rest_shape, hidden_offset = (layout.norm_size + hidden,), layout.hidden_offset

    def run(q, k, v, decay, mask, before, position, held=angles):
        out = q.new_empty_strided(shape, strides)
        after, after_at, rest, norm_at = None, 0, None, 0
        if call.keep_state:
            after = q.new_empty_strided(state_shape, state_strides, dtype=torch.float32)
            after_at = after.data_ptr()
        if keeps_norm:
            rest = q.new_empty_strided(rest_shape, (1,), dtype=torch.float32)
            norm_at = rest.data_ptr()
            if hidden:
                after_at = norm_at + hidden_offset
        if large:
            out = result_like(out)
        places = _PLACES.pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), norm_at,
            0 if decay is None else decay.data_ptr(),
            0 if mask is None else mask.data_ptr(),
            0 if before is None else before.data_ptr(),
            after_at, position, torch.get_num_threads(),
        )  # fmt: skip
        if failed := run_at(packed, places):
            check(failed, decay)
        return out, after, rest

    return run


def backward(upstream: Upstream, x: Inputs, y: Outputs, call: Call) -> Grads:
    x = _in_memory(x)
    y = Outputs(dense(y.out), y.norm.contiguous(), y.after)  # vmap may expand the normaliser
    upstream = Upstream(dense(upstream.dout), _rows(upstream.dafter))
    after_at = 0 if y.after is None else y.after.data_ptr()
    tensors = x.q, x.k, x.v, x.decay, x.key_mask, x.state
    run = _backward(upstream, x, y, call)
    return run(*upstream, *tensors, y.out, y.norm.data_ptr(), after_at, call.position)


def plan_backward(upstream: Upstream, x: Inputs, y: Outputs, call: Call) -> RunBackward | None:
    """`backward`, packed once for all tensors like these."""
    given = (*x, y.out, upstream.dout, upstream.dafter)
    read = (*_in_memory(x), dense(y.out), dense(upstream.dout), _rows(upstream.dafter))
    return _backward(upstream, x, y, call) if all(map(is_, given, read)) else None


def _backward(upstream: Upstream, x: Inputs, y: Outputs, call: Call) -> RunBackward:
    (B, H, L, _), (_, Hk, S, _) = x.q.shape, x.v.shape
    two_sided, grouped, angles, run_at = call.two_sided(x), Hk != H, _angles(x, call), kernel().backward

    def gradient(like: Tensor, added_to: bool) -> Tensor:  # one per query head
        dtype = torch.float32 if added_to else like.dtype
        return projected(like, H, like.shape[2], like.shape[3], dtype)

    likes = gradient(x.q, call.causal or two_sided), *(gradient(t, two_sided or grouped) for t in (x.k, x.v))
    kinds = [(t.shape, t.stride(), t.dtype) for t in likes]
    large = any(t.nbytes >= LARGE for t in likes)
    dstate_like = None if x.state is None else x.state.new_empty(x.state.shape)
    tensors = (upstream.dout, *likes, upstream.dafter, dstate_like)
    packed = _packed(x, y, call, angles)
    packed_grads = _GRADS.pack(*(number for t in tensors for number in described(t)), 0, 0)
    unseen = call.q_offset + L if call.causal and S > call.q_offset + L else None  # keys that no query sees
    dtype, summed = x.q.dtype, x.q.dtype != torch.float32
    per_position = x.decay is not None and x.decay.ndim == 3
    sequences = 1 if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    rate_size = S if per_position else sequences
    sums_shape = (B, H, max(call.q_offset + L, S))

    def run(dout, dafter, q, k, v, decay, mask, state, out, norm_at, after_at, position, held=angles):
        dq, dk, dv = [q.new_empty_strided(shape, strides, dtype=kind) for shape, strides, kind in kinds]
        if large:
            dq, dk, dv = result_like(dq), result_like(dk), result_like(dv)
        if unseen is not None:
            dk[:, :, unseen:] = 0
            dv[:, :, unseen:] = 0
        dstate = None if state is None else state.new_empty(state.shape)
        ddecay, sums = None, (0, 0)
        if decay is not None:
            dA = decay.new_zeros(sums_shape, dtype=torch.float64)
            ddecay = decay.new_zeros((B, H, rate_size), dtype=torch.float64)
            sums = dA.data_ptr(), ddecay.data_ptr()
        places = _PLACES.pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), norm_at,
            0 if decay is None else decay.data_ptr(),
            0 if mask is None else mask.data_ptr(),
            0 if state is None else state.data_ptr(),
            after_at, position, torch.get_num_threads(),
        )  # fmt: skip
        grad_places = _GRAD_PLACES.pack(
            dout.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
            0 if dafter is None else dafter.data_ptr(),
            0 if dstate is None else dstate.data_ptr(), *sums,
        )  # fmt: skip
        check(run_at(packed, packed_grads, places, grad_places))
        if grouped:
            dk, dv = (g.transpose(1, 2).unflatten(2, (Hk, H // Hk)).sum(3).transpose(1, 2) for g in (dk, dv))
        if ddecay is not None:
            ddecay = (ddecay if per_position else ddecay.sum((0, 2))).to(decay.dtype)
        if summed:
            dq, dk, dv = dq.to(dtype), dk.to(dtype), dv.to(dtype)
        return Grads(dq, dk, dv, ddecay, dstate)

    return run


BACKEND = Backend(
    forward,
    backward,
    ("cpu",),
    tuple(DTYPES),
    range(1, 257),
    plan=plan,
    plan_backward=plan_backward,
    checks_rates=True,
    problem=problem,
    info=info,
)
