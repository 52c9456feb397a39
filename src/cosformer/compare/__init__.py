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

from transformers import __version__ as transformers_version

from .. import report, tasks, train
from ..bench import exactness
from ..bench.measure import machine
from ..train import models
from ..train.progress import clock
from . import cost, pictures
from .board import Board
from .budget import SHARE_OF_COST, Pace, keep_to, plan_of, seconds_of
from .plan import MIXERS, Subject, demo, full, mixers_of
from .quality import cell, folder_of

MOST_SECONDS = 60.0  # of timing; more would not tell more


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
    rest, pace = 60 * minutes * SHARE_OF_COST, Pace(60 * minutes * (1 - SHARE_OF_COST))
    for number, (subject, mixer, seed) in enumerate(open_):
        if steps is None and not is_begun(subject, mixers, seeds, results, out=out):
            keep_to(pace, plan, subject, [s for s, _, _ in open_[number:]], seeds=seeds, out=out, board=board)
        expected = [pace.slower * seconds_of(plan, s, m) for s, m, _ in open_[number:]]
        what = f"[{number + 1}/{len(open_)}] {subject.name}, {mixer}" + (
            f", seed {seed}" if seeds > 1 else ""
        )
        board.begin(what, expected[0], sum(expected[1:]) + rest)
        with pace.over(seconds_of(plan, subject, mixer)):
            row = cell(subject, mixer, seed, steps=plan[subject.name]["steps"], out=out, watch=board)
        results.add(row)
        board.done(f"{what}: {said(row)}")
    measure(results, mixers, subjects, out=out, lengths=lengths, seconds=rest, board=board)
    row = {
        "kind": "run",
        "command": command,
        "started": stamp(begun),
        "minutes": round((time.perf_counter() - begun) / 60, 1),
    }
    row |= {key: value for key, value in machine().items() if key != "date"} | {
        "transformers": transformers_version
    }
    results.add(row | {"memory_gib": memory_gib(), "system": platform.system(), "seeds": list(range(seeds))})
    return results.rows


def is_begun(subject: Subject, mixers: list[str], seeds: int, results: Results, *, out: Path) -> bool:
    """Whether a cell of the subject is finished or has been started: its number of steps must stay then."""
    folders = (
        folder_of(subject, mixer, seed, out=out)
        for mixer in mixers_of(subject, mixers)
        for seed in range(seeds)
    )
    return results.has(kind="quality", subject=subject.name) or any(
        (folder / "run.json").exists() for folder in folders
    )


def measure(
    results: Results,
    mixers: list[str],
    subjects: list[Subject],
    *,
    out: Path,
    lengths: list[int],
    seconds: float,
    board: Board,
) -> None:
    """What is not training: exactness, cost, pictures; each where it is missing."""
    if sum(row["kind"] == "exactness" for row in results.rows) < (
        complete := len(found := list(exactness.rows()))
    ):
        board.say(f"exactness: {complete} comparisons with the definition")
        for row in found:
            results.add(row)
    for work, cases in (("training", cost.training), ("decoding", cost.decoding)):
        able = [mixer for mixer in mixers if cost.able(mixer, work)]
        missing = [
            n
            for n in lengths
            if not all(results.has(kind="cost", work=work, mixer=m, length=n) for m in able)
        ]
        if missing and able:  # all mixers at a length again: a time means something beside the others
            for row in cases(able, missing, seconds=min(seconds / 3, MOST_SECONDS), progress=board.say):
                results.add(row)
    for subject in subjects:
        if subject.task not in ("lm", "mlm"):
            continue
        task = subject.build()
        for mixer in mixers_of(subject, mixers):
            folder = folder_of(subject, mixer, 0, out=out)
            if (folder / "result.json").exists() and not results.has(
                kind="picture", subject=subject.name, mixer=mixer
            ):
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
    return datetime.fromtimestamp(time.time() - (time.perf_counter() - begun), timezone.utc).strftime(
        "%Y-%m-%dT%H:%M:%SZ"
    )


def memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="cosformer compare", description=(__doc__ or "").split("\n")[0])
    p.add_argument(
        "--tasks",
        nargs="+",
        metavar="NAME",
        help="some of lm, listops, recall; with --full, of the real sets",
    )
    p.add_argument(
        "--mixers",
        nargs="+",
        default=list(MIXERS),
        metavar="NAME",
        help=f"any of {', '.join(models.names())}, X+rope",
    )
    p.add_argument("--data", help="your own text for lm; with --full, the folder that holds the sets")
    p.add_argument("--length", type=int, help="tokens a sequence of lm has")
    p.add_argument(
        "--minutes",
        type=float,
        help="the time there is; runs are sized to it (default: 7, or 10 a cell with --full)",
    )
    p.add_argument("--steps", type=int, help="train this many steps instead, whatever time it takes")
    p.add_argument(
        "--seeds", type=int, default=1, help="repeat training with this many seeds and show the spread"
    )
    p.add_argument(
        "--full",
        action="store_true",
        help="the real sets: wikitext-2, SST-2, IMDB, CIFAR-10, ListOps as published",
    )
    p.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="where cost is measured")
    p.add_argument(
        "--out", type=Path, help="the folder of this comparison (default: runs/compare, or runs/compare-full)"
    )
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
        minutes = given.minutes or (
            10.0 * len(subjects) * len(given.mixers) * given.seeds if given.full else 7.0
        )
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
        print(
            f"\ncosformer compare: {str(stopped).split(';')[0]}; the same command goes on from here",
            file=sys.stderr,
        )
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
        raise train.SettingsError(
            "--length goes with lm of the default comparison; the sets of --full have their own"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise train.SettingsError("the report needs matplotlib; in the clone: pip install '.[report]'")
    if given.full and not given.data:
        raise train.SettingsError(
            "--full needs --data: the folder that holds wikitext-2, imdb, sst2 and cifar10-gray"
        )
    found = full(given.data) if given.full else demo(given.data, given.length)
    if given.tasks:
        known = [s.name for s in found]
        if unknown := [name for name in given.tasks if name not in known]:
            raise train.SettingsError(f"--tasks {unknown[0]}: one of {', '.join(known)}")
        needed = {s.after for s in found if s.name in given.tasks}
        found = [s for s in found if s.name in given.tasks or s.name in needed]
    return found
