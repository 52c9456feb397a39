"""Sentences computed from numbers: who is ahead, by how much, what is a tie, and what was not measured. No other claims.

cosFormer (recommended) is compared with softmax: in quality with the better of softmax and softmax + RoPE on each task, in cost
with softmax + RoPE if it was measured.
"""

import math
import textwrap
from dataclasses import dataclass

from .results import Cell, Experiment, Results
from .style import digits, listed, looks, metric_name, mib, percent, score, times

OURS = ("cosformer", "cosformer-paper")
THEIRS = ("softmax+rope", "softmax")
TIE = 0.005  # nothing smaller is a difference: of the value, or of 1 where the metric is a share


@dataclass(frozen=True)
class Verdict:
    """One task: our mixer beside the better softmax."""

    experiment: Experiment
    ours: Cell | None
    theirs: Cell | None
    outcome: str  # better, worse, tie, missing
    difference: str  # "2.6 % higher"; why nothing can be said, if missing
    margin: str = ""  # why a tie is one


def name(mixer: str) -> str:
    """A mixer in a sentence."""
    return looks([mixer])[mixer].short


def verdict(experiment: Experiment) -> Verdict:
    ours, theirs = (_first(experiment, mixers) for mixers in (OURS, THEIRS))
    softmaxes = [c for m in THEIRS if (c := experiment.cell(m)) and c.value]
    if softmaxes:  # beating the weaker one would prove nothing
        theirs = (max if experiment.greater else min)(softmaxes, key=lambda c: c.value[0] if c.value else 0)
    for cell, mixers in ((ours, OURS), (theirs, THEIRS)):
        if cell is None or not cell.value:
            why = f"{name(mixers[0])} not measured" if cell is None else f"{name(cell.mixer)} {cell.why_not}"
            return Verdict(experiment, ours, theirs, "missing", why)
    assert ours and theirs and ours.value and theirs.value
    (a, a_spread), (b, b_spread) = ours.value, theirs.value
    if percent(experiment.metric):
        size, difference = 1.0, f"{100 * abs(a - b):.1f} points"
    else:
        size, difference = abs(b), f"{100 * abs(a - b) / abs(b):.1f} %" if b else digits(abs(a - b))
    margins = {f"less than {TIE:.1%}".replace("%", " %"): TIE * size}
    if a_spread is not None or b_spread is not None:
        margins["within the spread between seeds"] = (a_spread or 0) + (b_spread or 0)
    if percent(experiment.metric) and experiment.examples and 0 <= min(a, b) and max(a, b) <= 1:
        error = 2 * math.sqrt(
            (a * (1 - a) + b * (1 - b)) / experiment.examples
        )  # two standard errors of the difference
        margins[f"within the error of {experiment.examples:,} test examples"] = error
    why, margin = max(margins.items(), key=lambda item: item[1])
    difference += " higher" if a > b else " lower"
    if a == b:
        difference = "equal"
    outcome = "tie" if abs(a - b) <= margin else "better" if (a > b) == experiment.greater else "worse"
    return Verdict(experiment, ours, theirs, outcome, difference, why)


def _first(experiment: Experiment, mixers: tuple[str, ...]) -> Cell | None:
    cells = [c for m in mixers if (c := experiment.cell(m))]
    return next((c for c in cells if c.value), cells[0] if cells else None)


def quality_sentence(v: Verdict) -> str:
    """One task in words."""
    if v.outcome == "missing" or not (v.ours and v.theirs and v.ours.value and v.theirs.value):
        return f"{v.experiment.title}: no comparison, {v.difference}."
    metric = v.experiment.metric
    unit = " %" if percent(metric) else ""
    a, b = (score(metric, *cell.value) + unit for cell in (v.ours, v.theirs) if cell.value)
    found = (
        f"a tie ({v.difference}; {v.margin})"
        if v.outcome == "tie"
        else f"{v.difference}, which is {v.outcome}"
    )
    what = metric_name(metric).removesuffix(", %")
    return f"{v.experiment.title}: the {what} of {name(v.ours.mixer)} is {a} against {b} of {name(v.theirs.mixer)}, {found}."


def quality_sentences(results: Results) -> list[str]:
    """One sentence a task for up to two; beyond that the language model's, and one about all others."""
    compared = [v for v in map(verdict, _compared(results)) if v.outcome != "missing"]
    if len(compared) < 3:
        return [quality_sentence(v) for v in compared]
    first = [v for v in compared if v.experiment.group == "lm"][:1]
    rest = [v for v in compared if v not in first]
    parts = []
    for outcome, words in (
        ("better", "better than softmax"),
        ("tie", "level with softmax"),
        ("worse", "worse than softmax"),
    ):
        if found := [f"{v.experiment.title}: {v.difference}" for v in rest if v.outcome == outcome]:
            parts.append(
                f"{words} on {'all' if len(found) == len(rest) else len(found)} ({'; '.join(found)})"
            )
    mixers = {v.ours.mixer for v in compared if v.ours}  # not the same one everywhere: the table says which
    who = ("it" if first else name(mixers.pop())) if len(mixers) == 1 else "cosFormer"
    tasks = f"{len(rest)} {'other ' if first else ''}tasks"
    if len(parts) == 1:
        said = f"On {'both' if len(rest) == 2 else 'all'} {tasks.removeprefix('2 ')} {who} is {parts[0].replace(' on all', '', 1)}."
    else:
        said = f"Of {tasks} {who} is {listed(parts)}."
    return [*map(quality_sentence, first), said]


def _compared(results: Results) -> list[Experiment]:
    """The study repeats tasks to learn about parts of mixers; it is not a contest."""
    return [e for e in results.experiments if e.group != "study"]


