"""The native backend: linear attention over the compiled kernel (csrc/), and the choice of an instruction set.

The kernel is a plain C library, one per instruction set, loaded on first use. It works on tensors in place, whatever their strides.
"""

import ctypes
import functools
import logging
import os
import struct
import sys
import threading
from pathlib import Path

import torch  # before the kernel is loaded, so that both use the OpenMP runtime that torch brings

ISAS = ("avx512", "avx2", "neon", "baseline")  # best first
MAX_DIM = 256  # of keys and of values

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CALL = struct.Struct("=13qd6q5q24qq12q")  # struct cosformer_call
_GRADS = struct.Struct("=36q2q")  # struct cosformer_grads
_CONVOLUTION = struct.Struct("=8q12q2q")  # struct cosformer_convolution_call
_ABSENT = (0,) * 6  # a tensor that is not there

_log = logging.getLogger("cosformer")
_lock = threading.Lock()
_library: "_Kernel | str | None" = None  # the loaded kernel, or the reason why there is none


# Loading


def _directory() -> Path:
    """Where the libraries are: an editable install keeps them apart from the sources, and the package's path names both places."""
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
        if library.cosformer_abi() != (_CALL.size * 1000 + _GRADS.size) * 1000 + _CONVOLUTION.size:
            raise RuntimeError(
                f"{_path(isa)} was built from other sources than this module; install the package again"
            )
        self.supports, self.forward, self.backward = (
            library.cosformer_cpu_supports,
            library.cosformer_forward,
            library.cosformer_backward,
        )
        self.convolution = library.cosformer_convolution
        self.supports.argtypes = self.forward.argtypes = self.convolution.argtypes = [ctypes.c_char_p]
        self.backward.argtypes = [ctypes.c_char_p, ctypes.c_char_p]


def available() -> list[str]:
    """The instruction sets that are both built and supported by this CPU, best first."""
    built = [isa for isa in ISAS if _path(isa).exists()]
    if not built:
        return []
    supports = _Kernel(
        built[-1]
    ).supports  # any of them may be asked: this function uses no special instructions
    return [isa for isa in built if supports(isa.encode())]


def load(isa: str | None = None) -> None:
    """Load the kernel for `isa` (by default COSFORMER_ISA, else the best available) and use it from now on."""
    global _library
    isa = isa or os.environ.get("COSFORMER_ISA")
    usable = available()
    if isa and isa not in usable:
        problem = (
            "not supported by this CPU"
            if _path(isa).exists()
            else f"not built; these can be used: {', '.join(usable) or 'none'}"
        )
        raise RuntimeError(f"the kernel for {isa!r} is {problem}")
    if not usable:
        raise RuntimeError("it was not built when the package was installed: was there a C++ compiler?")
    _library = _Kernel(isa or usable[0])


def _loaded() -> "_Kernel | str":
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                try:
                    load()
                except (OSError, RuntimeError) as error:
                    _library = str(error)
                    _log.warning(
                        "the native CPU kernel cannot be used (%s); the slower torch backend runs instead",
                        error,
                    )
    assert _library is not None
    return _library


def _kernel() -> _Kernel:
    library = _loaded()
    if isinstance(library, str):
        raise RuntimeError(f"the native kernel cannot be used: {library}")
    return library


def info() -> dict[str, object]:
    """The instruction set loaded, and those that could be."""
    library = _loaded()
    return {} if isinstance(library, str) else {"instruction set": library.isa, "usable": available()}


def unsupported(q, k, v) -> str | None:
    """Why the kernel cannot run on these tensors, or None if it can."""
    if not (q.is_cpu and k.is_cpu and v.is_cpu):
        return "the native kernel runs on the CPU"
    if q.dtype not in _DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"the native kernel takes float32, bfloat16 or float16, the same for q, k and v; got {q.dtype}, {k.dtype}, {v.dtype}"
    if not (1 <= q.shape[-1] <= MAX_DIM and 1 <= v.shape[-1] <= MAX_DIM):
        return f"the native kernel takes key and value dimensions of 1 to {MAX_DIM}; got {q.shape[-1]} and {v.shape[-1]}"
    library = _loaded()
    return library if isinstance(library, str) else None


