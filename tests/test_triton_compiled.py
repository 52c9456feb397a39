"""The triton backend around its kernels: compiled ahead for absent GPUs, on trial, tuned."""

import importlib.util
import itertools
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import token_ids, toy_model
from judge import inputs
from torch.utils._python_dispatch import TorchDispatchMode

from cosformer import bench
from cosformer.bench import tune
from cosformer.ops import _torch, _triton, checks, operator, plan, trust
from cosformer.ops.call import Backend, Call, Inputs, Upstream
from cosformer.ops.triton import blocks

ROOT = Path(__file__).parents[1]
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}  # bytes a program may use

installed = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")

# Compiled ahead of time, for absent GPUs: tests/triton_aot.py


def table() -> tuple[dict, list[dict]]:
    """The versions that compiled the committed rows, and the rows."""
    lines = (ROOT / "benchmarks" / "triton.jsonl").read_text().splitlines()
    versions, *rows = map(json.loads, lines)
    return versions, rows


def judge_compiled(rows: list[dict]) -> None:
    for row in rows:
        assert row["shared"] <= SHARED[row["target"]], row
        assert row["spills"] == 0 or row["size"] > 128, row


def as_committed() -> None:
    """Skips under another version of Triton, which may specialise and count differently."""
    import triton

    made_by = table()[0]["triton"]
    if triton.__version__ != made_by:
        pytest.skip(f"the table was made by triton {made_by}, here is {triton.__version__}")


def test_the_committed_table():
    _, rows = table()
    judge_compiled(rows)
    kinds = {(row["target"], row["dtype"], row["size"], row["call"]) for row in rows}
    assert len(kinds) == 3 * 2 * 4 * 3
    for kind in kinds:
        kernels = [r["kernel"] for r in rows if (r["target"], r["dtype"], r["size"], r["call"]) == kind]
        assert set(kernels) == {"gather", "read", "grad", "weigh"} and len(kernels) <= 12


@installed
def test_the_page_says_how_much_of_the_table_is_of_the_kernels_as_they_are():
    """Each row has the hash of what it was compiled from: the sources, the arguments' types, the options."""
    import triton_step as step

    as_committed()
    found = {kind: [] for kind in itertools.product(step.TARGETS, step.CALLS, step.DTYPES, step.SIZES)}
    for row in table()[1]:
        found[row["target"], row["call"], row["dtype"], row["size"]].append(row["source"])
    fresh = sum(len(sources) for kind, sources in found.items() if sources == step.identities(*kind))
    said = f"{fresh} of its {sum(map(len, found.values()))} rows are of the kernels as they are"
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert said in page, f"{said}: run python tests/triton_aot.py --out benchmarks/triton.jsonl"


def test_the_page_has_the_table():
    page, (_, rows) = (ROOT / "docs" / "gpu.md").read_text(), table()
    for target, size in itertools.product(SHARED, (32, 64, 128, 256)):
        mine = [row for row in rows if (row["target"], row["size"]) == (target, size)]
        registers, shared = (max(row[name] for row in mine) for name in ("registers", "shared"))
        spills = sum(row["spills"] for row in mine)
        assert f"| {target} | {size} | {len(mine)} | {registers} | {spills} | {shared:,} |" in page


