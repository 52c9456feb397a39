"""Exact linear-cost attention for PyTorch."""

from .ops import State, cosformer_attention, cosformer_stream

__version__ = "0.1.0.dev0"
__all__ = ["State", "cosformer_attention", "cosformer_stream"]
