"""Everything drawn with matplotlib: pictures of bench results, the page's panels, attention matrices."""

import base64
import io
import itertools
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .figures import Line, Panel
from .style import PALETTE, Look

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
    rows = [
        r
        for r in rows
        if r.get("work") == "training" and r["causal"] and not r["decay"] and r["dtype"] == "float32"
    ]
    if not rows:
        raise ValueError(
            "there is no causal float32 training run among the results, so there is nothing to draw"
        )
    best = "cosformer native" if any(r["operator"] == "cosformer native" for r in rows) else "cosformer torch"
    names = {best: ("cosFormer", "cosformer"), "softmax": ("softmax (SDPA)", "softmax")}
    names["published"] = ("cosFormer, published algorithm", "published")
    curves = {
        label: (
            [r for r in rows if r["operator"] == name],
            {"color": COLOURS[colour], "marker": "o", "linewidth": 2},
        )
        for name, (label, colour) in names.items()
    }
    _against_length(
        curves,
        path,
        title="Causal training",
        size=(9, 3.7),
        legend={"loc": "outside lower center", "ncols": 3},
    )


def growth_plot(rows: list[dict], path: Path) -> None:
    """Time and peak memory of every mixer; cosFormer and softmax stand out."""
    curves = {}
    for name, mark in zip(dict.fromkeys(r["mixer"] for r in rows), itertools.cycle("osD^v<>pPX*hHd8")):
        known = (
            {"color": COLOURS[name], "linewidth": 2.5, "zorder": 3}
            if name in COLOURS
            else {"linewidth": 1, "alpha": 0.8}
        )
        curves[name] = ([r for r in rows if r["mixer"] == name], {"marker": mark, **known})
    _against_length(
        curves,
        path,
        title="Training cost of every mixer",
        size=(10, 4.4),
        legend={"loc": "outside right center"},
    )


def _against_length(
    curves: dict[str, tuple[list[dict], dict]], path: Path, *, title: str, size, legend: dict
) -> None:
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
    figure = Figure(
        figsize=(2.9 * columns + 0.2, 2.75 * rows + (0.35 if title else 0)), layout="constrained", dpi=160
    )
    with matplotlib.rc_context({"font.size": 8, "axes.titlesize": 9, "axes.linewidth": 0.5}):
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis, (name, array) in zip(axes.flat, panels.items(), strict=False):
            low, high, most = _range(array)
            signed = low < -high / 20
            colours = (
                {"cmap": "RdBu_r", "vmin": -high, "vmax": high}
                if signed
                else {"cmap": "magma", "vmin": 0, "vmax": high}
            )
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


PANEL_STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine lays out the same
    "font.size": 9.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "cosformer",
    "axes.unicode_minus": False,
    "text.parse_math": False,  # a $ in a name is a $
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": GRID,
    "path.simplify": False,
}


