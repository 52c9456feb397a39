"""What every Cosformer model adds to its architecture's base class: interiors, a cache, refusals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..decay import Decay, Gate
from ..layer import Interior, ShortConvolution
from ..ops.shard import Shard
from .cache import CosformerCache, StreamLayer
from .interface import padding, reaches
from .parallel import refuse_others

Base: Any = object  # beside an architecture's PreTrainedModel, whose methods are extended here


def interior(
    config, names: list[str], layer: int, *, heads: int, kv_heads: int, size: int, causal: bool
) -> Interior:
    """The interior of a layer of a stack with the mixers `names`, as the config says.

    What surrounds the mixers is the same in all layers, by default the most that any of them wants: a hybrid
    whose softmax layers have the convolution and the norms, too, learns to recall much sooner.
    """
    mixer = config.mixer_of(names[layer], heads=heads, size=size)
    mixer.refuse(causal=causal)
    with torch.device("meta"):
        among = [config.mixer_of(name, heads=heads, size=size) for name in set(names)]
    width, norms = config.short_conv, config.qk_norm
    return Interior(
        mixer,
        kv_heads=kv_heads,
        centred=not causal,
        short_conv=max(other.short_conv for other in among) if width is None else width,
        qk_norm=any(other.qk_norm for other in among) if norms is None else norms,
        output_gate=config.output_gate,
    )


def attend(
    interior: Interior,
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None = None,
    cache: StreamLayer | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """A layer's tokens through its interior: x (B, L, C), q, k, v (B, L, .) -> (B, L, .).

    key_mask (B, L or more) ends at the last token. With a cache these are the next tokens of its stream.
    """
    refuse_others()
    mixer, tokens = interior.mixer, x.shape[1] + (0 if cache is None else cache.get_seq_length())
    if shard is not None:
        tokens = shard.total if shard.places is None else 0  # of packed ones the operator knows
    if cu_seqlens is None and not reaches(tokens, mixer.reach, causal=causal):
        raise ValueError(
            f"{tokens} tokens reach past the horizon of {mixer.reach:g}; use shorter texts, or a model whose "
            "config.horizon is larger, or math.inf (no cosine)"
        )
    if shard is not None:  # whether there is a mask must not depend on the part of it that is here
        key_mask = None if key_mask is None else key_mask.bool()
        out, kept = interior.sharded(x, q, k, v, shard, causal=causal, key_mask=key_mask)
        if cache is not None:
            cache.kept, cache.is_initialized = kept, True
        return out
    key_mask = None if key_mask is None else padding(key_mask[:, -x.shape[1] :])
    if cache is None:
        return interior(x, q, k, v, causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens)
    if mixer.streaming is not True:
        raise ValueError(
            f"mixer {mixer.name!r} keeps no cache ({mixer.streaming}); call it with use_cache=False"
        )
    return cache.stream(interior, x, q, k, v, key_mask=key_mask)


class CosformerPreTrained(Base):
    """Beside an architecture's base class: how new parts start, which cache `generate` makes."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ShortConvolution):
            init.copy_(module.weight, module.identity())
        elif isinstance(module, Gate):
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, Decay):
            if module.constant is not None:
                init.copy_(module.constant, module.start())
            if module.log_rates is not None:
                init.copy_(module.log_rates, module.start().log())
        else:
            super()._init_weights(module)

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        """transformers asks which attention function and mask these models want. The layers mix by
        themselves, and want the padding mask as it is; another name, such as sdpa, would let through what is
        made for softmax alone."""
        if requested_attention not in (None, "cosformer"):
            raise ValueError(
                f"attn_implementation={requested_attention!r}: a Cosformer model's layers mix as "
                "config.mixer says "
                '(mixer="softmax+rope" is softmax attention); leave it out'
            )
        return "cosformer"

    def new_cache(self) -> CosformerCache:
        return CosformerCache(len(self.config.layer_mixers))

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, *args, **kwargs
    ) -> None:
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            upstream = super()._prepare_cache_for_generation
            return upstream(generation_config, model_kwargs, generation_mode, *args, **kwargs)
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            asked = f"cache_implementation={generation_config.cache_implementation!r}"
            raise ValueError(f"{asked}: this model keeps what its mixers keep; leave it out")
        cache = model_kwargs["past_key_values"] = self.new_cache()
        if generation_mode.value == "assisted_generation" or generation_config.is_assistant:
            own: Any = getattr(cache, "self_attention_cache", cache)
            own.activate_past_recording()


def check_learned_positions(name: str, length: int, most: int, *, cached: int = 0) -> None:
    """Stop where a text has more positions than learned vectors; the embedding's own error is no help."""
    if length > most:
        seen = f", {cached} of them in the cache" if cached else ""
        raise ValueError(
            f"{name} has {length} tokens{seen}, but max_position_embeddings is {most} and each position "
            f"has a learned vector; cut the text (tokenizer(..., truncation=True, max_length={most})), "
            "or use a model where it is larger"
        )


def refuse_weights(config, kwargs: dict) -> None:
    asked = kwargs.get("output_attentions")
    if config.output_attentions if asked is None else asked:
        raise ValueError("output_attentions=True: these layers never form their attention weights")


def check_padding_mask(name: str, mask: Tensor | None) -> None:
    if mask is not None and mask.ndim != 2:
        raise ValueError(f"{name} must be a padding mask (batch, length) here; got shape {tuple(mask.shape)}")


def check_cache(cache) -> None:
    if cache is not None and not isinstance(cache, CosformerCache):
        raise TypeError(
            f"past_key_values must be the cache model.new_cache() makes; got {type(cache).__name__}"
        )
