"""What torch is doing now, and whether a tensor lies in memory: the one place that asks its private names."""

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_tracing
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def tracing() -> bool:
    """Whether operators are recorded or intercepted: compile, export, jit.trace, fake tensors, modes."""
    return is_compiling() or _is_tracing() or is_in_torch_dispatch_mode()


def transforming(*tensors: Tensor | None) -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is on, or wraps one of these."""
    if _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return any(x is not None and is_functorch_wrapped_tensor(x) for x in tensors)


def is_plain(x: Tensor) -> bool:
    """Whether it is no subclass, such as a fake tensor, no mere shape, and not many in one (as torch.autograd
    makes of many gradients)."""
    return type(x) in _PLAIN and not x.is_meta and not is_legacy_batchedtensor(x)


def beyond_one_gradient(dy: Tensor) -> bool:
    """Whether a backward is asked for more than the gradients of one dy: theirs, too, or those of many dy."""
    return torch.is_grad_enabled() or transforming(dy) or not is_plain(dy)


def have_addresses(*tensors: Tensor) -> bool:
    """Whether values may now be read and written where these tensors point to."""
    return not tracing() and all(map(is_plain, tensors)) and not transforming(*tensors)
