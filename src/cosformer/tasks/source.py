"""Reads what a user points at: text, CSV, TSV, JSONL (also .gz, .xz), folders of these, saved datasets.

Everything streams, and whatever is wrong is said with file and line. TSV has no quoting, as GLUE, IMDB and
Long-Range Arena publish it; CSV has the usual one. The standard csv and json modules parse, because they know
the line they are on. The parsers behind Hugging Face's datasets do not, and read NA, or a short row, as None.
"""

import codecs
import csv
import gzip
import json
import lzma
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .cache import digest
from .contract import SPLITS, DataError

SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"valid", "validation", "val", "dev", "eval"},
    "test": {"test", "testing"},
}
TABLES = (".csv", ".tsv", ".jsonl")
PACKED: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
PIECE = 1 << 18  # bytes read at once


@dataclass(frozen=True, slots=True)
class Row:
    """One record and where it stands."""

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
        raise self.error(
            f"no column named {' or '.join(known)}; found {', '.join(map(str, self.fields))}. "
            f"Pass {argument}=..., or columns=... to name the columns of a file without a header"
        )

    def text(self, asked: str | None, usual: Sequence[str] = (), *, argument: str = "text") -> str:
        """The text of a column; see `column`."""
        name = self.column(asked, usual, argument=argument)
        value = self.fields[name]
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"column {name!r} must hold text; got {value!r}")
        return value


def form(path: Path) -> str:
    """The suffix that says how to read a file, without its compression's: of TABLES, or another for text."""
    return Path(path.stem if path.suffix.lower() in PACKED else path).suffix.lower()


def is_saved_dataset(path: Path) -> bool:
    """Whether `datasets.Dataset.save_to_disk` made this folder."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def locate(data: Any) -> Path:
    """`data` as a path that exists."""
    path = Path(data).expanduser()
    if not path.exists():
        raise DataError(f"data={str(data)!r} is neither a file nor a folder")
    return path


def files(data: Any) -> dict[str, list[Path]]:
    """The files of each split, by words in their names (`train.txt`, `x_val.tsv`, `test/...`), or of "all".

    Hidden files are left out, and so are files that name no split when others do. A folder called as a split
    has all that is in it.
    """
    path = locate(data)
    if path.is_file():
        return {"all": [path]}
    found = {p.relative_to(path): p for p in sorted(path.rglob("*")) if p.is_file()}
    named = {p: _splits_of(name) for name, p in found.items() if not any(x[0] == "." for x in name.parts)}
    if not named:
        raise DataError("the folder holds no files", path=path)
    if ["train"] not in named.values():
        return {"all": list(named)}
    for file, splits in named.items():
        if len(splits) > 1:
            said = " and ".join(splits)
            raise DataError(f"the name says {said}; rename it, so that it is one of them", path=file)
    members = {split: [file for file, splits in named.items() if splits == [split]] for split in SPLITS}
    return {split: mine for split, mine in members.items() if mine}


def _splits_of(name: Path) -> list[str]:
    """The splits that a file's name speaks of; a folder's name decides."""
    folders = {folder.lower() for folder in name.parts[:-1]}
    if inside := [split for split in SPLITS if folders & SPLIT_WORDS[split]]:
        return inside[:1]
    words = set(re.split(r"[^a-z]+", str(name).lower()))
    return [split for split in SPLITS if words & SPLIT_WORDS[split]]


def fingerprint(data: Any) -> list[list[str]]:
    """What the data is, for the cache: every file's split and content."""
    path = locate(data)
    if is_saved_dataset(path):
        return [[str(p.relative_to(path)), digest(p)] for p in sorted(path.rglob("*")) if p.is_file()]
    return [[split, form(file), digest(file)] for split, members in files(path).items() for file in members]


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked; damage in the packing is a DataError."""
    try:
        with PACKED.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"damaged {path.suffix} file: {error}", path=path) from None


def undecodable(error: UnicodeDecodeError, *, path: Path, line: int) -> DataError:
    """Says which byte, on which line, is not UTF-8."""
    utf16 = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    hint = " (UTF-16 by its first bytes)" if utf16 else ""
    line += error.object[: error.start].count(b"\n")
    byte = f"byte 0x{error.object[error.start]:02x}"
    return DataError(f"{byte} is not UTF-8{hint}; only UTF-8 is read", path=path, line=line)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a file, without their ends."""
    with opened(path) as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise undecodable(error, path=path, line=number) from None
            yield number, line.rstrip("\r\n")


