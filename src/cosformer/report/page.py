"""One self-contained HTML page of results: no script, no network; the same results give the same bytes."""

import html
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from . import figures, paper, plots, summary, tables
from .figures import Figure, Panel
from .paper import PaperTable
from .results import Experiment, Results
from .style import PALETTE, Look, digits, looks, score
from .tables import PAPER, Column, Entry, Table

# Groups of tasks in the order of the page: (group, heading, the paper's table).
GROUPS: list[tuple[str, str, PaperTable | None]] = [
    ("lm", "Language modelling", paper.LM),
    ("finetune", "Pre-training and fine-tuning", paper.FINETUNE),
    ("lra", "Long-Range Arena", paper.LRA),
    ("toy", "Toy tasks", None),
]
SCALE = "The paper's figures come from other data, models and machines: compare the order of mixers, never a number with a number."


def write(results: Results, path: Path, plots_folder: Path | None = None) -> None:
    """Write the page, and its figures as PNG and SVG files if a folder is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(results), encoding="utf-8", newline="\n")
    if plots_folder:
        plots_folder.mkdir(parents=True, exist_ok=True)
        shown = looks(results.mixers)
        for figure in all_figures(results):
            for panel in figure.panels:
                plots.save(panel, shown, plots_folder)
        for kind, rows in _pictures(results):
            blank = float("nan")
            panels = {_picture_title(r): [[blank if x is None else x for x in line] for line in r["matrix"]] for r in rows}
            plots.matrices(panels, plots_folder / f"attention-{figures.ident(kind)}.png", title=kind)


def all_figures(results: Results) -> list[Figure]:
    groups = dict.fromkeys(e.group for e in results.experiments)
    learning = [figures.learning(results.group(g), g) for g in groups]
    found = [*learning, *figures.training_cost(results), *figures.decoding_cost(results), figures.trade(results)]
    return [f for f in found if f]


def render(results: Results) -> str:
    shown = looks(results.mixers)
    drawn = {f.id: _figure(f, shown) for f in all_figures(results)}
    sections = [("summary", "Summary", _summary(results))]
    absent = []
    for group, heading, table in GROUPS:
        if mine := results.group(group):
            sections.append((group, heading, _tasks(mine, table, drawn)))
        elif table:
            absent.append((heading, table))
    for group in dict.fromkeys(e.group for e in results.experiments if e.group not in {"study", *(g for g, *_ in GROUPS)}):
        sections.append((figures.ident("group", group), group, _tasks(results.group(group), None, drawn)))
    if results.cost:
        sections.append(("cost", "Speed and memory", _cost(results, drawn)))
    else:
        absent.append(("Speed and memory", paper.SPEED))
    if "trade" in drawn:
        sections.append(("trade-off", "Quality against cost", drawn["trade"]))
    if studied := _study(results, drawn):
        sections.append(("study", "Ablation", studied))
    else:
        absent.append(("Ablation", paper.STUDY))
    if results.pictures:
        sections.append(("attention", "Attention matrices", _attention(results)))
    if results.exactness:
        sections.append(("exactness", "Exactness", _table(tables.exactness(results))))
    if absent:
        sections.append(("absent", "Not measured here", _absent(absent)))
    sections.append(("origin", "How these numbers were made", _origin(results)))
    nav = "\n".join(f'<li><a href="#{id_}">{esc(heading)}</a></li>' for id_, heading, _ in sections[1:])
    body = "\n".join(
        f'<section id="{id_}" aria-labelledby="h-{id_}">\n<h2 id="h-{id_}">{esc(heading)}</h2>\n{content}\n</section>'
        for id_, heading, content in sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>cosFormer compared</title>
<link rel="icon" href="data:,">
<style>
{_css()}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<header>
<h1>cosFormer compared</h1>
<p class="sub">{esc(_subtitle(results))}</p>
</header>
<nav aria-label="Contents">
<ul>
{nav}
</ul>
</nav>
<main id="main" tabindex="-1">
{body}
</main>
<footer><p>Made by <code>cosformer report</code> from results.jsonl alone.</p></footer>
</body>
</html>
"""


def esc(text: object) -> str:
    return html.escape(str(text))


