"""The `--models` part of the benchmark: whole models, cosFormer beside softmax in the same architecture, as JSON-able rows.

Training is a forward and a backward of the language-model loss; decoding feeds one token at a time after a context.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from . import CosformerConfig, CosformerForCausalLM

LENGTHS = (1024, 4096, 16384)
CONTEXTS = (512, 16384)
SIZES = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None}
TOKENS = 64  # decoded after each context


def models() -> dict[str, LlamaForCausalLM]:
    """The same blocks three times: ours as recommended, ours as in the paper, and softmax."""
    torch.manual_seed(0)
    return {
        "cosformer": CosformerForCausalLM(CosformerConfig(**SIZES)),
        "cosformer, no decay": CosformerForCausalLM(CosformerConfig(**SIZES, decay=None)),
        "sdpa": LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="sdpa"),
    }


def training(*, lengths=LENGTHS, repeats: int = 3) -> Iterator[dict]:
    """Tokens per second of a training step at batch 1. The models take turns, so a slow moment of the machine meets all."""
    made = models()
    for length in lengths:
        ids = torch.randint(256, (1, length))
        for name, seconds in _in_turns({name: _step(model.train(), ids) for name, model in made.items()}, repeats).items():
            yield {"what": "training", "model": name, "length": length, "tokens_per_second": length / seconds}


def decoding(*, contexts=CONTEXTS, repeats: int = 3) -> Iterator[dict]:
    """Milliseconds per decoded token and bytes of cache after each context."""
    for name, model in models().items():
        model.eval()
        for context in contexts:
            ids, times = torch.randint(256, (1, context)), []
            with torch.inference_mode():
                cache = model(ids, logits_to_keep=1, use_cache=True).past_key_values
                size, token = cache_bytes(cache), ids[:, -1:]
                for _ in range(repeats):
                    started = time.perf_counter()
                    for _ in range(TOKENS // repeats):
                        token = model(token, past_key_values=cache, use_cache=True).logits.argmax(-1)
                    times.append((time.perf_counter() - started) / (TOKENS // repeats))
            ms = 1e3 * statistics.median(times)
            yield {"what": "decoding", "model": name, "context": context, "ms_per_token": ms, "cache_bytes": size}


def cache_bytes(cache: DynamicCache) -> int:
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def ratios(rows: list[dict]) -> list[str]:
    """What the rows say, in lines: our speed over softmax's at each length, and each model's slow-down with the context."""
    lines = []
    rate = {(r["model"], r["length"]): r["tokens_per_second"] for r in rows if r["what"] == "training"}
    for (name, length), value in rate.items():
        if name != "sdpa":
            lines.append(f"training, N = {length}: {name} / sdpa = {value / rate['sdpa', length]:.2f}x")
    decoded = [r for r in rows if r["what"] == "decoding"]
    for name in dict.fromkeys(r["model"] for r in decoded):
        first, *_, last = [r for r in decoded if r["model"] == name]
        slower, larger = (last[key] / first[key] for key in ("ms_per_token", "cache_bytes"))
        contexts = f"context {last['context']} / {first['context']}"
        lines.append(f"decoding, {name}: {contexts}: time {slower:.2f}x, cache {larger:.2f}x")
    return lines


def _step(model: LlamaForCausalLM, ids: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return step


def _in_turns(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """The median time of each call, after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(found) for name, found in times.items()}
