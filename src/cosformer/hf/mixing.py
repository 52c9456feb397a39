"""The token mixing of a linear layer: its decay rates, the operator, and the state it leaves in the cache."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..ops import cosformer_attention
from .cache import CosformerCache, StateLayer
from .decay import DecayGate, ladder
from .interface import padding


class SelfMixing(nn.Module):
    """cosFormer self-attention with the configured horizon and decay; q (B, H, L, D), k, v (B, Hk, L, .) -> (B, L, H * E)."""

    def __init__(self, config, *, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal, self.positions = heads, causal, config.max_position_embeddings
        self.horizon = config.max_position_embeddings if config.horizon is None else config.horizon
        self.constant = config.decay == "ladder"
        if config.decay == "gated":
            self.gate = DecayGate(config.hidden_size, heads, max_positions=self.positions)
        else:
            self.gate = None

    def forward(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: StateLayer | None = None,
    ) -> Tensor:
        """x (B, L, C) is the layer's input, which the gate reads; key_mask (B, L or more) ends at the last token."""
        seen = 0 if cache is None else cache.get_seq_length()
        if cu_seqlens is None and seen + x.shape[1] - 1 > self.horizon:
            raise ValueError(
                f"{seen + x.shape[1]} tokens reach past the horizon of {self.horizon:g}; use shorter texts, or a model whose "
                "config.horizon (by default max_position_embeddings) is larger, or math.inf"
            )
        if key_mask is not None:
            key_mask = padding(key_mask[:, -x.shape[1] :])
        options = {"horizon": self.horizon, "key_mask": key_mask, "decay": self.rates(x)}
        if cache is not None:
            out = cache.stream(q, k, v, **options)
        else:
            out = cosformer_attention(q, k, v, causal=self.causal, cu_seqlens=cu_seqlens, **options)
        return out.transpose(1, 2).flatten(2)

    def rates(self, x: Tensor) -> Tensor | None:
        if self.gate is not None:
            return self.gate(x)
        return ladder(self.heads, self.positions, device=x.device) if self.constant else None


class CosformerPreTrained:
    """What every Cosformer model adds to its architecture's base class: how gates start, which cache `generate` makes."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, DecayGate):
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def new_cache(self) -> CosformerCache:
        return CosformerCache(self.config.layer_types)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs) -> None:
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            asked = f"cache_implementation={generation_config.cache_implementation!r}"
            raise ValueError(f"{asked}: this model keeps states of constant size; leave it out")
        cache = model_kwargs["past_key_values"] = self.new_cache()
        if generation_mode.value == "assisted_generation" or generation_config.is_assistant:
            getattr(cache, "self_attention_cache", cache).activate_past_recording()


def refuse_weights(config, kwargs: dict) -> None:
    asked = kwargs.get("output_attentions")
    if config.output_attentions if asked is None else asked:
        raise ValueError("output_attentions=True: linear layers never form their attention weights")


def check_padding_mask(name: str, mask: Tensor | None) -> None:
    if mask is not None and mask.ndim != 2:
        raise ValueError(f"{name} must be a padding mask (batch, length) with linear layers; got shape {tuple(mask.shape)}")


def check_cache(cache) -> None:
    if cache is not None and not isinstance(cache, CosformerCache):
        raise TypeError(f"past_key_values must be the cache model.new_cache() makes; got {type(cache).__name__}")
