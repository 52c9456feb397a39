"""MixerAttention as nn.MultiheadAttention, and the pictures of mixers."""

import math
import sys

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from cosformer import mixers
from cosformer.mixers import build
from cosformer.nn import MixerAttention


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Calls this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_with_softmax_it_is_multihead_attention(batch_first, bias):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 4, bias=bias, kdim=12, vdim=10, batch_first=batch_first)
    ours = MixerAttention(16, 4, bias=bias, kdim=12, vdim=10, batch_first=batch_first, mixer="softmax")
    with torch.no_grad():
        for name, row in (("q", 0), ("k", 1), ("v", 2)):
            getattr(ours, f"{name}_proj").weight.copy_(getattr(theirs, f"{name}_proj_weight"))
            if bias:
                getattr(ours, f"{name}_proj").bias.copy_(theirs.in_proj_bias.chunk(3)[row].normal_())
        ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    q, k, v = torch.randn(2, 7, 16), torch.randn(2, 9, 12), torch.randn(2, 9, 10)
    if not batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    ignored = torch.rand(2, 9) < 0.3
    out, weights = ours(q, k, v, key_padding_mask=ignored, need_weights=True)
    expected, expected_weights = theirs(q, k, v, key_padding_mask=ignored)
    assert_close(out, expected)
    assert_close(weights, expected_weights)
    assert ours(q, k, v)[1] is None


@pytest.mark.parametrize("name", mixers.names())
def test_every_mixer_trains_in_it(name):
    torch.manual_seed(0)
    attention = MixerAttention(16, 4, mixer=name, max_length=20, num_kv_heads=2, batch_first=True)
    x = torch.randn(2, 20, 16)
    out, _ = attention(x, x, x, is_causal=attention.mixer.causal is True)
    out.square().sum().backward()
    assert out.shape == x.shape
    for part, p in attention.named_parameters():
        if not (part.startswith("k_proj") and "k" in attention.mixer.unread):
            assert p.grad is not None, part
            assert p.grad.isfinite().all(), part


def test_another_sequence_of_the_same_length_is_refused_where_it_must_be():
    x, y = torch.randn(1, 6, 16), torch.randn(1, 6, 16)
    attention = MixerAttention(16, 4, mixer="reformer", batch_first=True)
    attention(x, x, x)
    with pytest.raises(ValueError, match="queries and keys are the same vectors"):
        attention(x, y, y)


def test_options_reach_the_mixer_and_bad_ones_are_named():
    attention = MixerAttention(
        16, 4, mixer="performer", options={"features": 5}, positions="rope", max_length=8
    )
    assert attention.mixer.projection.shape == (5, 4)
    assert "mixer='performer'" in repr(attention)
    with pytest.raises(ValueError, match="'performer' has no option 'feature'"):
        MixerAttention(16, 4, mixer="performer", options={"feature": 5})
    with pytest.raises(ValueError, match="dropout is 0"):
        MixerAttention(16, 4, 0.1, mixer="softmax")
    with pytest.raises(ValueError, match="embed_dim must be a positive multiple of num_heads; got 16 and 3"):
        MixerAttention(16, 3, mixer="softmax")


@pytest.mark.parametrize("causal", [False, True])
def test_a_picture_is_drawn_of_the_matrices_themselves(tmp_path, monkeypatch, causal):
    pytest.importorskip("matplotlib")
    from cosformer import picture, report

    drawn = {}
    real = report.matrices
    monkeypatch.setattr(report, "matrices", lambda panels, path: drawn.update(panels) or real(panels, path))
    path = picture.draw(
        ["softmax", "cosformer", "relu"], tmp_path / "attention.png", length=12, head_dim=8, causal=causal
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(drawn) == ["softmax", "cosFormer", "ReLU (paper, no cosine)", "cosine of the distance"]
    q, k = picture.example(12, 8)
    past = torch.ones(12, 12, dtype=torch.bool).tril() if causal else torch.ones(12, 12, dtype=torch.bool)
    softmax = (q @ k.mT / math.sqrt(8))[0, 0].masked_fill(~past, -math.inf).softmax(-1)
    assert_close(torch.from_numpy(drawn["softmax"]), softmax.masked_fill(~past, math.nan), equal_nan=True)
    with pytest.raises(ValueError, match="q and k are given together"):
        picture.draw(["softmax"], path, q=q)


def test_importing_mixers_imports_nothing_heavy():
    import subprocess

    code = "import sys, cosformer.mixers, cosformer.picture; print({'matplotlib', 'transformers', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", ["cosformer", "relu", "identity", "leaky_relu", "elu", "performer", "rfa"])
@pytest.mark.parametrize("causal", [False, True])
def test_kernel_mixers_agree_on_every_backend(backend, name, causal, monkeypatch):
    """Their speeds can be compared because they share one core: outputs and gradients are the same on each backend of it."""
    from cosformer.ops import operator

    mixer = build(name, heads=2, head_dim=8, max_length=150)
    tensors = [torch.randn(2, 2, 150, 8) for _ in range(3)]

    def run(only):
        monkeypatch.setattr(operator, "BACKENDS", (only,))
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = mixer(*leaves, causal=causal)
        return out, torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).reshape(out.shape))

    (out, grads), (expected, expected_grads) = run(backend), run("torch")
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
    for g, e in zip(grads, expected_grads):
        torch.testing.assert_close(g, e, rtol=1e-3, atol=1e-3 * e.abs().max().item())
