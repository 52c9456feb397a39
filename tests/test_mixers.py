"""The contract every mixer keeps, over names(): a mixer in a new file is held to it with no edit here."""

import copy
import math
import re

import pytest
import torch
from conftest import moved, qkv, toy_mixer
from torch.testing import assert_close

from cosformer import mixers

HEADS, DIM, MAX = 4, 8, 64  # of conftest's toy mixer
WIDTH = 12  # of the layer's input, unlike the heads'
# Options under which a pattern, rank or hash matters at these lengths; others are tested with defaults.
VARIANTS = {
    "bigbird": [{"block": 4, "random": 1}],
    "cosformer": [
        {"decay": None},
        {"decay": [0.5, 0.1, 0.02, 0.0]},
        {"decay": 0.3, "learn_decay": True},
        {"both_signs": True},
        {"horizon": 100.5},
        {"horizon": [64, 100, 200, math.inf]},
        {"horizon": "length"},
    ],
    "cosformer-ladder": [{"learn_decay": True, "horizon": math.inf}],
    "cosformer-paper": [{"horizon": "length"}],
    "linformer": [{"rank": 8}],
    "local": [{"window": 3, "globals": 2}, {"window": 1}],
    "nystrom": [{"landmarks": 6}, {"conv": None}],
    "performer": [{"features": 32}],
    "polynomial": [{"degree": 2}],
    "reformer": [{"chunk": 8, "buckets": 4, "rounds": 3}],
    "rfa": [{"gate": True}],
    "sparse": [{"stride": 5, "columns": 2}, {"pattern": "strided", "stride": 4}],
}
COMPANIONS = [("local+rope", {}), ("performer+sine_spe", {}), ("relu+conv_spe", {}), ("identity+rope", {})]
CASES = [(name, options) for name in mixers.names() for options in [{}, *VARIANTS.get(name, [])]] + COMPANIONS
# Patterns that count positions from the first row: padding on the left moves them.
RIGHT_PADDING_ONLY = {"bigbird", "linformer", "local", "sparse"}
NO_BOUND = {"identity", "identity+rope", "reformer"}  # a sum near zero, a hash at a boundary

every = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values()))
)


def build(name, options, **more):
    torch.manual_seed(1)
    return moved(toy_mixer(name, max_length=MAX, width=WIDTH, **options, **more), by=0.3)


def inputs(mixer, length, keys=None, *, batch=2, **sizes) -> dict:
    """q, k and v by name, and x for a mixer that reads it."""
    q, k, v = qkv(length, keys, batch=batch, **sizes)
    x = torch.randn(batch, length, WIDTH, dtype=q.dtype, generator=torch.Generator().manual_seed(9))
    return {"q": q, "k": k, "v": v} | ({"x": x} if mixer.reads_input else {})


def part(given, tokens=slice(None), rows=slice(None)) -> dict:
    """Some tokens of some batch rows."""
    return {n: t[rows][:, tokens] if n == "x" else t[rows][:, :, tokens] for n, t in given.items()}


def modes(mixer):
    return [causal for causal in (False, True) if (mixer.causal if causal else mixer.bidirectional) is True]


@every
def test_nothing_to_read_gives_nothing(name, options):
    """Other sequences without keys, and packed ones without tokens."""
    mixer = build(name, options).float()
    given = inputs(mixer, 7, dtype=torch.float32)
    if mixer.cross is True and False in modes(mixer):
        none = {key: given[key][:, :, :0] for key in "kv"}
        assert not mixer(given["q"], **none).count_nonzero()
    row = part(given, tokens=slice(0), rows=slice(1))
    for causal in modes(mixer):
        assert mixer(**row, causal=causal, cu_seqlens=torch.tensor([0, 0])).shape == (1, HEADS, 0, DIM)


@every
@pytest.mark.parametrize(("length", "size"), [(1, DIM), (7, 5), (33, DIM)])
def test_shape_and_finite(name, options, length, size):
    mixer = build(name, options).float()
    assert modes(mixer), "a mixer must do something"
    for causal in modes(mixer):
        out = mixer(**inputs(mixer, length, size=size, dtype=torch.float32), causal=causal)
        assert out.shape == (2, HEADS, length, size)
        assert out.isfinite().all()


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_is_kept_and_rounding_is_small(name, options, dtype):
    exact = build(name, options)
    mixer = copy.deepcopy(exact).to(dtype)
    for causal in modes(mixer):
        given = inputs(mixer, 20)
        out = mixer(**{n: t.to(dtype) for n, t in given.items()}, causal=causal)
        assert out.dtype == dtype
        assert out.isfinite().all()
        if dtype == torch.float32 and name not in NO_BOUND:
            assert_close(out.double(), exact(**given, causal=causal), atol=2e-3, rtol=2e-3)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(name, options, dtype):
    mixer = build(name, options).float()
    given = {n: t.float() for n, t in inputs(mixer, 20).items()}
    for causal in modes(mixer):
        with torch.autocast("cpu", dtype):
            out = mixer(**given, causal=causal)
        assert out.isfinite().all()
        if name in ("local", "sparse", "bigbird", "nystrom"):  # what is exact inside
            assert_close(out.float(), mixer(**given, causal=causal), atol=0.05, rtol=0.05)


