"""The Cosformer model types: what they compute, how they are saved, and what a user expects to just work."""

import copy
import json
import math
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

import transformers as tf

import cosformer.hf as hf
from cosformer import reference
from cosformer.decay import DecayGate, ladder
from cosformer.hf import cache, mixing, seq2seq

VOCAB, LENGTH = 61, 17
MIXED = ["linear_attention", "full_attention"]
NARROW = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
NARROW |= {"max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0}
BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "init_std": 0.2,
}
BART |= {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
}
DECODER = (hf.CosformerConfig, NARROW | {"num_key_value_heads": 2})
ENCODER = (hf.CosformerEncoderConfig, NARROW | {"hidden_dropout_prob": 0.0})
SEQ2SEQ = (hf.CosformerSeq2SeqConfig, BART)
MODELS = {
    hf.CosformerModel: (tf.AutoModel, DECODER),
    hf.CosformerForCausalLM: (tf.AutoModelForCausalLM, DECODER),
    hf.CosformerEncoderModel: (tf.AutoModel, ENCODER),
    hf.CosformerForMaskedLM: (tf.AutoModelForMaskedLM, ENCODER),
    hf.CosformerForSequenceClassification: (tf.AutoModelForSequenceClassification, ENCODER),
    hf.CosformerForTokenClassification: (tf.AutoModelForTokenClassification, ENCODER),
    hf.CosformerSeq2SeqModel: (tf.AutoModel, SEQ2SEQ),
    hf.CosformerForConditionalGeneration: (tf.AutoModelForSeq2SeqLM, SEQ2SEQ),
}
HEADED = [hf.CosformerForCausalLM, hf.CosformerForMaskedLM, hf.CosformerForConditionalGeneration]
every_model = pytest.mark.parametrize("kind", MODELS, ids=lambda c: c.__name__)
headed = pytest.mark.parametrize("kind", HEADED, ids=lambda c: c.__name__)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Toy tensors: a second thread costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(kind, seed: int = 0, **fields):
    torch.manual_seed(seed)
    auto, (config, sizes) = MODELS[kind]
    model = auto.from_config(config(**(sizes | fields)))
    for p in model.parameters():  # gates and biases away from zero, so that none hides a mistake
        p.data += 0.1 * torch.randn_like(p)
    return model.eval()


