"""Every kind of task trains, is evaluated and fine-tuned; what a saved model cannot do is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    COPY,
    FEW,
    LISTOPS,
    Signal,
    aan,
    cifar,
    complaint,
    go,
    imdb,
    run_of,
    same,
    steps,
    texts,
    weights,
)
from transformers import TrainerCallback

from cosformer import generate, tasks, train
from cosformer.seal import unseal
from cosformer.tasks import generated
from cosformer.train import cli, models
from cosformer.train.build import build_model

pytestmark = pytest.mark.usefixtures("here")


SETTINGS = {
    "lm": {"length": 32, "data": texts},
    "mlm": {"length": 32, "data": texts, "copies": 1, "tokenizer": "bytes"},
    "classify": {"length": 32, "tokenizer": "bytes"},
    "seq2seq": {"length": 32, "target_length": 12},
    "listops": LISTOPS,
    "pathfinder": {"examples": FEW},
    "recall": {"length": 16, "vocabulary": 64, "examples": FEW},
    "copy": COPY,
    "reverse": {"length": 6, "examples": FEW},
    "text": {"length": 64, "data": imdb},
    "retrieval": {"length": 64, "data": aan},
    "image": {"data": cifar},
}
SHORT = {"max_steps": 2, "eval_steps": 1}


@pytest.mark.parametrize("name", tasks.names())
def test_every_task_trains_and_evaluate_finds_the_same_scores(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(generated, "SIZES", (200, 20, 20))
    settings = dict(SETTINGS[name])
    if "data" in settings:
        settings["data"] = str(settings["data"](tmp_path / "data"))
    result = go(run_of(name, task_settings=settings, training=SHORT, eval_examples=4, test_examples=6))
    assert result["steps"] == 2 and result["metric"] in result["test"], result
    capsys.readouterr()
    cli.evaluate_verb(["run", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found.pop("examples") == result["examples"] == 6
    assert found == pytest.approx(result["test"], rel=1e-5)
    cli.evaluate_verb(["run", "--json", "--split", "validation"])
    found = json.loads(capsys.readouterr().out)
    assert found.pop("examples") and found == pytest.approx(result["validation"], rel=1e-5)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--mixer", "elu"], "unknown argument '--mixer'; see --help"),
        (["--size", "toy"], "unknown argument '--size'; see --help"),
        (["--out", "x"], "unknown argument '--out'; see --help"),
        (["--recipe", "r.toml"], "unknown argument '--recipe'; see --help"),
        (["--learning_rate", "1"], "--learning_rate changes nothing where nothing is trained; see --help"),
        (["--set", "model.decay=gated"], "--set takes task.KEY=VALUE here: model_fields are of training"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else None,
)
def test_evaluate_refuses_what_would_change_nothing(argv, why, whole, capsys):
    assert complaint(capsys, cli.evaluate_verb, str(whole), *argv) == f"cosformer evaluate: {why}\n"


def test_a_saved_model_keeps_its_mixer_and_size(whole, capsys):
    run = cli.merge(*cli.parse(cli.train_parser(), ["copy", "--start", str(whole / "checkpoint-6")]))
    assert (run["mixer"], run["size"], run["out"]) == ("cosformer", "toy", "runs/copy-cosformer")
    other = complaint(capsys, cli.train_verb, "copy", "--start", str(whole), "--mixer", "elu")
    assert f"mixer is 'elu', but {whole} has 'cosformer': leave it" in other
    assert "unknown argument '--size'" in complaint(capsys, cli.finetune_verb, str(whole), "--size", "small")


def test_a_trained_language_model_goes_on_with_a_text(capsys):
    Path("t.txt").write_text("abcdefgh " * 900)
    argv = "lm --data t.txt --tokenizer bytes --length 32 --size toy --out run --max_steps 60 --eval_steps 30"
    cli.train_verb([*argv.split(), "--per_device_train_batch_size", "8", "--learning_rate", "1e-2"])
    assert "the model is in run" in capsys.readouterr().out
    generate.main(["--model", "run", "--prompt", "abcd", "--max-new-tokens", "10"])
    assert capsys.readouterr().out == "efgh abcde\n"


@pytest.fixture
def pretrained(tmp_path):
    settings = SETTINGS["mlm"] | {"data": str(texts(tmp_path / "data"))}
    go(run_of("mlm", out="mlm", task_settings=settings, training=SHORT, eval_examples=4, test_examples=4))
    return "mlm"


def test_finetuning_starts_from_the_saved_body(pretrained, capsys):
    task = tasks.build("classify", **SETTINGS["classify"])
    run = run_of("classify", out="fine", task_settings=SETTINGS["classify"], start=pretrained)
    body, model = weights(pretrained), build_model(run, task, start=pretrained)
    ours = model.state_dict()
    loaded = {name: ours[name] for name in ours if name in body and name.startswith("model.")}
    assert len(loaded) == sum(name.startswith("model.") for name in body) > 20
    assert all(torch.equal(loaded[name], body[name]) for name in loaded)
    assert not same_as_new(loaded, run, task) and model.config.num_labels == 2
    argv = "--length 32 --out fine --max_steps 1 --learning_rate 0 --test-examples 4 --eval-examples 4"
    cli.finetune_verb([pretrained, *argv.split()])
    assert all(torch.equal(weights("fine")[name], body[name]) for name in loaded)
    assert train.Run.load(Path("fine/run.json")).task == "classify"


def same_as_new(loaded, run, task) -> bool:
    fresh = models.build(task, size="toy").state_dict()
    return all(torch.equal(fresh[name], tensor) for name, tensor in loaded.items())


def test_a_start_that_cannot_be_is_refused(pretrained, capsys, monkeypatch):
    monkeypatch.setattr(generated, "SIZES", (200, 20, 20))
    for argv, why in (
        ("classify --length 33", "mlm reads at most 32 tokens; --length 33 is more"),
        ("--length 32 --tokenizer bpe:300", "mlm has a vocabulary of 261, the task one of 300"),
        ("lm --length 32 --data data", "mlm is a cosformer_encoder model; task 'lm' needs a cosformer model"),
    ):
        assert why in complaint(capsys, cli.finetune_verb, pretrained, *argv.split(), "--out", "fine")
    assert not Path("fine/run.json").exists()  # so that the folder is free for a better attempt
    other = complaint(capsys, cli.evaluate_verb, pretrained, "classify", "--length", "32")
    assert "is a CosformerForMaskedLM, which knows nothing of task 'classify' yet" in other
    folder = Path("other")
    shutil.copytree(pretrained, folder)
    text = json.loads((folder / "tokenizer.json").read_text())
    words = text["model"]["vocab"]
    a, b = [word for word in words if words[word] > 100][:2]
    words[a], words[b] = words[b], words[a]
    (folder / "tokenizer.json").write_text(json.dumps(text))
    unseal(folder)
    argv = "--length 32 --tokenizer bytes --out fine2"
    other = complaint(capsys, cli.finetune_verb, str(folder), *argv.split())
    assert "has another vocabulary than the task, of the same size" in other


@pytest.mark.parametrize("stage", ["pretrain", "train"])
def test_pretraining_first_goes_on_at_either_stage(stage):
    run = run_of("listops", task_settings=LISTOPS, pretrain={"max_steps": 4}, test_examples=4)
    go(dataclasses.replace(run, out="whole"))

    class Stop(TrainerCallback):
        def on_step_begin(self, args, *rest, **kwargs):
            if ("pretrain" in args.output_dir) == (stage == "pretrain"):
                Signal(3).on_step_begin(args, *rest, **kwargs)

    with pytest.raises(train.Interrupted):
        go(run, watch=Stop())
    assert Path("run/pretrain/result.json").exists() == (stage == "train")
    result = go(run, resume=True)
    assert same("run", "whole") and same("run/pretrain", "whole/pretrain") and result["steps"] == 6
    assert steps("run/pretrain") == [1, 2, 3, 4] and steps() == [1, 2, 3, 4, 5, 6]
    first = build_model(run, tasks.build("listops", **LISTOPS), start="run/pretrain").state_dict()
    body = weights("run/pretrain")
    assert all(torch.equal(first[name], body[name]) for name in body if name.startswith("model."))


def test_mixers_have_as_many_parameters_as_softmax():
    task = tasks.build("listops", **LISTOPS)
    names = ("softmax", "cosformer-paper", "cosformer")
    softmax, paper, ours = (models.parameters(models.build(task, mixer=m, size="toy")) for m in names)
    assert paper == softmax <= ours <= 1.02 * softmax


def test_masked_loss_is_a_mean_over_all_that_is_hidden(tmp_path):
    """However many of the hidden tokens a batch has."""
    task = tasks.build("mlm", length=32, copies=1, data=texts(tmp_path / "data"))
    model = models.build(task, size="toy", mixer="softmax").eval()
    batches = [task.collate([task.train[i]]) for i in range(3)]
    batches[0]["labels"][:, 8:] = tasks.IGNORE
    whole = {key: torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels")}
    count = (whole["labels"] != tasks.IGNORE).sum()
    one = {key: [batch[key] for batch in batches] for key in ("input_ids", "labels")}
    parts = [model(input_ids=i, labels=y, num_items_in_batch=count) for i, y in zip(*one.values())]
    mean = model(**whole).loss
    torch.testing.assert_close(sum(part.loss for part in parts), mean)
    logits = model(input_ids=whole["input_ids"]).logits
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten())
    torch.testing.assert_close(mean, want)
    mean_of_means = sum(model(input_ids=i, labels=y).loss for i, y in zip(*one.values())) / 3
    assert abs(mean_of_means - mean) > 1e-4
    loss, logits = model(**whole, return_dict=False)[:2]
    assert loss == mean and logits.shape == (3, 32, task.vocab_size)
