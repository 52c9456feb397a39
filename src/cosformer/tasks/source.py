"""The records of what a user points at, in splits: CSV, TSV, JSONL, folders of these, saved datasets.

Everything streams, and every error names file and line. TSV has no quoting, as GLUE, IMDB and Long-Range
Arena publish it; CSV has the usual quoting. The standard csv and json modules parse, because they know which
line they are on; the parsers behind Hugging Face's datasets do not, and read NA, or a short row, as None.
"""

import csv
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .cache import digest, hashed
from .contract import SPLITS, DataError, listed, shown
from .reading import BadRows, form, lines

SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"valid", "validation", "val", "dev", "eval"},
    "test": {"test", "testing"},
}
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
TABLES = (".csv", ".tsv", ".jsonl")
Used = TypeVar("Used")


@dataclass(frozen=True, slots=True)
class Row:
    """One record and its place in a file."""

    path: Path
    line: int
    fields: dict[str, Any]

    def error(self, what: str) -> DataError:
        return DataError(what, path=self.path, line=self.line)

    def column(self, asked: str | None, usual: Sequence[str], *, argument: str) -> str:
        """The column to use: the one asked for, or the first of the usual names."""
        known = usual if asked is None else (asked,)
        lowered = {name.lower(): name for name in self.fields}
        for name in known:
            if name in self.fields or name.lower() in lowered:
                return name if name in self.fields else lowered[name.lower()]
        error = self.error(f"no column named {' or '.join(known)}; {_found(self.fields, argument)}")
        error.everywhere = True
        raise error

    def text(self, asked: str | None, usual: Sequence[str] = (), *, argument: str = "text") -> str:
        """The text of a column; see `column`."""
        name = self.column(asked, usual, argument=argument)
        value = self.fields[name]
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"column {name!r} must hold text; got {shown(value)}")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON may hold
            raise self.error(f"column {name!r} is no valid Unicode: {error.reason}") from None
        return value


def _found(names: Collection[str], argument: str) -> str:
    """What a table has instead of the missing column, and what the user can do about it."""
    first = next(iter(names), "")
    if len(names) == 1 and (mark := next((mark for mark in ";|\t" if mark in first), None)):
        return f"the header {shown(first)} has no comma but {mark!r}: save the table with commas, or as .tsv"
    if any(name.strip("-.").replace(".", "").isdigit() or len(name) > 40 for name in names):
        hint = f"the first line ({listed(names)}) looks like data. Name its {len(names)} columns"
        return f"{hint}: --set task.columns={','.join(['label', 'text', 'other', '...'][: len(names)])}"
    return f"found {listed(names)}. Name it: --set task.{argument}=COLUMN"


def is_saved_dataset(data: Any) -> bool:
    """Whether `datasets.Dataset.save_to_disk` made this folder."""
    if data is None:
        return False
    path = locate(data)
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def locate(data: Any) -> Path:
    """`data` as a path that exists."""
    path = Path(data).expanduser()
    if not path.exists():
        raise DataError(f"data={str(data)!r} is neither a file nor a folder")
    return path


def standard_library() -> list[Path]:
    """The Python standard library's source, without its tests and _*.py, where builds leave files."""
    home = Path(sysconfig.get_paths()["stdlib"])
    named = (p for p in home.rglob("[!_]*.py") if not NOT_LIBRARY & set(p.relative_to(home).parts))
    found = sorted(p for p in named if p.stat().st_size)
    if not found:
        version = ".".join(map(str, sys.version_info[:2]))
        raise DataError(f"Python {version} has no library source in {home}; give --data")
    return found


def files(data: Any) -> dict[str, list[Path]]:
    """The files of each split, by words in their names (`train.txt`, `x_val.tsv`, `test/...`).

    If none is named train, all are in "all"; unless a table or .txt file is called nothing but `test`, `dev`
    and so on: then the others are for training. Hidden files are left out, and so are files that name no
    split when one is named train. A folder named after a split decides for all files in it. Without data: the
    standard library.
    """
    if data is None:
        return {"all": standard_library()}
    path = locate(data)
    if path.is_file():
        return {"all": [path]}
    found = {p.relative_to(path): p for p in sorted(path.rglob("*")) if p.is_file()}
    named = {p: _splits_of(name) for name, p in found.items() if not any(x[0] == "." for x in name.parts)}
    if not named:
        raise DataError("the folder holds no files", path=path)
    if ["train"] not in named.values():
        held = {split: [file for file in named if _called(file, split, path)] for split in SPLITS[1:]}
        others = [file for file in named if not any(file in mine for mine in held.values())]
        parts = {"train": others, **held} if any(held.values()) else {"all": others}
        return {part: mine for part, mine in parts.items() if mine}
    for file, splits in named.items():
        if len(splits) > 1:
            said = " and ".join(splits)
            raise DataError(f"the name says {said}; rename it, so that it is one of them", path=file)
    members = {split: [file for file, splits in named.items() if splits == [split]] for split in SPLITS}
    return {split: mine for split, mine in members.items() if mine}


