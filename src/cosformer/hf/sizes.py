"""Sizes of models by name: layers, width, heads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    feedforward: int | None = None  # None: four times the width; a gated MLP has as many parameters

    @property
    def wide(self) -> int:
        return self.feedforward or 4 * self.width

    def fields(self) -> dict[str, int]:
        """The config fields of a stack of this size; a gated MLP has three matrices, not two."""
        gated = 32 * round(self.wide / 48)
        return {
            "hidden_size": self.width,
            "intermediate_size": gated,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
        }

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
