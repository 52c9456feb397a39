"""transformers' Trainer with checkpoints that are whole or not there, and a stop where going on would spoil the run.

A checkpoint counts once the file `complete` is in it, which is written last; older ones are deleted after that. So a process
that is killed at any moment leaves a checkpoint to resume from, if it ever had one.
"""

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import Seq2SeqTrainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

COMPLETE = "complete"


class Stopped(RuntimeError):
    """Training cannot go on, or was asked to stop; the message says what happened and what is left."""


class Loop(Seq2SeqTrainer):
    """`keep` checkpoints stay, the best among them."""

    def __init__(self, *args: Any, keep: int | None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.keep = keep

    def training_step(self, *args: Any, **kwargs: Any):
        loss = super().training_step(*args, **kwargs)
        self.stop_unless_finite("loss", loss)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any):
        norm = super()._get_grad_norm(*args, **kwargs)
        if norm is not None and self.accelerator.scaler is None:  # a loss scaler expects infinite gradients and skips the step
            self.stop_unless_finite("gradient's norm", norm)
        return norm

    def stop_unless_finite(self, what: str, value: Any) -> None:
        value = float(value)
        if value - value != 0:  # NaN or infinite
            raise Stopped(
                f"the {what} is {value} at step {self.state.global_step + 1}; {self.what_is_left()} Try a lower learning rate, "
                "a longer warm-up or --max_grad_norm 0.5."
            )

    def what_is_left(self) -> str:
        last = last_checkpoint(Path(self.args.output_dir))
        return f"the last good checkpoint is {last}." if last else "no checkpoint was saved yet."

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                (folder / COMPLETE).touch()
        except (OSError, SafetensorError, RuntimeError) as error:
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise Stopped(f"checkpoint {folder} could not be written ({error}); {self.what_is_left()}") from error
        if self.args.should_save and self.keep is not None:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(output_dir=self.args.output_dir, save_total_limit=self.keep, best_model_checkpoint=best)


def last_checkpoint(out: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    found = [path for path in out.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (path / COMPLETE).exists()]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def remove_incomplete(out: Path) -> None:
    """Delete what a killed process left half written."""
    for path in out.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if not (path / COMPLETE).exists():
            shutil.rmtree(path)