def idle(data: Any) -> list[str]:
    """A line about the files of a folder that are not read because another is named train."""
    path = None if data is None or is_saved_dataset(data) else locate(data)
    if path is None or not path.is_dir():
        return []
    parts = files(data)
    read = {file for members in parts.values() for file in members}
    every = [p.relative_to(path) for p in sorted(path.rglob("*")) if p.is_file() and p not in read]
    others = [name for name in every if not any(part[0] == "." for part in name.parts)]
    if not others:
        return []
    why = f"{parts['train'][0].name} is named train, and they name no split; rename it to read all"
    return [f"{len(others):,} files are not read, such as {others[0]}: {why}"]


def _splits_of(name: Path) -> list[str]:
    """The splits a file's name mentions; a folder's name takes precedence."""
    folders = {folder.lower() for folder in name.parts[:-1]}
    if inside := [split for split in SPLITS if folders & SPLIT_WORDS[split]]:
        return inside[:1]
    words = set(re.split(r"[^a-z]+", str(name).lower()))
    return [split for split in SPLITS if words & SPLIT_WORDS[split]]


def _called(file: Path, split: str, folder: Path) -> bool:
    """Whether a table, or a text right in the folder, is called by a split's name alone, as test.csv is.

    Among texts other names (the_test.txt, part-2/test.txt) may be titles.
    """
    known = form(file) in TABLES or (form(file) == ".txt" and file.parent == folder)
    return known and file.name.lower().partition(form(file))[0] in SPLIT_WORDS[split]


def _tsv(path: Path, bad: BadRows) -> Iterator[tuple[int, list[str]]]:
    return ((number, line.split("\t")) for number, line in lines(path, bad) if line)


def _csv(path: Path, bad: BadRows) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a field may be a whole document
    start, reader = 1, csv.reader((line + "\n" for _, line in lines(path, bad)), strict=True)
    while True:
        try:
            record = next(reader, None)
        except csv.Error as error:
            record = []
            for line in range(start, reader.line_num + 1):  # an open quote swallows many lines
                bad(DataError(f"not CSV: {error}", path=path, line=line))
        if record is None:
            return
        if record:
            yield start, [field.removesuffix("\n") for field in record]
        start = reader.line_num + 1


def _jsonl(path: Path, bad: BadRows) -> Iterator[Row]:
    for number, line in lines(path, bad):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            bad(DataError(f"not JSON: {error.msg} at column {error.colno}", path=path, line=number))
            continue
        if isinstance(fields, dict):
            yield Row(path, number, fields)
        else:
            bad(DataError(f"expected a JSON object, got {type(fields).__name__}", path=path, line=number))


def _records(path: Path, columns: Sequence[str] | None, bad: BadRows) -> Iterator[Row]:
    for number, fields in _csv(path, bad) if form(path) == ".csv" else _tsv(path, bad):
        if columns is None:
            columns = [field.strip() for field in fields]
            if len(set(columns)) < len(columns):
                raise DataError(f"a column is named twice in {listed(columns)}", path=path, line=number)
        elif len(fields) == len(columns):
            yield Row(path, number, dict(zip(columns, fields)))
        else:
            what = f"expected {len(columns)} fields ({listed(columns)}), got {len(fields)}"
            bad(DataError(what, path=path, line=number))


def rows(path: Path, *, columns: Sequence[str] | None = None, bad: BadRows) -> Iterator[Row]:
    """The records of a CSV, TSV or JSONL file. `columns` names the fields of a file without a header."""
    if form(path) not in TABLES:
        raise DataError(f"expected one of {', '.join(TABLES)} (also .gz, .xz), got {path.name!r}", path=path)
    records = _jsonl(path, bad) if form(path) == ".jsonl" else _records(path, columns, bad)
    first = next(records, None)
    if first is None:
        raise DataError("no rows", path=path)
    yield first
    yield from records


def saved(path: Path) -> dict[str, Iterable[Row]]:
    """The splits of a `save_to_disk` folder, under our names; a row's number stands for its line."""
    import datasets

    loaded = datasets.load_from_disk(str(path))
    parts = {"all": loaded}
    if isinstance(loaded, datasets.DatasetDict):
        parts = {ours: loaded[name] for ours in SPLITS for name in loaded if name in SPLIT_WORDS[ours]}
        if not parts:
            raise DataError(f"no split named train or test; found {', '.join(loaded)}", path=path)
    return {split: map(partial(Row, path), count(1), part) for split, part in parts.items()}


