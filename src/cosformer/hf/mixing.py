"""The token mixing of a linear layer: its decay rates, the operator, and the state it leaves in the cache.

Sequences packed into the rows of a batch are marked by positions that start again; `packed_boundaries` finds them, and no
layer looks across one.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .. import mixers
from ..decay import DecayGate, ladder
from ..ops import cosformer_attention
from .cache import CosformerCache, StateLayer
from .interface import padding, reaches


def self_mixing(config, *, heads: int, causal: bool) -> nn.Module:
    """The module that mixes q (B, H, L, D), k, v (B, Hk, L, .) -> (B, L, H * E) in a linear layer."""
    kind = SelfMixing if config.mixer == "cosformer" else OtherMixing
    return kind(config, heads=heads, causal=causal)


class SelfMixing(nn.Module):
    """cosFormer self-attention with the configured horizon and decay; q (B, H, L, D), k, v (B, Hk, L, .) -> (B, L, H * E)."""

    def __init__(self, config, *, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal, self.positions = heads, causal, config.max_position_embeddings
        self.horizon = config.max_position_embeddings if config.horizon is None else config.horizon
        self.constant = config.decay == "ladder"
        gated = config.decay == "gated"
        self.gate = DecayGate(config.hidden_size, heads, max_positions=self.positions) if gated else None

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
        """x (B, L, C) is the layer's input, which the gate reads; key_mask (B, L or more) ends at the last token.

        cu_seqlens are the boundaries of packed sequences in the batch's rows laid end to end.
        """
        tokens = x.shape[1] + (0 if cache is None else cache.get_seq_length())
        if cu_seqlens is None and not reaches(tokens, self.horizon, causal=self.causal):
            raise ValueError(
                f"{tokens} tokens reach past the horizon of {self.horizon:g}; use shorter texts, or a model whose "
                "config.horizon (by default max_position_embeddings) is larger, or math.inf"
            )
        if key_mask is not None:
            key_mask = padding(key_mask[:, -x.shape[1] :])
        options = {"horizon": self.horizon, "key_mask": key_mask, "decay": self.rates(x)}
        if cache is not None:
            out = cache.stream(q, k, v, **options)
        elif cu_seqlens is not None:
            q, k, v = (end_to_end(t) for t in (q, k, v))
            if options["decay"] is not None and options["decay"].ndim == 3:
                options["decay"] = end_to_end(options["decay"].unsqueeze(-1)).squeeze(-1)
            out = cosformer_attention(q, k, v, causal=self.causal, cu_seqlens=cu_seqlens, **options)
            return out.transpose(1, 2).flatten(2).view(*x.shape[:2], -1)
        else:
            out = cosformer_attention(q, k, v, causal=self.causal, **options)
        return out.transpose(1, 2).flatten(2)

    def rates(self, x: Tensor) -> Tensor | None:
        if self.gate is not None:
            return self.gate(x)
        return ladder(self.heads, self.positions, device=x.device) if self.constant else None


class OtherMixing(nn.Module):
    """Any other mixer of the registry in the same place, for comparisons; it keeps no cache."""

    def __init__(self, config, *, heads: int, causal: bool):
        super().__init__()
        self.causal = causal
        self.mixer = registry_mixer(config, heads=heads)
        self.mixer.refuse(causal=causal)

    def forward(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, key_mask=None, cu_seqlens=None, cache=None
    ) -> Tensor:
        if cache is not None:
            raise ValueError(
                f"mixer {self.mixer.name!r} keeps no cache in this model; call it with use_cache=False"
            )
        if key_mask is not None:
            key_mask = padding(key_mask)
        if cu_seqlens is None:
            return self.mixer(q, k, v, causal=self.causal, key_mask=key_mask).transpose(1, 2).flatten(2)
        q, k, v = (end_to_end(t) for t in (q, k, v))
        parts = []
        for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):  # mixers know one sequence a row
            parts.append(self.mixer(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], causal=self.causal))
        return torch.cat(parts, 2).transpose(1, 2).flatten(2).view(*x.shape[:2], -1)


def registry_mixer(config, *, heads: int) -> mixers.Mixer:
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    positions = "rope" if config.positions == "rope" else None
    return mixers.build(
        config.mixer,
        heads=heads,
        head_dim=size,
        max_length=config.max_position_embeddings,
        positions=positions,
        **(config.mixer_options or {}),
    )


def end_to_end(t: Tensor) -> Tensor:
    """The rows of a batch laid end to end, (B, H, L, D) -> (1, H, B * L, D); a view of a projection stays one."""
    return t.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2)


def packed_boundaries(position_ids: Tensor | None) -> Tensor | None:
    """Where sequences packed into rows begin, with the rows laid end to end, told from positions that start again.

    None where every row is one plain sequence.
    """
    if position_ids is None:
        return None
    if torch.compiler.is_compiling():
        raise ValueError(
            "position_ids may mark packed sequences, which a compiled graph cannot look for; "
            "also pass attention_mask (one sequence a row) or cu_seq_lens_q (packed)"
        )
    starts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if not bool(starts.any()):
        return None
    begins = torch.nn.functional.pad(starts, (1, 0), value=True).flatten().nonzero().flatten()
    return torch.cat([begins, begins.new_tensor([position_ids.numel()])])


Base: Any = object  # beside an architecture's PreTrainedModel, whose methods are extended here


class CosformerPreTrained(Base):
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

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, *args, **kwargs
    ) -> None:
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            return super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, *args, **kwargs
            )
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            asked = f"cache_implementation={generation_config.cache_implementation!r}"
            raise ValueError(f"{asked}: this model keeps states of constant size; leave it out")
        cache = model_kwargs["past_key_values"] = self.new_cache()
        if generation_mode.value == "assisted_generation" or generation_config.is_assistant:
            own: Any = getattr(cache, "self_attention_cache", cache)
            own.activate_past_recording()


def check_learned_positions(name: str, length: int, most: int, *, cached: int = 0) -> None:
    """Stop where a text has more positions than the `most` with a learned vector; the embedding's own error says nothing of it."""
    if length > most:
        seen = f", {cached} of them in the cache" if cached else ""
        raise ValueError(
            f"{name} has {length} tokens{seen}, but max_position_embeddings is {most} and each position has a learned vector; "
            f"cut the text (tokenizer(..., truncation=True, max_length={most})), or use a model where it is larger"
        )


def refuse_weights(config, kwargs: dict) -> None:
    asked = kwargs.get("output_attentions")
    if config.output_attentions if asked is None else asked:
        raise ValueError("output_attentions=True: linear layers never form their attention weights")


def check_padding_mask(name: str, mask: Tensor | None) -> None:
    if mask is not None and mask.ndim != 2:
        raise ValueError(
            f"{name} must be a padding mask (batch, length) with linear layers; got shape {tuple(mask.shape)}"
        )


def check_cache(cache) -> None:
    if cache is not None and not isinstance(cache, CosformerCache):
        raise TypeError(
            f"past_key_values must be the cache model.new_cache() makes; got {type(cache).__name__}"
        )
