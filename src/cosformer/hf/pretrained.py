"""What the Cosformer models add to their architectures: how a layer attends, how parts start, refusals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..decay import Decay, Gate
from ..layer import Interior, ShortConvolution, Tokens
from ..ops.shard import Shard
from .cache import CosformerCache
from .interface import padding
from .parallel import refuse_others
from .reach import reaches
from .rows import check_beginnings, no_left_padding

Base: Any = object  # a mixin for an architecture's PreTrainedModel, whose methods it extends


def new_interior(
    config, names: list[str], layer: int, *, heads: int, kv_heads: int, size: int, causal: bool
) -> Interior:
    """The interior of one layer of a stack with the mixers `names`, as the config says.

    The parts around the mixers are the same in all layers, by default the most that any mixer wants: a hybrid
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
    layer: Any,
    x: Tensor,
    *,
    key_mask: Tensor | None,
    cache: CosformerCache | None,
    cu_seqlens: Tensor | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """An attention layer's input x (B, L, C) through its q_proj, k_proj, v_proj and interior: (B, L, .).

    With a cache x is the next tokens of its stream. key_mask (B, L or more) ends at the last token.
    """
    refuse_others()
    interior, causal, mixer = layer.interior, layer.is_causal, layer.interior.mixer
    stream: Any = None if cache is None else cache.layers[layer.layer_idx]
    length = x.shape[1] + (0 if stream is None else stream.get_seq_length())
    if shard is not None:
        length = shard.total if shard.places is None else 0  # the operator checks packed ones
    if cu_seqlens is None and not reaches(length, mixer.reach, causal=causal):
        raise ValueError(
            f"{length} tokens reach past the horizon of {mixer.reach:g}; use shorter texts, or a model whose "
            "config.horizon is larger, or math.inf (no cosine)"
        )
    if mixer.left_padding is not True and shard is None:
        check_beginnings("attention_mask", key_mask, length, x.shape[1], why=no_left_padding(mixer))
    if key_mask is not None and shard is None:
        key_mask = padding(key_mask[:, -x.shape[1] :])
    elif key_mask is not None:  # whether there is a mask must not depend on this process's part
        key_mask = key_mask.bool()
    tokens = Tokens(x, layer.q_proj(x), layer.k_proj(x), layer.v_proj(x), key_mask)
    if shard is not None:
        out, after = interior.sharded(tokens, shard, causal=causal)
        if stream is not None:
            stream.keep(after)
        return out
    if stream is None:
        return interior(tokens, causal=causal, cu_seqlens=cu_seqlens)
    if mixer.streaming is not True:
        raise ValueError(
            f"mixer {mixer.name!r} keeps no cache ({mixer.streaming}); call it with use_cache=False"
        )
    return stream.stream(interior, tokens)


class CosformerPreTrained(Base):
    """A mixin for an architecture's base class: how new parts start, which cache `generate` makes."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ShortConvolution | Decay):
            module.reset_parameters(init.copy_)  # which leaves loaded weights alone
        elif isinstance(module, Gate):
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        """transformers asks which attention function and mask these models want. The layers mix by
        themselves, and want the plain padding mask; another name, such as sdpa, would let through what is
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
    """Raise if a text has more positions than learned vectors; the embedding's own error is no help."""
    if length > most:
        seen = f", {cached} of them in the cache" if cached else ""
        raise ValueError(
            f"{name} has {length} tokens{seen}, but max_position_embeddings is {most} and each position "
            f"has a learned vector; cut the text (tokenizer(..., truncation=True, max_length={most})), "
            "or use a model where it is larger"
        )


def check_call(config, asked: dict, cache=None, **masks: Tensor | None) -> None:
    """Refuse what no Cosformer model does, whatever its architecture."""
    weights = asked.get("output_attentions")
    if config.output_attentions if weights is None else weights:
        raise ValueError("output_attentions=True: these layers never form their attention weights")
    for name, mask in masks.items():
        if mask is not None and mask.ndim != 2:
            shape = tuple(mask.shape)
            raise ValueError(f"{name} must be a padding mask (batch, length) here; got shape {shape}")
    if cache is not None and not isinstance(cache, CosformerCache):
        raise TypeError(
            f"past_key_values must be the cache model.new_cache() makes; got {type(cache).__name__}"
        )
    if cache is not None and len(cache.layers) != len(config.layer_mixers):
        raise ValueError(
            f"past_key_values is of {len(cache.layers)} layers, and this model has "
            f"{len(config.layer_mixers)}; pass the cache that this model made"
        )


def check_mask_shape(name: str, mask: Tensor | None, rows: int, length: int, *, cached: int = 0) -> None:
    """Raise unless a mask is of these tokens, with or without those in the cache."""
    if mask is None:
        return
    if mask.shape[1] not in (cached + length, length):
        seen = f", {cached} of them in the cache, or {length}" if cached else ""
        raise ValueError(
            f"{name} must have the length {cached + length}, one for each token{seen}; "
            f"got {tuple(mask.shape)}"
        )
    if mask.shape[0] != rows:
        raise ValueError(f"{name} must have {rows} rows, as the tokens have; got {tuple(mask.shape)}")
