"""What every test shares: fresh memory is poisoned with NaN, seeds are fixed, the backends to run on are named once."""

import importlib
import itertools

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils._device import _device_constructors

from cosformer import results
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


# Rows of results as `compare` writes them, for the tests of the report. Their numbers mean nothing.


def quality(mixer="cosformer", value: float | None = 7.9, **more) -> results.Quality:
    """One training, of a language model unless `more` says otherwise."""
    task = more.get("task", "lm")
    row = {
        "subject": more.get("title", task), "group": "lm", "task": task, "title": task, "data": "its data",
        "seed": 0, "size": "tiny (4 layers)", "length": 1024, "batch": 4, "steps": 400, "rate": 1e-3,
        "metric": "perplexity", "greater_is_better": False, "examples": 1000, "settings": {"length": 1024},
        "status": "done", "tokens": 1_638_400, "seconds": 95.2, "tokens_per_second": 17_200.0,
        "parameters": 1_843_200, "command": f"cosformer train {task} --mixer {mixer}",
    }  # fmt: skip
    return results.Quality(mixer=mixer, value=value, **{**row, **more})


def accuracy(mixer="cosformer", value: float | None = 0.9, **more) -> results.Quality:
    return quality(mixer, value, **{"metric": "accuracy", "greater_is_better": True, "group": "lra", **more})


def cost(mixer="cosformer", length=4096, ms=12.3, **more) -> results.Cost:
    row = {"what": "model", "work": "training", "causal": True, "ms_low": 0.97 * ms, "ms_high": 1.04 * ms}
    return results.Cost(mixer=mixer, length=length, ms=ms, **{**row, **more})


INVENTED = {
    "softmax": 1.3,
    "softmax+rope": 1.0,
    "cosformer-paper": 1.2,
    "cosformer": 0.98,
    "cosformer-hybrid": 0.9,
}


def invented() -> list[results.Row]:
    """Everything a report can show: seeds, a refusal, searches, positions, costs, matrices, exactness."""
    title = "WikiText-2 language model"
    text = {"task": "text", "title": "Text, IMDB bytes"}
    rows: list[results.Row] = [
        results.Machine(
            cpu="AMD EPYC",
            isa="avx2",
            threads=2,
            torch="2.13",
            cosformer="0.2",
            python="3.11",
            date="2026-11-16",
        ),
        results.Run(command="cosformer compare --full", started="2026-11-15T23:00:00Z", minutes=611.5),
        accuracy("performer", None, **text, status="refused", reason="no such form"),
    ]
    for mixer, factor in {**INVENTED, "relu": 1.25, "cosformer*3, softmax+rope": 0.95}.items():
        for seed in (0, 1, 2):
            scale = factor * (1 + 0.01 * seed)
            metrics = {"loss": 2 * scale, "perplexity": 8 * scale, "bits_per_byte": 2.9 * scale}
            curve = []
            for step in range(0, 401, 50):
                loss = scale * (2 + 50 / (step + 10))
                curve.append(
                    {"step": step, "tokens": 4096 * step, "seconds": step * scale, "eval_loss": loss}
                )
            more = {"title": title, "seed": seed, "metrics": metrics, "curve": curve}
            rows.append(quality(mixer, 8 * scale, **more, waited=0.3 if mixer == "relu" else 0.01))
            about = {"subject": title, "mixer": mixer, "seed": seed, "texts": 64}
            losses = [scale * (2 + 1 / (i + 1)) for i in range(4)]
            rows.append(results.Positions(**about, ends=[16, 64, 256, 1023], loss=losses))
    for mixer, factor in INVENTED.items():
        rows.append(accuracy(mixer, 0.5 / factor, **text, published=0.64, note="a quarter"))
        rows.append(accuracy(mixer, 0.1 + factor / 100, task="listops", title="ListOps", most_frequent=0.18))
        for length, pairs in ((64, 4), (64, 8), (128, 8), (128, 16), (128, 32)):
            more = {"title": f"Recall of {pairs} pairs in {length} tokens", "settings": {"pairs": pairs}}
            rows.append(accuracy(mixer, 0.6 / factor, group="recall", task="recall", length=length, **more))
        for rate in (1e-3, 2e-3, 4e-3):
            about = {
                "subject": title,
                "mixer": mixer,
                "seed": 0,
                "steps": 100,
                "command": "",
                "status": "done",
            }
            more = {"metric": "perplexity", "greater_is_better": False, "loss": 2 + rate}
            rows.append(results.Search(**about, **more, rate=rate))
        for length in (256, 512, 1024, 2048, 4096, 8192, 16384):
            slow = "softmax" in mixer
            ms = factor * (1 + (0.004 * length + 3e-6 * length**2 if slow else 0.0075 * length))
            about = {"size": "tiny (4 layers)", "waited": 0.2 if length == 512 else 0.0}
            rows.append(cost(mixer, length, ms, **about, memory_mib=8 + length / 60))
            kept = 8192 * length if slow else 524_288
            rows.append(cost(mixer, length, 1 + ms / 10, **about, work="decoding", cache_bytes=kept))
        matrix = [[0.9 ** (i - j) if j <= i else None for j in range(16)] for i in range(16)]
        picture = {"subject": title, "mixer": mixer, "layer": 3, "tokens": list("def rotate(x, a)")}
        rows.append(results.Picture(**picture, matrix=matrix))
    for mode in ("bidirectional", "causal", "stream"):
        about = {"backend": "native", "dtype": "float32", "mode": mode, "allowed": 1e-5}
        rows += [results.Exactness(**about, what=what, difference=1.2e-7) for what in ("output", "gradient")]
    return rows


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