def ids(rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def run(model, x=None, **kwargs):
    x = ids() if x is None else x
    if model.config.is_encoder_decoder:
        kwargs.setdefault("decoder_input_ids", x[:, :9])
    return model(x, **kwargs)[0]


# What is computed.


def test_ladder_and_gate_are_the_formula():
    rates = ladder(5, 4096)
    torch.testing.assert_close(rates[[0, -1]], torch.tensor([1 / 4, 1 / 4096]))
    torch.testing.assert_close(rates[1:] / rates[:-1], (rates[1] / rates[0]).expand(4))
    assert ladder(1, 4096).tolist() == [0.25]
    gate, x = DecayGate(8, 5, max_positions=4096), torch.randn(2, 7, 8)
    torch.testing.assert_close(gate(x), rates[None, :, None].expand(2, 5, 7))
    gate.weight.data.normal_()
    gate.bias.data.normal_()
    want = torch.stack([rates[h] * torch.exp(x @ gate.weight[h] + gate.bias[h]) for h in range(5)], 1)
    torch.testing.assert_close(gate(x), want)
    assert gate(1000 * x).isfinite().all()


@headed
def test_a_new_model_starts_at_the_ladder(kind):
    auto, (config, sizes) = MODELS[kind]
    torch.manual_seed(0)
    model, x = auto.from_config(config(**sizes)).eval(), ids()
    gates = [m for m in model.modules() if isinstance(m, DecayGate)]
    assert len(gates) == (4 if model.config.is_encoder_decoder else 2)
    assert not any(p.any() for gate in gates for p in gate.parameters())
    gated = run(model)
    model_ladder = auto.from_config(config(**sizes, decay="ladder")).eval()
    model_ladder.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(gated, run(model_ladder, x))
    paper = auto.from_config(config(**sizes, decay=None)).eval()
    paper.load_state_dict(model.state_dict(), strict=False)
    assert (run(paper) - gated).abs().max() > 1e-3


@headed
@pytest.mark.parametrize(
    "fields", [{}, {"decay": "ladder", "horizon": 40}, {"decay": None}, {"horizon": math.inf}], ids=str
)
def test_logits_are_the_definitions(kind, fields, monkeypatch):
    model = build(kind, **fields).double()
    ours = run(model, use_cache=False)

    def quadratic(q, k, v, *, cu_seqlens=None, relu=True, **options):
        assert cu_seqlens is None and relu
        return reference.attention(q, k, v, **options)

    monkeypatch.setattr(mixing, "cosformer_attention", quadratic)
    monkeypatch.setattr(seq2seq, "linear_attention", quadratic)
    close = (
        1e-5 if fields.get("decay") == "ladder" else 1e-9
    )  # the definition multiplies constant rates in float32
    torch.testing.assert_close(run(model, use_cache=False), ours, atol=close, rtol=close)
    monkeypatch.setattr(mixing, "cosformer_attention", lambda q, k, v, **_: q * 0)
    assert (run(model, use_cache=False) - ours).abs().max() > 1e-3


def test_horizon_is_the_configured_one(monkeypatch):
    seen = []
    spy = mixing.cosformer_attention
    monkeypatch.setattr(
        mixing, "cosformer_attention", lambda *a, **k: seen.append(k["horizon"]) or spy(*a, **k)
    )
    run(build(hf.CosformerForCausalLM), use_cache=False)
    run(build(hf.CosformerForCausalLM, horizon=50), use_cache=False)
    assert seen == [128, 128, 50, 50]


@headed
def test_padded_equals_alone(kind):
    for fields in ({}, {"layer_types": MIXED}):
        model, x = build(kind, **fields).double(), ids()
        keep = torch.ones_like(x)
        if kind is hf.CosformerForCausalLM:
            keep[1, :5] = 0
            positions = (keep.cumsum(-1) - 1).clamp_min(0)
            padded, alone = (
                run(model, x, attention_mask=keep, position_ids=positions)[1, 5:],
                run(model, x[1:, 5:])[0],
            )
        else:
            keep[1, 12:] = 0
            target = {"decoder_input_ids": x[1:, :9]} if model.config.is_encoder_decoder else {}
            padded, alone = run(model, x, attention_mask=keep)[1], run(model, x[1:, :12], **target)[0]
            padded = padded if model.config.is_encoder_decoder else padded[:12]
        torch.testing.assert_close(padded, alone, atol=1e-6, rtol=1e-6)  # rates are float32


@pytest.mark.parametrize("fields", [{}, {"layer_types": MIXED}], ids=["linear", "hybrid"])
def test_packed_sequences_do_not_meet(fields):
    model, x = build(hf.CosformerForCausalLM, **fields).double(), ids(1, 20)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    packed = model(x, position_ids=positions, use_cache=False).logits
    parts = [model(part, use_cache=False).logits for part in x.split((8, 12), 1)]
    torch.testing.assert_close(packed, torch.cat(parts, 1), atol=1e-6, rtol=1e-6)
    if not fields:
        cu = torch.tensor([0, 8, 20], dtype=torch.int32)
        torch.testing.assert_close(model(x, cu_seq_lens_q=cu, use_cache=False).logits, packed)
    several = model(
        x.expand(2, -1), position_ids=positions.expand(2, -1)
    ).logits  # the default cache gives way
    torch.testing.assert_close(several, packed.expand(2, -1, -1), atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="use_cache=True with packed sequences"):
        model(x, position_ids=positions, use_cache=True)


@every_model
def test_gradients_reach_every_parameter(kind):
    model = build(kind, layer_types=MIXED).train()
    run(model).square().mean().backward()
    assert not [
        n for n, p in model.named_parameters() if (p.grad is None or not p.grad.any()) and "pooler" not in n
    ]


# Saving and loading.


@every_model
def test_save_and_load_are_identity(kind, tmp_path):
    model = build(kind, decay="gated", horizon=100, layer_types=MIXED)
    model.save_pretrained(tmp_path)
    assert [f.suffix for f in tmp_path.iterdir() if f.name.startswith("model")] == [".safetensors"]
    loaded, info = MODELS[kind][0].from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is kind and not any(info.values())
    assert (loaded.config.horizon, loaded.config.decay, loaded.config.layer_types) == (100, "gated", MIXED)
    for (name, a), b in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(run(model), run(loaded))


def test_an_infinite_horizon_is_saved(tmp_path):
    build(hf.CosformerForCausalLM, horizon=math.inf).save_pretrained(tmp_path)
    assert hf.CosformerForCausalLM.from_pretrained(tmp_path).config.horizon == math.inf


def test_without_the_package_a_saved_model_does_not_load(tmp_path):
    build(hf.CosformerForCausalLM).save_pretrained(tmp_path)
    code = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "`cosformer`" in done.stderr.splitlines()[-1] + done.stderr


@pytest.mark.parametrize(
    "kind", [hf.CosformerForCausalLM, hf.CosformerForMaskedLM, hf.CosformerForConditionalGeneration]
)
def test_tied_weights_and_resized_embeddings(kind, tmp_path):
    model = build(kind, tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.resize_token_embeddings(VOCAB + 6)
    assert run(model).shape[-1] == VOCAB + 6
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(run(loaded), run(model))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decay": "fast"}, "decay is 'fast'; one of 'gated', 'ladder', None"),
        ({"horizon": 0}, "horizon is 0; it must be greater than 0"),
        ({"layer_types": ["linear_attention"]}, "for each of the 2 layers"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types must have one of"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; linear layers have no attention weights"),
    ],
)
def test_bad_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        hf.CosformerConfig(**NARROW, **fields)


# What a user expects to just work.