def rich(text: str) -> str:
    """Escaped, with exponents raised: n^1.02."""
    return re.sub(r"\bn\^(-?[\d.]*\d)", r"n<sup>\1</sup>", esc(text))


def _css() -> str:
    """The style sheet, after the colours of the mixers, whose one home is style.py."""
    light, dark = ("".join(f"--c{i}:{pair[theme]};" for i, pair in enumerate(PALETTE)) for theme in (0, 1))
    sheet = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n{sheet}"


def _subtitle(results: Results) -> str:
    tasks = len({(e.task, e.title) for e in results.experiments})
    parts = [f"{_many(len(results.mixers), 'attention mechanism')} at equal size", _many(tasks, "task")]
    if results.runs:
        run = results.runs[-1]
        parts += [str(v) for v in (run.get("cpu"), (run.get("started") or "")[:10]) if v]
    return " · ".join(parts)


def _many(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"


def _summary(results: Results) -> str:
    said = summary.sentences(results)
    lead = "\n".join(f"<p>{rich(s)}</p>" for s in said) or "<p>There are no results.</p>"
    rows = summary.verdict_rows(results)
    if not rows:
        return f'<div class="lead">{lead}</div>'
    task, *heads = summary.verdict_heads(results)
    columns = [Column(head, words=True) for head in heads]
    body = [(name, [Entry(text) for text in rest]) for name, *rest in rows]
    note = (
        "Compared with the better of softmax and softmax + RoPE. Tie: within the spread between seeds; with one seed, below 0.5 %."
    )
    return f'<div class="lead">{lead}</div>\n' + _table(Table("Task by task", task, columns, {"": body}, note), "verdicts")


def _tasks(mine: list[Experiment], table: PaperTable | None, drawn: dict[str, str]) -> str:
    """A table for one task, or one of all tasks and one of what the training took; then the learning curves."""
    names = _paper_names(mine, table)
    parts = []
    if len(mine) == 1 or table in (None, paper.LM):
        parts += [_table(tables.one_task(e, table if i in names else None, names.get(i, ""))) for i, e in enumerate(mine)]
    elif table:
        parts += [_table(tables.several_tasks(mine, table, names)), _table(tables.took(mine))]
    if table:
        absent = tables.not_measured(list(names.values()), table) if table is not paper.LM else ""
        parts.append(f'<p class="note">{esc(f"{SCALE} {absent}".strip())}</p>')
        parts.append(_details(f"The paper's table {table.number} in full", _table(tables.paper_table(table))))
    parts.append(drawn.get(figures.ident("learning", mine[0].group), ""))
    return "\n".join(filter(None, parts))


def _paper_names(experiments: list[Experiment], table: PaperTable | None) -> dict[int, str]:
    """The paper's column for each task that has one, by index; of two tasks with the same column the first."""
    names: dict[int, str] = {}
    for i, e in enumerate(experiments):
        if table is paper.LM:
            names[i] = "test"
            continue
        column = paper.COLUMNS.get(e.task) if table is paper.LRA else None
        if table is paper.FINETUNE:
            column = next((c for c in table.columns[:-1] if c.lower() in e.title.lower()), None)
        if column and column not in names.values():
            names[i] = column
    return names


def _cost(results: Results, drawn: dict[str, str]) -> str:
    parts = [_table(t) for t in [*tables.training_cost(results), *tables.speedups(results)]]
    parts += [drawn.get(f.id, "") for f in figures.training_cost(results)]
    parts += [_table(t) for t in tables.decoding_cost(results)]
    parts += [drawn.get(f.id, "") for f in figures.decoding_cost(results)]
    parts.append(_details(f"The paper's table {paper.SPEED.number} in full", _table(tables.paper_table(paper.SPEED))))
    return "\n".join(filter(None, parts))


def _study(results: Results, drawn: dict[str, str]) -> str:
    parts = []
    for e in results.group("study") + results.group("lm"):
        found = [tables.one_task(e) if e.group == "study" else None, tables.study(e), tables.ablation(e)]
        parts += [_table(t) for t in found if t]
    parts.append(drawn.get("learning-study", ""))
    parts = [p for p in parts if p]
    if parts:
        both = _table(tables.paper_table(paper.STUDY)) + _table(tables.paper_table(paper.ABLATION))
        parts += [f'<p class="note">{esc(SCALE)}</p>', _details("The paper's tables 1 and 6 (unconfirmed)", both)]
    return "\n".join(filter(None, parts))


def _absent(absent: list[tuple[str, PaperTable]]) -> str:
    text = "<p class=\"note\">These have no results in this file. The paper's figures, at the paper's scale:</p>\n"
    return text + "\n".join(
        _details(f"{heading}: the paper's table {t.number}", _table(tables.paper_table(t))) for heading, t in absent
    )


def _pictures(results: Results) -> list[tuple[str, list[dict]]]:
    """Pictures that belong side by side, with a heading."""
    groups: dict[str, list[dict]] = {}
    for row in results.pictures:
        kind = f"After training on {row.get('task')}" if row.get("figure") == "trained" else "As the paper shows them"
        groups.setdefault(kind, []).append(row)
    return list(groups.items())


def _picture_title(row: dict) -> str:
    title = row.get("title")
    if title in (None, "", row["mixer"]):
        title = looks([row["mixer"]])[row["mixer"]].label
    where = ", ".join(f"{part} {row[part]:g}" for part in ("layer", "head") if row.get(part) is not None)
    return f"{title} ({where})" if where else title


def _attention(results: Results) -> str:
    parts = []
    for kind, rows in _pictures(results):
        images, body = [], []
        for row in rows:
            title, weights = _picture_title(row), row["matrix"]
            largest, distance, near = _measure(weights)
            alt = f"Attention matrix of {title}: largest weight {largest}, mean distance {distance} tokens"
            images.append(
                f'<figure class="matrix"><img src="{plots.matrix_uri(weights)}" alt="{esc(alt)}" width="256" height="256">'
                f"<figcaption>{esc(title)}</figcaption></figure>"
            )
            body.append((title, [Entry(largest), Entry(distance), Entry(near)]))
        tokens: list = next((r["tokens"] for r in rows if isinstance(r.get("tokens"), list)), [])
        text = "".join(map(str, tokens))
        words = f" The tokens: “{text}”." if text else ""
        caption = (
            "Queries down, keys across; bright is much weight, on a scale of its own for each matrix (red is positive and blue"
            f" negative where weights have signs); blank is masked.{words}"
        )
        columns = [Column("largest weight"), Column("mean distance, tokens"), Column("weight within 8 tokens, %")]
        table = Table(f"{kind}: what the matrices hold", "mixer", columns, {"": body})
        parts.append(
            f'<figure class="group"><h3>{esc(kind)}</h3>\n<div class="matrices">\n' + "\n".join(images) + "\n</div>\n"
            f"<figcaption>{esc(caption)}</figcaption>\n{_details('The matrices in numbers', _table(table))}</figure>"
        )
    return "\n".join(parts)


def _measure(matrix: list[list[float | None]]) -> tuple[str, str, str]:
    """Largest weight, mean distance, and the share of the weight within 8 tokens (of sizes, where weights have signs)."""
    flat = [(abs(i - j), abs(x), x) for i, row in enumerate(matrix) for j, x in enumerate(row) if x is not None]
    total = sum(size for _, size, _ in flat) or 1.0
    distance = sum(d * size for d, size, _ in flat) / total
    near = sum(size for d, size, _ in flat if d <= 8) / total
    return digits(max(x for *_, x in flat)), digits(distance), f"{100 * near:.0f}"


def _origin(results: Results) -> str:
    parts = []
    names = {"cpu": "processor", "isa": "instruction set", "memory_gib": "memory, GiB", "started": "started (UTC)"}
    for run in results.runs:
        order = (
            "started",
            "minutes",
            "cpu",
            "threads",
            "isa",
            "memory_gib",
            "seeds",
            "cosformer",
            "torch",
            "transformers",
            "python",
        )
        facts = [(names.get(k, k), run[k]) for k in order if run.get(k) is not None]
        items = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(_fact(v))}</dd></div>" for k, v in facts)
        parts.append(f'<pre tabindex="0" aria-label="Command"><code>{esc(run["command"])}</code></pre>\n<dl>{items}</dl>')
    if not results.runs:
        parts.append('<p class="note">The results do not say on what machine they were measured.</p>')
    commands = list(dict.fromkeys(r["command"] for r in results.quality if r.get("command")))
    if commands:
        listing = "\n".join(esc(c) for c in commands)
        parts.append(
            _details(
                _many(len(commands), "training command"), f'<pre tabindex="0" aria-label="Commands"><code>{listing}</code></pre>'
            )
        )
    settings = _settings_table(results)
    if settings.rows[""]:
        parts.append(_details("Settings of every training", _table(settings)))
    if results.skipped:
        items = "".join(f"<li><code>{esc(s)}</code></li>" for s in results.skipped)
        parts.append(f'<h3>Lines that were skipped ({len(results.skipped)})</h3>\n<ul class="skipped">{items}</ul>')
    return "\n".join(parts)


