"""The encoder: BERT's architecture and heads with linear layers.

BERT's heads average their loss themselves, so the Trainer must not hand them num_items_in_batch (`accepts_loss_kwargs`).
"""

from torch import Tensor
from transformers.models.bert.modeling_bert import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertSelfAttention,
)

from .configuration import CosformerEncoderConfig
from .mixing import CosformerPreTrained, SelfMixing, check_padding_mask, refuse_weights


class CosformerEncoderAttention(BertSelfAttention):
    """BERT's projections around bidirectional cosFormer mixing."""

    def __init__(self, config: CosformerEncoderConfig, layer_idx: int):
        super().__init__(config, is_causal=False, layer_idx=layer_idx)
        self.mixing = SelfMixing(config, heads=config.num_attention_heads, causal=False)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, key_mask=None, **kwargs) -> tuple[Tensor, None]:
        size, projections = self.attention_head_size, (self.query, self.key, self.value)
        q, k, v = (proj(hidden_states).unflatten(-1, (-1, size)).transpose(1, 2) for proj in projections)
        return self.mixing(hidden_states, q, k, v, key_mask=key_mask), None


class CosformerEncoderModel(CosformerPreTrained, BertModel):
    config: CosformerEncoderConfig

    def __init__(self, config: CosformerEncoderConfig, add_pooling_layer: bool = True):
        super().__init__(config, add_pooling_layer)
        for i, kind in enumerate(config.layer_types):
            if kind == "linear_attention":
                self.encoder.layer[i].attention.self = CosformerEncoderAttention(config, i)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        refuse_weights(self.config, kwargs)
        check_padding_mask("attention_mask", attention_mask)
        key_mask = attention_mask
        if "full_attention" not in self.config.layer_types:
            attention_mask = None  # only softmax layers read it
        return super().forward(input_ids, attention_mask=attention_mask, key_mask=key_mask, **kwargs)


class CosformerForMaskedLM(CosformerPreTrained, BertForMaskedLM):
    config: CosformerEncoderConfig
    accepts_loss_kwargs = False

    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        self.bert = CosformerEncoderModel(config, add_pooling_layer=False)
        self.post_init()


class CosformerForSequenceClassification(CosformerPreTrained, BertForSequenceClassification):
    config: CosformerEncoderConfig
    accepts_loss_kwargs = False

    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        self.bert = CosformerEncoderModel(config)
        self.post_init()


class CosformerForTokenClassification(CosformerPreTrained, BertForTokenClassification):
    config: CosformerEncoderConfig
    accepts_loss_kwargs = False

    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        self.bert = CosformerEncoderModel(config, add_pooling_layer=False)
        self.post_init()
