"""cosformer train: what a run leaves behind, how long it takes, and what it prints."""

import dataclasses
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import FEW, Signal, checkpoints, go, losses, run_of, same, steps, texts
from transformers import TrainerState, pipeline
from transformers.utils import logging

from cosformer import generate, tasks, train
from cosformer.train import build, cli, progress
from cosformer.train.build import build_model, build_task, build_trainer
from cosformer.train.progress import read

pytestmark = pytest.mark.usefixtures("here")


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
    result = go(run_of(training={"eval_steps": 1, "save_steps": 3}))  # the best is not a save step
    assert result["best_step"] == 2 and checkpoints() == ["checkpoint-2", "checkpoint-6"]
    assert same("run", "run/checkpoint-2")


def test_of_equals_the_one_with_the_lowest_loss_is_the_best(monkeypatch):
    built = tasks.build

    def scored(name, **settings):
        return dataclasses.replace(built(name, **settings), compute_metrics=lambda _: {"accuracy": 0.5})

    monkeypatch.setattr(tasks, "build", scored)
    result = go(run_of(training={"eval_steps": 1, "learning_rate": 1e-5}))
    by_step = losses(key="eval_loss")
    assert result["best_step"] == min(by_step, key=by_step.get) > 1
    assert same("run", f"run/checkpoint-{result['best_step']}")


@pytest.mark.parametrize(
    ("training", "while_training", "final"),
    [
        ({"max_steps": 100, "eval_steps": 10}, 6, 100),  # 40 rows are trained on between two evaluations
        ({"max_steps": 1000, "eval_steps": 10, "gradient_accumulation_steps": 2}, 13, 1000),
        ({"max_steps": 1000, "eval_steps": 1}, 4, 500),
        ({"num_train_epochs": 50, "max_steps": -1, "eval_steps": 0.1}, 20, 150),  # of 24 rows
        ({"num_train_epochs": 50, "max_steps": -1, "eval_strategy": "epoch"}, 4, 150),
        ({"max_steps": 1_000, "eval_strategy": "epoch"}, 4, 500),
    ],
)
def test_evaluation_is_sized_by_the_settings(training, while_training, final):
    """So that it takes less than a tenth of the time, and is the same in a resumed run."""
    run = run_of(training=training, eval_examples=None, task_settings={"length": 8, "examples": [24, 500, 8]})
    task = build_task(run)
    trainer = build_trainer(run, task, build_model(run, task, start=None), [])
    assert len(trainer.eval_dataset) == while_training and build.final_examples(trainer) == final
    assert len(build_trainer(run, task, trainer.model, []).eval_dataset) == while_training


@pytest.mark.parametrize(
    ("training", "evaluated"),
    [
        ({"max_steps": 3000, "save_steps": 50}, 50),
        ({"max_steps": 3000, "save_steps": 1000.0}, 500),  # not 300, of which 1000 is no multiple
        ({"max_steps": 3000, "save_steps": 997}, 997),
        ({"max_steps": 3000, "save_steps": 0.3}, 0.3),
        ({"num_train_epochs": 50, "max_steps": -1, "save_steps": 20}, 20),
    ],
)
def test_evaluations_fit_the_saves_that_were_asked_for(training, evaluated):
    run = run_of()
    del run.training["eval_steps"]
    run.training.update(training)
    task = build_task(run)
    args = build_trainer(run, task, build_model(run, task, start=None), []).args
    assert (args.eval_steps, args.save_steps) == (evaluated, training["save_steps"])


def test_time_left_counts_everything(monkeypatch):
    """On a fake clock: steps, evaluations, checkpoints and the final scores."""
    now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    bar = progress.Bar(None, final_rows=100, batch=8)
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
    assert estimates[1] > 300  # there is only the first, slow step
    assert bar.left(state) == pytest.approx(5.0)  # 100 examples at a twentieth of a second
    assert all(estimates[step] == pytest.approx(now + 5.0, rel=0.07) for step in range(20, 101))
    assert estimates[5] == pytest.approx(now + 5.0, rel=0.3)  # before anything was evaluated


def test_the_end_says_what_must_not_be_overlooked(capsys):
    rows = [f"word {i * 7919 % 97},{'yes' if i * 31 % 4 else 'no'}" for i in range(2000)]
    Path("x.csv").write_text("\n".join(["text,label", *rows, "only one field"]))
    argv = "classify --data x.csv --size toy --max_steps 2 --report_to none --skip-bad-rows 3 --out run"
    cli.train_verb(argv.split())
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
    little = result | {"test": {"accuracy": result["most_frequent"] + 0.01}}
    assert any("may be luck: the most frequent class has 7" in line for line in cli.remarks(little, "run"))


def test_a_finished_run_goes_on_for_longer(whole, capsys):
    shutil.copytree(whole, "run")
    longer = run_of(training={"max_steps": 10})
    with pytest.raises(train.SettingsError, match="its max_steps is 6, not 4; .*: a larger --max_steps, or"):
        go(run_of(training={"max_steps": 4}), resume=True)
    with pytest.raises(train.Interrupted):  # and can be interrupted like any run
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
    cli.train_verb([*argv.split(), "--set", "task.columns=text,label"])
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
    # The final scores have a file of their own.
    (found,) = (file for file in files if "train/loss" in file.Tags()["scalars"])
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in found.Scalars("eval/accuracy")] == [2, 4, 6]


def test_epochs_may_be_given_in_the_place_of_steps():
    result = go(run_of(training={"num_train_epochs": 2, "max_steps": -1}))
    assert result["steps"] == 2 * FEW[0] // 4
    run = run_of(out="b")
    training = {k: v for k, v in run.training.items() if k not in ("max_steps", "eval_steps")}
    assert go(dataclasses.replace(run, training=training | {"num_train_epochs": 1}))["steps"] == FEW[0] // 4


def test_evaluation_leaves_no_example_out():
    """A smaller last batch is dropped in a training epoch, but not in an evaluation."""
    task = tasks.build("copy", length=8, examples=(10, 7, 7))
    run = run_of(task_settings={"length": 8, "examples": [10, 7, 7]})
    trainer = build_trainer(run, task, build_model(run, task, start=None), [])
    assert sum(len(batch["input_ids"]) for batch in trainer.get_train_dataloader()) == 8
    assert sum(len(batch["input_ids"]) for batch in trainer.get_eval_dataloader()) == 7
    less_than_a_batch = {"length": 8, "examples": [3, 2, 2]}  # nothing is dropped
    assert go(run_of(task_settings=less_than_a_batch, out="few"))["steps"] == 6


FAULTS = """
import resource, sys
import torch
from cosformer.train import keep_memory

if sys.argv[1] == "keep":
    keep_memory()
for _ in range(8):  # it settles after two or three
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**24)  # 64 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="keep_memory is for glibc")
def test_keep_memory_keeps_what_is_freed():
    returned, kept = (
        int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True).stdout)
        for how in ("return", "keep")
    )
    assert kept < 8 < returned


def test_long_preparation_is_said(monkeypatch, capsys):
    monkeypatch.setattr(progress, "MOMENT", 0.05)
    with progress.said_if_long("preparing x"):
        time.sleep(0.2)
    with progress.said_if_long("preparing y"):
        pass
    assert capsys.readouterr().err == "preparing x\n"
