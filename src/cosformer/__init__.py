"""Exact linear-cost attention for PyTorch: cosFormer and what it is compared with."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import mixers
    from .nn import CosformerAttention, MixerAttention
    from .ops import State, cosformer_attention, cosformer_stream

__version__ = "0.2.0.dev0"
__all__ = [
    "CosformerAttention",
    "MixerAttention",
    "State",
    "cosformer_attention",
    "cosformer_stream",
    "mixers",
]

_HOME = {"CosformerAttention": "nn", "MixerAttention": "nn"}  # every other name is in ops


def __getattr__(name: str) -> Any:
    """Import names on first use, so that `cosformer --help` does not load torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "mixers":
        return import_module(".mixers", __name__)
    value = getattr(import_module(f".{_HOME.get(name, 'ops')}", __name__), name)
    globals()[name] = value  # later lookups skip this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