class Holdout:
    """Assigns the n-th record of a part to a split where the data does not name all splits.

    Every block of `1 / share` records gives one to validation and one to test, at random places in it, so no
    total is needed beforehand. Without a share every part keeps its own records. Data that names no split at
    all belongs to `whole`, if given.
    """

    def __init__(self, parts: Iterable[str], *, share: float | None, seed: int, whole: str | None = None):
        if share is not None and not 0 < share <= 1 / 3:
            raise ValueError(f"holdout must lie in (0, 1/3]; got {share}")
        self.missing = [split for split in SPLITS if split not in parts] if share else []
        self.share, self.block, self.seed, self.whole = share or 0.0, round(1 / (share or 1)), seed, whole
        self._number = -1
        self._chosen: dict[int, str] = {}

    def divides(self, part: str) -> bool:
        """Whether records of this part go to several splits."""
        return bool(self.missing) and (part == "train" or (part == "all" and self.whole is None))

    def __call__(self, part: str, index: int) -> str:
        if not self.divides(part):
            return self.whole if part == "all" and self.whole else part
        if index // self.block != self._number:
            self._number = index // self.block
            rng = np.random.default_rng((self.seed, self._number))
            self._chosen = dict(zip(rng.choice(self.block, 2, replace=False).tolist(), SPLITS[1:]))
        split = self._chosen.get(index % self.block, "train")
        return split if split in self.missing else "train"


@dataclass(kw_only=True)
class Source:
    """What a user points at, and how its records are read; without data they are `generated`."""

    data: Any
    seed: int = 0
    holdout: float | None = None  # share held out for each split the data does not name; None: no holdout
    columns: Sequence[str] | None = None  # names the fields of a file without a header
    skip_bad_rows: int = 0
    whole: str | None = None  # the split of data that names none: only this one is needed, as for scoring
    cache: Any = None
    generated: Callable[..., Iterator[tuple[str, Row]]] | None = None
    bad: BadRows = field(default_factory=BadRows, init=False)  # of the last `each`

    def __post_init__(self) -> None:
        if self.whole not in (None, *SPLITS):
            raise ValueError(f"whole is {self.whole!r}; one of {', '.join(SPLITS)}, or None")

    def content(self) -> str:
        """A hash of the data, wherever it lies: every file's split, form and content; or how it is made."""
        if self.data is None and self.generated is not None:
            return hashed(self.generated.__name__, self.seed)
        if is_saved_dataset(self.data):
            path = locate(self.data)
            named = [(str(p.relative_to(path)), p) for p in sorted(path.rglob("*")) if p.is_file()]
        else:
            named = [(part, p) for part, paths in files(self.data).items() for p in paths]
        return hashed([[part, form(p), digest(p, self.cache)] for part, p in named])

    def key(self) -> dict[str, Any]:
        """All that the records depend on."""
        how = {name: getattr(self, name) for name in ("columns", "holdout", "skip_bad_rows", "whole")}
        return {"content": self.content(), "seed": self.seed, **how}

    def each(self, use: Callable[[Row], Used]) -> Iterator[tuple[str, Used]]:
        """(split, `use(row)`) of every record, read anew; a record is bad if `use` raises DataError."""
        self.bad = BadRows(self.skip_bad_rows)
        for split, row in self._rows():
            try:
                used = use(row)
            except DataError as error:
                self.bad(error)
            else:
                yield split, used

    def _rows(self) -> Iterator[tuple[str, Row]]:
        if self.data is None and self.generated is not None:
            yield from self.generated(seed=self.seed)
            return
        if is_saved_dataset(self.data):
            parts = saved(locate(self.data))
        else:
            read = partial(rows, columns=self.columns, bad=self.bad)
            parts = {part: chain.from_iterable(map(read, paths)) for part, paths in files(self.data).items()}
        if self.holdout is None and "all" in parts and self.whole is None:
            raise DataError("expected a folder with files named train and test")
        assign = self.assignment(parts)
        for part, records in parts.items():
            for index, row in enumerate(records):
                yield assign(part, index), row

    def assignment(self, parts: Collection[str]) -> Holdout:
        """Which split each record of these parts is in."""
        if self.whole is None and not {"train", "all"} & set(parts):
            what = f"nothing is for training, only for {' and '.join(parts)}; name a file train"
            raise DataError(what, path=self.data)
        return Holdout(parts, share=self.holdout, seed=self.seed, whole=self.whole)


# The settings of every task that reads records, besides its data.
READING = {
    name: getattr(Source, name) for name in ("columns", "holdout", "skip_bad_rows", "seed", "whole", "cache")
}
