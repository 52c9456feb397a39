"""Reads what a user points at: text, CSV, TSV, JSONL (plain, .gz or .xz), a folder of these, or a saved Hugging Face dataset.

Everything streams, and whatever is wrong is said with file and line. TSV has no quoting, as GLUE, IMDB and Long-Range Arena
publish it; CSV has the usual one. The standard csv and json modules parse, because they know the line they are on.
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
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .cache import digest

SPLITS = ("train", "validation", "test")
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("valid", "validation", "val", "dev", "eval"),
    "test": ("test", "testing"),
}
TABLES = (".csv", ".tsv", ".jsonl")
PACKED: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
PIECE = 1 << 18  # bytes read at once


class DataError(ValueError):
    """What is wrong with the data, and where: `path:line: what`."""

    def __init__(self, what: str, *, path: Any = None, line: int | None = None):
        where = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(where + what)


@dataclass(frozen=True, slots=True)
class Row:
    """One record and where it stands."""

    path: Path
    line: int
    fields: dict[str, Any]

    def error(self, what: str) -> DataError:
        return DataError(what, path=self.path, line=self.line)

    def text(self, column: str) -> str:
        value = self.fields[column]
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"column {column!r} must hold text; got {value!r}")
        return value


def form(path: Path) -> str:
    """The suffix that says how to read a file, without its compression: '.csv', '.tsv', '.jsonl', or another for text."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in PACKED else path.suffix.lower()


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
    """The files of each split, by words in their names (`train.txt`, `x_val.tsv`, `test/...`); {"all": [...]} if none says.

    Hidden files are left out, and so are files that name no split when others do. A folder called as a split has all that is in it.
    """
    path = locate(data)
    if path.is_file():
        return {"all": [path]}
    found = sorted(
        p
        for p in path.rglob("*")
        if p.is_file() and not any(part[0] == "." for part in p.relative_to(path).parts)
    )
    if not found:
        raise DataError("the folder holds no files", path=path)
    splits: dict[str, list[Path]] = {}
    unclear: list[tuple[Path, list[str]]] = []
    for file in found:
        name = file.relative_to(path)
        folders = [
            split for split in SPLITS for folder in name.parts[:-1] if folder.lower() in SPLIT_WORDS[split]
        ]
        words = set(re.split(r"[^a-z]+", str(name).lower()))
        named = folders[:1] or [split for split in SPLITS if words & set(SPLIT_WORDS[split])]
        if len(named) > 1:
            unclear.append((file, named))
        elif named:
            splits.setdefault(named[0], []).append(file)
    if "train" not in splits:
        return {"all": found}
    if unclear:
        file, named = unclear[0]
        raise DataError(
            f"the name says {' and '.join(named)}; rename it, so that it is one of them", path=file
        )
    return splits


def fingerprint(data: Any) -> list[list[str]]:
    """What the data is, for the cache: every file's split and content."""
    path = locate(data)
    if path.is_dir() and is_saved_dataset(path):
        return [
            ["saved", str(p.relative_to(path)), digest(p)] for p in sorted(path.rglob("*")) if p.is_file()
        ]
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
    hint = (
        " (UTF-16 by its first bytes)"
        if error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        else ""
    )
    line += error.object[: error.start].count(b"\n")
    return DataError(
        f"byte 0x{error.object[error.start]:02x} is not UTF-8{hint}; only UTF-8 is read", path=path, line=line
    )


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
    """The text of a file in pieces: `PIECE` bytes and the rest of the line, as far as another `PIECE` reaches."""
    decoder, line = codecs.getincrementaldecoder("utf-8-sig")(), 1
    with opened(path) as file:
        while block := file.read(PIECE):
            block += file.readline(PIECE)
            try:
                text = decoder.decode(block)
            except UnicodeDecodeError as error:
                raise undecodable(error, path=path, line=line) from None
            line += block.count(b"\n")
            yield text
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise undecodable(error, path=path, line=line) from None


def _tsv(path: Path) -> Iterator[tuple[int, list[str]]]:
    return ((number, line.split("\t")) for number, line in lines(path) if line)


def _csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a field may be a whole document
    start, reader = 1, csv.reader((line + "\n" for _, line in lines(path)), strict=True)
    while True:
        try:
            record = next(reader, None)
        except csv.Error as error:
            raise DataError(f"not CSV: {error}", path=path, line=start) from None
        if record is None:
            return
        if record:
            yield start, [field.removesuffix("\n") for field in record]
        start = reader.line_num + 1


def _jsonl(path: Path) -> Iterator[Row]:
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"not JSON: {error.msg} at column {error.colno}", path=path, line=number
            ) from None
        if not isinstance(fields, dict):
            raise DataError(f"expected a JSON object, got {type(fields).__name__}", path=path, line=number)
        yield Row(path, number, fields)


