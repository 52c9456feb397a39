"""What every test shares: the backends to run on, fixed seeds, and fresh memory poisoned with NaN."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils._device import _device_constructors

from cosformer.ops.operator import BACKENDS, backend_problem, declared

settings.register_profile(
    "cosformer", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("cosformer")

_device_constructors()  # remembered from here on: `with torch.device(...)` must know the real torch.empty
torch.set_num_threads(1)  # small tensors; tests run side by side, and those about threads set their own


RUNNING = [name for name in BACKENDS if backend_problem(name) is None]
BACKEND_DTYPES = [(name, dtype) for name in RUNNING for dtype in declared(name).dtypes]


def widest(name: str) -> torch.dtype:
    """The most exact dtype a backend runs."""
    return max(declared(name).dtypes, key=lambda dtype: dtype.itemsize)


def pytest_generate_tests(metafunc):
    """`backend` runs over the backends this machine has; `backend, dtype` over all pairs they declare."""
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
    missing = [f"{name} ({backend_problem(name)})" for name in BACKENDS if name not in RUNNING]
    return f"cosformer backends: {', '.join(RUNNING)}; not tested: {', '.join(missing) or 'none'}"


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
