"""How mixers and numbers are shown, everywhere: names, colours, markers and dashes; units and digits."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

# (light, dark) pairs: at least 3:1 against the page in their theme. Neighbours differ in lightness too, for
# the colour-blind, and no two mixers share both a marker and a dash.
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
MARKERS = [  # SVG paths around the origin
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",  # circle
    "M-3.5-3.5h7v7h-7z",  # square
    "M0-4.5L4.5 3.5H-4.5z",  # triangle
    "M0-5L5 0 0 5-5 0z",  # diamond
    "M0 4.5L-4.5-3.5H4.5z",  # triangle, point down
    "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",  # plus
    "M0-5L1.3-1.8 4.8-1.5 2.1.7 2.9 4 0 2.2-2.9 4-2.1.7-4.8-1.5-1.3-1.8z",  # star
]
DASHES = ["", "7 3", "2 2.5", "8 3 2 3"]  # stroke-dasharray

# A mixer's name and the index of its colour, in the order of tables and legends.
KNOWN = {
    "cosformer": ("cosFormer", 0),
    "cosformer-hybrid": ("cosFormer hybrid", 4),
    "cosformer-hybrid+rope": ("cosFormer hybrid + RoPE", 6),
    "cosformer-paper": ("cosFormer (paper)", 3),
    "softmax+rope": ("softmax + RoPE", 1),
    "softmax": ("softmax", 2),
    "published": ("cosFormer (paper's code)", 5),
    "cosformer-ladder": ("cosFormer (constant decay)", 7),
    "cosformer-cosine": ("cosFormer (with the cosine)", 8),
    "relu": ("ReLU (paper, no cosine)", 6),
    "leaky_relu": ("LeakyReLU", 5),
    "identity": ("identity", 8),
    "elu": ("Linear Transformer", 4),
    "performer": ("Performer", 5),
    "rfa": ("RFA", 6),
    "linformer": ("Linformer", 7),
    "nystrom": ("Nyströmformer", 8),
    "reformer": ("Reformer", 2),
    "bigbird": ("BigBird", 3),
    "sparse": ("Sparse Transformer", 4),
    "local": ("local attention", 7),
    "polynomial": ("polynomial", 1),
    "llama": ("transformers' Llama", 2),
    "forgetting": ("softmax + gated decay", 7),
}
NOTHING = "–"


@dataclass(frozen=True)
class Look:
    name: str
    colour: int  # an index of PALETTE
    marker: str
    dash: str


def name(mixer: str) -> str:
    """A mixer's display name: a known one, one with a part ("+rope"), or a model's layers ("a*3, b")."""
    if mixer in KNOWN:
        return KNOWN[mixer][0]
    base, variant, changes = mixer.partition(":")  # of bench --models
    if variant:
        return f"{name(base)}, {changes.replace(',', ', ')}"
    if "," in mixer:
        return ", ".join(name(layers.strip()) for layers in mixer.split(","))
    base, _, number = mixer.rpartition("*")
    if base and number.isdecimal():
        return f"{number} × {name(base)}"
    base, _, part = mixer.rpartition("+")
    if base in KNOWN:
        return f"{name(base)} + {'RoPE' if part == 'rope' else part}"
    return mixer


def looks(mixers: Iterable[str]) -> dict[str, Look]:
    """The looks of these mixers, in the order they are shown, unknown ones last.

    A known mixer's look does not depend on the others, so it is the same in every report.
    """
    asked = dict.fromkeys(mixers)
    order = list(KNOWN | asked)
    made = {}
    for mixer in sorted(asked, key=order.index):
        place = order.index(mixer)
        _, colour = KNOWN.get(mixer, ("", (place + 1) % len(PALETTE)))
        made[mixer] = Look(name(mixer), colour, MARKERS[place % len(MARKERS)], DASHES[place % len(DASHES)])
    return made


def percent(metric: str) -> bool:
    """Whether a metric is a share of 1, shown in per cent."""
    return metric == "f1" or metric.endswith("accuracy")


def metric_name(metric: str) -> str:
    word = "loss" if metric in ("test_loss", "loss_per_token") else metric.replace("_", " ")
    return f"{word}, %" if percent(metric) else word


def score(metric: str, value: float) -> str:
    """A metric's value with the digits that matter."""
    if percent(metric):
        return f"{100 * value:.{2 if value >= 0.98 else 1}f}"  # 99.95 is not 100
    if metric == "perplexity" and value < 1000:
        return f"{value:.2f}"
    return f"{value:.3f}" if abs(value) < 100 else digits(value)


def digits(value: float) -> str:
    """Three significant digits, thousands separated, an exponent only where a person would write one."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.1e}"
    places = 2 - math.floor(math.log10(abs(value)))
    text = f"{round(value, places):,.{max(0, places)}f}"
    return text.rstrip("0").rstrip(".") if places > 2 else text


def count(value: float) -> str:
    """A count, or a tick of a linear axis: 0.5, 950, 12.4 K, 1.843 M, 3.1 G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:.4g} {letter}"
    return f"{value:,g}"


def mib(value: float) -> str:
    return f"{digits(value)} MiB" if value < 1024 else f"{digits(value / 1024)} GiB"


def times(ratio: float) -> str:
    return f"{ratio:.1f}×" if 0.1 <= ratio < 100 else f"{digits(ratio)}×"


def listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def ident(*words: object) -> str:
    """Letters, digits and hyphens: a file name, and part of an id."""
    text = "-".join(map(str, words))
    return "-".join("".join(c if c.isascii() and c.isalnum() else " " for c in text).split()).lower() or "x"
