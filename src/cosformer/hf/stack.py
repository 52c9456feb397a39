"""The stack of blocks that decoder and encoder share: Llama's, with a mixer where a layer's attention was.

Blocks are pre-norm, with a gated MLP. Llama's rotary positions are not used: a mixer that wants them has them
itself (softmax+rope). Dropout, which Llama's blocks lack, is on the embeddings and on the output of attention
and MLP.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
)

from ..ops.norm import rms_norm
from ..ops.shard import LIMIT
from .parallel import shard_of
from .pretrained import (
    CosformerPreTrained,
    attend,
    check_call,
    check_learned_positions,
    check_mask_shape,
    new_interior,
)
from .rows import check_places, check_unbroken, packed_boundaries, places_of, unpadded, without_padding
from .step import next_token


class CosformerSelfAttention(LlamaAttention):
    """Llama's projections around a mixer, causal if the config's layers are."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = config.causal_layers
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        sizes = {"heads": heads, "kv_heads": kv_heads, "size": self.head_dim}
        self.interior = new_interior(
            config, config.layer_mixers, layer_idx, causal=config.causal_layers, **sizes
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden_states, key_mask=None, past_key_values=None, cu_seqlens=None, shard=None, **kwargs
    ) -> tuple[Tensor, None]:
        given = {"key_mask": key_mask, "cache": past_key_values, "cu_seqlens": cu_seqlens, "shard": shard}
        return self.dropout(self.o_proj(attend(self, hidden_states, **given))), None


class CosformerMLP(LlamaMLP):
    """Llama's gated MLP, with dropout."""

    def __init__(self, config):
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