def rows(path: Path, *, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The records of a CSV, TSV or JSONL file. `columns` names the fields of a file whose first line is data already."""
    if form(path) not in TABLES:
        raise DataError(f"expected one of {', '.join(TABLES)} (also .gz, .xz), got {path.name!r}", path=path)
    if form(path) == ".jsonl":
        records = _jsonl(path)
    else:
        records = _records(path, _csv(path) if form(path) == ".csv" else _tsv(path), columns)
    empty = True
    for record in records:
        empty = False
        yield record
    if empty:
        raise DataError("no rows", path=path)


def _records(
    path: Path, split_lines: Iterator[tuple[int, list[str]]], columns: Sequence[str] | None
) -> Iterator[Row]:
    for number, fields in split_lines:
        if columns is None:
            columns = [field.strip() for field in fields]
            if len(set(columns)) < len(columns):
                raise DataError(f"a column is named twice in {columns}", path=path, line=number)
            continue
        if len(fields) != len(columns):
            raise DataError(
                f"expected {len(columns)} fields ({', '.join(columns)}), got {len(fields)}",
                path=path,
                line=number,
            )
        yield Row(path, number, dict(zip(columns, fields)))


def tables(data: Any, *, columns: Sequence[str] | None = None) -> dict[str, Iterable[Row]]:
    """The records of each split of `data`; {"all": ...} where nothing says which split."""
    path = locate(data)
    if path.is_dir() and is_saved_dataset(path):
        return {split: _Saved(path, part) for split, part in saved(path).items()}
    return {split: _Files(members, columns) for split, members in files(path).items()}


@dataclass(frozen=True)
class _Files:
    """The rows of several files; iterating again reads again."""

    paths: list[Path]
    columns: Sequence[str] | None

    def __iter__(self) -> Iterator[Row]:
        for path in self.paths:
            yield from rows(path, columns=self.columns)


@dataclass(frozen=True)
class _Saved:
    """The rows of a saved Hugging Face dataset; the row's number is its line."""

    path: Path
    part: Any

    def __iter__(self) -> Iterator[Row]:
        return (Row(self.path, number, fields) for number, fields in enumerate(self.part, 1))


def saved(path: Path) -> dict[str, Any]:
    """The splits of a folder that `save_to_disk` made, under our names."""
    import datasets

    loaded = datasets.load_from_disk(str(path))
    if not isinstance(loaded, datasets.DatasetDict):
        return {"all": loaded}
    splits = {ours: loaded[name] for ours, names in SPLIT_WORDS.items() for name in names if name in loaded}
    if "train" not in splits:
        raise DataError(f"no split named train; found {', '.join(loaded)}", path=path)
    return splits


def column(row: Row, asked: str | None, known: Sequence[str], *, argument: str) -> str:
    """The column to use: the one asked for, or the first of the usual names; the error lists what is there."""
    if asked is not None:
        known = (asked,)
    lowered = {name.lower(): name for name in row.fields}
    for name in known:
        if name in row.fields or name.lower() in lowered:
            return name if name in row.fields else lowered[name.lower()]
    raise row.error(
        f"no column named {' or '.join(known)}; found {', '.join(map(str, row.fields))}. Pass {argument}=..., "
        "or columns=... to name the columns of a file without a header"
    )


class Holdout:
    """Which split the n-th record goes to where the data does not say: one in every `1 / share` for validation, one for test.

    Exact in every block of `1 / share` records, random within it, and needs no count beforehand.
    """

    def __init__(self, *, share: float, seed: int):
        if not 0 < share <= 1 / 3:
            raise ValueError(f"holdout must lie in (0, 1/3]; got {share}")
        self.block, self.seed = round(1 / share), seed
        self._number, self._chosen = -1, (0, 0)

    def __call__(self, index: int) -> str:
        if index // self.block != self._number:
            self._number = index // self.block
            rng = np.random.default_rng((self.seed, self._number))
            self._chosen = tuple(rng.choice(self.block, 2, replace=False))
        place = index % self.block
        return "validation" if place == self._chosen[0] else "test" if place == self._chosen[1] else "train"


def split_rows(
    parts: dict[str, Iterable[Row]], *, holdout: float | None, seed: int
) -> Iterator[tuple[str, Row]]:
    """Every record with its split: the data's own where it names them, else held out from what there is (None: nothing is)."""
    if holdout is None and "all" in parts:
        raise DataError("expected a folder with files named train and test")
    missing = [split for split in SPLITS if split not in parts] if holdout else []
    for name, records in parts.items():
        assign = (
            Holdout(share=holdout, seed=seed) if holdout and missing and name in ("all", "train") else None
        )
        for index, row in enumerate(records):
            split = assign(index) if assign else name
            yield (split if split in missing or name == "all" else name), row
