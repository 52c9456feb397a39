"""transformers' Trainer with checkpoints that are whole or not there, and a stop where going on would spoil the run.

A checkpoint counts once the file `complete` is in it, which is written last; older ones are deleted after that. So a process
that is killed at any moment leaves a checkpoint to resume from, if it ever had one.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from .progress import anybody
from .sharded import Sharded

COMPLETE = "complete"
UNWRITABLE = (
    OSError,
    SafetensorError,
)  # what a full disk raises; torch.save's RuntimeError is met where it is called


class Stopped(RuntimeError):
    """Training cannot go on, or was asked to stop; the message says what happened and what is left."""


class Interrupted(Stopped):
    """It was asked to stop; resuming goes on as if it had not been."""


class NotFinite(Stopped):
    """Loss, gradient or weights became infinite or NaN; the same run would do so again."""


class Loop(Sharded):
    """`keep` checkpoints stay; the best and the last always do."""

    def __init__(self, *args: Any, keep: int | None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.keep, self.loss = keep, 0.0
        self.by_length: ByLength | None = None

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # counting all parameters at every step takes longer than it is worth

    def _get_train_sampler(self, *args: Any, **kwargs: Any):
        sampler = super()._get_train_sampler(*args, **kwargs)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.by_length = ByLength(
            self.get_total_train_batch_size(self.args), lengths=sampler.lengths, seed=seed
        )
        return self.by_length

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any):
        """dataloader_drop_last is about training; transformers would leave out examples of the evaluation as well."""
        drop = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = drop and is_training
        try:
            return super()._get_dataloader(*args, is_training=is_training, **kwargs)
        finally:
            self.args.dataloader_drop_last = drop

    def evaluation_loop(self, *args: Any, **kwargs: Any):
        """Seq2SeqTrainer counts again what fills up the last batch of several processes."""
        self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)

    def _init_training_state(self, *args: Any):
        found = super()._init_training_state(*args)
        if self.args.world_size > 1:  # or dropout would hide the same places in every process
            torch.manual_seed(self.args.seed + self.args.process_index)
        best = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if (best / COMPLETE).exists():  # the folder may have been moved since
            self.state.best_model_checkpoint = str(best)
        return found

    def _run_epoch(self, model: Any, epoch: int, *args: Any, **kwargs: Any) -> None:
        if (
            self.by_length is not None
        ):  # accelerate does not reach it through the samplers of a resumed, distributed run
            self.by_length.set_epoch(epoch)
        if (
            self.state.global_step < self.state.max_steps
        ):  # resumed from its last step, transformers would add another
            super()._run_epoch(model, epoch, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any):
        loss = super().training_step(*args, **kwargs)
        self.loss = loss
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any):
        """Before every step of the optimizer. The norm is the same in all processes, so all of them stop."""
        norm = super()._get_grad_norm(*args, **kwargs)
        watched = {"loss": self.loss}
        if self.accelerator.scaler is None:  # a loss scaler expects infinite gradients and skips the step
            watched["gradient's norm"] = norm
        for what, value in watched.items():
            if not math.isfinite(value):
                raise NotFinite(
                    f"the {what} is {float(value)} at step {self.state.global_step + 1}; {self.another_way()}"
                )
        return norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        weights = (p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters())
        if anybody(not all(bool(p.detach().isfinite().all()) for p in weights)):
            raise NotFinite(
                f"the weights are not finite after step {self.state.global_step}; {self.another_way()}"
            )
        super().save_model(output_dir, _internal_call)

    def another_way(self) -> str:
        last = last_checkpoint(Path(self.args.output_dir))
        start = f"start again from {last} (--start)" if last else "no checkpoint was saved yet; start again"
        return f"{start} with a lower learning rate, a longer warm-up or --max_grad_norm 0.5"

    def what_is_left(self) -> str:
        last = last_checkpoint(Path(self.args.output_dir))
        return f"--resume goes on from {last}" if last else "no checkpoint was saved yet"

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        better = super()._determine_best_metric(*args, **kwargs)
        if better and self.args.load_best_model_at_end:
            self.control.should_save = True  # whatever save_steps says: the best must be there to be loaded
        return better

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                (folder / COMPLETE).touch()
        except Stopped:
            raise
        except (*UNWRITABLE, RuntimeError) as error:
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise Stopped(
                f"checkpoint {folder} could not be written ({error}); {self.what_is_left()}"
            ) from error
        if self.args.should_save and self.keep is not None:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(
                output_dir=self.args.output_dir, save_total_limit=self.keep, best_model_checkpoint=best
            )


class ByLength(LengthGroupedSampler):
    """Examples of like length together, in an order of the seed and the epoch alone.

    transformers' own draws it from the process's random numbers: a run resumed in a later epoch, or another process, draws another.
    """

    def __init__(self, batch: int, *, lengths: list[int], seed: int):
        super().__init__(batch, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


def last_checkpoint(out: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    found = [path for path in out.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (path / COMPLETE).exists()]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def remove_incomplete(out: Path) -> None:
    """Delete what a killed process left half written."""
    for path in out.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if not (path / COMPLETE).exists():
            shutil.rmtree(path)
