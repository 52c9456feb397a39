"""Training where two processes share each sequence does what one does, with DDP and FSDP; it resumes after a
kill, and a process that does not answer is named.

Under torchrun this file is the program that the tests start: it trains every job, one after the other.
"""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from conftest import checkpoints, go, losses, torchrun, two_sets
from conftest import run_of as small_run
from safetensors.torch import load_file
from transformers import TrainerCallback

from cosformer import train
from cosformer.train.alive import Lost

STEPS = 30
JOBS = {  # task, settings, steps
    "lm": ({"length": 64, "data": "texts.jsonl"}, STEPS),
    "lm-fsdp": ({"length": 64, "data": "texts.jsonl"}, STEPS),
    "mlm": ({"length": 64, "data": "texts.jsonl", "copies": 2}, 6),
    "classify": ({"length": 40, "data": "rows.csv"}, 6),
}


def run_of(folder: Path, job: str, *, processes: int) -> train.Run:
    settings, steps = JOBS[job]
    settings = {"tokenizer": "bytes", **settings, "data": str(folder / settings["data"])}
    settings["cache"] = str(folder / "cache")
    training = {"max_steps": steps, "logging_steps": 1, "eval_steps": steps // 2, "seed": 3, "report_to": []}
    training |= {"per_device_train_batch_size": 4, "learning_rate": 3e-3}
    if job.endswith("fsdp") and processes > 1:
        layer = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        training |= {"fsdp": True, "fsdp_config": layer}
    given = {"task_settings": settings, "training": training, "sequence_parallel": processes, "size": "toy"}
    return train.Run(task=job.split("-")[0], out=str(folder / f"{job}-{processes}"), **given)


def work(folder: Path) -> None:
    for job in JOBS:
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # transformers leaves it behind
        train.train(run_of(folder, job, processes=2), watch=TrainerCallback())
    torch.distributed.destroy_process_group()


def same(found: Path, wanted: Path) -> None:
    assert losses(found) == pytest.approx(losses(wanted), abs=1e-4)
    a, b = (load_file(out / "model.safetensors") for out in (found, wanted))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-4)
    got, want = (json.loads((out / "result.json").read_text()) for out in (found, wanted))
    for split in ("validation", "test"):
        got[split].pop("loss")  # the Trainer's mean of batch means
        want[split].pop("loss")
        assert got[split] == pytest.approx(want[split], rel=1e-4)
    assert [got[key] for key in ("steps", "best_step")] == [want[key] for key in ("steps", "best_step")]


def test_two_processes_share_each_sequence(tmp_path):
    """One test, so that the processes are started once."""
    two_sets(tmp_path)
    process = torchrun(__file__, str(tmp_path))
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    for job in JOBS:
        alone = run_of(tmp_path, job, processes=1)
        train.train(alone, watch=TrainerCallback())
        assert len(losses(Path(alone.out))) == JOBS[job][1]
        same(tmp_path / f"{job}-2", Path(alone.out))
    command = ["-m", "cosformer", "evaluate", str(tmp_path / "lm-2"), "--sequence-parallel", "2", "--json"]
    said, _ = torchrun(*command).communicate(timeout=200)
    (line,) = (line for line in said.splitlines() if line.startswith("{"))  # from one process only
    wanted = train.evaluate(run_of(tmp_path, "lm", processes=1), tmp_path / "lm-2")
    assert json.loads(line)["perplexity"] == pytest.approx(wanted["perplexity"], rel=1e-4)


SIZES = [name for name in ("cp_size", "sp_size") if hasattr(ParallelismConfig, name)]  # the oldest has one


@pytest.mark.parametrize("name", SIZES)
def test_other_ways_to_share_a_sequence_are_refused(here, monkeypatch, name):
    said = f"accelerate's ParallelismConfig has {name}=2, .* use cosformer train --sequence-parallel 2"
    given = ParallelismConfig(dp_shard_size=2, **{name: 2})
    with pytest.raises(train.SettingsError, match=said):  # to the Trainer
        go(small_run(training={"parallelism_config": given}))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")  # by `accelerate launch`
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}", "2")
    with pytest.raises(train.SettingsError, match=said):
        go(small_run())
    assert not Path("run").exists() or not any(Path("run").glob("checkpoint-*"))


