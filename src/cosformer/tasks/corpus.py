"""Running text as documents in splits: the input of language modelling, read as a stream."""

import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .cache import digest
from .source import (
    PIECE,
    SPLITS,
    TABLES,
    DataError,
    Holdout,
    column,
    files,
    fingerprint,
    form,
    is_saved_dataset,
    locate,
    opened,
    pieces,
    split_rows,
    tables,
)

TEXT_COLUMNS = ("text", "content", "sentence", "document", "review")
Piece = tuple[str, str, bool]  # split, text, whether the document ends here


def standard_library() -> list[Path]:
    """The Python standard library's own source, without its tests and what the build left in _*.py: text on every machine."""
    home = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
    found = [
        p for p in home.rglob("[!_]*.py") if not skip & set(p.relative_to(home).parts) and p.stat().st_size
    ]
    if not found:
        raise DataError(
            f"Python {sys.version_info[0]}.{sys.version_info[1]} has no library source in {home}; pass data=..."
        )
    return sorted(found)


class Corpus:
    """Documents of `data`, or of the standard library when it is None. Iterating yields (split, text, end of document).

    A document is a file; the part of a file between two `separator`s; or one row's `text` column. Where the data names no
    splits, documents are held out; fewer files than one holdout block are cut by size instead, the end going to test.
    """

    def __init__(
        self,
        data: Any = None,
        *,
        text: str | None = None,
        separator: str | None = None,
        holdout: float = 0.05,
        seed: int = 0,
    ):
        self.data, self.text, self.separator, self.holdout, self.seed = data, text, separator, holdout, seed
        if data is None:
            self.parts: dict[str, list[Path]] = {"all": standard_library()}
        else:
            path = locate(data)
            self.parts = (
                {} if path.is_dir() and is_saved_dataset(path) else files(path)
            )  # a saved data set has no files of ours
        forms = {form(file) in TABLES for members in self.parts.values() for file in members}
        if len(forms) > 1:
            raise DataError(
                f"a folder must hold either text or tables ({', '.join(TABLES)}), not both", path=data
            )
        self.rows = not self.parts or forms == {True}

    def key(self) -> dict[str, Any]:
        """Everything the documents depend on."""
        content = (
            fingerprint(self.data) if self.data is not None else [digest(file) for file in self.parts["all"]]
        )
        return {
            "content": content,
            "text": self.text,
            "separator": self.separator,
            "holdout": self.holdout,
            "seed": self.seed,
        }

    def __iter__(self) -> Iterator[Piece]:
        if self.rows:
            return self._rows()
        missing = [split for split in SPLITS if split not in self.parts]
        return self._by_size(missing) if missing and self._few() else self._by_document(missing)

    def _few(self) -> bool:
        return self.separator is None and len(self.parts.get("all") or self.parts["train"]) < round(
            1 / self.holdout
        )

    def _rows(self) -> Iterator[Piece]:
        name = ""
        for split, row in split_rows(tables(self.data), holdout=self.holdout, seed=self.seed):
            name = name if name in row.fields else column(row, self.text, TEXT_COLUMNS, argument="text")
            yield split, row.text(name), True

    def _by_document(self, missing: list[str]) -> Iterator[Piece]:
        for name, members in self.parts.items():
            assign, index = Holdout(share=self.holdout, seed=self.seed), 0
            for file in members:
                for text, end in _documents(file, self.separator):
                    split = assign(index) if missing and name in ("all", "train") else name
                    yield (split if split in missing or name == "all" else name), text, end
                    index += end

    def _by_size(self, missing: list[str]) -> Iterator[Piece]:
        for name, members in self.parts.items():
            if name not in ("all", "train"):
                yield from ((name, text, end) for file in members for text, end in _documents(file, None))
                continue
            shares = {"train": 1 - self.holdout * sum(split in missing for split in SPLITS[1:])}
            shares |= {split: self.holdout for split in SPLITS[1:] if split in missing}
            total, room = sum(map(_size, members)), []
            for split, share in shares.items():
                room.append([split, int(total * share)])
            room[-1][1] = total
            for file in members:
                yield from _cut(_documents(file, None), room)


def _documents(file: Path, separator: str | None) -> Iterator[tuple[str, bool]]:
    """(text, end of document) of one file; only whole documents are left out when blank."""
    empty, carry, begun = True, "", False
    for piece in pieces(file):
        empty = empty and not piece.strip()
        if separator is None:
            yield piece, False
            continue
        *whole, carry = (carry + piece).split(separator)
        for part in whole:
            if begun or part.strip():
                yield part if begun else part.lstrip("\r\n"), True
            begun = False
        if len(carry) > PIECE:  # a long document goes on: keep back only what may be half a separator
            keep = len(carry) - len(separator)
            yield carry[:keep] if begun else carry[:keep].lstrip("\r\n"), False
            carry, begun = carry[keep:], True
    if empty:
        raise DataError("the file is empty", path=file)
    if separator is None:
        yield "", True
    elif begun or carry.strip():
        yield carry if begun else carry.lstrip("\r\n"), True


def _size(file: Path) -> int:
    """Bytes of text, unpacked."""
    with opened(file) as stream:
        return sum(len(block) for block in iter(lambda: stream.read(PIECE), b""))


def _cut(documents: Iterable[tuple[str, bool]], room: list[list]) -> Iterator[Piece]:
    """Gives text to the first split of `room` (name, bytes left) until it is full, then to the next, cutting after a line."""
    for text, end in documents:
        while len(room) > 1 and len(text.encode()) > room[0][1]:
            head = text.encode()[: room[0][1]].decode(errors="ignore")
            head = head[: head.rfind("\n") + 1] or head
            yield room.pop(0)[0], head, True
            text = text[len(head) :]
        room[0][1] -= len(text.encode())
        yield room[0][0], text, end
