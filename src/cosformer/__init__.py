"""Exact linear-cost attention for PyTorch: cosFormer and what it is compared with."""

from .nn import CosformerAttention, MixerAttention
from .ops import State, cosformer_attention, cosformer_stream

__version__ = "0.1.0"
__all__ = [
    "CosformerAttention",
    "MixerAttention",
    "State",
    "cosformer_attention",
    "cosformer_stream",
    "register",
]


def register() -> None:
    """Register cosFormer with Hugging Face transformers: attn_implementation="cosformer" and the Cosformer model types."""
    from . import hf  # noqa: F401  importing it registers; transformers is loaded only here
