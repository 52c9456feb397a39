"""Rows on disk, memory-mapped: columns of numbers and of arrays of any length, appended one by one and read at random."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .contract import Rows


class Writer:
    """Appends rows to a folder; holds no more than file buffers in memory.

    An array column `c` is two files: `c.bin`, all rows end to end, and `c.ends.bin`, where each row ends. A number column is
    `c.bin` alone.
    """

    def __init__(self, folder: Path, *, arrays: dict[str, str], numbers: dict[str, str] | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self._dtypes = {**arrays, **(numbers or {})}
        self._data = {c: open(folder / f"{c}.bin", "wb") for c in self._dtypes}
        self._ends = {c: open(folder / f"{c}.ends.bin", "wb") for c in arrays}
        self._length = dict.fromkeys(arrays, 0)
        (folder / "columns.json").write_text(json.dumps({"arrays": arrays, "numbers": numbers or {}}))

    def extend(self, column: str, values) -> None:
        """Adds to the row that is being written: a row need not fit in memory."""
        values = np.asarray(values, self._dtypes[column])
        self._data[column].write(values.tobytes())
        self._length[column] += len(values)

    def end(self, **numbers: int) -> None:
        """Ends the row, with its number columns."""
        for column, file in self._ends.items():
            file.write(np.int64(self._length[column]).tobytes())
        for column, number in numbers.items():
            self._data[column].write(np.dtype(self._dtypes[column]).type(number).tobytes())

    def add(self, **row) -> None:
        """Writes one whole row."""
        for column in self._ends:
            self.extend(column, row.pop(column))
        self.end(**row)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_) -> None:
        for file in (*self._data.values(), *self._ends.values()):
            file.close()


class Table(Rows):
    """The rows of a folder that `Writer` filled. `table[i]` is a dict of column -> int64 tensor (arrays) or int (numbers)."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        columns = json.loads((self.folder / "columns.json").read_text())
        self._numbers = {c: self._map(f"{c}.bin", dtype) for c, dtype in columns["numbers"].items()}
        self._arrays = {
            c: (self._map(f"{c}.bin", t), self._map(f"{c}.ends.bin", "int64"))
            for c, t in columns["arrays"].items()
        }

    def _map(self, name: str, dtype: str) -> np.ndarray:
        path = self.folder / name
        return (
            np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
        )  # an empty file cannot be mapped

    def __reduce__(self):  # a pickled memmap is a copy of the file; a worker process maps it again instead
        return Table, (self.folder,)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values()))[1])

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a table of {len(self)}")
        row: dict[str, Tensor | int] = {}
        for column, (flat, ends) in self._arrays.items():
            row[column] = torch.from_numpy(
                flat[ends[index - 1] if index else 0 : ends[index]].astype(np.int64)
            )
        for column, values in self._numbers.items():
            row[column] = int(values[index])
        return row

    def flat(self, column: str) -> np.ndarray:
        """All rows of an array column, end to end."""
        return self._arrays[column][0]

    def ends(self, column: str) -> np.ndarray:
        """Where each row ends in `flat`."""
        return self._arrays[column][1]

    def lengths(self, column: str) -> np.ndarray:
        """How long each row is."""
        return np.diff(self.ends(column), prepend=0)

    def numbers(self, column: str) -> np.ndarray:
        """A number column, whole."""
        return self._numbers[column]


class Arrays(Rows):
    """Rows in memory, for generated sets that are small: arrays of equal length, indexed together."""

    def __init__(self, **columns: np.ndarray):
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return {
            name: torch.from_numpy(values[index].astype(np.int64)) for name, values in self.columns.items()
        }
