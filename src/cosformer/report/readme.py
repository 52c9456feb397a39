"""Tables of Markdown pages from committed results: the README's of `cosformer compare`, those of speed.md of `cosformer bench`."""

import json
from pathlib import Path

from . import summary
from .results import check

BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"


def numbers(rows: list[dict]) -> str:
    """What a page says of the rows, as Markdown."""
    if any("kind" in row for row in rows):
        return _headline(rows)
    kinds = (("operators", _operator_table), ("models", _model_table))
    return "\n\n".join(
        table(mine) for kind, table in kinds if (mine := [r for r in rows if r.get("bench") == kind])
    )


def _headline(rows: list[dict]) -> str:
    """The sentences of a comparison, and a line for each task."""
    results = check(rows)
    heads = summary.verdict_heads(results)
    lines = [
        " ".join(summary.sentences(results)),
        "",
        "| " + " | ".join(heads) + " |",
        "|---" * len(heads) + "|",
    ]
    lines += ["| " + " | ".join(line) + " |" for line in summary.verdict_rows(results)]
    return "\n".join(lines)


def _operator_table(rows: list[dict]) -> str:
    mine = [r for r in rows if r["dtype"] == "float32" and r["size"] == 64 and not r["decay"]]
    at = {(r["operator"], r["work"], r["causal"], r["length"]): r for r in mine}
    best = "cosformer native" if any(r["operator"] == "cosformer native" for r in mine) else "cosformer torch"
    one = mine[0]
    lines = [
        f"One attention of {one['heads']} heads of {one['size']}, batch 1, float32, {one['cpu']}, {one['threads']} cores"
        f" (`make bench`, torch {one['torch'].split('+')[0]}); in brackets, how many times faster than softmax"
        " (`scaled_dot_product_attention`):",
        "",
        "| length | forward | causal forward | training step | causal training step | its memory | softmax's |",
        "|---|---|---|---|---|---|---|",
    ]
    for length in sorted({r["length"] for r in mine if r["operator"] == best and r["work"] == "training"}):
        cells = [f"{length:,}"]
        for work in ("forward", "training"):
            for causal in (False, True):
                ours, softmax = (at.get((name, work, causal, length)) for name in (best, "softmax"))
                cells.append(
                    "-"
                    if ours is None
                    else f"{ours['ms']:.3g} ms" + (f" ({softmax['ms'] / ours['ms']:.1f}x)" if softmax else "")
                )
        for name in (best, "softmax"):
            row = at.get((name, "training", True, length))
            cells.append(
                "-" if row is None or row.get("memory_mib") is None else f"{row['memory_mib']:.0f} MiB"
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _model_table(rows: list[dict]) -> str:
    names = list(dict.fromkeys(r["model"] for r in rows))
    training = {(r["model"], r["length"]): r["tokens_per_second"] for r in rows if r["what"] == "training"}
    lines = [
        "A byte-level language model of 4 layers, width 256, 4 heads, batch 1 (`cosformer bench --models`):",
        "",
    ]
    lengths = sorted({length for _, length in training})
    decoding = [r for r in rows if r["what"] == "decoding"]
    contexts = sorted({r["context"] for r in decoding})
    heads = (
        [f"training, {n:,} tokens" for n in lengths]
        + [f"decoding after {n:,}" for n in contexts]
        + [f"cache after {contexts[-1]:,}"]
    )
    lines += ["| model | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name in names:
        cells = [name if name != "sdpa" else "softmax"] + [
            f"{training[name, n]:,.0f} tokens/s" for n in lengths
        ]
        mine = {r["context"]: r for r in decoding if r["model"] == name}
        cells += [f"{mine[n]['ms']:.2f} ms/token" for n in contexts] + [
            f"{mine[contexts[-1]]['cache_bytes'] / 2**20:.1f} MiB"
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fill(text: str, rows: list[dict]) -> str:
    """The page with the tables of these rows between BEGIN and END."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{numbers(rows)}\n{END}{after}"


def read(paths: list[Path]) -> list[dict]:
    """The rows of results files; a line that is not a result is an error with its file and number."""
    rows = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as wrong:
                raise SystemExit(f"{path}:{number}: not a line of results: {wrong}") from None
    return rows
