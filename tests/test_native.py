"""The native backend beyond the operator's tests: threads, processes, instruction sets, sanitizers."""

import math
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import RUNNING
from judge import assert_close, inputs, judge, on, rates, value_and_grads

from cosformer import cosformer_attention, reference
from cosformer.ops import _native, linear_attention, operator, plan

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif("native" not in RUNNING, reason="the native kernel is not built")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("decay", [None, "head", "position"])
@pytest.mark.parametrize("causal", [False, True])
def test_threads(threads, n, heads, causal, decay):
    """Threads share heads or, if there are fewer heads than threads, the chunks of one sequence."""
    threads(n)
    q, k, v = inputs(B=1, H=heads, Hk=heads, L=1500, S=1500, D=12, E=9)
    judge(on("native"), q, k, v, causal=causal, decay=rates(decay, 1, heads, 1500), horizon=2000)


@pytest.mark.parametrize("length", [1, 15, 17, 64, 96, 97, 127, 128, 129])
@pytest.mark.parametrize("horizon", [200, math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_short_sequences(length, horizon, causal):
    """One chunk without a state, up to a length that depends on the cosine and whether a state is wanted."""
    mask = torch.rand(2, length) > 0.3
    for decay in (None, "head", "position"):
        for key_mask, size in ((None, 64), (mask, 33)):
            q, k, v = inputs(L=length, S=length, D=64, E=size)
            options = {"decay": rates(decay, 2, 4, length), "key_mask": key_mask, "horizon": horizon}
            judge(on("native"), q, k, v, causal=causal, **options)
            with torch.no_grad():
                plain = cosformer_attention(q, k, v, causal=causal, backend="native", **options)
                exact = [x.double() for x in (q, k, v)]
                wanted = reference.attention(*exact, causal=causal, **options)
            assert_close(plain, wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_short_packed_sequences_of_signed_features(causal):
    q, k, v = inputs(B=1, H=3, Hk=3, L=150, S=150, D=40, E=24, dtype=torch.bfloat16)
    cu = torch.tensor([0, 1, 1, 70, 150])
    options = {"causal": causal, "horizon": 300, "signed": True, "eps": 1.0}
    packed = linear_attention(q, k, v, cu_seqlens=cu, backend="native", **options)
    for a, b in zip(cu[:-1].tolist(), cu[1:].tolist()):
        part = [x[:, :, a:b].double() for x in (q, k, v)]
        alone = linear_attention(*part, backend="torch", **options)
        assert_close(packed[:, :, a:b], alone)


@pytest.mark.parametrize("causal", [False, True])
def test_long_sums_keep_their_digits(threads, causal):
    """A million keys of one sign: each is tiny beside the state it is added to."""
    threads(1)
    length, last = 1_000_000, 100
    q, k, v = (torch.rand(1, 1, length, 4) + 0.1 for _ in range(3))
    out = cosformer_attention(q, k, v, horizon=math.inf, causal=causal, backend="native")[0, 0, -last:]
    q, k, v = (x[0, 0].double() for x in (q, k, v))
    values = torch.nn.functional.pad(v, (0, 1), value=1.0)
    near = (q[-last:] @ k[-last:].T).tril(0 if causal else last)
    sums = q[-last:] @ (k[:-last].T @ values[:-last]) + near @ values[-last:]
    exact = sums[:, :-1] / sums[:, -1:]
    assert ((out - exact).abs() / exact).max() < 1e-6


@pytest.mark.parametrize("per_position", [False, True])
def test_a_decay_of_long_sequences_in_bfloat16_keeps_its_gradient(per_position):
    """It sums what nearly cancels, so any rounding between a pair's two sides would grow with the length."""
    torch.manual_seed(0)
    shape = 1, 1, 4096, 64
    q, k, v, dout = (torch.randn(shape).bfloat16() for _ in range(4))
    rate = torch.full(shape[:3] if per_position else (1,), 0.1)

    def gradient(dtype):
        leaf = rate.clone().requires_grad_()
        tensors = (t.to(dtype) for t in (q, k, v))
        out = cosformer_attention(*tensors, horizon=math.inf, causal=True, decay=leaf, backend="native")
        return torch.autograd.grad(out, leaf, dout.to(dtype))[0]

    exact = gradient(torch.float32)
    assert (gradient(torch.bfloat16) - exact).norm() < 0.01 * exact.norm()


def test_concurrent_calls(threads):
    threads(2)
    tensors = [inputs(B=1, H=3, Hk=3, L=100 + 37 * i, S=100 + 37 * i, D=8 + i) for i in range(8)]
    alone = [cosformer_attention(*t, causal=True, backend="native") for t in tensors]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            together = list(
                pool.map(lambda t: cosformer_attention(*t, causal=True, backend="native"), tensors)
            )
            for a, b in zip(together, alone, strict=True):
                assert torch.equal(a, b)


def _in_child(queue):
    torch.manual_seed(1)
    q, k, v = inputs(L=300, S=300)
    out, grads = value_and_grads(lambda *x: cosformer_attention(*x, causal=True, backend="native"), (q, k, v))
    queue.put([x.double().sum().item() for x in (out, *grads)])


def test_fork_after_use(threads):
    threads(2)
    q, k, v = inputs(B=4, L=300, S=300)
    cosformer_attention(q, k, v, backend="native")  # starts the thread pool, which a fork does not copy
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    sums = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    _in_child(queue)  # the same here
    assert sums == pytest.approx(queue.get(timeout=60), rel=1e-4, abs=1e-3)


SUITE = """
import sys; sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
torch.manual_seed(0)  # torch draws another seed in every process
from judge import inputs, judge, on, rates
from cosformer.ops import _native
assert _native.info()["instruction set"] == {isa!r}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for causal in (False, True):
        for decay in (None, "head", "position"):
            for D, E in ((1, 1), (33, 20), (64, 64), (200, 256)):
                q, k, v = inputs(B=1, H=2, Hk=1, L=70, S=70, D=D, E=E, dtype=dtype)
                judge(on("native"), q, k, v, causal=causal, decay=rates(decay, 1, 2, 70), horizon=120)
"""


@pytest.mark.parametrize("isa", _native.usable())
def test_every_instruction_set(isa):
    code = SUITE.format(tests=str(Path(__file__).parent), isa=isa)
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "COSFORMER_ISA": isa}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("D", "E", "L"), [(17, 31, 75), (33, 16, 97), (64, 65, 301)])
@pytest.mark.parametrize("decay", [None, "position"])
@pytest.mark.parametrize("causal", [False, True])
def test_odd_sizes_in_bfloat16(threads, D, E, L, decay, causal):
    """Products may take two steps at a time. The last one may stand alone, beside memory that holds anything:
    here what a larger call of NaNs left there. The inputs are strided."""
    threads(1)
    options = {"causal": causal, "horizon": 400}
    x = torch.full((1, 1, 400, 256), math.nan, dtype=torch.bfloat16).requires_grad_()
    cosformer_attention(x, x, x, backend="native", decay=rates(decay, 1, 1, 400), **options).sum().backward()
    q, k, v = inputs(L=L, S=L, D=2 * D, E=2 * E, dtype=torch.bfloat16)
    q, k, v = (t[..., ::2].transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v[..., :-1]))
    q = q.repeat_interleave(2, -1)[..., ::2]
    judge(on("native"), q, k, v, decay=rates(decay, 2, 4, L), **options)


