"""What a user of transformers expects to just work: compiling, half precision, sharding, LoRA, Trainer."""

import copy

import pytest
import torch
from conftest import VOCAB, byte_tokenizer, token_ids, toy_model

pytest.importorskip("transformers")

import transformers as tf

import cosformer.hf as hf

CAUSAL, MASKED, SEQ2SEQ = (
    hf.CosformerForCausalLM,
    hf.CosformerForMaskedLM,
    hf.CosformerForConditionalGeneration,
)
headed = pytest.mark.parametrize("kind", [CAUSAL, MASKED, SEQ2SEQ], ids=lambda c: c.__name__)
HYBRID = {"mixer": "cosformer, softmax+rope", "output_gate": True}  # layers with every option


def run(model, **kwargs):
    x = token_ids()
    if model.config.is_encoder_decoder:
        kwargs.setdefault("decoder_input_ids", x[:, :9])
    return model(x, **kwargs)[0]


def build(kind):
    hybrid = HYBRID | ({"cross_mixer": "relu"} if kind is SEQ2SEQ else {})
    return toy_model(kind, **hybrid)


def same_gradients(model, other) -> None:
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        if a.grad is None:
            assert b.grad is None, name
        else:
            grad = b.grad.full_tensor() if hasattr(b.grad, "full_tensor") else b.grad
            torch.testing.assert_close(grad, a.grad, atol=1e-5, rtol=1e-3, msg=name)


@headed
def test_gradient_checkpointing_changes_nothing(kind):
    plain, saving = build(kind).train(), build(kind).train()
    saving.gradient_checkpointing_enable()
    for model in (plain, saving):
        run(model).square().mean().backward()
    same_gradients(plain, saving)


@pytest.mark.parametrize(
    "kind",
    [CAUSAL, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (MASKED, SEQ2SEQ))],
    ids=lambda c: c.__name__,
)
def test_compiles_without_breaks(kind):
    torch._dynamo.reset()
    model = build(kind)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    keep = torch.ones_like(token_ids())
    keep[1, :5] = 0
    for given in ({"attention_mask": keep}, {}):
        got, want = run(compiled, use_cache=False, **given), run(model, use_cache=False, **given)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_training_step_is_the_eager_one(compiler):
    torch._dynamo.reset()
    plain, compiled, x = build(CAUSAL), build(CAUSAL), token_ids()
    step = torch.compile(compiled, backend=compiler, fullgraph=True)
    plain(x, labels=x, use_cache=False).loss.backward()
    step(x, labels=x, use_cache=False).loss.backward()
    same_gradients(plain, compiled)


@headed
def test_bfloat16(kind, tmp_path):
    model = build(kind)
    model.save_pretrained(tmp_path)
    half = kind.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    out, want = run(half), run(model)
    assert out.dtype == torch.bfloat16
    assert (out.float() - want).abs().mean() / want.abs().mean() < 0.1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(model.train())
        inside.float().square().mean().backward()
    assert (inside.float() - want).abs().mean() / want.abs().mean() < 0.1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_half_precision_generates_from_a_state():
    model, x = build(CAUSAL).bfloat16(), token_ids()
    whole = model(x, use_cache=False).logits.float()
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            cache, steps = model.new_cache(), []
            for token in x.split(1, 1):
                steps.append(model(token, past_key_values=cache, use_cache=True).logits)
        assert (torch.cat(steps, 1).float() - whole).abs().mean() / whole.abs().mean() < 0.05


@headed
def test_tied_weights_and_resized_embeddings(kind, tmp_path):
    model = toy_model(kind, tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.resize_token_embeddings(VOCAB + 6)
    assert run(model).shape[-1] == VOCAB + 6
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(run(loaded), run(model))


@pytest.mark.slow
@headed
def test_blocks_can_be_sharded(kind, tmp_path):
    """FSDP2 over one process: each block wrapped on its own, then the whole."""
    from torch.distributed.fsdp import fully_shard

    rendezvous = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    try:
        plain, sharded = build(kind).train(), build(kind).train()
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        blocks = ("LlamaDecoderLayer", "BartEncoderLayer", "BartDecoderLayer")
        for module in list(sharded.modules()):
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for model in (plain, sharded):
            run(model).square().mean().backward()
        same_gradients(plain, sharded)
    finally:
        torch.distributed.destroy_process_group()


def test_lora_trains_the_projections():
    peft = pytest.importorskip("peft")
    model = toy_model(CAUSAL)
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
    )
    adapted, x = peft.get_peft_model(copy.deepcopy(model), lora), token_ids()
    assert torch.equal(adapted(x).logits, model(x).logits)  # B starts at zero
    adapted(x, labels=x).loss.backward()
    grads = {n for n, p in adapted.named_parameters() if p.grad is not None and p.grad.any()}
    assert len(grads) == 2 * 4 and all("lora_B" in n for n in grads)
    generated = adapted.generate(input_ids=x, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert generated.shape == (2, x.shape[1] + 4)


@pytest.mark.parametrize("kind", [CAUSAL, MASKED, hf.CosformerForConditionalGeneration])
def test_lora_knows_what_to_adapt(kind):
    """Without target_modules, as for Llama."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(toy_model(kind), peft.LoraConfig(r=2))
    assert adapted.peft_config["default"].target_modules == {"q_proj", "v_proj"}
    names = {
        name.split(".lora_A")[0].rsplit(".")[-1]
        for name, p in adapted.named_parameters()
        if p.requires_grad and "lora_A" in name
    }
    assert names == {"q_proj", "v_proj"}


def test_pipelines(tmp_path):
    tokenizer = byte_tokenizer()
    for kind in (CAUSAL, MASKED, hf.CosformerForSequenceClassification):
        toy_model(kind, vocab_size=len(tokenizer)).save_pretrained(tmp_path / kind.__name__)
        tokenizer.save_pretrained(tmp_path / kind.__name__)
    generate = tf.pipeline("text-generation", str(tmp_path / CAUSAL.__name__), device="cpu")
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    texts = generate(["hello", "hi there"], batch_size=2, **options)
    alone = generate("hello", **options)
    assert texts[0] == alone and alone[0]["generated_text"].startswith("hello")
    fill = tf.pipeline("fill-mask", str(tmp_path / MASKED.__name__), device="cpu")
    assert len(fill("a<mask>c", top_k=3)) == 3
    name = hf.CosformerForSequenceClassification.__name__
    classify = tf.pipeline("text-classification", str(tmp_path / name), device="cpu")
    assert classify("good")[0]["label"] in ("LABEL_0", "LABEL_1")


def test_trainer_trains(tmp_path):
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model, x = CAUSAL(toy_model(CAUSAL, **HYBRID).config), token_ids(8)
    before = model(x, labels=x).loss.item()
    arguments = tf.TrainingArguments(
        str(tmp_path), max_steps=12, learning_rate=1e-2, gradient_accumulation_steps=2,
        gradient_checkpointing=True, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    tf.Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in x]).train()
    assert model.eval()(x, labels=x).loss.item() < before - 0.5
