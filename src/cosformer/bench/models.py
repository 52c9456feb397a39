"""Whole causal language models, a mixer each, in the same blocks: cost of a training step and of decoding.

Training is a forward and a backward of the loss, batch 1; decoding feeds one token after a context. A token
cannot be had sooner than the weights are read, so decoding is shown beside that bound: their bytes over the
speed at which memory is read. A model that fits into the caches can be a little faster.
"""

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ..hf import CosformerConfig, CosformerForCausalLM
from ..hf.sizes import Size
from ..mixers import pattern
from ..results import Cost
from .measure import Say, Work, in_turns, peak_memories

MIXERS = ["cosformer", "cosformer-paper", "softmax+rope"]
LENGTHS = [1024, 4096, 16384]
CONTEXTS = [64, 512, 4096, 65_536]
SIZE = Size(4, 256, 4, feedforward=1536)
VOCABULARY = 256
BIG = 1 << 28  # bytes: more than the caches hold
ROOM = 32_768  # positions after the context, for the tokens that are decoded while the time is taken


def build(mixer: str, length: int, size: Size) -> Any:
    """A causal language model; softmax+rope is Llama as transformers has it, with its own cache."""
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": size.width,
        "intermediate_size": 32 * round((size.feedforward or 4 * size.width) / 48),  # gated: three matrices
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": length,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    if mixer == "softmax+rope":
        return LlamaForCausalLM._from_config(LlamaConfig(**fields), attn_implementation="sdpa")
    return CosformerForCausalLM(CosformerConfig(**fields, mixer=mixer))


def able(mixer: str, work: str) -> bool:
    """Whether a mixer can do the work in a causal model: not all have a causal form, or keep a cache."""
    ids = torch.zeros(1, 4, dtype=torch.long)
    try:
        with torch.no_grad():
            build(mixer, 16, Size(1, 16, 1)).eval()(input_ids=ids, use_cache=work == "decoding")
    except ValueError:
        return False
    return True


def prepare(case: dict[str, Any]) -> Work:
    """A function that does one training step."""
    model = build(case["mixer"], case["length"], Size(**case["size"])).train()
    ids = torch.randint(VOCABULARY, (1, case["length"]))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return step


def training(
    mixers: list[str], length: int, *, size: Size, seconds: float, say: Say, memory: bool = True
) -> list[Cost]:
    """Rows of training cost at one length; the mixers take turns."""
    cases: list[dict[str, Any]] = [{"mixer": m, "length": length, "size": asdict(size)} for m in mixers]
    works = {case["mixer"]: prepare(case) for case in cases}
    timed = in_turns(works, seconds=seconds, say=lambda text: say(f"training at {length:,}, {text}"))
    say(f"peak memory of training at {length:,}")
    peaks = peak_memories(__name__, cases) if memory else [None] * len(cases)
    row = partial(Cost, what="model", work="training", causal=True, length=length, size=str(size))
    return [row(mixer=m, **timed[m], memory_mib=mib) for m, mib in zip(mixers, peaks, strict=True)]


def decoding(mixers: list[str], context: int, *, size: Size, seconds: float, say: Say) -> list[Cost]:
    """Rows of decoding cost: one token after a context."""
    steps = {}
    for mixer in mixers:
        say(f"reading {context:,} tokens, {mixer}")
        steps[mixer] = decoder(build(mixer, context + ROOM, size).eval(), context)
    works = {mixer: step for mixer, (step, _) in steps.items()}
    timed = in_turns(works, seconds=seconds, say=lambda text: say(f"decoding after {context:,}, {text}"))
    row = partial(Cost, what="model", work="decoding", causal=True, length=context, size=str(size))
    return [row(mixer=mixer, **timed[mixer], cache_bytes=cached) for mixer, (_, cached) in steps.items()]