def pieces(path: Path) -> Iterator[str]:
    """The text of a file in pieces: `PIECE` bytes and the rest of the line, up to another `PIECE`."""
    decoder, line = codecs.getincrementaldecoder("utf-8-sig")(), 1
    with opened(path) as file:
        try:
            while block := file.read(PIECE):
                block += file.readline(PIECE)
                yield decoder.decode(block)
                line += block.count(b"\n")
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise undecodable(error, path=path, line=line) from None


def _tsv(path: Path) -> Iterator[tuple[int, list[str]]]:
    return ((number, line.split("\t")) for number, line in lines(path) if line)


def _csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a field may be a whole document
    start, reader = 1, csv.reader((line + "\n" for _, line in lines(path)), strict=True)
    try:
        for record in reader:
            if record:
                yield start, [field.removesuffix("\n") for field in record]
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"not CSV: {error}", path=path, line=start) from None


def _jsonl(path: Path) -> Iterator[Row]:
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            what = f"not JSON: {error.msg} at column {error.colno}"
            raise DataError(what, path=path, line=number) from None
        if not isinstance(fields, dict):
            raise DataError(f"expected a JSON object, got {type(fields).__name__}", path=path, line=number)
        yield Row(path, number, fields)


def _records(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    for number, fields in _csv(path) if form(path) == ".csv" else _tsv(path):
        if columns is None:
            columns = [field.strip() for field in fields]
            if len(set(columns)) < len(columns):
                raise DataError(f"a column is named twice in {columns}", path=path, line=number)
            continue
        if len(fields) != len(columns):
            expected = f"expected {len(columns)} fields ({', '.join(columns)})"
            raise DataError(f"{expected}, got {len(fields)}", path=path, line=number)
        yield Row(path, number, dict(zip(columns, fields)))


def rows(path: Path, *, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The records of a CSV, TSV or JSONL file. `columns` names the fields of a file without a header."""
    if form(path) not in TABLES:
        raise DataError(f"expected one of {', '.join(TABLES)} (also .gz, .xz), got {path.name!r}", path=path)
    records = _jsonl(path) if form(path) == ".jsonl" else _records(path, columns)
    first = next(records, None)
    if first is None:
        raise DataError("no rows", path=path)
    yield first
    yield from records


def saved(path: Path) -> dict[str, Iterable[Row]]:
    """The splits of a folder that `save_to_disk` made, under our names; a row's number is its line."""
    import datasets

    loaded = datasets.load_from_disk(str(path))
    parts = {"all": loaded}
    if isinstance(loaded, datasets.DatasetDict):
        parts = {ours: loaded[name] for ours in SPLITS for name in loaded if name in SPLIT_WORDS[ours]}
        if "train" not in parts:
            raise DataError(f"no split named train; found {', '.join(loaded)}", path=path)
    return {
        split: (Row(path, number, fields) for number, fields in enumerate(part, 1))
        for split, part in parts.items()
    }


class Holdout:
    """Which split the n-th record of a part goes to, where the data does not name all splits.

    One in every `1 / share` records is held out for validation, one for test: exact in every block of so
    many, random within it, and no count is needed beforehand. Without a share every part keeps its own.
    """

    def __init__(self, parts: Iterable[str], *, share: float | None, seed: int):
        if share is not None and not 0 < share <= 1 / 3:
            raise ValueError(f"holdout must lie in (0, 1/3]; got {share}")
        self.missing = [split for split in SPLITS if split not in parts] if share else []
        self.block, self.seed = round(1 / (share or 1)), seed
        self._number = -1
        self._chosen: dict[int, str] = {}

    def __call__(self, part: str, index: int) -> str:
        if not self.missing or part not in ("all", "train"):
            return part
        if index // self.block != self._number:
            self._number = index // self.block
            rng = np.random.default_rng((self.seed, self._number))
            self._chosen = dict(zip(rng.choice(self.block, 2, replace=False).tolist(), SPLITS[1:]))
        split = self._chosen.get(index % self.block, "train")
        return split if split in self.missing else "train"


def split_rows(
    data: Any, *, columns: Sequence[str] | None = None, holdout: float | None, seed: int
) -> Iterator[tuple[str, Row]]:
    """Every record with its split: its own where the data names them, else held out (None: nothing is)."""
    path = locate(data)
    if is_saved_dataset(path):
        parts = saved(path)
    else:
        parts = {
            split: chain.from_iterable(rows(file, columns=columns) for file in members)
            for split, members in files(path).items()
        }
    if holdout is None and "all" in parts:
        raise DataError("expected a folder with files named train and test")
    assign = Holdout(parts, share=holdout, seed=seed)
    for part, records in parts.items():
        for index, row in enumerate(records):
            yield assign(part, index), row
