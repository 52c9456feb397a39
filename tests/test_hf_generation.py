"""Generation with a cache: however tokens are fed, moved or taken back, the text is the same."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from cosformer.hf import (
    CosformerCache,
    CosformerConfig,
    CosformerForCausalLM,
    CosformerForConditionalGeneration,
    CosformerSeq2SeqConfig,
    attach,
)
from cosformer.hf.cache import tensors

VOCAB = 61
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4}  # fmt: skip
PLAIN = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "forced_eos_token_id": None}
MIXED = ["linear_attention", "full_attention", "linear_attention"]
ALL_THREE = ["linear_attention", "sliding_attention", "full_attention"]
KINDS = {
    "gated": {},
    "ladder": {"mixer": "cosformer-ladder"},
    "paper": {"mixer": "cosformer-paper"},
    "cosine": {"mixer": "cosformer-cosine"},
    "hybrid": {"layer_types": MIXED},
    "window": {"layer_types": ALL_THREE, "sliding_window": 6},
    "hybrid, RoPE": {"mixer": "cosformer-hybrid+rope"},
    "both signs": {"mixer_options": {"both_signs": True}, "output_gate": True},
}
FEW = ("gated", "paper", "hybrid", "window")
NEUTRAL = ("decay.gate", ".conv.", "q_norm", "k_norm")  # they start as if they were not there


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Toy tensors: a second thread costs more than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def decoder(kind: str = "gated", seed: int = 0, **fields) -> CosformerForCausalLM:
    """A toy with varied output: large weights, and what starts as the identity moved off it."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2}
    return lively(CosformerForCausalLM(CosformerConfig(**(sizes | KINDS[kind] | fields))))


def seq2seq(**fields) -> CosformerForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 256,
    }
    sizes |= {
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "init_std": 0.2,
    }
    return lively(CosformerForConditionalGeneration(CosformerSeq2SeqConfig(**(sizes | fields))))


def lively(model):
    for name, p in model.named_parameters():
        if any(part in name for part in NEUTRAL):
            p.data.add_(torch.randn_like(p), alpha=0.3)
        elif "embed_positions" in name:
            p.data.normal_(std=1.0)  # else BART's decoder repeats one token
    return model.eval()


def prompt(rows: int = 1, length: int = 20) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))


def text(model, ids, keep=None, **options) -> torch.Tensor:
    keep = torch.ones_like(ids) if keep is None else keep
    return model.generate(ids, attention_mask=keep, **(PLAIN | {"max_new_tokens": 24} | options))


@pytest.mark.parametrize("kind", FEW)
@torch.no_grad()
def test_decode_equals_prefill_equals_no_cache_over_600_tokens(kind):
    model, ids = decoder(kind), prompt(2, 600)
    whole = model(ids, use_cache=False).logits

    def same(got: torch.Tensor) -> None:
        assert (got - whole).abs().max() <= 1e-5 * whole.abs().max()

    same(model(ids, use_cache=True).logits)
    cache, steps = model.new_cache(), []
    for i in range(600):
        steps.append(model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits)
    same(torch.cat(steps, 1))
    cache, parts = model.new_cache(), []
    for part in ids.split((1, 200, 7, 392), 1):
        parts.append(model(part, past_key_values=cache, use_cache=True).logits)
    same(torch.cat(parts, 1))


@torch.no_grad()
def test_right_padding_is_taken_with_and_without_a_cache():
    """transformers warns about it; after such a gap `generate` continues positions from the padding."""
    model, ids = decoder(), prompt(2)
    keep = torch.ones_like(ids)
    keep[0, -4:] = 0
    assert torch.equal(text(model, ids, keep), text(model, ids, keep, use_cache=False))


def test_600_greedy_tokens_are_the_same_without_cache():
    model, ids = decoder(), prompt()
    cached = text(model, ids, max_new_tokens=600)
    assert len(cached.unique()) > 10  # varied text, else the comparison says little
    logits = model(cached[:, :-1], use_cache=False).logits[:, ids.shape[1] - 1 :]
    assert torch.equal(logits.argmax(-1), cached[:, ids.shape[1] :])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 4}, {"num_beams": 4, "num_return_sequences": 3}, {"do_sample": True, "top_k": 20}],
    ids=["greedy", "beams", "three beams", "sampling"],
)
def test_cache_changes_nothing(kind, options):
    model, ids = decoder(kind), prompt(2)
    torch.manual_seed(5)
    cached = text(model, ids, **options)
    torch.manual_seed(5)
    assert torch.equal(cached, text(model, ids, use_cache=False, **options))
    assert len(cached.unique()) > 10


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("use_cache", [True, False])
def test_left_padded_batch_equals_each_alone(kind, use_cache):
    model, ids = decoder(kind), prompt(3)
    keep = torch.ones_like(ids)
    keep[1, :7], keep[2, :19] = 0, 0
    batch = text(model, ids, keep, use_cache=use_cache)
    for row, pad in enumerate((0, 7, 19)):
        assert torch.equal(batch[row, pad:], text(model, ids[row : row + 1, pad:])[0])


