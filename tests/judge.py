"""How a result is judged: against the definition in float64, one tolerance per dtype; and what is judged."""

import math

import torch

from cosformer import cosformer_attention, reference

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def inputs(B=2, H=4, Hk=2, L=37, S=37, D=6, E=5, dtype=torch.float32):
    shapes = ((B, H, L, D), (B, Hk, S, D), (B, Hk, S, E))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def on(backend):
    return lambda *args, **kwargs: cosformer_attention(*args, backend=backend, **kwargs)


def rates(kind, B, H, S):
    """Decay rates per head, weak to strong, or per position, weak and strong mixed."""
    if kind == "head":
        return torch.logspace(-6, math.log10(20), H)
    if kind == "position":
        return torch.tensor([1e-6, 1e-2, 0.3, 20.0])[torch.randint(4, (B, H, S))] * torch.rand(B, H, S)
    return None


def error(actual, expected, scale=None) -> float:
    """The largest difference, relative to the largest value, or to a tenth of the largest `scale`."""
    actual, expected = actual.double(), expected.double()
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not expected.numel():
        return 0.0
    assert torch.isfinite(actual).all(), "not finite"
    size = max(expected.abs().max().item(), 0.0 if scale is None else scale.abs().max().item() / 10, 1e-30)
    return (actual - expected).abs().max().item() / size


def assert_close(actual, expected, *, rounded=None, scale=None) -> None:
    """Within the dtype's tolerance. In half precision, within twice the error of `rounded`, the definition in
    that dtype, or within six eps if that is more: the backward reads the rounded output, whose half eps is
    five relative to a tenth of `scale`, and rounds once more."""
    found = error(actual, expected, scale)
    if actual.dtype in TOLERANCE:
        limit = TOLERANCE[actual.dtype]
    else:
        limit = 6 * torch.finfo(actual.dtype).eps
        if rounded is not None and torch.isfinite(rounded).all():  # in float16 the definition may overflow
            limit = max(limit, 2 * error(rounded, expected, scale))
    assert found <= limit, f"error {found:.2e} > {limit:.2e} ({actual.dtype})"


def value_and_grads(function, tensors, dout=None):
    """The function's output and its gradients with respect to the tensors that are not None."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    out = function(*leaves)
    used = [x for x in leaves if x is not None]
    return out.detach(), torch.autograd.grad(
        out, used, torch.ones_like(out) if dout is None else dout.to(out.dtype)
    )


def sizes(q, k, v, *, eps=1e-6, **kwargs):
    """The definition, changed so that its gradients are sums of absolute values: the scale of rounding.

    A gradient sums terms of both signs, which cancel to nearly nothing with one key to attend to, or under
    strong decay.
    """
    s = reference.weights(q, k, **kwargs)
    size = v.abs().repeat_interleave(q.shape[1] // v.shape[1], 1)
    out = s @ size / s.sum(-1, keepdim=True).clamp_min(eps).detach()
    out.register_hook(torch.abs)
    return out


def compare(ours, definition, tensors, size) -> None:
    """Checks output and gradients of `ours` against `definition(attend)` on the same numbers in float64."""
    dout = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(tensors[0].dtype)
    exactly = [None if t is None else t.double() for t in tensors]
    exact, exact_grads = value_and_grads(definition(reference.attention), exactly, dout)
    _, scales = value_and_grads(definition(sizes), exactly, dout)
    out, grads = value_and_grads(ours, tensors, dout)
    assert out.dtype == tensors[0].dtype
    rounded, rounded_grads = None, [None] * len(grads)
    if out.dtype not in TOLERANCE:
        rounded, rounded_grads = value_and_grads(definition(reference.attention), tensors, dout)
    assert_close(out, exact, rounded=rounded)
    for name, g, e, r, scale in zip(
        ("dq", "dk", "dv", "ddecay"), grads, exact_grads, rounded_grads, scales, strict=False
    ):
        try:
            assert_close(g.to(out.dtype), e, rounded=r, scale=scale)
        except AssertionError as wrong:
            raise AssertionError(f"{name}: {wrong}") from None


def judge(function, q, k, v, *, decay=None, **kwargs) -> None:
    """Checks `function`, called like the definition, against the definition."""
    if decay is not None and q.dtype == torch.float64:
        decay = decay.double()  # else its gradient would come back rounded to float32
    compare(
        lambda q, k, v, decay: function(q, k, v, decay=decay, **kwargs),
        lambda attend: lambda q, k, v, decay: attend(q, k, v, decay=decay, **kwargs),
        (q, k, v, decay),
        (*q.shape[:3], v.shape[3]),
    )


def masked_softmax(q, k, v, allowed):
    """Softmax over the allowed pairs, (L, S) or per head: the full score matrix, masked."""
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~allowed, -math.inf)
    return scores.softmax(-1) @ v


def past(length, causal):
    """What a query may see, (L, L) bool."""
    every = torch.ones(length, length, dtype=torch.bool)
    return every.tril() if causal else every


def grid(length):
    """The positions of queries (down) and of keys (across)."""
    return torch.arange(length)[:, None], torch.arange(length)[None, :]
