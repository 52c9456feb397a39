"""One self-contained HTML page of results: no script, no network; the same results give the same bytes."""

import re
from importlib import resources
from pathlib import Path

from . import figures, paper, plots, summary, tables
from .elements import details, esc, figure_html, rich, table_html
from .figures import Figure
from .paper import PaperTable
from .results import Experiment, Results
from .style import PALETTE, digits, looks, score
from .tables import Column, Entry, Table

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
            panels = {
                _picture_title(r): [[blank if x is None else x for x in line] for line in r["matrix"]]
                for r in rows
            }
            plots.matrices(panels, plots_folder / f"attention-{figures.ident(kind)}.png", title=kind)


def all_figures(results: Results) -> list[Figure]:
    groups = dict.fromkeys(e.group for e in results.experiments)
    learning = [figures.learning(results.group(g), g) for g in groups]
    found = [
        *learning,
        *figures.training_cost(results),
        *figures.decoding_cost(results),
        figures.trade(results),
    ]
    return [f for f in found if f]


def render(results: Results) -> str:
    shown = looks(results.mixers)
    drawn = {f.id: figure_html(f, shown) for f in all_figures(results)}
    sections = [("summary", "Summary", _summary(results))]
    absent = []
    for group, heading, table in GROUPS:
        if mine := results.group(group):
            sections.append((group, heading, _tasks(mine, table, drawn)))
        elif table:
            absent.append((heading, table))
    for group in dict.fromkeys(
        e.group for e in results.experiments if e.group not in {"study", *(g for g, *_ in GROUPS)}
    ):
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
        sections.append(("exactness", "Exactness", table_html(tables.exactness(results))))
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


def _css() -> str:
    """The style sheet, after the colours of the mixers, whose one home is style.py."""
    light, dark = ("".join(f"--c{i}:{pair[theme]};" for i, pair in enumerate(PALETTE)) for theme in (0, 1))
    sheet = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n{sheet}"


def _subtitle(results: Results) -> str:
    tasks = len({(e.task, e.title) for e in results.experiments})
    parts = [
        f"{_many(len(results.mixers), 'attention mechanism')} with the same layers, width and heads",
        _many(tasks, "task"),
    ]
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
        "Compared with the better of softmax and softmax + RoPE. Tie: within the spread between seeds, within two standard errors"
        " of the difference of two accuracies on so many test examples, or within 0.5 %."
    )
    return f'<div class="lead">{lead}</div>\n' + table_html(
        Table("Task by task", task, columns, {"": body}, note), "verdicts"
    )


def _tasks(mine: list[Experiment], table: PaperTable | None, drawn: dict[str, str]) -> str:
    """A table for one task, or one of all tasks and one of what the training took; then the learning curves."""
    names = _paper_names(mine, table)
    parts = []
    if len(mine) == 1 or table in (None, paper.LM):
        parts += [
            table_html(tables.one_task(e, table if i in names else None, names.get(i, "")))
            for i, e in enumerate(mine)
        ]
    elif table:
        parts += [table_html(tables.several_tasks(mine, table, names)), table_html(tables.took(mine))]
    if table:
        absent = tables.not_measured(list(names.values()), table) if table is not paper.LM else ""
        parts.append(f'<p class="note">{esc(f"{SCALE} {absent}".strip())}</p>')
        parts.append(
            details(f"The paper's table {table.number} in full", table_html(tables.paper_table(table)))
        )
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
    parts = [table_html(t) for t in [*tables.training_cost(results), *tables.speedups(results)]]
    parts += [drawn.get(f.id, "") for f in figures.training_cost(results)]
    parts += [table_html(t) for t in tables.decoding_cost(results)]
    parts += [drawn.get(f.id, "") for f in figures.decoding_cost(results)]
    parts.append(
        details(
            f"The paper's table {paper.SPEED.number} in full", table_html(tables.paper_table(paper.SPEED))
        )
    )
    return "\n".join(filter(None, parts))


