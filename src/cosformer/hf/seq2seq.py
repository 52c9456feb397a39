"""The encoder-decoder: BART's architecture, with mixers; the source is absorbed once."""

from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache
from transformers.models.bart.modeling_bart import (
    BartAttention,
    BartDecoder,
    BartEncoder,
    BartForConditionalGeneration,
    BartModel,
)

from .cache import encoder_decoder_cache
from .configuration import CosformerSeq2SeqConfig
from .interface import padding
from .pretrained import (
    CosformerPreTrained,
    attend,
    check_call,
    check_learned_positions,
    check_mask_shape,
    new_interior,
)
from .reach import reaches
from .rows import check_beginnings

PLACES = "the learned positions of an encoder-decoder count from the first place of a row"


class CosformerSeq2SeqAttention(BartAttention):
    """BART's projections around a mixer for self-attention, causal in the decoder."""

    def __init__(self, config: CosformerSeq2SeqConfig, layer_idx: int, *, causal: bool):
        names = config.layer_mixers if causal else config.encoder_layer_mixers
        heads = config.decoder_attention_heads if causal else config.encoder_attention_heads
        kind = {"is_decoder": causal, "is_causal": causal, "config": config, "layer_idx": layer_idx}
        super().__init__(config.d_model, heads, **kind)
        sizes = {"heads": heads, "kv_heads": heads, "size": self.head_dim}
        self.interior = new_interior(config, names, layer_idx, causal=causal, **sizes)

    def forward(self, hidden_states, past_key_values=None, key_mask=None, **kwargs) -> tuple[Tensor, None]:
        out = attend(self, hidden_states, key_mask=key_mask, cache=own_tokens(past_key_values))
        return self.out_proj(out), None


class CosformerCrossAttention(BartAttention):
    """BART's projections around a mixer that reads the source; queries keep their own positions."""

    def __init__(self, config: CosformerSeq2SeqConfig, layer_idx: int, name: str):
        heads = config.decoder_attention_heads
        super().__init__(config.d_model, heads, is_decoder=True, config=config, layer_idx=layer_idx)
        self.mixer = config.mixer_of(name, heads=heads, size=self.head_dim, horizon=config.cross_horizon)

    def forward(
        self, hidden_states, key_value_states=None, past_key_values=None, source_mask=None, **kwargs
    ) -> tuple[Tensor, None]:
        q = self.split(self.q_proj(hidden_states))
        cache, offset, source, memory = past_key_values, 0, None, None
        if cache is not None:
            source = cache.cross_attention_cache.layers[self.layer_idx]
            memory = source.kept
            offset = own_tokens(cache).get_seq_length(self.layer_idx) - q.shape[2]  # it already counts these
        target, new = offset + q.shape[2], 0 if memory is not None else key_value_states.shape[1]
        reach = self.mixer.reach
        if not (reaches(target, reach, causal=True) and reaches(new, reach, causal=False)):
            raise ValueError(
                f"source and target reach over {max(target, new)} places, past the horizon of {reach:g} "
                "between them; use shorter texts, or a model whose config.cross_horizon is larger, or "
                "math.inf (no cosine)"
            )
        if memory is None:
            k, v = self.split(self.k_proj(key_value_states)), self.split(self.v_proj(key_value_states))
            mask = None if source_mask is None else padding(source_mask)
            memory = self.mixer.absorb(k, v, key_mask=mask)
            if source is not None:
                source.keep(memory)
                cache.is_updated[self.layer_idx] = True
        out = self.mixer.read(q, memory, offset=offset)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class CosformerSeq2SeqEncoder(CosformerPreTrained, BartEncoder):
    config: CosformerSeq2SeqConfig

    def __init__(self, config: CosformerSeq2SeqConfig):
        super().__init__(config)
        for i, layer in enumerate(self.layers):
            layer.self_attn = CosformerSeq2SeqAttention(config, i, causal=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **kwargs):
        check_call(self.config, kwargs, attention_mask=attention_mask)
        length = check_length(self.config, input_ids=input_ids, inputs_embeds=inputs_embeds)
        rows = (input_ids if inputs_embeds is None else inputs_embeds).shape[0]
        check_mask_shape("attention_mask", attention_mask, rows, length)
        check_beginnings("attention_mask", attention_mask, length, length, why=PLACES)
        # Masks are passed by names of our own: BART's become L x L under tracing.
        return super().forward(input_ids, inputs_embeds=inputs_embeds, key_mask=attention_mask, **kwargs)


class CosformerSeq2SeqDecoder(CosformerPreTrained, BartDecoder):
    config: CosformerSeq2SeqConfig

    def __init__(self, config: CosformerSeq2SeqConfig):
        super().__init__(config)
        for i, name in enumerate(config.layer_mixers):
            self.layers[i].self_attn = CosformerSeq2SeqAttention(config, i, causal=True)
            self.layers[i].encoder_attn = CosformerCrossAttention(config, i, config.cross_mixer_of(name))
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
        own = own_tokens(past_key_values)
        masks = {"decoder_attention_mask": attention_mask, "attention_mask": encoder_attention_mask}
        check_call(self.config, kwargs, own, **masks)
        given = {"decoder_input_ids": input_ids, "decoder_inputs_embeds": inputs_embeds}
        cached = 0 if own is None else own.get_seq_length()
        length = check_length(self.config, cached=cached, **given)
        rows = (input_ids if inputs_embeds is None else inputs_embeds).shape[0]
        check_mask_shape("decoder_attention_mask", attention_mask, rows, length, cached=cached)
        check_beginnings("decoder_attention_mask", attention_mask, cached + length, length, why=PLACES)
        if encoder_hidden_states is not None:
            check_mask_shape("attention_mask", encoder_attention_mask, *encoder_hidden_states.shape[:2])
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = encoder_decoder_cache(len(self.config.layer_mixers))
        return super().forward(
            input_ids,
            encoder_hidden_states=encoder_hidden_states,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            key_mask=attention_mask,
            source_mask=encoder_attention_mask,
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
    accepts_loss_kwargs = False  # BART averages its loss itself: no num_items_in_batch from the Trainer

    def __init__(self, config: CosformerSeq2SeqConfig):
        super().__init__(config)
        self.model = CosformerSeq2SeqModel(config)
        self.post_init()

    def new_cache(self) -> EncoderDecoderCache:
        return encoder_decoder_cache(len(self.config.layer_mixers))


def check_length(config: CosformerSeq2SeqConfig, *, cached: int = 0, **given: Tensor | None) -> int:
    """How many tokens are given, by either name; raises if there are more than learned positions."""
    length = 0
    for name, tokens in given.items():
        if tokens is not None:
            length, most = tokens.shape[1], config.max_position_embeddings
            check_learned_positions(name, cached + length, most, cached=cached)
    return length


def own_tokens(cache):
    """The part of a cache for the decoder's own tokens."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
