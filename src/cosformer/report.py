"""From results.jsonl to pictures; imports nothing of the package, so any results file can be drawn anywhere."""

from pathlib import Path

INK, GRID = "#1f2328", "#d0d7de"
COLOURS = {"cosformer": "#0969da", "softmax": "#cf222e", "published": "#9a6700"}


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
