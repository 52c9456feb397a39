"""The encoder: a stack that sees the whole text, and its heads.

`CosformerForPairClassification` is Long-Range Arena's model of two texts, read one by one:
[a, b, a * b, a - b] through an MLP.

A head averages its loss over a batch itself, so the Trainer must not pass it num_items_in_batch
(`accepts_loss_kwargs`). That is right for one class per row; the number of masked tokens differs between
batches, so CosformerForMaskedLM takes it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel, LlamaRMSNorm
from transformers.utils import can_return_tuple

from .configuration import CosformerEncoderConfig
from .labels import IGNORE, check_is_of_classes, check_of_tokens, fitting, labelled, of_texts, problem_of
from .loss import without_logits
from .parallel import labels_of
from .pooling import Pooling
from .pretrained import CosformerPreTrained
from .stack import CosformerStack


class CosformerEncoderModel(CosformerStack):
    config: CosformerEncoderConfig


class EncoderHead(CosformerPreTrained, LlamaPreTrainedModel):
    """Abstract: an encoder and a head that reads it."""

    config: CosformerEncoderConfig
    accepts_loss_kwargs = False
    has_other_losses = False  # than the softmax over all its logits

    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        if config.loss != "softmax" and not self.has_other_losses:
            raise ValueError(f'loss is "{config.loss}"; {type(self).__name__} has only "softmax"')
        self.num_labels = config.num_labels
        self.model = CosformerEncoderModel(config)

    def encoded(self, input_ids=None, attention_mask=None, **kwargs) -> BaseModelOutputWithPast:
        kwargs.pop("token_type_ids", None)  # BERT-like tokenizers return them; there are no segments here
        kwargs |= {"attention_mask": attention_mask, "return_dict": True}
        return self.model(input_ids, **kwargs)

    def read_off(self, hidden: Tensor, layer: Any, labels: Tensor | None, items: Any = None) -> dict:
        """Loss and logits of an output layer; in training with another loss than the softmax, no logits.

        `items`, from the Trainer, divides the sum of losses instead of the number of labels.
        """
        if labels is None:
            return {"logits": layer(hidden)}
        check_of_tokens(hidden, labels)
        items = labels_of(self.model.sequence_group, labels, items)
        if self.training and self.config.loss != "softmax":
            return {"loss": without_logits(self.config, hidden, layer, labels, items)}
        logits = layer(hidden)
        if items is None:
            items = (labels != IGNORE).sum().clamp_min(1)  # without labels the loss is 0, not NaN
        loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        return {"loss": loss / items, "logits": logits}


class TextHead(EncoderHead):
    """Abstract: a head that reads one vector per text and predicts its class, classes or numbers, as
    `config.problem_type` says."""

    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        self.pooling = Pooling(config.pooling, config.hidden_size)

    def pooled(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.pooling(hidden, attention_mask, self.model.sequence_group)

    def read_off(self, hidden: Tensor, layer: Any, labels: Tensor | None, items: Any = None) -> dict:
        if labels is None:
            return {"logits": layer(hidden)}
        kind = problem_of(self.config, labels)
        labels = fitting(labels, kind, texts=len(hidden), classes=self.num_labels)
        if self.training and self.config.loss != "softmax":
            check_is_of_classes(self.config, kind)
            return {"loss": without_logits(self.config, hidden, layer, labels)}
        logits = layer(hidden)
        return {"loss": of_texts(kind, logits, labels), "logits": logits}


class CosformerForMaskedLM(EncoderHead):
    accepts_loss_kwargs = True
    has_other_losses = True
    _tied_weights_keys = {"decoder.weight": "model.embed_tokens.weight"}

    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        size = config.hidden_size
        norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.head = nn.Sequential(nn.Linear(size, size), nn.GELU(), norm)
        self.decoder: nn.Module = nn.Linear(size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs
    ) -> MaskedLMOutput:
        """`num_items_in_batch`, from the Trainer: the masked tokens of all processes and accumulated batches
        together; the loss is this batch's share of their mean. In training there are no logits beside a loss:
        six of seven tokens have no label, and their scores would be most of the work."""
        encoded = self.encoded(input_ids, attention_mask, **kwargs)
        hidden, training = encoded.last_hidden_state, self.training and labels is not None
        if training:
            hidden, labels = labelled(hidden, labels)
        found = self.read_off(self.head(hidden), self.decoder, labels, num_items_in_batch)
        if training:
            found.pop("logits", None)
        return MaskedLMOutput(**found, hidden_states=encoded.hidden_states)


class CosformerForSequenceClassification(TextHead):
    has_other_losses = True

    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        check_is_of_classes(config, config.problem_type)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(self.pooling.size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs) -> SequenceClassifierOutput:
        encoded = self.encoded(input_ids, attention_mask, **kwargs)
        pooled = self.dropout(self.pooled(encoded.last_hidden_state, attention_mask))
        found = self.read_off(pooled, self.classifier, labels)
        return SequenceClassifierOutput(**found, hidden_states=encoded.hidden_states)


class CosformerForTokenClassification(EncoderHead):
    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs) -> TokenClassifierOutput:
        encoded = self.encoded(input_ids, attention_mask, **kwargs)
        found = self.read_off(self.dropout(encoded.last_hidden_state), self.classifier, labels)
        return TokenClassifierOutput(**found, hidden_states=encoded.hidden_states)


class CosformerForPairClassification(TextHead):
    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        size = self.pooling.size
        layers = (nn.Linear(4 * size, size), nn.ReLU(), nn.Linear(size, config.num_labels))
        self.classifier = nn.Sequential(*layers)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        pair_input_ids=None,
        attention_mask=None,
        pair_attention_mask=None,
        labels=None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        """Hidden states, if asked for, are those of the first text and then those of the second."""
        first = self.encoded(input_ids, attention_mask, **kwargs)
        second = self.encoded(pair_input_ids, pair_attention_mask, **kwargs)
        a = self.pooled(first.last_hidden_state, attention_mask)
        b = self.pooled(second.last_hidden_state, pair_attention_mask)
        pair = torch.cat([a, b, a * b, a - b], -1)
        states = None if first.hidden_states is None else (*first.hidden_states, *second.hidden_states)
        return SequenceClassifierOutput(**self.read_off(pair, self.classifier, labels), hidden_states=states)
