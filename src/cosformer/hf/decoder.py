"""The decoder: a causal stack with Llama's head for the next token."""

from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from .configuration import CosformerConfig
from .loss import without_logits
from .parallel import labels_of
from .pretrained import CosformerPreTrained
from .stack import CosformerStack


class CosformerModel(CosformerStack):
    config: CosformerConfig


class CosformerForCausalLM(CosformerPreTrained, LlamaForCausalLM):
    config: CosformerConfig
    _tp_plan = None

    def __init__(self, config: CosformerConfig):
        super(LlamaForCausalLM, self).__init__(config)
        self.model = CosformerModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        num_items_in_batch=None,
        **kwargs,
    ):
        """Llama's, by names that transformers looks for: it leaves out what a forward does not name.

        In training with a `config.loss` other than the softmax there are no logits.

        Where processes share a sequence, `shift_labels` are the labels, shifted before they were cut.
        """
        kwargs |= {"attention_mask": attention_mask, "position_ids": position_ids}
        kwargs |= {"past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        group, shifted = self.model.sequence_group, kwargs.get("shift_labels")
        if group is not None and labels is not None:
            if shifted is None:
                raise ValueError(
                    "labels of a part of a sequence: its last token's is in the next process; "
                    "shift the labels of the whole, cut them, and pass them as shift_labels, too"
                )
            kwargs["shift_labels"] = shifted = shifted.contiguous()  # upstream wants to view them
            num_items_in_batch = labels_of(group, shifted, num_items_in_batch)
        if labels is None or not self.training or self.config.loss == "softmax":
            if num_items_in_batch is not None:
                kwargs["num_items_in_batch"] = num_items_in_batch
            return super().forward(input_ids, labels=labels, **kwargs)
        kwargs.pop("shift_labels", None)
        kwargs |= {"use_cache": False, "return_dict": True}
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        if shifted is None:
            hidden, shifted = hidden[:, :-1], labels[:, 1:]
        loss = without_logits(self.config, hidden, self.lm_head, shifted, num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss)
