"""What a model costs: time and peak memory of a training step against the length, decoding time and cache against the context.

The models are those of the quality tables' size, batch 1, one causal language model per mixer; softmax is Llama's own.
"""

import copy
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .. import tasks
from ..bench.measure import in_turns, peak_memories
from ..bench.models import cache_bytes
from ..train import models

SIZE = "tiny"
VOCABULARY = 256
ROOM = 32_768  # positions after the context, for the tokens that are decoded while the time is taken
Work = Callable[[], None]


def build(mixer: str, length: int):
    """A causal language model over `length` positions. softmax+rope is Llama as transformers has it, with its own cache."""
    task = tasks.build("copy", length=4, symbols=VOCABULARY, examples=(1, 1, 1))
    config = models.config_of(task, mixer=mixer, size=SIZE, fields={"max_position_embeddings": length})
    torch.manual_seed(0)
    if mixer == "softmax+rope":
        fields = {
            key: getattr(config, key)
            for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        }
        fields |= {"num_attention_heads": config.num_attention_heads, "max_position_embeddings": length}
        return LlamaForCausalLM._from_config(LlamaConfig(**fields), attn_implementation="sdpa")
    return models.CLASSES["causal-lm"](config)


def able(mixer: str, work: str) -> bool:
    """Whether a mixer can do the work in a causal model; only cosFormer and Llama's softmax keep a cache in one."""
    if work == "decoding":
        return mixer == "softmax+rope" or mixer in models.VARIANTS
    try:
        build(mixer, 64)
    except ValueError:
        return False
    return True


def prepare(case: dict[str, Any]) -> Work:
    """A function that does one training step; what `measure.peak_memory` calls in a fresh process."""
    length = case["length"]
    model, ids = build(case["mixer"], length).train(), torch.randint(VOCABULARY, (1, length))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return step


def training(
    mixers: list[str], lengths: list[int], *, seconds: float, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Rows of training cost: a forward and a backward."""
    rows = []
    for length in lengths:
        works = {mixer: prepare({"mixer": mixer, "length": length}) for mixer in mixers}
        timed = in_turns(
            works,
            seconds=seconds / len(lengths),
            progress=lambda t: progress(f"cost: training at {length:,}, {t}"),
        )
        for mixer, samples in timed.items():
            row = {
                "kind": "cost",
                "what": "model",
                "work": "training",
                "causal": True,
                "mixer": mixer,
                "length": length,
            }
            rows.append(row | times(samples) | {"tokens_per_second": length / median(samples)})
    progress("cost: peak memory of training")
    cases = [{"mixer": row["mixer"], "length": row["length"]} for row in rows]
    return [row | {"memory_mib": mib} for row, mib in zip(rows, peak_memories(__name__, cases), strict=True)]


def decoding(
    mixers: list[str], contexts: list[int], *, seconds: float, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Rows of decoding cost: one token after a context."""
    rows = []
    for context in contexts:
        steps = {}
        for mixer in mixers:
            progress(f"cost: reading {context:,} tokens, {mixer}")
            steps[mixer] = decoder(build(mixer, context + ROOM).eval(), context)
        works = {mixer: step for mixer, (step, _) in steps.items()}
        timed = in_turns(
            works,
            seconds=seconds / len(contexts),
            progress=lambda t: progress(f"cost: decoding after {context:,}, {t}"),
        )
        for mixer, samples in timed.items():
            row = {
                "kind": "cost",
                "what": "model",
                "work": "decoding",
                "causal": True,
                "mixer": mixer,
                "length": context,
            }
            rows.append(row | times(samples) | {"memory_mib": None, "cache_bytes": steps[mixer][1]})
    return rows


def decoder(model, context: int) -> tuple[Work, int]:
    """A function that decodes one more token after a context, and the bytes of cache at its start."""
    ids = torch.randint(VOCABULARY, (1, context))
    with torch.inference_mode():
        cache = model(input_ids=ids, logits_to_keep=1, use_cache=True).past_key_values
    size, token, left = cache_bytes(cache), ids[:, -1:], ROOM
    first = None if type(model) is LlamaForCausalLM else copy.deepcopy(cache)

    def step() -> None:
        nonlocal cache, left
        if first is not None and not left:  # a fast machine decodes more than there is room for
            cache, left = copy.deepcopy(first), ROOM
        with torch.inference_mode():
            model(input_ids=token, past_key_values=cache, use_cache=True)
            if first is None:
                cache.crop(
                    -1
                )  # the next token stands after the same context; a state costs the same anywhere
        left -= 1

    return step, size


def times(samples: list[float]) -> dict[str, float]:
    """The median and the middle half: one hiccup of the machine must not hide a difference."""
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return {"ms": 1e3 * median(samples), "ms_low": 1e3 * low, "ms_high": 1e3 * high}
