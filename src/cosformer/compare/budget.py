"""Steps that fit the time: counted when a subject's turn comes, which gets its share of what is left."""

import itertools
import time

import torch

from ..train import models
from .plan import EVALUATIONS, Subject
from .quality import TrainingCell, task_of

SHARE_OF_COST = 0.15  # of the minutes given
CLOSING = 6.0  # seconds, for the report
STARTING = 2.0  # seconds, to build, save and load the models of a cell
STEPS = [10, 20, 30, 50, 75, *(n * 10**k for k in (1, 2) for n in (10, 15, 20, 30, 40, 60, 80)), 10_000]


def seconds_a_step(cell: TrainingCell) -> float:
    """Seconds of an optimiser step: the faster of two after a warm-up; 0 if the cell cannot be trained."""
    run, subject = cell.run(1, 1e-3), cell.subject
    if cell.problem(run):
        return 0.0
    task = task_of(run)
    model = models.build(task, mixer=cell.mixer, size=subject.size, fields=subject.fields).train()
    optimiser = torch.optim.AdamW(model.parameters())
    rows = [task.train[i] for i in range(min(8 * subject.batch, len(task.train)))]
    if subject.training.get("train_sampling_strategy") == "group_by_length":
        rows = sorted(rows, key=lambda row: len(row["input_ids"]))[len(rows) // 2 :]  # about the mean cost
    starts = range(0, max(1, len(rows) - subject.batch + 1), subject.batch)
    part, took = subject.batch // subject.parts, []
    for start in itertools.islice(itertools.cycle(starts), 3):
        parts = [rows[at : at + part] for at in range(start, start + subject.batch, part)]
        batches = [task.collate(some) for some in parts if some]
        begun = time.perf_counter()
        for batch in batches:
            model(**batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        took.append(time.perf_counter() - begun)
    return min(took[1:])


def cell_seconds(subject: Subject, step: float, steps: int) -> float:
    """Seconds of a cell: training, search, and evaluation, whose forward is about a third of a step."""
    if not step:
        return 0.0
    scored = (EVALUATIONS + 1) * subject.eval_examples + 2 * subject.test_examples
    several = len(subject.rates) > 1 and subject.search_on is None
    search = len(subject.rates) * subject.search_share * steps if several else 0
    before = (subject.pretrain or {}).get("max_steps", 0)
    return STARTING + step * (steps + search + before + scored / subject.batch / 3)


def steps_that_fit(subject: Subject, seconds: list[float], budget: float) -> int:
    """The largest round number of steps with which cells of these `seconds` per step fit into `budget`.

    Round, so that two runs on one machine mostly agree, though no measurement repeats exactly.
    """
    fit = [n for n in STEPS if sum(cell_seconds(subject, each, n) for each in seconds) <= budget]
    return min(max(fit, default=STEPS[0]), subject.most_steps)
