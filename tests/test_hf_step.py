"""The next token through all blocks at once equals the blocks one by one, which take over where they must."""

import contextlib
import copy

import pytest
import torch
from conftest import RUNNING, moved

pytest.importorskip("transformers")

from cosformer.decay import Gate
from cosformer.hf import CosformerConfig, CosformerForCausalLM, decoder, loop, stack, step
from cosformer.mixers import keys
from cosformer.ops import _rows

pytestmark = pytest.mark.skipif("native" not in RUNNING, reason="the native kernel is not built")

VOCAB = 50
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}
MODELS = {
    "cosformer": {},
    "paper": {"mixer": "cosformer-paper"},
    "ladder": {"mixer": "cosformer-ladder"},
    "cosine": {"mixer": "cosformer-cosine"},
    "relu": {"mixer": "relu"},
    "identity": {"mixer": "identity"},
    "hybrid": {"mixer": "cosformer*2, softmax+rope"},
    "softmax without rope": {"mixer": "cosformer*2, softmax"},
    "softmax, grouped and gated": {
        "mixer": "cosformer*2, softmax+rope",
        "num_key_value_heads": 2,
        "output_gate": True,
    },
    "softmax, no convolution": {"mixer": "relu, softmax+rope, relu", "short_conv": 0, "qk_norm": True},
    "softmax first": {"mixer": "softmax+rope, cosformer, relu"},
    "grouped": {"num_key_value_heads": 2},
    "gate and biases": {"output_gate": True, "attention_bias": True, "mlp_bias": True},
    "a wide convolution, no norms": {"short_conv": 7, "qk_norm": False},
    "no convolution": {"short_conv": 0},
    "horizons": {"mixer_options": {"horizon": [64, 70, 80, float("inf")]}},
    "rates": {"mixer_options": {"decay": [0.5, 0.1, 0.0, 0.01]}},
    "odd sizes": {"hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 37},
    "threads": {"hidden_size": 128, "intermediate_size": 150},
}


def model(**fields) -> CosformerForCausalLM:
    torch.manual_seed(0)
    return moved(CosformerForCausalLM(CosformerConfig(**(SIZES | fields)))).eval()


def ids(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def ways(monkeypatch):
    """Records whether each token took all blocks at once; `ways.general()` sends all block by block."""

    class Ways(list):
        def general(self):
            monkeypatch.setattr(stack, "next_token", lambda *args: None)
            monkeypatch.setattr(decoder, "next_logits", lambda *args: None)
            monkeypatch.setattr(loop.Loop, "of", lambda *args: None)

    taken, at_once, next_token = Ways(), step.Ready.__call__, stack.next_token

    def watched(self, *args):
        hidden = at_once(self, *args)
        if hidden is not None:
            taken.append(True)
        return hidden

    def refused(*args):
        hidden = next_token(*args)
        if hidden is None:
            taken.append(False)
        return hidden

    monkeypatch.setattr(step.Ready, "__call__", watched)
    monkeypatch.setattr(stack, "next_token", refused)
    return taken


@torch.no_grad()
def decoded(it, prompt, tokens, **given) -> torch.Tensor:
    """The logits after each of the tokens that follow a prompt."""
    cache = it(prompt, use_cache=True, **given).past_key_values
    return torch.cat([it(t, past_key_values=cache, **given).logits for t in tokens.split(1, 1)], 1)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_equals_the_blocks(ways, kind, rows):
    it, threads = model(**MODELS[kind]), torch.get_num_threads()
    torch.set_num_threads(2 if kind == "threads" else 1)
    fast = decoded(it, ids(rows, 7), ids(rows, 9, 2))
    assert all(ways) and len(ways) == 9
    ways.general()
    slow = decoded(it, ids(rows, 7), ids(rows, 9, 2))
    torch.set_num_threads(threads)
    tolerance = 1e-3 if kind == "identity" else 1e-5  # its normaliser may come near zero
    assert (fast - slow).abs().max() <= tolerance * slow.abs().max()


@pytest.mark.parametrize("kind", ["cosformer", "cosine", "hybrid", "gate and biases", "odd sizes", "threads"])
def test_weights_in_bfloat16_are_summed_in_float32(ways, kind):
    """So the result is closer than the blocks' own to that of the same weights in float32."""
    it = model(**MODELS[kind]).to(torch.bfloat16)
    exact = copy.deepcopy(it).float()
    fast = decoded(it, ids(2, 7), ids(2, 9, 2))
    assert all(ways) and len(ways) == 9 and fast.dtype == torch.bfloat16
    ways.general()
    slow, wanted = (decoded(one, ids(2, 7), ids(2, 9, 2)) for one in (it, exact))
    fast_error, slow_error = ((found - wanted).square().mean() for found in (fast, slow))
    assert fast_error <= slow_error
    assert (fast - wanted).abs().max() <= 0.05 * wanted.abs().max()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
@pytest.mark.parametrize("kind", ["cosformer", "hybrid"])
def test_text_is_the_same(ways, kind, options):
    it = model(**MODELS[kind])
    padded = ids(2, 8)
    padded[0, :3] = 0
    mask = (padded != 0).long()
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        given = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None, **options}
        texts.append(it.generate(padded, attention_mask=mask, **given))
        assert not texts[1:] or all(ways)
        ways.general()
    assert torch.equal(*texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_keys_outgrow_their_room(ways, monkeypatch, dtype):
    """Views of them that were taken earlier do not change."""
    monkeypatch.setattr(keys, "ROOM", 2)
    it, prompt, tokens = model(**MODELS["hybrid"]).to(dtype), ids(2, 7), ids(2, 24, 2)
    cache = it(prompt, use_cache=True).past_key_values
    got, taken = [], []
    for token in tokens.split(1, 1):
        got.append(it(token, past_key_values=cache).logits)
        if len(got) % 5 == 0:
            kept = cache.layers[2].kept.mixer
            taken.append((kept, kept.k.clone(), kept.v.clone()))
            assert kept.position == len(kept.at) == kept.k.shape[2] == 7 + len(got)
    for kept, k, v in taken:
        assert torch.equal(kept.k, k) and torch.equal(kept.v, v)
    assert all(ways) and len(ways) == 24
    ways.general()
    slow = decoded(it, prompt, tokens)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    assert (torch.cat(got, 1) - slow).abs().max() <= tolerance * slow.abs().max()


@torch.no_grad()
def test_ways_may_alternate(ways, monkeypatch):
    """Several tokens at once, recorded ones, and copies of a cache, in a hybrid: the logits stay the same."""
    it, whole = model(**MODELS["hybrid"]), ids(2, 40)
    wanted = it(whole, use_cache=False).logits
    cache, got, at = it.new_cache(), [], 0
    for count in (5, 1, 1, 1, 4, 1, 1, 3, *(1,) * 9):
        if at == 12:
            cache = copy.deepcopy(cache)
        if at == 17:
            cache.activate_past_recording()
            it(ids(2, 3, 8), past_key_values=cache)
            cache.crop(-3)
        got.append(it(whole[:, at : at + count], past_key_values=cache).logits)
        at += count
    assert sum(ways) >= 5 and not all(ways)
    torch.testing.assert_close(torch.cat(got, 1), wanted[:, :at], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_padded_hybrid_calls_its_softmax_layers_only(ways):
    it, padded, tokens = model(**MODELS["hybrid"]), ids(2, 7), ids(2, 6, 2)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :3] = 0

    def logits() -> torch.Tensor:
        cache = it(padded, attention_mask=mask[:, :7], use_cache=True).past_key_values
        steps = enumerate(tokens.split(1, 1), 8)
        return torch.cat(
            [it(t, attention_mask=mask[:, :n], past_key_values=cache).logits for n, t in steps], 1
        )

    fast = logits()
    assert all(ways) and len(ways) == 6
    ways.general()
    assert (fast - (slow := logits())).abs().max() <= 1e-5 * slow.abs().max()


def changed_module(it):
    class Own(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    old = it.model.layers[1].mlp.up_proj
    it.model.layers[1].mlp.up_proj = Own(*old.weight.T.shape, bias=False)
    it.model.layers[1].mlp.up_proj.weight = old.weight


def changed_class(it):
    mlp = it.model.layers[0].mlp
    mlp.__class__ = type(
        "Own", (type(mlp),), {"forward": lambda self, x: -stack.CosformerMLP.forward(self, x)}
    )


def changed_weights(it):
    for layer in it.model.layers:
        layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data * 3


def changed_strides(it):
    weight = it.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()


def changed_norm(it):
    it.model.layers[1].post_attention_layernorm.variance_epsilon = 1.0


def changed_last_norm(it):
    it.model.norm.variance_epsilon = 1.0


def changed_head(it):
    it.lm_head.weight.data = it.lm_head.weight.data * 2


def changed_embedding(it):
    it.model.embed_tokens.weight = torch.nn.Parameter(it.model.embed_tokens.weight.data * 2)


def listened_to_head(it):
    it.lm_head.register_forward_hook(lambda module, args, out: out * 0.5)


def changed_gate(it):
    class Own(Gate):
        def forward(self, x):
            return super().forward(x) - 3

    old = it.model.layers[1].self_attn.interior.mixer.decay.gate
    new = it.model.layers[1].self_attn.interior.mixer.decay.gate = Own(*old.weight.T.shape)
    new.weight, new.bias = old.weight, old.bias


def listened_to(it):
    it.model.layers[2].mlp.register_forward_hook(lambda module, args, out: out * 0.5)


def replaced_forward(it):
    old = it.model.layers[0].self_attn.forward
    it.model.layers[0].self_attn.forward = lambda *args, **kwargs: (old(*args, **kwargs)[0] * 0.5, None)


def changed_order(it):
    it.model.layers = torch.nn.ModuleList(it.model.layers[i] for i in (2, 0, 1))


def changed_eps(it):
    it.model.layers[0].self_attn.interior.mixer.eps = 5.0


def changed_head_norms(it):
    it.model.layers[1].self_attn.interior.norm_eps = 1.0


def changed_features(it):
    it.model.layers[1].self_attn.interior.mixer.relu = False


def changed_method(it):
    mixer = it.model.layers[0].self_attn.interior.mixer
    mixer.phi = lambda x: x + 1


def changed_lengths(it):
    it.model.embed_tokens.max_norm = 0.1


@pytest.mark.parametrize(
    "change",
    [
        changed_order,
        changed_eps,
        changed_head_norms,
        changed_features,
        changed_method,
        changed_lengths,
        changed_module,
        changed_class,
        changed_weights,
        changed_strides,
        changed_norm,
        changed_gate,
        changed_last_norm,
        changed_head,
        changed_embedding,
        listened_to_head,
        listened_to,
        replaced_forward,
    ],
)
@torch.no_grad()
def test_a_change_of_the_model_is_seen(ways, change):
    """Between two tokens of one stream."""
    it, prompt, token = model(), ids(2, 7), ids(2, 1)
    caches = [it(prompt, use_cache=True).past_key_values for _ in range(2)]
    before = [it(token, past_key_values=cache).logits for cache in caches]
    change(it)
    fast = it(token, past_key_values=caches[0]).logits
    ways.general()
    slow = it(token, past_key_values=caches[1]).logits
    assert torch.allclose(fast, slow, atol=1e-5) and not torch.allclose(fast, before[0], atol=1e-3)


@torch.no_grad()
def test_a_method_of_its_own_is_called_from_the_start(ways):
    it, prompt, token = model(), ids(2, 7), ids(2, 1)
    changed_method(it)
    fast, slow = (it(prompt, use_cache=True).past_key_values for _ in range(2))
    fast = it(token, past_key_values=fast).logits
    ways.general()
    assert torch.allclose(fast, it(token, past_key_values=slow).logits, atol=1e-5)


def test_who_goes_the_general_way(ways):
    it, prompt, token = model(), ids(2, 7), ids(2, 1)

    def goes(**given) -> bool:
        ways.clear()
        with torch.no_grad():
            cache = it(prompt, use_cache=True).past_key_values
            if given.pop("recorded", False):
                cache.activate_past_recording()
        it(token, past_key_values=cache, **given)
        return any(ways)

    masked = torch.ones(2, 8, dtype=torch.long)
    masked[1, -1] = 0
    with torch.no_grad():
        assert goes() and goes(attention_mask=torch.ones_like(masked))
        assert not goes(recorded=True)
        assert not goes(attention_mask=masked)
        with torch.autocast("cpu", torch.bfloat16):
            assert not goes()
        it.train()
        assert not goes()
        it.eval()
    assert not goes()  # autograd needs a graph
    with torch.no_grad():
        assert goes()
        assert not goes(output_hidden_states=True)  # transformers' hooks stay
        it = model()
        assert goes()
        it.half()
        assert not goes()


@torch.no_grad()
def test_a_cache_changes_only_what_is_its_own(ways):
    it, token = model(), ids(1, 1)
    cache = it(ids(1, 7), use_cache=True).past_key_values
    first = cache.layers[0].kept
    tensors = [first.mixer.tensor.clone(), *(t.clone() for t in first.last)]
    apart = copy.deepcopy(cache)
    logits = it(token, past_key_values=cache).logits
    for a, b in zip((first.mixer.tensor, *first.last), tensors, strict=True):
        assert torch.equal(a, b)
    address = cache.layers[0].kept.mixer.tensor.data_ptr()
    branch = copy.deepcopy(cache)
    it(ids(1, 1, 9), past_key_values=cache)
    assert cache.layers[0].kept.mixer.tensor.data_ptr() == address  # no state is allocated
    assert cache.get_seq_length() == 9 and branch.get_seq_length() == 8
    assert torch.equal(it(token, past_key_values=apart).logits, logits)
    again = copy.deepcopy(branch)
    assert torch.equal(it(token, past_key_values=branch).logits, it(token, past_key_values=again).logits)
    assert all(ways)


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({"horizon": 100}, {}),
        ({"short_conv": 0}, {}),
        ({"num_attention_heads": 2}, {}),
        *(({"mixer_options": {"horizon": h}}, {"horizon": 64}) for h in (100, [64, 70, 80, 90])),
    ],
    ids=str,
)
@torch.no_grad()
def test_what_another_model_keeps_does_not_reach_the_kernel(ways, fields, own):
    cache = model(**fields)(ids(2, 7), use_cache=True).past_key_values
    with contextlib.suppress(ValueError):  # whether the general way takes it is not the question
        model(**own)(ids(2, 1), past_key_values=cache)
    assert ways == [False]


@torch.no_grad()
def test_embeddings_of_any_layout_and_dropout_that_is_on(ways):
    it, prompt = model(dropout=0.5), ids(2, 7)
    given = torch.randn(32, 1, 2).permute(2, 1, 0)
    caches = [it(prompt, use_cache=True).past_key_values for _ in range(4)]
    a, b = (
        it(inputs_embeds=x, past_key_values=c).logits for x, c in zip((given, given.contiguous()), caches)
    )
    assert torch.equal(a, b) and all(ways)
    assert isinstance(it.model(ids(2, 1), past_key_values=caches[2], return_dict=False), tuple)
    for module in it.modules():
        module.train(isinstance(module, torch.nn.Dropout))
    ways.clear()
    it(ids(2, 1), past_key_values=caches[3])
    assert not any(ways)


@torch.no_grad()
def test_errors_are_the_general_ways():
    it = model(max_position_embeddings=8, mixer="cosformer-cosine")
    cache = it(ids(1, 9), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="10 tokens reach past the horizon of 8"):
        it(ids(1, 1), past_key_values=cache)
    it = model()
    cache = it(ids(1, 7), use_cache=True).past_key_values
    it.model.layers[1].self_attn.interior.mixer.decay.gate.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="decay rates must be finite and 0 or more"):
        it(ids(1, 1), past_key_values=cache)


