"""Plans: a call that was checked and packed once runs again by the addresses of its tensors.

A short call spends most of its time in Python, on checks and on packing the kernel's arguments. Both depend
only on the options and on the tensors' shapes, strides and dtypes, so the first such call, once checked,
makes a plan that it and all calls like it run by; their backward is packed once, too. There are no plans
while torch traces, maps or casts, nor for a backend that makes none.

Building a plan's key takes longer than running a small call. Most calls are like the last one with the same
options, and torch's own guards detect that ten times as fast.
"""

from collections.abc import Sequence
from operator import itemgetter
from types import NoneType
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch._C import _dispatch_keys, _is_any_autocast_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._dynamo import guards
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import modes
from .call import Backend, Call, Grads, Inputs, Outputs, Run, RunBackward, Upstream
from .checks import Rates
from .operator import choose, gradients

MOST = 512  # plans kept: if every call has its own shape they are useless, and must not pile up
_LASTING = frozenset((bool, int, float, str, type, NoneType))  # types of options that are immutable

_plans: dict[tuple, "Plan"] = {}
_latest: dict[tuple, "Plan"] = {}  # by the part of a key that needs no look at the tensors


class _Like:
    """Tells whether tensors are like those it was made from; the same ones must be missing.

    It may say no where `_alike` finds them alike, as for one tensor given twice, but never yes where `_alike`
    does not, nor under a mode or transform that was not active before.
    """

    __slots__ = ("_check", "_given")

    def __init__(self, tensors: Sequence[Tensor | None]):
        given = [i for i, x in enumerate(tensors) if x is not None]
        self._given = itemgetter(*given)  # at least q, k and v, so a tuple
        there = self._given(tensors)
        sizes, strides = [list(x.shape) for x in there], [list(x.stride()) for x in there]
        make = getattr(guards, "TensorGuards", None)  # without it calls are found by key
        self._check = (
            make(*there, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
            if make is not None
            else lambda *_: False
        )

    def __call__(self, tensors: Sequence[Tensor | None]) -> bool:
        return self._check(*self._given(tensors))


class Plan:
    """What remains of a call once it is checked and packed."""

    __slots__ = ("backend", "backwards", "call", "graph", "last", "latest", "layout", "like", "run")

    def __init__(self, run: Run, backend: Backend, x: Inputs, call: Call, *, graph: bool):
        self.run, self.call, self.graph, self.layout = run, call, graph, call.rest(x)
        self.like = _Like((x.q, x.k, x.v, x.decay, x.key_mask, x.state))
        self.backend, self.backwards = backend, dict[tuple | None, tuple[_Like, RunBackward]]()
        self.latest: dict[bool, tuple[_Like, RunBackward]] = {}  # latest backward, by dafter is None
        # the last position from which a stream's start is within the horizon
        self.last = min(call.horizons) - x.q.shape[2] + 1

    def __call__(self, q, k, v, decay, key_mask, state=None, position=0) -> tuple[Tensor, Any]:
        """The output and, if wanted, the state after it."""
        if not self.graph:
            out, after, _ = self.run(q, k, v, decay, key_mask, state, position)
            return out, after
        found = _apply(self, position, q, k, v, decay, key_mask, state)
        return found if self.call.keep_state else (found, None)

    def gradients(self, dout, dafter, tensors, out, after, rest, position) -> Grads:
        """The gradients of a call that this plan ran; its saved tensors may have moved since."""
        given = (dout, dafter, *tensors, out, after, rest)
        planned = dout is not None and not is_grad_enabled() and not _plans_are_off()
        found = self.latest.get(dafter is None) if planned else None
        if found is None or not found[0](given):
            like = _alike(*given) if planned else None
            found = self.backwards.get(like)
            if found is None:
                x, y, call = self._ran(tensors, out, after, rest, position)
                found = self._backward_for(like, given, x, y, call)
                if found is None:
                    return gradients(dout, dafter, x, y, call)
            self.latest[dafter is None] = found
        after_at = self.layout.hidden_at(rest) if after is None else after.data_ptr()
        return found[1](dout, dafter, *tensors, out, rest.data_ptr(), after_at, position)

    def _ran(self, tensors, out, after, rest, position) -> tuple[Inputs, Outputs, Call]:
        """The call that this plan ran, as the operator takes it."""
        q, k, v, decay, key_mask, state = tensors
        call = self.call._replace(position=position)
        norm, hidden = self.layout.parts(rest)
        y = Outputs(out, norm, hidden if after is None else after)
        return Inputs(q, k, v, decay, key_mask, None, state), y, call

    def _backward_for(self, like, given, x, y, call) -> tuple[_Like, RunBackward] | None:
        """A backward for tensors like these, made and kept; None if there can be none."""
        dout, dafter = given[:2]
        plain = all(modes.is_plain(t) for t in (dout, dafter) if t is not None)
        if like is None or not plain or modes.transforming(dout, dafter):
            return None
        run = self.backend.plan_backward(Upstream(dout, dafter), x, y, call)
        if run is None:
            return None
        if len(self.backwards) >= MOST:
            self.backwards.clear()
        found = self.backwards[like] = _Like(given), run
        return found


def find(tensors: tuple, options: tuple) -> tuple[tuple | None, Plan | None]:
    """The key and the plan of calls like this one; the key is None if not needed or if there are no plans.

    The tensors are q, k, v, decay, key_mask, state. Options that are equal must mean the same: True == 1.
    """
    if _plans_are_off() or _top_saved_tensors_default_hooks(False) is not None:
        return None, None  # checkpointing's hooks compare what is saved, which must not depend on plans
    _, _, _, decay, key_mask, state = tensors
    missing = decay is None, key_mask is None, state is None
    kind = (is_grad_enabled(), is_inference_mode_enabled(), missing, options)
    try:
        plan = _latest.get(kind)
    except TypeError:  # an unhashable option
        return None, None
    if plan is not None and plan.like(tensors):
        return None, plan
    try:
        like = _alike(*tensors)
    except RuntimeError:  # a tensor without strides, which the checks refuse
        like = None
    if like is None:
        return None, None
    plan = _plans.get((kind, like))
    if plan is not None:
        _latest[kind] = plan
    return (kind, like), plan


def clear() -> None:
    """Forget all plans."""
    _plans.clear()
    _latest.clear()


def _plans_are_off() -> bool:
    """Whether plans are off now, for a reason that the tensors do not show."""
    return is_compiling() or forward_ad._current_level >= 0


def _alike(*tensors) -> tuple | None:
    """What tensors must have in common to share a plan; None if there are no plans."""
    if modes.tracing() or modes.transforming() or _is_any_autocast_enabled():
        return None
    like = list[Any]()
    for x in tensors:
        if x is None:
            like.append(None)
        elif type(x) is Tensor:  # its keys show the device, a transform, and values not in memory
            like += (x.shape, x.stride(), x.dtype, x.requires_grad, _dispatch_keys(x).raw_repr())
        else:  # a subclass, or an argument for the checks to refuse or convert
            return None
    return tuple(like)


def make(key: tuple | None, x: Inputs, call: Call, given: Rates | None) -> Plan | None:
    """A plan for calls like this one, which was checked; `given` is its decay before any cast."""
    if key is None or x.decay is not given or modes.transforming(*x):
        return None
    recording, _, _, options = key[0]
    lasting = [n for option in options for n in (option if type(option) is tuple else (option,))]
    if not _LASTING.issuperset(map(type, lasting)):
        return None
    backend = choose(call.backend, x.q, x.v)
    graph = recording and any(t.requires_grad for t in x if t is not None)
    run = backend.plan(x, call, graph)
    if run is None:
        return None
    if len(_plans) >= MOST:
        clear()
    plan = _plans[key] = _latest[key[0]] = Plan(run, backend, x, call, graph=graph)
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


# Skip Function.apply's search for transforms, which `find` has excluded.
_apply = super(torch.autograd.Function, _Planned).apply