@installed
def test_the_page_has_the_computed_cost():
    command = [sys.executable, str(ROOT / "tests" / "triton_costs.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "H100" in done.stdout and done.stdout.strip() in (ROOT / "docs" / "gpu.md").read_text()


def compile_ahead(*options: str) -> list[dict]:
    command = [sys.executable, str(ROOT / "tests" / "triton_aot.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()[1:]]


PART = {"target": "sm_80", "dtype": "bfloat16", "size": 64, "call": "causal, gated decay"}


@installed
def test_compiles_ahead_of_time():
    """Compiles a language model's training step anew: every kernel, with the counts of the table."""
    found = compile_ahead(*(f"--{name}s={value}" for name, value in PART.items()))
    judge_compiled(found)
    assert {row["kernel"] for row in found} == {"gather", "read", "grad", "weigh"}
    as_committed()
    assert found == [row for row in table()[1] if {name: row[name] for name in PART} == PART]


@installed
@pytest.mark.slow
def test_all_compiles_ahead_of_time():
    judge_compiled(compile_ahead())


@installed
@pytest.mark.skipif(shutil.which("cc") is None, reason="a driver to look at launches is compiled")
def test_a_launch_passes_what_the_kernel_takes(tmp_path):
    """Through Triton's own launcher: packed, masked, grouped, gated and causal, forward and backward."""
    command = [sys.executable, str(ROOT / "tests" / "triton_launch.py"), str(tmp_path)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["kernel"] for row in launches] == [
        *("gather", "read"),
        *("weigh", "gather", "grad"),
        *("gather", "grad", "read"),
    ]
    for row in launches:
        assert row["launches"] == 1 and not row["wrong"], row
        assert row["grid"] == row["asked"] and row["parameters"] == row["passed"], row


@pytest.fixture
def built(monkeypatch):
    """The distinct kernels that calls on the triton backend would compile on an absent device."""
    import triton_step as step

    found = set()

    def launch(kernel, grid, *arguments, **options):
        found.add((kernel.__name__, step.identity(kernel, arguments, options)))

    for module in (operator, plan):
        monkeypatch.setattr(module, "choose", lambda *_: _triton.KERNELS)
    plan.clear()
    monkeypatch.setattr(checks, "readable", lambda x: False)  # nothing is computed
    with step.absent("sm_90", launch):
        yield found


@installed
def test_a_model_compiles_few_kernels(built):
    """At most 12 for a step of 12 layers, the trial's with them; none for another batch or length."""
    from cosformer.hf import CosformerForCausalLM

    model = toy_model(CosformerForCausalLM, num_hidden_layers=12, hidden_size=64)

    def step(rows, length):
        ids = token_ids(rows, length)
        model(ids, labels=ids, use_cache=False).loss.backward()

    step(2, 96)
    assert {name for name, _ in built} == {"gather", "read", "grad", "weigh"}
    x, call = Inputs(*inputs(B=1, H=4, Hk=2, L=96, S=96, D=16, E=16), torch.rand(1, 4, 96)), Call((128.0,))
    kind = trust.kind_of(x, call._replace(causal=True, relu=True))
    small, upstream = trust.case(kind)
    y = _triton.KERNELS.forward(small, kind.call)
    _triton.KERNELS.backward(upstream, small, y, kind.call)
    assert len(built) <= 12, sorted(name for name, _ in built)
    before = set(built)
    step(1, 77)
    assert built == before


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that live within it, and the most there were at once."""

    def __init__(self):
        super().__init__()
        self.users, self.bytes, self.peak = Counter(), {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(t, torch.Tensor):
                continue
            storage = t.untyped_storage()
            self.users[storage._cdata] += 1
            self.bytes[storage._cdata] = storage.nbytes()
            weakref.finalize(t, self.gone, storage._cdata)
        self.peak = max(self.peak, sum(self.bytes.values()))
        return out

    def gone(self, storage):
        self.users[storage] -= 1
        if not self.users[storage]:
            del self.bytes[storage]


def beyond_results(backend, device, length, causal, gated, packed=False, H=16):
    """The bytes that a forward and a backward in bfloat16 hold at most, besides what they take and return."""
    x = torch.empty(1, length, H, 64, dtype=torch.bfloat16, device=device).transpose(1, 2)
    call, upstream = Call((2.0 * length,), causal=causal, relu=True), Upstream(x, None)
    given = Inputs(x, x, x, torch.zeros(1, H, length, device=device) if gated else None)
    if packed:
        given = given._replace(cu_seqlens=torch.arange(0, length + 1, length // 256))
    with Live() as forward:
        y = backend.forward(given, call)
    with Live() as backward:
        grads = backend.backward(upstream, given, y, call)
    results = (sum(t.nbytes for t in some if t is not None) for some in (y, grads))
    return [live.peak - size for live, size in zip((forward, backward), results, strict=True)]


@installed
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("causal", "gated"), [(True, True), (True, False), (False, True), (False, False)])
def test_memory_does_not_grow_with_states(monkeypatch, causal, gated, packed):
    """A million tokens of 16 heads: states of all chunks would be 4 GiB. What grows with the length is less
    than the native backend's, whose gradients stay float32 until complete, except in a call that needs no
    walk: there it is the scale and the unit of a query."""
    from cosformer.ops import _native
    from cosformer.ops.triton import device, run

    monkeypatch.setattr(device, "described", lambda _: ("absent", SHARED["sm_80"]))
    monkeypatch.setattr(run, "_launch", lambda *_, **__: None)
    length, heads = 2**20, 16
    forward, backward = beyond_results(run, "meta", length, causal, gated, packed)
    room = 1.5 * run.SCRATCH  # with the states at the ends of parts
    assert forward < room, forward
    growing = (backward - room) / (length * heads)
    native = beyond_results(_native, "cpu", 256, causal, gated, packed)[1] / (256 * heads)
    assert growing <= max(8, native), (growing, native)


def test_blocks_serve_every_size():
    for D, E in ((16, 16), (20, 200), (256, 17)):
        for bits in (16, 19, 32):
            found = blocks.blocks(D, E, bits, "any device", 48 * 1024)
            assert found.chunk % found.steps == 0 and found.chunk // found.steps >= 16
            for tiles in found[2:]:
                assert all(n >= 16 and n & (n - 1) == 0 for n in (tiles.key, tiles.value))
                assert tiles.key < 2 * max(D, 16) and tiles.value < 2 * max(E, 16)


# On trial


def changed(change) -> Backend:
    """The torch backend with one result changed."""
    return replace(_torch.BACKEND, backward=lambda *args: change(_torch.BACKEND.backward(*args)))


def raising(*args):
    raise RuntimeError("ptxas fatal: no such target\nand a long log")


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        (changed(lambda g: g._replace(q=g.q * 1.1)), "the gradient of q differs by 0.1"),
        (changed(lambda g: g._replace(k=g.k * math.nan)), "the gradient of k differs by nan"),
        (replace(_torch.BACKEND, forward=raising), "RuntimeError: ptxas fatal: no such target"),
    ],
    ids=["wrong", "nan", "raises"],
)
def test_who_fails_the_trial_does_not_serve(ours, reason, caplog):
    q, k, v = inputs(L=30, S=30)
    x, call = Inputs(q, k, v), Call((50.0,), causal=True, relu=True)
    tried = trust.tried("ours", ours)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert torch.equal(tried.forward(x, call).out, _torch.BACKEND.forward(x, call).out)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1 and reason in said[0] and "the torch backend runs instead" in said[0]
    assert trust.verdict("ours", ours, torch.device("cpu")) != "agrees with the torch backend"
    with pytest.raises(RuntimeError, match=f"backend 'ours' failed its trial on cpu: {reason}"):
        tried.forward(x, call._replace(backend="ours"))


def test_who_passes_the_trial_serves_every_kind_of_call():
    served = []

    def forward(x, call):
        served.append(x)
        return _torch.BACKEND.forward(x, call)

    ours = replace(_torch.BACKEND, forward=forward)
    tried = trust.tried("ours", ours)
    q, k, v = inputs(L=90, S=90)
    for causal in (False, True):
        for x in (
            Inputs(q, k, v),
            Inputs(q, k, v, torch.rand(4)),
            Inputs(q, k, v, torch.rand(2, 4, 90), torch.rand(2, 90) > 0.5),
            Inputs(q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 30, 90])),
        ):
            tried.forward(x, Call((100.0,), causal=causal, relu=True))
            assert served[-1] is x
    assert trust.verdict("ours", ours, torch.device("cpu")) == "agrees with the torch backend"


def test_one_trial_serves_a_whole_stream():
    calls = []
    ours = replace(_torch.BACKEND, forward=lambda *a: calls.append(a) or _torch.BACKEND.forward(*a))
    tried, state = trust.tried("counted", ours), torch.rand(2, 4, 12, 6)
    for position in range(5):
        call = Call((50.0,), causal=True, keep_state=True, position=position)
        tried.forward(Inputs(*inputs(L=1, S=1), state=state), call)
    assert len(calls) == 5 + 1


def test_it_says_why_it_cannot_run(monkeypatch):
    monkeypatch.setenv("COSFORMER_TRITON", "0")
    assert _triton.problem() == "COSFORMER_TRITON=0 turns it off"
    monkeypatch.delenv("COSFORMER_TRITON")
    monkeypatch.setattr(_triton, "_installed", lambda: False)
    assert "pip install 'cosformer[gpu]'" in _triton.problem()


# The table of block sizes


@installed
def test_tuning_puts_the_best_that_runs_on_top_of_the_table(monkeypatch, tmp_path, capsys):
    """A made-up GPU likes large tiles, has no room for a chunk of 128, and wants two stages to read."""
    file = tmp_path / "blocks.json"
    file.write_text(blocks.FILE.read_text())
    monkeypatch.setattr(blocks, "FILE", file)
    blocks.rows.cache_clear()
    monkeypatch.setattr(tune, "backend_problem", lambda *_: None)
    monkeypatch.setattr(tune, "training_step", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Abacus")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def seconds(step):
        found = blocks.blocks(64, 64, 16, "Abacus", 0)
        if found.chunk == 128:
            raise RuntimeError("out of resource: shared memory")
        return 1 / found.gather.key - 0.001 * found.chunk + 0.1 * abs(found.read.stages - 2)

    monkeypatch.setattr(tune, "seconds", seconds)
    before = len(blocks.rows())
    tune.run(SimpleNamespace(device="cuda", head_dims=[64], dtypes=["bfloat16"]), lambda text: None)
    assert "Abacus, size 64, bfloat16" in capsys.readouterr().out
    blocks.rows.cache_clear()
    blocks.blocks.cache_clear()
    assert len(blocks.rows()) == before + 1
    found = blocks.blocks(64, 64, 16, "Abacus", 0)
    assert (found.chunk, found.gather.key, found.read.stages) == (64, 64, 2)
    assert blocks.rows()[0].device == "Abacus"
    blocks.rows.cache_clear()
    blocks.blocks.cache_clear()


def test_tuning_needs_a_gpu(monkeypatch):
    with pytest.raises(SystemExit, match="--tune fills a table for a GPU: give it with --device cuda"):
        bench.main(["--tune"])
    with pytest.raises(SystemExit, match="--device abacus: .*abacus"):
        bench.main(["--device", "abacus"])
    monkeypatch.setattr(tune, "backend_problem", lambda *_: "there is none")
    with pytest.raises(SystemExit, match="needs a GPU that runs the triton backend: there is none"):
        bench.main(["--tune", "--device", "meta"])