def _settings_table(results: Results) -> Table:
    rows = []
    for r in results.quality:
        if r["status"] == "done":
            settings = ", ".join(f"{k}={v}" for k, v in sorted((r.get("settings") or {}).items()))
            where = f"{r.get('title') or r['task']}: {looks([r['mixer']])[r['mixer']].label}"
            start = (r.get("start") or {}).get("loss")
            began = score("loss", start) if isinstance(start, (int, float)) else tables.NOTHING
            rows.append(
                (
                    where,
                    [
                        Entry(str(r["seed"])),
                        Entry(str(r.get("batch", tables.NOTHING))),
                        Entry(began),
                        Entry(settings or tables.NOTHING),
                    ],
                )
            )
    columns = [Column("seed"), Column("batch"), Column("loss at the start"), Column("settings", words=True)]
    return Table("One line a training", "training", columns, {"": rows})


def _fact(value: object) -> str:
    if isinstance(value, str):
        return re.sub(r"^(\d{4}-\d\d-\d\d)T([\d:]{5}).*Z$", r"\1 \2", value)
    return ", ".join(map(str, value)) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)


def _details(title: str, content: str) -> str:
    return f"<details><summary>{esc(title)}</summary>\n{content}\n</details>"


_OUTCOME = {"better", "worse", "tie", "not compared"}


