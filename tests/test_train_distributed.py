"""Training in two processes: DDP and FSDP2 do what one process does with the same batches, and leave
checkpoints that one process can resume from.

Under torchrun this file is the program that the tests start: it trains every job, one after the other.
"""

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import losses, torchrun, two_sets
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from cosformer import tasks, train
from cosformer.train.progress import read

STEPS = 6
BATCH = 8
LAYER = "LlamaDecoderLayer"
# "long" has what looks at all rows of a batch or an epoch: a batch norm, batches of similar length.
NAME = {"long": "classify"}
TASKS = {
    "lm": {"length": 32, "data": "texts.jsonl"},  # rows of unequal length, packed
    "mlm": {"length": 32, "data": "texts.jsonl", "copies": 2},
    "classify": {"length": 24, "data": "rows.csv"},
    "long": {"length": 24, "data": "rows.csv"},
}
# A batch norm divides by the small differences between texts.
CLOSE = {"lm": 1e-5, "mlm": 1e-5, "classify": 1e-5, "long": 3e-4}


def run_of(folder: Path, task: str, how: str, *, processes: int) -> train.Run:
    settings = {**TASKS[task], "data": str(folder / TASKS[task]["data"]), "cache": str(folder / "cache")}
    training = {"max_steps": STEPS, "logging_steps": 1, "eval_steps": 3, "seed": 3, "report_to": []}
    training |= {"per_device_train_batch_size": BATCH // processes, "learning_rate": 3e-3}
    if how == "fsdp":
        training |= {
            "fsdp": True,
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": [LAYER]},
        }
    fields = {}
    if task == "long":
        fields["pooling"], training["train_sampling_strategy"] = "normed-mean", "group_by_length"
    made = {"task_settings": settings, "model_fields": fields, "training": training}
    return train.Run(task=NAME.get(task, task), out=str(folder / f"{task}-{how}"), size="toy", **made)


class Shards(TrainerCallback):
    """Records how much of the model this process holds."""

    def __init__(self, out: Path):
        self.out = out

    def on_step_end(self, args, state, control, model, **kwargs):
        parameters = list(model.parameters())
        held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
        kinds = sorted({type(p).__name__ for p in parameters})
        found = {
            "held": held,
            "all": sum(p.numel() for p in parameters),
            "kinds": kinds,
            "masks": torch.rand(1).item(),
        }
        (self.out / f"shards-{args.process_index}.json").write_text(json.dumps(found))


def work(folder: Path) -> None:
    for task in TASKS:
        for how in ("ddp", "fsdp"):
            os.environ.pop("ACCELERATE_USE_FSDP", None)  # transformers leaves it behind
            run = run_of(folder, task, how, processes=2)
            train.train(run, watch=Shards(Path(run.out)))
    torch.distributed.destroy_process_group()


def prepare(folder: Path) -> None:
    """The data, the runs in two processes, and the same runs in one."""
    two_sets(folder)
    process = torchrun(__file__, str(folder))
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    for task in TASKS:
        train.train(run_of(folder, task, "alone", processes=1), watch=Shards(folder / f"{task}-alone"))


def losses_are_those_of_one(folder, task, how):
    want = losses(folder / f"{task}-alone")
    assert len(want) == STEPS
    assert max(want.values()) - min(want.values()) > 1e-3  # the weights change, and so does the loss
    assert losses(folder / f"{task}-{how}") == pytest.approx(want, abs=CLOSE[task])


def scores_and_weights_are_those_of_one(folder, task, how):
    got, want = (
        json.loads((folder / f"{task}-{name}" / "result.json").read_text()) for name in (how, "alone")
    )
    metric = want["metric"]
    assert got["test"][metric] == pytest.approx(want["test"][metric], rel=1e-4)
    same = ["parameters", "steps", "best_step"]
    same += ["tokens"] if task in ("lm", "mlm") else []  # others pad batches, which differ
    assert [got[key] for key in same] == [want[key] for key in same]
    found = train.evaluate(run_of(folder, task, "alone", processes=1), folder / f"{task}-{how}")
    assert found.pop("examples") == got["examples"]
    for scores in (found, got["test"]):
        scores.pop("loss")  # the Trainer's mean of batch means: one process has other batches
    assert found == pytest.approx(got["test"], rel=1e-4)
    a, b = (load_file(folder / f"{task}-{name}" / "model.safetensors") for name in (how, "alone"))
    assert a.keys() == b.keys()
    for name in a:
        # A batch norm removes any shift before it, whose gradient is then noise, and Adam follows noise.
        if task != "long" or name.startswith(("classifier", "bert.pooler")):
            torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=2e-4)


