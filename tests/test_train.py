"""cosformer train, evaluate and finetune: what a run leaves behind, how it stops and goes on, and what is
refused.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import COPY, FEW, Signal, aan, checkpoints, cifar, go, imdb, run_of, same, steps, texts, weights
from transformers import TrainerCallback, TrainerState, pipeline
from transformers.utils import logging

from cosformer import generate, tasks, train
from cosformer.seal import SEAL, unseal
from cosformer.tasks import generated
from cosformer.train import build, cli, models, progress
from cosformer.train import run as run_module
from cosformer.train.build import build_model, build_task, build_trainer
from cosformer.train.progress import Interrupt, read
from cosformer.train.settings import read_recipe
from cosformer.train.sharded import Sharded
from cosformer.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("here")
LISTOPS = {"length": 32, "least": 4, "depth": 3, "args": 3, "examples": FEW}


# What a run leaves behind


def test_a_run_leaves_everything_behind():
    result = go()
    assert steps() == [1, 2, 3, 4, 5, 6] and steps(key="eval_accuracy") == [2, 4, 6]
    scored = [row for row in read(Path("run/metrics.jsonl")) if "eval_accuracy" in row]
    best = max((row["eval_accuracy"], -row["eval_loss"], row["step"]) for row in scored)
    assert (result["validation"]["accuracy"], result["best_step"]) == (best[0], best[2])
    assert checkpoints() == sorted({f"checkpoint-{result['best_step']}", "checkpoint-6"} | set(checkpoints()))
    assert len(checkpoints()) == 2
    assert same("run", f"run/checkpoint-{result['best_step']}")
    assert json.loads(Path("run/result.json").read_text()) == result
    assert train.Run.load(Path("run/run.json")).plain() == run_of().plain()
    resolved = json.loads(Path("run/resolved.json").read_text())
    assert resolved["training"]["optim"] == "adamw_torch_fused" and resolved["training"]["adam_beta2"] == 0.98
    assert resolved["versions"]["torch"] == torch.__version__ and resolved["model"]["hidden_size"] == 64
    assert resolved["task"]["length"] == 8 and resolved["batch"] == 4 and resolved["processes"] == 1
    assert (result["steps"], result["tokens"]) == (6, 6 * 4 * 8)


def test_the_best_stays_although_later_ones_are_worse(monkeypatch):
    scores = iter([0.2, 0.9, 0.3, 0.4, 0.5, 0.6, 0.0, 0.0])
    built = tasks.build

    def scored(name, **settings):
        return dataclasses.replace(
            built(name, **settings), compute_metrics=lambda _: {"accuracy": next(scores)}
        )

    monkeypatch.setattr(tasks, "build", scored)
    result = go(run_of(training={"eval_steps": 1, "save_steps": 3}))  # the best is no multiple of save_steps
    assert (
        result["best_step"] == 2
        and checkpoints() == ["checkpoint-2", "checkpoint-6"]
        and same("run", "run/checkpoint-2")
    )


def test_of_equals_the_one_with_the_lowest_loss_is_the_best(monkeypatch):
    built = tasks.build

    def scored(name, **settings):
        return dataclasses.replace(built(name, **settings), compute_metrics=lambda _: {"accuracy": 0.5})

    monkeypatch.setattr(tasks, "build", scored)
    result = go(run_of(training={"eval_steps": 1, "learning_rate": 1e-5}))
    losses = {row["eval_loss"]: row["step"] for row in read(Path("run/metrics.jsonl")) if "eval_loss" in row}
    assert result["best_step"] == losses[min(losses)] > 1
    assert same("run", f"run/checkpoint-{result['best_step']}")


# How long it takes, and what is said of it


@pytest.mark.parametrize(
    ("training", "while_training", "at_end"),
    [
        ({"max_steps": 100, "eval_steps": 10}, 6, 100),  # 40 rows are trained on between two evaluations
        ({"max_steps": 1000, "eval_steps": 10, "gradient_accumulation_steps": 2}, 13, 1000),
        ({"max_steps": 1000, "eval_steps": 1}, 4, 500),
        ({"num_train_epochs": 50, "max_steps": -1, "eval_steps": 0.1}, 20, 150),  # of 24 rows
        ({"num_train_epochs": 50, "max_steps": -1, "eval_strategy": "epoch"}, 4, 150),
    ],
)
def test_evaluation_is_sized_by_the_settings(training, while_training, at_end):
    """So that it takes less than a tenth of the time, and is the same in a run that goes on."""
    run = run_of(training=training, eval_examples=None, task_settings={"length": 8, "examples": [24, 500, 8]})
    task = build_task(run)
    trainer = build_trainer(run, task, build_model(run, task, start=None), [])
    assert len(trainer.eval_dataset) == while_training and build.at_end(trainer) == at_end
    assert len(build_trainer(run, task, trainer.model, []).eval_dataset) == while_training


def test_time_left_counts_everything(monkeypatch):
    """On a clock of ours: steps, evaluations, checkpoints and the last scores."""
    now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    bar = progress.Bar(None, at_end=100, batch=8)
    state = TrainerState(max_steps=100)
    bar.on_train_begin(None, state, None)
    estimates = {}
    for step in range(1, 101):
        state.global_step = step
        now += 5.0 if step == 1 else 0.4
        bar.on_step_end(None, state, None)
        if step % 10 == 0:
            now += 1.0
            bar.on_evaluate(None, state, None, metrics={"eval_samples_per_second": 20.0})
        if step % 20 == 0:
            now += 0.5  # a checkpoint
        estimates[step] = now + bar.left(state)
    assert estimates[1] > 300  # the first step is slow, but all there is
    assert bar.left(state) == pytest.approx(5.0)  # 100 examples at a twentieth of a second
    assert all(estimates[step] == pytest.approx(now + 5.0, rel=0.07) for step in range(20, 101))
    assert estimates[5] == pytest.approx(now + 5.0, rel=0.3)  # before anything was evaluated


def test_the_end_says_what_must_not_be_overlooked(capsys):
    rows = [f"word {i * 7919 % 97},{'yes' if i * 31 % 4 else 'no'}" for i in range(2000)]
    Path("x.csv").write_text("\n".join(["text,label", *rows, "only one field"]))
    argv = "classify --data x.csv --size toy --max_steps 2 --report_to none --skip-bad-rows 3 --out run"
    cli.train(argv.split())
    left_out = "1 rows that cannot be read are left out; the first: x.csv:2002: expected 2 fields"
    said = capsys.readouterr().out
    first, last = said.split("scoring 200 examples of validation and test")
    assert left_out in first and left_out in last
    part = "scored on 100 of 200 test examples, as suits a run so short; cosformer evaluate run takes all"
    assert f"the model is in run\n{left_out}" in last and part in last
    assert re.search(
        r"IT HAS NOT LEARNED: accuracy \d+\.\d% is no better than the most frequent class alone "
        r"\(7\d\.\d%\)\. Train longer, or with another --learning_rate\n$",
        last,
    )
    result = json.loads(Path("run/result.json").read_text()) | {"test": {"accuracy": 0.95}}
    assert not any("LEARNED" in line for line in cli.remarks(result, "run"))


def test_a_finished_run_goes_on_for_longer(whole, capsys):
    shutil.copytree(whole, "run")
    longer = run_of(training={"max_steps": 10})
    with pytest.raises(train.SettingsError, match="its max_steps is 6, not 4; .*: a larger --max_steps, or"):
        go(run_of(training={"max_steps": 4}), resume=True)
    with pytest.raises(train.Interrupted):  # and stops on its way as any run does
        go(longer, resume=True, watch=Signal(8))
    with pytest.raises(train.SettingsError, match="its max_steps is 10, not 6"):
        go(resume=True)
    result = go(longer, resume=True)
    assert result["steps"] == 10 and steps() == [*range(1, 11)] and go(longer, resume=True) == result
    shutil.copytree(whole, "again")
    assert go(run_of(out="again", training={"max_steps": 10}), resume=True)["steps"] == 10
    assert same("again", "run") and same("again/checkpoint-10", "run/checkpoint-10")


def test_a_saved_classifier_cuts_what_is_too_long_and_says_nothing_as_it_loads(capfd, tmp_path):
    rows = [f"{'good' if i % 2 else 'bad'} {i},{i % 2}" for i in range(60)]
    Path("x.csv").write_text("\n".join(rows))
    argv = "classify --data x.csv --size toy --max_steps 1 --report_to none --out run --length 16"
    cli.train([*argv.split(), "--set", "task.columns=text,label"])
    classify = pipeline("text-classification", "run", truncation=True, device="cpu")
    assert classify("a long text " * 200)[0]["label"] in "01"
    go(run_of("lm", out="lm", task_settings={"length": 16, "data": str(texts(tmp_path / "t"))}))
    logging.enable_progress_bar()  # as in a fresh process
    capfd.readouterr()
    generate.main(["--model", "lm", "--prompt", "Line 1", "--max-new-tokens", "2"])
    assert capfd.readouterr().err == ""


def test_tensorboard_files_are_written():
    pytest.importorskip("tensorboard")
    run = run_of()
    go(dataclasses.replace(run, training={k: v for k, v in run.training.items() if k != "report_to"}))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = [EventAccumulator(str(path)).Reload() for path in Path("run").rglob("events.out.tfevents*")]
    (found,) = (
        file for file in files if "train/loss" in file.Tags()["scalars"]
    )  # the final scores have a file of their own
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in found.Scalars("eval/accuracy")] == [2, 4, 6]


def test_epochs_may_be_given_in_the_place_of_steps():
    result = go(run_of(training={"num_train_epochs": 2, "max_steps": -1}))
    assert result["steps"] == 2 * FEW[0] // 4
    run = run_of(out="b")
    training = {k: v for k, v in run.training.items() if k not in ("max_steps", "eval_steps")}
    assert go(dataclasses.replace(run, training=training | {"num_train_epochs": 1}))["steps"] == FEW[0] // 4


def test_evaluation_leaves_no_example_out():
    """The last batch of a training epoch is dropped where it is smaller; one of an evaluation is not."""
    task = tasks.build("copy", length=8, examples=(10, 7, 7))
    run = run_of(task_settings={"length": 8, "examples": [10, 7, 7]})
    trainer = build_trainer(run, task, build_model(run, task, start=None), [])
    assert sum(len(batch["input_ids"]) for batch in trainer.get_train_dataloader()) == 8
    assert sum(len(batch["input_ids"]) for batch in trainer.get_eval_dataloader()) == 7
    run = run_of(
        task_settings={"length": 8, "examples": [3, 2, 2]}, out="few"
    )  # less than a batch: nothing is dropped
    assert go(run)["steps"] == 6


# Stopping and going on


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_had_been(number, whole):
    handlers = [signal.getsignal(n) for n in Interrupt.signals]
    with pytest.raises(
        train.Interrupted,
        match=f"interrupted by {number.name} at step 3; --resume goes on from run/checkpoint-3",
    ):
        go(watch=Signal(3, number))
    assert "checkpoint-3" in checkpoints() and not Path("run/result.json").exists()
    assert handlers == [signal.getsignal(n) for n in Interrupt.signals]
    result, want = go(resume=True), json.loads((whole / "result.json").read_text())
    assert same("run", whole) and same("run/checkpoint-6", whole / "checkpoint-6")
    assert steps() == [1, 2, 3, 4, 5, 6] and steps(key="eval_accuracy") == [2, 4, 6]
    assert {k: v for k, v in result.items() if k != "seconds"} == {
        k: v for k, v in want.items() if k != "seconds"
    }
    losses = [
        [row["loss"] for row in read(Path(out) / "metrics.jsonl") if "loss" in row] for out in ("run", whole)
    ]
    assert losses[0] == losses[1]


def test_batches_of_like_length_and_a_batch_norm_go_on_as_well():
    """They have a state of their own: the order that was drawn, and what the norm has seen."""
    options = {"task": "listops", "task_settings": LISTOPS, "model_fields": {"pooling": "normed-mean"}}
    options["training"] = {
        "train_sampling_strategy": "group_by_length",
        "max_steps": 10,
    }  # six steps are an epoch
    go(run_of(out="whole", **options))
    for stop in (3, 8):
        with pytest.raises(train.Interrupted):
            go(run_of(out=f"run{stop}", **options), watch=Signal(stop, signal.SIGTERM))
        go(run_of(out=f"run{stop}", **options), resume=True)
        assert same(f"run{stop}", "whole"), stop


def test_the_epoch_reaches_the_order_of_lengths(monkeypatch):
    """Through whatever a resumed run of several processes wraps around it, so not through that."""
    run = run_of("listops", task_settings=LISTOPS, training={"train_sampling_strategy": "group_by_length"})
    task = build_task(run)
    trainer = build_trainer(run, task, build_model(run, task, start=None), [])
    order = trainer._get_train_sampler()
    first, again = list(order), list(order)
    monkeypatch.setattr(Sharded, "_run_epoch", lambda *args, **kwargs: None)
    trainer._run_epoch(trainer.model, 1)
    assert first == again and sorted(order) == sorted(first) and list(order) != first


def test_a_second_ctrl_c_stops_at_once_and_sigterm_twice_does_not():
    with pytest.raises(KeyboardInterrupt):
        go(watch=Signal(3, signal.SIGINT, times=2))
    assert steps() == [1, 2]
    with pytest.raises(train.Interrupted):
        go(run_of(out="b"), watch=Signal(3, signal.SIGTERM, times=2))


def test_exit_codes_of_the_command(monkeypatch, capsys):
    def carried_out(error):
        def train_(run, *, resume):
            raise error

        monkeypatch.setattr(cli, "carry_out", train_)
        with pytest.raises(SystemExit) as stopped:
            cli.train(["copy"])
        said = capsys.readouterr().err
        assert said.startswith("cosformer train: ") and said.count("\n") == 1
        return stopped.value.code

    assert carried_out(train.Interrupted("interrupted")) == 130
    assert carried_out(KeyboardInterrupt()) == 130
    assert carried_out(train.Stopped("the loss is nan")) == 1
    assert carried_out(train.SettingsError("no")) == 1
    assert carried_out(tasks.DataError("no")) == 1


def test_resume_begins_where_there_is_nothing_and_returns_what_is_finished(monkeypatch):
    result = go(resume=True)
    monkeypatch.setattr(run_module, "stage", None)
    assert go(resume=True) == result


def test_killed_after_the_last_step_it_does_not_take_another():
    """transformers trains one step more when it resumes from the last one in the middle of an epoch."""
    whole = go(run_of(training={"max_steps": 4}))
    Path("run/result.json").unlink()
    shutil.copytree("run/checkpoint-4", "before")
    again = go(run_of(training={"max_steps": 4}), resume=True)
    assert again["steps"] == 4 and same("run/checkpoint-4", "before") and again["test"] == whole["test"]
    assert steps() == [1, 2, 3, 4] and steps(key="eval_accuracy") == [2, 4]


def test_a_half_written_checkpoint_and_a_half_written_line_are_passed_over(whole):
    with pytest.raises(train.Interrupted):
        go(watch=Signal(4))
    shutil.copytree("run/checkpoint-4", "run/checkpoint-5")
    Path("run/checkpoint-5", SEAL).unlink()
    Path("run/checkpoint-5/model.safetensors").write_bytes(b"half")
    with open("run/metrics.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    go(resume=True)
    assert steps() == [1, 2, 3, 4, 5, 6] and checkpoints()[-1] == "checkpoint-6"
    assert same("run", whole)


def test_a_folder_in_use_is_refused():
    with pytest.raises(train.Interrupted):
        go(watch=Signal(1))
    before = checkpoints()
    with pytest.raises(
        train.SettingsError, match="run already holds a run; go on with --resume, or choose another --out"
    ):
        go()
    with pytest.raises(
        train.SettingsError,
        match="run holds another run: its mixer is 'cosformer', not 'softmax'; .*--start run",
    ):
        go(run_of(mixer="softmax"), resume=True)
    with pytest.raises(
        train.SettingsError, match="run was trained with 4 examples a step, now it would be 2; .*must be 4"
    ):
        go(run_of(training={"per_device_train_batch_size": 2}), resume=True)
    assert checkpoints() == before
    Path("run").rename("moved")
    go(run_of(out="moved"), resume=True)
    assert json.loads(Path("moved/resolved.json").read_text())["resumed_from"] == "checkpoint-1"


def test_checkpoints_of_something_else_are_left_alone():
    Path("run/checkpoint-500").mkdir(parents=True)
    for resume in (False, True):
        with pytest.raises(
            train.SettingsError,
            match="run holds checkpoints of something else .there is no run.json.; choose",
        ):
            go(resume=resume)
    assert Path("run/checkpoint-500").is_dir() and not Path("run/run.json").exists()


def test_a_signal_in_the_last_evaluation_stops_what_would_come_after(whole):
    class Late(TrainerCallback):
        times = 0

        def on_evaluate(self, args, state, control, **kwargs):
            self.times += state.global_step == 6
            if self.times == 1:  # the scores come after it
                self.times += 1
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(
        train.Interrupted, match="interrupted by SIGINT after the last step; the run in run is complete"
    ):
        go(watch=Late())
    assert same("run", whole) and go(resume=True)["steps"] == 6


def test_a_batch_norm_wants_more_than_one_text():
    run = run_of(
        "listops",
        task_settings=LISTOPS,
        model_fields={"pooling": "normed-mean"},
        training={"per_device_train_batch_size": 1},
    )
    with pytest.raises(
        train.SettingsError,
        match="normed-mean normalises over a batch; --per_device_train_batch_size must be 2",
    ):
        go(run)


def test_a_classifier_is_not_scored_on_other_labels(capsys):
    def table(name, *labels):
        rows = [f"text {i} is {labels[i % len(labels)]},{labels[i % len(labels)]}" for i in range(40)]
        Path(name).write_text("\n".join(["text,label", *rows]))

    (
        table("two.csv", "neg", "pos"),
        table("three.csv", "neg", "neutral", "pos"),
        table("other.csv", "bad", "good"),
    )
    go(run_of("classify", task_settings={"data": "two.csv", "length": 16, "holdout": 0.2}))
    for data, labels in (("three.csv", "neg, neutral, pos"), ("other.csv", "bad, good")):
        with pytest.raises(SystemExit):
            cli.evaluate(["run", "--data", data])
        told = f"run tells neg, pos apart; the data has {labels}. If it is a part of them, name them all"
        assert f"{told}: --set task.labels=neg,pos\n" in capsys.readouterr().err
    cli.evaluate(["run", "--data", "two.csv", "--set", "task.labels=neg,pos"])
    assert "accuracy" in capsys.readouterr().out


def test_texts_that_are_cut_are_counted(capsys):
    Path("long.csv").write_text(
        "text,label\n" + "\n".join(f"{'long ' * (1 + i % 10)},{i % 2}" for i in range(100))
    )
    train.train(
        run_of(
            "classify",
            task_settings={"data": "long.csv", "length": 32, "holdout": 0.2, "tokenizer": "bytes"},
            training={"max_steps": 1},
        )
    )
    full = int(
        re.search(
            r"(\d+) of \d+ training texts are longer than 32 tokens and are cut", capsys.readouterr().out
        ).group(1)
    )
    assert 15 < full < 33  # 4 in 10 of about 60


def test_another_spread_of_the_same_batch_goes_on(whole):
    with pytest.raises(train.Interrupted):
        go(watch=Signal(2))
    go(run_of(training={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}), resume=True)
    a, b = (
        [row["loss"] for row in read(Path(out) / "metrics.jsonl") if "loss" in row] for out in ("run", whole)
    )
    assert a == pytest.approx(b, abs=1e-5)


# What spoils a run


@pytest.mark.parametrize("what", ["loss", "gradient's norm"])
def test_a_nan_stops_and_leaves_the_last_good_checkpoint(monkeypatch, what):
    def spoil(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        return found * float("nan") if self.model.training and self.state.global_step == 4 else found

    name = {"loss": "compute_loss", "gradient's norm": "_clip_grad_norm"}[what]
    original = getattr(Trainer, name)
    said = f"the {what} is nan at step 5; start again from run/checkpoint-4 .--start. with a lower"
    with monkeypatch.context() as patch, pytest.raises(train.Stopped, match=said):
        patch.setattr(Trainer, name, spoil)
        go()
    assert checkpoints()[-1] == "checkpoint-4" and all(
        tensor.isfinite().all() for tensor in weights("run/checkpoint-4").values()
    )
    assert go(run_of(out="again", start="run/checkpoint-4"))["steps"] == 6


def test_weights_that_are_not_finite_are_never_saved():
    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step == 4:
                torch.nn.init.constant_(next(model.parameters()).data[:1, :1], float("inf"))

    with pytest.raises(
        train.Stopped, match="weights are not finite after step 4; start again from run/checkpoint-2"
    ):
        go(watch=Spoil())
    assert checkpoints() == ["checkpoint-2"]
    with pytest.raises(train.Stopped, match="weights are not finite after step 6"):  # nor as the run's model
        go(run_of(out="b", training={"eval_strategy": "no", "save_strategy": "no"}), watch=Spoil())
    assert not Path("b/model.safetensors").exists()


# Settings


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
    said = merged(
        *(
            "--recipe",
            "r.toml",
            "--mixer",
            "elu",
            "--length",
            "32",
            "--max_steps",
            "9",
            "--learning-rate",
            "1e-2",
            "--out",
            "x",
        ),
        *(
            "--set",
            "task.depth=3",
            "--set",
            "model.pooling=mean",
            "--set",
            "pretrain.seed=5",
            "--set",
            "train.bf16=false",
        ),
    )
    assert (said["mixer"], said["size"], said["out"]) == ("elu", "small", "x")
    assert said["task_settings"] == {"length": 32, "depth": 3} and said["pretrain"] == {
        "max_steps": 3,
        "seed": 5,
    }
    assert said["training"] == {"max_steps": 9, "seed": 2, "learning_rate": 0.01, "bf16": False}
    assert said["model_fields"] == {"dropout": 0.1, "pooling": "mean"}
    assert merged("copy", "--recipe", "r.toml")["task"] == "copy"
    sampled = merged("--recipe", "r.toml", "--loss", "one-vs-each", "--loss-samples", "99")
    assert sampled["model_fields"] == {"dropout": 0.1, "loss": "one-vs-each", "loss_samples": 99}
    run = train.Run(**merged("--recipe", "r.toml"))
    run.save(Path("run.json"))
    assert train.Run.load(Path("run.json")) == run


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "no task: name one, or give a --recipe that does"),
        (["nothing"], "task is 'nothing'; one of lm, mlm"),
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
        (["copy", "--size", "published"], "size 'published': task 'copy' has no published sizes"),
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
def test_what_cannot_be_ends_in_one_line(argv, said, capsys):
    import re

    with pytest.raises(SystemExit) as stopped:
        cli.train([*argv, "--out", "run"] if "--out" not in argv else argv)
    found = capsys.readouterr().err
    assert stopped.value.code == 1 and re.search(said, found), found
    assert found.startswith("cosformer train: ") and found.count("\n") == 1, found


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
        ("[task", "recipe r.toml: "),
    ],
)
def test_a_recipe_with_mistakes_is_refused(text, said):
    Path("r.toml").write_text(text)
    with pytest.raises(train.SettingsError, match=said.replace("[", r"\[")):
        train.Run(**{"out": "x", **read_recipe(Path("r.toml"))})


# Every kind of task, evaluation, fine-tuning


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


@pytest.mark.parametrize("name", tasks.names())
def test_every_task_trains_and_evaluate_finds_the_same_scores(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(generated, "SIZES", (200, 20, 20))
    settings = dict(SETTINGS[name])
    if "data" in settings:
        settings["data"] = str(settings["data"](tmp_path / "data"))
    run = run_of(
        name,
        task_settings=settings,
        training={"max_steps": 2, "eval_steps": 1},
        eval_examples=4,
        test_examples=6,
    )
    result = go(run)
    assert result["steps"] == 2 and result["metric"] in result["test"], result
    capsys.readouterr()
    cli.evaluate(["run", "--json"])
    assert json.loads(capsys.readouterr().out) == pytest.approx(result["test"], rel=1e-5)
    cli.evaluate(["run", "--json", "--split", "validation"])
    assert json.loads(capsys.readouterr().out) == pytest.approx(result["validation"], rel=1e-5)


@pytest.mark.parametrize(
    ("argv", "said"),
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
def test_evaluate_refuses_what_would_change_nothing(argv, said, whole, capsys):
    with pytest.raises(SystemExit):
        cli.evaluate([str(whole), *argv])
    assert capsys.readouterr().err == f"cosformer evaluate: {said}\n"


def test_a_saved_model_keeps_its_mixer_and_size(whole, capsys):
    run = cli.merge(*cli.parse(cli.train_parser(), ["copy", "--start", str(whole / "checkpoint-6")]))
    assert (run["mixer"], run["size"], run["out"]) == ("cosformer", "toy", "runs/copy-cosformer")
    with pytest.raises(SystemExit):
        cli.train(["copy", "--start", str(whole), "--mixer", "elu"])
    assert f"mixer is 'elu', but {whole} has 'cosformer': leave it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.finetune([str(whole), "--size", "small"])
    assert "unknown argument '--size'" in capsys.readouterr().err


def test_a_trained_language_model_goes_on_with_a_text(capsys):
    Path("t.txt").write_text("abcdefgh " * 900)
    cli.train(
        [
            *(
                "lm",
                "--data",
                "t.txt",
                "--tokenizer",
                "bytes",
                "--length",
                "32",
                "--size",
                "toy",
                "--out",
                "run",
                "--max_steps",
                "60",
                "--eval_steps",
                "30",
            ),
            *("--per_device_train_batch_size", "8", "--learning_rate", "1e-2"),
        ]
    )
    assert "the model is in run" in capsys.readouterr().out
    generate.main(["--model", "run", "--prompt", "abcd", "--max-new-tokens", "10"])
    assert capsys.readouterr().out == "efgh abcde\n"


@pytest.fixture
def pretrained(tmp_path):
    go(
        run_of(
            "mlm",
            out="mlm",
            task_settings=SETTINGS["mlm"] | {"data": str(texts(tmp_path / "data"))},
            training={"max_steps": 2, "eval_steps": 1},
            eval_examples=4,
            test_examples=4,
        )
    )
    return "mlm"


def test_finetuning_starts_from_the_saved_body(pretrained, capsys):
    task = tasks.build("classify", **SETTINGS["classify"])
    run = run_of("classify", out="fine", task_settings=SETTINGS["classify"], start=pretrained)
    body, model = weights(pretrained), build_model(run, task, start=pretrained)
    loaded = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name in body and name.startswith("model.")
    }
    assert len(loaded) == sum(name.startswith("model.") for name in body) > 20
    assert all(torch.equal(loaded[name], body[name]) for name in loaded)
    assert not same_as_new(loaded, run, task) and model.config.num_labels == 2
    cli.finetune(
        [
            pretrained,
            "--length",
            "32",
            "--out",
            "fine",
            "--max_steps",
            "1",
            "--learning_rate",
            "0",
            "--test-examples",
            "4",
            "--eval-examples",
            "4",
        ]
    )
    assert all(torch.equal(weights("fine")[name], body[name]) for name in loaded)
    assert train.Run.load(Path("fine/run.json")).task == "classify"


def same_as_new(loaded, run, task) -> bool:
    fresh = models.build(task, size="toy").state_dict()
    return all(torch.equal(fresh[name], tensor) for name, tensor in loaded.items())


def test_a_start_that_cannot_be_is_refused(pretrained, capsys, monkeypatch):
    monkeypatch.setattr(generated, "SIZES", (200, 20, 20))

    def said(*argv):
        with pytest.raises(SystemExit):
            cli.finetune([pretrained, *argv, "--out", "fine"])
        return capsys.readouterr().err

    assert "mlm has 32 positions; --length 33 is more" in said("classify", "--length", "33")
    assert "mlm has a vocabulary of 261, the task one of 300" in said(
        "--length", "32", "--tokenizer", "bpe:300"
    )
    assert "mlm is a cosformer_encoder model; task 'lm' needs a cosformer model" in said(
        "lm", "--length", "32", "--data", "data"
    )
    assert not Path("fine/run.json").exists()  # so that the folder is free for a better attempt
    with pytest.raises(SystemExit):
        cli.evaluate([pretrained, "classify", "--length", "32"])
    assert "is a CosformerForMaskedLM, which knows nothing of task 'classify' yet" in capsys.readouterr().err
    from tokenizers import Tokenizer

    folder = Path("other")
    shutil.copytree(pretrained, folder)
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = json.loads(vocabulary.to_str())
    words = text["model"]["vocab"]
    a, b = [word for word in words if words[word] > 100][:2]
    words[a], words[b] = words[b], words[a]
    (folder / "tokenizer.json").write_text(json.dumps(text))
    unseal(folder)
    with pytest.raises(SystemExit):
        cli.finetune([str(folder), "--length", "32", "--tokenizer", "bytes", "--out", "fine2"])
    assert "has another vocabulary than the task, of the same size" in capsys.readouterr().err


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


def test_parameters_beside_softmax():
    task = tasks.build("listops", **LISTOPS)
    for mixer, least, most in (("softmax", 0, 0), ("cosformer-paper", 0, 0), ("cosformer", 0, 0.02)):
        model = models.build(task, mixer=mixer, size="toy")
        share = models.parameters_beside_softmax(model, task, size="toy")
        assert least <= share <= most, mixer
    wide = models.build(task, mixer="softmax", size="toy", fields={"intermediate_size": 512})
    plain = models.build(task, mixer="softmax", size="toy")
    share = models.parameters_beside_softmax(wide, task, size="toy")
    assert share == pytest.approx(models.parameters(wide) / models.parameters(plain) - 1) and share > 0.1


def test_masked_loss_is_a_mean_over_all_that_is_hidden(tmp_path):
    """Whatever share of the hidden tokens a batch has."""
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
    assert (
        abs(sum(model(input_ids=i, labels=y).loss for i, y in zip(*one.values())) / 3 - mean) > 1e-4
    )  # a mean of means is not
    loss, logits = model(**whole, return_dict=False)[:2]
    assert loss == mean and logits.shape == (3, 32, task.vocab_size)
