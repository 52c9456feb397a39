"""What is on the disk is whole or not there: files are renamed when complete, a checkpoint is marked last."""

import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

COMPLETE = "complete"


def write(path: Path, text: str) -> None:
    """A whole file or none: it is written beside and renamed."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)


def checkpoint_of(out: str | Path, step: int) -> Path:
    return Path(out) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def checkpoints(out: str | Path) -> list[Path]:
    """Every checkpoint of a run, whole or not, the newest last."""
    return sorted(Path(out).glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=lambda path: int(path.name.split("-")[1]))


def mark(checkpoint: Path) -> None:
    """Say that all of it is written."""
    (checkpoint / COMPLETE).touch()


def is_complete(checkpoint: Path) -> bool:
    return (checkpoint / COMPLETE).exists()


def last_checkpoint(out: str | Path) -> Path | None:
    """The newest complete one."""
    return next(filter(is_complete, reversed(checkpoints(out))), None)


def remove_incomplete(out: str | Path) -> None:
    """Delete what a killed process left half written."""
    for checkpoint in checkpoints(out):
        if not is_complete(checkpoint):
            shutil.rmtree(checkpoint)
