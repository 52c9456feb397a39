"""attn_implementation="cosformer" and "cosformer:NAME": our attention in the architectures of transformers.

transformers looks up two functions under one name: the attention itself, and one that makes its mask. Both
are needed: without the second a padded batch arrives with no mask at all. What cannot be honoured is refused,
never ignored.

"cosformer" is the operator, with options from `config.cosformer`, a plain dict saved with the config:

    horizon   the distance at which a key stops mattering; the architecture's maximum positions if absent
    decay     None (the paper's operator), "ladder", or a list of rates, one per head

Cross attention has no cosine and no decay: its queries and keys are on different axes, and transformers does
not tell an attention function the target position of a cached query.

"cosformer:NAME" is any mixer. A mixer is a module: it may have parameters and random draws, which must exist
before a model is trained or its weights loaded. So `attach` gives every attention module of a model its
mixer, as a submodule that is saved with the rest, and switches to it.
"""

import math
import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.utils import logging

from .. import mixers
from ..decay import Decay, DecaySpec, span_of
from ..ops import linear_attention
from ..ops.checks import horizon_list
from .parallel import refuse_others
from .reach import check_reach, max_positions
from .rows import check_beginnings, no_left_padding

OPTIONS = ("horizon", "decay")
REFUSED = {  # keyword: what it asks for
    "sliding_window": "a sliding window",
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "position_bias": "a bias on the scores",
    "head_mask": "a mask on the heads",
    "cache": "a paged cache",
    "cu_seq_lens_q": "packed sequences",
}
logger = logging.get_logger(__name__)


def enter(implementation: str) -> None:
    """Register both functions with transformers under a name."""
    AttentionInterface.register(implementation, attention)
    AttentionMaskInterface.register(implementation, mask)


def attach(model: PreTrainedModel, name: str, **options) -> PreTrainedModel:
    """Make the mixer called `name` the attention of every layer; options are the mixer's. Returns the model.

    >>> attach(AutoModelForCausalLM.from_config(config), "performer", features=128)
    """
    # modules that call the interface have both
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "is_causal") and hasattr(m, "config")]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer that calls transformers' attention interface: "
            f"mixer {name!r} would never be used; attach it to another architecture, such as Llama or BERT"
        )
    enter(f"cosformer:{name}")
    for module in layers:
        module.mixer = _build(module, name, options)
    model.set_attn_implementation(f"cosformer:{name}")
    return model


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


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention function, with no weights to return.

    q (B, H, L, D), k, v (B, Hk, S, .), key mask (B, S) -> (B, L, H, E). `scaling` is what the architecture
    multiplies scores by; the operator's output does not depend on it.
    """
    refuse(module, kwargs)
    if dropout:
        logger.warning_once(
            "cosformer attention forms no weights to drop: "
            f"the dropout of {dropout:g} in {type(module).__name__} is not applied; set it to 0 in the config"
        )
    causal = is_causal_attention(module, is_causal)
    given: dict[str, Any] = {"causal": causal, "key_mask": checked(attention_mask, key)}
    name = module.config._attn_implementation.partition(":")[2]
    if name:
        usual = query.shape[-1] ** -0.5  # as softmax has it
        if scaling is not None and not math.isclose(scaling, usual):
            query = query * (scaling / usual)
        out = by_mixer(module, name, query, key, value, **given)
    else:
        out = by_operator(module, query, key, value, **given)
    return out.transpose(1, 2), None


def by_operator(
    module: Any, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None
) -> Tensor:
    options: dict[str, Any] = {"horizon": math.inf}
    if not is_cross_attention(module, causal=causal):
        options = self_options(module.config, heads=q.shape[1], device=q.device)
    check_reach(k.shape[2], options["horizon"], causal=causal)
    offset = k.shape[2] - q.shape[2] if causal else 0  # a cache holds the keys before the queries
    options |= {"causal": causal, "q_offset": offset, "key_mask": key_mask}
    return linear_attention(q, k, v, relu=True, **options)


def by_mixer(
    module: Any, name: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None
) -> Tensor:
    mixer = getattr(module, "mixer", None)
    if mixer is None or mixer.name != name:
        raise ValueError(
            f'{type(module).__name__} has no mixer {name!r}; attach it: cosformer.hf.attach(model, "{name}")'
        )
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"mixer {name!r} keeps no cache in this architecture; call the model with use_cache=False"
        )
    if mixer.left_padding is not True:
        tokens = k.shape[2]
        check_beginnings("attention_mask", key_mask, tokens, tokens, why=no_left_padding(mixer))
    return mixer(q, k, v, causal=causal, key_mask=key_mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs,
) -> Tensor | None:
    """transformers' mask function: the padding mask (B, S), True = keep, or None where nothing is padded."""
    if not torch.compiler.is_compiling():
        kind: Any = type(kwargs.get("config"))
        check_calls_interface(kind)
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        alone = attention_mask is None and isinstance(q_offset, int) and q_length == kv_length  # no cache
        if torch.compiler.is_compiling() and alone and _is_joined(mask_function, kwargs):
            rows = torch.arange(batch_size, device=kwargs.get("device"))
            last = torch.full_like(rows, q_length - 1)
            whole = mask_function(rows, torch.zeros_like(rows), last, torch.zeros_like(rows))
            torch._assert_async(whole.all(), PACKED)  # a graph cannot raise from Python
            return None
        # Another pattern. Some architectures make masks that no layer uses, so it is refused only where a
        # layer uses it: `checked` knows it by its shape, and it holds one element.
        return torch.empty((), dtype=torch.bool, device=kwargs.get("device")).expand(
            batch_size, 1, q_length, kv_length
        )
    if isinstance(q_offset, Tensor) or (
        mask_function is causal_mask_function and q_offset + q_length != kv_length
    ):
        raise ValueError(
            "cosformer attention needs a dynamic cache, whose last key is the last query's; "
            "this one is preallocated"
        )
    if attention_mask is None:
        return None
    if attention_mask.shape[-1] != kv_length:
        raise ValueError(
            f"attention_mask has length {attention_mask.shape[-1]}, but there are {kv_length} keys"
        )
    return padding(attention_mask)


