"""The encoder: BERT's architecture and heads with linear layers.

`CosformerForPairClassification` is Long-Range Arena's model of two texts, read one by one: [a, b, a * b, a - b] through an MLP.

BERT's heads average their loss over a batch themselves, so the Trainer must not hand them num_items_in_batch
(`accepts_loss_kwargs`). That is right for classes, one a row; masked tokens are not as many in every batch, so there it is taken.
"""

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.bert.modeling_bert import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertPreTrainedModel,
    BertSelfAttention,
)
from transformers.utils import can_return_tuple

from .configuration import CosformerEncoderConfig
from .packing import packed_boundaries
from .pooling import PooledNorm, mean
from .pretrained import (
    CosformerPreTrained,
    attend,
    check_learned_positions,
    check_padding_mask,
    interior,
    refuse_weights,
)


class CosformerEncoderAttention(BertSelfAttention):
    """BERT's projections around a mixer that sees the whole text."""

    def __init__(self, config: CosformerEncoderConfig, layer_idx: int):
        super().__init__(config, is_causal=False, layer_idx=layer_idx)
        sizes = {"heads": config.num_attention_heads, "kv_heads": config.num_attention_heads}
        name, size = config.layer_mixers[layer_idx], self.attention_head_size
        self.interior = interior(config, name, size=size, causal=False, **sizes)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, cu_seqlens=None, **kwargs):
        x = hidden_states
        parts = (x, self.query(x), self.key(x), self.value(x))
        return attend(
            self.interior, *parts, causal=False, key_mask=attention_mask, cu_seqlens=cu_seqlens
        ), None


class CosformerEncoderModel(CosformerPreTrained, BertModel):
    config: CosformerEncoderConfig

    def __init__(self, config: CosformerEncoderConfig, add_pooling_layer: bool = True):
        super().__init__(config, add_pooling_layer)
        for i, layer in enumerate(self.encoder.layer):
            layer.attention.self = CosformerEncoderAttention(config, i)
        if config.positions != "learned":
            self.embeddings.position_embeddings = NoPositions()
        if add_pooling_layer and config.pooling == "normed-mean":
            self.pooled_norm = PooledNorm(config.hidden_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        **kwargs,
    ):
        refuse_weights(self.config, kwargs)
        check_padding_mask("attention_mask", attention_mask)
        if self.config.positions == "learned":
            self.check_positions(input_ids, position_ids, inputs_embeds)
        elif token_type_ids is None:  # BERT would cut its own from a buffer of max_position_embeddings
            given = input_ids if inputs_embeds is None else inputs_embeds
            token_type_ids = None if given is None else given.new_zeros(given.shape[:2], dtype=torch.long)
        if attention_mask is None:
            kwargs["cu_seqlens"] = packed_boundaries(position_ids)
        kwargs |= {"token_type_ids": token_type_ids, "position_ids": position_ids, "return_dict": True}
        out = super().forward(input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        if self.pooler is not None and self.config.pooling != "cls":
            pooled = mean(out.last_hidden_state, attention_mask)
            pooled = self.pooled_norm(pooled) if self.config.pooling == "normed-mean" else pooled
            out.pooler_output = self.pooler(pooled.unsqueeze(1))  # it reads the first vector
        return out

    def check_positions(
        self, input_ids: Tensor | None, position_ids: Tensor | None, inputs_embeds: Tensor | None
    ) -> None:
        most = self.config.max_position_embeddings
        if position_ids is not None:
            if (
                position_ids.is_cpu and not torch.compiler.is_compiling()
            ):  # elsewhere looking would be waiting
                check_learned_positions("the text of position_ids", int(position_ids.max()) + 1, most)
        elif input_ids is not None:
            check_learned_positions("input_ids", input_ids.shape[1], most)
        elif inputs_embeds is not None:
            check_learned_positions("inputs_embeds", inputs_embeds.shape[1], most)


class NoPositions(nn.Module):
    """In the place of BERT's position embeddings where there are none."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


class CosformerForMaskedLM(CosformerPreTrained, BertForMaskedLM):
    config: CosformerEncoderConfig

    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        self.bert = CosformerEncoderModel(config, add_pooling_layer=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, *args, labels=None, num_items_in_batch=None, **kwargs
    ):
        """BERT's. `num_items_in_batch`, from the Trainer: the hidden tokens of all processes and accumulated batches together;
        the loss is this batch's share of their mean."""
        if labels is not None and num_items_in_batch is None:
            kwargs["labels"] = labels
        out = super().forward(input_ids, attention_mask, *args, return_dict=True, **kwargs)
        if labels is not None and num_items_in_batch is not None:
            out.loss = (
                nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
                / num_items_in_batch
            )
        return out


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


class CosformerForPairClassification(CosformerPreTrained, BertPreTrainedModel):
    config: CosformerEncoderConfig
    accepts_loss_kwargs = False

    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        size = config.hidden_size
        self.bert = CosformerEncoderModel(config)
        self.classifier = nn.Sequential(
            nn.Linear(4 * size, size), nn.ReLU(), nn.Linear(size, config.num_labels)
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids, pair_input_ids, attention_mask=None, pair_attention_mask=None, labels=None, **kwargs
    ):
        a = self.bert(input_ids, attention_mask=attention_mask, return_dict=True, **kwargs).pooler_output
        b = self.bert(
            pair_input_ids, attention_mask=pair_attention_mask, return_dict=True, **kwargs
        ).pooler_output
        logits = self.classifier(torch.cat([a, b, a * b, a - b], -1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
