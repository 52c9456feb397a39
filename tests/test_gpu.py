"""What a GPU demands of the code around its kernels, tested without one: streams, graphs, fixed orders."""

import importlib.metadata
import logging
import math
from dataclasses import replace

import pytest
import torch
from judge import assert_close, inputs, value_and_grads
from torch.utils._python_dispatch import TorchDispatchMode

from cosformer import bench, cosformer_attention
from cosformer.bench import operators, tune
from cosformer.ops import _torch, _triton, call, fades, trust
from cosformer.ops.call import Call, Inputs, Upstream
from cosformer.ops.triton import blocks, parts

triton = pytest.importorskip("triton")
GATED = {"causal": True, "horizon": 200}


@pytest.fixture
def captured(monkeypatch):
    """As if a CUDA graph were being captured, from `captured(True)` to `captured(False)`."""
    now = [False]
    for module in (call, trust, parts):
        monkeypatch.setattr(module, "capturing", lambda device: now[0])
    monkeypatch.setattr(call, "_graphs", set())
    return lambda value: now.__setitem__(0, value)


# A CUDA graph


def test_who_failed_the_trial_is_not_captured(captured):
    tried = trust.tried("wrong", replace(_torch.BACKEND, forward=lambda *_: 1 / 0))
    x, one = Inputs(*inputs()), Call((50.0,), causal=True, relu=True)
    expected = tried.forward(x, one).out
    captured(True)
    assert torch.equal(tried.forward(x, one).out, expected)


def test_what_was_not_tried_before_a_capture_is_left_to_the_torch_backend(captured, caplog):
    served = []

    def forward(*args):
        served.append(args)
        return _torch.BACKEND.forward(*args)

    tried = trust.tried("untried", replace(_torch.BACKEND, forward=forward))
    x, one = Inputs(*inputs()), Call((50.0,), causal=True, relu=True)
    captured(True)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            tried.forward(x, one)
    assert not served
    (said,) = (record.getMessage() for record in caplog.records)
    assert "run the step once before that" in said
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        tried.forward(x, one._replace(backend="untried"))
    captured(False)
    tried.forward(x, one)
    assert len(served) == 2  # the trial, then the call


class Sent(TorchDispatchMode):
    """Counts what is sent from the CPU to another device."""

    def __init__(self):
        super().__init__()
        self.count, self.late = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "_to_copy" and args[0].is_cpu:
            away = kwargs.get("device") not in (None, torch.device("cpu"))
            self.count, self.late = (
                self.count + away,
                self.late + (away and kwargs.get("non_blocking", False)),
            )
        return func(*args, **kwargs)


@pytest.fixture
def absent(monkeypatch):
    """The triton backend on the meta device, where nothing is computed."""
    from cosformer.ops.triton import device, run

    monkeypatch.setattr(device, "described", lambda _: ("absent", 163 * 1024))
    monkeypatch.setattr(run, "_launch", lambda *_, **__: None)
    return replace(_torch.BACKEND, forward=run.forward, backward=run.backward)


def training_step(backend, cu=None):
    q, k, v = (torch.empty(1, 4, 90, 16, dtype=torch.bfloat16, device="meta") for _ in range(3))
    x, one = Inputs(q, k, v, torch.empty(1, 4, 90, device="meta"), cu_seqlens=cu), Call((317.0,), causal=True)
    y = backend.forward(x, one)
    backend.backward(Upstream(y.out, None), x, y, one)


@pytest.mark.parametrize("packed", [False, True])
def test_a_second_step_sends_nothing(absent, packed):
    """What a CUDA graph captures must be on the device: torch refuses a copy from pageable memory."""
    cu = torch.tensor([0, 37, 90]) if packed else None
    parts._packings.clear()
    call.theta.cache_clear()
    with Sent() as first:
        training_step(absent, cu)
    with Sent() as second:
        training_step(absent, cu)
    assert first.count == (1 + 3 if packed else 1) and second.count == 0


@pytest.mark.parametrize("rate", [0.25, [0.25] * 4])
def test_one_rate_is_made_where_it_is_needed(rate):
    q, k, v = (torch.empty(1, 4, 9, 16, device="meta") for _ in range(3))
    with Sent() as sent:
        cosformer_attention(q, k, v, decay=rate, horizon=math.inf)
    assert sent.count == 0


def test_what_a_graph_reads_stays(captured, absent, monkeypatch):
    """Caches evict, but a graph reads the same addresses at every replay."""
    cu = torch.tensor([0, 37, 90])
    parts._packings.clear()
    training_step(absent, cu)
    captured(True)
    training_step(absent, cu)
    captured(False)
    (known,) = parts._packings.values()
    (packed,) = known.values()
    read = {packed.begin, packed.end, packed.parts[0].table, call.theta((317.0,) * 4, torch.device("meta"))}
    assert read <= call._graphs
    for end in range(1, 1 + parts.KEPT):
        training_step(absent, torch.tensor([0, end, 90]))
    assert len(parts._packings) == parts.KEPT and known not in parts._packings.values()


# Streams


def test_no_stream_reads_what_another_was_sent(captured, monkeypatch):
    """A table is in flight as long as the stream it was sent on is busy."""
    stream = [1]
    monkeypatch.setattr(parts, "_stream", lambda device: stream[0])
    parts._packings.clear()
    key = (0, 5, 9), 64, 10, torch.device("cpu")
    first = parts.packed(*key)
    assert parts.packed(*key) is first
    stream[0] = 2
    second = parts.packed(*key)
    assert second is not first and parts.packed(*key) is second
    stream[0] = 3
    captured(True)  # begins after a wait for all streams
    assert parts.packed(*key) is first