def _table(table: Table, kind: str = "") -> str:
    """A table in a region that scrolls by itself; the paper's columns are set apart."""
    grouped = any(c.group for c in table.columns)
    corner = f'<th scope="col"{" rowspan=2" if grouped else ""}>{esc(table.corner)}</th>'
    heads = "".join(f'<th scope="col"{_class(table.columns, i)}>{esc(c.head)}</th>' for i, c in enumerate(table.columns))
    if grouped:
        groups = "".join(
            f'<th scope="colgroup" colspan="{size}"{_class(table.columns, first, group=True)}>{esc(name)}</th>'
            for name, first, size in _groups(table.columns)
        )
        head = f"<tr>{corner}{groups}</tr>\n<tr>{heads}</tr>"
    else:
        head = f"<tr>{corner}{heads}</tr>"
    bodies = []
    for group, rows in table.rows.items():
        winners = table.winners(group)
        lines = (
            [f'<tr><th scope="rowgroup" class="group" colspan="{len(table.columns) + 1}"><span>{esc(group)}</span></th></tr>']
            if group
            else []
        )
        for i, (name, entries) in enumerate(rows):
            cells = "".join(
                f"<td{_class(table.columns, j)}>{_entry(e, (i, j) in winners, kind)}</td>" for j, e in enumerate(entries)
            )
            lines.append(f'<tr><th scope="row">{esc(name)}</th>{cells}</tr>')
        bodies.append("<tbody>\n" + "\n".join(lines) + "\n</tbody>")
    note = f'\n<p class="note">{rich(table.note)}</p>' if table.note else ""
    about = f" <small>{rich(table.about)}</small>" if table.about else ""
    return (
        f'<div class="scroll {kind}" role="group" aria-label="{esc(table.caption)}" tabindex="0">'
        f'<p class="hint" aria-hidden="true">scroll sideways for more →</p>\n'
        f"<table>\n<caption><span>{rich(table.caption)}{about}</span></caption>\n<thead>\n{head}\n</thead>\n"
        + "\n".join(bodies)
        + f"\n</table>\n</div>{note}"
    )


