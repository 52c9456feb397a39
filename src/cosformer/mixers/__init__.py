"""Mixers: every attention mechanism behind one contract (`Mixer`) and one registry (`names`, `build`, `register`).

    out = mixer(q, k, v, causal=..., key_mask=...)      q (B, H, L, D)   k (B, Hk, S, D)   v (B, Hk, S, E)   out (B, H, L, E)

A mechanism is one class in one file of this folder: it is discovered, held to the contract by tests/test_mixers.py and
measured by name, with no other edit (docs/adding-a-mechanism.md adds one).
"""

import importlib
import inspect
import pkgutil
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..ops.checks import check_tensors

Admission = bool | str  # True, or the reason why not

__all__ = ["Mixer", "build", "names", "options", "register", "weights"]


class Mixer(nn.Module):
    """A mechanism that mixes values along the sequence. A subclass writes `mix`, and `step` if it can stream.

    What a mechanism can do is declared, and an ask outside it raises ValueError with the declared reason. A class that decides
    by its options sets the attribute on the instance.
    """

    name: ClassVar[str]  # given by @register
    bidirectional: Admission = True  # every query may see every key
    causal: Admission = True  # query i, at position i, sees keys j <= i
    cross: Admission = (
        True  # keys of another sequence than the queries, of any length unless the class says otherwise
    )
    streaming: Admission = "it keeps no decode state"
    rope: Admission = True  # rotary positions on q and k
    spe: Admission = True  # stochastic positional encoding of q and k
    unread: tuple[str, ...] = ()  # those of q and k that have no influence
    grouped: bool = (
        False  # mix() takes fewer key heads than query heads as they are; otherwise they are repeated for it
    )

    def __init__(self, heads: int, head_dim: int, max_length: int):
        super().__init__()
        for name, value in (("heads", heads), ("head_dim", head_dim), ("max_length", max_length)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1; got {value!r}")
        self.heads, self.head_dim, self.max_length = heads, head_dim, max_length
        self.positions: nn.Module | None = None  # a companion of positions.py, set by build

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        """Attend: q (B, H, L, D), k (B, Hk, S, D), v (B, Hk, S, E) -> (B, H, L, E) in q's dtype.

        Query i stands at position i and key j at position j. key_mask is (B, S) bool, True = keep; a masked key has no
        influence, whatever it holds. H must be a multiple of Hk (grouped heads).
        """
        self._check(q, k, v, key_mask)
        self.refuse(causal=causal, cross=q.shape[2] != k.shape[2])
        q, k, v = self._prepare(q, k, v, key_mask, offset=0)
        return self.mix(q, k, v, causal=causal, key_mask=key_mask)

    def stream(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Causal attention over the next tokens of a stream; returns their output and the state to pass with those after them.

        However a stream is cut, its output is that of one causal call over the whole.
        """
        self._admit("streaming", "a stream")
        self._check(q, k, v, key_mask)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"q has length {q.shape[2]} and k has {k.shape[2]}; a stream takes as many queries as keys"
            )
        q, k, v = self._prepare(q, k, v, key_mask, offset=0 if state is None else state.position)
        return self.step(q, k, v, state, key_mask=key_mask)

    def state_size(self) -> int | None:
        """The numbers a decoder keeps for a batch row after `max_length` tokens (E = D); None without a stream."""
        return None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None) -> Tensor:
        """What `forward` returns, after its checks: masked keys and values are zero, key heads repeated unless `grouped`."""
        raise NotImplementedError(f"{type(self).__name__} must define mix")

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, key_mask: Tensor | None
    ) -> tuple[Tensor, Any]:
        """What `stream` returns, after the same checks. A state has `position`, the tokens it has seen, and `index_select`."""
        raise NotImplementedError(f"{type(self).__name__} declares streaming and must define step")

    def refuse(self, *, causal: bool = False, cross: bool = False) -> None:
        """Raise ValueError with the reason if this mixer does not do what is asked."""
        if causal:
            self._admit("causal", "causal attention")
        else:
            self._admit("bidirectional", "bidirectional attention")
        if cross:
            self._admit("cross", "attention to another sequence")

    def _admit(self, what: str, said: str) -> None:
        if (reason := getattr(self, what)) is not True:
            raise ValueError(f"mixer {self.name!r} does not do {said}: {reason}")

    def _check(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
        check_tensors(q, k, v, key_mask)
        if (q.shape[1], q.shape[3]) != (self.heads, self.head_dim):
            raise ValueError(
                f"q must have {self.heads} heads of size {self.head_dim}, as the mixer has; got q {tuple(q.shape)}"
            )

    def _prepare(self, q, k, v, key_mask, *, offset: int) -> tuple[Tensor, Tensor, Tensor]:
        if key_mask is not None:  # a selection, not a product: NaN in a masked key must not survive
            k, v = (x.masked_fill(~key_mask[:, None, :, None], 0) for x in (k, v))
        if k.shape[1] != self.heads and not (self.grouped and self.positions is None):
            k, v = (x.repeat_interleave(self.heads // x.shape[1], 1) for x in (k, v))
        if self.positions is not None:
            q, k = self.positions(q, k, offset=offset)
        return q, k, v


_classes: dict[str, type[Mixer]] = {}


def register(name: str):
    """Class decorator: make a Mixer known by `name`."""

    def enter(cls: type[Mixer]) -> type[Mixer]:
        known = _classes.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"mixer {name!r} is already registered by {known.__module__}.{known.__qualname__}"
            )
        cls.name = name
        _classes[name] = cls
        return cls

    return enter


def names() -> list[str]:
    """Every registered mixer, in alphabetical order."""
    return sorted(_classes)


def options(name: str) -> dict[str, Any]:
    """The options a mixer accepts, with their defaults."""
    parameters = inspect.signature(_lookup(name).__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def build(
    name: str, *, heads: int, head_dim: int, max_length: int, positions: str | None = None, **chosen: Any
) -> Mixer:
    """The mixer called `name`; `positions` is "rope", "sine_spe" or "conv_spe" where it admits them, the rest are its options.

    >>> build("performer", heads=8, head_dim=64, max_length=4096, features=128)(q, k, v, causal=True)
    """
    accepted = options(name)
    if unknown := [key for key in chosen if key not in accepted]:
        raise ValueError(
            f"mixer {name!r} has no option {unknown[0]!r}; it accepts {', '.join(accepted) or 'none'}"
        )
    mixer = _lookup(name)(heads, head_dim, max_length, **chosen)
    if positions is not None:
        companion = importlib.import_module(".positions", __name__).companion(positions)
        mixer._admit(companion.kind, f"positions={positions!r}")
        mixer.positions = companion(heads, head_dim, max_length)
    return mixer


def weights(
    mixer: Mixer, q: Tensor, k: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """The attention matrix (B, H, L, S) of any mixer: what it returns for one-hot values, since every mixer is linear in v."""
    B, Hk, S, _ = k.shape
    one_hot = torch.eye(S, dtype=k.dtype, device=k.device).expand(B, Hk, S, S)
    return mixer(q, k, one_hot, causal=causal, key_mask=key_mask)


def _lookup(name: str) -> type[Mixer]:
    if name not in _classes:
        raise ValueError(f"unknown mixer {name!r}; one of {', '.join(names())}")
    return _classes[name]


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
