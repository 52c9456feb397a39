"""attn_implementation="cosformer:NAME": every mixer as the attention of a transformers architecture.

A mixer is a module: it may have parameters and random draws, which must exist before a model is trained or
its weights loaded. So `attach` gives every attention module of a model its mixer, as a submodule that is
saved with the rest, and switches to it.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .. import mixers
from .interface import is_causal_attention, key_mask, mask, max_positions, refuse


def attach(model: PreTrainedModel, name: str, **options) -> PreTrainedModel:
    """Make the mixer called `name` the attention of every layer; options are the mixer's. Returns the model.

    >>> attach(AutoModelForCausalLM.from_config(config), "performer", features=128)
    """
    enter_mixer(name)
    for module in model.modules():
        if hasattr(module, "is_causal") and hasattr(module, "config"):  # the mark of what calls the interface
            module.mixer = _build(module, name, options)
    model.set_attn_implementation(f"cosformer:{name}")
    return model


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    is_causal=None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention function over the module's own mixer."""
    refuse(module, kwargs)
    name = module.config._attn_implementation.partition(":")[2]
    mixer = getattr(module, "mixer", None)
    if mixer is None or mixer.name != name:
        raise ValueError(
            f'{type(module).__name__} has no mixer {name!r}; attach it: cosformer.hf.attach(model, "{name}")'
        )
    causal = is_causal_attention(module, is_causal)
    if causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"mixer {name!r} keeps no cache in this architecture; call the model with use_cache=False"
        )
    out = mixer(query, key, value, causal=causal, key_mask=key_mask(attention_mask, key))
    return out.transpose(1, 2), None


def enter_mixer(name: str) -> None:
    """Make a mixer known to transformers."""
    AttentionInterface.register(f"cosformer:{name}", attention)
    AttentionMaskInterface.register(f"cosformer:{name}", mask)


def _build(module: Any, name: str, options: dict) -> nn.Module:
    config = module.config
    heads = getattr(module, "num_heads", config.num_attention_heads)
    size = getattr(module, "head_dim", config.hidden_size // heads)
    mixer = mixers.build(name, heads=heads, head_dim=size, max_length=max_positions(config), **options)
    if mixer.reads_input:
        raise ValueError(
            f"mixer {name!r} reads the layer's input, which transformers hands to no attention function; "
            "attach one that does not, such as cosformer-ladder, or use a Cosformer model type"
        )
    weight = next(module.parameters())
    return mixer.to(weight.device, weight.dtype)
