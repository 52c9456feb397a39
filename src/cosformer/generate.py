"""cosformer generate: continue a prompt with a saved model, word by word on the terminal."""

import argparse
import sys
from pathlib import Path

from .seal import damage

DEFAULT_NEW_TOKENS, DEFAULT_TOP_K = 100, 50


def load(directory: str | Path):
    """The model and tokenizer saved in a directory; SystemExit says what is missing."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    from . import hf  # noqa: F401  registers the Cosformer model types

    logging.set_verbosity_error()
    logging.disable_progress_bar()
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
            if saved := sorted(directory.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime):
                raise SystemExit(f"--model {directory}: its run is not finished; {saved[-1]} is a model")
            files = ", ".join(patterns)
            raise SystemExit(f"--model {directory}: no {what} in it ({files}); save_pretrained writes it")
    if (fault := damage(directory, model=True)) is not None:
        raise SystemExit(f"--model {directory} is damaged: {fault}; cosformer train --resume makes it again")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        if type(config) not in auto._model_mapping:
            raise ValueError(f"a {config.model_type} model cannot continue a text")
        # A saved config does not name its attention; a foreign one with cosFormer options used ours.
        foreign = getattr(config, "cosformer", None) is not None
        attention = {"attn_implementation": "cosformer"} if foreign else {}
        model = auto.from_pretrained(directory, local_files_only=True, **attention)
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # tokenizers raises a bare Exception for a damaged file
        raise SystemExit(f"--model {directory}: {' '.join(str(error).split())}") from error
    return model.eval(), tokenizer


def tokens_left(config, *, prompt: int) -> float:
    """How many tokens fit after a prompt; the last is never read. An encoder-decoder starts from one."""
    from .hf.reach import most_tokens

    return most_tokens(config) + 1 - (1 if config.is_encoder_decoder else prompt)


def new_tokens(config, *, prompt: int, asked: int | None) -> int:
    """The number of tokens to write; SystemExit if there is no room for `asked`."""
    from .hf.reach import most_tokens

    most, left = most_tokens(config), tokens_left(config, prompt=prompt)
    if left < 1:
        told = f"--prompt has {prompt} tokens, but this model reads at most {most}"
        raise SystemExit(f"{told}; give a shorter one")
    if asked is None:
        return int(min(DEFAULT_NEW_TOKENS, left))
    if asked > left:
        where = "" if config.is_encoder_decoder else f"after a prompt of {prompt} tokens "
        can = f"{where}this model can write {left}: it reads at most {most} tokens"
        raise SystemExit(f"--max-new-tokens is {asked}, but {can}")
    return asked


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("cosformer generate", description=__doc__)
    add = p.add_argument
    # fmt: off
    add("--model", required=True, metavar="DIR", help="written by save_pretrained, with a tokenizer")
    add("--prompt", required=True, help="the text to continue, or - to read it from standard input")
    add("--max-new-tokens", "--max_new_tokens", type=int,
        help=f"default: {DEFAULT_NEW_TOKENS}, or fewer where the model's horizon leaves less room")
    add("--temperature", type=float, default=0.0,
        help="0, the default, takes the likeliest token; higher is more varied")
    add("--top-k", "--top_k", type=int,
        help=f"sample among so many (with --temperature; default: {DEFAULT_TOP_K})")
    add("--seed", type=int, default=0, help="decides the sample (with --temperature; default: 0)")
    add("--weights", choices=["bfloat16", "int8"],
        help="round them to read fewer bytes a token (default: as they were saved)")
    # fmt: on
    return p


def main(argv: list[str]) -> None:
    p = parser()
    given = p.parse_args(argv)
    if given.max_new_tokens is not None and given.max_new_tokens < 1:
        p.error(f"--max-new-tokens is {given.max_new_tokens}; it must be at least 1")
    if given.temperature < 0:
        p.error(f"--temperature is {given.temperature}; it must be 0 or more")
    if given.top_k is not None and given.top_k < 1:
        p.error(f"--top-k is {given.top_k}; it must be at least 1")
    if given.top_k is not None and not given.temperature:
        p.error(f"--top-k is {given.top_k}, but without a --temperature the likeliest token is taken")
    prompt = sys.stdin.read() if given.prompt == "-" else given.prompt
    if not prompt:
        p.error("--prompt is empty; there is nothing to continue")
    model, tokenizer = load(given.model)
    if given.weights is not None:
        from .hf.int8 import rounded

        try:
            model = rounded(model, given.weights)
        except (TypeError, ValueError) as error:
            raise SystemExit(f"--weights {given.weights}: {error}") from error

    import torch
    from transformers import TextStreamer

    torch.manual_seed(given.seed)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    fitting = new_tokens(model.config, prompt=inputs.input_ids.shape[1], asked=given.max_new_tokens)
    options = {"max_new_tokens": fitting, "do_sample": given.temperature > 0}
    if given.temperature > 0:
        options |= {"temperature": given.temperature, "top_k": given.top_k or DEFAULT_TOP_K}
    try:
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        model.generate(**inputs, streamer=streamer, **options)
    except ValueError as error:  # such as a source longer than the encoder's positions
        raise SystemExit(f"\ncosformer generate: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
