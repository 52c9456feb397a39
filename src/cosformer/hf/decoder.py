"""The decoder: Llama's architecture with linear layers.

A linear layer takes no rotary positions: the cosine and the decay say where a key stands. The softmax layers of a hybrid do.
"""

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaModel

from .configuration import CosformerConfig
from .mixing import CosformerPreTrained, SelfMixing, check_cache, check_padding_mask, refuse_weights


class CosformerDecoderAttention(LlamaAttention):
    """Llama's projections around cosFormer mixing."""

    def __init__(self, config: CosformerConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.mixing = SelfMixing(config, heads=config.num_attention_heads, causal=True)

    def forward(self, hidden_states, past_key_values=None, key_mask=None, cu_seqlens=None, **kwargs) -> tuple[Tensor, None]:
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
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        check_cache(past_key_values)
        if past_key_values is None and attention_mask is None:
            boundaries = kwargs.get("cu_seq_lens_q")
            kwargs["cu_seqlens"] = packed_boundaries(position_ids) if boundaries is None else boundaries
        kwargs["key_mask"] = attention_mask
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


class CosformerForCausalLM(CosformerPreTrained, LlamaForCausalLM):
    config: CosformerConfig
    _tp_plan = None

    def __init__(self, config: CosformerConfig):
        super(LlamaForCausalLM, self).__init__(config)
        self.model = CosformerModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def packed_boundaries(position_ids: Tensor | None) -> Tensor | None:
    """Where sequences packed into one row begin, told from positions that start again; None for one plain sequence."""
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
    if position_ids.shape[0] != 1:
        rows = position_ids.shape[0]
        raise ValueError(f"position_ids start again inside a batch of {rows} rows; packed sequences stand in one row")
    inner = starts[0].nonzero().flatten() + 1
    return torch.cat([inner.new_zeros(1), inner, inner.new_tensor([position_ids.shape[1]])])