@headed
def test_gradient_checkpointing_changes_nothing(kind):
    plain, saving = build(kind).train(), build(kind).train()
    saving.gradient_checkpointing_enable()
    for model in (plain, saving):
        run(model).square().mean().backward()
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    "kind",
    [HEADED[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in HEADED[1:])],
    ids=lambda c: c.__name__,
)
def test_compiles_without_breaks(kind):
    model = build(kind)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    keep = torch.ones_like(ids())
    torch.testing.assert_close(
        run(compiled, attention_mask=keep, use_cache=False), run(model, use_cache=False), atol=1e-5, rtol=1e-4
    )


@headed
def test_bfloat16(kind, tmp_path):
    model = build(kind)
    model.save_pretrained(tmp_path)
    half = kind.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    out = run(half)
    assert out.dtype == torch.bfloat16
    error = (out.float() - run(model)).abs().mean() / run(model).abs().mean()
    assert error < 0.1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(model.train()).float().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.slow
def test_compiled_training_step_is_the_eager_one():
    plain, compiled, x = build(hf.CosformerForCausalLM), build(hf.CosformerForCausalLM), ids()
    step = torch.compile(compiled)
    plain(x, labels=x, use_cache=False).loss.backward()
    step(x, labels=x, use_cache=False).loss.backward()
    for (name, a), b in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.slow
@headed
def test_blocks_can_be_sharded(kind, tmp_path):
    """FSDP2 over one process: each block wrapped on its own, then the whole; the gradients are the plain
    ones.
    """
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        plain, sharded = build(kind).train(), build(kind).train()
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for module in list(sharded.modules()):
            if type(module).__name__ in (
                "LlamaDecoderLayer",
                "BertLayer",
                "BartEncoderLayer",
                "BartDecoderLayer",
            ):
                fully_shard(module, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for model in (plain, sharded):
            run(model).square().mean().backward()
        for (name, a), b in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            if a.grad is not None:
                torch.testing.assert_close(b.grad.full_tensor(), a.grad, atol=1e-6, rtol=1e-4, msg=name)
    finally:
        torch.distributed.destroy_process_group()


def test_logits_to_keep_and_loss_count():
    model, x = build(hf.CosformerForCausalLM), ids()
    torch.testing.assert_close(model(x, logits_to_keep=1).logits, model(x).logits[:, -1:])
    mean = model(x, labels=x).loss
    counted = model(x, labels=x, num_items_in_batch=torch.tensor(64)).loss
    torch.testing.assert_close(counted, mean * 2 * (LENGTH - 1) / 64)


def test_lora_trains_the_projections():
    peft = pytest.importorskip("peft")
    model, before = build(hf.CosformerForCausalLM), run(build(hf.CosformerForCausalLM))
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), lora)
    assert torch.equal(adapted(ids()).logits, before)  # B starts at zero
    adapted(ids(), labels=ids()).loss.backward()
    grads = {n for n, p in adapted.named_parameters() if p.grad is not None and p.grad.any()}
    assert len(grads) == 2 * 4 and all("lora_B" in n for n in grads)
    generated = adapted.generate(input_ids=ids(), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert generated.shape == (2, LENGTH + 4)


def byte_tokenizer() -> "tf.PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {c: i + 3 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {
        "<pad>": 0,
        "<mask>": 1,
        "<unk>": 2,
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", mask_token="<mask>", unk_token="<unk>"
    )


def test_pipelines(tmp_path):
    tokenizer = byte_tokenizer()
    for kind in (hf.CosformerForCausalLM, hf.CosformerForMaskedLM, hf.CosformerForSequenceClassification):
        build(kind, vocab_size=len(tokenizer)).save_pretrained(tmp_path / kind.__name__)
        tokenizer.save_pretrained(tmp_path / kind.__name__)
    generate = tf.pipeline("text-generation", str(tmp_path / "CosformerForCausalLM"), device="cpu")
    texts = generate(
        ["hello", "hi there"], max_new_tokens=5, do_sample=False, batch_size=2, eos_token_id=None
    )
    alone = generate("hello", max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert texts[0] == alone and alone[0]["generated_text"].startswith("hello")
    fill = tf.pipeline("fill-mask", str(tmp_path / "CosformerForMaskedLM"), device="cpu")
    assert len(fill("a<mask>c", top_k=3)) == 3
    classify = tf.pipeline(
        "text-classification", str(tmp_path / "CosformerForSequenceClassification"), device="cpu"
    )
    assert classify("good")[0]["label"] in ("LABEL_0", "LABEL_1")


def test_trainer_trains(tmp_path):
    pytest.importorskip("accelerate")
    model, x = build(hf.CosformerForCausalLM, initializer_range=0.02), ids(8)
    data = [{"input_ids": row, "labels": row} for row in x]
    before = model(x, labels=x).loss.item()
    arguments = tf.TrainingArguments(
        str(tmp_path),
        max_steps=12,
        learning_rate=1e-2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    tf.Trainer(model, arguments, train_dataset=data).train()
    assert model.eval()(x, labels=x).loss.item() < before - 0.5


def test_config_json_is_plain(tmp_path):
    hf.CosformerConfig(**NARROW).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["model_type"], saved["decay"], saved["horizon"]) == ("cosformer", "gated", None)


def test_a_state_cache_refuses_keys_and_values():
    with pytest.raises(TypeError, match="holds a state"):
        cache.StateLayer().update(None, None)
