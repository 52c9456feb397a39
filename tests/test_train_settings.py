"""The settings of a run, from recipes and the command line: which one wins, and what is refused."""

import re
from pathlib import Path

import pytest
from conftest import complaint

from cosformer import train
from cosformer.train import cli
from cosformer.train.settings import read_recipe

pytestmark = pytest.mark.usefixtures("here")


def merged(*argv: str):
    return cli.merge(*cli.parse(cli.train_parser(), list(argv)))


def test_the_command_line_wins_over_a_recipe():
    Path("r.toml").write_text(
        'mixer = "softmax"\nsize = "small"\n[task]\nname = "listops"\nlength = 64\ndepth = '
        "4\n[train]\nmax_steps = 7\nseed = 2\n"
        "[model]\ndropout = 0.1\n[pretrain]\nmax_steps = 3\n"
    )
    recipe = merged("--recipe", "r.toml")
    assert recipe["task"] == "listops" and recipe["task_settings"] == {"length": 64, "depth": 4}
    assert recipe["training"] == {"max_steps": 7, "seed": 2} and recipe["pretrain"] == {"max_steps": 3}
    assert recipe["out"] == "runs/listops-softmax"
    argv = "--recipe r.toml --mixer elu --length 32 --max_steps 9 --learning-rate 1e-2 --out x"
    places = ("task.depth=3", "model.pooling=mean", "pretrain.seed=5", "train.bf16=false")
    said = merged(*argv.split(), *(word for place in places for word in ("--set", place)))
    assert (said["mixer"], said["size"], said["out"]) == ("elu", "small", "x")
    assert said["task_settings"] == {"length": 32, "depth": 3}
    assert said["pretrain"] == {"max_steps": 3, "seed": 5}
    assert said["training"] == {"max_steps": 9, "seed": 2, "learning_rate": 0.01, "bf16": False}
    assert said["model_fields"] == {"dropout": 0.1, "pooling": "mean"}
    assert merged("copy", "--recipe", "r.toml")["task"] == "copy"
    sampled = merged("--recipe", "r.toml", "--loss", "one-vs-each", "--loss-samples", "99")
    assert sampled["model_fields"] == {"dropout": 0.1, "loss": "one-vs-each", "loss_samples": 99}
    run = train.Run(**merged("--recipe", "r.toml"))
    run.save(Path("run.json"))
    assert train.Run.load(Path("run.json")) == run


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "no task: name one, or give a --recipe that does"),
        (["nothing"], "unknown task 'nothing'; one of lm, mlm"),
        (["copy", "--max_stepz", "3"], "unknown argument '--max_stepz'"),
        (["copy", "extra"], "unknown argument 'extra'"),
        (["copy", "--max_steps", "many"], "argument --max_steps/--max-steps: invalid int value: 'many'"),
        (["copy", "--max_steps", "0"], "max_steps is 0; it must be at least 1"),
        (["copy", "--output_dir", "x"], "output_dir is the run's --out"),
        (["copy", "--mixer", "nobody"], "unknown mixer 'nobody'; one of bigbird"),
        (["copy", "--size", "huge"], "size is 'huge'; one of toy"),
        (
            ["copy", "--loss", "hinge"],
            "loss is 'hinge' over 256 samples; one of 'softmax', 'chunked', 'one-vs-each'",
        ),
        (["reverse", "--loss", "one-vs-each"], "no field 'loss'; see CosformerSeq2SeqConfig"),
        (
            ["lm", "--loss", "one-vs-each", "--label_smoothing_factor", "0.1"],
            "--label_smoothing_factor 0.1 goes with --loss softmax; the loss is 'one-vs-each'",
        ),
        (["copy", "--size", "published"], "size is 'published'; task 'copy' takes one of toy"),
        (["copy", "--data", "x"], "task 'copy' has no setting 'data'; it takes length"),
        (["copy", "--set", "copy"], "--set copy: it takes task.KEY=VALUE or model.KEY=VALUE"),
        (["copy", "--set", "task.length=7"], "task 'copy': length must be even and at least 4; got 7"),
        (["copy", "--set", "task.length=many"], "task 'copy': "),
        (["copy", "--set", "train.max_steps=many"], "max_steps is 'many'; it must be int"),
        (["copy", "--set", "model.hiden_size=8"], "model 'cosformer': no field 'hiden_size'"),
        (["copy", "--set", "model.mixer_options={decay='often'}"], "model 'cosformer': decay must be None"),
        (["copy", "--eval_strategy", "sometimes"], "eval_strategy: invalid choice: 'sometimes'|sometimes"),
        (
            ["copy", "--load_best_model_at_end", "--save_strategy", "no"],
            "training arguments: .*load_best_model_at_end",
        ),
        (["copy", "--optim", "gradient_ascent"], "gradient_ascent"),
        (["copy", "--eval-examples", "0"], "eval_examples is 0; it must be at least 1"),
        (["lm", "--data", "missing.txt"], "missing.txt"),
        (["text"], "task 'text' needs --data: it cannot be generated"),
        (
            ["copy", "--pretrain-first", "--set", "task.examples=[8,4,4]"],
            "pretrain: self-pretraining takes a classification task",
        ),
        (["copy", "--start", "nowhere"], "nowhere holds no model"),
        (["copy", "--recipe", "missing.toml"], "recipe missing.toml: there is no such file"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, list) else None,
)
def test_what_cannot_be_ends_in_one_line(argv, why, capsys):
    found = complaint(capsys, cli.train_verb, *argv, "--out", "run")
    assert found.startswith("cosformer train: ") and re.search(why, found), found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[trian]\nx = 1", "unknown 'trian'; it may have about, mixer"),
        ("mixr = 'x'", "unknown 'mixr'"),
        ("task = 'lm'", "unknown 'task'; it may have"),
        ("[task]\nname = 'copy'\n[train]\nmax_step = 1", "'max_step' is no argument of transformers'"),
        (
            "[task]\nname = 'copy'\n[train]\nlearning_rate = '1e-3'",
            "learning_rate is '1e-3'; it must be float",
        ),
        ("[task]\nname = 'copy'\n[train]\nmax_steps = 2.5", "max_steps is 2.5; it must be int"),
        ("mixer = 3\n[task]\nname = 'copy'", "mixer is 3; it must be str"),
        ("[task]\nname = 'copy'\nlenght = 3", "task 'copy' has no setting 'lenght'"),
        ("[task]\nname = 'copy'\n[train]\nlearning_rate = -1", "learning_rate is -1; it must be at least 0"),
        ("[task]\nname = 'copy'\n[train]\nadam_beta1 = 1", "adam_beta1 is 1; it must be at least 0 and less"),
        (
            "[task]\nname = 'copy'\n[pretrain]\nper_device_train_batch_size = 0",
            "per_device_train_batch_size is 0; it must be at least 1",
        ),
        ("[task", "recipe r.toml: "),
    ],
)
def test_a_recipe_with_mistakes_is_refused(text, said):
    Path("r.toml").write_text(text)
    with pytest.raises(train.SettingsError, match=said.replace("[", r"\[")):
        train.Run(**{"out": "x", **read_recipe(Path("r.toml"))})
