"""matrices: a figure of attention matrices side by side (to be merged into report.py)."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def matrices(panels: Mapping[str, Sequence], path: str | Path, *, title: str = "", columns: int = 4) -> Path:
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