def every_process_holds_its_share(folder, task, how):
    first, second = (
        json.loads((folder / f"{task}-{how}" / f"shards-{i}.json").read_text()) for i in range(2)
    )
    assert first["masks"] != second["masks"]  # dropout differs between processes
    if how == "fsdp":
        assert first["kinds"] == ["DTensor"] and first["held"] + second["held"] == first["all"]
        assert first["held"] < 0.6 * first["all"]
    else:
        assert first["held"] == first["all"]


def no_example_is_counted_twice(folder, task, how):
    found = json.loads((folder / f"{task}-{how}" / "result.json").read_text())
    run = run_of(folder, task, how, processes=2)
    test = tasks.build(run.task, **run.task_settings).test
    assert len(test) % 2 == 1 or run.task != "classify"  # two processes must pad the last batch
    if "tokens" in found["test"]:
        labels = [row["labels"][1:] if task == "lm" else row["labels"] for row in test]
        assert found["test"]["tokens"] == sum(int((row != tasks.IGNORE).sum()) for row in labels)


def one_process_goes_on_from_their_checkpoint(folder, task, how):
    out = folder / f"{task}-{how}-moved"
    shutil.copytree(folder / f"{task}-{how}", out)
    (out / "result.json").unlink()
    shutil.rmtree(out / f"checkpoint-{STEPS}")
    run = replace(run_of(folder, task, "alone", processes=1), out=str(out))
    wrong = replace(run, training=run.training | {"per_device_train_batch_size": 3})
    with pytest.raises(train.SettingsError, match="was trained with 8 examples a step, now it would be 3"):
        train.train(wrong, resume=True)
    train.train(run, resume=True, watch=Shards(out))
    assert losses(out) == pytest.approx(losses(folder / f"{task}-alone"), abs=CLOSE[task])
    assert json.loads((out / "resolved.json").read_text())["resumed_from"] == "checkpoint-3"


def test_two_processes_do_what_one_does(tmp_path):
    """One test, so that the processes are started once."""
    prepare(tmp_path)
    for task in TASKS:
        for how in ("ddp", "fsdp"):
            print(task, how)
            losses_are_those_of_one(tmp_path, task, how)
            scores_and_weights_are_those_of_one(tmp_path, task, how)
            no_example_is_counted_twice(tmp_path, task, how)
            every_process_holds_its_share(tmp_path, task, how)
            one_process_goes_on_from_their_checkpoint(tmp_path, task, how)


def test_the_command_runs_under_torchrun_and_stops_when_asked(tmp_path):
    out = tmp_path / "run"
    rest = ["--max_steps", "100000", "--save_steps", "100000", "--eval_strategy", "no", "--size", "toy"]
    process = torchrun("-m", "cosformer", "train", "copy", "--length", "16", "--out", str(out), *rest)
    deadline = time.monotonic() + 120
    while len(read(out / "metrics.jsonl")) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does; torchrun passes it on
    said, _ = process.communicate(timeout=60)
    assert "interrupted by SIGINT at step" in said, said
    assert said.count("cosformer train:") == 1, said
    (checkpoint,) = out.glob("checkpoint-*")
    assert (checkpoint / "checksums.json").exists()
    assert {path.name for path in checkpoint.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(Path(sys.argv[1]))
