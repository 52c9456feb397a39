"""Whole models: cosFormer beside softmax in the same architecture, training and decoding.

Training is a forward and a backward of the language-model loss; decoding feeds one token at a time after a context.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ..hf import CosformerConfig, CosformerForCausalLM
from .measure import in_turns, spread

LENGTHS = (1024, 4096, 16384)
CONTEXTS = (512, 16384)
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
SIZES |= {"max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None}


def models() -> dict[str, LlamaForCausalLM]:
    """The same blocks three times: ours as recommended, ours as in the paper, and softmax."""
    torch.manual_seed(0)
    return {
        "cosformer": CosformerForCausalLM(CosformerConfig(**SIZES)),
        "cosformer, no decay": CosformerForCausalLM(CosformerConfig(**SIZES, decay=None)),
        "sdpa": LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="sdpa"),
    }


def run(args: argparse.Namespace, progress: Callable[[str], None]) -> list[dict]:
    """Training steps at batch 1 in turns, then decoding after each context."""
    made = models()
    rows = []
    for length in args.lengths or LENGTHS:
        ids = torch.randint(256, (1, length))
        works = {name: _step(model.train(), ids) for name, model in made.items()}
        for name, samples in in_turns(
            works, seconds=args.seconds / 3, progress=lambda t: progress(f"training, length {length}, {t}")
        ).items():
            row: dict[str, Any] = {
                "bench": "models",
                "what": "training",
                "model": name,
                "length": length,
                **spread(samples),
            }
            rows.append(row | {"tokens_per_second": length / (row["ms"] / 1e3)})
    for context in CONTEXTS if not args.quick else CONTEXTS[:1]:
        steps = {name: _decoder(model.eval(), context) for name, model in made.items()}
        works = {name: step for name, (step, _) in steps.items()}
        for name, samples in in_turns(
            works, seconds=args.seconds / 6, progress=lambda t: progress(f"decoding, {t}")
        ).items():
            row = {
                "bench": "models",
                "what": "decoding",
                "model": name,
                "context": context,
                **spread(samples),
            }
            rows.append(row | {"cache_bytes": steps[name][1]})
    return rows


def _decoder(model: LlamaForCausalLM, context: int) -> tuple[Callable[[], None], int]:
    """A function that decodes one more token after a context, and the bytes of cache at its start."""
    ids = torch.randint(256, (1, context))
    with torch.inference_mode():
        cache = model(ids, logits_to_keep=1, use_cache=True).past_key_values
    token = ids[:, -1:]

    def step() -> None:
        with torch.inference_mode():
            model(token, past_key_values=cache, use_cache=True)

    return step, cache_bytes(cache)


def cache_bytes(cache: DynamicCache) -> int:
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def summary(rows: list[dict]) -> str:
    """Our speed over softmax's at each length, and each model's slow-down with the context."""
    lines = []
    rate = {(r["model"], r["length"]): r["tokens_per_second"] for r in rows if r["what"] == "training"}
    for (name, length), value in rate.items():
        ratio = "" if name == "sdpa" else f"  {value / rate['sdpa', length]:.2f}x softmax"
        lines.append(f"training, length {length:>6}: {name:<20} {value:>8,.0f} tokens/s{ratio}")
    for row in (r for r in rows if r["what"] == "decoding"):
        size = f"{row['cache_bytes'] / 2**20:.2f} MiB of cache"
        lines.append(
            f"decoding, context {row['context']:>6}: {row['model']:<20} {row['ms']:.2f} ms/token, {size}"
        )
    for name in dict.fromkeys(r["model"] for r in rows if r["what"] == "decoding"):
        contexts = [r for r in rows if r["what"] == "decoding" and r["model"] == name]
        first, last = contexts[0], contexts[-1]
        if first is not last:
            ratio = last["ms"] / first["ms"]
            lines.append(
                f"decoding, context {last['context']} / {first['context']}: {name:<20} {ratio:.2f}x the time"
            )
    return "\n".join(lines)


def _step(model: LlamaForCausalLM, ids: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return step
