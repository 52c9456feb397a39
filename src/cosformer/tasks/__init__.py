"""Tasks by name: data in, batches and metrics out; they know nothing of models.

task = tasks.build("lm", data="my-texts/", length=1024)
batch = task.collate([task.train[i] for i in range(8)])
"""

import importlib
import inspect
from typing import Any

from .contract import IGNORE, KINDS, Published, Special, Task
from .packing import cu_seqlens, segment_ids
from .source import SPLITS, DataError

__all__ = [
    "IGNORE",
    "KINDS",
    "SPLITS",
    "DataError",
    "Published",
    "Special",
    "Task",
    "build",
    "cu_seqlens",
    "names",
    "pretraining",
    "segment_ids",
    "settings",
]

_MODULES = {
    "lm": "language",
    "mlm": "language",
    "classify": "classification",
    "seq2seq": "seq2seq",
    "listops": "listops",
    "text": "classification",
    "retrieval": "classification",
    "image": "image",
    "pathfinder": "pathfinder",
    "recall": "recall",
    "copy": "recall",
    "reverse": "seq2seq",
}


def names() -> tuple[str, ...]:
    """Every task there is."""
    return tuple(_MODULES)


def settings(name: str) -> dict[str, Any]:
    """The settings a task takes, with their defaults (`inspect.Parameter.empty` where one must be given)."""
    return {
        key: parameter.default for key, parameter in inspect.signature(_function(name)).parameters.items()
    }


def build(name: str, **chosen: Any) -> Task:
    """The task, with the settings given and its own defaults for the rest; see `settings(name)`.

    `data` (a file or folder), `length`, `tokenizer`, `seed` and `cache` mean the same wherever they are taken.
    """
    accepted = settings(name)
    if unknown := [key for key in chosen if key not in accepted]:
        raise TypeError(f"task {name!r} has no setting {unknown[0]!r}; it takes {', '.join(accepted)}")
    if missing := [
        key for key, default in accepted.items() if default is inspect.Parameter.empty and key not in chosen
    ]:
        raise TypeError(f"task {name!r} needs {missing[0]}=...: it cannot be generated")
    return _function(name)(**chosen)


def pretraining(task: Task, *, share: float = 0.15, copies: int = 10, seed: int = 0) -> Task:
    """The masked-lm task over a classification task's own inputs: self-pretraining, with the same vocabulary and lengths."""
    from .pretrain import masked

    return masked(task, share=share, copies=copies, seed=seed)


def _function(name: str) -> Any:
    if name not in _MODULES:
        raise ValueError(f"unknown task {name!r}; one of {', '.join(_MODULES)}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
