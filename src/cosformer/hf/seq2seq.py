"""The encoder-decoder: BART's architecture with linear layers; cross attention reads a state that is built once."""

import math

from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache
from transformers.models.bart.modeling_bart import (
    BartAttention,
    BartDecoder,
    BartEncoder,
    BartForConditionalGeneration,
    BartModel,
)

from ..ops import linear_attention
from .cache import encoder_decoder_cache
from .configuration import CosformerSeq2SeqConfig
from .interface import padding
from .mixing import (
    CosformerPreTrained,
    check_cache,
    check_learned_positions,
    check_padding_mask,
    refuse_weights,
    registry_mixer,
    self_mixing,
)


class CosformerSeq2SeqAttention(BartAttention):
    """BART's projections around cosFormer self-attention, causal in the decoder."""

    def __init__(self, config: CosformerSeq2SeqConfig, layer_idx: int, *, causal: bool):
        heads = config.decoder_attention_heads if causal else config.encoder_attention_heads
        super().__init__(
            config.d_model, heads, is_decoder=causal, is_causal=causal, config=config, layer_idx=layer_idx
        )
        self.mixing = self_mixing(config, heads=heads, causal=causal)

    def forward(self, hidden_states, past_key_values=None, key_mask=None, **kwargs) -> tuple[Tensor, None]:
        q, k, v = (split_heads(self, proj(hidden_states)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        cache = None if past_key_values is None else own_tokens(past_key_values).layers[self.layer_idx]
        return self.out_proj(self.mixing(hidden_states, q, k, v, key_mask=key_mask, cache=cache)), None


class CosformerCrossAttention(BartAttention):
    """BART's projections around linear cross attention: no cosine and no decay, which measure distances on one axis.

    Another mixer is used where the config names one.
    """

    def __init__(self, config: CosformerSeq2SeqConfig, layer_idx: int):
        super().__init__(
            config.d_model,
            config.decoder_attention_heads,
            is_decoder=True,
            config=config,
            layer_idx=layer_idx,
        )
        self.mixer = None
        if config.mixer != "cosformer":
            self.mixer = registry_mixer(config, heads=config.decoder_attention_heads)
            self.mixer.refuse(cross=True)

    def forward(self, hidden_states, key_value_states=None, past_key_values=None, cross_mask=None, **kwargs):
        q = split_heads(self, self.q_proj(hidden_states))
        cache = (
            None if past_key_values is None else past_key_values.cross_attention_cache.layers[self.layer_idx]
        )
        if cache is None or cache.state is None:
            k, v = (split_heads(self, proj(key_value_states)) for proj in (self.k_proj, self.v_proj))
            key_mask = None if cross_mask is None else padding(cross_mask)
        if self.mixer is not None:
            if cache is not None:
                raise ValueError(
                    f"mixer {self.mixer.name!r} keeps no cache in this model; call it with use_cache=False"
                )
            out = self.mixer(q, k, v, key_mask=key_mask)
        elif cache is None:
            out = linear_attention(q, k, v, horizon=math.inf, relu=True, key_mask=key_mask)
        else:
            if cache.state is None:
                cache.absorb(k, v, key_mask=key_mask)
                past_key_values.is_updated[self.layer_idx] = True
            out = cache.read(q)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


class CosformerSeq2SeqEncoder(CosformerPreTrained, BartEncoder):
    config: CosformerSeq2SeqConfig

    def __init__(self, config: CosformerSeq2SeqConfig):
        super().__init__(config)
        for i, kind in enumerate(config.encoder_layer_types):
            if kind == "linear_attention":
                self.layers[i].self_attn = CosformerSeq2SeqAttention(config, i, causal=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **kwargs):
        refuse_weights(self.config, kwargs)
        check_padding_mask("attention_mask", attention_mask)
        check_length(self.config, {"input_ids": input_ids, "inputs_embeds": inputs_embeds})
        kwargs["key_mask"] = attention_mask
        if "full_attention" not in self.config.encoder_layer_types:
            attention_mask = None  # only softmax layers read it
        return super().forward(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )


class CosformerSeq2SeqDecoder(CosformerPreTrained, BartDecoder):
    config: CosformerSeq2SeqConfig

    def __init__(self, config: CosformerSeq2SeqConfig):
        super().__init__(config)
        for i, kind in enumerate(config.layer_types):
            if kind == "linear_attention":
                self.layers[i].self_attn = CosformerSeq2SeqAttention(config, i, causal=True)
                self.layers[i].encoder_attn = CosformerCrossAttention(config, i)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ):
        refuse_weights(self.config, kwargs)
        check_padding_mask("decoder_attention_mask", attention_mask)
        check_padding_mask("attention_mask", encoder_attention_mask)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = encoder_decoder_cache(self.config.layer_types)
        if past_key_values is not None:
            check_cache(own_tokens(past_key_values))
        given = {"decoder_input_ids": input_ids, "decoder_inputs_embeds": inputs_embeds}
        check_length(
            self.config,
            given,
            cached=0 if past_key_values is None else own_tokens(past_key_values).get_seq_length(),
        )
        kwargs |= {"key_mask": attention_mask, "cross_mask": encoder_attention_mask}
        if "full_attention" not in self.config.layer_types:
            attention_mask = encoder_attention_mask = None  # only softmax layers read them
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )


class CosformerSeq2SeqModel(CosformerPreTrained, BartModel):
    config: CosformerSeq2SeqConfig

    def __init__(self, config: CosformerSeq2SeqConfig):
        super().__init__(config)
        self.encoder = CosformerSeq2SeqEncoder(config)
        self.decoder = CosformerSeq2SeqDecoder(config)
        self.post_init()


class CosformerForConditionalGeneration(CosformerPreTrained, BartForConditionalGeneration):
    config: CosformerSeq2SeqConfig
    accepts_loss_kwargs = (
        False  # BART averages its loss itself, so the Trainer must not hand it num_items_in_batch
    )

    def __init__(self, config: CosformerSeq2SeqConfig):
        super().__init__(config)
        self.model = CosformerSeq2SeqModel(config)
        self.post_init()

    def new_cache(self) -> EncoderDecoderCache:
        return encoder_decoder_cache(self.config.layer_types)


def split_heads(attention: BartAttention, x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)


def check_length(config: CosformerSeq2SeqConfig, given: dict[str, Tensor | None], *, cached: int = 0) -> None:
    for name, tokens in given.items():
        if tokens is not None:
            check_learned_positions(
                name, cached + tokens.shape[1], config.max_position_embeddings, cached=cached
            )


def own_tokens(cache):
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
