"""Our loop of `generate` writes what transformers' does, to all listeners, and leaves it special cases."""

import copy

import pytest
import torch
from conftest import RUNNING, moved

pytest.importorskip("transformers")

from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerationMixin
from transformers.generation.streamers import BaseStreamer

from cosformer.hf import CosformerConfig, CosformerForCausalLM, decoder, loop, stack, step

pytestmark = pytest.mark.skipif("native" not in RUNNING, reason="the native kernel is not built")

VOCAB = 50
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2}
PLAIN = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def model(**fields) -> CosformerForCausalLM:
    torch.manual_seed(0)
    return moved(CosformerForCausalLM(CosformerConfig(**(SIZES | fields)))).eval()


def ids(rows: int = 1, length: int = 7) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def loops(monkeypatch):
    """Collects our loops; `theirs()` turns them off; `calls` counts tokens made as transformers does."""

    class Loops(list):
        calls = 0

        def theirs(self, *, general=False):
            monkeypatch.setattr(loop.Loop, "of", lambda *args: None)
            if general:  # and block by block
                monkeypatch.setattr(decoder, "next_logits", lambda *args: None)
                monkeypatch.setattr(stack, "next_token", lambda *args: None)

    made, of, called = Loops(), loop.Loop.of, loop.Loop._called

    def watched(*args):
        it = of(*args)
        if it is not None:
            made.append(it)
        return it

    def counted(self):
        made.calls += 1
        return called(self)

    monkeypatch.setattr(loop.Loop, "of", watched)
    monkeypatch.setattr(loop.Loop, "_called", counted)
    return made


def both(loops, it, prompt, *, ours=True, calls=0, **options):
    """The text of our loop, checked against transformers'; `it` is a model, or makes one for each."""
    texts, made = [], it if callable(it) and not isinstance(it, torch.nn.Module) else lambda: it
    for turn in range(2):
        if turn:
            assert bool(loops) is ours and loops.calls == calls
            loops.theirs()
        torch.manual_seed(3)
        given = {name: option() if isinstance(option, type) else option for name, option in options.items()}
        given = PLAIN | {"attention_mask": torch.ones_like(prompt)} | given
        texts.append((made().generate(prompt.clone(), **given), given))
    (text, mine), (wanted, yours) = texts
    assert torch.equal(text, wanted) and text.is_contiguous() and text.dtype == wanted.dtype
    return text, mine, yours


OPTIONS = {
    "greedy": {},
    "one token": {"max_new_tokens": 1},
    "max_length": {"max_new_tokens": None, "max_length": 19},
    "sampled": {"do_sample": True},
    "sampled among some": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.7},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "an end": {"eos_token_id": [7, 11, 13, 17, 19, 23]},
    "an end, sampled": {"eos_token_id": list(range(1, 9)), "do_sample": True},
    "forced": {"forced_eos_token_id": 9, "eos_token_id": 9},
    "bad words": {"bad_words_ids": [[3], [4, 5]]},
    "time": {"max_time": 100.0},
    "chunks of the prompt": {"prefill_chunk_size": 3},
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_same_text(loops, options, rows):
    text, *_ = both(loops, model(), ids(rows), **options)
    assert len(text.unique()) > 3


KINDS = {
    "hybrid": {"mixer": "cosformer*2, softmax+rope"},
    "softmax first": {"mixer": "softmax+rope, cosformer, softmax"},
    "learned positions": {"mixer": "cosformer-paper"},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True, "output_gate": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_text_of_every_kind_and_of_padded_rows(loops, kind, dtype):
    prompt = ids(3, 9)
    keep = torch.ones_like(prompt)
    keep[0, :3], keep[2, :8] = 0, 0
    it = model(**KINDS[kind]).to(dtype)
    both(loops, it, prompt, attention_mask=keep, eos_token_id=[5, 6, 7, 8])


class Listener(BaseStreamer):
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value)  # the tensor itself: it must stay as it was

    def end(self):
        self.heard.append(None)


