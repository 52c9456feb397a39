"""What the kernels ask of a device: how it multiplies, and which block sizes suit it."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from . import blocks as table
from .blocks import Blocks, fitted

VERSION = triton.__version__  # not from package metadata: torch for AMD installs it by another name
INTERPRETED = triton.knobs.runtime.interpret  # on the CPU: slow, exact, for tests


def arithmetic(dtype: torch.dtype, device: torch.device) -> tuple[Any, Any, str]:
    """How matrix products round: `rounded`, `dot` and `precision` of Options.

    float16 lacks the range for sums over tokens; TF32 has it, and as many digits.
    """
    if dtype == torch.bfloat16:
        return tl.bfloat16, tl.float32 if INTERPRETED else tl.bfloat16, "ieee"
    fast = dtype == torch.float16 or torch.backends.cuda.matmul.fp32_precision == "tf32"
    return tl.float32, tl.float32, "tf32" if fast and has_tf32(device) else "ieee"


@cache
def has_tf32(device: torch.device) -> bool:
    """NVIDIA has TF32 since Ampere, AMD in the MI300 family. Elsewhere products are exact, and slow."""
    if device.type != "cuda":
        return INTERPRETED
    if torch.version.hip:
        return "gfx942" in torch.cuda.get_device_properties(device).gcnArchName
    return torch.cuda.get_device_capability(device) >= (8, 0)


def bits(dtype: torch.dtype, device: torch.device) -> int:
    """The bits of a matrix product's operand, as the table of block sizes counts them."""
    rounded, _, precision = arithmetic(dtype, device)
    if rounded is tl.bfloat16:
        return 16
    return 19 if precision == "tf32" else 32


def blocks(D: int, E: int, dtype: torch.dtype, device: torch.device) -> Blocks:
    if INTERPRETED:
        return fitted(table.INTERPRETED, D, E)
    return table.blocks(D, E, bits(dtype, device), *described(device))


@cache
def described(device: torch.device) -> tuple[str, int]:
    """A device's name, and the bytes of shared memory that one program may use."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return torch.cuda.get_device_name(device), properties["max_shared_mem"]
