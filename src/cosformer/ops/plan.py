"""Plans: a call that was checked and packed once runs again by the addresses of its tensors.

A short call is mostly Python: what is checked, and what the kernel is told. Both depend on the options and on
the tensors' shapes, strides and dtypes alone, so a call that has passed leaves a plan under these, and the
next one like it goes straight to the backend. Where torch traces, maps or casts there are no plans, and all
is done anew; so it is with a backend that makes none.
"""

from types import NoneType
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _dispatch_keys, _is_any_autocast_enabled
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.jit import is_tracing
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .call import Call, Inputs, Outputs, Run
from .checks import Rates
from .operator import choose, gradients

MOST = 512  # plans: where every call has its own shape they are of no use, and must not pile up
_LASTING = frozenset((bool, int, float, str, tuple, NoneType))  # options that cannot change behind a key

_plans: dict[tuple, "Plan"] = {}


class Plan:
    """What is left to do of a call."""

    __slots__ = ("call", "graph", "last", "run")

    def __init__(self, run: Run, call: Call, *, graph: bool, length: int):
        self.run, self.call, self.graph = run, call, graph
        self.last = min(call.horizons) - length + 1  # the position up to which a stream's start is in reach

    def __call__(self, q, k, v, decay, key_mask, state=None, position=0) -> tuple[Tensor, Any]:
        """The output and, if it is wanted, the state after it."""
        if self.graph:
            return _Planned.apply(self, position, q, k, v, decay, key_mask, state)
        out, _, after = self.run(q, k, v, decay, key_mask, state, position)
        return out, after


def find(q, k, v, decay, key_mask, state, *options) -> tuple[tuple | None, Plan | None]:
    """The key under which calls like this one are kept, None if none are, and the plan that is there."""
    if is_compiling() or is_tracing() or is_in_torch_dispatch_mode() or _is_any_autocast_enabled():
        return None, None
    if forward_ad._current_level >= 0:
        return None, None
    graph, like = False, list[Any]()
    for x in (q, k, v, decay, key_mask, state):
        if type(x) is Tensor:  # its keys tell the device, a transform, and values that are not in memory
            like += (x.shape, x.stride(), x.dtype, _dispatch_keys(x).raw_repr())
            graph = graph or x.requires_grad
        elif x is None:
            like.append(None)
        else:  # a subclass, or what the checks must look at
            return None, None
    key = (graph and is_grad_enabled(), tuple(like), options, (*map(type, options),))  # types: True == 1
    try:
        return key, _plans.get(key)
    except TypeError:  # an option that has no hash
        return None, None


def keep(key: tuple | None, x: Inputs, call: Call, given: Rates | None) -> None:
    """Leave a plan for calls like this one, which has passed; `given` are its rates before any cast."""
    if key is None or x.decay is not given or any(is_functorch_wrapped_tensor(t) for t in x if t is not None):
        return
    graph, _, options, kinds = key
    numbers = (number for option in options if type(option) is tuple for number in option)
    if not _LASTING.issuperset(kinds) or not _LASTING.issuperset(map(type, numbers)):
        return
    run = choose(call.backend, x.q, x.v).plan(x, call, graph)
    if run is None:
        return
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = Plan(run, call, graph=graph, length=x.q.shape[2])


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: Plan, position: int, *tensors: Tensor | None):
        out, norm, after = plan.run(*tensors, position)
        ctx.call, ctx.position = plan.call, position
        # As many as without a plan, since checkpointing compares them: absent is empty, as in operator.py.
        ctx.save_for_backward(*tensors, out, norm, norm.new_empty(0) if after is None else after)
        ctx.set_materialize_grads(False)
        return out, after

    @staticmethod
    def backward(ctx, dout: Tensor | None, dafter: Tensor | None):
        q, k, v, decay, key_mask, state, out, norm, after = ctx.saved_tensors
        y = Outputs(out, norm, after if after.ndim == 4 else None)
        x, call = Inputs(q, k, v, decay, key_mask, None, state), ctx.call._replace(position=ctx.position)
        grads = gradients(dout, dafter, x, y, call)
        return None, None, grads.q, grads.k, grads.v, grads.decay, None, grads.state
