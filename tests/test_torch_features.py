"""The operator inside torch: compile, export, checkpoint, vmap, grad, autocast, meta, opcheck, memory."""

import math
import subprocess
import sys

import pytest
import torch
from conftest import moved, widest
from judge import assert_close, inputs, on, value_and_grads

from cosformer import CosformerAttention, State, cosformer_attention, cosformer_stream
from cosformer.ops import operator
from cosformer.ops.call import Call, Inputs
from cosformer.ops.convolution import short_convolution
from cosformer.ops.norm import rms_norm

MODES = [{}, {"causal": True}, {"decay": True}, {"causal": True, "decay": True}]


def attend(backend, mode):
    options = {"horizon": 100, "backend": backend, "causal": mode.get("causal", False)}
    if "decay" in mode:
        return lambda q, k, v, d: cosformer_attention(q, k, v, decay=d, **options), (
            *inputs(L=50, S=50),
            torch.rand(2, 4, 50),
        )
    return lambda q, k, v: cosformer_attention(q, k, v, **options), inputs(L=50, S=50)


@pytest.mark.parametrize("mode", MODES)
def test_compile(backend, mode):
    f, tensors = attend(backend, mode)
    torch._dynamo.reset()
    (a, grads), (b, compiled) = (
        value_and_grads(f, tensors),
        value_and_grads(torch.compile(f, fullgraph=True), tensors),
    )
    for x, y in zip((b, *compiled), (a, *grads), strict=True):
        torch.testing.assert_close(x, y)


def test_compile_a_stream(backend):
    torch._dynamo.reset()
    q, k, v = inputs(L=30, S=30)
    step = torch.compile(
        lambda q, k, v, s: cosformer_stream(q, k, v, s, horizon=100, backend=backend), fullgraph=True
    )
    state, outs = State(torch.zeros(2, 4, 12, 6)), []
    for t in range(0, 30, 6):
        out, state = step(q[:, :, t : t + 6], k[:, :, t : t + 6], v[:, :, t : t + 6], state)
        outs.append(out)
    assert_close(torch.cat(outs, 2), on(backend)(q, k, v, causal=True, horizon=100))


@torch.no_grad()
def test_compile_the_stream_of_a_module():
    """With the convolution's last tokens in its state."""
    torch._dynamo.reset()
    options = {"horizon": math.inf, "decay": "gated", "short_conv": 4, "qk_norm": True, "batch_first": True}
    module, x, outs = moved(CosformerAttention(32, 4, **options)).eval(), torch.randn(2, 30, 32), []
    step = torch.compile(module.stream, backend="aot_eager", fullgraph=True)
    out, state = module.stream(x[:, :6])
    for piece in x[:, 6:].split(6, 1):
        now, state = step(piece, state)
        outs.append(now)
    torch.testing.assert_close(torch.cat([out, *outs], 1), module(x, x, x, is_causal=True)[0])


def test_export(backend):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return cosformer_attention(q, k, v, causal=True, horizon=100, backend=backend)

    tensors = inputs(L=50, S=50)
    length = torch.export.Dim("length", min=2, max=90)
    program = torch.export.export(Module(), tensors, dynamic_shapes=({2: length},) * 3).module()
    for n in (50, 13):
        shorter = [x[:, :, :n] for x in tensors]
        assert torch.equal(program(*shorter), Module()(*shorter))


def test_export_with_any_batch_and_length():
    module = moved(CosformerAttention(32, 4, horizon=math.inf, decay="gated", batch_first=True)).eval()
    module.forward = lambda x: CosformerAttention.forward(module, x, x, x, is_causal=True)[0]
    shapes = ({0: torch.export.Dim("B"), 1: torch.export.Dim("L")},)
    exported = torch.export.export(module, (torch.randn(2, 30, 32),), dynamic_shapes=shapes).module()
    x = torch.randn(5, 77, 32)
    torch.testing.assert_close(exported(x), module(x))


def test_checkpoint(backend):
    f, tensors = attend(backend, {"causal": True})
    saved = value_and_grads(lambda *x: torch.utils.checkpoint.checkpoint(f, *x, use_reentrant=False), tensors)
    plain = value_and_grads(f, tensors)
    assert torch.equal(saved[0], plain[0]) and all(map(torch.equal, saved[1], plain[1]))


@pytest.mark.parametrize("mode", MODES)
def test_vmap(backend, mode):
    f, tensors = attend(backend, mode)
    alone = lambda *x: f(*(t[None] for t in x))[0]
    assert_close(torch.func.vmap(alone)(*tensors), f(*tensors))
    loss = lambda *x: alone(*x).square().sum()
    grads = torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(len(tensors)))))(*tensors)
    _, expected = value_and_grads(lambda *x: f(*x).square().sum(), tensors)
    for g, e in zip(grads, expected, strict=True):
        assert_close(g, e, scale=e.abs().max() * 10)


