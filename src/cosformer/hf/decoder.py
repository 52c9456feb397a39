"""The decoder: Llama's architecture with linear layers.

A linear layer takes no rotary positions: the cosine and the decay say where a key stands. The softmax layers of a hybrid do.
"""

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaModel

from .configuration import CosformerConfig
from .mixing import (
    CosformerPreTrained,
    check_cache,
    check_padding_mask,
    packed_boundaries,
    refuse_weights,
    self_mixing,
)


class CosformerDecoderAttention(LlamaAttention):
    """Llama's projections around cosFormer mixing."""

    def __init__(self, config: CosformerConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.mixing = self_mixing(config, heads=config.num_attention_heads, causal=True)

    def forward(
        self, hidden_states, past_key_values=None, key_mask=None, cu_seqlens=None, **kwargs
    ) -> tuple[Tensor, None]:
        size, projections = self.head_dim, (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (proj(hidden_states).unflatten(-1, (-1, size)).transpose(1, 2) for proj in projections)
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        out = self.mixing(hidden_states, q, k, v, key_mask=key_mask, cu_seqlens=cu_seqlens, cache=cache)
        return self.o_proj(out), None


class CosformerModel(CosformerPreTrained, LlamaModel):
    config: CosformerConfig

    def __init__(self, config: CosformerConfig):
        super().__init__(config)
        for i, kind in enumerate(config.layer_types):
            if kind == "linear_attention":
                self.layers[i].self_attn = CosformerDecoderAttention(config, i)
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
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
        refuse_weights(self.config, kwargs)
        check_padding_mask("attention_mask", attention_mask)
        boundaries = None
        if past_key_values is None and attention_mask is None:
            boundaries = kwargs.get("cu_seq_lens_q")
            boundaries = packed_boundaries(position_ids) if boundaries is None else boundaries
        if boundaries is not None and use_cache:
            raise ValueError(
                "use_cache=True with packed sequences: a cache holds one sequence a row; pass use_cache=False"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and boundaries is None
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        check_cache(past_key_values)
        kwargs["cu_seqlens"] = boundaries
        kwargs["key_mask"] = attention_mask
        if self.config.positions == "learned":
            inputs_embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            inputs_embeds = inputs_embeds + self.position_vectors(
                inputs_embeds, position_ids, past_key_values
            )
            input_ids = None
        if "full_attention" not in self.config.layer_types:
            attention_mask = position_ids = None  # only softmax layers read them, and their mask is quadratic
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def position_vectors(self, inputs: Tensor, position_ids: Tensor | None, cache) -> Tensor:
        if position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            last = (
                seen + inputs.shape[1] - 1
            )  # known without looking, so that nothing waits for a GPU and meta tensors pass
            position_ids = torch.arange(seen, last + 1, device=inputs.device)[None]
        else:
            last = int(position_ids.max())
        if last >= (most := self.embed_positions.num_embeddings):
            raise ValueError(f"position {last} has no learned vector; max_position_embeddings is {most}")
        return self.embed_positions(position_ids)


class CosformerForCausalLM(CosformerPreTrained, LlamaForCausalLM):
    config: CosformerConfig
    _tp_plan = None

    def __init__(self, config: CosformerConfig):
        super(LlamaForCausalLM, self).__init__(config)
        self.model = CosformerModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
