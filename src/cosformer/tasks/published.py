"""Long-Range Arena's published sizes: the same for every mixer, or the comparison is not one.

From the appendix of Tay et al. 2021, Long Range Arena, as the project's notes have it; the schedules are in
recipes/paper. The public configuration files disagree with it in places (ListOps 6 layers and 2,048;
Pathfinder 1 layer of width 128), and with one another; a recipe may override them, for all mixers alike.
Image and Pathfinder were published with queries and keys of half the model's width; here they have all of it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .cache import hashed
from .contract import Collate, Special, Task
from .metrics import class_choice, class_metrics, majority, scoring_fields
from .table import stored

PUBLISHED = {
    "listops": {"layers": 4, "width": 512, "heads": 8, "feedforward": 1024},
    "text": {"layers": 4, "width": 256, "heads": 4, "feedforward": 1024},
    "retrieval": {"layers": 4, "width": 128, "heads": 4, "feedforward": 512},
    "image": {"layers": 1, "width": 128, "heads": 8, "feedforward": 128},
    "pathfinder": {"layers": 4, "width": 32, "heads": 4, "feedforward": 32},
}


def arena(
    name: str,
    rows: Callable[[], Iterable[tuple]],
    *,
    values: int,
    length: int,
    labels: Sequence[str],
    cache: Any,
    **settings: Any,
) -> Task:
    """The task over the sequences of `rows()`, of `values` symbols or grey levels, for these settings."""
    vocab_size = Special.count + values
    sets = stored(name, rows, cache=cache, vocab_size=vocab_size, **settings)
    made = settings.get("content") or [name, settings]
    return Task(
        name=name,
        kind="sequence-classification",
        **sets,
        **scoring_fields(class_choice, class_metrics, "accuracy", greater_is_better=True),
        collate=Collate(Special.pad),
        vocab_size=vocab_size,
        max_length=length,
        labels=tuple(labels),
        published=PUBLISHED[name],
        settings=settings,
        fingerprint=hashed(made),
        majority=majority(sets["test"].values("labels")),
    )
