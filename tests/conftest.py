"""What every test shares: fresh memory is poisoned with NaN, seeds are fixed, the backends to run on are named once."""

import importlib
import itertools
import lzma
import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils._device import _device_constructors

from cosformer.ops.operator import BACKENDS

settings.register_profile(
    "cosformer", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("cosformer")

_device_constructors()  # remembered from here on: `with torch.device(...)` must know the real torch.empty
torch.set_num_threads(1)  # small tensors; tests run side by side, and those about threads set their own


def unavailable(backend: str) -> str | None:
    x = torch.zeros(1, 1, 1, 1)
    return importlib.import_module(f"cosformer.ops._{backend}").unsupported(x, x, x)


RUNNING = [name for name in BACKENDS if unavailable(name) is None]
DTYPES = {
    "torch": ["float64", "float32", "bfloat16", "float16"],
    "native": ["float32", "bfloat16", "float16"],
}
BACKEND_DTYPES = [(b, d) for b in RUNNING for d in DTYPES[b]]


def pytest_generate_tests(metafunc):
    """`backend` runs over the backends this machine has; `backend, dtype` over every pair a backend supports."""
    names = metafunc.fixturenames
    if "backend" in names and "dtype" in names:
        metafunc.parametrize(
            ("backend", "dtype"),
            [(b, getattr(torch, d)) for b, d in BACKEND_DTYPES],
            ids=map("-".join, BACKEND_DTYPES),
        )
    elif "backend" in names:
        metafunc.parametrize("backend", RUNNING)


def pytest_report_header(config):
    missing = [f"{b} ({unavailable(b)})" for b in BACKENDS if b not in RUNNING]
    return f"cosformer backends: {', '.join(RUNNING)}" + (
        f"; not tested: {', '.join(missing)}" if missing else ""
    )


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
