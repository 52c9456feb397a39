"""The loop of `generate` where it is plain: transformers' tokens, without what it does around each of them.

For each token transformers prepares the arguments of a forward, grows masks and positions, copies the whole
text and asks every stopping criterion for a tensor, which takes longer than a small model needs to read its
weights. Here one call takes a token's id to its logits (step.py), text is written into a buffer that grows
now and then, and the criteria of length and end are numbers. Logits processors, other criteria and streamers
are called as in transformers, with the same arguments. If a token cannot go that way, the model is called as
transformers calls it. Calls that are not plain (other outputs or arguments, overridden methods) never come
here.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from transformers.generation import EosTokenCriteria, GenerationMixin, MaxLengthCriteria
from transformers.generation.logits_process import LogitsProcessorList, PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..ops.step import MOST_ROWS
from .blocks import is_hooked
from .cache import CosformerCache
from .step import Ready, ready_for_ids

ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")
OUTPUTS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")
ROOM = 1024  # tokens by which the text's buffer grows, besides doubling


class Loop:
    """One call of `generate`: its text so far, and the parties that are called for every token."""

    def __init__(self, model: Any, ids: Tensor, processors, criteria, config, streamer, kwargs: dict):
        self.model, self.config, self.streamer, self.kwargs = model, config, streamer, kwargs
        self.processors, self.criteria = processors, criteria
        self.cache: CosformerCache = kwargs["past_key_values"]
        self.ids, self.rows = ids, len(ids)
        self.room, self.length = ids, ids.shape[1]
        self.unfinished = torch.ones_like(ids[:, 0])
        self.uncounted = 0  # tokens not yet in the masks and positions of kwargs
        self.ready: Ready | None = None
        self.held: list[Tensor] = []  # the parameters that `ready` reads
        parties = [*processors, *criteria, *([] if streamer is None else [streamer])]
        self.trusted = all(map(_is_trusted, parties))
        self.ends = _plain_criteria(criteria)

    @classmethod
    def of(cls, model: Any, ids: Tensor, processors, criteria, config, given: dict) -> "Loop | None":
        """The loop for a call of `_sample`, or None if transformers' must run."""
        kwargs = {name: value for name, value in given.items() if name not in ("synced_gpus", "streamer")}
        plain = (
            not given.get("synced_gpus")
            and kwargs.keys() <= ARGUMENTS
            and kwargs.get("use_cache") is True
            and type(kwargs.get("past_key_values")) is CosformerCache
            and type(kwargs.get("logits_to_keep", 1)) is int
            and ids.is_cpu
            and ids.ndim == 2
            and ids.dtype == torch.int64
            and 0 < len(ids) <= MOST_ROWS
            and ids.shape[1] > 0
        )
        if not plain or config.is_assistant or config.compile_config is not None:
            return None
        if any(getattr(config, name) for name in OUTPUTS) or model.config.is_encoder_decoder:
            return None
        if type(processors) is not LogitsProcessorList or type(criteria) is not StoppingCriteriaList:
            return None
        own = (getattr(type(model), name, None) is getattr(GenerationMixin, name, model) for name in METHODS)
        if not all(own) or any(name in model.__dict__ for name in (*METHODS, "forward")):
            return None
        if model._forward_hooks or model._forward_pre_hooks or _has_any_global_hook():
            return None
        if (
            any(hasattr(criterion, "eos_token_id") for criterion in criteria)
            and config._pad_token_tensor is None
        ):
            return None
        return cls(model, ids, processors, criteria, config, given.get("streamer"), kwargs)

    def write(self) -> Any:
        """The text, as `_sample` returns it."""
        outputs = self.model._prefill(self.ids, self.config, self.kwargs, is_first_iteration=True)
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        del outputs  # the logits of a whole text may be large
        self.uncounted = 1
        while not self._add(self._chosen(logits)):
            logits = self._logits()
            self.uncounted += 1
        text = self.text().clone(memory_format=torch.contiguous_format)
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return text
        return GenerateDecoderOnlyOutput(sequences=text, past_key_values=self.cache)

    def text(self) -> Tensor:
        return self.room[:, : self.length]

    def _seen(self) -> Tensor:
        """The text for other parties, contiguous."""
        return self.text() if self.rows == 1 else self.text().contiguous()

    def _answer(self, party: Any, given: Tensor | None) -> Tensor:
        """What processors or criteria return; unknown ones may also have changed the text."""
        seen = self._seen()
        answer = party(seen, given)
        if not self.trusted:
            self.text().copy_(seen)
        return answer

    def _chosen(self, logits: Tensor) -> Tensor:
        scores = self._answer(self.processors, logits) if self.processors else logits
        if not self.config.do_sample:
            return torch.argmax(scores, dim=-1)
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)

    def _add(self, tokens: Tensor) -> bool:
        """Append a token per row; returns whether the text ends there."""
        padded = self.rows > 1 and any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        if padded:  # pad finished rows
            tokens = tokens * self.unfinished + self.config._pad_token_tensor * (1 - self.unfinished)
        if self.length == self.room.shape[1]:
            room = self.room.new_empty(self.rows, 2 * self.length + ROOM)
            room[:, : self.length] = self.room
            self.room = room
        self.room[:, self.length] = tokens
        self.length += 1
        ended = self._ended(tokens)
        if self.streamer is not None:
            self.streamer.put(tokens)
        return ended

    def _ended(self, tokens: Tensor) -> bool:
        if self.ends is None or self.rows > 1:
            self.unfinished = self.unfinished & ~self._answer(self.criteria, None)
            return not self.unfinished.any()
        most, reminding, last = self.ends
        if reminding is not None and reminding < self.length < most:  # it warns once
            self.criteria(self.text(), None)
            self.ends = most, None, last
        return self.length >= most or int(tokens) in last

    def _logits(self) -> Tensor:
        """The logits of the text's last tokens."""
        last = self.room[:, self.length - 1]
        if not self.trusted and is_hooked(self.model):
            return self._called()
        if self.ready is None or not self.trusted:
            self.ready = ready_for_ids(self.model, self.cache, self.rows)
            self.held = [] if self.ready is None or not self.trusted else self.ready.parameters()
        positions: Any = self.kwargs.get("position_ids")
        if self.ready is not None and not (self.ready.found.learned and positions is None):
            places = None
            if self.ready.found.learned:
                places = positions[:, -1].expand(self.rows) + self.uncounted
            logits = self.ready.logits(self.cache, last, places)
            if logits is not None:
                return logits if self.ready.found.dtype == logits.dtype else _rounded(logits, self.ready)
        return self._called()

    def _called(self) -> Tensor:
        """The same, by calling the model as transformers does."""
        model, self.ready = self.model, None
        outputs = CausalLMOutputWithPast(past_key_values=self.cache)
        self.kwargs = model._update_model_kwargs_for_generation(
            outputs, self.kwargs, is_encoder_decoder=False, num_new_tokens=self.uncounted
        )
        self.uncounted = 0
        inputs = model.prepare_inputs_for_generation(self._seen(), next_sequence_length=1, **self.kwargs)
        return model(**inputs, return_dict=True).logits[:, -1].to(copy=True, dtype=torch.float32)


def _rounded(logits: Tensor, ready: Ready) -> Tensor:
    """Rounded like the model's own, whose dtype is narrower."""
    return logits.to(ready.found.dtype).float()


def _is_trusted(party: Any) -> bool:
    """Whether a party is known not to change the model between tokens, as transformers' own are."""
    known = type(party).__module__.startswith("transformers.generation.")
    return known and not isinstance(party, PrefixConstrainedLogitsProcessor)


def _plain_criteria(criteria) -> tuple[float, int | None, set[int]] | None:
    """Criteria of length and end as numbers: (most tokens, the model's own limit, end tokens), or None."""
    most, reminding, last = float("inf"), None, set()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            most, reminding = min(most, criterion.max_length), criterion.max_position_embeddings
        elif type(criterion) is EosTokenCriteria:
            last |= set(criterion.eos_token_id.flatten().tolist())
        else:
            return None
    return most, reminding, last
