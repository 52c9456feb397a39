"""Sentences computed from numbers: who is ahead, by how much, what is a tie, what was not learned.

cosFormer is compared with softmax: in quality with the better of softmax and softmax + RoPE on each task, in
cost with softmax + RoPE if it was measured.
"""

from . import costs
from .cells import Measured, Verdict
from .style import listed, metric_name, name, percent, sentence

MANY = 3  # settings of recall that are counted, not listed
WORKS = (("training", "trains", "at length {}"), ("decoding", "decodes", "after {} tokens"))


def paragraphs(measured: Measured) -> list[str]:
    """The summary: what we gain and where softmax wins; where we win or tie; what cannot be compared."""
    verdicts = measured.verdicts
    contests = [v for v in verdicts if v.won or v.lost or v.outcome == "tie"]
    gained, lost, missing = _costs(measured)
    found = [
        [*gained, _lost(contests), *lost],
        [*_quality(contests), _not_learned(verdicts)],
        [_missing(missing, verdicts)],
    ]
    return [" ".join(filter(None, sentences)) for sentences in found if any(sentences)]


def _costs(measured: Measured) -> tuple[list[str], list[str], list[str]]:
    """What we gain at the longest length both have, where softmax is faster, what was not measured."""
    gained, lost, missing = [], [], []
    for work, verb, place in WORKS:
        contest = costs.contest(measured, work)
        if not contest.lengths:
            missing.append(f"{work} cost")
            continue
        longest = contest.lengths[-1]
        alone = "" if contest.ours[longest].what == "model" else ", one attention alone,"
        compared = f"{name(contest.us)} {verb} {contest.outcome(longest)} {name(contest.them)}"
        where = place.format(f"{longest:,}")
        gained.append(sentence(f"{where}{alone} {compared}{contest.cache_text()}"))
        if lengths := contest.lost():
            lost.append(sentence(f"{name(contest.them)} {verb} faster {place.format(listed(lengths))}"))
    return gained, lost, missing


def _lost(contests: list[Verdict]) -> str:
    """Where softmax wins: it comes first, with what we gain."""
    lost = [v for v in contests if v.lost]
    number = f"{len(contests)} comparison{'s' if len(contests) > 1 else ''} of quality"
    listing = f" ({_listing(lost, contests, who='cosFormer ')})" if lost else ""
    return f"Softmax wins {len(lost) or 'none'} of {number}{listing}." if contests else ""


def _quality(contests: list[Verdict]) -> list[str]:
    """The first task in words (the language model, if there is one), and one sentence about all."""
    said = [_in_words(v) for v in contests[:1]]
    parts = []
    told = {"better": "better in", "ahead": "ahead, with one seed, in", "tie": "not told apart in"}
    for outcome, words in told.items():
        if found := [v for v in contests if v.outcome == outcome]:
            parts.append(f"{words} {len(found)} ({_listing(found, contests)})")
    if len(contests) > 1 and parts:
        mixers = {v.ours.mixer for v in contests if v.ours}
        who = name(mixers.pop()) if len(mixers) == 1 else "cosFormer"  # the table says which
        said.append(f"Of the {len(contests)} comparisons {who} is {listed(parts)}.")
    return said


def _listing(found: list[Verdict], contests: list[Verdict], who: str = "") -> str:
    """Each task with its difference; recall's many settings are only counted."""
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
    elif v.outcome in ("ahead", "behind"):
        found = f"{v.difference}: {v.outcome}, with one seed"
    what = f"the {metric_name(metric).removesuffix(', %')} of {name(v.ours.mixer)}"
    return (
        f"{v.experiment.row.title}: {what} is {said[0]} against {said[1]} of {name(v.theirs.mixer)}, {found}."
    )


def _not_learned(verdicts: list[Verdict]) -> str:
    titles = [v.experiment.row.title for v in verdicts if v.outcome == "not learned"]
    why = "no mixer beats the most frequent answer by two standard errors"
    return f"Not learned ({why}): {'; '.join(titles)}." if titles else ""


def _missing(parts: list[str], verdicts: list[Verdict]) -> str:
    """What cannot be compared, and why."""
    undecided = [v for v in verdicts if v.outcome == "not compared"]
    parts = parts + [f"{v.experiment.row.title} ({v.difference})" for v in undecided]
    if not verdicts:
        parts.append("quality on any task")
    return f"Not compared: {'; '.join(parts)}." if parts else ""
