"""The triton backend without a GPU: its kernels in Triton's interpreter, against the definition.

Triton reads only once whether to interpret or compile kernels, so interpreted tests run in a process of their
own, started by `test_in_the_interpreter`; `TRITON_INTERPRET=1 pytest tests/test_triton.py` does the same.
"""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Watch
from judge import assert_close, compare, inputs, judge, on, rates, value_and_grads

from cosformer import State, cosformer_attention
from cosformer.ops import _triton, checks, linear

ROOT = Path(__file__).parents[1]

installed = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
interpreted = pytest.mark.skipif(not _triton.INTERPRETED, reason="test_in_the_interpreter runs it")
compiled = pytest.mark.skipif(_triton.INTERPRETED, reason="the interpreter compiles nothing")

if _triton.INTERPRETED and "COSFORMER_TEST_BACKEND" not in os.environ:
    import interpreter
    import triton
    import triton.language as tl

    interpreter.hasten()

    @triton.jit
    def multiples(x, n):
        tl.store(x + tl.arange(0, 16), tl.arange(0, 16) * n)


# The operator's own suite on this backend (tests/interpreter.py): what the tests below do not cover, and what
# takes little time. The slow mark runs all of it.
SUITE = ["errors", "decay", "torch_features", "stream", "operator", "backends"]
CHOSEN = (
    "tiny_lengths and (0-5 or 5-0) or rows_with_nothing and float32 and True or state_is_part_of_the_graph"
    " or saved_and_loaded or beams or memory_of_cross or never_changed or rates_begin and float32"
    " or test_checkpoint or marks_instead or layouts_match or rates_as_numbers"
    " or do_not_leak or default_horizon_is or test_definition and float32 and 9-20-40 and True-True"
    " or test_packed_is_looped and lengths2 and True-head or waits_for_a_device or refused"
)