@every
def test_shapes_without_memory(name, options):
    if "conv_spe" in name:
        pytest.skip("it draws from a seed that is in memory")
    with torch.device("meta"):
        mixer = build(name, options).to("meta")
        given = {n: t.to("meta") for n, t in inputs(mixer, 20).items()}
        for causal in modes(mixer):
            assert mixer(**given, causal=causal).shape == (2, HEADS, 20, DIM)


@every
def test_grouped_heads_are_repeated_heads(name, options):
    mixer = build(name, options)
    for causal in modes(mixer):
        given = inputs(mixer, 19, kv_heads=2)
        whole = given | {n: given[n].repeat_interleave(2, 1) for n in "kv"}
        assert_close(mixer(**given, causal=causal), mixer(**whole, causal=causal))


@every
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_causal_output_ignores_the_future(name, options, scale):
    mixer = build(name, options)
    if mixer.causal is not True:
        pytest.skip(mixer.causal)
    given = inputs(mixer, 33)
    before = mixer(**given, causal=True)
    for cut in (1, 8, 20, 32):
        changed = {n: t.clone() for n, t in given.items()}
        for t in part(changed, slice(cut, None)).values():
            t.copy_(scale * torch.randn_like(t))
        after = mixer(**changed, causal=True)
        assert_close(after[:, :, :cut], before[:, :, :cut])
        assert not torch.allclose(after[:, :, cut:], before[:, :, cut:])


@every
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_equals_unpadded(name, options, side):
    mixer = build(name, options)
    if side == "left" and (name in RIGHT_PADDING_ONLY or mixer.positions is not None):
        pytest.skip("its pattern counts positions from the first row")
    if options.get("horizon") == "length":
        pytest.skip("its horizon is the padded length")
    here = slice(0, 21) if side == "right" else slice(9, 30)
    mask = torch.zeros(2, 30, dtype=torch.bool)
    mask[:, here] = True
    for causal in modes(mixer):
        given, padded = inputs(mixer, 21), inputs(mixer, 30)
        for name_, t in padded.items():
            t.fill_(math.nan)
            part({name_: t}, here)[name_].copy_(given[name_])
        out = mixer(**padded, causal=causal, key_mask=mask)
        assert_close(out[:, :, here], mixer(**given, causal=causal))


@every
def test_a_row_without_keys_is_zero_and_harmless(name, options):
    mixer = build(name, options)
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[1] = False
    for causal in modes(mixer):
        given = {n: t.requires_grad_() for n, t in inputs(mixer, 13).items()}
        out = mixer(**given, causal=causal, key_mask=mask)
        assert_close(out[1], torch.zeros_like(out[1]))
        assert_close(out[:1], mixer(**part(given, rows=slice(1)), causal=causal))
        out.sum().backward()
        leaves = (*given.values(), *mixer.parameters())
        assert all(t.grad is None or t.grad.isfinite().all() for t in leaves)


@every
@pytest.mark.parametrize(("batch", "length"), [(0, 13), (2, 0), (0, 0)])
def test_no_rows_and_no_tokens_are_nothing(name, options, batch, length):
    mixer = build(name, options)
    for causal in modes(mixer):
        given = {n: t.requires_grad_() for n, t in inputs(mixer, length, batch=batch).items()}
        out = mixer(**given, causal=causal)
        assert out.shape == (batch, HEADS, length, DIM) and out.dtype == given["q"].dtype
        out.sum().backward()  # DDP waits for the gradient of every parameter that has one elsewhere
        leaves = (given["q"], given["k"], given["v"], *mixer.parameters())
        assert all(t.grad is not None and not t.grad.any() for t in leaves if length == 0)


@every
def test_a_stream_takes_no_tokens(name, options):
    mixer = build(name, options)
    if mixer.streaming is not True:
        pytest.skip("it does not stream")
    given = inputs(mixer, 13)
    whole, state = mixer.stream(**part(given, slice(9)))
    out, state = mixer.stream(**part(given, slice(0, 0)), state=state)
    assert out.shape == (2, HEADS, 0, DIM)
    rest, state = mixer.stream(**part(given, slice(9, 13)), state=state)
    assert_close(torch.cat([whole, rest], 2), mixer(**given, causal=True))


