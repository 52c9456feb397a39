"""What is running and how long it still takes, told on the terminal."""

import os
import sys
import time

from transformers import TrainerCallback

from ..train.progress import clock


class Board(TrainerCallback):
    """A line that is rewritten on a terminal, a line for each cell elsewhere."""

    def __init__(self) -> None:
        self.left, self.what, self.cell_seconds, self.cell_begun = 0.0, "", 0.0, time.perf_counter()

    def say(self, text: str) -> None:
        if sys.stderr.isatty():
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            print(f"\r\033[K{text[: width - 1]}", end="", file=sys.stderr, flush=True)

    def done(self, text: str) -> None:
        self.say("")
        print(text, flush=True)

    def begin(self, what: str, seconds: float, left: float) -> None:
        """A cell of about `seconds` begins; `left` is for all that comes after it."""
        self.what, self.cell_seconds, self.left, self.cell_begun = what, seconds, left, time.perf_counter()
        self.say(f"{what}; about {clock(self.left + seconds)} left")

    def on_step_end(self, args, state, control, **kwargs):
        passed = time.perf_counter() - self.cell_begun
        mine = max(self.cell_seconds, passed / max(1, state.global_step) * state.max_steps) - passed
        loss = next((f", loss {row['loss']:.3f}" for row in reversed(state.log_history) if "loss" in row), "")
        self.say(
            f"{self.what}: step {state.global_step} of {state.max_steps}{loss}; about {clock(self.left + max(mine, 0))} left"
        )