def in_the_interpreter(*options: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1", **environment}
    done = subprocess.run(command, env=environment, cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout, done.stdout


def suite_in_the_interpreter(names: list[str], *options: str) -> None:
    files = (f"test_{name}.py" for name in names)
    in_the_interpreter(*files, *options, COSFORMER_TEST_BACKEND="triton")


@installed
@compiled
def test_in_the_interpreter():
    in_the_interpreter("test_triton.py")


@installed
@compiled
def test_chosen_of_the_suite_in_the_interpreter():
    suite_in_the_interpreter(SUITE, "-k", CHOSEN)


@installed
@compiled
@pytest.mark.slow
@pytest.mark.parametrize("name", SUITE)
def test_all_of_the_suite_in_the_interpreter(name):
    suite_in_the_interpreter([name])


# In the interpreter tiles are of 16 and chunks of 32: these sizes need several of each.

SMALL = {"B": 1, "H": 2, "Hk": 1, "L": 40, "S": 40, "D": 20, "E": 18}
TINY = {**SMALL, "D": 6, "E": 5}
KINDS = [(causal, decay) for causal in (False, True) for decay in (None, "head", "position")]
TILED = [(False, None), (False, "head"), (True, "position")]  # with several tiles of D and of E, too
HALF = [(False, None), (False, "position"), (True, "position")]


@interpreted
@pytest.mark.parametrize(
    ("causal", "decay", "dtype", "horizon"),
    [
        *((*kind, torch.float32, [60, math.inf]) for kind in KINDS),
        *((*kind, torch.bfloat16, 90) for kind in HALF),
        *((*kind, torch.float16, math.inf) for kind in HALF),  # without a cosine, other kernels
    ],
)
def test_tiles(causal, decay, dtype, horizon):
    tiled = dtype == torch.float32 and (causal, decay) in TILED
    q, k, v = inputs(**SMALL if tiled else TINY, dtype=dtype)
    q, v = q.mT.contiguous().mT, v.transpose(1, 2).contiguous().transpose(1, 2)  # whatever the strides
    options = {"causal": causal, "decay": rates(decay, 1, 2, 40), "horizon": horizon}
    judge(on("triton"), q, k, v, key_mask=torch.rand(1, 40) > 0.3, **options)


@interpreted
@pytest.mark.parametrize(("causal", "rate"), [(False, None), (True, None), (True, 1e-3)])
def test_queries_far_behind_the_keys(causal, rate):
    """The gap takes no chunks, but decay and angles account for it."""
    q, k, v = inputs(**{**TINY, "L": 20, "S": 35})
    decay = None if rate is None else torch.tensor([rate, rate / 5])
    judge(on("triton"), q, k, v, causal=causal, q_offset=1000, decay=decay, horizon=3000)


@interpreted
@pytest.mark.parametrize(
    ("causal", "decay", "parts"),
    [(False, None, 3), (False, "position", 3), (True, "head", 3), (True, "head", 1)],
)
def test_packed(monkeypatch, causal, decay, parts):
    """In one part, or in several: with room for the states of two chunks, the first two sequences form one
    part."""
    from cosformer.ops.triton import parts as cutting
    from cosformer.ops.triton import run

    def packed(boundaries, chunk, room, device):
        made = cutting.packed(boundaries, chunk, 2 if parts > 1 else room, device)
        assert len(made.parts) == parts
        return made

    monkeypatch.setattr(run, "packed", packed)
    lengths = [5, 0, 33, 1]
    q, k, v = inputs(**{**TINY, "L": 39, "S": 39})
    cu, mask = torch.tensor([0, *lengths]).cumsum(0), torch.rand(1, 39) > 0.2

    def together(q, k, v, decay):
        options = {"cu_seqlens": cu, "decay": decay, "key_mask": mask, "horizon": 60}
        return on("triton")(q, k, v, causal=causal, **options)

    def alone(attend):
        def loop(q, k, v, decay):
            parts = []
            for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
                one = decay[..., a:b] if decay is not None and decay.ndim == 3 else decay
                cut = (x[:, :, a:b] for x in (q, k, v))
                options = {"decay": one, "key_mask": mask[:, a:b], "horizon": 60}
                parts.append(attend(*cut, causal=causal, **options))
            return torch.cat(parts, 2)

        return loop

    compare(together, alone, (q, k, v, rates(decay, 1, 2, 39)), (1, 2, 39, 5))


@interpreted
@pytest.mark.parametrize("decay", [None, "position"])
def test_streamed_with_features_of_both_signs(decay):
    """Cut where no chunk ends, gradients through the state; the normaliser keeps its sign."""
    tensors = (*inputs(**TINY), rates(decay, 1, 2, 40))

    def streamed(backend, *cuts):
        def run(q, k, v, decay):
            outs, state, options = [], None, {"horizon": 90, "signed": True, "eps": 2.0, "backend": backend}
            for a, b in zip((0, *cuts), (*cuts, 40), strict=True):
                cut = (x[:, :, a:b] for x in (q, k, v))
                some = None if decay is None else decay[:, :, a:b]
                out, state = linear.linear_stream(*cut, state, decay=some, **options)
                outs.append(out)
            return torch.cat([torch.cat(outs, 2).flatten(), state.tensor.flatten()])

        return run

    exactly = [None if t is None else t.double() for t in tensors]
    expected, wanted = value_and_grads(streamed("torch"), exactly)
    out, grads = value_and_grads(streamed("triton", 17), tensors)
    for ours, theirs in zip((out, *grads), (expected, *wanted), strict=True):
        assert_close(ours, theirs)


@interpreted
@pytest.mark.parametrize("causal", [False, True])
def test_masked_keys_may_hold_anything_and_bits_are_the_same_each_time(causal):
    q, k, v = inputs(**TINY)
    mask = torch.rand(1, 40) > 0.3

    def run(*tensors):
        out, grads = value_and_grads(lambda *x: on("triton")(*x, causal=causal, key_mask=mask), tensors)
        return out, *grads

    clean, again = run(q, k, v), run(q, *(x.masked_fill(~mask[:, None, :, None], math.nan) for x in (k, v)))
    assert all(torch.equal(a, b) for a, b in zip(clean, again, strict=True))


@interpreted
def test_a_sum_over_many_tokens_is_cut_into_stretches():
    judge(on("triton"), *inputs(B=1, H=1, Hk=1, L=17, S=600, D=6, E=5), horizon=700)


@interpreted
def test_the_interpreter_sees_an_overflow():
    numbers = torch.zeros(16, dtype=torch.int32)
    with interpreter.overflows():
        multiples[(1,)](numbers, 2**27)
        with pytest.raises(Exception, match="int32 overflow detected"):
            multiples[(1,)](numbers, 2**28)


@interpreted
@pytest.mark.parametrize("dim", range(4))
def test_tensors_past_the_reach_of_32_bits(dim):
    """Two billion numbers lie between the first and the last; the memory in between is never touched. The
    interpreter checks every 32-bit sum and product."""
    shape = (2, 2, 5, 9)
    strides = [90, 45, 9, 1]
    strides[dim] = 2**31 // (shape[dim] - 1) + 1
    most = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    memory = torch.from_numpy(np.empty(most, dtype=np.int16)).view(torch.bfloat16)
    far, near = memory.as_strided(shape, strides), torch.randn(shape).bfloat16()
    far.copy_(near)

    def run(*tensors):
        out, grads = value_and_grads(lambda *x: on("triton")(*x, causal=True, decay=0.1), tensors)
        return out, *grads

    with interpreter.overflows():
        found = run(far, far, far)
    for a, b in zip(found, run(near, near, near), strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def parts(monkeypatch):
    """Chunks so short, and so little room for states, that 150 positions are taken in three parts."""
    from cosformer.ops.triton import blocks, run

    monkeypatch.setattr(blocks, "INTERPRETED", blocks.Blocks(16, 1, *blocks.INTERPRETED[2:]))
    monkeypatch.setattr(run, "SCRATCH", 1)
    found, cut = [], run.cut
    monkeypatch.setattr(run, "cut", lambda *args: found.append(cut(*args)) or found[-1])
    yield
    assert found and all([part.chunks for part in some] == [4, 3, 3] for some in found)


LONG_ROWS = {"B": 1, "H": 1, "Hk": 1, "L": 150, "S": 150, "D": 6, "E": 5}


@interpreted
@pytest.mark.parametrize(
    ("causal", "decay", "rows"), [(True, None, 1), (True, "position", 2), (False, "head", 1)]
)
def test_a_long_axis_is_taken_in_parts(parts, causal, decay, rows):
    options = {"causal": causal, "decay": rates(decay, rows, 1, 150), "horizon": 200}
    judge(on("triton"), *inputs(**LONG_ROWS | {"B": rows}), **options)


@interpreted
def test_a_state_goes_through_all_parts(parts):
    """In and out, with gradients."""
    q, k, v = inputs(**LONG_ROWS)
    tensors = (q, k, v, rates("position", 1, 1, 150), torch.rand(1, 1, 12, 6))

    def run(backend):
        def call(q, k, v, decay, state):
            out, after = linear.linear_stream(
                q, k, v, State(state), decay=decay, horizon=200, relu=True, backend=backend
            )
            return torch.cat([out.flatten(), after.tensor.flatten()])

        return call

    expected, wanted = value_and_grads(run("torch"), [t.double() for t in tensors])
    out, grads = value_and_grads(run("triton"), tensors)
    for ours, theirs in zip((out, *grads), (expected, *wanted), strict=True):
        assert_close(ours, theirs)


@interpreted
def test_no_graph_break_and_no_wait(monkeypatch):
    monkeypatch.setattr(checks, "readable", lambda x: False)  # as on any device but the CPU
    tensors, options = inputs(**TINY), {"causal": True, "horizon": 90, "decay": torch.rand(1, 2, 40)}

    def run(*x):
        return cosformer_attention(*x, **options, backend="triton")

    expected, wanted = value_and_grads(run, tensors)
    with Watch():
        out, grads = value_and_grads(run, tensors)
    whole = torch.compile(run, backend="aot_eager", fullgraph=True)
    also, also_grads = value_and_grads(whole, tensors)
    for a, b, c in zip((out, *grads), (also, *also_grads), (expected, *wanted), strict=True):
        assert torch.equal(a, c) and torch.equal(b, c)