@every
def test_batch_rows_are_independent(name, options):
    mixer = build(name, options)
    for causal in modes(mixer):
        given = inputs(mixer, 21, batch=3)
        out = mixer(**given, causal=causal)
        for row in range(3):
            alone = slice(row, row + 1)
            assert_close(out[alone], mixer(**part(given, rows=alone), causal=causal))


@every
def test_packed_sequences_do_not_meet(name, options):
    mixer = build(name, options)
    ends = [0, 9, 10, 33, 33, 60, MAX + 16]  # together longer than one may be
    for causal in modes(mixer):
        given = inputs(mixer, ends[-1], batch=1)
        pieces = [part(given, slice(a, b)) for a, b in zip(ends, ends[1:]) if b > a]
        alone = [mixer(**piece, causal=causal) for piece in pieces]
        packed = mixer(**given, causal=causal, cu_seqlens=torch.tensor(ends))
        assert_close(packed, torch.cat(alone, 2))
    with pytest.raises(ValueError, match="key_mask with cu_seqlens: packed sequences have no padding"):
        keep = torch.ones(1, ends[-1], dtype=torch.bool)
        mixer(**given, causal=modes(mixer)[0], cu_seqlens=torch.tensor(ends), key_mask=keep)
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to .* got \[0, 9, 5, 80\]"):
        mixer(**given, causal=modes(mixer)[0], cu_seqlens=torch.tensor([0, 9, 5, ends[-1]]))


@every
def test_gradients_are_those_of_finite_differences(name, options):
    mixer = build(name, options)
    for causal in modes(mixer):
        given = {n: t.requires_grad_() for n, t in inputs(mixer, 9, batch=1).items()}
        out = mixer(**given, causal=causal)
        direction = torch.randn_like(out)
        wanted = (*given.values(), *mixer.parameters())
        grads = torch.autograd.grad((out * direction).sum(), wanted, allow_unused=True)
        for label, grad in zip(given, grads, strict=False):
            assert grad is None if label in mixer.unread else grad.norm() > 1e-3, label
        step = 1e-6
        for t, grad in zip(wanted, grads, strict=True):
            if grad is None:
                continue
            move = torch.randn_like(t)
            with torch.no_grad():
                ends = []
                for sign in (1, -1):
                    t.add_(move, alpha=sign * step)
                    ends.append((mixer(**given, causal=causal) * direction).sum())
                    t.sub_(move, alpha=sign * step)
            assert_close((ends[0] - ends[1]) / (2 * step), (grad * move).sum(), rtol=1e-4, atol=1e-5)


@every
def test_the_same_seed_gives_the_same_mixer(name, options):
    mixer, again = build(name, options), build(name, options)
    for causal in modes(mixer):
        given = inputs(mixer, 21)
        assert torch.equal(mixer(**given, causal=causal), again(**given, causal=causal))


@every
def test_save_and_load(name, options):
    saved, other = build(name, options), build(name, options)
    if "seed" in mixers.options(name):
        other.redraw(7)
        state = zip(saved.state_dict().values(), other.state_dict().values(), strict=True)
        assert not all(torch.equal(a, b) for a, b in state)
    moved(other).load_state_dict(saved.state_dict())
    for causal in modes(saved):
        given = inputs(saved, 21)
        assert torch.equal(other(**given, causal=causal), saved(**given, causal=causal))


@every
def test_redraw(name, options):
    mixer = build(name, options)
    if not hasattr(mixer, "redraw"):
        pytest.skip("it draws nothing")
    mixer.redraw(0)
    before = {key: t.clone() for key, t in mixer.state_dict().items()}
    mixer.redraw()
    assert any(not torch.equal(before[key], t) for key, t in mixer.state_dict().items())
    mixer.redraw(0)
    assert all(torch.equal(before[key], t) for key, t in mixer.state_dict().items())


@every
@pytest.mark.parametrize("cuts", [(33,), (1,) * 33, (1, 7, 20, 5)], ids=["whole", "tokens", "pieces"])
def test_streamed_equals_whole(name, options, cuts):
    mixer = build(name, options)
    if mixer.streaming is not True:
        with pytest.raises(ValueError, match=f"{re.escape(name)}.*{mixer.streaming}"):
            mixer.stream(**inputs(mixer, 3))
        return
    mask = torch.rand(2, 33) > 0.2
    mask[0, :9] = False  # a stream may begin with padding
    for heads, key_mask in ((HEADS, None), (HEADS, mask), (2, None), (2, mask)):
        given, state, outs, start = inputs(mixer, 33, kv_heads=heads), None, [], 0
        for n in cuts:
            here = slice(start, start + n)
            kept = None if key_mask is None else key_mask[:, here]
            out, state = mixer.stream(**part(given, here), state=state, key_mask=kept)
            outs.append(out)
            start += n
            assert state.position == start
        assert_close(torch.cat(outs, 2), mixer(**given, causal=True, key_mask=key_mask))


