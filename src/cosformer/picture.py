"""cosformer picture: the attention matrices of any mixers on the same q and k, as one PNG."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .mixers import build, names, weights
from .report import style

PANELS = ["softmax", "cosformer-paper", "relu"]


def example(length: int, head_dim: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Queries and keys (1, 1, length, head_dim) like those of text: slowly drifting topics."""
    generator = torch.Generator().manual_seed(seed)
    topic, drift = torch.randn(head_dim, generator=generator), []
    for _ in range(length):
        topic = 0.85 * topic + math.sqrt(1 - 0.85**2) * torch.randn(head_dim, generator=generator)
        drift.append(topic)
    x = torch.stack(drift)
    noise = torch.randn(2, length, head_dim, generator=generator)
    q, k = 0.8 * x + 0.4 * noise
    return q[None, None], k[None, None]


def draw(
    mixers: Sequence[str],
    path: str | Path,
    *,
    length: int = 64,
    head_dim: int = 32,
    causal: bool = False,
    seed: int = 0,
) -> Path:
    """Draw one panel per mixer, and one of the cosine of the distance, to the PNG at `path`.

    >>> draw(["softmax", "cosformer-paper", "relu"], "attention.png")
    """
    from .report import matrices  # matplotlib is an extra

    if not Path(path).parent.is_dir():
        raise ValueError(f"out is {path}, but there is no folder {Path(path).parent}")
    if length < 1:
        raise ValueError(f"length must be at least 1; got {length}")
    q, k = example(length, head_dim, seed=seed)
    panels = {}
    for name in mixers:
        mixer = build(name, heads=1, head_dim=head_dim, max_length=length)
        with torch.no_grad():
            matrix = weights(mixer, q, k, x=q[:, 0], causal=causal)  # with one head, q can serve as the input
            panels[style.name(name)] = matrix[0, 0].float()
    lag = torch.arange(length)[:, None] - torch.arange(length)
    panels["cosine of the distance"] = torch.cos(math.pi / 2 * lag / length)
    if causal:  # leave the future blank: zeros would look like small weights
        panels = {name: matrix.masked_fill(lag < 0, math.nan) for name, matrix in panels.items()}
    return matrices({name: matrix.numpy() for name, matrix in panels.items()}, path)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        prog="cosformer picture", description="Draw the attention matrices of mixers on the same q and k."
    )
    p.add_argument("mixers", nargs="*", default=PANELS, help=f"any of {', '.join(names())}")
    p.add_argument("--out", type=Path, default=Path("attention.png"))
    p.add_argument("--length", type=int, default=64)
    p.add_argument("--head-dim", type=int, default=32)
    p.add_argument("--causal", action="store_true")
    p.add_argument("--seed", type=int, default=0)
    args = vars(p.parse_args(argv))
    try:
        print(draw(args.pop("mixers"), args.pop("out"), **args))
    except (OSError, ValueError) as wrong:
        raise SystemExit(f"cosformer picture: {wrong}") from None
