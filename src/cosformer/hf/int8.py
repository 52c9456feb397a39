"""The weights of a decoder in int8, to write text with: a quarter of the bytes that a token must read.

weight[row] ~ scale[row] * int8[row]        scale[row] = max |weight[row]| / 127
"""

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration import CosformerConfig

Model = TypeVar("Model", bound=nn.Module)


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8 with a scale for each row. It is not trained, saved or loaded."""

    weight: Tensor
    scales: Tensor
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1) / 127
        rounded = (weight / torch.where(scales > 0, scales, 1.0)[:, None]).round()
        self.register_buffer("weight", rounded.to(torch.int8))
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype)) * self.scales.to(x.dtype)
        return y if self.bias is None else y + self.bias

    def _save_to_state_dict(self, *args, **kwargs) -> None:
        raise RuntimeError(
            "weights in int8 are not saved: save the model before to_int8, and call that again"
        )

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        raise RuntimeError("weights in int8 cannot be loaded into: load the model before to_int8")


def rounded(model: Model, weights: str) -> Model:
    """The model with its weights in float32, bfloat16 or, if it supports them, int8."""
    return to_int8(model) if weights == "int8" else model.to(getattr(torch, weights))


def to_int8(model: Model) -> Model:
    """Round the weights of all blocks and of the output layer, in place; embeddings and norms stay.

    Decoding then runs in the native kernel, which reads int8. All else goes through torch, which converts
    each weight back when it is used: correct, and slower than before.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, CosformerConfig):
        raise TypeError(f"model is a {type(model).__name__}; to_int8 takes a CosformerForCausalLM")
    # Gates, of another class, are left out: they are small, and decay rates depend on them.
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for name, linear in linears.items():
        if not torch.isfinite(linear.weight).all():
            raise ValueError(f"{name}.weight holds NaN or infinity, which int8 does not have")
    for name, linear in linears.items():
        model.set_submodule(name, Int8Linear(linear))
    config.tie_word_embeddings = False  # the output layer has weights of its own from here on
    return model.eval()