class CosformerRMSNorm(LlamaRMSNorm):
    """Llama's norm, in one pass over memory."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def asks_for_more(config: Any, asked: dict, *, but: tuple[str, ...] = ()) -> bool:
    """Whether a call wants more than the last hidden state or logits, or wants them in another form."""
    form = asked.get("return_dict")
    if config.output_hidden_states or (config.return_dict if form is None else form) is False:
        return True
    known = ("return_dict", *but)
    return any(v is not None and v is not False for name, v in asked.items() if name not in known)


class CosformerStack(CosformerPreTrained, LlamaModel):
    """Embeddings, blocks, a last norm."""

    sequence_group: ProcessGroup | None = None  # the processes that share a sequence ...
    sequence_limit = LIMIT  # ... and the bytes a softmax layer may gather; sequence_parallel sets both
    parts = (LlamaDecoderLayer, CosformerSelfAttention, CosformerMLP, CosformerRMSNorm)  # of a block: step.py

    def __init__(self, config):
        super().__init__(config)
        for i, layer in enumerate(self.layers):
            layer.self_attn, layer.mlp = CosformerSelfAttention(config, i), CosformerMLP(config)
            layer.input_layernorm, layer.post_attention_layernorm = self.new_norm(), self.new_norm()
        self.norm = self.new_norm()
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ):
        check_call(self.config, kwargs, past_key_values, attention_mask=attention_mask)
        x = self._embedded(input_ids, inputs_embeds)
        marks = kwargs.get("cu_seq_lens_q")
        boundaries = self._boundaries(marks, attention_mask, position_ids, past_key_values)
        cache = self._cache(past_key_values, use_cache, boundaries)
        cached = 0 if cache is None else cache.get_seq_length()
        check_mask_shape("attention_mask", attention_mask, *x.shape[:2], cached=cached)
        group = self.sequence_group
        shard = None if group is None else shard_of(self, x, attention_mask, position_ids, cache)
        if self.config.positions == "learned":
            before = cached if shard is None else shard.offset
            if position_ids is None and attention_mask is not None:
                position_ids = unpadded(attention_mask, x.shape[1], before, shard)
            elif position_ids is None and boundaries is not None:
                position_ids = places_of(boundaries, x.shape)
            x = x + self.position_vectors(x, position_ids, before)
        by_kernel = shard is None and not asks_for_more(self.config, kwargs)
        if by_kernel and cache is not None and x.shape[1] == 1:
            hidden = next_token(self, x, cache, attention_mask)
            if hidden is not None:
                return BaseModelOutputWithPast(self.norm(hidden), cache)
        packed, shape = None, x.shape
        if by_kernel and cache is None and attention_mask is not None and not self._own_horizons():
            packed = without_padding(attention_mask)
        if packed is not None:
            x, attention_mask, boundaries = packed.join(x), None, packed.cu_seqlens
        out = super().forward(
            past_key_values=cache,
            inputs_embeds=self.dropout(x),
            use_cache=cache is not None and use_cache is not False,
            attention_mask=x.new_empty(0, 0, 0, 0),  # else Llama reads positions, and waits
            key_mask=attention_mask,  # not as Llama's attention_mask: under tracing that becomes L x L
            cu_seqlens=boundaries,
            shard=shard,
            **kwargs,
        )
        if packed is not None:
            out.last_hidden_state = packed.split(out.last_hidden_state, shape)
        return out

    def _embedded(self, ids: Tensor | None, embeds: Tensor | None) -> Tensor:
        if (ids is None) == (embeds is None):
            told = "both" if embeds is not None else "neither"
            raise ValueError(f"give input_ids or inputs_embeds, one of them; got {told}")
        if ids is not None and ids.ndim != 2:
            raise ValueError(f"input_ids must be (batch, length); got shape {tuple(ids.shape)}")
        return self.embed_tokens(ids) if embeds is None else embeds

    def _boundaries(
        self, marks: Tensor | None, mask: Tensor | None, position_ids: Tensor | None, cache: Any
    ) -> Tensor | None:
        """Where packed sequences begin: as `marks` (cu_seq_lens_q) says, or else the positions; None if each
        row is one sequence. Of a sequence in several processes `shard_of` reads the positions."""
        if marks is not None and (cache is not None or mask is not None):
            beside = "attention_mask" if cache is None else "past_key_values"
            told = "cu_seq_lens_q marks packed sequences, which have no padding and no cache"
            raise ValueError(f"{told}: leave {beside} out")
        if self.sequence_group is not None:
            if marks is not None and position_ids is None:
                told = "cu_seq_lens_q of a sequence in several processes"
                raise ValueError(f"{told}: give position_ids instead")
            return None
        if mask is None and cache is None:
            return packed_boundaries(position_ids) if marks is None else marks
        if mask is None:
            check_unbroken(position_ids, cache.get_seq_length())
        elif cache is None:
            check_places(position_ids, mask)
        return None

    def _cache(self, given: Any, use_cache: bool | None, boundaries: Tensor | None) -> Any:
        """The cache of this call: the given one, a new one, or None."""
        if boundaries is not None and use_cache:
            raise ValueError(
                "use_cache=True with packed sequences: a cache holds one sequence a row; pass use_cache=False"
            )
        if use_cache is None:
            one_each = boundaries is None and self.sequence_group is None
            use_cache = self.config.use_cache and not self.training and one_each
        return self.new_cache() if use_cache and given is None else given

    def _own_horizons(self) -> bool:
        """Whether a mixer's horizon is the length of its call, which packing would change."""
        return any(layer.self_attn.interior.mixer.own_horizon for layer in self.layers)

    @staticmethod
    def places(mask: Tensor | None, position_ids: Tensor | None, seen: int) -> Tensor:
        """The position of each row's next token, (B, 1) or one for all, if positions are learned."""
        if position_ids is not None:
            return position_ids
        return torch.full((1, 1), seen, device="cpu") if mask is None else unpadded(mask, 1, seen, None)

    def new_norm(self) -> CosformerRMSNorm:
        return CosformerRMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)

    def position_vectors(self, inputs: Tensor, position_ids: Tensor | None, seen: int) -> Tensor:
        most = self.embed_positions.num_embeddings
        length = seen + inputs.shape[1]  # known without looking, so that nothing waits for a GPU
        if position_ids is None:
            position_ids = torch.arange(seen, length, device=inputs.device)[None]
        elif position_ids.is_cpu and not torch.compiler.is_compiling():
            length = int(position_ids.max()) + 1 if position_ids.numel() else 0
        else:
            length = 0  # left to the embedding's own check
        check_learned_positions("the text", length, most, cached=seen)
        return self.embed_positions(position_ids)
