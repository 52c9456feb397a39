"""What stands on the page: its sections, each a list of parts; a part names the template that shows it."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..results import Picture
from . import costs, figures, heatmap, tables
from .cells import GROUPS, Measured
from .paper import TABLES
from .style import digits, ident, looks, name
from .summary import paragraphs

SCALE = (
    "The paper's figures come from other data, models and machines: compare the order of mixers with them,"
    " never a number with a number."
)
PICTURES = (
    "Queries down, keys across; bright is much weight, on a scale of its own for each matrix (red is positive"
    " and blue negative where weights have signs); blank is masked."
)
Part = tables.Table | figures.Figure | SimpleNamespace  # each has the name of its template


@dataclass(frozen=True)
class Section:
    id: str
    heading: str
    parts: list[Part]


def sections(measured: Measured) -> list[Section]:
    """All that has results, in order."""
    others = {group: group for group in measured.groups if group not in [*GROUPS, "study"]}
    found: list[tuple[str, str, list[Part | None]]] = [
        ("summary", "Summary", [_text(*paragraphs(measured), kind="lead"), tables.verdicts(measured)]),
        *((ident(group), heading, _tasks(measured, group)) for group, heading in (GROUPS | others).items()),
        ("cost", "Speed and memory", _cost(measured)),
        ("trade-off", "Quality against cost", [figures.trade(measured)]),
        ("ablation", "Ablation", _study(measured)),
        ("rates", "Rates of learning", [tables.searches(measured)]),
        ("attention", "Attention matrices", [_gallery(title, rows) for title, rows in pictures(measured)]),
        ("exactness", "Exactness", [tables.exactness(measured)]),
        ("origin", "How these numbers were made", _origin(measured)),
    ]
    made = [Section(id_, heading, [part for part in parts if part]) for id_, heading, parts in found]
    return [section for section in made if section.parts]


def _text(*paragraphs: str, kind: str = "note") -> Part:
    return SimpleNamespace(template="text.html", paragraphs=paragraphs, kind=kind)


def _details(title: str, *parts: Part) -> Part:
    return SimpleNamespace(template="details.html", title=title, parts=parts)


def _listing(label: str, lines: list[str], facts: dict[str, Any]) -> Part:
    return SimpleNamespace(template="listing.html", label=label, lines=lines, facts=facts)


def _paper(*names: str) -> list[Part | None]:
    """Tables of the paper in full, with a warning."""
    found = [TABLES[name] for name in names]
    numbers = " and ".join(str(table.number) for table in found)
    title = f"The paper's table{'s' if len(found) > 1 else ''} {numbers} in full"
    return [_text(SCALE), _details(title, *map(tables.paper_table, found))]


def _tasks(measured: Measured, group: str) -> list[Part | None]:
    """A table for one task; for several an overview, and each in full below it; then the pictures."""
    mine = measured.group(group)
    if not mine:
        return []
    parts: list[Part | None] = [*map(tables.one_task, mine)]
    if len(mine) > 1:
        parts = [tables.overview(mine), _details("Each task in full", *map(tables.one_task, mine))]
    parts += _paper(group) if group in TABLES else []
    curves = figures.recall(mine) or figures.learning(mine)  # recall has too many settings for a picture each
    return [*parts, curves, figures.positions(mine, measured)]


def _cost(measured: Measured) -> list[Part | None]:
    parts: list[Part | None] = []
    for work, caption in (
        ("training", "Training {}: forward and backward"),
        ("decoding", "Decoding with {}"),
    ):
        for number, (what, rows) in enumerate(costs.groups(measured, work)):
            parts += [tables.cost(caption.format(what), rows, costs.KINDS[work]), tables.speedups(what, rows)]
            parts.append(figures.cost(what, rows, number))
    return parts + _paper("speed") if parts else []


def _study(measured: Measured) -> list[Part | None]:
    study = measured.group("study")
    parts: list[Part | None] = [*map(tables.one_task, study)]
    parts += [table for e in [*study, *measured.group("lm")] if (table := tables.ablation(e))]
    return [*parts, figures.learning(study), *_paper("study", "ablation")] if parts else []


def pictures(measured: Measured) -> list[tuple[str, list[Picture]]]:
    """Those that belong side by side, with a heading."""
    together: dict[str, list[Picture]] = {}
    order = list(looks(measured.mixers))
    for row in sorted(measured.pictures, key=lambda row: order.index(row.mixer)):
        title = f"After training: {measured.titles.get(row.subject, row.subject)}"
        together.setdefault(title, []).append(row)
    return list(together.items())


def picture_name(row: Picture) -> str:
    return f"{name(row.mixer)}, layer {row.layer}"


def _gallery(title: str, rows: list[Picture]) -> Part:
    images = [(picture_name(row), heatmap.data_uri(row.matrix), _in_words(row.matrix)) for row in rows]
    text = "".join(rows[0].tokens)
    caption = f"{PICTURES} The tokens: “{text}”." if text else PICTURES
    return SimpleNamespace(template="gallery.html", title=title, caption=caption, images=images)


def _in_words(matrix: heatmap.Matrix) -> str:
    """What a matrix holds; by size where weights have signs."""
    flat = [
        (abs(i - j), abs(x)) for i, line in enumerate(matrix) for j, x in enumerate(line) if x is not None
    ]
    total = sum(x for _, x in flat) or 1.0
    distance, near = sum(d * x for d, x in flat) / total, sum(x for d, x in flat if d <= 8) / total
    return f"mean distance {digits(distance)} tokens, {100 * near:.0f} % of the weight within 8"


def subtitle(measured: Measured) -> str:
    parts = [f"{len(measured.mixers)} attention mechanisms with the same layers, width and heads"]
    parts.append(f"{len(measured.experiments)} tasks and settings")
    return " · ".join([*parts, *(f"{machine.cpu}, {machine.date}" for machine in measured.machines[-1:])])


def _origin(measured: Measured) -> list[Part | None]:
    parts: list[Part | None] = []
    for run in measured.runs:
        started = run.started[:16].replace("T", " ")
        parts.append(
            _listing("Command", [run.command], {"started (UTC)": started, "minutes": f"{run.minutes:g}"})
        )
    words = {"cpu": "processor", "isa": "instruction set", "memory_gib": "memory, GiB"}
    for machine in measured.machines:
        facts = {words.get(key, key): value for key, value in vars(machine).items() if value is not None}
        parts.append(_listing("Machine", [], facts))
    if not measured.machines:
        parts.append(_text("The results do not say on what machine they were measured."))
    if commands := list(dict.fromkeys(row.command for row in measured.quality)):
        parts.append(_details(f"{len(commands)} training commands", _listing("Commands", commands, {})))
    return parts
