"""transformers' Trainer, with checkpoints that are whole or not there; it stops where a run would be spoilt.

A checkpoint counts once it is sealed, which is done last; older ones are deleted after that. So a process
that is killed at any moment leaves one to resume from, if it ever had one. Overrides of private methods say
what upstream lacks.
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
from .progress import anybody

UNWRITABLE = (OSError, SafetensorError)  # what a full disk raises; torch.save's RuntimeError is met apart


class Stopped(RuntimeError):
    """Training cannot go on, or was asked to stop; the message says what happened and what is left."""


class Interrupted(Stopped):
    """It was asked to stop; resuming goes on as if it had not been."""


class NotFinite(Stopped):
    """Loss, gradient or weights became infinite or NaN; the same run would do so again."""


class Trainer(Parallel):
    """`keep` checkpoints stay; the best and the last always do."""

    def __init__(self, *args: Any, keep: int | None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.remove_callback(PrinterCallback)
        self.add_callback(Beginning)
        self.keep, self.loss = keep, 0.0
        self.by_length: ByLength | None = None

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # counting all parameters at every step takes longer than it is worth

    def get_eval_dataloader(self, *args: Any, **kwargs: Any):
        """dataloader_drop_last is about training; upstream leaves out examples of the evaluation, too."""
        drop, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.args.dataloader_drop_last = drop

    def evaluation_loop(self, *args: Any, **kwargs: Any):
        """Seq2SeqTrainer counts again what fills up the last batch of several processes."""
        self.gather_function = self.gather_scores
        return super().evaluation_loop(*args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any):
        """Batches of like length: upstream's order depends on the process and is lost on resuming."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        batch = self.get_total_train_batch_size(self.args)
        self.by_length = ByLength(batch, lengths=sampler.lengths, seed=self.args.data_seed)
        return self.by_length

    def _run_epoch(self, model: Any, epoch: int, *args: Any, **kwargs: Any) -> None:
        """Upstream takes a step too many where it resumes from the last one, and accelerate does not pass the
        epoch on to the sampler of a resumed, distributed run."""
        if self.by_length is not None:
            self.by_length.set_epoch(epoch)
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(model, epoch, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any):
        self.loss = super().training_step(*args, **kwargs)
        return self.loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any):
        """Upstream trains on with NaN. This comes before every step of the optimizer; the norm is the same in
        all processes, so all of them stop."""
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
        if anybody(not all(bool(p.detach().isfinite().all()) for p in weights)):
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
        """Upstream keeps the first of equals, not the one with the lowest loss, and saves the best only where
        save_steps happens to say so, and then cannot load it."""
        score = metrics.get(f"eval_{self.args.metric_for_best_model}")
        if self.state.best_global_step is not None and score == self.state.best_metric:
            rows = {row["step"]: row for row in self.state.log_history if "eval_loss" in row}
            if metrics["eval_loss"] < rows[self.state.best_global_step]["eval_loss"]:
                self.state.best_metric = None  # upstream takes what comes then
        better = super()._determine_best_metric(metrics, *args, **kwargs)
        if better and self.args.load_best_model_at_end:
            self.control.should_save = True
        return better

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Upstream deletes old checkpoints before the new one is known to be whole, and may leave a part."""
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
        if args.world_size > 1:  # or dropout would hide the same places in every process
            torch.manual_seed(args.seed + args.process_index)
        if state.best_global_step is not None:  # the folder may have been moved since
            best = checkpoint_of(args.output_dir, state.best_global_step)
            state.best_model_checkpoint = str(best)
            if not is_sealed(best):  # deleted for a better one, which comes again; or by a user
                state.best_model_checkpoint = state.best_global_step = state.best_metric = None


class ByLength(LengthGroupedSampler):
    """Examples of like length together, in an order of the seed and the epoch alone."""

    def __init__(self, batch: int, *, lengths: list[int], seed: int):
        super().__init__(batch, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()
