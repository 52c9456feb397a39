"""cosformer compare: is linear attention as good as softmax here, and what does it save? Trains, measures, writes a report.

    OUT/plan.json        what is run, and how many steps fit the time      OUT/report.html    the answer
    OUT/results.jsonl    a line for each finished cell                     OUT/cells/         the trained models

Interrupted at any moment, the same command goes on where it stopped: finished cells are not run again.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import platform
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers import __version__ as transformers_version

from .. import models, report, tasks, train
from ..bench import exactness
from ..bench.measure import machine
from ..train.progress import clock
from . import cost, pictures
from .plan import MIXERS, STUDY, Subject, demo, full, seconds_a_step, steps_that_fit
from .quality import cell, folder_of

SHARE_OF_COST = 0.15  # of the minutes there are
MOST_SECONDS = 60.0  # of timing; more would not tell more


class Board(TrainerCallback):
    """What is running and how long it still takes: a line that is rewritten on a terminal, a line for each cell elsewhere."""

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
        self.say(f"{self.what}: step {state.global_step} of {state.max_steps}{loss}; about {clock(self.left + max(mine, 0))} left")


@dataclasses.dataclass
class Results:
    """results.jsonl: rows are appended when finished and never rewritten; a torn last line is cut off."""

    path: Path

    def __post_init__(self):
        self.rows: list[dict[str, Any]] = []
        text = self.path.read_text() if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            print(f"{self.path}: the last line is not whole and is dropped", file=sys.stderr)
            os.truncate(self.path, len(whole.encode()))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self.rows.append(json.loads(line))
            except json.JSONDecodeError:
                print(f"{self.path}:{number}: not a line of results; skipped", file=sys.stderr)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def has(self, **fields: Any) -> bool:
        return any(all(row.get(key) == value for key, value in fields.items()) for row in self.rows)


def compare(
    subjects: list[Subject],
    mixers: list[str],
    *,
    out: Path,
    minutes: float,
    seeds: int = 1,
    steps: int | None = None,
    lengths: list[int],
    command: str = "",
) -> list[dict[str, Any]]:
    """Run what is not done yet and return all rows of results."""
    out.mkdir(parents=True, exist_ok=True)
    results, begun = Results(out / "results.jsonl"), time.perf_counter()
    board = Board()
    plan = plan_of(subjects, mixers, out=out, minutes=minutes, seeds=seeds, steps=steps, board=board)
    cells = [(s, mixer, seed) for s in subjects for seed in range(seeds) for mixer in mixers_of(s, mixers)]
    open_ = [c for c in cells if not results.has(kind="quality", subject=c[0].name, mixer=c[1], seed=c[2])]
    if len(open_) < len(cells):
        board.done(f"{len(cells) - len(open_)} of {len(cells)} cells are done already")
    expected = [plan[s.name]["seconds"][mixer] * plan[s.name]["steps"] * 1.3 for s, mixer, _ in open_]
    rest = 60 * minutes * SHARE_OF_COST
    for number, (subject, mixer, seed) in enumerate(open_):
        what = f"[{number + 1}/{len(open_)}] {subject.name}, {mixer}" + (f", seed {seed}" if seeds > 1 else "")
        board.begin(what, expected[number], sum(expected[number + 1 :]) + rest)
        row = cell(subject, mixer, seed, steps=plan[subject.name]["steps"], out=out, watch=board)
        results.add(row)
        board.done(f"{what}: {said(row)}")
    measure(results, mixers, subjects, out=out, lengths=lengths, seconds=rest, board=board)
    row = {"kind": "run", "command": command, "started": stamp(begun), "minutes": round((time.perf_counter() - begun) / 60, 1)}
    row |= {key: value for key, value in machine().items() if key != "date"} | {"transformers": transformers_version}
    results.add(row | {"memory_gib": memory_gib(), "system": platform.system(), "seeds": list(range(seeds))})
    return results.rows


def mixers_of(subject: Subject, mixers: list[str]) -> list[str]:
    """The mixers compared on a subject; the paper's studies come with the default ones."""
    return list(dict.fromkeys([*mixers, *(STUDY if subject.study and set(MIXERS) <= set(mixers) else ())]))


def plan_of(
    subjects: list[Subject], mixers: list[str], *, out: Path, minutes: float, seeds: int, steps: int | None, board: Board
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
            raise train.SettingsError(f"{out} holds another comparison of {subject.name}; choose another --out")
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
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(plan, indent=1) + "\n")
    draft.rename(path)
    return plan


