"""Sentences computed from numbers: who is ahead, by how much, what is a tie, what was not learned.

cosFormer is compared with softmax: in quality with the better of softmax and softmax + RoPE on each task, in
cost with softmax + RoPE if it was measured.
"""

from . import costs
from .cells import Measured, Verdict, verdict
from .style import listed, metric_name, name, percent, sentence

MANY = 3  # settings of recall that are counted, not listed
WORKS = (("training", "trains", "at length {}"), ("decoding", "decodes", "after {} tokens"))


def paragraphs(measured: Measured) -> list[str]:
    """The summary: what is gained and what softmax wins; where we win or tie; what cannot be compared."""
    verdicts = [verdict(e) for e in measured.experiments]
    contests = [v for v in verdicts if v.outcome in ("better", "tie", "worse")]
    found = [
        [*_gained(measured), _lost(measured, contests)],
        [*_quality(contests), _not_learned(verdicts)],
        [_missing(measured, verdicts)],
    ]
    return [" ".join(filter(None, sentences)) for sentences in found if any(sentences)]


def _gained(measured: Measured) -> list[str]:
    """Training and decoding at the longest length both were measured at."""
    said = []
    for work, verb, place in WORKS:
        contest = costs.contest(measured, work)
        if contest.lengths:
            longest = contest.lengths[-1]
            alone = "" if contest.ours[longest].what == "model" else ", one attention alone,"
            compared = f"{name(contest.us)} {verb} {contest.outcome(longest)} {name(contest.them)}"
            where = place.format(f"{longest:,}")
            said.append(sentence(f"{where}{alone} {compared}{contest.cache_text()}"))
    return said


def _lost(measured: Measured, contests: list[Verdict]) -> str:
    """What softmax wins: it is said first, with what is gained."""
    lost = [v for v in contests if v.outcome == "worse"]
    number = f"{len(contests)} comparison{'s' if len(contests) > 1 else ''} of quality"
    listing = f" ({_listing(lost, contests, who='cosFormer ')})" if lost else ""
    said = [f"Softmax wins {len(lost) or 'none'} of {number}{listing}"]
    for work, verb, place in WORKS:
        contest = costs.contest(measured, work)
        if lengths := contest.lost():
            said.append(f"{name(contest.them)} {verb} faster {place.format(listed(lengths))}")
    return " ".join(map(sentence, said if contests else said[1:]))


def _quality(contests: list[Verdict]) -> list[str]:
    """The first task in words (the language model's, where there is one), and one sentence about all."""
    said = [_in_words(v) for v in contests[:1]]
    parts = []
    for outcome, words in (("better", "better in"), ("tie", "level in")):
        if found := [v for v in contests if v.outcome == outcome]:
            parts.append(f"{words} {len(found)} ({_listing(found, contests)})")
    if len(contests) > 1 and parts:
        mixers = {v.ours.mixer for v in contests if v.ours}
        who = name(mixers.pop()) if len(mixers) == 1 else "cosFormer"  # the table says which
        said.append(f"Of the {len(contests)} comparisons {who} is {listed(parts)}.")
    return said


def _listing(found: list[Verdict], contests: list[Verdict], who: str = "") -> str:
    """Each task with its difference; of recall's many settings only how many."""
    recall = [v for v in contests if v.experiment.row.task == "recall"]
    counted = [v for v in found if v in recall and len(recall) >= MANY]
    said = [f"{v.experiment.row.title}: {who}{v.difference}" for v in found if v not in counted]
    if counted:
        said.append(f"recall, {len(counted)} of {len(recall)} settings")
    return "; ".join(said)


def _in_words(v: Verdict) -> str:
    assert v.ours and v.theirs
    metric, said = v.experiment.row.metric, []
    for cell in (v.ours, v.theirs):
        unit, remarks = " %" if percent(metric) else "", f" ({cell.remarks})" if cell.remarks else ""
        said.append(f"{cell.text}{unit}{remarks}")
    found = f"{v.difference}, which is {v.outcome}"
    if v.outcome == "tie":
        found = f"a tie ({v.difference}; {v.margin})"
    what = f"the {metric_name(metric).removesuffix(', %')} of {name(v.ours.mixer)}"
    return (
        f"{v.experiment.row.title}: {what} is {said[0]} against {said[1]} of {name(v.theirs.mixer)}, {found}."
    )


def _not_learned(verdicts: list[Verdict]) -> str:
    titles = [v.experiment.row.title for v in verdicts if v.outcome == "not learned"]
    why = "no mixer beats the most frequent answer by two standard errors"
    return f"Not learned ({why}): {'; '.join(titles)}." if titles else ""


def _missing(measured: Measured, verdicts: list[Verdict]) -> str:
    """What cannot be compared, and why."""
    parts = [f"{work} cost" for work, _, _ in WORKS if not costs.contest(measured, work).lengths]
    parts += [f"{v.experiment.row.title} ({v.difference})" for v in verdicts if v.outcome == "not compared"]
    if not verdicts:
        parts.append("quality on any task")
    return f"Not measured for both: {'; '.join(parts)}." if parts else ""
