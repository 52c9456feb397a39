"""transformers' Trainer, with checkpoints that are whole or not there; it stops where a run would be spoilt.

A checkpoint counts once it is sealed, which comes last; only then are older ones deleted. So a process killed
at any moment leaves one to resume from, if it ever had one. Overrides of private methods say what upstream
lacks.
"""

import math
import shutil
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import rotate_checkpoints

from ..seal import files, is_sealed, seal, unseal
from .checkpoints import checkpoint_of, last_checkpoint
from .parallel import Parallel
from .progress import any_process

UNWRITABLE = (OSError, SafetensorError)  # what a full disk raises; torch.save's RuntimeError is handled apart


class Stopped(RuntimeError):
    """Training cannot go on, or was asked to stop; the message says what happened and what is left."""


class Interrupted(Stopped):
    """It was asked to stop; a resumed run continues as if it had not been."""


class NotFinite(Stopped):
    """Loss, gradient or weights became infinite or NaN; repeating the run would do the same."""


class Trainer(Parallel):
    """Keeps `keep` checkpoints, always the best and the last."""

    def __init__(self, *args: Any, keep: int | None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.remove_callback(PrinterCallback)
        self.add_callback(Beginning)
        self.keep, self.loss = keep, 0.0
        self.by_length: ByLength | None = None

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # counting all parameters at every step takes longer than it is worth

    def get_eval_dataloader(self, *args: Any, **kwargs: Any):
        """dataloader_drop_last is meant for training; upstream also drops examples of evaluations."""
        drop, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.args.dataloader_drop_last = drop

    def evaluation_loop(self, *args: Any, **kwargs: Any):
        """With several processes Seq2SeqTrainer counts the repeated rows that pad the last batch."""
        self.gather_function = self.gather_scores
        return super().evaluation_loop(*args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any):
        """For batches of similar length upstream's order depends on the process and is lost on resuming."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        batch = self.get_total_train_batch_size(self.args)
        self.by_length = ByLength(batch, lengths=sampler.lengths, seed=self.args.data_seed)
        return self.by_length

    def _run_epoch(self, model: Any, epoch: int, *args: Any, **kwargs: Any) -> None:
        """Upstream takes a step too many when resumed from the last one, and accelerate does not tell the
        sampler of a resumed, distributed run its epoch."""
        if self.by_length is not None:
            self.by_length.set_epoch(epoch)
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(model, epoch, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any):
        self.loss = super().training_step(*args, **kwargs)
        return self.loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any):
        """Upstream trains on with NaN. This runs before every optimizer step; the norm is the same in all
        processes, so all of them stop."""
        norm = super()._get_grad_norm(*args, **kwargs)
        watched = {"loss": self.loss}
        if self.accelerator.scaler is None:  # a loss scaler expects infinite gradients and skips the step
            watched["gradient's norm"] = norm
        for what, value in watched.items():
            if not math.isfinite(value):
                step = self.state.global_step + 1
                raise NotFinite(f"the {what} is {float(value)} at step {step}; {self.another_way()}")
        return norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        weights = (p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters())
        if any_process(not all(bool(p.detach().isfinite().all()) for p in weights)):
            step = self.state.global_step
            raise NotFinite(f"the weights are not finite after step {step}; {self.another_way()}")
        super().save_model(output_dir, _internal_call)

    def another_way(self) -> str:
        last = last_checkpoint(self.args.output_dir)
        start = f"start again from {last} (--start)" if last else "no checkpoint was saved yet; start again"
        return f"{start} with a lower learning rate, a longer warm-up or --max_grad_norm 0.5"

    def what_is_left(self) -> str:
        last = last_checkpoint(self.args.output_dir)
        return f"--resume goes on from {last}" if last else "no checkpoint was saved yet"

    def _determine_best_metric(self, metrics: dict[str, float], *args: Any, **kwargs: Any) -> bool:
        """Upstream keeps the first of equal scores, not the one with the lowest loss; it saves the best only
        if save_steps happens to fall on it, and cannot load it otherwise."""
        score = metrics.get(f"eval_{self.args.metric_for_best_model}")
        if self.state.best_global_step is not None and score == self.state.best_metric:
            rows = {row["step"]: row for row in self.state.log_history if "eval_loss" in row}
            if metrics["eval_loss"] < rows[self.state.best_global_step]["eval_loss"]:
                self.state.best_metric = None  # then upstream takes this one
        better = super()._determine_best_metric(metrics, *args, **kwargs)
        if better and self.args.load_best_model_at_end:
            self.control.should_save = True
        return better

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Upstream deletes old checkpoints before the new one is known to be whole; it may be partial."""
        folder = checkpoint_of(self.args.output_dir, self.state.global_step)
        try:
            if self.args.should_save:
                unseal(folder)
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                seal(folder, files(folder))
        except Stopped:
            raise
        except (*UNWRITABLE, RuntimeError) as error:
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            why = f"is the disk full? {error}" if isinstance(error, RuntimeError) else error
            said = f"checkpoint {folder} could not be written ({why}); {self.what_is_left()}"
            raise Stopped(said) from error
        if self.args.should_save and self.keep is not None:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(self.args.output_dir, save_total_limit=self.keep, best_model_checkpoint=best)


class Beginning(TrainerCallback):
    """What a run needs before its first step."""

    def on_train_begin(self, args, state, control, **kwargs):
        if args.world_size > 1:  # else dropout would be the same in every process
            torch.manual_seed(args.seed + args.process_index)
        if state.best_global_step is not None:  # the folder may have been moved since
            best = checkpoint_of(args.output_dir, state.best_global_step)
            state.best_model_checkpoint = str(best)
            if not is_sealed(best):  # deleted for a better one, which will come again; or by a user
                state.best_model_checkpoint = state.best_global_step = state.best_metric = None


class ByLength(LengthGroupedSampler):
    """Groups examples of similar length, in an order that depends on the seed and the epoch only."""

    def __init__(self, batch: int, *, lengths: list[int], seed: int):
        super().__init__(batch, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()
