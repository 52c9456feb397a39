"""`cosformer generate`: prints what the model generates, and says what is wrong with a directory."""

import math

import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BartConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import cosformer.hf as hf
from cosformer.generate import load, main, tokens_left

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def tokenizer():
    vocab = {c: i + 1 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<pad>": 0}
    bytes_ = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_.pre_tokenizer, bytes_.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bytes_, pad_token="<pad>")


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = hf.CosformerConfig(vocab_size=len(tokenizer), mixer="cosformer-cosine", **SIZES)
    hf.CosformerForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def expected(directory, prompt, *, seed=0, **options):
    model, tokenizer = load(directory)
    torch.manual_seed(seed)  # after loading, which may draw numbers
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_says_what_the_model_generates(directory, capsys):
    main(["--model", str(directory), "--prompt", "abc", "--max-new-tokens", "12"])
    assert capsys.readouterr().out == expected(directory, "abc", max_new_tokens=12, do_sample=False) + "\n"


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_rounded_weights(directory, capsys, weights):
    model, tokenizer = load(directory)
    model = hf.to_int8(model) if weights == "int8" else model.to(torch.bfloat16)
    ids = tokenizer("abc", return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    main(["--model", str(directory), "--prompt", "abc", "--max-new-tokens", "12", "--weights", weights])
    assert capsys.readouterr().out == tokenizer.decode(out[0, 3:], skip_special_tokens=True) + "\n"


def test_int8_is_for_our_decoder(tmp_path, tokenizer, capsys):
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    said = fails(capsys, "--model", str(tmp_path), "--prompt", "x", "--weights", "int8")
    assert "--weights int8: model is a LlamaForCausalLM; to_int8 takes a CosformerForCausalLM" in said


def test_seed_decides_a_sample(directory, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        how = ["--temperature", "2", "--max-new-tokens", "20", "--seed", seed]
        main(["--model", str(directory), "--prompt", "abc", *how])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_encoder_decoder(tmp_path, tokenizer, capsys):
    sizes = {"d_model": 32, "init_std": 0.2, "vocab_size": len(tokenizer), "max_position_embeddings": 64}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_ffn_dim": 48, f"{part}_layers": 1, f"{part}_attention_heads": 4}
    hf.CosformerForConditionalGeneration(hf.CosformerSeq2SeqConfig(**sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    main(["--model", str(tmp_path), "--prompt", "abc", "--max-new-tokens", "5"])
    assert capsys.readouterr().out.endswith("\n")


def test_a_foreign_model_keeps_its_cosformer_options(tmp_path, tokenizer):
    config = LlamaConfig(vocab_size=len(tokenizer), cosformer={"decay": "ladder"}, **SIZES)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load(tmp_path)[0].config._attn_implementation == "cosformer"


def fails(capsys, *argv) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    return str(stop.value) + capsys.readouterr().err


def test_bad_directories_are_named(tmp_path, directory, tokenizer, capsys):
    missing = tmp_path / "nowhere"
    assert f"--model {missing}: there is no such directory" in fails(
        capsys, "--model", str(missing), "--prompt", "x"
    )
    assert "no config in it (config.json)" in fails(capsys, "--model", str(tmp_path), "--prompt", "x")
    (tmp_path / "config.json").write_text('{"model_type": "cosformer"}')
    assert "no weights" in fails(capsys, "--model", str(tmp_path), "--prompt", "x")
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    assert "no tokenizer" in fails(capsys, "--model", str(tmp_path), "--prompt", "x")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    assert "nonesuch" in fails(capsys, "--model", str(tmp_path), "--prompt", "x")
    (tmp_path / "config.json").write_text('{"model_type": "cosformer_encoder", "cosformer_format": 3}')
    assert "a cosformer_encoder model cannot continue a text" in fails(
        capsys, "--model", str(tmp_path), "--prompt", "x"
    )
    (tmp_path / "run" / "checkpoint-20").mkdir(parents=True)
    assert f"its run is not finished; {tmp_path / 'run' / 'checkpoint-20'} is a model" in fails(
        capsys, "--model", str(tmp_path / "run"), "--prompt", "x"
    )


def test_bad_arguments_are_named(directory, capsys):
    there = ("--model", str(directory))
    assert "--prompt is empty" in fails(capsys, *there, "--prompt", "")
    assert "--max-new-tokens is 0; it must be at least 1" in fails(
        capsys, *there, "--prompt", "a", "--max-new-tokens", "0"
    )
    assert "--temperature is -1.0" in fails(capsys, *there, "--prompt", "a", "--temperature", "-1")
    assert "--top-k is -3; it must be at least 1" in fails(capsys, *there, "--prompt", "a", "--top-k", "-3")
    assert "--top-k is 3, but without a --temperature" in fails(
        capsys, *there, "--prompt", "a", "--top-k", "3"
    )


def test_what_the_horizon_leaves_no_room_for_is_refused_before_decoding(directory, capsys):
    there = ("--model", str(directory), "--prompt")
    said = (
        "--max-new-tokens is 7, but after a prompt of 60 tokens this model can write 6: it "
        "reads at most 65 tokens"
    )
    assert said in fails(capsys, *there, "a" * 60, "--max-new-tokens", "7")
    assert "--prompt has 66 tokens, but this model reads at most 65" in fails(capsys, *there, "a" * 66)
    for asked in (("--max-new-tokens", "6"), ()):  # by default, at most what there is room for
        main([*there, "a" * 60, *asked])
        out = capsys.readouterr().out
        assert out == expected(directory, "a" * 60, max_new_tokens=6, do_sample=False) + "\n"
    model, _ = load(directory)
    ids = torch.randint(3, 200, (1, 60))
    with pytest.raises(ValueError, match="66 tokens reach past the horizon of 64"):  # the model itself agrees
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7)


@pytest.mark.parametrize(
    ("config", "left"),
    [
        (hf.CosformerConfig(**SIZES), math.inf),
        (hf.CosformerConfig(**SIZES, mixer="cosformer-cosine"), 56),
        (hf.CosformerConfig(**SIZES, horizon=20), 12),
        (hf.CosformerConfig(**SIZES, positions="learned"), 55),
        (hf.CosformerConfig(**SIZES, mixer="softmax+rope"), math.inf),
        (hf.CosformerConfig(**SIZES, mixer="elu"), 55),
        (hf.CosformerSeq2SeqConfig(max_position_embeddings=64), 64),
        (hf.CosformerSeq2SeqConfig(max_position_embeddings=64, horizon=20), 21),
        (LlamaConfig(**SIZES), math.inf),
        (LlamaConfig(**SIZES, cosformer={}), 55),
        (LlamaConfig(**SIZES, cosformer={"horizon": 20}), 12),
        (BartConfig(max_position_embeddings=64, cosformer={"horizon": 20}), 21),
    ],
    ids=str,
)
def test_room_after_a_prompt_of_ten(config, left):
    assert tokens_left(config, prompt=10) == left
