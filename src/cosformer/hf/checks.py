"""Checks of config fields: their types, counts, and names that are misspelt."""

import difflib
import typing
from collections.abc import Collection, Iterable
from types import NoneType, UnionType
from typing import Any

PLAIN = (bool, int, float, str, dict, NoneType)


def wanted(value: Any, hint: Any) -> str | None:
    """What a field with this type hint accepts, if not the value; only plain types are looked at."""
    kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if not all(kind in PLAIN for kind in kinds):
        return None
    accepted = (*kinds, int) if float in kinds else kinds
    is_flag = isinstance(value, bool) and bool not in kinds  # bool is an int to Python
    if isinstance(value, accepted) and not is_flag:
        return None
    return " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)


def check_count(name: str, count: int, *, least: int = 1) -> None:
    if count < least:
        raise ValueError(f"{name} is {count}; it must be at least {least}")


def check_shared(name: str, heads: int, shared: str, width: int, choice: str = "") -> None:
    """Check that so many heads can share a width evenly."""
    if width % heads:
        told = f"{shared} is {width}, which {heads} heads cannot share evenly"
        raise ValueError(f"{told}; choose a multiple of {name}{choice}")


def check_spelling(config: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse a name that is nearly one of ours: transformers accepts any, and it would change nothing."""
    for name in given:
        if near := difflib.get_close_matches(name, [*known], n=1, cutoff=0.8):
            raise TypeError(f"{config} has no field {name!r}; did you mean {near[0]!r}?")
