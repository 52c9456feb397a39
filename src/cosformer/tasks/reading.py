"""A text file as lines or pieces, plain or packed; what is no text, or damaged, is an error."""

import codecs
import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .contract import DataError

PACKED: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
PIECE = 1 << 18  # bytes read at once
PEEK = 1 << 12  # bytes examined to tell whether a file is text
MOST_CONTROL = 0.1  # largest share of control characters in them
ARCHIVES = {b"PK\x03\x04": "zip", b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"7z\xbc\xaf": "7z",
            b"Rar!\x1a": "rar", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}  # fmt: skip


REMEDY = "--skip-bad-rows N leaves out up to N rows that cannot be read"


class BadRows:
    """Rows that cannot be read: up to `allowed` are left out and counted; one more raises the first error."""

    def __init__(self, allowed: int = 0):
        self.allowed, self.count = allowed, 0
        self.first: DataError | None = None

    def __call__(self, error: DataError) -> None:
        self.first = self.first or error
        self.count += 1
        if not self.allowed:
            remedy = "" if error.everywhere else f" ({REMEDY})"
            raise DataError(f"{error}{remedy}") from None
        if self.count > self.allowed:
            allowed = f"--skip-bad-rows allows {self.allowed:,} rows that cannot be read; there are more"
            raise DataError(f"{self.first} ({allowed})") from None

    def note(self) -> list[str]:
        """What to tell the user about the rows left out."""
        left_out = f"{self.count:,} rows that cannot be read are left out"
        return [f"{left_out}; the first: {self.first}"] if self.count else []


def form(path: Path) -> str:
    """The suffix that says how to read a file, apart from its compression: one of TABLES, else text."""
    return Path(path.stem if path.suffix.lower() in PACKED else path).suffix.lower()


def _check_text(path: Path, head: bytes) -> None:
    """Refuses archives, by magic bytes, and files full of control characters; decoding reports UTF-16."""
    archive = next((name for mark, name in ARCHIVES.items() if head.startswith(mark)), None)
    if archive or head[257:262] == b"ustar":
        kind = archive or "tar"
        raise DataError(f"a {kind} archive, not text; unpack it and give --data the folder", path=path)
    control = sum(byte < 32 and byte not in b"\t\n\v\f\r\x1b" for byte in head)
    if control > MOST_CONTROL * len(head) and not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        share = f"{control / len(head):.0%} of its first {len(head):,} bytes are control characters"
        raise DataError(f"not text: {share}", path=path)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a text file, decompressed; DataError if its compression is damaged or it is not text."""
    try:
        with PACKED.get(path.suffix.lower(), open)(path, "rb") as file:
            _check_text(path, file.peek(PEEK)[:PEEK])
            yield file
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"damaged {path.suffix} file: {error}", path=path) from None


def undecodable(error: UnicodeDecodeError, *, path: Path, line: int) -> DataError:
    """An error that says which byte, on which line, is not UTF-8."""
    utf16 = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    hint = " (UTF-16 by its first bytes)" if utf16 else ""
    line += error.object[: error.start].count(b"\n")
    byte = f"byte 0x{error.object[error.start]:02x}"
    return DataError(f"{byte} is not UTF-8{hint}; only UTF-8 is read", path=path, line=line)


def lines(path: Path, bad: BadRows) -> Iterator[tuple[int, str]]:
    """The numbered lines of a file, without line ends."""
    with opened(path) as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                bad(undecodable(error, path=path, line=number))
                line = ""  # becomes a blank line, so that later lines keep their numbers
            yield number, line.rstrip("\r\n")


def pieces(path: Path) -> Iterator[str]:
    """The text of a file in pieces: `PIECE` bytes plus the rest of the line, up to another `PIECE`."""
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