def test_another_default_device_changes_nothing(ways):
    it, x = model(positions="learned"), ids(2, 9)
    with torch.no_grad():
        plain = it(x, use_cache=True)
        want = it(x[:, :1], past_key_values=copy.deepcopy(plain.past_key_values)).logits
        with torch.device("meta"):
            found = it(x[:, :1], past_key_values=plain.past_key_values).logits
    assert ways == [True, True] and torch.equal(found, want)


@pytest.mark.parametrize("fields", [{}, MODELS["hybrid"]], ids=["cosformer", "hybrid"])
def test_a_cache_that_was_left_in_the_middle_of_a_token_is_refused(ways, monkeypatch, fields):
    """A signal is handled when the kernel returns: the cache then has the token, but not its position."""
    it, x = model(**fields), ids(1, 9)

    def interrupted(*args, _step=_rows.step):
        _step(*args)
        raise KeyboardInterrupt

    with torch.no_grad():
        cache = it(x, use_cache=True).past_key_values
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(_rows, "step", interrupted)
            it(x[:, :1], past_key_values=cache)
        for more in (x[:, :1], x[:, :3]):
            with pytest.raises(ValueError, match="left in the middle of a token.*begin with a new cache"):
                it(more, past_key_values=cache)
        other = it(x, use_cache=True).past_key_values
        with pytest.raises(IndexError):  # nothing was changed, so it can continue
            it(torch.tensor([[VOCAB]]), past_key_values=other)
        assert it(x[:, :1], past_key_values=other).logits.isfinite().all()


def test_what_stands_in_the_place_of_dropout_is_called(ways):
    it, x = model(), ids(1, 9)
    with torch.no_grad():
        cache = it(x, use_cache=True).past_key_values
        before = it(x[:, :1], past_key_values=copy.deepcopy(cache)).logits
        it.model.dropout.register_forward_hook(lambda module, given, out: 2 * out)
        assert not torch.equal(it(x[:, :1], past_key_values=cache).logits, before) and ways[:1] == [True]
