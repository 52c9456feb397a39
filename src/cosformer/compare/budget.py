"""How many steps fit the time there is: steps are timed first, and a plan that proves too long is cut while it runs."""

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .. import tasks, train
from ..train import models
from .board import Board
from .plan import EVALUATIONS, Subject, mixers_of

SHARE_OF_COST = 0.15  # of the minutes there are
STARTING = 1.17  # times what training and evaluating take: starting and saving a run is on top
LATE = 1.25  # times the expected seconds
STEPS = (
    10,
    20,
    30,
    50,
    75,
    100,
    150,
    200,
    300,
    400,
    600,
    800,
    1000,
    1500,
    2000,
    3000,
    4000,
    6000,
    8000,
    10_000,
)


def seconds_a_step(subject: Subject, task: tasks.Task, mixer: str) -> float:
    """How long one optimiser step takes here: the faster of two, after one that warms up."""
    model = models.build(task, mixer=mixer, size=subject.size, fields=subject.model_fields).train()
    optimiser = torch.optim.AdamW(model.parameters())
    size = subject.training["per_device_train_batch_size"]
    rows = [task.train[i] for i in range(min(8 * size, len(task.train)))]
    if subject.training.get("train_sampling_strategy") == "group_by_length":
        rows = sorted(rows, key=lambda row: len(row["input_ids"]))[
            len(rows) // 2 :
        ]  # above the median: about the mean cost
    batches = itertools.cycle(
        task.collate(rows[i : i + size]) for i in range(0, max(1, len(rows) - size + 1), size)
    )
    took = []
    for _ in range(3):
        batch = next(batches)
        start = time.perf_counter()
        model(**batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        took.append(time.perf_counter() - start)
    return min(took[1:])


def steps_that_fit(subject: Subject, seconds: dict[str, float], budget: float) -> int:
    """The largest round number of steps for which all mixers' runs, with their evaluation, take at most `budget` seconds.

    Round numbers, so that two runs on one machine agree on them although no measurement repeats exactly.
    """
    steps = [
        n
        for n in STEPS
        if n <= subject.most_steps
        and sum(cell_seconds(subject, each, n) for each in seconds.values()) <= budget
    ]
    return max(steps, default=STEPS[0])


def cell_seconds(subject: Subject, step: float, steps: int) -> float:
    """What a cell takes: training, and its evaluations, of which a forward is about a third of a step."""
    scored = (EVALUATIONS + 1) * subject.eval_examples + 2 * subject.test_examples
    return step * (steps + scored / subject.training["per_device_train_batch_size"] / 3)


def plan_of(
    subjects: list[Subject],
    mixers: list[str],
    *,
    out: Path,
    minutes: float,
    seeds: int,
    steps: int | None,
    board: Board,
) -> dict[str, Any]:
    """For each subject its number of steps, as given or what fits the time, and the seconds a step of each mixer takes.

    What an earlier start has chosen stays, so a comparison can be resumed, and mixers and subjects can be added to it.
    """
    path = out / "plan.json"
    plan: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    share = 60 * minutes * (1 - SHARE_OF_COST) / sum(s.weight for s in subjects)
    for subject in subjects:
        asked = json.loads(json.dumps(dataclasses.asdict(subject)))
        mine = plan.setdefault(subject.name, {"subject": asked, "seconds": {}, "steps": None})
        if mine["subject"] != asked or (steps and mine["steps"] not in (None, steps)):
            raise train.SettingsError(
                f"{out} holds another comparison of {subject.name}; choose another --out"
            )
        if unknown := [mixer for mixer in mixers_of(subject, mixers) if mixer not in mine["seconds"]]:
            board.say(f"preparing {subject.data} for {subject.name}")
            task = subject.build()
            for mixer in unknown:
                board.say(f"measuring a step of {subject.name}, {mixer}")
                try:
                    mine["seconds"][mixer] = seconds_a_step(subject, task, mixer)
                except ValueError:
                    mine["seconds"][mixer] = 0.0  # refused: the cell will say why
        if mine["steps"] is not None and mine["minutes"] != minutes:
            board.done(
                f"{subject.name}: {mine['steps']} steps, as chosen for {mine['minutes']:g} minutes; another --out begins anew"
            )
        if mine["steps"] is None:
            mine["minutes"] = minutes
            mine["steps"] = steps or steps_that_fit(subject, mine["seconds"], share * subject.weight / seeds)
        save(plan, out)
    return plan


def save(plan: dict[str, Any], out: Path) -> None:
    draft = out / "plan.draft"
    draft.write_text(json.dumps(plan, indent=1) + "\n")
    draft.rename(out / "plan.json")


def seconds_of(plan: dict[str, Any], subject: Subject, mixer: str) -> float:
    """What a planned cell is expected to take."""
    return STARTING * cell_seconds(subject, plan[subject.name]["seconds"][mixer], plan[subject.name]["steps"])


class Pace:
    """How the time there is for training is being spent."""

    def __init__(self, seconds: float):
        self.end = time.perf_counter() + seconds
        self.expected, self.spent = 0.0, 0.0

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()

    @property
    def slower(self) -> float:
        """Than expected, by the cells done."""
        return max(1.0, self.spent / self.expected) if self.expected else 1.0

    @contextmanager
    def over(self, expected: float) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.spent += time.perf_counter() - begun
        self.expected += expected


def keep_to(
    pace: Pace,
    plan: dict[str, Any],
    subject: Subject,
    ahead: list[Subject],
    *,
    seeds: int,
    out: Path,
    board: Board,
) -> None:
    """Fewer steps for a subject that has not begun, if by now the machine is slower than it was when the plan was made.

    Only a clear delay counts: on a machine that is left alone, two runs must train the same number of steps. And at most
    three quarters are given up, whatever time it takes: a handful of steps would tell nothing.
    """
    mine, slower = plan[subject.name], pace.slower
    if slower < LATE:
        return
    share = subject.weight / sum({s.name: s.weight for s in ahead}.values())
    steps = steps_that_fit(
        subject, {mixer: each * slower for mixer, each in mine["seconds"].items()}, pace.left * share / seeds
    )
    steps = max(steps, mine["steps"] // 4)
    if steps < mine["steps"]:
        board.done(
            f"{subject.name}: {steps} steps instead of {mine['steps']}; the machine is {slower:.1f}x slower than planned"
        )
        mine["steps"] = steps
        save(plan, out)
