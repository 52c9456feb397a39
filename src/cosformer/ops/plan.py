"""Plans: a call that was checked and packed once runs again by the addresses of its tensors.

A short call is mostly Python: what is checked, and what the kernel is told. Both depend on the options and on
the tensors' shapes, strides and dtypes alone, so a call that was checked makes a plan under these, by which
it and all like it run; its backward is packed once, too. Where torch traces, maps or casts there are no
plans, and all is done anew; so it is with a backend that makes none.
"""

from types import NoneType
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active, _dispatch_keys, _is_any_autocast_enabled, _is_tracing
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .call import Backend, Call, Grads, Inputs, Outputs, Run, RunBackward, Upstream
from .checks import Rates
from .operator import choose, gradients

MOST = 512  # plans: where every call has its own shape they are of no use, and must not pile up
_LASTING = frozenset((bool, int, float, str, type, NoneType))  # options that cannot change behind a key

_plans: dict[tuple, "Plan"] = {}


class Plan:
    """What is left to do of a call."""

    __slots__ = ("backend", "backwards", "call", "graph", "last", "run")

    def __init__(self, run: Run, backend: Backend, call: Call, *, graph: bool, length: int):
        self.run, self.call, self.graph = run, call, graph
        self.backend, self.backwards = backend, dict[tuple | None, RunBackward]()
        self.last = min(call.horizons) - length + 1  # the position up to which a stream's start is in reach

    def __call__(self, q, k, v, decay, key_mask, state=None, position=0) -> tuple[Tensor, Any]:
        """The output and, if it is wanted, the state after it."""
        if not self.graph:
            out, after, _ = self.run(q, k, v, decay, key_mask, state, position)
            return out, after
        found = _apply(self, position, q, k, v, decay, key_mask, state)
        return found if self.call.keep_state else (found, None)

    def gradients(self, dout, dafter, tensors, out, after, rest, position) -> Grads:
        """Of the tensors of a call that this plan ran; what was saved of it may have been elsewhere since."""
        like = None if dout is None or is_grad_enabled() else _alike(dout, dafter, *tensors, out, after, rest)
        run = self.backwards.get(like)
        norms = out.numel() // out.shape[3]
        if run is None:
            q, k, v, decay, key_mask, state = tensors
            x, call = Inputs(q, k, v, decay, key_mask, None, state), self.call._replace(position=position)
            hidden = None if after is not None or len(rest) == norms else rest[norms:]
            whole = after if hidden is None else hidden.view(call.state_shape(q, v))
            y = Outputs(out, rest[:norms].view(out.shape[:3]), whole)
            mapped = any(t is not None and is_functorch_wrapped_tensor(t) for t in (dout, dafter))
            if like is not None and not mapped:
                run = self.backend.plan_backward(Upstream(dout, dafter), x, y, call)
            if run is None:
                return gradients(dout, dafter, x, y, call)
            if len(self.backwards) >= MOST:
                self.backwards.clear()
            self.backwards[like] = run
        norm_at, after_at = rest.data_ptr(), 0
        if after is not None:
            after_at = after.data_ptr()
        elif len(rest) > norms:
            after_at = norm_at + 4 * norms
        return run(dout, dafter, *tensors, out, norm_at, after_at, position)


def find(tensors: tuple, options: tuple) -> tuple[tuple | None, Plan | None]:
    """The key under which calls like this one are kept, None if none are, and the plan that is there.

    The tensors are q, k, v, decay, key_mask, state. Options that are equal must mean the same: True == 1.
    """
    like = _alike(*tensors)
    if like is None or _top_saved_tensors_default_hooks(False) is not None:
        return None, None  # checkpointing's hooks compare what is saved, which must not depend on plans
    key = (is_grad_enabled(), like, options)
    try:
        return key, _plans.get(key)
    except TypeError:  # an option that has no hash
        return None, None


def _alike(*tensors) -> tuple | None:
    """What tensors must share to be taken by one plan; None where there are no plans."""
    if is_compiling() or _is_tracing() or is_in_torch_dispatch_mode() or _is_any_autocast_enabled():
        return None
    if forward_ad._current_level >= 0 or _are_functorch_transforms_active():
        return None
    like = list[Any]()
    for x in tensors:
        if x is None:
            like.append(None)
        elif type(x) is Tensor:  # its keys tell the device, a transform, and values that are not in memory
            like += (x.shape, x.stride(), x.dtype, x.requires_grad, _dispatch_keys(x).raw_repr())
        else:  # a subclass, or what the checks must look at
            return None
    return tuple(like)


def make(key: tuple | None, x: Inputs, call: Call, given: Rates | None) -> Plan | None:
    """A plan for calls like this one, which was checked; `given` are its rates before any cast."""
    if key is None or x.decay is not given or any(is_functorch_wrapped_tensor(t) for t in x if t is not None):
        return None
    recording, _, options = key
    lasting = [n for option in options for n in (option if type(option) is tuple else (option,))]
    if not _LASTING.issuperset(map(type, lasting)):
        return None
    backend = choose(call.backend, x.q, x.v)
    graph = recording and any(t.requires_grad for t in x if t is not None)
    run = backend.plan(x, call, graph)
    if run is None:
        return None
    if len(_plans) >= MOST:
        _plans.clear()
    plan = _plans[key] = Plan(run, backend, call, graph=graph, length=x.q.shape[2])
    return plan


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: Plan, position: int, *tensors: Tensor | None):
        out, after, rest = plan.run(*tensors, position)
        ctx.plan, ctx.position = plan, position
        ctx.save_for_backward(*tensors, out, after, rest)
        if after is None:
            return out
        ctx.set_materialize_grads(False)
        return out, after

    @staticmethod
    def backward(ctx, dout: Tensor | None, dafter: Tensor | None = None):
        *tensors, out, after, rest = ctx.saved_tensors
        grads = ctx.plan.gradients(dout, dafter, tensors, out, after, rest, ctx.position)
        return None, None, grads.q, grads.k, grads.v, grads.decay, None, grads.state


# Function.apply looks for transforms first, which were excluded when the plan was found.
_apply = super(torch.autograd.Function, _Planned).apply
