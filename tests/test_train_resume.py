"""A run that is stopped, killed or spoilt: what it leaves, and how it resumes."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import LISTOPS, Signal, checkpoints, complaint, go, losses, run_of, same, steps, weights
from transformers import TrainerCallback

from cosformer import tasks, train
from cosformer.seal import SEAL
from cosformer.train import cli
from cosformer.train import run as run_module
from cosformer.train.alive import SIGNALS
from cosformer.train.build import build_model, build_task, build_trainer
from cosformer.train.sharded import Sharded
from cosformer.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_had_been(number, whole):
    handlers = [signal.getsignal(n) for n in SIGNALS]
    with pytest.raises(
        train.Interrupted,
        match=f"interrupted by {number.name} at step 3; --resume goes on from run/checkpoint-3",
    ):
        go(watch=Signal(3, number))
    assert "checkpoint-3" in checkpoints() and not Path("run/result.json").exists()
    assert handlers == [signal.getsignal(n) for n in SIGNALS]
    result, want = go(resume=True), json.loads((whole / "result.json").read_text())
    assert same("run", whole) and same("run/checkpoint-6", whole / "checkpoint-6")
    assert steps() == [1, 2, 3, 4, 5, 6] and steps(key="eval_accuracy") == [2, 4, 6]
    assert result | {"seconds": 0} == want | {"seconds": 0}
    assert losses() == losses(whole)


def test_batches_of_like_length_and_a_batch_norm_go_on_as_well():
    """They have state of their own: the order drawn, and the norm's running statistics."""
    options = {"task": "listops", "task_settings": LISTOPS, "model_fields": {"pooling": "normed-mean"}}
    options["training"] = {"train_sampling_strategy": "group_by_length", "max_steps": 10}  # six are an epoch
    go(run_of(out="whole", **options))
    for stop in (3, 8):
        with pytest.raises(train.Interrupted):
            go(run_of(out=f"run{stop}", **options), watch=Signal(stop, signal.SIGTERM))
        go(run_of(out=f"run{stop}", **options), resume=True)
        assert same(f"run{stop}", "whole"), stop


def test_the_epoch_reaches_the_order_of_lengths(monkeypatch):
    """A resumed run of several processes wraps the sampler, so the epoch must bypass the wrapper."""
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

        monkeypatch.setattr(cli, "train", train_)
        with pytest.raises(SystemExit) as stopped:
            cli.train_verb(["copy"])
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

    table("two.csv", "neg", "pos")
    table("three.csv", "neg", "neutral", "pos")
    table("other.csv", "bad", "good")
    go(run_of("classify", task_settings={"data": "two.csv", "length": 16, "holdout": 0.2}))
    for data, line, label in (("three.csv", 3, "'neutral'"), ("other.csv", 2, "'bad'")):
        found = complaint(capsys, cli.evaluate_verb, "run", "--data", data)
        assert f"{data}:{line}: label {label} is not one of neg, pos" in found
    table("one.csv", "pos")
    for data, examples in (("one.csv", 40), ("two.csv", 8)):  # all of other data, the test set of its own
        capsys.readouterr()
        cli.evaluate_verb(["run", "--data", data, "--json"])
        assert json.loads(capsys.readouterr().out)["examples"] == examples


def test_what_a_model_refuses_in_its_first_step_leaves_the_folder_free(capsys):
    argv = ["copy", "--size", "toy", "--out", "run", "--max_steps", "2", "--length", "16", "--set"]
    argv += ["task.examples=64,8,8", "--mixer", "cosformer-paper", "--set"]
    told = complaint(capsys, cli.train_verb, *argv, "model.horizon=4")
    assert told.startswith("cosformer train: 16 tokens reach past the horizon of 4")
    assert Path("run").is_dir()  # it had begun
    assert not {"run.json", "resolved.json", "metrics.jsonl"} & {path.name for path in Path("run").iterdir()}
    cli.train_verb([*argv, "model.horizon=64"])


