"""The decoder: Llama's architecture; a mixer stands where a layer's attention was.

Llama's rotary positions are not used: where a layer wants them its mixer has them (softmax+rope).
"""

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaModel

from .configuration import CosformerConfig
from .packing import packed_boundaries
from .pretrained import CosformerPreTrained, attend, check_cache, check_padding_mask, interior, refuse_weights


class CosformerDecoderAttention(LlamaAttention):
    """Llama's projections around a mixer."""

    def __init__(self, config: CosformerConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        sizes = {"heads": heads, "kv_heads": kv_heads, "size": self.head_dim}
        self.interior = interior(config, config.layer_mixers[layer_idx], causal=True, **sizes)

    def forward(
        self, hidden_states, attention_mask=None, past_key_values=None, cu_seqlens=None, **kwargs
    ) -> tuple[Tensor, None]:
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        x = hidden_states
        parts = (x, self.q_proj(x), self.k_proj(x), self.v_proj(x))
        out = attend(
            self.interior, *parts, causal=True, key_mask=attention_mask, cu_seqlens=cu_seqlens, cache=cache
        )
        return self.o_proj(out), None


class CosformerModel(CosformerPreTrained, LlamaModel):
    config: CosformerConfig

    def __init__(self, config: CosformerConfig):
        super().__init__(config)
        for i, layer in enumerate(self.layers):
            layer.self_attn = CosformerDecoderAttention(config, i)
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
        if self.config.positions == "learned":
            inputs_embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            inputs_embeds = inputs_embeds + self.position_vectors(
                inputs_embeds, position_ids, past_key_values
            )
            input_ids = None
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=boundaries,
            **kwargs,
        )

    def position_vectors(self, inputs: Tensor, position_ids: Tensor | None, cache) -> Tensor:
        most = self.embed_positions.num_embeddings
        if position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            last = (
                seen + inputs.shape[1] - 1
            )  # known without looking, so that nothing waits for a GPU and meta tensors pass
            position_ids = torch.arange(seen, last + 1, device=inputs.device)[None]
        else:
            last = int(position_ids.max()) if position_ids.is_cpu and not torch.compiler.is_compiling() else 0
        if last >= most:
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