def _groups(columns: list[Column]) -> Iterable[tuple[str, int, int]]:
    """(heading, first column, how many) of columns that stand together."""
    start = 0
    for i in range(1, len(columns) + 1):
        if i == len(columns) or columns[i].group != columns[start].group:
            yield columns[start].group, start, i - start
            start = i


def _class(columns: list[Column], index: int, group: bool = False) -> str:
    column = columns[index]
    names = []
    if column.words and not group:
        names.append("words")
    if PAPER in column.group:
        names.append("paper")
    if index and column.group != columns[index - 1].group:
        names.append("first")
    return f' class="{" ".join(names)}"' if names else ""


def _entry(entry: Entry, best: bool, kind: str) -> str:
    text = rich(entry.text)
    if kind == "verdicts" and entry.text in _OUTCOME:
        return f'<span class="outcome {entry.text.split()[0]}">{text}</span>'
    if best:
        return f"<strong>{text}</strong>"
    return f'<span class="why" title="{esc(entry.why)}">{text}</span>' if entry.why else text


def _figure(figure: Figure, shown: dict[str, Look]) -> str:
    """Legend, panels, what to see, and the values."""
    mixers = [m for m in shown if any(line.mixer == m for p in figure.panels for line in p.lines)]
    scatter = all(p.scatter for p in figure.panels)
    legend = "".join(f"<li>{plots.swatch(shown[m], line=not scatter)}{esc(shown[m].label)}</li>" for m in mixers)
    drawn = "\n".join(plots.inline(p, shown, esc(_alt(p, shown))) for p in figure.panels)
    values = "\n".join(_table(_values(p)) for p in figure.panels)
    heading = f"<h3>{esc(figure.title)}</h3>\n" if figure.title else ""
    return (
        f'<figure class="group" id="figure-{figure.id}">{heading}<ul class="legend">{legend}</ul>\n'
        f'<div class="panels">\n{drawn}\n</div>\n<figcaption>{rich(figure.caption)}</figcaption>\n'
        f"{_details('The values', values)}</figure>"
    )


def _alt(panel: Panel, shown: dict[str, Look]) -> str:
    ends = "; ".join(
        f"{shown[line.mixer].short} {digits(line.points[-1][1])}" + ("" if panel.scatter else f" at {_place(line.points[-1][0])}")
        for line in panel.lines
    )
    kind = "Points" if panel.scatter else "Lines on logarithmic axes" if panel.log else "Lines"
    title = panel.title.replace("\n", ", ")
    return f"{kind}: {title} against {panel.x}. {'Values' if panel.scatter else 'Ends'}: {ends}."


def _place(x: float) -> str:
    return f"{x:,.0f}" if x == round(x) else digits(x)


def _values(panel: Panel) -> Table:
    """What a panel shows, in numbers."""

    def named(line: figures.Line) -> str:
        text = looks([line.mixer])[line.mixer].label
        return f"{text}, {line.variant}" if line.variant else text

    title = panel.title.replace("\n", ", ")
    caption = f"{title[:1].upper()}{title[1:]} against {panel.x}"
    if panel.scatter:
        rows = [(named(line), [Entry(digits(line.points[0][0])), Entry(digits(line.points[0][1]))]) for line in panel.lines]
        return Table(caption, "mixer", [Column(panel.x), Column("value")], {"": rows})
    places = sorted({x for line in panel.lines for x, _ in line.points})
    if all([x for x, _ in line.points] == places for line in panel.lines) or panel.log:
        at = [dict(line.points) for line in panel.lines]
        rows = [(_place(x), [Entry(digits(p[x])) if x in p else Entry(tables.NOTHING) for p in at]) for x in places]
        return Table(caption, panel.x, [Column(named(line)) for line in panel.lines], {"": rows})
    groups = {named(line): [(_place(x), [Entry(digits(y))]) for x, y in line.points] for line in panel.lines}
    return Table(caption, panel.x, [Column(title)], groups)