def _draw(panel: Panel, looks: Mapping[str, Look], *, legend: bool):
    """A matplotlib figure of the panel; the page has a legend of its own, a file needs one inside."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    mixers = [m for m in looks if any(line.mixer == m for line in panel.lines)]
    room = 0.25 + 0.19 * len(mixers) if legend else 0.0
    height = 3.05 + room + 0.16 * panel.title.count("\n")
    figure = Figure(figsize=(5, height))
    # Fixed margins: the axes of panels side by side are in line.
    axis = figure.add_axes((0.11, (0.5 + room) / height, 0.86, 2.3 / height))
    drawn: dict[str, Any] = {}
    for line in sorted(
        panel.lines, key=lambda line: mixers.index(line.mixer), reverse=True
    ):  # the first mixers on top
        drawn[line.mixer] = _line(axis, panel, line, looks[line.mixer])
    for x, y in panel.crossings:
        axis.plot(
            [x],
            [y],
            color=INK,
            marker="o",
            markersize=13,
            markerfacecolor="none",
            markeredgewidth=1.2,
            zorder=5,
        )
    if panel.log:
        axis.set(xscale="log", yscale="log")
        lengths = sorted({x for line in panel.lines for x, _ in line.points})
        axis.set_xticks(lengths[:: -(-len(lengths) // 6)])
        low, high = axis.get_ylim()
        if high < 4 * low:  # a flat line must not fill the panel with noise
            axis.set_ylim(low / 2, 2 * high)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        axis.minorticks_off()
    else:
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.yaxis.set_major_locator(MaxNLocator(6))
        if panel.scatter:
            axis.margins(0.14)
        if panel.ceiling:
            axis.set_ylim(top=panel.ceiling)
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:,g}" if panel.log else _plain(value))
        )
    axis.set_title(panel.title, loc="left", fontsize=9.5, pad=10)
    axis.set_xlabel(panel.x)
    axis.grid(color=GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.patch.set_visible(False)
    axis.patch.set_visible(False)
    if legend:
        figure.patch.set(visible=True, facecolor="white")
        handles = [drawn[m] for m in mixers]
        figure.legend(
            handles,
            [looks[m].label for m in mixers],
            loc="lower center",
            frameon=False,
            fontsize=9,
            handlelength=3.5,
        )
    return figure


def _line(axis, panel: Panel, line: Line, look: Look):
    colour = PALETTE[look.colour][0]
    if panel.scatter:
        for x, low, high in line.band:
            axis.plot([x, x], [low, high], color=colour, linewidth=1.5)
        return axis.plot(
            *zip(*line.points), linestyle="none", marker=look.marker, markersize=9, color=colour
        )[0]
    if line.band:
        axis.fill_between(*zip(*line.band), color=colour, alpha=0.15, linewidth=0)
    every = max(1, len(line.points) // 8)
    style = {"color": colour, "linewidth": 2, "marker": look.marker, "markersize": 5, "markevery": every}
    return axis.plot(*zip(*line.points), dashes=look.dash or (None, None), **style)[0]


def _plain(value: float) -> str:
    """A tick of a linear axis: 0.5, 20, 1.5 M."""
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e4, " K")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == ' K' else size):g}{letter}"
    return f"{value:,g}"


def inline(panel: Panel, looks: Mapping[str, Look], label: str) -> str:
    """The panel as an SVG element of the page: its colours are the page's variables, its text is in the page's font."""
    text = _save(panel, looks, "svg", legend=False).decode()
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text[text.index("<svg") :], flags=re.S)
    box = re.search(r'viewBox="([^"]*)"', text)
    body = text[text.index(">") + 1 :]
    body = re.sub(r"font: ((?:\w+ )*?)([\d.]+px)[^;\"]*", r"font-size: \2", body)
    body = re.sub(r'\bid="', f'id="{panel.id}-', body)
    body = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{panel.id}-", body)
    variables = {light: f"var(--c{i})" for i, (light, _) in enumerate(PALETTE)} | {
        INK: "var(--ink)",
        GRID: "var(--grid)",
    }
    body = re.sub(r"#[0-9a-f]{6}\b", lambda m: variables.get(m[0], m[0]), body)
    body = re.sub(r"\n\s*", "\n", body).strip()
    return f'<svg class="plot" viewBox="{box[1] if box else ""}" role="img" aria-label="{label}">\n{body}'


def save(panel: Panel, looks: Mapping[str, Look], folder: Path) -> None:
    """The panel as PNG and SVG files, light, with a legend."""
    for kind in ("png", "svg"):
        (folder / f"{panel.id}.{kind}").write_bytes(_save(panel, looks, kind, legend=True))


def _save(panel: Panel, looks: Mapping[str, Look], kind: str, *, legend: bool) -> bytes:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's matplotlibrc must not show in a report
        matplotlib.rcParams.update(PANEL_STYLE)
        file = io.BytesIO()
        # The date and the version would make the same results give different files.
        clean: dict[str, Any] = dict.fromkeys(("Date", "Creator") if kind == "svg" else ("Software",), None)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Glyph .* missing from font"
            )  # a name in a script DejaVu lacks; the page has it
            _draw(panel, looks, legend=legend).savefig(file, format=kind, dpi=160, metadata=clean)
    return file.getvalue()


def matrix_uri(matrix: list[list[float | None]]) -> str:
    """A matrix as a PNG data URI, one pixel a weight; scaled as `matrices` scales, blank where there is none."""
    import matplotlib
    from matplotlib.image import imsave

    values = [[float("nan") if x is None else float(x) for x in row] for row in matrix]
    low, high, _ = _range(values)
    signed = low < -high / 20
    colours = matplotlib.colormaps["RdBu_r" if signed else "magma"].with_extremes(bad=(0, 0, 0, 0))
    file = io.BytesIO()
    clean: dict[str, Any] = {"Software": None}
    imsave(file, values, vmin=-high if signed else 0, vmax=high, cmap=colours, format="png", metadata=clean)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def swatch(look: Look, *, line: bool) -> str:
    """A mixer's line and marker for the page's legend."""
    from matplotlib.markers import MarkerStyle

    style = MarkerStyle(look.marker)
    outlines: Any = style.get_path().transformed(style.get_transform()).to_polygons()
    scale = 4.5 if line else 5.5
    shapes = [
        "M" + "L".join(f"{18 + 2 * scale * x:.1f} {7 - 2 * scale * y:.1f}" for x, y in o) + "Z"
        for o in outlines
    ]
    dashes = f' stroke-dasharray="{" ".join(f"{2 * d:g}" for d in look.dash)}"' if look.dash else ""
    stroke = f'<path d="M0 7H36" stroke="currentColor" stroke-width="2.5"{dashes}/>' if line else ""
    shape = f'<path d="{"".join(shapes)}" fill="currentColor"/>'
    return f'<svg class="swatch c{look.colour}" viewBox="0 0 36 14" aria-hidden="true">{stroke}{shape}</svg>'
