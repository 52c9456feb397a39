"""Checks of config fields: their types, counts, and names that are misspelt."""

import difflib
import typing
import warnings
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
    """Warn of a name that is one letter from ours: transformers accepts any, and it changes nothing."""
    for name in given:
        if near := [ours for ours in known if letters_apart(name, ours) == 1]:
            told = f"{config} has no field {name!r}, so it changes nothing; did you mean {near[0]!r}?"
            warnings.warn(told, stacklevel=2)


def letters_apart(a: str, b: str) -> int:
    """How many letters of the longer name are not in the other, in order."""
    same = difflib.SequenceMatcher(None, a, b).get_matching_blocks()
    return max(len(a), len(b)) - sum(block.size for block in same)
