"""The decoder: a causal stack with Llama's head for the next token."""

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from .cache import CosformerCache
from .configuration import CosformerConfig
from .labels import check_of_tokens
from .loop import Loop
from .loss import without_logits
from .parallel import labels_of
from .pretrained import CosformerPreTrained
from .stack import CosformerStack, asks_for_more
from .step import next_logits


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
        """Llama's, with named arguments: transformers drops those that a forward does not name.

        In training with a `config.loss` other than the softmax there are no logits.

        If processes share a sequence, `shift_labels` are the labels, shifted before they were cut.
        """
        if self._is_next_token(input_ids, past_key_values, inputs_embeds, labels, kwargs):
            logits = next_logits(self, input_ids, past_key_values, attention_mask, position_ids)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
        kwargs |= {"attention_mask": attention_mask, "position_ids": position_ids}
        kwargs |= {"past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        group, shifted = self.model.sequence_group, kwargs.get("shift_labels")
        if group is not None and labels is not None:
            if shifted is None:
                raise ValueError(
                    "labels of a part of a sequence: its last token's is in the next process; "
                    "shift the labels of the whole, cut them, and pass them as shift_labels, too"
                )
            kwargs["shift_labels"] = shifted = shifted.contiguous()  # upstream calls view() on them
            num_items_in_batch = labels_of(group, shifted, num_items_in_batch)
        if labels is None or not self.training or self.config.loss == "softmax":
            if num_items_in_batch is not None:
                kwargs["num_items_in_batch"] = num_items_in_batch
            return super().forward(input_ids, labels=labels, **kwargs)
        kwargs.pop("shift_labels", None)
        kwargs |= {"use_cache": False, "return_dict": True}
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        if shifted is None:
            check_of_tokens(hidden, labels)
            hidden, shifted = hidden[:, :-1], labels[:, 1:]
        loss = without_logits(self.config, hidden, self.lm_head, shifted, num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss)

    def _is_next_token(self, ids, cache, embeds, labels, asked: dict) -> bool:
        """Whether a call wants the logits of one more token per row, and nothing else."""
        one = isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[1] == 1
        if not one or type(cache) is not CosformerCache or labels is not None or embeds is not None:
            return False
        if len(cache.layers) != len(self.model.layers):  # refused later
            return False
        if asked.get("use_cache") is False or not isinstance(asked.get("logits_to_keep", 0), int):
            return False
        return self.takes_ids and not asks_for_more(self.config, asked, but=("use_cache", "logits_to_keep"))

    @property
    def takes_ids(self) -> bool:
        """Whether the stack can be given token ids alone, and treats them as ours does."""
        config, stack = self.config, self.model
        if config.output_hidden_states or config.output_attentions or config.return_dict is False:
            return False
        return type(stack).forward is CosformerStack.forward and stack.sequence_group is None

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **given):
        """transformers' loop for greedy and sampled text or, for plain calls, ours, which writes the same."""
        loop = Loop.of(self, input_ids, logits_processor, stopping_criteria, generation_config, given)
        if loop is None or type(self).forward is not CosformerForCausalLM.forward or not self.takes_ids:
            return super()._sample(input_ids, logits_processor, stopping_criteria, generation_config, **given)
        return loop.write()