SUMS = """
import torch
from cosformer.ops import linear_attention
torch.set_num_threads(1)
for dtype, size, signed in (
    (torch.float32, 64, False), (torch.float16, 64, False),  # never rounded
    (torch.bfloat16, 64, True), (torch.bfloat16, 15, False),  # not here either
    (torch.bfloat16, 64, False),
):
    x = torch.randn(1, 1, 300, size, generator=torch.Generator().manual_seed(0)).abs().to(dtype)
    x.requires_grad_()
    for causal in (False, True):
        out = linear_attention(x, x, x, signed=signed, causal=causal, backend="native")
        (grad,) = torch.autograd.grad(out.float().pow(2).sum(), x)
        print([t.double().mul(torch.arange(300.0)[:, None]).sum().item() for t in (out, grad)])
"""


def test_which_products_are_rounded():
    """Only those of bfloat16 tensors, not under a signed normaliser, and not between very small vectors."""
    if "avx512bf16" not in _native.usable():
        pytest.skip("this CPU does not multiply bfloat16")
    sums = [
        subprocess.run(
            [sys.executable, "-c", SUMS],
            env={**os.environ, "COSFORMER_ISA": isa},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for isa in ("avx512", "avx512bf16")
    ]
    assert [a == b for a, b in zip(*sums, strict=True)] == [True] * 8 + [False] * 2


@pytest.fixture
def unloaded(monkeypatch):
    """Makes the kernel load anew in the test, and again after it."""
    plan.clear()  # those of earlier calls hold the kernel
    _native._loaded.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    _native._loaded.cache_clear()


def test_an_instruction_set_that_cannot_be_used(unloaded):
    unloaded.setenv("COSFORMER_ISA", "mmx")
    with pytest.raises(ValueError, match="cannot run this call: the kernel for 'mmx' is not built"):
        cosformer_attention(*inputs(L=9, S=9), backend="native")


def test_without_a_library(unloaded, caplog, tmp_path):
    """The torch backend runs, one line in the log says so, and asking for the kernel gives the reason."""
    unloaded.setattr(_native, "_directory", lambda: tmp_path)
    q, k, v = inputs(L=9, S=9)
    for _ in range(2):
        assert cosformer_attention(q, k, v).shape == (2, 4, 9, 5)
    assert [r.message for r in caplog.records if "native CPU kernel cannot be used" in r.message] == [
        caplog.messages[0]
    ]
    with pytest.raises(ValueError, match="backend 'native' cannot run this call: it was not built"):
        cosformer_attention(q, k, v, backend="native")


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("takes float32, bfloat16, float16; got torch.float64", lambda x: x.double()),
        ("keys and values of size 1 to 256; got 300", lambda x: x.repeat(1, 1, 1, 50)),
    ],
)
def test_what_it_does_not_run(match, change):
    q, k, v = inputs(L=9, S=9, D=6, E=6)
    with pytest.raises(ValueError, match=match):
        cosformer_attention(*map(change, (q, k, v)), backend="native")
    assert_close(
        cosformer_attention(*map(change, (q, k, v))),
        cosformer_attention(*map(change, (q, k, v)), backend="torch"),
    )


