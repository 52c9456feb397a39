"""Text to ids: bytes, any Hugging Face tokenizer by path, or a byte-level BPE trained on the data."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .cache import hashed, prepared
from .contract import DataError, Special

BYTES = 256
LEAST = Special.count + BYTES  # smallest vocabulary: with all bytes it can write anything
ENOUGH = 1 << 26  # bytes of text that suffice to train a vocabulary
SPELLED = 24  # mean bytes per text up to which texts are spelled in bytes: words, names, dates
BYTES_AN_ENTRY = 512  # bytes of training text per entry of a vocabulary
FEWEST, MOST = 512, 8192  # entries


def byte_characters() -> list[str]:
    """The printable character byte-level tokenizers write for each byte (GPT-2's table)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [character for _, character in sorted(bytes_to_unicode().items())]


class Encoder:
    """A tokenizer with all special ids, and what tasks need to know of its vocabulary."""

    def __init__(self, tokenizer: Any, *, is_bytes: bool = False, notes: tuple[str, ...] = ()):
        self.tokenizer, self.is_bytes, self.notes = tokenizer, is_bytes, notes
        has = {"pad": tokenizer.pad_token, "mask": tokenizer.mask_token}
        has["eos"] = tokenizer.eos_token or tokenizer.sep_token
        if missing := [role for role, token in has.items() if token is None]:
            tokenizer.add_special_tokens({f"{role}_token": f"<{role}>" for role in missing})
        first = [tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id]
        last = [tokenizer.eos_token_id, tokenizer.sep_token_id]
        self.special = Special(
            pad=tokenizer.pad_token_id,
            bos=next(i for i in first if i is not None),  # GPT-2 has one token for both ends
            eos=next(i for i in last if i is not None),
            sep=next(i for i in last[::-1] if i is not None),
            mask=tokenizer.mask_token_id,
        )
        self.size = len(tokenizer)
        self._backend = tokenizer.backend_tokenizer
        self._backend.encode_special_tokens = True  # "<mask>" written in a text is text, not the token
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Each text's ids, without special tokens."""
        if self.is_bytes:  # the same ids as the tokenizer's, a hundred times faster
            return [np.frombuffer(x.encode(), np.uint8) + np.uint16(Special.count) for x in texts]
        found = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(x.ids, np.uint32) for x in found]

    def fields(self, content: str, length: int, *, single: str, pair: str = "$A $B") -> dict[str, Any]:
        """The fields of a task over this content that come from its vocabulary.

        The tokenizer, saved beside the model, will cut texts to `length` and add the special tokens of
        training: `single` and `pair` are templates of $A, $B and the roles of `Special`.
        """
        from tokenizers.processors import TemplateProcessing

        ids = asdict(self.special)
        tokens = dict(zip(ids, self.tokenizer.convert_ids_to_tokens(list(ids.values()))))
        one, two = ([tokens.get(part, part) for part in form.split()] for form in (single, pair))
        special = [(tokens[role], number) for role, number in ids.items()]
        self._backend.post_processor = TemplateProcessing(single=one, pair=two, special_tokens=special)
        self.tokenizer.model_max_length = length
        name = hashed(content, self.tokenizer.get_vocab())
        known = {"vocab_size": self.size, "special": self.special, "tokenizer": self.tokenizer}
        return {**known, "max_length": length, "fingerprint": name}

    def content(self) -> np.ndarray:
        """Ids that are not special, ascending."""
        return np.setdiff1d(np.arange(self.size), self.tokenizer.all_special_ids)

    def vocabulary(self) -> str:
        """All that encoding depends on, as JSON."""
        return self._backend.to_str()

    def _strings(self) -> list[str]:
        """Every id's token as written in the vocabulary."""
        return self.tokenizer.convert_ids_to_tokens(list(range(self.size)))

    def byte_lengths(self) -> np.ndarray | None:
        """Bytes of text behind each id (0 if special), or None where tokens are not strings of bytes."""
        decoder = json.loads(self._backend.to_str())["decoder"] or {}
        if decoder.get("type") != "ByteLevel":
            return None
        lengths = np.array([len(token) for token in self._strings()])
        lengths[self.tokenizer.all_special_ids] = 0
        return lengths

    def joins(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether each id may continue a word to its left, and be continued to its right."""
        byte = {c: b for b, c in enumerate(byte_characters())}
        left, right = np.zeros((2, self.size), bool)
        level, special = self.byte_lengths() is not None, set(self.tokenizer.all_special_ids)
        wordpiece = json.loads(self._backend.to_str())["model"]["type"] == "WordPiece"
        for index, token in enumerate(self._strings()):
            if index in special or not token:
                continue
            if level:
                inside = [byte.get(c, 32) >= 128 or chr(byte.get(c, 32)).isalnum() for c in token]
                left[index], right[index] = inside[0], inside[-1]
            else:  # WordPiece marks continuations with ##, SentencePiece word beginnings with a low line
                left[index] = token.startswith("##") if wordpiece else token[0].isalnum()
                right[index] = token[-1].isalnum()
        return left, right


def _fast(backend: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    roles = dict(zip(("pad_token", "bos_token", "eos_token", "sep_token", "mask_token"), Special.names))
    roles["cls_token"] = roles["bos_token"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)


def byte_tokenizer() -> Any:
    """One token per byte, after the special ones: id = byte + Special.count."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate([*Special.names, *byte_characters()])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in Special.names])
    return _fast(backend)


def _train(texts: Iterable[str], size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    first: dict[str, Any] = {"special_tokens": list(Special.names)}
    first["initial_alphabet"] = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False, **first))
    return backend


