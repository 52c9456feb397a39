"""Running text as documents in splits: the input of language modelling, read as a stream."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contract import SPLITS, DataError
from .reading import PIECE, form, opened, pieces
from .source import TABLES, Holdout, Source, files, is_saved_dataset

TEXT_COLUMNS = ("text", "content", "sentence", "document", "review")
Piece = tuple[str, str, bool]  # split, text, whether the document ends here


@dataclass(kw_only=True)
class Corpus(Source):
    """Documents of `data`, or of the standard library if it is None, as (split, text, end of document).

    A document is a file, or one row's `text` column. Where the data names no splits, documents are held out;
    with fewer files than one holdout block the text is cut by size instead, its end going to test.
    """

    text: str | None

    def key(self) -> dict[str, Any]:
        return {**super().key(), "text": self.text}

    def __iter__(self) -> Iterator[Piece]:
        parts = {} if is_saved_dataset(self.data) else files(self.data)  # a saved dataset is read by `each`
        forms = {form(file) in TABLES for members in parts.values() for file in members}
        if len(forms) > 1:
            wanted = f"either text or tables ({', '.join(TABLES)}), not both"
            raise DataError(f"a folder must hold {wanted}", path=self.data)
        if forms != {False}:
            for split, text in self.each(lambda row: row.text(self.text, TEXT_COLUMNS)):
                yield split, text, True
            return
        assign = self.assignment(parts)
        for part, members in parts.items():
            if len(members) < assign.block and assign.divides(part):
                yield from _by_size(members, assign)
                continue
            for index, file in enumerate(members):
                for text, end in _document(file):
                    yield assign(part, index), text, end


def _by_size(members: list[Path], assign: Holdout) -> Iterator[Piece]:
    """The files end to end, cut once for each missing split."""
    total = sum(map(_size, members))
    held = [split for split in SPLITS[1:] if split in assign.missing]
    room = [["train", int(total * (1 - assign.share * len(held)))]]
    room += [[split, int(total * assign.share)] for split in held]
    room[-1][1] = total  # the last takes whatever is left
    for file in members:
        yield from _cut(_document(file), room)


def _document(file: Path) -> Iterator[tuple[str, bool]]:
    """(text, end of document) of one file, piece by piece."""
    empty = True
    for piece in pieces(file):
        empty = empty and not piece.strip()
        yield piece, False
    if empty:
        raise DataError("the file is empty", path=file)
    yield "", True


def _size(file: Path) -> int:
    """Bytes of text, decompressed."""
    with opened(file) as stream:
        return sum(len(block) for block in iter(lambda: stream.read(PIECE), b""))


def _cut(documents: Iterable[tuple[str, bool]], room: list[list]) -> Iterator[Piece]:
    """Fills the splits of `room`, [name, bytes left] each, in order; cuts after a line."""
    for text, end in documents:
        while len(room) > 1 and len(text.encode()) > room[0][1]:
            head = text.encode()[: room[0][1]].decode(errors="ignore")
            head = head[: head.rfind("\n") + 1] or head
            yield room.pop(0)[0], head, True
            text = text[len(head) :]
        room[0][1] -= len(text.encode())
        yield room[0][0], text, end
