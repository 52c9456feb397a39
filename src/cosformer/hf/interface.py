"""attn_implementation="cosformer": cosFormer attention in the architectures transformers already has.

transformers asks for two functions under one name: the attention itself, and the mask it wants to be given.
Both are needed: without the second a padded batch arrives with no mask at all. What this operator cannot
honour is refused, never ignored.

Options stand in `config.cosformer`, a plain dict that is saved with the config:

    horizon   the distance at which a key stops mattering; the architecture's maximum positions if absent
    decay     None (the paper's operator), "ladder", or a list of rates, one per head

Cross attention takes no cosine and no decay: its queries and keys stand on different axes, and transformers
does not tell an attention function which target position a cached query has.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.utils import logging

from ..decay import Decay, DecaySpec, span_of
from ..ops import linear_attention
from ..ops.checks import horizon_list
from .parallel import refuse_others

OPTIONS = ("horizon", "decay")
REFUSED = {  # keyword: what it asks for
    "sliding_window": "a sliding window",
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "position_bias": "a bias on the scores",
    "head_mask": "a mask on the heads",
    "cache": "a paged cache",
}
logger = logging.get_logger(__name__)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention function, with no weights to return.

    q (B, H, L, D), k, v (B, Hk, S, .), key mask (B, S) -> (B, L, H, E)
    """
    refuse(module, kwargs)
    if dropout:
        logger.warning_once(
            "cosformer attention forms no weights to drop: "
            f"the dropout of {dropout:g} in {type(module).__name__} is not applied; set it to 0 in the config"
        )
    causal = is_causal_attention(module, is_causal)
    cross = is_cross_attention(module, causal=causal)
    options = (
        {"horizon": math.inf}
        if cross
        else self_options(module.config, heads=query.shape[1], device=query.device)
    )
    check_reach(key.shape[2], options["horizon"], causal=causal)
    offset = key.shape[2] - query.shape[2] if causal else 0  # a cache holds the keys before the queries
    out = linear_attention(
        query,
        key,
        value,
        relu=True,
        causal=causal,
        q_offset=offset,
        key_mask=key_mask(attention_mask, key),
        **options,
    )
    return out.transpose(1, 2), None


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
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        # Another pattern. Some architectures make masks that no layer uses, so this one is refused where a
        # layer does: its shape says what it is, and it holds one element.
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


def padding(attention_mask: Tensor) -> Tensor | None:
    """A 0/1 or bool mask as bool, or None if it keeps everything.

    That is not asked of a graph, which has no values, nor of a device, where looking would be waiting.
    """
    keep = attention_mask.to(torch.bool)
    looks = keep.is_cpu and not torch.compiler.is_compiling()
    return None if looks and bool(keep.all()) else keep


def key_mask(attention_mask: Tensor | None, key: Tensor) -> Tensor | None:
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
    """Stop where a layer asks for something that has no meaning here."""
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
    """Whether a query sees only the keys before it: as the call or module says, unless the config denies."""
    causal = getattr(module, "is_causal", True) if given is None else given
    return causal and getattr(module.config, "is_causal", True) is not False


def is_cross_attention(module: nn.Module, *, causal: bool) -> bool:
    """Whether the keys come from another sequence, told from the marks transformers' modules carry."""
    marked = getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__
    return marked or (not causal and bool(getattr(module, "is_decoder", False)))


def self_options(config, *, heads: int, device: torch.device) -> dict:
    """The operator's arguments from `config.cosformer`."""
    given = getattr(config, "cosformer", None) or {}
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
    span = span_of(horizon_list(horizon, heads), otherwise=math.inf)
    if span == math.inf and decay == "ladder":  # without a cosine the positions say how far
        span = max_positions(config)
    return {"horizon": horizon, "decay": _rates(spec, heads, span, device)}


@lru_cache  # made once, not at every call
@torch.inference_mode(False)
def _rates(spec: DecaySpec, heads: int, span: float, device: torch.device) -> Tensor | None:
    return Decay(spec, heads=heads, span=span, width=1, device=device).rates()


def check_reach(tokens: int, horizon, *, causal: bool) -> None:
    """Stop where the operator would, but say where a model's horizon is set.

    What is no horizon at all is left to the operator.
    """
    if isinstance(horizon, int | float) and horizon > 0 and not reaches(tokens, horizon, causal=causal):
        raise ValueError(
            f"{tokens} tokens reach past the horizon of {horizon:g}; use shorter texts, or set a larger "
            f"horizon: config.cosformer = {{'horizon': {tokens}}} (math.inf drops the cosine; "
            "by default, the maximum positions)"
        )


def reaches(tokens: int, horizon: float, *, causal: bool) -> bool:
    """Whether a text's first and last token are near enough.

    A key exactly at the horizon may only stand behind its query.
    """
    return tokens - 1 <= horizon if causal else tokens - 1 < horizon


def max_positions(config) -> int:
    """How many positions an architecture has."""
    if positions := getattr(config, "max_position_embeddings", None):
        return positions
    if hasattr(config, "image_size") and hasattr(config, "patch_size"):
        sizes = (s if isinstance(s, list | tuple) else (s, s) for s in (config.image_size, config.patch_size))
        patches = math.prod(image // patch for image, patch in zip(*sizes, strict=True))
        return patches + 1  # and the class token
    raise ValueError(
        f"{type(config).__name__} does not say how many positions it has; "
        "set it: config.cosformer = {'horizon': ...}"
    )


def enter() -> None:
    """Make both functions known to transformers."""
    AttentionInterface.register("cosformer", attention)
    AttentionMaskInterface.register("cosformer", mask)
