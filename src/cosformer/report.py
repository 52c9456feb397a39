"""From results.jsonl to pictures; imports nothing of the package, so any results file can be drawn anywhere."""

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
    """Time and peak memory of causal training against length, on log axes, one line an operator."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in rows if r.get("work") == "training" and r["causal"] and not r["decay"] and r["dtype"] == "float32"]
    if not rows:
        raise ValueError("there is no causal float32 training run among the results, so there is nothing to draw")
    best = "cosformer native" if any(r["operator"] == "cosformer native" for r in rows) else "cosformer torch"
    shown = {
        best: ("cosFormer", "cosformer"),
        "softmax": ("softmax (SDPA)", "softmax"),
        "published": ("cosFormer, published algorithm", "published"),
    }
    with plt.rc_context(
        {"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID, "svg.hashsalt": "cosformer"}
    ):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        for axis, value, title in ((axes[0], "ms", "time, ms"), (axes[1], "memory_mib", "peak memory, MiB")):
            for operator, (label, colour) in shown.items():
                points = sorted((r["length"], r[value]) for r in rows if r["operator"] == operator and (r.get(value) or 0) > 0)
                if points:
                    axis.plot(*zip(*points, strict=True), "o-", label=label, color=COLOURS[colour], linewidth=2, markersize=4)
            axis.set(xscale="log", yscale="log", xlabel="length, tokens", title=title)
            lengths = sorted({r["length"] for r in rows})
            axis.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
            axis.minorticks_off()
            axis.grid(color=GRID, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].legend(frameon=False)
        one = rows[0]
        figure.suptitle(
            f"Causal training; {one['heads']} heads of {one['size']}, float32; {one['cpu']}, {one['threads']} cores",
            fontsize=10,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, metadata={"Software": None})
        plt.close(figure)


def growth_plot(rows: list[dict], path: Path) -> None:
    """Time and peak memory of every mixer against length, on log axes; cosFormer and softmax stand out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(r["mixer"] for r in rows))
    marks = "osD^v<>pPX*hHd8"
    with plt.rc_context({"font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID}):
        figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
        for axis, value, title in ((axes[0], "ms", "time, ms"), (axes[1], "memory_mib", "peak memory, MiB")):
            for i, name in enumerate(names):
                points = sorted((r["length"], r[value]) for r in rows if r["mixer"] == name and (r.get(value) or 0) > 0)
                style = (
                    {"color": COLOURS[name], "linewidth": 2.5, "zorder": 3} if name in COLOURS else {"linewidth": 1, "alpha": 0.8}
                )
                if points:
                    axis.plot(*zip(*points, strict=True), marker=marks[i % len(marks)], markersize=4, label=name, **style)
            lengths = sorted({r["length"] for r in rows})
            axis.set(xscale="log", yscale="log", xlabel="length, tokens", title=title)
            axis.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
            axis.minorticks_off()
            axis.grid(color=GRID, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
        one = rows[0]
        figure.suptitle(
            f"Training cost of every mixer; {one['heads']} heads of {one['size']}, float32; {one['cpu']}, {one['threads']} cores",
            fontsize=10,
        )
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