def test_a_run_whose_vocabulary_was_made_is_scored_on_any_data(capsys):
    """On its own, at any path, the test set; on other data all of it."""
    Path("own.txt").write_text("".join(f"once upon a time there were {i} foxes\n" for i in range(400)))
    argv = ["lm", "--data", "own.txt", "--tokenizer", "bpe:300", "--length", "32", "--size", "toy"]
    cli.train_verb([*argv, "--max_steps", "1", "--out", "run"])
    shutil.copy("own.txt", "moved.txt")
    Path("other.txt").write_text(Path("own.txt").read_text() + "and one fox more\n")
    counts = {}
    for data in ("own.txt", "moved.txt", "other.txt"):
        capsys.readouterr()
        cli.evaluate_verb(["run", "--json", "--set", f"task.data={data}"])
        out, err = capsys.readouterr()
        counts[data] = json.loads(out)["tokens"]
        assert ("what names no splits is scored whole" in err) == (data == "other.txt")
    assert counts["own.txt"] == counts["moved.txt"] < counts["other.txt"] / 10


def test_a_refusal_after_pre_training_keeps_the_run(capsys, monkeypatch):
    """Another mixer must not go on from this one's pre-training."""
    chosen = [f"task.{key}={value}" for key, value in LISTOPS.items() if key != "examples"]
    argv = ["listops", "--size", "toy", "--max_steps", "2", "--out", "run", "--pretrain-first"]
    for setting in (*chosen, "task.examples=64,8,8"):
        argv += ["--set", setting]
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "build_trainer", refusing(run_module.build_trainer))
        assert "refused" in complaint(capsys, cli.train_verb, *argv)
    assert "already holds a run" in complaint(capsys, cli.train_verb, *argv, "--mixer", "softmax")


def refusing(build):
    """Trainers, of which the second refuses its first step."""
    made = []

    def build_one(*args):
        trainer = build(*args)
        made.append(trainer)
        if len(made) == 2:
            trainer.train = lambda **_: (_ for _ in ()).throw(ValueError("refused"))
        return trainer

    return build_one


def test_an_unfinished_run_names_its_checkpoint(capsys):
    go(run_of(training={"max_steps": 2, "eval_steps": 1}))
    Path("run/config.json").unlink()
    assert "its run is not finished, but run/checkpoint-2 is a model" in complaint(
        capsys, cli.evaluate_verb, "run"
    )


def test_a_model_without_positions_goes_on_with_longer_texts(capsys):
    """Unless told otherwise the length stays; learned positions end where they end."""
    Path("text.txt").write_text("once upon a time there was a fox\n" * 200)
    common = ["lm", "--data", "text.txt", "--tokenizer", "bytes", "--max_steps", "1", "--size", "toy"]
    cli.train_verb([*common, "--length", "32", "--out", "short"])
    cli.train_verb([*common, "--length", "64", "--start", "short", "--out", "long"])
    assert json.loads(Path("long/resolved.json").read_text())["task"]["length"] == 64
    cli.train_verb([*common, "--start", "short", "--out", "same"])
    assert json.loads(Path("same/resolved.json").read_text())["task"]["length"] == 32
    learned = [*common, "--mixer", "cosformer-paper"]
    cli.train_verb([*learned, "--length", "32", "--out", "learned"])
    told = complaint(capsys, cli.train_verb, *learned, "--length", "64", "--start", "learned", "--out", "x")
    assert "learned reads at most 32 tokens; --length 64 is more" in told


def test_texts_that_are_cut_are_counted(capsys):
    Path("long.csv").write_text(
        "text,label\n" + "\n".join(f"{'long ' * (1 + i % 10)},{i % 2}" for i in range(100))
    )
    settings = {"data": "long.csv", "length": 32, "holdout": 0.2, "tokenizer": "bytes"}
    train.train(run_of("classify", task_settings=settings, training={"max_steps": 1}))
    said = r"(\d+) of \d+ training texts are longer than 32 tokens and are cut"
    full = int(re.search(said, capsys.readouterr().out)[1])
    assert 15 < full < 33  # 4 in 10 of about 60


def test_another_spread_of_the_same_batch_goes_on(whole):
    with pytest.raises(train.Interrupted):
        go(watch=Signal(2))
    go(run_of(training={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}), resume=True)
    assert losses() == pytest.approx(losses(whole), abs=1e-5)


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
