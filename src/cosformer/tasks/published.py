"""Long-Range Arena's published sizes: the same for every mixer, or the comparison is not one.

From the paper's appendix as the project's notes have it. The public configuration files disagree with it in places (ListOps
6 layers and 2,048; Pathfinder 1 layer of width 128), and with one another; a recipe may override them, for all mixers alike.
"""

from .contract import Published

SOURCE = "Tay et al. 2021, Long Range Arena"
RSQRT, COSINE = "constant * linear_warmup * rsqrt_decay", "constant * linear_warmup * cosine_decay"


def _sizes(
    layers: int,
    width: int,
    attention_width: int,
    heads: int,
    feedforward: int,
    pooling: str,
    length: int,
    batch: int,
    steps: int,
    learning_rate: float,
    schedule: str,
    warmup: int,
    weight_decay: float,
) -> Published:
    return Published(
        layers=layers,
        width=width,
        attention_width=attention_width,
        heads=heads,
        feedforward=feedforward,
        pooling=pooling,
        length=length,
        batch=batch,
        steps=steps,
        learning_rate=learning_rate,
        schedule=schedule,
        warmup=warmup,
        weight_decay=weight_decay,
        source=SOURCE,
    )


PUBLISHED = {  # layers, width, q/k/v width, heads, feedforward, pooling, length, batch, steps, rate, schedule, warmup, decay
    "listops": _sizes(4, 512, 512, 8, 1024, "cls", 2000, 32, 5_000, 0.05, RSQRT, 1_000, 0.1),
    "text": _sizes(4, 256, 256, 4, 1024, "cls", 4096, 32, 20_000, 0.05, RSQRT, 8_000, 0.1),
    "retrieval": _sizes(4, 128, 128, 4, 512, "cls", 4000, 32, 5_000, 0.05, RSQRT, 8_000, 0.1),
    "image": _sizes(
        1, 128, 64, 8, 128, "cls", 1024, 256, 200 * (45_000 // 256), 5e-4, COSINE, 45_000 // 256, 0.0
    ),
    "pathfinder": _sizes(
        4, 32, 16, 4, 32, "mean", 1024, 512, 200 * (160_000 // 512), 1e-3, COSINE, 160_000 // 512, 0.0
    ),
}
