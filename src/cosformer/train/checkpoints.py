"""A run's checkpoints: those that are sealed count, and of these the newest whole one is gone on from."""

import json
import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from ..seal import damage, is_sealed

ASIDE = "damaged-"  # prefix of a damaged checkpoint's new name


def checkpoint_of(out: str | Path, step: int) -> Path:
    return Path(out) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def checkpoints(out: str | Path) -> list[Path]:
    """Every checkpoint of a run, whole or not, newest first; folders with other names are the user's."""
    found = map(Path, reversed(sort_checkpoints(str(out))))
    return [path for path in found if path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-").isdigit()]


def last_checkpoint(out: str | Path) -> Path | None:
    """The newest finished checkpoint; not checked for damage."""
    return next(filter(is_sealed, checkpoints(out)), None)


def newest_whole(out: str | Path) -> tuple[Path | None, dict[Path, str]]:
    """The checkpoint to resume from, and what is wrong with each newer one."""
    wrong: dict[Path, str] = {}
    for checkpoint in checkpoints(out):
        fault = damage(checkpoint) if is_sealed(checkpoint) else "it was never finished"
        fault = fault or damage_of_best(checkpoint)
        if fault is None:
            return checkpoint, wrong
        wrong[checkpoint] = fault
    return None, wrong


def damage_of_best(checkpoint: Path) -> str | None:
    """What is wrong with the best checkpoint until then, which a run may end with; None if it was deleted for
    a better one: resuming finds that one again."""
    best = json.loads((checkpoint / "trainer_state.json").read_text())["best_global_step"]
    fault = None if best is None else damage(checkpoint_of(checkpoint.parent, best))
    return fault and f"of the best until then, {PREFIX_CHECKPOINT_DIR}-{best}, {fault}"


def put_aside(wrong: dict[Path, str]) -> list[str]:
    """Delete half-written checkpoints and rename damaged ones; returns a line about each."""
    told = []
    for checkpoint, fault in wrong.items():
        aside = checkpoint.with_name(ASIDE + checkpoint.name)
        shutil.rmtree(aside, ignore_errors=True)
        kept = ""
        if is_sealed(checkpoint):
            checkpoint.rename(aside)
            kept = f" (now {aside.name})"
        else:
            shutil.rmtree(checkpoint)
        told.append(f"{checkpoint} is skipped: {fault}{kept}")
    return told