class Chooses(LogitsProcessor):
    """Keeps what it is given, and changes its scores in place."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        assert input_ids.is_contiguous()
        self.seen += [input_ids, scores.clone()]
        scores[:, 3] += 5.0
        return scores


class Stops(StoppingCriteria):
    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.is_contiguous() and scores is None
        self.seen.append(input_ids)
        return torch.full((len(input_ids),), input_ids.shape[1] >= 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_others_hear_the_same(loops, rows, dtype):
    heard = []
    for turn in range(2):
        if turn:
            assert loops and not loops.calls
            loops.theirs()
        chooses, stops, streamer = Chooses(), Stops(), Listener()
        given = {
            "logits_processor": LogitsProcessorList([chooses]),
            "attention_mask": torch.ones_like(ids(rows)),
        }
        given |= {"stopping_criteria": StoppingCriteriaList([stops])}
        given |= {"streamer": streamer} if rows == 1 else {}
        text = model().to(dtype).generate(ids(rows), **(PLAIN | given))
        heard.append([text, *chooses.seen, *stops.seen, *streamer.heard])
    assert heard[0][0].shape[1] == 20 and len(heard[0]) > 3 * 13
    for mine, yours in zip(*heard, strict=True):
        assert (mine is None) == (yours is None)
        if mine is not None:
            assert torch.equal(mine, yours)  # to the last digit: it is the same kernel


def scaled(it):
    it.model.layers[1].mlp.up_proj.weight.data = it.model.layers[1].mlp.up_proj.weight.data * -2


def head_scaled(it):
    it.lm_head.weight.data = it.lm_head.weight.data.flip(0)


def head_listened_to(it):
    it.lm_head.register_forward_hook(lambda module, args, out: -out)


def norm_changed(it):
    it.model.norm.weight.data = it.model.norm.weight.data.flip(0) * torch.linspace(-1, 1, 32)


def embedding_replaced(it):
    it.model.embed_tokens = torch.nn.Embedding.from_pretrained(it.model.embed_tokens.weight.data.flip(0))


def stack_listened_to(it):
    def negative(module, args, kwargs, out):
        out.last_hidden_state = -out.last_hidden_state
        return out

    it.model.register_forward_hook(negative, with_kwargs=True)


def forward_replaced(it):
    real = it.model.forward

    def other(*args, **kwargs):
        out = real(*args, **kwargs)
        out.last_hidden_state = -out.last_hidden_state
        return out

    it.model.forward = other


def dropping(it):
    it.model.layers[0].mlp.dropout.train()
    it.model.layers[0].mlp.dropout.p = 1.0


CHANGES = (scaled, head_scaled, head_listened_to, norm_changed, embedding_replaced, stack_listened_to)
CHANGES += (forward_replaced, dropping)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_between_tokens_is_seen(loops, change):
    """By whoever is called between two tokens, in the loop and out of it."""
    texts = []
    for kind in ("theirs", "ours", "unchanged"):
        it = model(dropout=0.3)

        class Changes(Listener):
            def put(self, value, it=it, kind=kind):
                super().put(value)
                if len(self.heard) == 6 and kind != "unchanged":
                    change(it)

        with pytest.MonkeyPatch.context() as patch:
            if kind == "theirs":
                patch.setattr(loop.Loop, "of", lambda *args: None)
                patch.setattr(step, "ready_for_ids", lambda *args: None)
            given = PLAIN | {"attention_mask": torch.ones_like(ids())}
            texts.append(it.generate(ids(), streamer=Changes(), **given))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[1], texts[2])


def test_a_cache_that_is_given_goes_on_and_is_given_back(loops):
    it, prompt = model(), ids(2)
    cache = it.new_cache()
    out = it.generate(
        prompt, past_key_values=cache, return_dict_in_generate=True, **PLAIN | {"max_new_tokens": 6}
    )
    assert out.past_key_values is cache and cache.get_seq_length() == 12 == cache.layers[0].kept.position
    apart = copy.deepcopy(cache)
    more = it.generate(out.sequences, past_key_values=cache, **PLAIN)
    assert torch.equal(more, it.generate(prompt, **PLAIN | {"max_new_tokens": 26}))
    assert apart.get_seq_length() == 12 and torch.equal(
        it.generate(out.sequences, past_key_values=apart, **PLAIN), more
    )
    assert len(loops) == 4 and not loops.calls


def test_an_error_in_between_leaves_the_cache_whole(loops):
    it, prompt = model(), ids()
    cache = it.new_cache()

    class Interrupts(Listener):
        def put(self, value):
            super().put(value)
            if len(self.heard) == 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        it.generate(prompt, past_key_values=cache, streamer=(stopped := Interrupts()), **PLAIN)
    text = torch.cat([stopped.heard[0], *(t[None] for t in stopped.heard[1:])], 1)
    assert cache.get_seq_length() == text.shape[1] - 1
    whole = it.generate(text, past_key_values=cache, **PLAIN | {"max_new_tokens": 15})
    assert torch.equal(whole, it.generate(prompt, **PLAIN))


@pytest.mark.parametrize("rows", [1, 2])
def test_long_texts_outgrow_their_room(loops, monkeypatch, rows):
    monkeypatch.setattr(loop, "ROOM", 3)
    both(loops, model(), ids(rows), max_new_tokens=60)


class Own(CosformerForCausalLM):
    def prepare_inputs_for_generation(self, *args, **kwargs):
        return GenerationMixin.prepare_inputs_for_generation(self, *args, **kwargs)


def hooked():
    it = model()
    it.register_forward_hook(lambda *args: None)
    return it


def subclass():
    it = model()
    it.__class__ = Own
    return it


def patched():
    it = model()
    it.prepare_inputs_for_generation = it.prepare_inputs_for_generation
    return it


@pytest.mark.parametrize(
    ("it", "options"),
    [
        (model, {"use_cache": False}),
        (model, {"num_beams": 2}),
        (model, {"prompt_lookup_num_tokens": 2, "eos_token_id": VOCAB}),
        (hooked, {}),
        (subclass, {}),
        (patched, {}),
        (lambda: model().half(), {}),
    ],
    ids=["no cache", "beams", "assisted", "hooked", "subclass", "patched", "half"],
)
def test_what_is_not_plain_is_transformers_own(loops, it, options):
    is_half = next(it().parameters()).dtype == torch.float16
    both(loops, it, ids(), ours=is_half, calls=19 if is_half else 0, **options)


def test_scores_and_embeddings_are_transformers_own(loops):
    it = model()
    out = it.generate(ids(), return_dict_in_generate=True, output_scores=True, output_logits=True, **PLAIN)
    assert len(out.scores) == len(out.logits) == 20 and not loops
    embedded = it.model.embed_tokens(ids()).detach()
    text = it.generate(inputs_embeds=embedded, **PLAIN)
    assert text.shape == (1, 20) and not loops
    assert torch.equal(text[0], out.sequences[0, 7:])


@pytest.mark.parametrize("target", ["q_proj", "lm_head", "embed_tokens"])
def test_adapters_are_called(loops, target):
    peft = pytest.importorskip("peft")

    def adapted():
        it = peft.get_peft_model(model(), peft.LoraConfig(r=2, target_modules=[target]))
        for name, p in it.named_parameters():
            if "lora_" in name:
                torch.manual_seed(len(name))
                p.data.normal_()
        return it.eval()

    prompt, texts = ids(), []
    for turn in range(2):
        if turn:
            loops.theirs(general=True)
        texts.append(adapted().generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **PLAIN))
    assert torch.equal(*texts) and not torch.equal(texts[0], model().generate(prompt, **PLAIN))


@torch.inference_mode()
def test_in_inference_mode(loops):
    both(loops, model(), ids(2), do_sample=True)


def test_learned_positions_end_where_they_end(loops):
    it = model(mixer="cosformer-paper", max_position_embeddings=16)
    given = PLAIN | {"attention_mask": torch.ones_like(ids())}
    assert it.generate(ids(), **given | {"max_new_tokens": 10}).shape[1] == 17
    with pytest.raises(ValueError, match="the text has 17 tokens, 16 of them in the cache, but max_position"):
        it.generate(ids(), **given | {"max_new_tokens": 11})


@pytest.mark.parametrize("rows", [1, 3])
def test_who_is_called_between_two_tokens_may_change_the_text(loops, rows):
    class Editor(LogitsProcessor):
        def __call__(self, text, scores):
            text[:, -1] = (text[:, -1] + 1) % (VOCAB - 1) + 1
            return scores

    both(loops, model(), ids(rows), logits_processor=LogitsProcessorList([Editor()]))


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_who_is_called_between_two_tokens_may_listen_to_the_model(loops, how):
    it = model()

    class Listener(LogitsProcessor):
        count = 0

        def __call__(self, text, scores):
            Listener.count += 1
            if Listener.count % 20 == 3 and how == "hook":
                it.register_forward_hook(lambda module, given, out: (out.logits.neg_(), None)[1])
            elif Listener.count % 20 == 3:
                it.forward = changed
            return scores

    def changed(*args, **kwargs):
        out = type(it).forward(it, *args, **kwargs)
        out.logits = -out.logits
        return out

    def fresh():
        it.__dict__.pop("forward", None)
        it._forward_hooks.clear()
        return it

    both(loops, fresh, ids(), calls=17, logits_processor=LogitsProcessorList([Listener()]))
