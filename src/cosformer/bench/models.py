"""Whole causal language models, a mixer each, in the same blocks: cost of a training step and of decoding.

Softmax appears twice: in our blocks, where only the mixer differs, and as transformers' Llama.

Training is forward and backward of the loss, batch 1; decoding feeds one token after a context; generating is
the time per token of greedy `generate` after it, including all that `generate` does around the model. No
token can come sooner than the weights are read, so generating is shown beside that bound: the weights' bytes
over the memory bandwidth. A model that fits into the caches can be faster.
"""

import argparse
import copy
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import fields as fields_of
from functools import partial
from typing import Any, cast

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from .. import mixers as registry
from ..hf import CosformerConfig, CosformerForCausalLM
from ..hf.int8 import rounded
from ..hf.sizes import SIZES, Size
from ..results import Cost
from .measure import Say, Work, in_turns, measured

LLAMA = "llama"  # transformers' softmax with rotary positions: another model, with its own cache
MIXERS = ["cosformer", "cosformer-paper", "cosformer-hybrid", "softmax+rope", LLAMA]
LENGTHS = [1024, 4096, 16384]
CONTEXTS = [64, 512, 4096, 65_536]
SIZE = Size(4, 256, 4, feedforward=1536)
VOCABULARY = 256
FIELDS = {field.name for field in fields_of(CosformerConfig)}
BIG = 1 << 28  # bytes, more than the caches hold
TOKENS = 64  # per call of `generate`


def build(mixer: str, length: int, size: Size) -> Any:
    """A causal language model, of our blocks or Llama."""
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        **size.fields(),
        "max_position_embeddings": length,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    if mixer == LLAMA:
        return LlamaForCausalLM._from_config(LlamaConfig(**fields), attn_implementation="sdpa")
    return CosformerForCausalLM(CosformerConfig(**fields, **changed(mixer)))


def changed(mixer: str) -> dict[str, Any]:
    """The config's fields that a name asks for: "cosformer", or "cosformer:short_conv=0,qk_norm=false", with
    fields and options of the mixer, as JSON values."""
    name, _, changes = mixer.partition(":")
    fields: dict[str, Any] = {"mixer": name, "mixer_options": {}}
    for change in filter(None, changes.split(",")):
        key, equals, value = change.partition("=")
        option = key in registry.options(registry.pattern(name)[0])
        if not equals or not (option or key in FIELDS):
            raise ValueError(f"{mixer!r}: {change!r} is no FIELD=VALUE of a config or of its mixer")
        try:
            (fields["mixer_options"] if option else fields)[key] = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f'{mixer!r}: {key} must be JSON, such as 0, false or "x"; got {value}') from None
    return fields


def able(mixer: str, work: str) -> bool:
    """Whether a mixer can do the work in a causal model: not all have a causal form or a cache."""
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
    found = measured(__name__, cases, label="training", seconds=seconds, memory=memory, say=say)
    row = partial(Cost, what="model", work="training", causal=True, length=length, size=str(size))
    return [row(mixer=mixer, **fields) for mixer, fields in zip(mixers, found, strict=True)]


def decoding(mixers: list[str], context: int, *, size: Size, seconds: float, say: Say) -> list[Cost]:
    """Rows of decoding cost: one token after a context."""
    steps = {}
    for mixer in mixers:
        say(f"reading {context:,} tokens, {mixer}")
        steps[mixer] = decoder(build(mixer, longest(context) + TOKENS, size).eval(), context)
    works = {mixer: step for mixer, (step, _) in steps.items()}
    timed = in_turns(works, seconds=seconds, say=lambda text: say(f"decoding after {context:,}, {text}"))
    row = partial(Cost, what="model", work="decoding", causal=True, length=context, size=str(size))
    return [row(mixer=mixer, **timed[mixer], cache_bytes=cached) for mixer, (_, cached) in steps.items()]


def generating(
    mixers: list[str], context: int, *, size: Size, seconds: float, say: Say, weights: list[str] | None = None
) -> list[Cost]:
    """Rows of the cost per token of `generate` after a context, for each kind of weights."""
    works, bytes_ = {}, {}
    for mixer, kind in itertools.product(mixers, weights or ["float32"]):
        if mixer == LLAMA and kind == "int8":  # only our models have it
            continue
        say(f"reading {context:,} tokens, {mixer}, {kind}")
        model = rounded(build(mixer, longest(context) + TOKENS, size).eval(), kind)
        works[mixer, kind], bytes_[mixer, kind] = generator(model, context), bytes_read(model)
    timed = in_turns(works, seconds=seconds, say=lambda text: say(f"generating after {context:,}, {text}"))
    speed = bandwidth()
    row = partial(Cost, what="model", work="generating", causal=True, length=context, size=str(size))
    rows = []
    for (mixer, kind), fields in timed.items():
        a_token = {name: fields[name] / TOKENS for name in ("ms", "ms_low", "ms_high")}
        bound = 1e3 * bytes_[mixer, kind] / speed
        rows.append(row(mixer=mixer, dtype=kind, **(fields | a_token), bound_ms=bound))
    return rows


