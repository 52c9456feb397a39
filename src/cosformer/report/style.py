"""How mixers and numbers are shown: names, colours, markers and dashes; units and digits."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

# (light, dark) pairs: at least 3:1 against the page in their theme. Neighbours differ in lightness too, for the colour-blind,
# and no two mixers share both a marker and a dash.
PALETTE = [
    ("#0b5fc4", "#6cb0ff"),  # blue
    ("#c4401a", "#ff9166"),  # vermilion
    ("#59636e", "#aab4be"),  # grey
    ("#0f7f86", "#4fd1cf"),  # teal
    ("#7d3fb8", "#cda6ff"),  # purple
    ("#8a6100", "#e6b84a"),  # amber
    ("#b4327f", "#ff86c3"),  # pink
    ("#2a7d33", "#74d680"),  # green
    ("#6b4a35", "#d2a98c"),  # brown
]
MARKERS = "osD^vPX*<>pdh8"
DASHES = [(), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2)]


@dataclass(frozen=True)
class Look:
    label: str  # in tables and legends
    short: str  # in sentences
    colour: int  # an index of PALETTE
    marker: str
    dash: tuple[float, ...]


# name: (label, name in a sentence, colour). The order is the order of tables and legends.
KNOWN = {
    "cosformer": ("cosFormer (recommended: gated decay)", "cosFormer (recommended)", 0),
    "cosformer-paper": ("cosFormer (paper)", "cosFormer (paper)", 3),
    "cosformer-ladder": ("cosFormer (constant decay)", "cosFormer (constant decay)", 7),
    "cosformer-no-cosine": (
        "cosFormer (recommended, without the cosine)",
        "cosFormer (without the cosine)",
        8,
    ),
    "softmax+rope": ("softmax + RoPE", "softmax + RoPE", 1),
    "softmax": ("softmax", "softmax", 2),
    "relu": ("ReLU (cosFormer without re-weighting)", "ReLU", 6),
    "leaky_relu": ("LeakyReLU", "LeakyReLU", 5),
    "identity": ("identity", "identity", 8),
    "elu": ("Linear Transformer (elu + 1)", "Linear Transformer", 4),
    "performer": ("Performer", "Performer", 5),
    "rfa": ("RFA", "RFA", 6),
    "linformer": ("Linformer", "Linformer", 7),
    "nystrom": ("Nyströmformer", "Nyströmformer", 8),
    "reformer": ("Reformer", "Reformer", 2),
    "bigbird": ("BigBird", "BigBird", 3),
    "sparse": ("Sparse Transformer", "Sparse Transformer", 4),
    "local": ("local attention", "local attention", 7),
}


def looks(mixers: Iterable[str]) -> dict[str, Look]:
    """The looks of these mixers, in the order in which they are shown; one not known is shown as it is named, after the others.

    What a known mixer looks like does not depend on the others, so it is the same in every report.
    """
    found = list(dict.fromkeys(mixers))
    shown = [name for name in KNOWN if name in found] + [name for name in found if name not in KNOWN]
    unknown = {name: i for i, name in enumerate((n for n in shown if n not in KNOWN), len(KNOWN))}
    made = {}
    for name in shown:
        label, short, colour = KNOWN.get(name, (name, name, unknown.get(name, 0) % len(PALETTE)))
        place = list(KNOWN).index(name) if name in KNOWN else unknown[name]
        made[name] = Look(label, short, colour, MARKERS[place % len(MARKERS)], DASHES[place % len(DASHES)])
    return made


UNITS = {"test_loss": "loss", "loss_per_token": "loss", "eval_loss": "loss"}


def percent(metric: str) -> bool:
    """Whether a metric is a share of 1, shown in per cent."""
    return metric == "f1" or metric.endswith("accuracy")


def metric_name(metric: str) -> str:
    name = UNITS.get(metric, metric).replace("_", " ")
    return f"{name}, %" if percent(metric) else name


def score(metric: str, value: float, spread: float | None = None) -> str:
    """A value of a metric, with its spread where there is one."""
    if percent(metric):
        text, margin = f"{100 * value:.1f}", spread and f"{100 * spread:.1f}"
    elif metric == "perplexity" and value < 1000:
        text, margin = f"{value:.2f}", spread and f"{spread:.2f}"
    elif abs(value) < 100:
        text, margin = f"{value:.3f}", spread and f"{spread:.3f}"
    else:
        text, margin = digits(value), spread and digits(spread)
    return text if spread is None else f"{text} ± {margin or '0'}"


def digits(value: float) -> str:
    """Three significant digits, thousands separated, no exponent where a person would write none."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.1e}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{round(value, 2 - math.floor(math.log10(abs(value)))):,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text and places > 2 else text


def count(value: float) -> str:
    """A number of things: 950, 12.4 K, 1.84 M, 3.1 G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "K")):
        if value >= size:
            return f"{digits(value / (1e3 if letter == 'K' else size))} {letter}"
    return f"{value:,.0f}"


def mib(value: float) -> str:
    return f"{digits(value)} MiB" if value < 1024 else f"{digits(value / 1024)} GiB"


def times(ratio: float) -> str:
    return f"{ratio:.1f}×" if ratio < 100 else f"{ratio:,.0f}×"


def listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""