def test_vmap_over_a_stream(backend):
    q, k, v = inputs(B=3, L=20, S=20)
    _, state = cosformer_stream(q, k, v, horizon=99, backend=backend)

    def step(q, k, v, tensor):
        out, after = cosformer_stream(
            q[None], k[None], v[None], State(tensor[None], 20), horizon=99, backend=backend
        )
        return out[0], after.tensor[0]

    out, tensor = torch.func.vmap(step)(q, k, v, state.tensor)
    expected, after = cosformer_stream(q, k, v, state, horizon=99, backend=backend)
    assert_close(out, expected)
    assert_close(tensor, after.tensor)


def test_vmap_refuses_what_it_cannot_do():
    q, k, v = inputs(L=9, S=9)
    with pytest.raises(NotImplementedError, match="one rate per head; give one per position"):
        torch.func.vmap(lambda q, d: cosformer_attention(q[None], q[None], q[None], decay=d))(
            q, torch.rand(2, 4)
        )
    with pytest.raises(NotImplementedError, match="packed sequences"):
        cu = torch.tensor([0, 9])
        torch.func.vmap(lambda q: cosformer_attention(q[None], q[None], q[None], cu_seqlens=cu, horizon=20))(
            q
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v = inputs(L=50, S=50)
    with torch.autocast("cpu", dtype=dtype):
        out, grads = value_and_grads(
            lambda q, k, v: cosformer_attention(q, k.to(dtype), v, horizon=60), (q, k, v)
        )
    assert torch.equal(out, cosformer_attention(q.to(dtype), k.to(dtype), v.to(dtype), horizon=60))
    assert all(g.dtype == torch.float32 for g in grads)


def test_meta():
    meta = [x.to("meta") for x in inputs(L=50, S=50)]
    assert cosformer_attention(*meta).shape == (2, 4, 50, 5)
    out, state = cosformer_stream(*meta, horizon=80)
    assert out.is_meta and state.tensor.shape == (2, 4, 12, 6) and state.position == 50


@pytest.mark.parametrize("mode", MODES)
def test_opcheck(backend, mode):
    dtype = widest(backend)
    q, k, v = (x.requires_grad_() for x in inputs(L=20, S=20, dtype=dtype))
    decay = torch.rand(2, 4, 20, dtype=dtype).requires_grad_() if "decay" in mode else None
    causal = mode.get("causal", False)
    state = torch.rand(2, 4, 12, 6, dtype=dtype).requires_grad_() if causal else None
    call = Call((100.0,), causal, position=3 * causal, relu=True, keep_state=causal, backend=backend)
    torch.library.opcheck(operator.forward_op, (*Inputs(q, k, v, decay, state=state), *call))


def test_layouts_match_what_fake_tensors_promise(backend):
    """torch.compile plans memory from the fake implementation; other strides would corrupt it."""

    def both(x, call):
        y = operator.forward_op(*x, *call)
        return *y, *operator.backward_op(y[0], None, *x, *y, *call)

    for mode in MODES:
        causal, decay = mode.get("causal", False), torch.rand(2, 4, 20) if "decay" in mode else None
        x = Inputs(*inputs(L=20, S=20), decay)
        call = Call((100.0,), causal, relu=True, keep_state=causal, backend=backend)
        with torch._subclasses.FakeTensorMode() as fakes:
            promised = both([None if t is None else fakes.from_tensor(t) for t in x], call)
        for real, fake in zip(both(x, call), promised, strict=True):
            assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_double_backward_is_refused(backend):
    q, k, v = (x.requires_grad_() for x in inputs(L=9, S=9))
    (dq,) = torch.autograd.grad(on(backend)(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


MEMORY = """
import torch
from cosformer import cosformer_attention
from cosformer.bench.measure import peak  # getrusage begins with the peak of the process that forks
q, k, v = (torch.randn(1, 8, {L}, 64, requires_grad=True) for _ in range(3))
decay = torch.rand(1, 8, {L}, requires_grad=True) if {decay} else None
out = cosformer_attention(q, k, v, causal=True, decay=decay, backend="{backend}")
out.sum().backward()
print(peak() / 2**30)
"""


@pytest.mark.parametrize("decay", [False, True])
def test_causal_training_memory(backend, decay):
    """32,768 tokens, 8 heads of 64, the whole process: stored prefix sums would take 32 GiB."""
    if backend == "triton":
        pytest.skip("in the interpreter this takes an hour; tests/test_triton.py counts what is allocated")
    code = MEMORY.format(L=32768, backend=backend, decay=decay)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 1.5, run.stdout


def test_jacobian_of_one_row(backend):
    """vmap over the backward alone: what was saved has no mapped dimension, and is expanded, not copied."""
    q, k, v = inputs(B=1, H=2, Hk=2, L=5, S=5, D=3, E=2)
    f = lambda q: cosformer_attention(q, k, v, causal=True, horizon=9, backend=backend)
    expected = torch.autograd.functional.jacobian(f, q)
    assert_close(torch.func.jacrev(f)(q), expected)


def test_marks_instead_of_values(backend):
    """torch may keep a sign or zeros as a flag on the tensor; a kernel that reads memory must not miss it."""
    numbers = torch.randn(3, 2, 4, 30, 6, dtype=torch.complex64)
    q, k, v = (x.conj().imag for x in numbers)
    assert q.is_neg()
    assert_close(on(backend)(q, k, v), on(backend)(*(x.clone().resolve_neg() for x in (q, k, v))))
    leaves = [x.detach().clone().requires_grad_() for x in inputs(L=9, S=9)]
    out = on(backend)(*leaves, causal=True)
    grads = torch.autograd.grad(out, leaves, torch._efficientzerotensor(out.shape))
    assert all((g == 0).all() for g in grads)


def test_forward_mode_is_refused(backend):
    q, k, v = inputs(L=9, S=9)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            on(backend)(dual, k, v)


def test_default_horizon_compiles_at_any_length():
    torch._dynamo.reset()
    f = torch.compile(lambda q, k, v: cosformer_attention(q, k, v, causal=True), fullgraph=True)
    for L in (20, 30, 41):
        q, k, v = inputs(L=L, S=L)
        assert_close(f(q, k, v), cosformer_attention(q, k, v, causal=True))


# The parts of a layer beside the operator, where torch records or transforms: they must not reach for memory.


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@torch.no_grad()
def test_a_module_can_be_traced():
    module = moved(CosformerAttention(32, 4, horizon=math.inf, decay="gated", batch_first=True)).eval()
    module.forward = lambda x: CosformerAttention.forward(module, x, x, x, is_causal=True)[0]
    x, other = torch.randn(2, 30, 32), torch.randn(2, 30, 32)
    torch.testing.assert_close(torch.jit.trace(module, x)(other), module(other))


@pytest.mark.parametrize("part", ["norm", "convolution"])
def test_parts_of_a_layer_under_transforms_of_their_weight(part):
    x = torch.randn(2, 9, 8)
    run, weight = {
        "norm": (lambda w: rms_norm(x, w, 1e-6), torch.randn(8)),
        "convolution": (lambda w: short_convolution(x, w), torch.randn(8, 4)),
    }[part]
    leaf = weight.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(run(leaf).square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda w: run(w).square().sum())(weight), wanted)
    many = torch.stack([weight, 2 * weight])
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(run)(many), torch.stack([run(w) for w in many]))


PARTS = {
    "norm": (lambda x, w: rms_norm(x, w, 1e-6), (8,)),
    "convolution": (lambda x, w: short_convolution(x, w, ahead=1), (8, 4)),
    "packed convolution": (lambda x, w: short_convolution(x, w, cu_seqlens=torch.tensor([0, 4, 9])), (8, 4)),
}


@pytest.mark.parametrize("part", PARTS)
def test_second_derivatives_of_parts(part):
    """By torch.autograd.grad, which would not see a node that raises beside the way to its inputs."""
    run, shape = PARTS[part]
    given = [torch.randn(s, dtype=torch.float64) for s in ((1, 9, 8), shape, (1, 9, 8))]

    def second(dtype):
        x, w, dy = (t.to(dtype).requires_grad_() for t in given)
        grads = torch.autograd.grad((run(x, w) ** 2 * dy).sum(), (x, w), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), (x, w, dy))

    for got, wanted in zip(second(torch.float32), second(torch.float64), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


@pytest.mark.parametrize("part", PARTS)
def test_gradients_of_parts_that_are_marks(part):
    """torch may keep a sign, or zeros, as a flag."""
    run, shape = PARTS[part]
    x, w, dy = (
        torch.randn(1, 9, 8, requires_grad=True),
        torch.randn(shape, requires_grad=True),
        torch.randn(1, 9, 8),
    )
    grads = lambda dy: torch.autograd.grad(run(x, w), (x, w), dy)
    for got, wanted in zip(grads((-dy)._neg_view()), grads(dy), strict=True):
        torch.testing.assert_close(got, wanted)
    assert not any(g.count_nonzero() for g in grads(torch._efficientzerotensor(dy.shape)))


@pytest.mark.parametrize("decay", ["gated", "ladder", None])
def test_second_derivatives_of_a_module_are_refused(decay):
    module = moved(CosformerAttention(8, 2, horizon=math.inf, decay=decay, batch_first=True))
    x = torch.randn(1, 5, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(module(x, x, x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(grad.square().sum(), x)


def test_a_jacobian_at_once():
    module = moved(CosformerAttention(8, 2, horizon=math.inf, decay="gated", batch_first=True))
    run, x = lambda x: module(x, x, x, is_causal=True)[0], torch.randn(1, 5, 8)
    row_by_row = torch.autograd.functional.jacobian(run, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(run, x, vectorize=True), row_by_row)
