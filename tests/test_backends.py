"""Backends: what one declares, how one is chosen, that a new one is one module; that no device is awaited."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import RUNNING, Watch, moved, token_ids, toy_model
from judge import assert_close, inputs

from cosformer import CosformerAttention, cosformer_attention, cosformer_stream, info
from cosformer.ops import _torch, checks, operator
from cosformer.ops.call import Backend, Call, Inputs, Upstream

TOY = '''
"""A backend as small as can be: torch's functions, for less."""
import torch
from cosformer.ops import _torch
from cosformer.ops.call import Backend

BACKEND = Backend(
    _torch.forward,
    _torch.backward,
    devices=("cpu",),
    dtypes=(torch.float32,),
    sizes=range(1, 33),
    info=lambda: {"made of": "torch"},
)
'''

PLUGIN = """
import cosformer.ops
cosformer.ops.__path__.append({folder!r})
from cosformer.ops import operator
operator.BACKENDS = ("toy", *operator.BACKENDS)
"""

EVERYWHERE = """
import toy, pytest, torch
from cosformer import cosformer_attention, info
from cosformer.bench import exactness
info.main([])
print({{row.dtype for row in exactness.rows() if row.backend == "toy"}})
x = torch.randn(1, 1, 5, 40)
try:
    cosformer_attention(x, x, x, backend="toy")
except ValueError as error:
    print(error)
pytest.main(["-n0", "-v", "-v", "-k", "toy", *{tests!r}])
"""


def test_a_new_backend_is_one_module_and_one_name(tmp_path):
    """Selection, info, exactness and the tests then know it, and keep to what it declares."""
    (tmp_path / "_toy.py").write_text(TOY)
    (tmp_path / "toy.py").write_text(PLUGIN.format(folder=str(tmp_path)))
    root = Path(__file__).parents[1]
    tests = [
        "tests/test_operator.py::test_horizons",
        "tests/test_operator.py::test_rows_with_nothing_to_attend_to",
    ]
    code = EVERYWHERE.format(tests=tests)
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    said = run.stdout
    assert "  toy     available (made of: torch)\n" in said, said + run.stderr
    assert "{'float32'}" in said
    assert (
        "backend 'toy' cannot run this call: it takes keys and values of size 1 to 32; got 40 and 40" in said
    )
    for test in ("test_horizons[toy-400.0] PASSED", "test_rows_with_nothing_to_attend_to[toy-float32-False]"):
        assert test in said, said + run.stderr
    assert "toy-float64" not in said and "failed" not in said


@pytest.fixture
def toy(monkeypatch):
    """A backend "toy", preferred to all others, that declares what the test says."""

    def declare(**abilities):
        ours = Backend(_torch.forward, _torch.backward, **abilities)
        real = operator.declared
        monkeypatch.setattr(operator, "BACKENDS", ("toy", *RUNNING))
        monkeypatch.setattr(info, "BACKENDS", ("toy", *RUNNING))
        for place in (operator, info):
            monkeypatch.setattr(place, "declared", lambda name: ours if name == "toy" else real(name))
        return ours

    return declare


@pytest.mark.parametrize(
    ("abilities", "reason"),
    [
        ({"devices": ("cuda", "xpu")}, "it runs on cuda, xpu; got cpu"),
        ({"dtypes": (torch.float64, torch.float16)}, "it takes float64, float16; got torch.float32"),
        ({"sizes": range(16, 33)}, "it takes keys and values of size 16 to 32; got 6 and 5"),
        ({"problem": lambda: "its compiler is missing"}, "its compiler is missing"),
    ],
)
def test_what_is_not_declared_is_refused(toy, capsys, abilities, reason):
    ours = toy(**abilities)
    q, k, v = inputs(L=9, S=9)
    with pytest.raises(ValueError, match=f"backend 'toy' cannot run this call: {reason}"):
        cosformer_attention(q, k, v, backend="toy")
    assert operator.choose(None, q, v) is not ours  # the next best runs
    info.main([])
    said = capsys.readouterr().out
    of_the_call = "dtypes" in abilities or "sizes" in abilities
    assert (f"toy     unavailable: {reason}" in said) != of_the_call
    assert operator.backend_problem("toy") == (None if of_the_call else reason)


def test_what_is_declared_is_chosen(toy):
    ours = toy(dtypes=(torch.float64,))
    q, k, v = inputs(L=9, S=9)
    assert operator.choose(None, q.double(), v.double()) is ours
    assert operator.choose(None, q, v) is not ours


def test_a_device_is_asked_for():
    assert operator.backend_problem("torch") is operator.backend_problem("torch", "meta") is None
    assert operator.backend_problem("native", "meta") == "it runs on cpu; got meta"
    assert operator.backend_problem("torch", "abacus")


# Waiting for a GPU shows without one: by a watch for values that are read or moved to the CPU, and by the
# torch backend on the meta device, which has no values at all.


def run_everything(q, k, v, **options):
    """Forward, backward and stream, with each kind of rates and a mask."""
    mask = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool)
    results = []
    for decay in (None, torch.rand(4), torch.rand(2, 4, q.shape[2])):
        for causal in (False, True):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = cosformer_attention(
                *leaves, causal=causal, decay=decay, key_mask=mask, horizon=400, **options
            )
            results += [out.detach(), *torch.autograd.grad(out.sum(), leaves)]
        _, state = cosformer_stream(q, k, v, horizon=400, decay=decay, **options)
        step = [x[:, :, :1] for x in (q, k, v)]
        results += cosformer_stream(*step, state.snapshot(), horizon=400, **options)[:1]
    return results


def test_nothing_waits_for_a_device(monkeypatch):
    tensors = inputs(L=200, S=200)
    torch.manual_seed(1)
    expected = run_everything(*tensors, backend="torch")
    with pytest.raises(AssertionError, match="waits"), Watch():
        run_everything(*tensors, backend="torch")  # on the CPU the rates are read
    monkeypatch.setattr(checks, "readable", lambda x: False)  # as on any other device
    torch.manual_seed(1)
    with Watch():
        found = run_everything(*tensors, backend="torch")
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("decay", [None, "gated"])
def test_a_module_waits_for_nothing(monkeypatch, decay):
    monkeypatch.setattr(checks, "readable", lambda x: False)
    options = {"horizon": 64, "decay": decay, "batch_first": True, "backend": "torch"}
    module, x = moved(CosformerAttention(32, 4, **options)), torch.randn(2, 20, 32)
    ignore = torch.arange(20) >= torch.tensor([20, 13])[:, None]
    with Watch():
        out, _ = module(x, x, x, need_weights=False, key_padding_mask=ignore)
        out.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("name", ["CosformerForCausalLM", "CosformerForMaskedLM"])
def test_a_model_waits_for_nothing(monkeypatch, name):
    """A training step; and, for a decoder, a step of generation with its cache."""
    hf = pytest.importorskip("cosformer.hf")
    monkeypatch.setattr(checks, "readable", lambda x: False)
    model, ids = toy_model(getattr(hf, name)).train(), token_ids()
    with Watch():
        model(ids, labels=ids).loss.backward()
        if name == "CosformerForCausalLM":
            with torch.no_grad():
                first = model(ids, use_cache=True)
                model(ids[:, -1:], past_key_values=first.past_key_values, use_cache=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rates", [None, (4,), (1, 4, 300)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_stays_on_its_device(causal, rates, packed):
    """On meta tensors, where reading a value, or mixing devices, raises."""
    boundaries = torch.tensor([0, 100, 300]) if packed else None
    call = Call((400.0,), causal, relu=True, keep_state=causal and not packed)
    with torch.device("meta"):
        q, k, v = (torch.empty(1, 4, 300, 6) for _ in range(3))
        mask = torch.ones(1, 300, dtype=torch.bool)
        x = Inputs(q, k, v, None if rates is None else torch.empty(rates), mask, boundaries)
        y = _torch.forward(x, call)
        grads = _torch.backward(
            Upstream(torch.empty_like(y.out), y.after if call.keep_state else None), x, y, call
        )
    assert {t.device.type for t in (*y, *grads) if t is not None} == {"meta"}
    assert y.out.shape == (1, 4, 300, 6) and (grads.decay is None) == (rates is None)
