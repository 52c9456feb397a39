"""Running text as documents in splits: the input of language modelling, read as a stream."""

import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .cache import digest
from .contract import SPLITS, DataError
from .source import (
    PIECE,
    TABLES,
    Holdout,
    files,
    fingerprint,
    form,
    is_saved_dataset,
    locate,
    opened,
    pieces,
    split_rows,
)

TEXT_COLUMNS = ("text", "content", "sentence", "document", "review")
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
Piece = tuple[str, str, bool]  # split, text, whether the document ends here


def standard_library() -> list[Path]:
    """The Python standard library's source, but its tests and what the build left in _*.py."""
    home = Path(sysconfig.get_paths()["stdlib"])
    named = (p for p in home.rglob("[!_]*.py") if not NOT_LIBRARY & set(p.relative_to(home).parts))
    found = sorted(p for p in named if p.stat().st_size)
    if not found:
        version = ".".join(map(str, sys.version_info[:2]))
        raise DataError(f"Python {version} has no library source in {home}; pass data=...")
    return found


class Corpus:
    """Documents of `data`, or of the standard library if it is None, as (split, text, end of document).

    A document is a file; the part of a file between two `separator`s; or one row's `text` column. Where the
    data names no splits, documents are held out; fewer files than one holdout block are cut by size instead,
    the end going to test.
    """

    def __init__(self, data: Any, *, text: str | None, separator: str | None, holdout: float, seed: int):
        self.data, self.text, self.separator, self.holdout, self.seed = data, text, separator, holdout, seed
        self.parts: dict[str, list[Path]] = {}  # a saved data set has no files of ours
        if data is None:
            self.parts = {"all": standard_library()}
        elif not is_saved_dataset(locate(data)):
            self.parts = files(data)
        forms = {form(file) in TABLES for members in self.parts.values() for file in members}
        if len(forms) > 1:
            wanted = f"either text or tables ({', '.join(TABLES)}), not both"
            raise DataError(f"a folder must hold {wanted}", path=data)
        self.is_table = not self.parts or forms == {True}

    def key(self) -> dict[str, Any]:
        """Everything the documents depend on."""
        content = (
            [digest(file) for file in self.parts["all"]] if self.data is None else fingerprint(self.data)
        )
        choices = {"text": self.text, "separator": self.separator, "holdout": self.holdout, "seed": self.seed}
        return {"content": content, **choices}

    def __iter__(self) -> Iterator[Piece]:
        if self.is_table:
            for split, row in split_rows(self.data, holdout=self.holdout, seed=self.seed):
                yield split, row.text(self.text, TEXT_COLUMNS), True
            return
        assign = Holdout(self.parts, share=self.holdout, seed=self.seed)
        for part, members in self.parts.items():
            if part in ("all", "train") and assign.missing and self._few(members):
                yield from self._by_size(members, assign.missing)
                continue
            index = 0
            for file in members:
                for text, end in _documents(file, self.separator):
                    yield assign(part, index), text, end
                    index += end

    def _few(self, members: list[Path]) -> bool:
        return self.separator is None and len(members) < round(1 / self.holdout)

    def _by_size(self, members: list[Path], missing: list[str]) -> Iterator[Piece]:
        total = sum(map(_size, members))
        held = [split for split in SPLITS[1:] if split in missing]
        room = [["train", int(total * (1 - self.holdout * len(held)))]]
        room += [[split, int(total * self.holdout)] for split in held]
        room[-1][1] = total  # whatever is left
        for file in members:
            yield from _cut(_documents(file, None), room)


def _documents(file: Path, separator: str | None) -> Iterator[tuple[str, bool]]:
    """(text, end of document) of one file; only whole documents are left out when blank."""
    empty, carry, begun = True, "", False

    def part(text: str) -> str:
        return text if begun else text.lstrip("\r\n")

    for piece in pieces(file):
        empty = empty and not piece.strip()
        if separator is None:
            yield piece, False
            continue
        *whole, carry = (carry + piece).split(separator)
        for text in whole:
            if begun or text.strip():
                yield part(text), True
            begun = False
        if len(carry) > PIECE:  # a long document goes on: keep back only what may be half a separator
            keep = len(carry) - len(separator)
            yield part(carry[:keep]), False
            carry, begun = carry[keep:], True
    if empty:
        raise DataError("the file is empty", path=file)
    if separator is None:
        yield "", True
    elif begun or carry.strip():
        yield part(carry), True


def _size(file: Path) -> int:
    """Bytes of text, unpacked."""
    with opened(file) as stream:
        return sum(len(block) for block in iter(lambda: stream.read(PIECE), b""))


def _cut(documents: Iterable[tuple[str, bool]], room: list[list]) -> Iterator[Piece]:
    """Gives text to the first split of `room` (name, bytes left) while it has room; cuts after a line."""
    for text, end in documents:
        while len(room) > 1 and len(text.encode()) > room[0][1]:
            head = text.encode()[: room[0][1]].decode(errors="ignore")
            head = head[: head.rfind("\n") + 1] or head
            yield room.pop(0)[0], head, True
            text = text[len(head) :]
        room[0][1] -= len(text.encode())
        yield room[0][0], text, end