def _enough(texts: Iterable[str]) -> Iterator[str]:
    """The first texts, until they have `ENOUGH` bytes."""
    size = 0
    for text in texts:
        yield text
        size += len(text.encode())
        if size >= ENOUGH:
            return


def sensible_size(texts: Iterable[str]) -> int:
    """A vocabulary size for these texts: more text, more entries; bytes only where texts are spelled."""
    sizes = [len(text.encode()) for text in texts]
    if sum(sizes) <= SPELLED * len(sizes):
        return LEAST
    return min(MOST, max(FEWEST, 1 << max(1, sum(sizes) // BYTES_AN_ENTRY).bit_length() - 1))


def encoder(
    tokenizer: str, *, texts: Callable[[], Iterable[str]] = tuple, key: Any = None, cache: Any = None
) -> Encoder:
    """An encoder: "bytes", "bpe" or "bpe:SIZE" trained on `texts()` (cached under `key`), or a path.

    A path is a folder that transformers can read, a tokenizer.json, or a folder with a bare vocabulary:
    vocab.json and merges.txt (GPT-2's form) or vocab.txt (BERT's).
    """
    if tokenizer == "bytes":
        return Encoder(byte_tokenizer(), is_bytes=True)
    name, _, size = tokenizer.partition(":")
    if name != "bpe":
        try:
            return Encoder(_from_path(Path(tokenizer).expanduser()))
        except DataError:
            raise
        except Exception as error:  # tokenizers raises a bare Exception for a damaged file
            raise DataError(f"tokenizer={tokenizer!r} cannot be read: {error}") from error
    if tokenizer != "bpe" and not (size.isdigit() and int(size) >= LEAST):
        raise ValueError(f"tokenizer='bpe:SIZE' needs a SIZE of at least {LEAST}; got {tokenizer!r}")

    def make(folder: Path) -> None:
        entries = int(size) if size else sensible_size(_enough(texts()))
        _train(_enough(texts()), entries).save(str(folder / "tokenizer.json"))

    from tokenizers import Tokenizer

    folder = prepared("tokenizer", make, cache=cache, size=size, data=key)
    trained = _fast(Tokenizer.from_file(str(folder / "tokenizer.json")))
    if size:
        return Encoder(trained)
    note = f"a vocabulary of {len(trained):,} tokens was made from the training texts"
    return Encoder(trained, notes=(f"{note}; --tokenizer bytes, bpe:SIZE or a path takes another",))


def _from_path(path: Path) -> Any:
    from transformers import AutoTokenizer, BertTokenizerFast, GPT2TokenizerFast, PreTrainedTokenizerFast

    if path.is_file():
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    forms = ("tokenizer.json", "tokenizer_config.json", "config.json", "vocab.json", "vocab.txt")
    has = [name for name in forms if (path / name).is_file()]
    if not has:
        accepted = "'bytes', 'bpe', 'bpe:SIZE', or a path to a Hugging Face tokenizer"
        raise DataError(f"tokenizer={str(path)!r} must be {accepted}")
    if has == ["vocab.json"]:
        return GPT2TokenizerFast.from_pretrained(str(path))
    if has == ["vocab.txt"]:
        return BertTokenizerFast.from_pretrained(str(path))
    return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
