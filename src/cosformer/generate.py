"""cosformer generate: continue a prompt with a saved model, token by token on the terminal."""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from threading import Thread

DEFAULT_NEW_TOKENS = 100


def load(directory: str | Path):
    """The model and tokenizer saved in a directory; SystemExit says what is missing."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    from . import hf  # noqa: F401  registers the Cosformer model types

    directory = Path(directory)
    if not directory.is_dir():
        raise SystemExit(f"--model {directory}: there is no such directory")
    needed = {
        "config": ["config.json"],
        "weights": ["*.safetensors"],
        "tokenizer": ["tokenizer*", "vocab*", "spiece.model"],
    }
    for what, patterns in needed.items():
        if not any(path for pattern in patterns for path in directory.glob(pattern)):
            raise SystemExit(
                f"--model {directory}: no {what} in it ({', '.join(patterns)}); save_pretrained writes it"
            )
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = auto.from_pretrained(directory, local_files_only=True, **attention_of(config))
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise SystemExit(f"--model {directory}: {error}") from error
    return model.eval(), tokenizer


def attention_of(config) -> dict:
    """A foreign architecture that carries cosFormer options was trained with them; its saved config does not say so itself."""
    return {"attn_implementation": "cosformer"} if getattr(config, "cosformer", None) is not None else {}


def most_tokens(config) -> float:
    """How many tokens of one text a model reads at most: as far as its horizon and its learned positions go."""
    from .hf.interface import max_positions

    if config.model_type.startswith("cosformer"):
        limited = config.mixer == "cosformer" and "linear_attention" in config.layer_types
        given, learned = config.horizon, config.positions == "learned"
    else:  # a foreign architecture; softmax's limit is its own affair
        limited = getattr(config, "cosformer", None) is not None
        given = config.cosformer.get("horizon") if limited else None
        learned = limited and given is None  # it may have a vector for each of its positions
    horizon = (max_positions(config) if given is None else given) if limited else math.inf
    reach = (
        horizon if horizon == math.inf else int(horizon) + 1
    )  # the first and the last token may lie a horizon apart
    return min(reach, max_positions(config)) if learned else reach


def room(config, *, prompt: int) -> float:
    """How many tokens fit after a prompt; the last one is never read. An encoder-decoder's text starts with one token instead."""
    return most_tokens(config) + 1 - (1 if config.is_encoder_decoder else prompt)


def new_tokens(config, *, prompt: int, asked: int | None) -> int:
    """The number of tokens to write; SystemExit where there is no room for what was asked."""
    most, left = most_tokens(config), room(config, prompt=prompt)
    if left < 1:
        raise SystemExit(
            f"--prompt has {prompt} tokens, but this model reads at most {most}; give a shorter one"
        )
    if asked is None:
        return int(min(DEFAULT_NEW_TOKENS, left))
    if asked > left:
        where = "" if config.is_encoder_decoder else f"after a prompt of {prompt} tokens "
        raise SystemExit(
            f"--max-new-tokens is {asked}, but {where}this model can write {left}: it reads at most {most} tokens"
        )
    return asked


def generate(model, tokenizer, prompt: str, **options) -> Iterator[str]:
    """Yield the continuation of a prompt piece by piece; options are those of transformers' `generate`."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    pieces = Pieces(tokenizer)
    failure = []

    def work() -> None:
        try:
            model.generate(**inputs, streamer=pieces, **options)
        except Exception as error:  # raised again in the caller's thread
            failure.append(error)
            pieces.end()

    thread = Thread(target=work, daemon=True)
    thread.start()
    yield from iter(pieces.queue.get, None)
    thread.join()
    if failure:
        raise failure[0]


class Pieces:
    """A transformers streamer that queues text once its bytes are whole; transformers' own waits for the end of a word."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.queue: Queue[str | None] = Queue()
        self.tokens: list[int] = []
        self.sent = 0  # characters of this line
        self.prompt = True

    def put(self, value) -> None:
        if self.prompt:  # generate hands over the prompt first
            self.prompt = False
            return
        self.tokens += value.flatten().tolist()
        if not (text := self.text()).endswith("\ufffd"):  # an unfinished character
            self.send(text)

    def end(self) -> None:
        self.send(self.text())
        self.queue.put(None)

    def text(self) -> str:
        return self.tokenizer.decode(self.tokens, skip_special_tokens=True)

    def send(self, text: str) -> None:
        if len(text) > self.sent:
            self.queue.put(text[self.sent :])
            self.sent = len(text)
        if text.endswith("\n"):  # a line is decoded from its own tokens, so the cost of a token does not grow
            self.tokens, self.sent = [], 0


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("cosformer generate", description=__doc__)
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="written by save_pretrained, with a tokenizer"
    )
    parser.add_argument(
        "--prompt", required=True, help="the text to continue, or - to read it from standard input"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        help=f"default: {DEFAULT_NEW_TOKENS}, or fewer where the model's horizon leaves less room",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0, the default, takes the likeliest token; higher is more varied",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=50,
        help="sample among this many tokens (with --temperature; default: 50)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="decides the sample (with --temperature; default: 0)"
    )
    given = parser.parse_args(argv)
    if given.max_new_tokens is not None and given.max_new_tokens < 1:
        parser.error(f"--max-new-tokens is {given.max_new_tokens}; it must be at least 1")
    if given.temperature < 0:
        parser.error(f"--temperature is {given.temperature}; it must be 0 or more")
    prompt = sys.stdin.read() if given.prompt == "-" else given.prompt
    if not prompt:
        parser.error("--prompt is empty; there is nothing to continue")
    model, tokenizer = load(given.model)

    import torch

    torch.manual_seed(given.seed)
    fitting = new_tokens(model.config, prompt=len(tokenizer(prompt).input_ids), asked=given.max_new_tokens)
    options = {"max_new_tokens": fitting, "do_sample": given.temperature > 0}
    if given.temperature > 0:
        options |= {"temperature": given.temperature, "top_k": given.top_k}
    try:
        for piece in generate(model, tokenizer, prompt, **options):
            print(piece, end="", flush=True)
    except ValueError as error:  # such as a source longer than the encoder's positions
        raise SystemExit(f"\ncosformer generate: {error}") from error
    print()
