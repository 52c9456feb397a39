"""Attention matrices as pictures: a PNG of several with their scales, or one pixel a weight for the page."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Matrix = Sequence[Sequence[float | None]]
BRIGHT = 0.99  # quantile at the top of the scale: one bright point must not darken the rest


def _shades(matrix: Any) -> tuple[dict[str, Any], str]:
    """The colours of a matrix, for matplotlib, and at which ends their scale is cut off.

    Dark to bright; blue over white to red where weights have signs.
    """
    values = [float(x) for line in matrix for x in line if x == x]
    sizes = sorted(map(abs, values))
    high = sizes[int(BRIGHT * (len(sizes) - 1))] or 1.0
    cut = sizes[-1] > high
    if min(values) < -high / 20:
        return {"cmap": "RdBu_r", "vmin": -high, "vmax": high}, "both" if cut else "neither"
    return {"cmap": "magma", "vmin": 0.0, "vmax": high}, "max" if cut else "neither"


def numbers(matrix: Matrix) -> list[list[float]]:
    """The matrix with NaN where there is no weight."""
    return [[float("nan") if x is None else float(x) for x in line] for line in matrix]


def draw(panels: Mapping[str, Any], path: str | Path, *, title: str = "", columns: int = 4) -> Path:
    """Draw (L, S) arrays, one panel for each title, to a PNG.

    Every panel has its own scale, shown beside it: what matters is a mechanism's pattern, not how thinly it
    spreads. NaN is left blank.
    """
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    size = (2.9 * columns + 0.2, 2.75 * rows + (0.35 if title else 0))
    figure = Figure(figsize=size, layout="constrained", dpi=160)
    with matplotlib.rc_context({"font.size": 8, "axes.titlesize": 9, "axes.linewidth": 0.5}):
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis, (name, array) in zip(axes.flat, panels.items(), strict=False):
            colours, extend = _shades(array)
            image = axis.imshow(array, interpolation="nearest", **colours)
            axis.set(title=name, facecolor="0.93")
            axis.set(xticks=[0, len(array[0]) - 1], yticks=[0, len(array) - 1])
            bar = figure.colorbar(image, ax=axis, fraction=0.045, pad=0.03, extend=extend)
            bar.outline.set_linewidth(0.4)
            for part in (axis, bar.ax):
                part.tick_params(labelsize=6, width=0.4, length=2)
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


def data_uri(matrix: Matrix) -> str:
    """A PNG with one pixel per weight, as a data URI; transparent where there is no weight."""
    import matplotlib
    from matplotlib.image import imsave

    values = numbers(matrix)
    colours, _ = _shades(values)
    colours["cmap"] = matplotlib.colormaps[colours["cmap"]].with_extremes(bad=(0, 0, 0, 0))
    file = io.BytesIO()
    same: dict[str, Any] = {"Software": None}  # the version would change the bytes of the same results
    imsave(file, values, **colours, format="png", metadata=same)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