def command(folder: Path, *more: str):
    rest = ["--size", "toy", "--tokenizer", "bytes", "--length", "64", "--save_steps", "3", "--max_steps"]
    rest += ["12", "--eval_strategy", "no", "--learning_rate", "3e-3", "--report_to", "none"]
    given = ["--data", str(folder / "texts.jsonl"), "--sequence-parallel", "2", *rest, *more]
    return torchrun("-m", "cosformer", "train", "lm", *given)


def rank_of(pid: str) -> str | None:
    try:
        environment = Path("/proc", pid, "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return next((value.removeprefix("RANK=") for value in environment if value.startswith("RANK=")), None)


def process_of(group: int, rank: int) -> int:
    """The process of a rank among those torchrun started."""
    children = Path(f"/proc/{group}/task/{group}/children").read_text().split()
    return next(int(pid) for pid in children if rank_of(pid) == str(rank))


def wait_for_checkpoint(process, out: Path) -> None:
    deadline = time.monotonic() + 120
    while not any(out.glob("checkpoint-*/trainer_state.json")) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


class Dies(TrainerCallback):
    """As if a process had died while the first wrote the checkpoint of this step."""

    def __init__(self, first: bool):
        self.first = first

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            (half := Path(args.output_dir, "checkpoint-5")).mkdir()
            (half / "model.safetensors").write_text("half")
            raise Lost("rank 0 of 2 does not answer", first=self.first)


@pytest.mark.parametrize("first", [True, False])
def test_the_first_that_lives_leaves_nothing_half_written(here, first):
    with pytest.raises(train.Stopped, match="rank 0 of 2 does not answer; --resume goes on from .*-4"):
        go(small_run(), watch=Dies(first))
    assert Path("run/checkpoint-5").exists() is not first
    go(small_run(), resume=True)
    assert checkpoints()[-1] == "checkpoint-6"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds a rank's process in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_does_not_answer_is_named(tmp_path, how, rank):
    two_sets(tmp_path)
    out = tmp_path / "run"
    process = command(tmp_path, "--out", str(out), "--max_steps", "100000", "--ddp_timeout", "15")
    wait_for_checkpoint(process, out)
    os.kill(process_of(process.pid, rank), how)
    said, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert f"rank {rank} of 2 does not answer: it died or hangs" in said, said
    checkpoints(out)  # all that are left are whole; there is none if the first was under way
    assert not any((out / name).exists() for name in ("model.safetensors", "result.json"))


def die_in_the_end(folder: Path) -> None:
    """The last process dies when the trained model is to be scored."""
    scored = train.run.result_of
    with patch.object(
        train.run, "result_of", lambda *a, **o: os._exit(1) if dist.get_rank() else scored(*a, **o)
    ):
        train.train(replace(run_of(folder, "mlm", processes=2), out=str(folder / "run")))


@pytest.mark.slow
def test_a_process_that_dies_after_the_last_step_is_named(tmp_path):
    two_sets(tmp_path)
    process = torchrun(__file__, str(tmp_path), "die")
    said, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "rank 1 of 2 does not answer: it died or hangs" in said, said
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_it_goes_on_after_a_kill(tmp_path):
    two_sets(tmp_path)
    whole, out = tmp_path / "whole", tmp_path / "run"
    said, _ = (process := command(tmp_path, "--out", str(whole))).communicate(timeout=200)
    assert process.returncode == 0, said
    process = command(tmp_path, "--out", str(out))
    wait_for_checkpoint(process, out)
    workers = [process_of(process.pid, rank) for rank in (0, 1)]
    for pid in (process.pid, *workers):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    said, _ = (process := command(tmp_path, "--out", str(out), "--resume")).communicate(timeout=200)
    assert process.returncode == 0, said
    a, b = (load_file(folder / "model.safetensors") for folder in (out, whole))
    for name in a:
        assert torch.equal(a[name], b[name]), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    (die_in_the_end if sys.argv[2:] else work)(Path(sys.argv[1]))
