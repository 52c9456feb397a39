"""Sizes of models by name: layers, width, heads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    feedforward: int | None = None  # None: four times the width; a gated MLP has as many parameters

    def __str__(self) -> str:
        return f"{self.layers} layers of width {self.width}, {self.heads} heads"


SIZES = {
    "toy": Size(2, 64, 2),
    "tiny": Size(4, 128, 4),
    "small": Size(6, 256, 4),
    "medium": Size(8, 512, 8),
    "base": Size(12, 768, 12),
    "large": Size(16, 1024, 16),
}