@every
def test_a_stream_can_be_reordered_for_beams(name, options):
    mixer = build(name, options)
    if mixer.streaming is not True:
        pytest.skip(mixer.streaming)
    given, order = inputs(mixer, 12), torch.tensor([1, 1, 0])
    _, state = mixer.stream(**part(given, slice(9)))
    out, _ = mixer.stream(**part(given, slice(9, None), order), state=state.index_select(order))
    assert_close(out, mixer(**given, causal=True)[order, :, 9:])


@every
def test_refusals_carry_the_reason(name, options):
    mixer = build(name, options)
    given = inputs(mixer, 12)
    for causal, declared in ((False, mixer.bidirectional), (True, mixer.causal)):
        if declared is not True:
            assert len(declared) > 20
            with pytest.raises(ValueError, match=f"{re.escape(name)}.*{declared}"):
                mixer(**given, causal=causal)
    if mixer.cross is not True:
        assert len(mixer.cross) > 20
        with pytest.raises(ValueError, match=f"{re.escape(name)}.*{mixer.cross}"):
            mixer(**given | {n: given[n][:, :, :5] for n in "kv"}, causal=modes(mixer)[0])
        with pytest.raises(ValueError, match=f"{re.escape(name)}.*{mixer.cross}"):
            mixer.absorb(given["k"], given["v"])
    if mixer.reads_input:
        wanted = r"reads the layer's input: x must be \(batch, length, width\) = \(2, 12, 12\)"
        for wrong, said in ((None, "none"), (given["x"][:, :7], r"shape \(2, 7, 12\)")):
            with pytest.raises(ValueError, match=f"{wanted}; got {said}"):
                mixer(**given | {"x": wrong})


@every
@pytest.mark.parametrize(("length", "keys"), [(7, 20), (20, 7), (1, 9)])
def test_cross_attention_adds_up(name, options, length, keys):
    """One query's answer does not depend on the number of queries, and masked keys may be cut off."""
    mixer = build(name, options)
    if mixer.cross is not True:
        pytest.skip(mixer.cross)
    if options.get("horizon") == "length":
        pytest.skip("its horizon is the longer of the two lengths")
    for causal in modes(mixer):
        q, k, v = inputs(mixer, length, keys).values()
        out = mixer(q, k, v, causal=causal)
        assert out.shape == (2, HEADS, length, DIM)
        assert_close(out[:, :, :1], mixer(q[:, :, :1], k, v, causal=causal))
        mask = torch.arange(keys).expand(2, -1) < 5
        cut = mixer(q, k[:, :, :5], v[:, :, :5], causal=causal)
        assert_close(mixer(q, k, v, causal=causal, key_mask=mask), cut)


@every
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_an_absorbed_source_is_read_as_cross_attention(name, options, kv_heads, masked):
    """At once, and token by token: queries at an offset give what they give among all the others."""
    mixer = build(name, options)
    if mixer.cross is not True or mixer.bidirectional is not True:
        pytest.skip("it does not attend to another sequence")
    q, k, v = inputs(mixer, 11, 20, kv_heads=kv_heads).values()
    mask = torch.rand(2, 20) > 0.4 if masked else None
    if masked:
        k[~mask[:, None].expand(k.shape[:3])] = math.nan
    if options.get("horizon") == "length":
        with pytest.raises(ValueError, match='horizon="length" differs from call to call'):
            mixer.absorb(k, v, key_mask=mask)
        return
    want, memory = mixer(q, k, v, key_mask=mask), mixer.absorb(k, v, key_mask=mask)
    assert_close(mixer.read(q, memory), want)
    steps = [mixer.read(q[:, :, i : i + 3], memory, offset=i) for i in range(0, 11, 3)]
    assert_close(torch.cat(steps, 2), want)
    order = torch.tensor([1, 1, 0])
    assert_close(mixer.read(q[order], memory.index_select(order)), want[order])


@every
def test_weights_are_what_the_mixer_does(name, options):
    mixer = build(name, options)
    for causal in modes(mixer):
        given = inputs(mixer, 17)
        v = given.pop("v")
        matrix = mixers.weights(mixer, **given, causal=causal)
        assert matrix.shape == (2, HEADS, 17, 17)
        assert_close(matrix @ v, mixer(**given, v=v, causal=causal))
        if causal:
            assert (matrix.triu(1) == 0).all()
