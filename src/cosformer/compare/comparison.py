"""A comparison: what mixers cost, then every cell of every subject, each where its row is missing."""

import itertools
import json
import math
import sys
import time
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers import __version__ as transformers_version

from .. import train
from ..bench import exactness, measure
from ..bench import models as bench
from ..results import Cost, Exactness, Picture, Positions, Quality, Row, Run, Search, Writer, of
from ..seal import write
from ..train import models
from ..train.progress import clock
from . import budget, looks
from .plan import Subject
from .quality import TrainingCell, search_rate, task_of, trained

SIZE = "tiny"  # of the models whose cost is measured
MOST_SECONDS = 60.0  # of timing; more would tell no more


class Comparison:
    """One folder of results; `minutes` (None: as long as it takes) count from `begun`."""

    def __init__(self, out: Path, *, minutes: float | None, begun: float | None = None):
        self.out, self.minutes = out, minutes
        self.begun = time.perf_counter() if begun is None else begun
        self.board = Board()
        self.results = Writer(out / "results.jsonl")
        self.results.add_once(measure.machine(transformers=transformers_version))
        self.end_of_training = self.begun + 60 * (minutes or math.inf) - budget.CLOSING
        self.expected = self.spent = 0.0  # seconds of the cells done, estimated and actual

    @property
    def left(self) -> float:
        return self.end_of_training - time.perf_counter()

    def measure(self, mixers: list[str], lengths: list[int]) -> None:
        """What needs no training: exactness and cost, each where its rows are missing."""
        if not of(self.results.rows, Exactness):
            measure.say("exactness: comparisons with the definition")
            for compared in list(exactness.rows()):
                self.results.add(compared)
        share = 60 * (self.minutes or math.inf) * budget.SHARE_OF_COST
        seconds = min(share / 3, MOST_SECONDS) / len(lengths)
        options: dict[str, Any] = {"size": models.SIZES[SIZE], "seconds": seconds, "say": measure.say}
        known = {(row.work, row.mixer, row.length) for row in of(self.results.rows, Cost)}
        works: dict[str, Any] = {"training": bench.training, "decoding": bench.decoding}
        able = {work: [mixer for mixer in mixers if bench.able(mixer, work)] for work in works}
        end, new = time.perf_counter() + 2 * share, []
        for length, work in itertools.product(sorted(lengths), works):
            # If one is missing, all mixers at a length again: times are comparable only if taken together.
            if all((work, mixer, length) in known for mixer in able[work]):
                continue
            if time.perf_counter() > end:
                self.board.done(f"cost: the time for it is up; {work} at {length:,} is left out")
                continue
            for row in works[work](able[work], length, **options):
                self.results.add(row)
                new.append(row)
        if new:
            self.board.done(f"cost: {len(new)} times measured; {measure.disturbance(new)}")

    def train(
        self, subjects: list[Subject], mixers: list[str], *, seeds: list[int] | None, steps: int | None
    ) -> None:
        """Train every cell that is not done yet; steps and seeds as given, else the subjects' own."""
        for number, subject in enumerate(subjects):
            done = {(row.subject, row.mixer, row.seed) for row in of(self.results.rows, Quality)}
            own = [(mixer, seed) for seed in seeds or subject.seeds for mixer in subject.mixers(mixers)]
            todo = [TrainingCell(subject, mixer, seed, self.out) for mixer, seed in own]
            todo = [cell for cell in todo if (subject.name, cell.mixer, cell.seed) not in done]
            if len(todo) < len(own):
                already = f"{len(own) - len(todo)} of {len(own)} cells are done already"
                self.board.done(f"{subject.name}: {already}")
            if todo:
                weight = subject.weight / sum(s.weight for s in subjects[number:])
                self.train_subject(subject, todo, weight=weight, steps=steps)
            self.look_at(subject)

    def train_subject(
        self, subject: Subject, todo: list[TrainingCell], *, weight: float, steps: int | None
    ) -> None:
        """Train the subject's cells; without given steps they get the share `weight` of the time left."""
        seconds: dict[str, float] = {}
        slower = max(1.0, self.spent / self.expected) if self.expected else 1.0
        for cell in todo:
            if cell.mixer not in seconds:
                measure.say(f"{subject.name}: preparing {subject.data}, timing a step of {cell.mixer}")
                seconds[cell.mixer] = budget.seconds_a_step(cell) * slower
        each = [seconds[cell.mixer] for cell in todo]
        steps = self.steps_of(subject, steps, each, self.left * weight)
        expected = [budget.cell_seconds(subject, step, steps) for step in each]
        self.board.done(f"{subject.name}: {len(todo)} cells of {steps:,} steps, about {clock(sum(expected))}")
        for number, cell in enumerate(todo):
            what = f"[{number + 1}/{len(todo)}] {cell}"
            after = max(0.0, self.left - expected[number]) if self.minutes else sum(expected[number + 1 :])
            self.board.begin(what, expected[number], after, of="" if self.minutes else f" of {subject.name}")
            begun = time.perf_counter()
            row = trained(cell, steps, self.rate_of(cell, steps), self.board)
            self.spent += time.perf_counter() - begun
            self.expected += expected[number]
            self.results.add(row)
            self.board.done(f"{what}: {summary(row)}")
            self.look_at(subject)

    def rate_of(self, cell: TrainingCell, steps: int) -> float:
        """The subject's learning rate; of several, the best for this mixer by short runs, kept as rows."""
        rates = cell.subject.rates
        if len(rates) == 1 or cell.problem(cell.run(steps, rates[0])):
            return rates[0]
        subject = cell.subject.search_on or cell.subject
        if subject.steps and cell.subject.steps:
            steps = round(steps * subject.steps / cell.subject.steps)
        cell, short = replace(cell, subject=subject), max(1, round(subject.search_share * steps))
        rows, wanted = of(self.results.rows, Search), (cell.subject.name, cell.mixer, short)
        tried = {row.rate: row for row in rows if (row.subject, row.mixer, row.steps) == wanted}
        missing = [rate for rate in rates if rate not in tried]
        for rate in missing:
            tried[rate] = search_rate(cell, short, rate, self.board)
            self.results.add(tried[rate])
        losses = [math.inf if (loss := tried[rate].loss) is None else loss for rate in rates]
        best = rates[losses.index(min(losses))]
        if missing:
            shown = ", ".join(f"{loss:.4f} with {rate:g}" for rate, loss in zip(rates, losses))
            self.board.done(f"{cell}: rate {best:g}; loss after {short} steps {shown}")
        return best

    def steps_of(
        self, subject: Subject, steps: int | None, seconds: list[float], seconds_available: float
    ) -> int:
        """As given, else the subject's, else what fits the time. What an earlier start chose stays."""
        path = self.out / "plan.json"
        plan: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        asked, known = json.loads(json.dumps(asdict(subject))), plan.get(subject.name)
        if known is None:
            chosen = steps or subject.steps or budget.steps_that_fit(subject, seconds, seconds_available)
            plan[subject.name] = {"subject": asked, "steps": chosen, "minutes": self.minutes}
            write(path, json.dumps(plan, indent=1) + "\n")
            return chosen
        if known["subject"] != asked or (steps and known["steps"] != steps):
            problem = f"{self.out} holds another comparison of {subject.name}"
            raise train.SettingsError(f"{problem}; choose another --out")
        if known["minutes"] != self.minutes:
            made = f"{known['steps']} steps, as chosen for {known['minutes']:g} minutes"
            self.board.done(f"{subject.name}: {made}; another --out begins anew")
        return known["steps"]

    def look_at(self, subject: Subject) -> None:
        """Add what trained language models do with their context, where those rows are missing.

        Models may be missing, too: rows may come from another machine.
        """
        rows = of(self.results.rows, Quality)
        for row in [row for row in rows if row.subject == subject.name and row.status == "done"]:
            cell = TrainingCell(subject, row.mixer, row.seed, self.out)
            if not (cell.folder(subject.name) / "config.json").exists():
                continue
            same = {"subject": subject.name, "mixer": row.mixer}
            if subject.task in ("lm", "mlm") and row.seed == 0 and not self.results.has(Picture, **same):
                measure.say(f"{cell}: picture")
                self.results.add(looks.picture(cell, task_of(cell.run(row.steps, row.rate))))
            if subject.by_position and not self.results.has(Positions, **same, seed=row.seed):
                measure.say(f"{cell}: loss by position")
                self.results.add(looks.positions(cell, task_of(cell.run(row.steps, row.rate))))

    def end(self, command: str) -> list[Row]:
        """All rows, after adding one about this command."""
        took = time.perf_counter() - self.begun
        started = datetime.fromtimestamp(time.time() - took, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.results.add(Run(command=command, started=started, minutes=round(took / 60, 1)))
        return self.results.rows


def summary(row: Quality) -> str:
    """A finished cell in one line."""
    if row.value is None or row.tokens_per_second is None or row.seconds is None:
        return f"{row.status}: {row.reason}"
    speed = f"{row.tokens_per_second:,.0f} tokens/s" + (" (contended)" if row.contended else "")
    learned = ", no better than the most frequent answer" if row.learned is False else ""
    return f"{row.metric} {row.value:.4g}{learned}, {speed}, {clock(row.seconds)}"


class Board(TrainerCallback):
    """On a terminal one line that is rewritten, elsewhere a line per cell; lines of finished work stay."""

    def __init__(self) -> None:
        self.what, self.of, self.left, self.cell_seconds = "", "", 0.0, 0.0
        self.cell_begun = time.perf_counter()

    def done(self, text: str) -> None:
        measure.say("")
        print(text, flush=True)

    def begin(self, what: str, seconds: float, left: float, of: str) -> None:
        """A cell of about `seconds` begins; `left` seconds come after it, in all or `of` a subject."""
        self.what, self.cell_seconds, self.left, self.cell_begun = what, seconds, left, time.perf_counter()
        self.of = of
        text = f"{what}: about {clock(seconds)}; {clock(left + seconds)} left{of}"
        measure.say(text)
        if not sys.stderr.isatty():
            print(text, flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        passed = time.perf_counter() - self.cell_begun
        mine = max(self.cell_seconds, passed / max(1, state.global_step) * state.max_steps) - passed
        loss = next((f", loss {row['loss']:.3f}" for row in reversed(state.log_history) if "loss" in row), "")
        step = f"step {state.global_step} of {state.max_steps}{loss}"
        measure.say(f"{self.what}: {step}; about {clock(self.left + max(mine, 0.0))} left{self.of}")