def generator(model: Any, context: int) -> Work:
    """A function that lets `generate` write `TOKENS` tokens after a text of about `context` tokens.

    Llama's cache is cropped each time. A state cannot be: the text grows up to `longest` and then starts
    again with a copy of its first cache.
    """
    begin = torch.randint(VOCABULARY, (1, context + 1))
    first, text = after(model, begin[:, :-1]), begin
    crops, most = type(model) is LlamaForCausalLM, longest(context)
    cache = first if crops else copy.deepcopy(first)

    def write() -> None:
        nonlocal cache, text
        mask = torch.ones_like(text)
        given = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
        text = model.generate(text, past_key_values=cache, **given)
        if crops:
            cache.crop(-TOKENS)
            text = begin
        elif text.shape[1] > most:
            cache, text = copy.deepcopy(first), begin

    return write


def after(model: Any, ids: torch.Tensor) -> Any:
    """A model's cache after a text; Llama's is filled at random."""
    if type(model) is LlamaForCausalLM:
        return filled(model, ids.shape[1])
    with torch.inference_mode():
        return model(input_ids=ids, logits_to_keep=1, use_cache=True).past_key_values


def decoder(model: Any, context: int) -> tuple[Work, int]:
    """A function that decodes one more token after a context, and the bytes of cache at its start."""
    ids = torch.randint(VOCABULARY, (1, context))
    first, crops = after(model, ids), type(model) is LlamaForCausalLM
    cache = first if crops else copy.deepcopy(first)
    token, most = ids[:, -1:], longest(context)

    def step() -> None:
        nonlocal cache
        with torch.inference_mode():
            model(input_ids=token, past_key_values=cache, use_cache=True)
            if crops:
                cache.crop(-1)
        if cache.get_seq_length() > most:
            cache = copy.deepcopy(first)

    return step, cache_bytes(first)


def longest(context: int) -> int:
    """How long a text may grow before it starts again: softmax layers get slower with every token."""
    return context + max(context // 4, 4 * TOKENS)


def filled(model: LlamaForCausalLM, context: int) -> DynamicCache:
    """Llama's cache after a context, with random content: reading a long one would take minutes."""
    config, cache = model.config, DynamicCache(config=model.config)
    shape = 2, 1, config.num_key_value_heads, context, config.head_dim
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(shape, dtype=model.dtype), layer)
    return cache


def bytes_read(model: Any) -> int:
    """The bytes of weights that one token reads: all but the embedding table, of which it reads one row."""
    table = model.get_input_embeddings().weight
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if t is not table)


def bandwidth() -> float:
    """Bytes per second at which all threads read memory: the best of five sums of one large tensor."""
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
    """Training steps, then decoding and generating after each context."""
    if args.size not in (None, *SIZES):
        raise SystemExit(f"bench: --size {args.size} is unknown; one of {', '.join(SIZES)}")
    mixers, size = args.models or MIXERS, SIZES[args.size] if args.size else SIZE
    try:
        for mixer in mixers:
            build(mixer, 16, Size(1, 16, 1))
    except (ValueError, TypeError) as error:
        raise SystemExit(f"bench: --models {error}") from None
    lengths, contexts = args.lengths or LENGTHS, args.contexts or (CONTEXTS[:1] if args.quick else CONTEXTS)
    for length in lengths if "training" in args.work else ():
        seconds = args.seconds / len(lengths)
        yield from training(mixers, length, size=size, seconds=seconds, say=say, memory=False)
    decoders = [mixer for mixer in mixers if able(mixer, "decoding")]
    options: dict[str, Any] = {"size": size, "seconds": args.seconds / len(contexts), "say": say}
    for context in contexts:
        if "decoding" in args.work:
            yield from decoding(decoders, context, **options)
        if "generating" in args.work:
            yield from generating(decoders, context, weights=args.weights, **options)


def notes(rows: list[Cost]) -> list[str]:
    """The speed of `generate` for each model, and its bound."""
    found: dict[tuple[str, str], list[Cost]] = {}
    for row in rows:
        if row.work == "generating":
            found.setdefault((row.mixer, row.dtype), []).append(row)
    said = []
    for (mixer, kind), group in found.items():
        speeds = ", ".join(f"{1e3 / row.ms:,.0f} after {row.length:,}" for row in group)
        bound = sum(cast(float, row.bound_ms) for row in group) / len(group)
        said.append(
            f"tokens a second of generate: {mixer}, {kind}: {speeds}; weights read once {bound:.2f} ms"
        )
    return said
