"""What is seen of a run while it trains: a bar with loss, speed and time left; metrics.jsonl; its stop."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.utils import logging

from ..seal import write

MOMENT = 2.0  # seconds without a word
OWN = ("runtime", "per_second", "model_preparation_time")  # endings of what the Trainer adds to scores


def quieten() -> None:
    """Silences transformers' own messages and bars, which are about code, not about a run."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    threading.excepthook = hide_disk_errors


def hide_disk_errors(error: threading.ExceptHookArgs) -> None:
    """No traceback for a full disk: TensorBoard's thread tells the main one, which prints a line."""
    if not issubclass(error.exc_type, OSError):
        threading.__excepthook__(error)


def say(line: str, *, to: TextIO | None = None) -> None:
    """Prints what a user must know, by default to stderr, in rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=to or sys.stderr, flush=True)


@contextmanager
def said_if_long(line: str) -> Iterator[None]:
    """Say what is being done if it takes more than a moment."""
    timer = threading.Timer(MOMENT, say, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Metrics(TrainerCallback):
    """Appends what training logs to a file, one JSON object per line; a resumed run drops what it repeats.

    Every checkpoint and evaluation writes a line, so the next mean loss begins there, as it does on resuming.
    """

    def __init__(self, path: Path):
        self.path, self.seconds, self.begun, self.training = path, 0.0, 0.0, False
        self.last, self.speed = (0.0, 0), 0.0  # seconds and tokens at the last line; tokens/s since

    def on_train_begin(self, args, state, control, **kwargs):
        self.training = state.is_world_process_zero
        if not self.training:
            return
        kept = [row for row in read(self.path) if state.global_step and row["step"] <= state.global_step]
        write(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self.seconds = kept[-1]["seconds"] if kept else 0.0
        self.begun, self.last = time.perf_counter(), (self.seconds, state.num_input_tokens_seen)

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= control.should_save or control.should_evaluate

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not self.training or not logs or "train_loss" in logs:  # the final scores go to result.json
            return
        seconds, tokens = self.now(), state.num_input_tokens_seen
        row: dict[str, Any] = {"step": state.global_step, "tokens": tokens, "seconds": round(seconds, 3)}
        if "loss" in logs:
            self.speed = (tokens - self.last[1]) / max(seconds - self.last[0], 1e-9)
            row["tokens_per_second"] = round(self.speed, 1)
        self.last = (seconds, tokens)
        known = ("epoch", "num_input_tokens_seen")
        row |= {key: value for key, value in logs.items() if key not in known and not key.endswith(OWN)}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def on_save(self, args, state, control, **kwargs):
        self.last = (self.now(), self.last[1])  # the speed leaves out saving

    def on_train_end(self, args, state, control, **kwargs):
        self.training = False

    def now(self) -> float:
        """Seconds of training, including those before a resume."""
        return self.seconds + time.perf_counter() - self.begun


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, up to the first that is damaged, or half written by a killed process."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or not {"step", "seconds"} <= row.keys():
            break
        rows.append(row)
    return rows


class Bar(TrainerCallback):
    """A progress bar on a terminal, a line now and then elsewhere; both show the time left.

    A step counts as the mean since the first, which is slow, evaluations and checkpoints included. Each of
    the `final_rows` scored after training counts as in the last evaluation; before any, as a third of a
    training example.
    """

    every = 30.0  # seconds between lines
    form = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"

    def __init__(self, metrics: Metrics, *, final_rows: int, batch: int):
        self.bar: tqdm | None = None
        self.printed, self.metrics, self.final_rows, self.batch = 0.0, metrics, final_rows, batch
        self.begun = (0, time.perf_counter())  # step and time when this process began
        self.first: tuple[int, float] | None = None  # the same after its first step
        self.scored = 0.0  # seconds per evaluated example

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun = (state.global_step, time.perf_counter())
        if state.is_world_process_zero and sys.stderr.isatty():
            done = {"total": state.max_steps, "initial": state.global_step, "bar_format": self.form}
            self.bar = tqdm(unit="step", dynamic_ncols=True, **done)

    def on_step_end(self, args, state, control, **kwargs):
        self.first = self.first or (state.global_step, time.perf_counter())
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if speed := metrics.get("eval_samples_per_second"):
            self.scored = 1 / speed

    def left(self, state) -> float:
        """Seconds until everything is done."""
        now = time.perf_counter()
        step, then = self.first or self.begun
        if step == state.global_step:  # there is only the first, slow as it is
            step, then = self.begun
        each = (now - then) / max(1, state.global_step - step)
        scored = self.scored or each / self.batch / 3
        return (state.max_steps - state.global_step) * each + self.final_rows * scored

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        if "eval_loss" in logs:
            found = {key.removeprefix("eval_"): logs[key] for key in logs if key.startswith("eval_")}
            self.say(f"step {state.global_step:,}, validation: {show(found)}")
        elif "loss" in logs:
            speed, left = self.metrics.speed, clock(self.left(state))
            line = f"loss {logs['loss']:.4f}, {speed:,.0f} tokens/s, {left} left"
            if self.bar is not None:
                self.bar.set_postfix_str(line)
            elif time.perf_counter() - self.printed > self.every:
                self.printed = time.perf_counter()
                self.say(f"step {state.global_step:,} of {state.max_steps:,}: {line}")

    def say(self, line: str) -> None:
        if self.bar is None:
            print(line, flush=True)
        else:
            self.bar.write(line)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
        if state.is_world_process_zero and self.final_rows and state.global_step >= state.max_steps:
            print(f"scoring {self.final_rows:,} examples of validation and test", flush=True)


def show(scores: dict[str, float]) -> str:
    """Scores in one line, without counts and times."""
    shown = {key: value for key, value in scores.items() if key != "tokens" and not key.endswith(OWN)}
    return ", ".join(f"{key} {value:.4g}" for key, value in shown.items())


def clock(seconds: float) -> str:
    """3725 -> 1:02:05"""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Interrupt(TrainerCallback):
    """A signal: finish the step, save, stop. A second Ctrl-C stops at once."""

    def __init__(self):
        self.asked: str | None = None
        self.trained = False

    def ask(self, number, frame):
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # it forwards what every process already got
        if self.trained or (self.asked is not None and number == signal.SIGINT and not under_torchrun):
            raise KeyboardInterrupt
        if self.asked is None:
            say("\nstopping after this step, with a checkpoint; once more to stop at once")
        self.asked = signal.Signals(number).name

    def on_step_end(self, args, state, control, **kwargs):
        if any_process(self.asked is not None):
            self.asked = self.asked or "a signal to another process"
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        self.trained = True  # nothing can be lost any more


def any_process(flag: bool) -> bool:
    """Whether `flag` is set in any process of the run: all must stop after the same step."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return flag
    highest = torch.tensor([flag], dtype=torch.int32)
    if torch.distributed.get_backend() == "nccl":
        highest = highest.cuda()
    torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
    return bool(highest.item())
