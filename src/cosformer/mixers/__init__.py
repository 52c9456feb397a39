"""Mixers: every attention mechanism behind one contract and one registry (`names`, `build`, `register`).

A mechanism is one class in one file of this folder. It is found automatically, tested against the contract by
tests/test_mixers.py, and usable by name in modules, models, training and benchmarks, with no other edit
(docs/adding-a-mechanism.md adds one).

    NAME                              softmax, elu, performer ...; `names()` lists all
    NAME+rope                         with positions on q and k: rope, sine_spe or conv_spe, if the mixer
                                      admits them
    cosformer*3, softmax+rope         a mixer for each layer of a model; the pattern is repeated to the number
                                      of layers
    cosformer-hybrid                  cosformer, but every fourth layer and the last are softmax; also
                                      cosformer-hybrid+rope
"""

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .contract import Admission, Mixer, Sizes
from .positions import companion

HYBRID = "cosformer-hybrid"
INTERVAL = 4  # of a hybrid: one layer in this many is softmax

__all__ = ["Admission", "Mixer", "Sizes", "build", "full_layers", "layer_type", "layers", "names", "options",
           "pattern", "register", "weights"]  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A registered name: a class, and the options that the name stands for."""

    mixer: type[Mixer]
    chosen: dict[str, Any]


_known: dict[str, Entry] = {}


def register(name: str, **chosen: Any):
    """Class decorator: register a Mixer as `name`, with these options as its defaults."""

    def enter(cls: type[Mixer]) -> type[Mixer]:
        known = _known[name].mixer if name in _known else cls
        before, now = (f"{c.__module__}.{c.__qualname__}" for c in (known, cls))
        if before != now:
            raise ValueError(f"mixer {name!r} is already registered by {before}")
        _known[name] = Entry(cls, chosen)
        return cls

    return enter


def names() -> list[str]:
    """Every registered mixer, in alphabetical order."""
    return sorted(_known)


def options(name: str) -> dict[str, Any]:
    """The options a mixer accepts, with their defaults under this name."""
    entry, _ = _lookup(name)
    parameters = inspect.signature(entry.mixer.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | entry.chosen


def build(
    name: str, *, heads: int, head_dim: int, max_length: int, width: int | None = None, **chosen: Any
) -> Mixer:
    """The mixer called `name`, such as `softmax+rope`, for layers with an input of size `width`.

    >>> build("performer", heads=8, head_dim=64, max_length=4096, features=128)(q, k, v, causal=True)
    """
    entry, positions = _lookup(name)
    accepted = options(name)
    if unknown := [key for key in chosen if key not in accepted]:
        known = ", ".join(accepted) or "none"
        raise ValueError(f"mixer {name!r} has no option {unknown[0]!r}; it accepts {known}")
    sizes = Sizes(heads, head_dim, max_length, heads * head_dim if width is None else width)
    mixer = entry.mixer(sizes, **entry.chosen | chosen)
    mixer.name = name
    if positions:
        added = companion(positions)
        mixer._admit(added.kind, f"positions, asked for by +{positions}")
        mixer.positions = added(heads, head_dim, max_length)
        mixer.learned_positions = False
        if added.kind == "spe" or hasattr(mixer, "redraw"):  # a draw sees more than distances
            mixer.left_padding = f"its draws and {positions} are of places counted from the first of a row"
    return mixer


def layers(spec: str, count: int) -> list[str]:
    """The mixer of each of `count` layers: from a name, a pattern ("cosformer*3, softmax+rope"), a hybrid."""
    names = pattern(spec)
    if spec.strip().partition("+")[0] == HYBRID:
        return [names[full] for full in full_layers(count, INTERVAL)]
    if count % len(names):
        told = f"mixer {spec!r} names {len(names)} layers"
        raise ValueError(f"{told}, which {count} layers cannot repeat evenly")
    return names * (count // len(names))


def full_layers(count: int, interval: int) -> list[bool]:
    """Which layers of a hybrid are softmax: every `interval`-th, and the last."""
    return [(i + 1) % interval == 0 or i == count - 1 for i in range(count)]


def pattern(spec: str) -> list[str]:
    """The mixers that a spec names, in order; for a hybrid its two kinds."""
    if not isinstance(spec, str):
        raise TypeError(f"mixer must name one mixer, or one for each layer; got {spec!r}")
    base, plus, positions = spec.strip().partition("+")
    if base == HYBRID:
        _lookup(f"softmax{plus}{positions}")
        return ["cosformer", f"softmax{plus}{positions}"]
    named: list[str] = []
    for part in spec.split(","):
        name, star, times = (word.strip() for word in part.partition("*"))
        if star and not (times.isdecimal() and int(times) > 0):
            raise ValueError(f"mixer {spec!r}: after * stands how many layers; got {times!r}")
        _lookup(name, spec)
        named += [name] * (int(times) if star else 1)
    return named


def weights(mixer: Mixer, q: Tensor, k: Tensor, **asked: Any) -> Tensor:
    """The attention matrix (B, H, L, S): a mixer is linear in v, so one-hot values return it."""
    B, Hk, S, _ = k.shape
    one_hot = torch.eye(S, dtype=k.dtype, device=k.device).expand(B, Hk, S, S)
    return mixer(q, k, one_hot, **asked)


def layer_type(name: str) -> str:
    """transformers' name for a layer with this mixer: linear_, full_ or sliding_attention."""
    return _lookup(name)[0].mixer.layer_type


def _lookup(name: str, spec: str = "") -> tuple[Entry, str]:
    """The entry of a name (one of those in `spec`, if given), and the positions after its +."""
    if not isinstance(name, str):
        raise TypeError(f"mixer must be a name, as 'softmax'; got {name!r}")
    base, plus, positions = name.partition("+")
    if base not in _known:
        known = f"one of {', '.join(names())}, some with +rope"
        if spec:
            within = f"mixer {spec!r}: " if spec != name else ""
            raise ValueError(f"{within}unknown mixer {name!r}; {known}; or {HYBRID}")
        if base == HYBRID or set(name) & set(",*"):
            raise ValueError(f"mixer {name!r} names the layers of a model; of one layer it is {known}")
        raise ValueError(f"unknown mixer {name!r}; {known}")
    if plus:
        companion(positions)  # refuses what it does not know
    return _known[base], positions


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

SAID = f"any of {', '.join(names())}, some with +rope; {HYBRID}; or one for each layer, as "
SAID += "'cosformer*3, softmax+rope'"
