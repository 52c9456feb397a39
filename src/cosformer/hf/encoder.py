"""The encoder: BERT's architecture and heads with linear layers.

`CosformerForPairClassification` is Long-Range Arena's model of two texts, read one by one: [a, b, a * b, a - b] through an MLP.

BERT's heads average their loss over a batch themselves, so the Trainer must not hand them num_items_in_batch
(`accepts_loss_kwargs`). That is right for classes, one a row; masked tokens are not as many in every batch, so there it is taken.
"""

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce
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
from .mixing import (
    CosformerPreTrained,
    check_learned_positions,
    check_padding_mask,
    packed_boundaries,
    refuse_weights,
    self_mixing,
)


class CosformerEncoderAttention(BertSelfAttention):
    """BERT's projections around bidirectional cosFormer mixing."""

    def __init__(self, config: CosformerEncoderConfig, layer_idx: int):
        super().__init__(config, is_causal=False, layer_idx=layer_idx)
        self.mixing = self_mixing(config, heads=config.num_attention_heads, causal=False)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        past_key_values=None,
        key_mask=None,
        cu_seqlens=None,
        **kwargs,
    ):
        size, projections = self.attention_head_size, (self.query, self.key, self.value)
        q, k, v = (proj(hidden_states).unflatten(-1, (-1, size)).transpose(1, 2) for proj in projections)
        return self.mixing(hidden_states, q, k, v, key_mask=key_mask, cu_seqlens=cu_seqlens), None


class CosformerEncoderModel(CosformerPreTrained, BertModel):
    config: CosformerEncoderConfig

    def __init__(self, config: CosformerEncoderConfig, add_pooling_layer: bool = True):
        super().__init__(config, add_pooling_layer)
        for i, kind in enumerate(config.layer_types):
            if kind == "linear_attention":
                self.encoder.layer[i].attention.self = CosformerEncoderAttention(config, i)
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
            token_type_ids = (
                None if given is None else torch.zeros(given.shape[:2], dtype=torch.long, device=given.device)
            )
        key_mask = attention_mask
        if "full_attention" not in self.config.layer_types:
            attention_mask = None  # only softmax layers read it
        if key_mask is None:
            kwargs["cu_seqlens"] = packed_boundaries(position_ids)
            if kwargs["cu_seqlens"] is not None and "full_attention" in self.config.layer_types:
                raise ValueError(
                    "position_ids mark packed sequences, which BERT's softmax layers do not keep apart"
                )
        kwargs |= {
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
        }
        out = super().forward(
            input_ids, inputs_embeds=inputs_embeds, key_mask=key_mask, return_dict=True, **kwargs
        )
        if self.pooler is not None and self.config.pooling != "cls":
            pooled = mean(out.last_hidden_state, key_mask)
            pooled = self.pooled_norm(pooled) if self.config.pooling == "normed-mean" else pooled
            out.pooler_output = self.pooler(pooled.unsqueeze(1))  # it reads the first vector
        return out

    def check_positions(
        self, input_ids: Tensor | None, position_ids: Tensor | None, inputs_embeds: Tensor | None
    ) -> None:
        most = self.config.max_position_embeddings
        if position_ids is not None:
            if not torch.compiler.is_compiling():  # a graph has no values
                check_learned_positions("the text of position_ids", int(position_ids.max()) + 1, most)
        elif input_ids is not None:
            check_learned_positions("input_ids", input_ids.shape[1], most)
        elif inputs_embeds is not None:
            check_learned_positions("inputs_embeds", inputs_embeds.shape[1], most)


class NoPositions(nn.Module):
    """In the place of BERT's position embeddings where there are none."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


MOMENTUM = 0.2  # while a model learns, the mean of all texts moves by more than texts differ: the running one must follow fast


class PooledNorm(nn.BatchNorm1d):
    """Batch normalisation; a batch of one, which has no spread, is normalised as in evaluation."""

    def __init__(self, size: int):
        super().__init__(size, momentum=MOMENTUM)

    def forward(self, pooled: Tensor) -> Tensor:
        if self.training and distributed.is_available() and distributed.is_initialized():
            return self.over_all_processes(pooled)
        return super().forward(pooled) if self.training and len(pooled) > 1 else self.as_in_evaluation(pooled)

    def as_in_evaluation(self, pooled: Tensor) -> Tensor:
        return nn.functional.batch_norm(
            pooled, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )

    def over_all_processes(self, pooled: Tensor) -> Tensor:
        """What one process would do with the texts of all; torch's own that does it, SyncBatchNorm, is for GPUs only."""
        count = all_reduce(pooled.new_tensor([len(pooled)]))
        if count < 2:
            return self.as_in_evaluation(pooled)
        mean = all_reduce(pooled.sum(0)) / count
        spread = all_reduce((pooled - mean).square().sum(0)) / count
        with torch.no_grad():
            for name, seen in (("running_mean", mean), ("running_var", spread * count / (count - 1))):
                running = self.get_buffer(name)
                running.lerp_(seen.to(running.dtype), MOMENTUM)
            self.get_buffer("num_batches_tracked").add_(1)
        return (pooled - mean) * (spread + self.eps).rsqrt() * self.weight + self.bias


def mean(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """(B, L, C) -> (B, C), over what the mask keeps."""
    if mask is None:
        return hidden.mean(1)
    keep = mask.to(hidden.dtype).unsqueeze(-1)
    return (hidden * keep).sum(1) / keep.sum(1).clamp_min(1)


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
