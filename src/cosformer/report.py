"""From results files to pictures and tables; imports nothing of the package, so any results file can be drawn anywhere."""

import argparse
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INK, GRID = "#1f2328", "#d0d7de"
COLOURS = {"cosformer": "#0969da", "softmax": "#cf222e", "published": "#9a6700"}


def plot(rows: list[dict], path: Path) -> None:
    """Draw what the rows are about."""
    kinds = {"operators": cost_plot, "mixers": growth_plot}
    kind = rows[0].get("bench") if rows else None
    if kind not in kinds:
        raise ValueError(f"there is no picture for a bench of {kind}; one of {', '.join(kinds)}")
    kinds[kind](rows, path)


def cost_plot(rows: list[dict], path: Path) -> None:
    """Time and peak memory of causal training: cosFormer, softmax and the published algorithm."""
    rows = [r for r in rows if r.get("work") == "training" and r["causal"] and not r["decay"] and r["dtype"] == "float32"]
    if not rows:
        raise ValueError("there is no causal float32 training run among the results, so there is nothing to draw")
    best = "cosformer native" if any(r["operator"] == "cosformer native" for r in rows) else "cosformer torch"
    names = {best: ("cosFormer", "cosformer"), "softmax": ("softmax (SDPA)", "softmax")}
    names["published"] = ("cosFormer, published algorithm", "published")
    curves = {
        label: ([r for r in rows if r["operator"] == name], {"color": COLOURS[colour], "marker": "o", "linewidth": 2})
        for name, (label, colour) in names.items()
    }
    _against_length(curves, path, title="Causal training", size=(9, 3.7), legend={"loc": "outside lower center", "ncols": 3})


def growth_plot(rows: list[dict], path: Path) -> None:
    """Time and peak memory of every mixer; cosFormer and softmax stand out."""
    curves = {}
    for name, mark in zip(dict.fromkeys(r["mixer"] for r in rows), itertools.cycle("osD^v<>pPX*hHd8")):
        known = {"color": COLOURS[name], "linewidth": 2.5, "zorder": 3} if name in COLOURS else {"linewidth": 1, "alpha": 0.8}
        curves[name] = ([r for r in rows if r["mixer"] == name], {"marker": mark, **known})
    _against_length(curves, path, title="Training cost of every mixer", size=(10, 4.4), legend={"loc": "outside right center"})


def _against_length(curves: dict[str, tuple[list[dict], dict]], path: Path, *, title: str, size, legend: dict) -> None:
    """Two panels, time and peak memory against length, on log axes; a curve is its rows and its style."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for mine, _ in curves.values() for r in mine]
    lengths = sorted({r["length"] for r in rows})
    with plt.rc_context({"font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID}):
        figure, axes = plt.subplots(1, 2, figsize=size, layout="constrained")
        for axis, value, what in ((axes[0], "ms", "time, ms"), (axes[1], "memory_mib", "peak memory, MiB")):
            for label, (mine, style) in curves.items():
                points = sorted((r["length"], r[value]) for r in mine if (r.get(value) or 0) > 0)
                if points:
                    axis.plot(*zip(*points), label=label, markersize=4, **style)
            axis.set(xscale="log", yscale="log", xlabel="length, tokens", title=what)
            axis.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
            axis.minorticks_off()
            axis.grid(color=GRID, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
        figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, **legend)
        one = rows[0]
        where = f"{one['heads']} heads of {one['size']}, float32; {one['cpu']}, {one['threads']} cores"
        figure.suptitle(f"{title}; {where}", fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, metadata={"Software": None})
        plt.close(figure)


def matrices(panels: Mapping[str, Any], path: str | Path, *, title: str = "", columns: int = 4) -> Path:
    """Draw (L, S) arrays, one panel for each title, to a PNG.

    Every panel has its own scale, shown beside it: a mechanism's pattern is of interest, not how thinly it spreads. Matrices
    with negative weights are drawn from blue to red around white; NaN is left blank.
    """
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.9 * columns + 0.2, 2.75 * rows + (0.35 if title else 0)), layout="constrained", dpi=160)
    with matplotlib.rc_context({"font.size": 8, "axes.titlesize": 9, "axes.linewidth": 0.5}):
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis, (name, array) in zip(axes.flat, panels.items(), strict=False):
            low, high, most = _range(array)
            signed = low < -high / 20
            colours = {"cmap": "RdBu_r", "vmin": -high, "vmax": high} if signed else {"cmap": "magma", "vmin": 0, "vmax": high}
            image = axis.imshow(array, interpolation="nearest", aspect="equal", **colours)
            axis.set_facecolor("0.93")
            extend = "neither" if most <= high else "both" if signed else "max"
            bar = figure.colorbar(image, ax=axis, fraction=0.045, pad=0.03, extend=extend)
            bar.ax.tick_params(labelsize=6, width=0.4, length=2)
            bar.outline.set_linewidth(0.4)
            axis.set_title(name)
            axis.set(xticks=[0, len(array[0]) - 1], yticks=[0, len(array) - 1])
            axis.tick_params(labelsize=6, width=0.4, length=2)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis in axes[:, 0]:
            axis.set_ylabel("query")
        for axis in axes[-1]:
            axis.set_xlabel("key")
        if title:
            figure.suptitle(title, fontsize=10)
        figure.savefig(path)
    return Path(path)


def _range(array) -> tuple[float, float, float]:
    """The smallest value, the size below which 99 of 100 lie (a bright point must not darken the rest), the largest size."""
    values = [float(x) for row in array for x in row if x == x]
    sizes = sorted(map(abs, values))
    return min(values), sizes[int(0.99 * (len(sizes) - 1))] or 1.0, sizes[-1]


BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"


def numbers(rows: list[dict]) -> str:
    """The README's tables, as Markdown, from the committed results alone."""
    parts = [_operator_table([r for r in rows if r.get("bench") == "operators"])]
    models = [r for r in rows if r.get("bench") == "models"]
    return "\n\n".join(parts + ([_model_table(models)] if models else []))


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
                    "-" if ours is None else f"{ours['ms']:.3g} ms" + (f" ({softmax['ms'] / ours['ms']:.1f}x)" if softmax else "")
                )
        for name in (best, "softmax"):
            row = at.get((name, "training", True, length))
            cells.append("-" if row is None or row.get("memory_mib") is None else f"{row['memory_mib']:.0f} MiB")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _model_table(rows: list[dict]) -> str:
    names = list(dict.fromkeys(r["model"] for r in rows))
    training = {(r["model"], r["length"]): r["tokens_per_second"] for r in rows if r["what"] == "training"}
    lines = ["A byte-level language model of 4 layers, width 256, 4 heads, batch 1 (`cosformer bench --models`):", ""]
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
        cells = [name if name != "sdpa" else "softmax"] + [f"{training[name, n]:,.0f} tokens/s" for n in lengths]
        mine = {r["context"]: r for r in decoding if r["model"] == name}
        cells += [f"{mine[n]['ms']:.2f} ms/token" for n in contexts] + [f"{mine[contexts[-1]]['cache_bytes'] / 2**20:.1f} MiB"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


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


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="cosformer report", description="Write the tables of a page from results files.")
    p.add_argument("results", nargs="+", type=Path, help="JSON lines written by `cosformer bench --out`")
    p.add_argument("--page", type=Path, default=Path("README.md"), help=f"the page with {BEGIN} and {END}")
    args = p.parse_args(argv)
    text = args.page.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"cosformer report: {args.page} has no place for tables; put {BEGIN} and {END} where they belong")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    args.page.write_text(f"{before}{BEGIN}\n{numbers(read(args.results))}\n{END}{after}")
