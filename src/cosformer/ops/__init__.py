"""The operators: cosFormer attention, and the core of linear attention it shares with other mixers."""

from .cosformer import cosformer_attention, cosformer_stream
from .linear import State, linear_attention, linear_read, linear_state, linear_stream

__all__ = [
    "State",
    "cosformer_attention",
    "cosformer_stream",
    "linear_attention",
    "linear_read",
    "linear_state",
    "linear_stream",
]