def costs(results: Results, work: str) -> tuple[dict[int, dict], dict[int, dict], str, str]:
    """Our rows and softmax's by length, and the two mixers, for one kind of work; a whole causal model where there is one."""
    rows = [r for r in results.cost if r["work"] == work]
    for what, causal in (
        ("model", True),
        ("model", False),
        ("operator", True),
        ("operator", False),
        (None, None),
    ):
        mine = [
            r
            for r in rows
            if what is None or (r.get("what", "operator"), r.get("causal", True)) == (what, causal)
        ]
        ours, theirs = (
            next((m for m in ms if any(r["mixer"] == m for r in mine)), ms[0]) for ms in (OURS, THEIRS)
        )
        found = [{r["length"]: r for r in mine if r["mixer"] == m} for m in (ours, theirs)]
        if set(found[0]) & set(found[1]):
            return found[0], found[1], ours, theirs
    return {}, {}, OURS[0], THEIRS[0]


def speed(ours: dict, theirs: dict, verb: str) -> str:
    """ "trains 3.1x faster", by two rows of cost; as fast where the measured ranges overlap."""
    a, b = ours["ms"], theirs["ms"]
    low, high = (lambda r: r.get("ms_low") or r["ms"]), (lambda r: r.get("ms_high") or r["ms"])
    if low(ours) <= high(theirs) and low(theirs) <= high(ours):
        return f"{verb} as fast (the measured ranges overlap) as"
    return f"{verb} {times(max(a, b) / min(a, b))} {'faster' if a < b else 'slower'} than"


def cost_sentence(results: Results) -> str:
    """Training at the longest length both were measured at, and decoding with its cache; empty if neither was measured."""
    parts, who, softmax = [], "", ""
    ours, theirs, us, them = costs(results, "training")
    if both := set(ours) & set(theirs):
        longest = max(both)
        row = ours[longest]
        what = "" if row.get("what") == "model" else ", one attention alone,"
        who, softmax = us, them
        parts.append(
            f"at length {longest:,}{what} {name(us)} {speed(row, theirs[longest], 'trains')} {name(them)}"
        )
    ours, theirs, us, them = costs(results, "decoding")
    if both := set(ours) & set(theirs):
        longest = max(both)
        subject = "it" if who == us else name(us)
        than = speed(ours[longest], theirs[longest], "decodes")
        than = than.removesuffix(" than").removesuffix(" as") if softmax == them else f"{than} {name(them)}"
        text = f"{subject} {than} after {longest:,} tokens"
        parts.append(text + _cache(ours, theirs, longest))
    text = ", and ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else ""


def _cache(ours: dict[int, dict], theirs: dict[int, dict], longest: int) -> str:
    sizes = [r["cache_bytes"] for r in ours.values() if r.get("cache_bytes") is not None]
    if ours[longest].get("cache_bytes") is None:
        return ""
    grows = " that does not grow" if len(sizes) > 1 and len(set(sizes)) == 1 else ""
    other = theirs[longest].get("cache_bytes")
    against = "" if other is None else f" against {mib(other / 2**20)}"
    return f", with a cache of {mib(ours[longest]['cache_bytes'] / 2**20)}{grows}{against}"


def missing_sentence(results: Results) -> str:
    """What cannot be compared, and why."""
    parts = [f"{work} cost" for work in ("training", "decoding") if not set(costs(results, work)[0])]
    compared = _compared(results)
    parts += [
        f"{v.experiment.title} ({v.difference})" for v in map(verdict, compared) if v.outcome == "missing"
    ]
    if not compared:
        parts.append("quality on any task")
    return f"Not measured for both: {'; '.join(parts)}." if parts else ""


def sentences(results: Results) -> list[str]:
    """The summary of the page."""
    return list(
        filter(None, [cost_sentence(results), *quality_sentences(results), missing_sentence(results)])
    )


def verdict_rows(results: Results) -> list[tuple[str, ...]]:
    """(task, outcome, difference, ours, softmax's, metric) as text, one line a task; a mixer is named where the heading cannot."""
    heads = verdict_heads(results)
    lines = []
    for v in map(verdict, _compared(results)):
        cells = []
        for cell, head in ((v.ours, heads[3]), (v.theirs, heads[4])):
            text = score(v.experiment.metric, *cell.value) if cell and cell.value else "–"
            cells.append(
                text
                if not cell or name(cell.mixer) == head or text == "–"
                else f"{text} ({name(cell.mixer)})"
            )
        outcome = "not compared" if v.outcome == "missing" else v.outcome
        lines.append((v.experiment.title, outcome, v.difference, *cells, metric_name(v.experiment.metric)))
    return lines


def verdict_heads(results: Results) -> tuple[str, ...]:
    """The headings of `verdict_rows`: a mixer's name if it is the same in every line."""
    verdicts = [verdict(e) for e in _compared(results)]
    heads = []
    for cells, several in (
        ([v.ours for v in verdicts], "cosFormer"),
        ([v.theirs for v in verdicts], "softmax"),
    ):
        found = {name(c.mixer) for c in cells if c and c.value}
        heads.append(found.pop() if len(found) == 1 else several)
    return ("task", "cosFormer is", "difference", *heads, "metric")


def plain(results: Results) -> str:
    """The sentences and the task-by-task table for a terminal."""
    said = [textwrap.fill(s, 100) for s in sentences(results)] or ["There are no results."]
    if rows := verdict_rows(results):
        lines = [verdict_heads(results), *rows]
        widths = [min(40, max(len(line[i]) for line in lines)) for i in range(6)]
        said.append(
            "\n".join(
                "  ".join(f"{_fit(t, w):<{w}}" for t, w in zip(line, widths)).rstrip() for line in lines
            )
        )
    return "\n\n".join(said)


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
