"""The encoder: a stack that sees the whole text, and its heads.

`CosformerForPairClassification` is Long-Range Arena's model of two texts, read one by one: [a, b, a * b, a -
b] through an MLP.

A head averages its loss over a batch itself, so the Trainer must not hand it num_items_in_batch
(`accepts_loss_kwargs`). That is right for classes, one a row; masked tokens are not as many in every batch,
so there it is taken.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput, TokenClassifierOutput
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel, LlamaRMSNorm
from transformers.utils import can_return_tuple

from .configuration import CosformerEncoderConfig
from .loss import one_vs_each
from .parallel import labels_of
from .pooling import Pooling
from .pretrained import CosformerPreTrained
from .stack import CosformerStack


class CosformerEncoderModel(CosformerStack):
    config: CosformerEncoderConfig


class EncoderHead(CosformerPreTrained, LlamaPreTrainedModel):
    """Abstract: an encoder and what reads it."""

    config: CosformerEncoderConfig
    accepts_loss_kwargs = False
    has_one_vs_each = False  # whether it can be trained with one-vs-each

    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        self.sampled = config.loss == "one-vs-each"
        if self.sampled and not self.has_one_vs_each:
            raise ValueError(f'loss is "one-vs-each"; {type(self).__name__} has only "softmax"')
        self.num_labels = config.num_labels
        self.model = CosformerEncoderModel(config)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed_tokens = value

    def hidden(self, input_ids=None, attention_mask=None, **kwargs) -> Tensor:
        """The last block's output (B, L, C)."""
        kwargs.pop("token_type_ids", None)  # tokenizers of BERT's kind give them; there are no segments here
        return self.model(
            input_ids, attention_mask=attention_mask, return_dict=True, **kwargs
        ).last_hidden_state

    def pooled(self, input_ids=None, attention_mask=None, **kwargs) -> Tensor:
        """One vector a text (B, size), by the head's pooling."""
        hidden = self.hidden(input_ids, attention_mask, **kwargs)
        return self.pooling(hidden, attention_mask, self.model.sequence_group)

    def token_loss(self, logits: Tensor, labels: Tensor | None, items: Any = None) -> Tensor | None:
        """The mean over labelled tokens; this batch's share of it where `items` are those of several."""
        if labels is None:
            return None
        items = labels_of(self.model.sequence_group, labels, items)
        whole = "mean" if items is None else "sum"
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction=whole)
        return loss if items is None else loss / items


class CosformerForMaskedLM(EncoderHead):
    accepts_loss_kwargs = True
    has_one_vs_each = True
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
        """`num_items_in_batch`, from the Trainer: the hidden tokens of all processes and accumulated batches
        together; the loss is this batch's share of their mean."""
        hidden = self.head(self.hidden(input_ids, attention_mask, **kwargs))
        if labels is not None and self.training and self.sampled:
            items = labels_of(self.model.sequence_group, labels, num_items_in_batch)
            given = {"samples": self.config.loss_samples, "total": items}
            decoder: Any = self.decoder
            last = hidden.flatten(0, 1), decoder.weight, decoder.bias, labels.flatten()
            return MaskedLMOutput(loss=one_vs_each(*last, **given))
        logits = self.decoder(hidden)
        loss = self.token_loss(logits, labels, num_items_in_batch)
        return MaskedLMOutput(loss=loss, logits=logits)


class CosformerForSequenceClassification(EncoderHead):
    has_one_vs_each = True

    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        if self.sampled and config.num_labels < 2:
            raise ValueError(f'loss is "one-vs-each", of classes; num_labels is {config.num_labels}')
        self.pooling = Pooling(config.pooling, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(self.pooling.size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs) -> SequenceClassifierOutput:
        pooled = self.pooled(input_ids, attention_mask, **kwargs)
        pooled = self.dropout(pooled)
        if labels is not None and self.training and self.sampled:
            weight, bias = self.classifier.weight, self.classifier.bias
            loss = one_vs_each(pooled, weight, bias, labels, samples=self.config.loss_samples)
            return SequenceClassifierOutput(loss=loss)
        logits = self.classifier(pooled)
        return SequenceClassifierOutput(loss=class_loss(self.config, logits, labels), logits=logits)


class CosformerForTokenClassification(EncoderHead):
    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs) -> TokenClassifierOutput:
        logits = self.classifier(self.dropout(self.hidden(input_ids, attention_mask, **kwargs)))
        return TokenClassifierOutput(loss=self.token_loss(logits, labels), logits=logits)


class CosformerForPairClassification(EncoderHead):
    def __init__(self, config: CosformerEncoderConfig):
        super().__init__(config)
        self.pooling = Pooling(config.pooling, config.hidden_size)
        size = self.pooling.size
        self.classifier = nn.Sequential(
            nn.Linear(4 * size, size), nn.ReLU(), nn.Linear(size, config.num_labels)
        )
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
        a = self.pooled(input_ids, attention_mask, **kwargs)
        b = self.pooled(pair_input_ids, pair_attention_mask, **kwargs)
        logits = self.classifier(torch.cat([a, b, a * b, a - b], -1))
        return SequenceClassifierOutput(loss=class_loss(self.config, logits, labels), logits=logits)


def class_loss(config: CosformerEncoderConfig, logits: Tensor, labels: Tensor | None) -> Tensor | None:
    """Cross entropy of classes; the squared error where there is one number to tell (`num_labels` 1)."""
    if labels is None:
        return None
    if config.num_labels == 1:
        return nn.functional.mse_loss(logits.squeeze(-1).float(), labels.float())
    return nn.functional.cross_entropy(logits.float(), labels)