def _is_joined(mask_function, kwargs: dict) -> bool:
    """Whether a pattern may be the one that transformers makes under tracing, where it cannot see positions:
    causal, and within packed sequences. Then a row is one sequence if its last token sees the first. A
    pattern that a caller adds sets `use_vmap`."""
    return mask_function.__name__ == "and_mask" and not kwargs.get("use_vmap")


PACKED = (
    "position_ids mark packed sequences, or a window is shorter than the text, which cosformer attention "
    "cannot honour in this architecture"
)


@lru_cache  # it reads source text
def check_calls_interface(config: type) -> None:
    """Refuse an architecture that asks for a mask but attends by itself: without a mask it would see all.

    One that does not ask for a mask either cannot be refused here; docs/hugging-face.md says how to tell.
    """
    try:
        known: Any = MODEL_MAPPING.get(config, ())
    except (AttributeError, ValueError):  # transformers lists some classes that it does not have
        return
    for model in known if isinstance(known, tuple) else (known,):
        # transformers' own guess also says no to sources that call it but have other attention, too
        calls = hasattr(sys.modules.get(model.__module__), "ALL_ATTENTION_FUNCTIONS")
        if not calls and not model._can_set_attn_implementation():
            raise ValueError(
                f"{model.__name__} does not call transformers' attention interface but attends by itself, "
                'so attn_implementation="cosformer" does not reach its layers; use another architecture, '
                "such as Llama or BERT"
            )


def padding(attention_mask: Tensor) -> Tensor | None:
    """A 0/1 or bool mask as bool, or None if it keeps everything.

    Values are not read in a graph, which has none, nor on a device, where that would mean waiting.
    """
    keep = attention_mask.to(torch.bool)
    looks = keep.is_cpu and not torch.compiler.is_compiling()
    return None if looks and bool(keep.all()) else keep


def checked(attention_mask: Tensor | None, key: Tensor) -> Tensor | None:
    """What `mask` made, as the operator takes it; anything but a padding mask is refused."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        wanted, got = (key.shape[0], key.shape[2]), tuple(attention_mask.shape)
        raise ValueError(
            f"attention_mask must be a padding mask (batch, keys) = {wanted} with cosformer attention; "
            f"got shape {got}, another pattern (made by hand, a window, chunks, packed sequences)"
        )
    return attention_mask.to(torch.bool)


def refuse(module: nn.Module, kwargs: dict) -> None:
    """Raise if a layer asks for something that has no meaning here."""
    refuse_others()
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} asks for {what} ({name}), which cosformer attention cannot honour"
            )
    if kwargs.get("output_attentions"):
        raise ValueError(
            'output_attentions=True: cosformer attention forms no weights; use attn_implementation="eager"'
        )


def is_causal_attention(module: nn.Module, given: bool | None) -> bool:
    """Whether attention is causal: as the call or module says, unless the config says no."""
    causal = getattr(module, "is_causal", True) if given is None else given
    return bool(causal) and getattr(module.config, "is_causal", True) is not False


def is_cross_attention(module: nn.Module, *, causal: bool) -> bool:
    """Whether the keys come from another sequence, judging by the attributes of transformers' modules."""
    marked = getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__
    return marked or (not causal and bool(getattr(module, "is_decoder", False)))


def self_options(config, *, heads: int, device: torch.device) -> dict:
    """The operator's arguments from `config.cosformer`."""
    given = getattr(config, "cosformer", None) or {}
    if not isinstance(given, dict):
        raise TypeError(f"config.cosformer must be a dict or None; got {given!r}")
    if unknown := set(given) - set(OPTIONS):
        raise ValueError(f"config.cosformer has unknown {sorted(unknown)}; it may have {', '.join(OPTIONS)}")
    decay, horizon = given.get("decay"), given.get("horizon")
    if decay == "gated":
        raise ValueError(
            'config.cosformer["decay"] is "gated"; accepted are None, "ladder" or rates '
            "(a gate has parameters, so it lives in the Cosformer model types)"
        )
    horizon = max_positions(config) if horizon is None else horizon
    if decay is None:
        return {"horizon": horizon, "decay": None}
    spec = tuple(decay) if isinstance(decay, list) else decay
    several = list | dict | set  # what `_rates` caches must be hashable
    if isinstance(spec, several) or (isinstance(spec, tuple) and any(isinstance(r, several) for r in spec)):
        raise TypeError(
            'config.cosformer["decay"] must be None, "ladder", a rate, or a list of rates, one per head; '
            f"got {decay!r}"
        )
    span = span_of(horizon_list(horizon, heads), otherwise=math.inf)
    if span == math.inf and decay == "ladder":  # without a cosine it spans all positions
        span = max_positions(config)
    return {"horizon": horizon, "decay": _rates(spec, heads, span, device)}


@lru_cache  # made once, not at every call
@torch.inference_mode(False)
def _rates(spec: DecaySpec, heads: int, span: float, device: torch.device) -> Tensor | None:
    return Decay(spec, heads=heads, span=span, width=1).to(device).rates()
