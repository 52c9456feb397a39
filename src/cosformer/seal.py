"""Folders that are whole or are not: a seal, written last, holds the size and the checksum of every file."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

SEAL = "checksums.json"
TRAINING = (".pt", ".pth", ".bin", "trainer_state.json", "result.json")  # endings of files that hold no model


def write(path: Path, text: str) -> None:
    """Write a file atomically: to a draft beside it, synced to disk, then renamed."""
    draft = path.with_name(f"{path.name}.draft")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def files(folder: Path) -> dict[str, int]:
    """The files of a folder, with their modification times."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()}


def seal(folder: Path, names: Iterable[str]) -> None:
    """Record size and checksum of these files of a folder, once they are on disk."""
    marks = {}
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
            marks[name] = [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]
    write(folder / SEAL, json.dumps(marks, indent=1) + "\n")


def unseal(folder: Path) -> None:
    (folder / SEAL).unlink(missing_ok=True)


def is_sealed(folder: Path) -> bool:
    return (folder / SEAL).exists()


def damage(folder: Path, *, model: bool = False) -> str | None:
    """What was damaged in a folder since it was sealed; with `model`, only in the model's files.

    None: it is whole, or was never sealed.
    """
    if not is_sealed(folder):
        return None
    try:
        marks = json.loads((folder / SEAL).read_bytes())
        names = [name for name in marks if not (model and name.endswith(TRAINING))]
        return next(filter(None, (fault(folder / name, *marks[name]) for name in names)), None)
    except (ValueError, TypeError, AttributeError, OSError):
        return f"{SEAL} cannot be read"


def fault(path: Path, size: int, digest: str) -> str | None:
    """What is wrong with a file that had this size and digest; None if nothing."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                return f"{path.name} has {found:,} bytes instead of {size:,}"
            same = hashlib.file_digest(file, "sha256").hexdigest() == digest
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if same else f"{path.name} is not what was written"