# Calling


def _tensor(t) -> tuple:
    return _ABSENT if t is None else (t.data_ptr(), _DTYPES[t.dtype], *t.stride())


def _projected(B, H, length, size, dtype) -> torch.Tensor:
    """An empty (B, H, length, size) laid out as (B, length, H, size): what the projections around attention read and write."""
    return torch.empty_strided((B, H, length, size), (length * H * size, size, H * size, 1), dtype=dtype)


def _dense(t):
    """The tensor with its values in memory: torch may keep a sign, or zeros, as a mark only."""
    if t is None or not (t.is_neg() or t._is_zerotensor()):
        return t
    return t.resolve_neg().clone()


def _rows(t):
    """A state whose rows are contiguous; nearly always the state itself."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def _call(
    q,
    k,
    v,
    out,
    norm,
    state,
    state_out,
    theta,
    decay,
    key_mask,
    cu_seqlens,
    causal,
    q_offset,
    position,
    relu,
    signed,
    eps,
) -> bytes:
    B, H, L, D = q.shape
    _, Hk, S, E = v.shape
    sequences = (0, 0) if cu_seqlens is None else (len(cu_seqlens) - 1, cu_seqlens.data_ptr())
    mask = (0, 0, 0) if key_mask is None else (key_mask.data_ptr(), *key_mask.stride())
    if decay is None:
        rates = (0, 0, 0, 0, 0)
    elif decay.dim() == 1:
        rates = (decay.data_ptr(), 0, 0, decay.stride(0), 0)
    else:
        rates = (decay.data_ptr(), 1, *decay.stride())
    return _CALL.pack(
        B, H, Hk, L, S, D, E, causal, relu, signed, q_offset, position, torch.get_num_threads(), eps,
        0 if theta is None else theta.data_ptr(), *sequences, *mask, *rates,
        *_tensor(q), *_tensor(k), *_tensor(v), *_tensor(out), norm.data_ptr(), *_tensor(state), *_tensor(state_out),
    )  # fmt: skip


@functools.lru_cache  # by identity: the caller has one tensor for all calls with the same horizon
def _per_head(theta, heads):
    return None if theta is None else theta.expand(heads).contiguous()


def _contiguous(theta, cu_seqlens, heads):
    """One angle per head, and the boundaries, as plain arrays."""
    return _per_head(theta, heads), None if cu_seqlens is None else cu_seqlens.contiguous()


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("the native kernel could not allocate its scratch memory")


def forward(
    q,
    k,
    v,
    theta,
    decay,
    key_mask,
    cu_seqlens,
    state,
    *,
    causal,
    q_offset,
    position,
    relu,
    signed,
    eps,
    keep_state,
):
    """Returns out, the normaliser before its clamp, and the state (empty unless kept or needed by `backward`)."""
    B, H, L, D = q.shape
    E = v.shape[-1]
    theta, cu_seqlens = _contiguous(theta, cu_seqlens, H)
    two_sweeps = decay is not None and not causal  # the second adds to what the first wrote
    q, k, v, state, decay = map(_dense, (q, k, v, state, decay))
    out = _projected(B, H, L, E, torch.float32 if two_sweeps else q.dtype)
    norm = torch.empty((B, H, L), dtype=torch.float32)
    state_out = None
    if cu_seqlens is None and not two_sweeps and (keep_state or not causal):
        state_out = torch.empty((B, H, D if theta is None else 2 * D, E + 1), dtype=torch.float32)
    state = _rows(state)
    call = _call(
        q,
        k,
        v,
        out,
        norm,
        state,
        state_out,
        theta,
        decay,
        key_mask,
        cu_seqlens,
        causal,
        q_offset,
        position,
        relu,
        signed,
        eps,
    )
    _check(_kernel().forward(call))
    return out.to(q.dtype) if two_sweeps else out, norm, torch.empty(0) if state_out is None else state_out


def backward(
    dout,
    dstate,
    q,
    k,
    v,
    out,
    norm,
    state,
    state_out,
    theta,
    decay,
    key_mask,
    cu_seqlens,
    *,
    causal,
    q_offset,
    position,
    relu,
    signed,
    eps,
):
    """Returns dq, dk, dv, the gradient of the rates (None without decay) and of the incoming state (None without one)."""
    B, H, L, D = q.shape
    _, Hk, S, E = v.shape
    theta, cu_seqlens = _contiguous(theta, cu_seqlens, H)
    two_sweeps, grouped = decay is not None and not causal, Hk != H
    dout, dstate, q, k, v, out, state, decay = map(_dense, (dout, dstate, q, k, v, out, state, decay))
    norm = norm.contiguous()  # folded by vmap it may be an expanded view

    def gradient(like, accumulated):  # one per query head, laid out as (B, length, H, size)
        return _projected(B, H, like.shape[2], like.shape[3], torch.float32 if accumulated else like.dtype)

    dq = gradient(q, causal or two_sweeps)
    dk, dv = (gradient(t, two_sweeps or grouped) for t in (k, v))
    if causal and S > q_offset + L:  # keys that no query sees
        dk[:, :, q_offset + L :] = 0
        dv[:, :, q_offset + L :] = 0
    dstate, state = _rows(dstate), _rows(state)
    dstate_in = None if state is None else torch.empty(state.shape, dtype=torch.float32)
    state_out = None if state_out is None or state_out.numel() == 0 else state_out
    ddecay, rates = None, (0, 0)
    if decay is not None:
        dA = torch.zeros((B, H, max(q_offset + L, S)), dtype=torch.float64)
        per_head = 1 if cu_seqlens is None else len(cu_seqlens) - 1
        ddecay = torch.zeros((B, H, S if decay.dim() == 3 else per_head), dtype=torch.float64)
        rates = (dA.data_ptr(), ddecay.data_ptr())

    call = _call(
        q,
        k,
        v,
        out,
        norm,
        state,
        state_out,
        theta,
        decay,
        key_mask,
        cu_seqlens,
        causal,
        q_offset,
        position,
        relu,
        signed,
        eps,
    )
    grads = _GRADS.pack(
        *_tensor(dout),
        *_tensor(dq),
        *_tensor(dk),
        *_tensor(dv),
        *_tensor(dstate),
        *_tensor(dstate_in),
        *rates,
    )
    _check(_kernel().backward(call, grads))

    if grouped:
        dk, dv = (g.transpose(1, 2).unflatten(2, (Hk, H // Hk)).sum(3).transpose(1, 2) for g in (dk, dv))
    if ddecay is not None:
        ddecay = (ddecay if decay.dim() == 3 else ddecay.sum((0, 2))).to(decay.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), ddecay, dstate_in


# The short convolution of a layer (ops/convolution.py)


def convolves(x: torch.Tensor) -> bool:
    """Whether the kernel takes this tensor (B, L, C)."""
    return x.is_cpu and x.dtype in _DTYPES and not x.is_neg() and not isinstance(_loaded(), str)


def convolve(x, taps, ahead, boundaries) -> torch.Tensor:
    """x (B, L, C) with taps (width, C), in float32, -> (B, L, C)."""
    y = torch.empty(x.shape, dtype=x.dtype)
    _check(_kernel().convolution(_convolution(x, y, len(taps), ahead, boundaries, taps, None)))
    return y


def convolution_weight_gradient(x, dy, width, ahead, boundaries) -> torch.Tensor:
    """The gradient (width, C) of the taps, in float32."""
    parts = torch.zeros((torch.get_num_threads(), width, x.shape[2]), dtype=torch.float32)
    _check(_kernel().convolution(_convolution(x, dy, width, ahead, boundaries, None, parts)))
    return parts.sum(0)


def _convolution(x, y, width, ahead, boundaries, taps, parts) -> bytes:
    (B, L, C), threads = x.shape, torch.get_num_threads()
    sequences = (0, 0) if boundaries is None else (len(boundaries) - 1, boundaries.data_ptr())
    tensors = [(t.data_ptr(), _DTYPES[t.dtype], t.stride(0), 0, t.stride(1), t.stride(2)) for t in (x, y)]
    pointers = (0 if t is None else t.data_ptr() for t in (taps, parts))
    return _CONVOLUTION.pack(B, L, C, width, ahead, threads, *sequences, *tensors[0], *tensors[1], *pointers)
