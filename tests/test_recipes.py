"""Every recipe is sound: the paper's by their shapes at full size, the laptop's by a dry run as toys."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from transformers import Seq2SeqTrainingArguments

from cosformer import tasks
from cosformer.train import Run, SettingsError, dryrun
from cosformer.train.cli import parse, train_parser, train_verb
from cosformer.train.settings import DEFAULTS, read_recipe

ROOT = Path(__file__).parents[1]
PAPER, LAPTOP = (sorted((ROOT / "recipes" / folder).glob("*.toml")) for folder in ("paper", "laptop"))
name = lambda path: f"{path.parent.name}/{path.stem}"
TOY = ["--size", "toy", "--length", "32", "--set", "task.tokenizer=bytes"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder without the data that recipes name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COSFORMER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("path", [*PAPER, *LAPTOP], ids=name)
def test_settings_are_accepted(path):
    run = Run(**read_recipe(path))
    for table in (run.training, run.training | (run.pretrain or {})):
        Seq2SeqTrainingArguments(output_dir="out", **(DEFAULTS | table), use_cpu=True)
    assert run.out == f"runs/{name(path)}" and run.about


@pytest.mark.parametrize("path", [*PAPER, *LAPTOP], ids=name)
def test_says_what_it_is(path):
    text = path.read_text()
    assert f"--recipe recipes/{name(path)}.toml" in text, "its command"
    if path in PAPER:
        assert "Not run here at this scale" in text and "# Wants:" in text and "# Data:" in text
        # A number's source is beside it, or above.
        for line in re.findall(r"^\w+ = [\d.e_-]+$", text, re.M):
            assert line.split()[0] in BELOW, f"{line}: where is it from?"


BELOW = {
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "eval_steps",
    "dropout",
    "holdout",
    "learning_rate",
    "max_grad_norm",
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "save_steps",
    "warmup_steps",
    "weight_decay",
}


def test_every_paper_recipe_has_a_laptop_twin():
    assert {path.name.replace("-45m", "") for path in PAPER} == {path.name for path in LAPTOP}


SIZES = {"wikitext-lm-45m": 44.65e6, "wikitext-mlm": 125e6, "lra-listops": 9.37e6}


@pytest.mark.parametrize("path", PAPER, ids=name)
def test_paper_recipe_fits_together_at_full_size(path, capsys):
    dryrun.dry_run(Run(**read_recipe(path)), real=False)
    said = capsys.readouterr().out
    assert "every shape" in said and said.endswith("sound\n")
    count = int(re.search(r": ([\d,]+) parameters", said).group(1).replace(",", ""))
    assert count == pytest.approx(SIZES.get(path.stem, count), rel=0.02)


@pytest.mark.parametrize("path", LAPTOP, ids=name)
def test_laptop_recipe_trains(path, capsys):
    run = read_recipe(path)
    toy = TOY if "length" in tasks.settings(run["task"]) else TOY[:2]
    toy = toy if "tokenizer" in tasks.settings(run["task"]) else toy[:4]
    if run["task"] == "listops":
        toy = TOY[:2]  # its trees are short
    data = {"lm": "here.txt", "mlm": "here.txt"}.get(run["task"])
    if data:
        Path(data).write_text("A line of text, and another.\n" * 400)
        toy = [*toy, "--data", data]
    train_verb(["--recipe", str(path), "--dry-run", *toy])
    said = capsys.readouterr().out
    assert "2 real steps" in said and said.endswith("sound\n")


def test_a_recipe_that_is_not_sound_is_found():
    lm = read_recipe(ROOT / "recipes/laptop/wikitext-lm.toml")
    lm["task_settings"]["data"] = "nowhere"
    for change in (
        {"model_fields": {"num_key_value_heads": 3}},
        {"model_fields": {"mixer_options": {"decay": "wrong"}}},
        {"start": None, "size": "published"},
    ):
        with pytest.raises(SettingsError, match="not sound"):
            dryrun.dry_run(Run(**(lm | change)), real=False)


def test_an_encoder_decoder_has_a_dry_run(capsys):
    train_verb(["seq2seq", "--dry-run", "--size", "toy"])
    said = capsys.readouterr().out
    assert "every shape of a batch" in said and "2 real steps" in said and said.endswith("sound\n")


@pytest.mark.parametrize("order", [0, 1])
def test_a_value_of_transformers_arguments_is_not_the_task(order):
    words = [["--recipe", "r.toml"], ["--max_steps", "3", "--fsdp"]]
    given, training = parse(train_parser(), [*words[order], *words[1 - order]])
    assert vars(given).keys() == {"recipe"} and training == {"max_steps": 3, "fsdp": True}
    given, training = parse(train_parser(), ["lm", "--eval-examples", "3", "--max_steps", "3"])
    assert given.task == "lm" and given.eval_examples == 3 and training == {"max_steps": 3}


def test_too_large_a_model_has_its_shapes_checked(monkeypatch, capsys):
    monkeypatch.setattr(dryrun.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2**20})())
    dryrun.dry_run(Run(**read_recipe(ROOT / "recipes/paper/lra-image.toml")))
    said = capsys.readouterr().out
    assert "left out on this machine" in said and "real steps" not in said


@pytest.mark.slow
def test_paper_recipe_trains(capsys):
    train_verb(["--recipe", str(ROOT / "recipes/paper/wikitext-lm-45m.toml"), "--dry-run"])
    assert "2 real steps" in capsys.readouterr().out
