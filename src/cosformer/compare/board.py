"""What is running and how long it still takes, told on the terminal."""

import sys
import time

from transformers import TrainerCallback

from ..bench.measure import say
from ..train.progress import clock


class Board(TrainerCallback):
    """A line that is rewritten on a terminal, elsewhere a line for each cell; what is done stays."""

    def __init__(self) -> None:
        self.what, self.of, self.left, self.cell_seconds = "", "", 0.0, 0.0
        self.cell_begun = time.perf_counter()

    def done(self, text: str) -> None:
        say("")
        print(text, flush=True)

    def begin(self, what: str, seconds: float, left: float, of: str) -> None:
        """A cell of about `seconds` begins; `left` is what comes after it, in all or `of` a subject."""
        self.what, self.cell_seconds, self.left, self.cell_begun = what, seconds, left, time.perf_counter()
        self.of = of
        text = f"{what}: about {clock(seconds)}; {clock(left + seconds)} left{of}"
        say(text)
        if not sys.stderr.isatty():
            print(text, flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        passed = time.perf_counter() - self.cell_begun
        mine = max(self.cell_seconds, passed / max(1, state.global_step) * state.max_steps) - passed
        loss = next((f", loss {row['loss']:.3f}" for row in reversed(state.log_history) if "loss" in row), "")
        step = f"step {state.global_step} of {state.max_steps}{loss}"
        say(f"{self.what}: {step}; about {clock(self.left + max(mine, 0.0))} left{self.of}")