def test_angles_have_arrived_before_another_stream_can_read_them():
    call.theta.cache_clear()
    with Sent() as sent:
        call.theta((123.0,), torch.device("meta"))
    assert (sent.count, sent.late) == (1, 0)


# torch.use_deterministic_algorithms: CUDA then has no floating-point cumsum


class NoRunningSum(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name != "cumsum" or not args[0].is_floating_point(), "cumsum_cuda_kernel is not deterministic"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("length", [0, 1, 2, 77, 128])
def test_a_running_sum_in_a_fixed_order(deterministic, length):
    x = torch.randn(2, 3, length, dtype=torch.float64)
    with NoRunningSum():
        found = call.running_sum(x)
    torch.testing.assert_close(found, x.cumsum(-1), rtol=1e-12, atol=1e-12)


def test_gated_attention_in_a_fixed_order(deterministic, absent):
    tensors = (*inputs(), torch.rand(2, 4, 37))

    def run(q, k, v, decay):
        return cosformer_attention(q, k, v, decay=decay, backend="torch", **GATED)

    expected = value_and_grads(run, [t.double() for t in tensors])
    x, one = Inputs(*tensors), Call((200.0,), causal=True, relu=True)
    with NoRunningSum():
        y = _torch.BACKEND.forward(x, one)
        grads = _torch.BACKEND.backward(Upstream(torch.ones_like(y.out), None), x, y, one)
        fades.fades(tensors[3], tensors[1])
        training_step(absent)
        training_step(absent, torch.tensor([0, 37, 90]))
    for ours, theirs in zip((y.out, *grads[:4]), (expected[0], *expected[1]), strict=True):
        assert_close(ours, theirs)


# TF32 where torch would take it: by the newer setting, by the older, and never on a device that has none


@pytest.fixture
def precision():
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def test_tf32_is_torchs_to_allow(precision, monkeypatch):
    from cosformer.ops.triton import device

    here, has = torch.device("cuda", 0), [True]
    monkeypatch.setattr(device, "has_tf32", lambda _: has[0])

    def taken():
        dtypes = torch.float32, torch.float16, torch.bfloat16
        return [device.arithmetic(dtype, here)[2] for dtype in dtypes]

    for value, name in (("ieee", "ieee"), ("tf32", "tf32")):
        torch.backends.cuda.matmul.fp32_precision = value
        assert taken() == [name, "tf32", "ieee"]
    for value, name in (("highest", "ieee"), ("high", "tf32")):
        torch.set_float32_matmul_precision(value)
        assert taken() == [name, "tf32", "ieee"]
    widths = [device.bits(dtype, here) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert widths == [19, 19, 16]
    has[0] = False
    assert taken() == ["ieee"] * 3 and device.bits(torch.float32, here) == 32


# What a newcomer meets first


def test_info_knows_triton_by_whatever_name_it_was_installed(monkeypatch):
    """torch for AMD installs `pytorch-triton-rocm`."""

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(_triton, "version", version, raising=False)
    monkeypatch.setattr(trust, "verdict", lambda *_: "agrees")
    assert _triton.info()["triton"] == triton.__version__


def test_a_full_device_is_no_verdict():
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    said = trust.verdict("full", replace(_torch.BACKEND, forward=full), torch.device("cpu"))
    assert said == "none: the device has no memory left"


def test_bench_asks_and_awaits_the_device_it_was_given(monkeypatch):
    chosen = []
    monkeypatch.setattr(bench, "backend_problem", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(bench, "_measure", lambda args: chosen.append(torch.get_default_device()))
    bench.main(["--device", "cuda:1"])
    assert chosen == [1, torch.device("cuda:1")]


def test_products_are_awaited_in_the_dtype_they_are_compared_with(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1))
    with torch.device("meta"):
        for work, _ in operators.gemm_works("bfloat16").values():
            work()
            assert work.__closure__ and waits.pop()
    for work, _ in operators.gemm_works("bfloat16").values():
        assert work().dtype == torch.bfloat16
    assert not waits


def test_every_choice_of_block_sizes_is_on_trial(monkeypatch):
    """Also after one that failed."""
    monkeypatch.setattr(blocks, "put", lambda row: None)
    found = iter(["wrong by a half", None, "wrong by a third"])
    monkeypatch.setattr(trust, "difference", lambda *_: next(found))
    x, one = Inputs(*inputs()), Call((50.0,), causal=True, relu=True, backend="tuned")

    def measure():
        trust.tried("tuned", _torch.BACKEND).forward(x, one)
        return 1.0

    failures = []
    took = [tune._tried(blocks.rows()[0], measure, failures) for _ in range(3)]
    assert took == [math.inf, 1.0, math.inf] and len(failures) == 2


def test_tuning_says_why_nothing_ran(monkeypatch):
    monkeypatch.setattr(blocks, "put", lambda row: None)

    def measure():
        raise RuntimeError("ptxas fatal")

    with pytest.raises(SystemExit, match="no block sizes ran at size 256: ptxas fatal"):
        tune.tuned(blocks.rows()[0], measure, lambda text: None)
