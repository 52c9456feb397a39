"""The decoder: a causal stack with Llama's head for the next token."""

from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from .configuration import CosformerConfig
from .loss import one_vs_each
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

    def forward(self, input_ids=None, *args, labels=None, num_items_in_batch=None, **kwargs):
        """Llama's; in training the loss may be `config.loss`, and there are no logits then."""
        if labels is None or not self.training or self.config.loss == "softmax":
            if num_items_in_batch is not None:
                kwargs["num_items_in_batch"] = num_items_in_batch
            return super().forward(input_ids, *args, labels=labels, **kwargs)
        hidden = self.model(input_ids, *args, **kwargs | {"use_cache": False}).last_hidden_state
        last, following = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        given = {"samples": self.config.loss_samples, "total": num_items_in_batch}
        return CausalLMOutputWithPast(loss=one_vs_each(last, self.lm_head.weight, None, following, **given))
