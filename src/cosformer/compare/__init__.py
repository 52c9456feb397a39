"""cosformer compare: is linear attention as good as softmax here, and what does it save?

    OUT/results.jsonl    a row for each finished cell      OUT/report.html    the answer
    OUT/plan.json        what is run, for how many steps   OUT/cells/         the trained models

After an interruption at any moment the same command continues: finished cells are not run again.
The plan is printed at once, before the libraries are loaded.
"""

import argparse
import importlib.util
import math
import shlex
import sys
import time
from pathlib import Path

from .plan import EVIDENCE, MIXERS, Subject, demo, full

__all__ = ["main"]

MINUTES = 7
OUT, OUT_FULL = Path("runs/compare"), Path("runs/compare-full")
COST = "cost"  # not a subject, but named like one in --subjects


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="cosformer compare",
        description="Is linear attention as good as softmax here, and what does it save?",
    )
    add = p.add_argument
    # fmt: off
    add("--subjects", nargs="+", metavar="NAME", help="some of the plan's, or cost")
    add("--mixers", nargs="+", metavar="NAME", help="as `cosformer train --mixer` has them"
        f" (default: {', '.join(MIXERS)}; --full: {', '.join(EVIDENCE)})")
    add("--data", help="your own text for lm; with --full, the folder that holds the sets")
    add("--length", type=int, help="tokens a sequence of lm has")
    add("--minutes", type=float, help=f"the time there is; steps are sized to it (default: {MINUTES})")
    add("--steps", type=int, help="train this many steps instead, whatever time it takes")
    add("--seeds", nargs="+", type=int, metavar="N", help="train with each of these (default: 0)")
    add("--full", action="store_true", help="the real sets, several seeds and rates: more than a day")
    add("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="where cost is measured")
    add("--threads", type=int, help="torch's (default: all cores)")
    add("--out", type=Path, help=f"the folder of it (default: {OUT}, or {OUT_FULL})")
    # fmt: on
    return p


def main(argv: list[str]) -> None:
    begun = time.perf_counter()
    given = parser().parse_args(argv)
    given.out = given.out or (OUT_FULL if given.full else OUT)
    given.mixers = given.mixers or (EVIDENCE if given.full else MIXERS)
    if given.minutes is None and not (given.full or given.steps):
        given.minutes = float(MINUTES)
    try:
        subjects = chosen(given)
    except ValueError as error:
        raise SystemExit(f"cosformer compare: {error}") from None
    print(in_words(subjects, given), flush=True)
    carry_out(subjects, given, begun=begun, command=shlex.join(["cosformer", "compare", *argv]))


def carry_out(subjects: list[Subject], given: argparse.Namespace, *, begun: float, command: str) -> None:
    """Load the libraries, run the comparison, write the report."""
    import torch

    from .. import mixers, report, train
    from .comparison import Comparison

    train.quieten()
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        for mixer in given.mixers:
            mixers.pattern(mixer)
        comparison = Comparison(given.out, minutes=given.minutes, begun=begun)
        if costs(given):
            comparison.measure(given.mixers, given.lengths)
        train.keep_memory()
        comparison.train(subjects, given.mixers, seeds=given.seeds, steps=given.steps)
        rows = comparison.end(command)
    except (train.Stopped, KeyboardInterrupt) as stopped:
        reason = str(stopped).split(";")[0] or "interrupted"
        print(f"\ncosformer compare: {reason}; the same command goes on from here", file=sys.stderr)
        asked = isinstance(stopped, (train.Interrupted, KeyboardInterrupt))
        raise SystemExit(130 if asked else 1) from None
    except (ValueError, OSError) as error:
        raise SystemExit(f"cosformer compare: {error}") from None
    page = given.out / "report.html"
    report.write_page(rows, page, plots=given.out / "plots")
    print(report.terminal_summary(rows))
    print(f"\nThe report: {page}")


def costs(given: argparse.Namespace) -> bool:
    return not given.subjects or COST in given.subjects


def chosen(given: argparse.Namespace) -> list[Subject]:
    """The subjects asked for, and those they start from."""
    for name in ("steps", "threads"):
        if (value := getattr(given, name)) is not None and value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1")
    if given.seeds and min(given.seeds) < 0:
        raise ValueError(f"--seeds {min(given.seeds)}: a seed is at least 0")
    if given.minutes is not None and not 0 < given.minutes < math.inf:
        raise ValueError(f"--minutes is {given.minutes:g}; it must be more than 0")
    for name, values in (("length", [given.length]), ("lengths", given.lengths)):
        if bad := [n for n in values if n is not None and n < 16]:
            raise ValueError(f"--{name} is {bad[0]}; it must be at least 16")
    for name in ("length", "minutes"):
        if given.full and getattr(given, name):
            own = "the subjects of --full have their own"
            raise ValueError(f"--{name} goes with the default comparison; {own}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the report needs matplotlib; in the clone: pip install '.[report]'")
    subjects = full(given.data or "") if given.full else demo(given.data, given.length)
    if given.subjects:
        known = [*(s.name for s in subjects), COST]
        if unknown := [name for name in given.subjects if name not in known]:
            raise ValueError(f"--subjects {unknown[0]}: one of {', '.join(known)}")
        needed = {s.after for s in subjects if s.name in given.subjects}
        subjects = [s for s in subjects if s.name in given.subjects or s.name in needed]
    if given.full and not given.data and (reads := [s.name for s in subjects if "data" in s.settings]):
        sets = "the folder that holds wikitext-2, imdb, sst2, cifar10-gray and cmudict"
        raise ValueError(f"{reads[0]} needs --data: {sets}")
    for subject in subjects:  # before hours of training, not when its turn comes
        if (data := subject.settings.get("data")) and not Path(data).expanduser().exists():
            raise ValueError(f"{subject.name} needs {data}: there is no such file or folder")
    return subjects


def in_words(subjects: list[Subject], given: argparse.Namespace) -> str:
    """What will be done, in words."""
    lines, cells = [], 0
    if costs(given):
        lengths = ", ".join(f"{n:,}" for n in given.lengths)
        lines.append(f"  {COST:<18} of {len(given.mixers)} mixers at lengths {lengths}; exactness")
    for subject in subjects:
        mixers, seeds = len(subject.mixers(given.mixers)), len(given.seeds or subject.seeds)
        steps = given.steps or subject.steps
        how = f"{mixers} mixer{'s' * (mixers > 1)}" + (f" x {seeds} seeds" if seeds > 1 else "")
        how += f" x {steps:,} steps" if steps else ""
        how += f", the best of {len(subject.rates)} rates" if len(subject.rates) > 1 else ""
        lines.append(f"  {subject.name:<18} {how}: {subject.title}")
        cells += mixers * seeds
    time_ = f"{given.minutes:g} minutes, steps sized to them" if given.minutes else "as long as it takes"
    return "\n".join([f"{cells} cells, {time_}; results in {given.out}", *lines])