def _study(results: Results, drawn: dict[str, str]) -> str:
    parts = []
    for e in results.group("study") + results.group("lm"):
        found = [tables.one_task(e) if e.group == "study" else None, tables.study(e), tables.ablation(e)]
        parts += [table_html(t) for t in found if t]
    parts.append(drawn.get("learning-study", ""))
    parts = [p for p in parts if p]
    if parts:
        both = table_html(tables.paper_table(paper.STUDY)) + table_html(tables.paper_table(paper.ABLATION))
        parts += [
            f'<p class="note">{esc(SCALE)}</p>',
            details("The paper's tables 1 and 6 (unconfirmed)", both),
        ]
    return "\n".join(filter(None, parts))


def _absent(absent: list[tuple[str, PaperTable]]) -> str:
    text = "<p class=\"note\">These have no results in this file. The paper's figures, at the paper's scale:</p>\n"
    return text + "\n".join(
        details(f"{heading}: the paper's table {t.number}", table_html(tables.paper_table(t)))
        for heading, t in absent
    )


def _pictures(results: Results) -> list[tuple[str, list[dict]]]:
    """Pictures that belong side by side, with a heading."""
    groups: dict[str, list[dict]] = {}
    for row in results.pictures:
        kind = (
            f"After training on {row.get('task')}"
            if row.get("figure") == "trained"
            else "As the paper shows them"
        )
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
        columns = [
            Column("largest weight"),
            Column("mean distance, tokens"),
            Column("weight within 8 tokens, %"),
        ]
        table = Table(f"{kind}: what the matrices hold", "mixer", columns, {"": body})
        parts.append(
            f'<figure class="group"><h3>{esc(kind)}</h3>\n<div class="matrices">\n'
            + "\n".join(images)
            + "\n</div>\n"
            f"<figcaption>{esc(caption)}</figcaption>\n{details('The matrices in numbers', table_html(table))}</figure>"
        )
    return "\n".join(parts)


def _measure(matrix: list[list[float | None]]) -> tuple[str, str, str]:
    """Largest weight, mean distance, and the share of the weight within 8 tokens (of sizes, where weights have signs)."""
    flat = [
        (abs(i - j), abs(x), x) for i, row in enumerate(matrix) for j, x in enumerate(row) if x is not None
    ]
    total = sum(size for _, size, _ in flat) or 1.0
    distance = sum(d * size for d, size, _ in flat) / total
    near = sum(size for d, size, _ in flat if d <= 8) / total
    return digits(max(x for *_, x in flat)), digits(distance), f"{100 * near:.0f}"


def _origin(results: Results) -> str:
    parts = []
    names = {
        "cpu": "processor",
        "isa": "instruction set",
        "memory_gib": "memory, GiB",
        "started": "started (UTC)",
    }
    names["minutes"] = "minutes of this call"  # what an earlier one had finished was not done again
    for run in results.runs:
        order = [
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
        ]
        facts = [(names.get(k, k), run[k]) for k in order if run.get(k) is not None]
        items = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(_fact(v))}</dd></div>" for k, v in facts)
        parts.append(
            f'<pre tabindex="0" aria-label="Command"><code>{esc(run["command"])}</code></pre>\n<dl>{items}</dl>'
        )
    if not results.runs:
        parts.append('<p class="note">The results do not say on what machine they were measured.</p>')
    commands = list(dict.fromkeys(r["command"] for r in results.quality if r.get("command")))
    if commands:
        listing = "\n".join(esc(c) for c in commands)
        parts.append(
            details(
                _many(len(commands), "training command"),
                f'<pre tabindex="0" aria-label="Commands"><code>{listing}</code></pre>',
            )
        )
    settings = _settings_table(results)
    if settings.rows[""]:
        parts.append(details("Settings of every training", table_html(settings)))
    if results.skipped:
        items = "".join(f"<li><code>{esc(s)}</code></li>" for s in results.skipped)
        parts.append(
            f'<h3>Lines that were skipped ({len(results.skipped)})</h3>\n<ul class="skipped">{items}</ul>'
        )
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
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
