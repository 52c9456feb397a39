"""State: what a stream remembers, how it takes in the next tokens, and how it takes the last of them back.

A segment is a run of tokens; its state knows how much the segment fades what came before it:

    (a, state_a) then (b, state_b) = (a b, b state_a + state_b)      a = exp(-the sum of a segment's rates)

This is associative, so a sequence may be cut anywhere and its parts joined in any grouping: by threads, or by
processes that each hold a part (parallel.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from .call import Call, Inputs
from .checks import check_horizons, shown
from .fades import faded_state, fades
from .operator import attend


class Taken(NamedTuple):
    """Keys that a state has taken in since its snapshot, kept so that the last of them can be taken back."""

    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    decay: Tensor | None
    call: Call

    def first(self, n: int) -> "Taken":
        rates = self.decay[:, :, :n] if self.decay is not None and self.decay.ndim == 3 else self.decay
        mask = None if self.key_mask is None else self.key_mask[:, :n]
        return self._replace(k=self.k[:, :, :n], v=self.v[:, :, :n], key_mask=mask, decay=rates)

    def map(self, change: Callable[[Tensor], Tensor], *, rows: bool) -> "Taken":
        """Change every tensor; `rows`: the change is of batch rows, which rates per head do not have."""
        keep = rows and self.decay is not None and self.decay.ndim == 1
        rates = self.decay if self.decay is None or keep else change(self.decay)
        mask = None if self.key_mask is None else change(self.key_mask)
        return self._replace(k=change(self.k), v=change(self.v), key_mask=mask, decay=rates)


@dataclass(frozen=True, eq=False)
class State:
    """What a stream remembers: a tensor (B, H, F, E + 1), its last column the normaliser, and a position.

    F is 2D, or D with an infinite horizon. A State is never changed in place, so an old one stays
    valid; `snapshot` and `rollback` return to any token in between. It is differentiable, a pytree
    to torch, and `torch.load` reads a saved one as safely as a tensor.

    The sums in the tensor depend on the horizon, so a State knows its own, and another is refused. Rates may
    change, begin or end anywhere: each token brings its own, and no decay is a rate of 0.
    """

    tensor: Tensor
    position: int = 0
    horizons: tuple[float, ...] | None = None  # one, or one per head; None if made by hand: the next call's
    origin: "State | None" = None  # set by snapshot(): where rollback() starts from ...
    trail: tuple[Taken, ...] = ()  # ... and the tokens taken in since
    start: int = 0  # the position of its first token; not 0 for a later segment
    fade: Tensor | None = None  # (B, H), fade of the state before a segment; None: no fade, or no such state

    def then(self, other: "State") -> "State":
        """The state of this segment followed by `other`, which must begin where this one ends."""
        if other.start != self.position:
            raise ValueError(
                f"then: this state ends at position {self.position}, and the other begins at {other.start}; "
                "one segment must follow the other"
            )
        check_horizons(other.horizons, self.horizons)
        fades = [fade for fade in (self.fade, other.fade) if fade is not None]
        tensor = faded_state(self.tensor, other.fade) + other.tensor
        horizons = self.horizons or other.horizons
        fade = torch.stack(fades).prod(0) if fades else None
        return State(tensor, other.position, horizons, start=self.start, fade=fade)

    def index_select(self, index: Tensor) -> "State":
        """The state with the batch rows in `index`, as beam search needs."""
        return self._map(lambda t: t.index_select(0, index), rows=True)

    def to(self, device: torch.device | str) -> "State":
        """The state on another device."""
        if not isinstance(device, torch.device | str | int):
            raise TypeError(f"to: device must be one; got {device!r} (a state keeps the dtype of its sums)")
        return self._map(lambda t: t.to(torch.device(device)))

    def detach(self) -> "State":
        """The state detached from the graph, for truncated backpropagation through time."""
        return self._map(lambda t: t.detach())

    def snapshot(self) -> "State":
        """The same state, which records the tokens it takes in from here on, for `rollback`."""
        here = replace(self, origin=None, trail=())
        return replace(here, origin=here)

    def rollback(self, tokens: int) -> "State":
        """The exact state `tokens` tokens ago, as far back as the last snapshot."""
        start = self.origin
        if start is None:
            raise ValueError(
                "rollback: this state has no snapshot to return to; call state.snapshot() before the tokens"
            )
        if not isinstance(tokens, Integral | torch.SymInt):
            raise TypeError(f"rollback: tokens must be an int; got {shown(tokens)}")
        seen = self.position - start.position
        if not 0 <= tokens <= seen:
            raise ValueError(f"rollback: tokens is {tokens}; 0 to {seen} were seen since the snapshot")
        state, keep = start.snapshot(), seen - tokens
        for taken in self.trail:
            if keep == 0:
                break
            k, v, key_mask, rates, call = taken.first(keep)
            q = k[:, :1].expand(-1, self.tensor.shape[1], -1, -1)  # no output is wanted, only the state
            _, state = advance(state, Inputs(q, k, v, rates, key_mask, state=state.tensor), call)
            keep -= k.shape[2]
        return state

    def _map(self, change: Callable[[Tensor], Tensor], *, rows: bool = False) -> "State":
        origin = None if self.origin is None else replace(self.origin, tensor=change(self.origin.tensor))
        trail = tuple(seen.map(change, rows=rows) for seen in self.trail)
        fade = None if self.fade is None else change(self.fade)
        return replace(self, tensor=change(self.tensor), origin=origin, trail=trail, fade=fade)


torch.export.register_dataclass(State)
torch.serialization.add_safe_globals([State, Taken, Call])


def advance(state: State | None, x: Inputs, call: Call) -> tuple[Tensor, State]:
    """The output of a stream's next tokens, and the state after them; x and call contain `state`."""
    out, _, after = attend(x, call)
    assert after is not None, "a stream keeps its state"
    following = State(after, call.position + x.k.shape[2], call.horizons)
    if state is None:
        return out, following
    if state.start:  # else nothing is before it to fade
        fade = fades(x.decay, x.k).whole
        fade = fade if state.fade is None or fade is None else fade * state.fade
        following = replace(following, start=state.start, fade=state.fade if fade is None else fade)
    if state.origin is None:
        return out, following
    mask, rates = (None if t is None else t.clone() for t in (x.key_mask, x.decay))
    taken = Taken(x.k.clone(), x.v.clone(), mask, rates, call)  # clones: the caller may reuse its buffers
    return out, replace(following, origin=state.origin, trail=(*state.trail, taken))
