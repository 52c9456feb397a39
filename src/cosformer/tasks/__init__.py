"""Tasks by name: data in, batches and metrics out; they know nothing of models.

task = tasks.build("lm", data="my-texts/", length=1024)
batch = task.collate([task.train[i] for i in range(8)])
"""

import importlib
import inspect
from collections.abc import Collection
from typing import Any

from .contract import IGNORE, KINDS, SPLITS, DataError, Special, Task
from .language import pretraining
from .packing import cu_seqlens
from .source import READING

__all__ = ["IGNORE", "KINDS", "SPLITS", "DataError", "Special", "Task", "build", "check", "cu_seqlens",
           "names", "pretraining", "settings"]  # fmt: skip
_MODULES = {
    **dict.fromkeys(("lm", "mlm"), "language"),
    **dict.fromkeys(("classify", "text", "retrieval"), "classification"),
    **{name: name for name in ("seq2seq", "listops", "image", "pathfinder")},
    **dict.fromkeys(("recall", "copy", "reverse"), "recall"),
}
LISTS: dict[str, type] = {"columns": str, "labels": str, "examples": int}  # list settings: element type


def names() -> tuple[str, ...]:
    """The names of all tasks."""
    return tuple(_MODULES)


def settings(name: str) -> dict[str, Any]:
    """A task's settings with their defaults (`inspect.Parameter.empty` if required)."""
    parameters = inspect.signature(_function(name)).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    if len(own) < len(parameters):  # it has **reading: it reads records
        own |= {key: default for key, default in READING.items() if key not in own}
    return own


def check(name: str, chosen: Collection[str]) -> dict[str, Any]:
    """A task's settings with their defaults; TypeError if it does not take one of `chosen`."""
    accepted = settings(name)
    if unknown := [key for key in chosen if key not in accepted]:
        raise TypeError(f"task {name!r} has no setting {unknown[0]!r}; it takes {', '.join(accepted)}")
    return accepted


def build(name: str, **chosen: Any) -> Task:
    """The task with the given settings and its own defaults for the rest; see `settings(name)`.

    `data` (a file or folder), `length`, `tokenizer`, `seed` and `cache` mean the same in every task.
    """
    for key, default in check(name, chosen).items():
        if default is inspect.Parameter.empty and key not in chosen:
            raise TypeError(f"task {name!r} needs --{key}: it cannot be generated")
    return _function(name)(**{key: _listed(key, value) for key, value in chosen.items()})


def _listed(key: str, value: Any) -> Any:
    """Turns a list setting into a list; a string is split at commas, as on the command line."""
    if key not in LISTS or value is None:
        return value
    values = value.split(",") if isinstance(value, str) else value
    values = [values] if isinstance(values, (int, float)) else list(values)
    try:
        values = [LISTS[key](v.strip() if isinstance(v, str) else v) for v in values]
    except ValueError:
        raise ValueError(f"{key} takes whole numbers by comma, 1000,100,100; got {value!r}") from None
    if key == "examples" and len(values) != len(SPLITS):
        raise ValueError(f"examples takes {len(SPLITS)} numbers, of {', '.join(SPLITS)}; got {value!r}")
    return values


def _function(name: str) -> Any:
    if name not in _MODULES:
        raise ValueError(f"unknown task {name!r}; one of {', '.join(_MODULES)}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