@pytest.mark.parametrize(("mixer", "use_cache"), [("local", True), ("local", False), ("sparse", False)])
def test_left_padding_that_would_move_a_pattern_is_refused(mixer, use_cache):
    """Of rows padded on the right each is as it is alone."""
    options = {"globals": 2, "window": 3} if mixer == "local" else {"stride": 4}
    model, ids = decoder("gated", mixer=mixer, mixer_options=options), prompt(2)
    keep = torch.ones_like(ids)
    keep[1, :7] = 0
    with pytest.raises(ValueError, match=f"begins with padding, but mixer '{mixer}'.* pad on the right"):
        text(model, ids, keep, use_cache=use_cache)
    keep = keep.flip(1)
    assert_close = torch.testing.assert_close
    assert_close(
        model(ids, attention_mask=keep, use_cache=use_cache).logits[1, :13], model(ids[1:, :13]).logits[0]
    )


@pytest.mark.parametrize("mixer", ["performer+rope", "performer+sine_spe", "rfa+sine_spe"])
def test_left_padding_that_would_move_a_draw_is_refused(mixer):
    """Rotation alone tells distances only, so softmax+rope takes it."""
    ids = prompt(2)
    keep = torch.ones_like(ids)
    keep[1, :7] = 0
    with pytest.raises(ValueError, match="its draws and .* are of places counted from the first of a row"):
        decoder("gated", mixer=mixer)(ids, attention_mask=keep)
    model = decoder("gated", mixer="softmax+rope")
    alone = model(ids[1:, 7:]).logits[0]
    torch.testing.assert_close(model(ids, attention_mask=keep).logits[1, 7:], alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("chunk", [2, 7])
def test_left_padding_is_found_behind_a_chunk_of_padding(chunk):
    model, ids = decoder("gated", mixer="local", mixer_options={"globals": 2, "window": 3}), prompt(2)
    keep = torch.ones_like(ids)
    keep[1, :7] = 0
    with pytest.raises(ValueError, match="begins with padding"):
        text(model, ids, keep, prefill_chunk_size=chunk)
    attached = attach(LlamaForCausalLM(LlamaConfig(**SMALL)).eval(), "local", globals=2, window=3)
    with pytest.raises(ValueError, match="begins with padding"):
        attached(ids, attention_mask=keep, use_cache=False)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_without_tokens_change_nothing(kind):
    """At the beginning, in the middle, and before single tokens."""
    model, ids = decoder(kind), prompt(2)
    cache = model.new_cache()
    with torch.no_grad():
        parts = [model(x, past_key_values=cache).logits for x in ids.split([0, 1, 4, 0, 1, 0, 14], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["attention_mask", "decoder_attention_mask"])
def test_an_encoder_decoder_refuses_left_padding(name):
    """Its positions count from the first place of a row. A row that is all padding stays allowed."""
    model, ids = seq2seq(), prompt(3)
    keep = torch.ones_like(ids)
    keep[2] = 0
    given = {"input_ids": ids, "decoder_input_ids": ids}
    assert model(**given, **{name: keep}).logits[:2].isfinite().all()
    keep[1, 0] = 0
    with pytest.raises(ValueError, match=f"^{name} begins with padding.* pad on the right"):
        model(**given, **{name: keep})


@pytest.mark.parametrize("kind", FEW)
def test_generate_finds_the_padding_and_what_is_cached_by_itself(kind):
    """It looks at the names of forward's arguments."""
    model, ids = decoder(kind, pad_token_id=0), prompt(2)
    ids[1, :7] = 0
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": 1, "pad_token_id": 0}
    both = model.generate(ids, **options)
    alone = model.generate(ids[1:, 7:], attention_mask=torch.ones_like(ids[1:, 7:]), **options)
    assert torch.equal(both[1, 7 : 7 + alone.shape[1]], alone[0])
    found = model.generate(ids[:1], return_dict_in_generate=True, **options)
    longer = torch.cat([found.sequences, prompt(1, 3)], 1)
    went_on = model.generate(longer, past_key_values=found.past_key_values, **options)
    assert torch.equal(went_on, model.generate(longer, **options))


@pytest.mark.parametrize("kind", ("gated", "hybrid"))
@pytest.mark.parametrize("seed", [0, 1], ids=["the same assistant", "another"])
def test_assisted_decoding_equals_plain(kind, seed):
    model, assistant, ids = decoder(kind), decoder(kind, seed=seed), prompt()
    plain = text(model, ids, max_new_tokens=40)
    assert torch.equal(text(model, ids, max_new_tokens=40, assistant_model=assistant), plain)
    never = {"eos_token_id": VOCAB}  # transformers 5.5 looks prompts up only where there is an end token
    assert torch.equal(text(model, ids, max_new_tokens=40, prompt_lookup_num_tokens=4, **never), plain)


def test_sometimes_right_assistant():
    """An assistant that is right only now and then makes rollbacks end at every place in a draft."""
    model, assistant, ids = decoder(), decoder(), prompt()
    torch.manual_seed(9)
    for p in assistant.parameters():
        p.data += 0.01 * torch.randn_like(p)
    assert torch.equal(
        text(model, ids, max_new_tokens=80, assistant_model=assistant), text(model, ids, max_new_tokens=80)
    )


class Collect(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append(None)


class AfterFive(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 25, device=input_ids.device)


def test_streamer_and_stopping_criteria():
    model, ids, streamer = decoder(), prompt(), Collect()
    out = text(model, ids, streamer=streamer, stopping_criteria=StoppingCriteriaList([AfterFive()]))
    assert out.shape[1] == 25
    assert streamer.tokens == [*out[0].tolist(), None]


@torch.no_grad()
def test_cache_bytes_do_not_grow():
    model, sizes = decoder(), set()
    for length in (8, 64, 512):
        cache = model(prompt(1, length), use_cache=True).past_key_values
        sizes.add(cache.nbytes)
        assert cache.get_seq_length() == length
    heads, size = 4, 16
    state = 3 * heads * size * (size + 1) * 4
    kept = 3 * 3 * (64 + 2 * 32) * 4  # 3 tokens of q, k, v per layer
    assert sizes == {state + kept}
    assert decoder("cosine")(prompt(), use_cache=True).past_key_values.nbytes == 2 * state + kept


def test_a_generated_cache_can_be_continued():
    model, ids = decoder(), prompt()
    whole = text(model, ids, max_new_tokens=20)
    first = text(model, ids, max_new_tokens=8, past_key_values=(cache := model.new_cache()))
    assert cache.get_seq_length() == 27  # the last token was not fed
    assert torch.equal(text(model, first, max_new_tokens=12, past_key_values=cache), whole)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_after_every_operation_of_the_cache(kind):
    """Left padding, chunks, tokens taken back, rows chosen, steps; in float64, where no mistake can hide."""
    model, ids, order = decoder(kind).double(), prompt(3, 40), torch.tensor([2, 1, 1])
    keep = torch.ones_like(ids)
    keep[1, :7] = 0
    whole = model(ids[order], attention_mask=keep[order], use_cache=False).logits
    cache, last = model.new_cache(), torch.ones(3, 5, dtype=keep.dtype)
    model(ids[:, :9], attention_mask=keep[:, :9], past_key_values=cache)
    cache.activate_past_recording()
    model(ids[:, 9:20], attention_mask=keep[:, :20], past_key_values=cache)
    model(prompt(3, 5), attention_mask=torch.cat([keep[:, :20], last], 1), past_key_values=cache)
    cache.crop(-5)
    cache.reorder_cache(order)
    for i in range(20, 40):
        step = {"attention_mask": keep[order, : i + 1], "past_key_values": cache}
        got = model(ids[order, i : i + 1], **step).logits[:, 0]
        torch.testing.assert_close(got, whole[:, i], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", FEW)
@torch.no_grad()
def test_crop_takes_tokens_back(kind):
    model, ids = decoder(kind), prompt(2, 30)
    cache, never = model.new_cache(), model.new_cache()
    for each in (cache, never):
        model(ids[:, :8], past_key_values=each)
        each.activate_past_recording()
        model(ids[:, 8:20], past_key_values=each)
    model(prompt(2, 9), past_key_values=cache)
    cache.crop(-9)
    assert cache.get_seq_length() == 20
    again, want = (model(ids[:, 20:], past_key_values=each).logits for each in (cache, never))
    assert torch.equal(again, want)  # exactly as if the tokens had never come


@torch.no_grad()
def test_cache_rows_follow_the_batch():
    model, ids = decoder(), prompt(3, 10)
    cache = model(ids, use_cache=True).past_key_values
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0]))
    cache.reorder_cache(torch.tensor([1, 0, 0]))
    rows = ids[[0, 2, 2]]
    step = model(prompt(3, 1), past_key_values=cache).logits
    whole = model(torch.cat([rows, prompt(3, 1)], 1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(step, whole, atol=1e-5, rtol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0


def test_errors_name_the_cause():
    model = decoder("cosine", max_position_embeddings=24)
    # 25 tokens were fed, the first and last 24 apart.
    assert text(model, prompt(), max_new_tokens=6).shape[1] == 26
    with pytest.raises(ValueError, match="26 tokens reach past the horizon of 24"):
        text(model, prompt(), max_new_tokens=7)
    with pytest.raises(TypeError, match="model.new_cache.. makes; got DynamicCache"):
        model(prompt(), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        text(model, prompt(), cache_implementation="static")
    with pytest.raises(ValueError, match="call cache.activate_past_recording"):
        model(prompt(), use_cache=True).past_key_values.crop(-3)
    with pytest.raises(ValueError, match="output_attentions"):
        model(prompt(), output_attentions=True)
    with pytest.raises(
        ValueError, match=r"attention_mask must be a padding mask .* got shape \(1, 1, 20, 20\)"
    ):
        model(prompt(), attention_mask=torch.ones(1, 1, 20, 20))


def test_a_mask_of_another_length_is_refused():
    model, ids = decoder(), prompt(2)
    for length in (7, 27):
        said = rf"attention_mask must have the length 20, one for each token; got \(2, {length}\)"
        with pytest.raises(ValueError, match=said):
            model(ids, attention_mask=torch.ones(2, length), use_cache=False)
        with pytest.raises(ValueError, match=said):
            seq2seq()(ids, attention_mask=torch.ones(2, length), decoder_input_ids=ids)
        with pytest.raises(ValueError, match="decoder_" + said):
            seq2seq()(ids, decoder_attention_mask=torch.ones(2, length), decoder_input_ids=ids)
    for grad in (True, False):  # the general path, and the kernel's
        with torch.set_grad_enabled(grad):
            for length in (1, 21):
                cache = model(ids, use_cache=True).past_key_values
                model(ids[:, :1], past_key_values=cache, attention_mask=torch.ones(2, length))
            said = r"length 22, one for each token, 21 of them in the cache, or 1; got \(2, 20\)"
            with pytest.raises(ValueError, match=said):
                model(ids[:, :1], past_key_values=cache, attention_mask=torch.ones(2, 20))


@pytest.mark.parametrize("kind", ["gated", "hybrid"])
def test_a_cache_can_be_copied_outside_no_grad(kind):
    model, ids = decoder(kind), prompt(2)
    with torch.enable_grad():
        cache = model(ids, use_cache=True).past_key_values
        cache.activate_past_recording()
        model(ids[:, :3], past_key_values=cache)
        copied = copy.deepcopy(cache)
        want = model(ids[:, 3:9], past_key_values=cache).logits
    assert copied.get_seq_length() == 23
    assert not any(t.requires_grad for layer in copied.layers for t in tensors(layer.kept))
    torch.testing.assert_close(model(ids[:, 3:9], past_key_values=copied).logits, want)
    copied.crop(-6)
    torch.testing.assert_close(model(ids[:, 3:9], past_key_values=copied).logits, want)


@pytest.mark.parametrize(
    ("fields", "rows", "said"),
    [
        ({"num_hidden_layers": 4}, 2, "past_key_values is of 3 layers, and this model has 4"),
        ({"num_hidden_layers": 2}, 2, "past_key_values is of 3 layers, and this model has 2"),
        ({}, 3, "past_key_values holds 2 rows; got input of 3"),
        (
            {"hidden_size": 32},
            2,
            "was made by a layer with mixer 'cosformer', a convolution over 4 tokens, q, k and v of",
        ),
        ({"mixer": "softmax"}, 2, "this one has mixer 'softmax', q"),
        ({"mixer": "elu"}, 2, "this one has mixer 'elu', q"),
        ({"short_conv": 0}, 2, "this one has mixer 'cosformer', q"),
        ({"short_conv": 6}, 2, "this one has mixer 'cosformer', a convolution over 6 tokens"),
    ],
    ids=str,
)
def test_a_cache_of_another_model_or_batch_is_refused(fields, rows, said):
    model, other, ids = decoder(), decoder(**fields), prompt(2)
    for tokens in (1, 3):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                cache = model(ids, use_cache=True).past_key_values
                with pytest.raises(ValueError, match=said):
                    other(ids[:1, :tokens].expand(rows, -1), past_key_values=cache)


def test_no_limit_without_the_cosine():
    assert text(decoder(max_position_embeddings=24), prompt(), max_new_tokens=40).shape[1] == 60


# The encoder-decoder.

SEQ2SEQ = {
    "linear": {},
    "hybrid": {"layer_types": MIXED, "encoder_mixer": "cosformer, softmax"},
    "paper": {"mixer": "cosformer-paper", "cross_mixer": "cosformer-paper"},
    "cosine": {"cross_mixer": "cosformer-paper", "cross_horizon": 70},
    "window": {"layer_types": ALL_THREE, "sliding_window": 4},
}


@pytest.mark.parametrize("fields", SEQ2SEQ.values(), ids=SEQ2SEQ)
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 4}, {"do_sample": True, "top_k": 20}], ids=["greedy", "beams", "sampling"]
)
def test_seq2seq_cache_changes_nothing(fields, options):
    model, ids = seq2seq(**fields), prompt(2)
    torch.manual_seed(5)
    cached = text(model, ids, **options)
    torch.manual_seed(5)
    assert torch.equal(cached, text(model, ids, use_cache=False, **options))
    assert len(cached.unique()) > 3  # the two rows move between a few tokens


@pytest.mark.parametrize("fields", SEQ2SEQ.values(), ids=SEQ2SEQ)
@torch.no_grad()
def test_seq2seq_decode_equals_prefill_equals_no_cache(fields):
    """In float64: sums over the source lose digits in float32, with a cache and without."""
    model, target, cache, parts = seq2seq(**fields).double(), prompt(2, 24), None, []
    source = model.get_encoder()(prompt(2, 30))
    whole = model(encoder_outputs=source, decoder_input_ids=target, use_cache=False).logits
    for part in target.split((5, 1, 1, 9, 1, 7), 1):
        given = {"encoder_outputs": source, "decoder_input_ids": part, "past_key_values": cache}
        out = model(**given, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-9, rtol=1e-9)


def test_past_the_horizon_of_cross_attention_the_error_names_it():
    said = "source and target reach over 71 places, past the horizon of 70 between them; .*cross_horizon"
    model, cache = seq2seq(**SEQ2SEQ["cosine"]), None
    assert model(prompt(2, 70), decoder_input_ids=prompt(2, 70)).logits.isfinite().all()
    with pytest.raises(ValueError, match=said):
        model(prompt(2, 71), decoder_input_ids=prompt(2, 5))
    for part in prompt(2, 70).split(35, 1):
        given = {"decoder_input_ids": part, "past_key_values": cache}
        cache = model(prompt(2, 20), **given, use_cache=True).past_key_values
    model(prompt(2, 20), decoder_input_ids=prompt(2, 1), past_key_values=cache)
    with pytest.raises(ValueError, match=said.replace("71", "72")):
        model(prompt(2, 20), decoder_input_ids=prompt(2, 1), past_key_values=cache)


@pytest.mark.parametrize("fields", SEQ2SEQ.values(), ids=SEQ2SEQ)
def test_seq2seq_padded_source_equals_alone(fields):
    model, ids = seq2seq(**fields), prompt(2)
    keep = torch.ones_like(ids)
    keep[1, 13:] = 0
    batch = text(model, ids, keep)
    assert torch.equal(batch[1], text(model, ids[1:, :13])[0])


def test_seq2seq_assisted_decoding_equals_plain():
    model, ids = seq2seq(), prompt()
    torch.manual_seed(9)
    assistant = seq2seq()
    for p in assistant.parameters():
        p.data += 0.01 * torch.randn_like(p)
    assert torch.equal(text(model, ids, assistant_model=assistant), text(model, ids))


@torch.no_grad()
def test_cross_attention_reads_the_source_once():
    model, ids, calls = seq2seq(), prompt(2), []
    model.model.decoder.layers[0].encoder_attn.k_proj.register_forward_hook(lambda *_: calls.append(1))
    out = text(model, ids, return_dict_in_generate=True)
    assert len(calls) == 1
    cross = out.past_key_values.cross_attention_cache
    assert isinstance(cross, CosformerCache)
    # Layers, rows, heads, features, values + normaliser, float32.
    assert cross.nbytes == 3 * 2 * 4 * 8 * 9 * 4