def test_is_the_default():
    q, k, v = inputs(L=9, S=9)
    assert operator.choose(None, q, v) is _native.BACKEND


def test_openmp_runtime_is_shared():
    """Two runtimes in one process would each start threads, which would compete for the cores."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc here")
    cosformer_attention(*inputs(L=9, S=9), backend="native")
    runtimes = {
        line.split()[-1]
        for line in maps.read_text().splitlines()
        if "libgomp" in line or "libomp" in line or "libiomp" in line
    }
    assert len(runtimes) == 1, runtimes


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers(tmp_path, sanitizers):
    """A short fuzz of the kernel under sanitizers; see `make fuzz`."""
    if not (shutil.which("cmake") and (shutil.which("c++") or shutil.which("g++"))):
        pytest.skip("needs cmake and a C++ compiler")
    fuzz(tmp_path, sanitizers, seconds=10)


def fuzz(build: Path, sanitizers: str, seconds: int) -> None:
    options = [f"-DCOSFORMER_SANITIZE={sanitizers}", f"-DCOSFORMER_FUZZED={_native.usable()[0]}"]
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(build), *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(build), "--target", "fuzz"], check=True, capture_output=True)
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    run = subprocess.run([str(build / "fuzz"), str(seconds)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    print(sanitizers, run.stdout)


if __name__ == "__main__":  # make fuzz
    import tempfile

    for sanitizers in ("address,undefined", "thread"):
        fuzz(Path(tempfile.mkdtemp()), sanitizers, int(sys.argv[1]) // 2)
