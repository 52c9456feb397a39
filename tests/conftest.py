"""What every test shares: fresh memory is poisoned with NaN, seeds are fixed, the backends to run on are named once."""

import itertools
import lzma
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils._device import _device_constructors

from cosformer.ops.operator import BACKENDS, backend, backend_problem

settings.register_profile(
    "cosformer", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("cosformer")

_device_constructors()  # remembered from here on: `with torch.device(...)` must know the real torch.empty
torch.set_num_threads(1)  # small tensors; tests run side by side, and those about threads set their own


RUNNING = [name for name in BACKENDS if backend_problem(name) is None]
BACKEND_DTYPES = [(name, dtype) for name in RUNNING for dtype in backend(name).dtypes]


def widest(name: str) -> torch.dtype:
    """The most exact dtype a backend runs."""
    return max(backend(name).dtypes, key=lambda dtype: dtype.itemsize)


def pytest_generate_tests(metafunc):
    """`backend` runs over the backends this machine has; `backend, dtype` over every pair a backend supports."""
    names = metafunc.fixturenames
    if "backend" in names and "dtype" in names:
        metafunc.parametrize(
            ("backend", "dtype"),
            BACKEND_DTYPES,
            ids=[f"{name}-{dtype}".replace("torch.", "") for name, dtype in BACKEND_DTYPES],
        )
    elif "backend" in names:
        metafunc.parametrize("backend", RUNNING)


def pytest_report_header(config):
    missing = [f"; not tested: {name} ({backend_problem(name)})" for name in BACKENDS if name not in RUNNING]
    return f"cosformer backends: {', '.join(RUNNING)}{''.join(missing)}"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """An output element that nobody writes must show: memory from torch.empty starts as NaN."""

    def poisoned(make):
        def empty(*args, **kwargs):
            x = make(*args, **kwargs)
            plain = (
                type(x) is torch.Tensor
                and not x.is_meta
                and x.is_floating_point()
                and not torch.compiler.is_compiling()
            )
            return x.fill_(float("nan")) if plain else x

        return empty

    for owner, name in itertools.chain(
        ((torch, n) for n in ("empty", "empty_like", "empty_strided")),
        ((torch.Tensor, n) for n in ("new_empty", "new_empty_strided")),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


# Toy models and texts, for every test that needs one. transformers is imported only by those who ask.

VOCAB = 61
TOY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOY_DECODER = {**TOY, "num_key_value_heads": 2}
TOY_ENCODER = {**TOY, "hidden_dropout_prob": 0.0}
TOY_SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "init_std": 0.2,
    "dropout": 0.0,
}


def toy_config(model, **fields):
    """The configuration of one of our model classes at toy size."""
    config = model.config_class
    sizes = {"cosformer": TOY_DECODER, "cosformer_encoder": TOY_ENCODER}.get(config.model_type, TOY_SEQ2SEQ)
    return config(**{**sizes, **fields})


def toy_model(model, seed: int = 0, **fields):
    """A toy of one of our model classes, moved from its start."""
    torch.manual_seed(seed)
    return moved(model(toy_config(model, **fields))).eval()


def moved(module, by: float = 0.1):
    """The module with every weight away from its start: a gate of zeros, a norm of ones would hide mistakes."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p), alpha=by)
    return module


def token_ids(rows: int = 2, length: int = 17, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def toy_mixer(name, *, heads=4, head_dim=8, max_length=64, **options):
    """A mixer in float64 of the sizes of `qkv`."""
    from cosformer import mixers

    return mixers.build(name, heads=heads, head_dim=head_dim, max_length=max_length, **options).double()


def qkv(length, keys=None, *, batch=2, heads=4, kv_heads=None, dim=8, size=None, dtype=torch.float64, seed=0):
    """q (batch, heads, length, dim), k (batch, kv_heads, keys, dim), v (batch, kv_heads, keys, size)."""
    generator = torch.Generator().manual_seed(seed)
    keys, kv_heads, size = keys or length, kv_heads or heads, size or dim
    shapes = (batch, heads, length, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, size)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def byte_tokenizer():
    """A tokenizer of single bytes, with <pad> 0, <mask> 1 and <unk> 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "mask_token": "<mask>", "unk_token": "<unk>"}
    letters = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def python_of(page: Path) -> list[str]:
    """The Python of a page of the documentation, block by block."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


# Made-up files in the form of Long-Range Arena's, for the tasks and whatever trains on them.


def imdb(folder):
    folder.mkdir()
    for split in ("train", "test"):
        lines = [
            f'{i % 2}\t{i % 10}\t{i}\tA "{split}" film, {"great" if i % 2 else "dull"}. {"x" * (i * 40)}\n'
            for i in range(30)
        ]
        (folder / f"{split}.tsv.xz").write_bytes(lzma.compress("".join(lines).encode()))
    return folder


def aan(folder):
    folder.mkdir()
    for split in ("train", "eval", "test"):
        lines = [f"{i % 2}.0\tP{i}\tQ{i}\tpaper {i} in {split}\tanother paper {i}\n" for i in range(12)]
        (folder / f"new_aan_pairs.{split}.tsv").write_text("".join(lines))
    return folder


def cifar(folder, form="binary", count=20):
    """The same made-up images in any of the three forms; channels equal, so that grey is exact."""
    folder.mkdir()
    for name, seed in [*((f"data_batch_{i}", i) for i in range(1, 6)), ("test_batch", 6)]:
        rng = np.random.default_rng(seed)
        grey, labels = (
            rng.integers(0, 256, (count, 1024), dtype=np.uint8),
            rng.integers(0, 10, count, dtype=np.uint8),
        )
        colour = np.tile(grey, 3)
        if form == "binary":
            np.concatenate([labels[:, None], colour], 1).tofile(folder / f"{name}.bin")
        elif form == "python":
            (folder / name).write_bytes(pickle.dumps({b"data": colour, b"labels": labels.tolist()}))
        else:
            from PIL import Image

            stem = "test" if name == "test_batch" else f"train_{name[-1]}"
            Image.fromarray(grey.reshape(-1, 32)).save(folder / f"{stem}.png")
            with open(folder / f"{stem[:5].rstrip('_')}_labels.u8", "ab") as file:
                labels.tofile(file)
    return folder