def decoder(model: Any, context: int) -> tuple[Work, int]:
    """A function that decodes one more token after a context, and the bytes of cache at its start."""
    ids, first = torch.randint(VOCABULARY, (1, context)), None
    with torch.inference_mode():
        if type(model) is LlamaForCausalLM:
            cache = filled(model.config, context)
        else:
            cache = model(input_ids=ids, logits_to_keep=1, use_cache=True).past_key_values
            first = copy.deepcopy(cache)
    size, token, left = cache_bytes(cache), ids[:, -1:], ROOM

    def step() -> None:
        nonlocal cache, left
        if first is not None and not left:  # a fast machine decodes more than there is room for
            cache, left = copy.deepcopy(first), ROOM
        with torch.inference_mode():
            model(input_ids=token, past_key_values=cache, use_cache=True)
            if first is None:  # the next token stands after the same context; a state costs the same anywhere
                cache.crop(-1)
        left -= 1

    return step, size


def filled(config: LlamaConfig, context: int) -> DynamicCache:
    """Llama's cache after a context, with any numbers in it: reading a long one would take minutes."""
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(2, 1, config.num_key_value_heads, context, config.head_dim), layer)
    return cache


def bytes_read(mixer: str, length: int, size: Size) -> int:
    """The bytes of weights that one token needs: all but the table of embeddings, of which it takes a row."""
    model = build(mixer, length, size)
    table = model.get_input_embeddings().weight
    return sum(p.nbytes for p in model.parameters() if p is not table)


def bandwidth() -> float:
    """The bytes a second at which all threads read memory: the best of a few sums of one large tensor."""
    numbers = torch.ones(BIG // 4)
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        taken.append(time.perf_counter() - start)
    return BIG / min(taken)


def cache_bytes(cache: DynamicCache) -> int:
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def run(args: argparse.Namespace, say: Say) -> Iterator[Cost]:
    """Training steps, then decoding after each context."""
    mixers = args.models or MIXERS
    for mixer in mixers:
        try:
            pattern(mixer)
        except ValueError as error:
            raise SystemExit(f"bench: {error}") from None
    lengths, contexts = args.lengths or LENGTHS, CONTEXTS[:1] if args.quick else CONTEXTS
    for length in lengths:
        seconds = args.seconds / len(lengths)
        yield from training(mixers, length, size=SIZE, seconds=seconds, say=say, memory=False)
    decoders = [mixer for mixer in mixers if able(mixer, "decoding")]
    for context in contexts:
        yield from decoding(decoders, context, size=SIZE, seconds=args.seconds / len(contexts), say=say)


def summary(rows: list[Cost]) -> str:
    """Each model's speed over softmax's at each length, and its slow-down with the context."""
    lines = []
    rates = {(r.mixer, r.length): r.tokens_per_second for r in rows if r.work == "training"}
    for (mixer, length), rate in rates.items():
        softmax = rates.get(("softmax+rope", length))
        ratio = f"  {rate / softmax:.2f}x softmax" if softmax and mixer != "softmax+rope" else ""
        lines.append(f"training, length {length:>6}: {mixer:<20} {rate:>8,.0f} tokens/s{ratio}")
    decoded = [row for row in rows if row.work == "decoding"]
    rates = {(r.mixer, r.length): r.tokens_per_second for r in decoded}
    speed = bandwidth() if decoded else 0.0
    bounds = {mixer: speed / bytes_read(mixer, 64, SIZE) for mixer in dict.fromkeys(r.mixer for r in decoded)}
    for row in decoded:
        rate, softmax, held = row.tokens_per_second, rates.get(("softmax+rope", row.length)), row.cache_bytes
        said = f"{row.ms:.2f} ms/token, {rate:,.0f} tokens/s, {rate / bounds[row.mixer]:.2f} of the bound"
        if softmax and row.mixer != "softmax+rope":
            said += f", {rate / softmax:.2f}x softmax"
        lines.append(
            f"decoding after {row.length:>6}: {row.mixer:<20} {said}, {(held or 0) / 2**20:.2f} MiB of cache"
        )
    for mixer, bound in bounds.items():
        said = f"{bound:,.0f} tokens/s, its weights read once at {speed / 1e9:.1f} GB/s"
        lines.append(f"bound of decoding:     {mixer:<20} {said}")
    for mixer in dict.fromkeys(row.mixer for row in decoded):
        first, last = (next(r for r in order if r.mixer == mixer) for order in (decoded, decoded[::-1]))
        if first is not last:
            ratio = f"{last.ms / first.ms:.2f}x the time"
            lines.append(f"decoding after {last.length} / {first.length}: {mixer:<20} {ratio}")
    return "\n".join(lines)
