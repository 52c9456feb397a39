"""Rows on disk, memory-mapped: columns of numbers and of arrays of any length, appended and read at random.

A split is a folder. A column is the file `column.dtype`, all its rows end to end; `column.ends.int64` says
where each array ends. (Reading a row is thirty times faster than from a Hugging Face dataset on disk.)
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import starmap
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cache import prepared
from .contract import SPLITS, DataError, Rows


class RowPiece(NamedTuple):
    """A row, or a part of one that the next piece continues: a row need not fit in memory."""

    split: str
    columns: dict[str, Any]
    ended: bool = True


def write(folder: Path, rows: Iterable[tuple], *, dtype: str) -> Counter[str]:
    """Writes rows, each (split, columns) or in `RowPiece`s, arrays as `dtype`; returns splits' row counts."""
    count: Counter[str] = Counter()
    files: dict[str, BinaryIO] = {}
    with ExitStack() as opened:

        def append(name: str, value: Any) -> np.int64:
            """Returns how many values the file then has."""
            if name not in files:
                files[name] = opened.enter_context(open(folder / name, "wb"))
            files[name].write(value.tobytes())
            return np.int64(files[name].tell() // value.itemsize)

        for split in SPLITS:
            (folder / split).mkdir(parents=True)
        for split, columns, ended in starmap(RowPiece, rows):
            for column, value in columns.items():
                name = f"{split}/{column}"
                if isinstance(value, int):
                    append(f"{name}.int64", np.int64(value))
                    continue
                size = append(f"{name}.{dtype}", np.asarray(value, dtype))
                if ended:
                    append(f"{name}.ends.int64", size)
            count[split] += ended
    return count


class Table(Rows):
    """The rows of a split's folder, as dicts of column -> int64 tensor (arrays) or int (numbers)."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        # An empty file cannot be mapped.
        self._columns = {
            path.stem: np.memmap(path, path.suffix[1:], mode="r") if path.stat().st_size else np.empty(0)
            for path in sorted(self.folder.iterdir())
        }
        self._arrays = [name.removesuffix(".ends") for name in self._columns if name.endswith(".ends")]
        self._numbers = [c for c in self._columns if "." not in c and c not in self._arrays]

    def __reduce__(self):  # pickling a memmap copies the file; a worker process maps it again instead
        return Table, (self.folder,)

    def __len__(self) -> int:
        return len(self.ends(self._arrays[0])) if self._arrays else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.check(index)
        row: dict[str, Any] = {column: int(self._columns[column][index]) for column in self._numbers}
        for column in self._arrays:
            ends = self._columns[f"{column}.ends"]
            start = ends[index - 1] if index else 0
            row[column] = torch.from_numpy(self._columns[column][start : ends[index]].astype(np.int64))
        return row

    def values(self, column: str) -> np.ndarray:
        """All rows of a column, end to end."""
        return self._columns[column]

    def ends(self, column: str) -> np.ndarray:
        """Where each row of an array column ends in `values`."""
        return self._columns[f"{column}.ends"]

    def lengths(self, column: str) -> np.ndarray:
        """How long each row of an array column is."""
        return np.diff(self.ends(column), prepend=0)


class Arrays(Rows):
    """Rows in memory, for small generated sets: arrays of equal length, indexed together."""

    def __init__(self, **columns: np.ndarray):
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.check(index)
        return {name: torch.from_numpy(rows[index].astype(np.int64)) for name, rows in self.columns.items()}


class Mapped(Rows):
    """A function of each row of another set, or of each number of a range."""

    def __init__(self, inner: Rows | range, function: Callable[[Any], dict[str, Any]]):
        self.inner, self.function = inner, function

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.function(self.inner[index])


def stored(
    name: str,
    rows: Callable[[], Iterable[tuple]],
    *,
    vocab_size: int,
    cache: Any,
    needed: Sequence[str] = SPLITS,
    facts: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """The tables of `rows()` (see `write`), written now unless cached for these settings.

    What `rows` puts into `facts` is stored with them, so `facts` is filled from the cache, too.
    """
    facts = {} if facts is None else facts

    def make(folder: Path) -> None:
        count = write(folder, rows(), dtype="uint16" if vocab_size <= 1 << 16 else "uint32")
        if empty := [split for split in needed if not count[split]]:
            more = "Give more to hold some out, or files named train, validation and test"
            raise DataError(f"the {empty[0]} split is empty. {more}")
        (folder / "facts.json").write_text(json.dumps(facts))

    folder = prepared(name, make, cache=cache, vocab_size=vocab_size, **settings)
    facts |= json.loads((folder / "facts.json").read_text())
    return {split: Table(folder / split) for split in SPLITS}