def measure(
    results: Results, mixers: list[str], subjects: list[Subject], *, out: Path, lengths: list[int], seconds: float, board: Board
) -> None:
    """What is not training: exactness, cost, pictures; each where it is missing."""
    if sum(row["kind"] == "exactness" for row in results.rows) < (complete := len(found := list(exactness.rows()))):
        board.say(f"exactness: {complete} comparisons with the definition")
        for row in found:
            results.add(row)
    for work, cases in (("training", cost.training), ("decoding", cost.decoding)):
        able = [mixer for mixer in mixers if cost.able(mixer, work)]
        missing = [n for n in lengths if not all(results.has(kind="cost", work=work, mixer=m, length=n) for m in able)]
        if missing and able:  # all mixers at a length again: a time means something beside the others
            for row in cases(able, missing, seconds=min(seconds / 3, MOST_SECONDS), progress=board.say):
                results.add(row)
    for subject in subjects:
        if subject.task not in ("lm", "mlm"):
            continue
        task = subject.build()
        for mixer in mixers_of(subject, mixers):
            folder = folder_of(subject, mixer, 0, out=out)
            if (folder / "result.json").exists() and not results.has(kind="picture", subject=subject.name, mixer=mixer):
                board.say(f"picture: {mixer}")
                for row in pictures.rows(subject.name, task, mixer, str(folder)):
                    results.add(row)
    board.say("")


def said(row: dict[str, Any]) -> str:
    """A finished cell in one line."""
    if row["status"] != "done":
        return f"{row['status']}: {row['reason']}"
    return f"{row['metric']} {row['value']:.4g}, {row['tokens_per_second']:,.0f} tokens/s, {clock(row['seconds'])}"


def stamp(begun: float) -> str:
    return datetime.fromtimestamp(time.time() - (time.perf_counter() - begun), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="cosformer compare", description=(__doc__ or "").split("\n")[0])
    p.add_argument("--tasks", nargs="+", metavar="NAME", help="some of lm, listops, recall; with --full, of the real sets")
    p.add_argument("--mixers", nargs="+", default=list(MIXERS), metavar="NAME", help=f"any of {', '.join(models.names())}, X+rope")
    p.add_argument("--data", help="your own text for lm; with --full, the folder that holds the sets")
    p.add_argument("--length", type=int, help="tokens a sequence of lm has")
    p.add_argument("--minutes", type=float, help="the time there is; runs are sized to it (default: 7, or 10 a cell with --full)")
    p.add_argument("--steps", type=int, help="train this many steps instead, whatever time it takes")
    p.add_argument("--seeds", type=int, default=1, help="repeat training with this many seeds and show the spread")
    p.add_argument("--full", action="store_true", help="the real sets: wikitext-2, SST-2, IMDB, CIFAR-10, ListOps as published")
    p.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="where cost is measured")
    p.add_argument("--out", type=Path, help="the folder of this comparison (default: runs/compare, or runs/compare-full)")
    return p


def main(argv: list[str]) -> None:
    p = parser()
    given = p.parse_args(argv)
    given.out = given.out or Path("runs/compare-full" if given.full else "runs/compare")
    train.quieten()
    try:
        subjects = chosen(given)
        for mixer in given.mixers:
            models.mixer_fields(mixer)
        minutes = given.minutes or (10.0 * len(subjects) * len(given.mixers) if given.full else 7.0)
        rows = compare(
            subjects,
            given.mixers,
            out=given.out,
            minutes=minutes,
            seeds=given.seeds,
            steps=given.steps,
            lengths=given.lengths,
            command=shlex.join(["cosformer", "compare", *argv]),
        )
    except train.Stopped as stopped:
        print(f"\ncosformer compare: {str(stopped).split(';')[0]}; the same command goes on from here", file=sys.stderr)
        raise SystemExit(130 if isinstance(stopped, train.Interrupted) else 1) from None
    except KeyboardInterrupt:
        print("\ncosformer compare: interrupted; the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, OSError, tasks.DataError) as error:
        raise SystemExit(f"cosformer compare: {error}") from None
    page = given.out / "report.html"
    report.write_page(rows, page, plots=given.out / "plots")
    print(report.terminal_summary(rows))
    print(f"\nThe report: {page}")


def chosen(given: argparse.Namespace) -> list[Subject]:
    """The subjects asked for."""
    for name, least in (("seeds", 1), ("steps", 1)):
        if (value := getattr(given, name)) is not None and value < least:
            raise train.SettingsError(f"--{name} is {value}; it must be at least {least}")
    if given.minutes is not None and not 0 < given.minutes < math.inf:
        raise train.SettingsError(f"--minutes is {given.minutes:g}; it must be more than 0")
    for name, values in (("length", [given.length]), ("lengths", given.lengths)):
        if bad := [n for n in values if n is not None and n < 16]:
            raise train.SettingsError(f"--{name} is {bad[0]}; it must be at least 16")
    if given.full and given.length:
        raise train.SettingsError("--length goes with lm of the default comparison; the sets of --full have their own")
    if importlib.util.find_spec("matplotlib") is None:
        raise train.SettingsError("the report needs matplotlib: pip install 'cosformer[report]'")
    if given.full and not given.data:
        raise train.SettingsError("--full needs --data: the folder that holds wikitext-2, imdb, sst2 and cifar10-gray")
    found = full(given.data) if given.full else demo(given.data, given.length)
    if given.tasks:
        known = [s.name for s in found]
        if unknown := [name for name in given.tasks if name not in known]:
            raise train.SettingsError(f"--tasks {unknown[0]}: one of {', '.join(known)}")
        needed = {s.after for s in found if s.name in given.tasks}
        found = [s for s in found if s.name in given.tasks or s.name in needed]
    return found
