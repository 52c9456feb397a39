"""Faults on purpose: kill -9 at random moments and damage in the newest checkpoint, in one process and in
two; full disks; changed data. A run ends, bit for bit, as if nothing had happened, or with a clear line.

Run as a script this file is the driver: it imports once and forks a child for every attempt, before torch has
threads. A child runs the command line as a user would.
"""

import builtins
import errno
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import Signal, checkpoints, complaint, go, run_of, same, steps
from transformers import TrainerCallback

from cosformer import generate, train
from cosformer.seal import files, is_sealed, seal, unseal
from cosformer.train import cli
from cosformer.train.progress import read

FAULTS = 20
TWO = 6  # of them, in two processes
STEPS = 12
TIMED = ("seconds", "tokens_per_second")
FILES = (
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "training_args.bin",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "checksums.json",
)
RUN = f"""classify --size toy --length 8 --max_steps {STEPS} --save_steps 1 --eval_steps 1 --logging_steps 3
--seed 1 --report_to none --learning_rate 1e-2 --set model.hidden_size=16 --set model.num_attention_heads=2
--set model.num_hidden_layers=1 --set model.intermediate_size=16 --set model.dropout=0.1 --resume""".split()


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def rows(folder: Path) -> Path:
    lines = (f"{'good' if i % 3 else 'bad'} {i},{i % 3 > 0}" for i in range(50))
    (folder / "rows.csv").write_text("\n".join(["text,label", *lines]))
    return folder / "rows.csv"


def argv(out: Path, processes: int) -> list[str]:
    batch = ["--per_device_train_batch_size", str(4 // processes)]
    return [*RUN, "--data", str(out.parent / "rows.csv"), "--out", str(out), *batch]


def children(out: Path, processes: int) -> list[int]:
    """Train, or resume; returns the process ids. Their output goes to a file beside the run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(processes):
        if pid := os.fork():
            pids.append(pid)
            continue
        code = 1
        try:
            if processes > 1:
                at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
                os.environ |= {name: str(v) for name, v in {**at, "RANK": rank, "LOCAL_RANK": rank}.items()}
            said = os.open(f"{out}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(said, stream)
            cli.train_verb(argv(out, processes))
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return pids


def finish(out: Path, processes: int) -> float:
    """Let a run end by itself; returns the seconds it took."""
    start = time.monotonic()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children(out, processes)]
    assert not any(codes), (codes, Path(f"{out}.said").read_text())
    return time.monotonic() - start


def newest(out: Path) -> Path | None:
    """Where a fault goes: the newest finished checkpoint, or the model of a finished run."""
    if (out / "checksums.json").exists():
        return out
    sealed = [path.parent for path in out.glob("checkpoint-*/checksums.json")]
    return max(sealed, key=lambda path: int(path.name.split("-")[1]), default=None)


def drive(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    chosen = rng.sample([(damage, name) for damage in (truncate, delete, flip) for name in FILES], FAULTS)
    found = {"kills": 0, "half": 0, "damaged": []}
    for processes, share in ((1, chosen[TWO:]), (2, chosen[:TWO])):
        took = finish(folder / f"whole-{processes}", processes)
        out = folder / f"faulty-{processes}"
        for damage, name in share:
            pids = children(out, processes)
            time.sleep(rng.uniform(0.15, 1) * took)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            killed = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            found["kills"] += -signal.SIGKILL in killed
            found["half"] += any(not (p / "checksums.json").exists() for p in out.glob("checkpoint-*"))
            place = newest(out)
            if place is None:
                continue
            file = place / (f"rng_state_{rng.randrange(2)}.pth" if processes == 2 and "rng" in name else name)
            if not file.exists():  # a finished model has no optimizer
                file = place / "model.safetensors"
            if not file.exists():  # the last fault deleted it, and a kill kept it from being remade
                continue
            damage(file, rng)
            found["damaged"].append([damage.__name__, place.name, file.name])
        finish(out, processes)
    print(json.dumps(found))


def check(folder: Path, seed: int) -> None:
    """After the driver's faults, what is left is what an undisturbed run leaves."""
    rows(folder)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["COSFORMER_CACHE"] = str(folder / "cache")
    command = [sys.executable, __file__, str(folder), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    said = {p: (folder / f"faulty-{p}.said").read_text() for p in (1, 2) if not done.returncode}
    print(done.stdout, done.stderr, *said.values(), sep="\n")
    assert done.returncode == 0
    found = json.loads(done.stdout.splitlines()[-1])
    # On a busy machine many kills come before the first checkpoint, which leave nothing to damage.
    assert found["kills"] > FAULTS / 4 and len(found["damaged"]) > FAULTS / 4
    assert all("Traceback" not in text for text in said.values())
    told = ("is skipped: ", "was finished, but ")  # of a checkpoint, and of a model
    assert sum(text.count(line) for text in said.values() for line in told) >= len(found["damaged"]) // 2
    for processes in (1, 2):
        out, whole = folder / f"faulty-{processes}", folder / f"whole-{processes}"
        for name in ("model.safetensors", f"checkpoint-{STEPS}/model.safetensors"):
            assert same((out / name).parent, (whole / name).parent)
        logged, want = (
            [{k: v for k, v in row.items() if k not in TIMED} for row in read(o / "metrics.jsonl")]
            for o in (out, whole)
        )
        assert logged == want
        a, b = (json.loads((o / "result.json").read_text()) for o in (out, whole))
        assert {k: a[k] for k in a if k not in TIMED} == {k: b[k] for k in b if k not in TIMED}


@pytest.mark.parametrize("seed", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in range(6))])
def test_kills_and_faults_leave_no_trace(tmp_path, seed):
    """Twenty of them; many more would hit a finished run."""
    check(tmp_path, seed)


# One fault at a time, and what is said about it


def stopped(step: int, run=None) -> None:
    """A run that was asked to stop after a step."""
    with pytest.raises(train.Interrupted):
        go(run, watch=Signal(step, signal.SIGTERM))


@pytest.mark.parametrize("fault", [truncate, delete, flip])
def test_the_newest_whole_checkpoint_is_taken_and_the_others_are_named(fault, here, whole, capsys):
    stopped(5)  # leaves two: that of step 5, and the best
    before = checkpoints()
    assert len(before) == 2 and before[-1] == "checkpoint-5"
    mine = Path("run/checkpoint-5-averaged")  # the user's own, which is left alone
    mine.mkdir()
    fault(Path("run/checkpoint-5/optimizer.pt"), random.Random(0))
    go(resume=True)
    assert mine.exists()
    mine.rmdir()
    found = {truncate: r"has [\d,]+ bytes instead of [\d,]+", delete: "is missing"}
    what = found.get(fault, "is not what was written")
    line = (
        rf"run/checkpoint-5 is skipped: optimizer.pt {what} \(now damaged-checkpoint-5\)\ngoing on from run/"
    )
    assert re.search(line + before[0], capsys.readouterr().err)
    assert json.loads(Path("run/resolved.json").read_text())["resumed_from"] == before[0]
    assert same("run", whole) and steps() == [1, 2, 3, 4, 5, 6]


def test_without_a_whole_checkpoint_a_run_begins_again(here, whole, capsys):
    stopped(2)
    for path in Path("run").glob("checkpoint-*/optimizer.pt"):
        path.unlink()
    go(resume=True)
    assert "no whole checkpoint is left: beginning again\n" in capsys.readouterr().err
    assert same("run", whole)


def test_a_damaged_best_is_not_gone_on_without(here, whole, capsys):
    """The last checkpoint alone would end with another model."""
    shutil.copytree(whole, "run")
    state = Path("run/checkpoint-6/trainer_state.json")
    best = json.loads(state.read_text())["best_global_step"]
    others = [path for path in Path("run").glob("checkpoint-*") if path.name != "checkpoint-6"]
    assert len(others) == 1
    if best == 6:  # make the older one the best
        best = int(others[0].name.split("-")[1])
        state.write_text(json.dumps(json.loads(state.read_text()) | {"best_global_step": best}))
        unseal(state.parent)
        seal(state.parent, files(state.parent))
    Path("run/model.safetensors").unlink()
    Path(f"run/checkpoint-{best}/config.json").unlink()
    told = (
        f"run/checkpoint-6 is whole, but of the best until then, checkpoint-{best}, config.json is missing; "
    )
    with pytest.raises(train.Stopped, match=f"{told}delete that one to go on without it, or begin again"):
        go(resume=True)
    assert len([*Path("run").glob("checkpoint-*")]) == 2, "nothing was changed"
    shutil.rmtree(f"run/checkpoint-{best}")
    assert go(resume=True)["steps"] == 6


def test_a_damaged_model_is_made_again_and_nothing_else_is_done_with_it(here, whole, capsys):
    shutil.copytree(whole, "run")
    truncate(Path("run/model.safetensors"), random.Random(0))
    what = r"model.safetensors has [\d,]+ bytes instead of [\d,]+"
    damaged = f"run is damaged: {what}"
    assert re.search(f"{damaged}; another checkpoint", complaint(capsys, cli.evaluate_verb, "run"))
    assert re.search(damaged, complaint(capsys, cli.finetune_verb, "run", "copy", "--out", "x"))
    line = complaint(capsys, cli.train_verb, "copy", "--start", "run", "--out", "x")
    assert re.search(f"cosformer train: {damaged}", line)
    shutil.copy("run/config.json", "run/tokenizer.json")  # for generate, which asks for one
    line = complaint(capsys, generate.main, "--model", "run", "--prompt", "abc")
    assert re.search(f"--model run is damaged: {what}; cosformer train --resume makes it again", line)
    result = go(resume=True)
    line = rf"run was finished, but {what}: the model is made again from the run's checkpoints\n"
    assert re.search(line, capsys.readouterr().err)
    assert same("run", whole) and result["test"] == json.loads((whole / "result.json").read_text())["test"]
    Path("run/checkpoint-6/optimizer.pt").unlink()  # what only training needs
    cli.evaluate_verb(["run/checkpoint-6"])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_model_that_nobody_sealed_is_a_line_too(here, name, capsys):
    Path("rows.csv").write_text(rows(Path(".")).read_text())
    settings = {"data": "rows.csv", "length": 16, "tokenizer": "bytes"}
    go(run_of("lm", task_settings=settings, training={"max_steps": 1}))
    unseal(Path("run"))
    os.truncate(f"run/{name}", 30)
    assert "run" in complaint(capsys, cli.evaluate_verb, "run")
    assert "--model run: " in complaint(capsys, generate.main, "--model", "run", "--prompt", "abc")


def test_what_a_run_knows_of_itself_is_damaged(here, capsys):
    stopped(3)
    resolved = Path("run/resolved.json").read_text()
    Path("run/resolved.json").write_text(resolved[:100])
    with pytest.raises(train.SettingsError, match="resolved.json cannot be read .*, so nobody knows"):
        go(resume=True)
    Path("run/resolved.json").write_text(resolved)
    truncate(Path("run/run.json"), random.Random(0))
    with pytest.raises(train.SettingsError, match="run.json is no run of this version"):
        go(resume=True)


def test_the_data_changed_under_a_run(here):
    def table(last: str) -> None:
        lines = [f"{'good' if i % 3 else 'bad'} {i},{i % 3 > 0}" for i in range(50)]
        Path("rows.csv").write_text("\n".join(["text,label", *lines, last]))

    run = run_of("classify", task_settings={"data": "rows.csv", "length": 8, "tokenizer": "bytes"})
    table("good,True")
    stopped(3, run)
    table("best,True")
    told = (
        "run was trained on other data: what --data names has changed since. Put it back to go on, or train"
    )
    with pytest.raises(train.SettingsError, match=told):
        go(run, resume=True)
    table("good,True")
    assert go(run, resume=True)["steps"] == 6


# A disk that is full, or can no longer be written to


class Limit(TrainerCallback):
    """From step 3 on, files of a given name, or above a given size, cannot be written."""

    def __init__(self, patch, what: str | int, error: int):
        self.patch, self.what, self.error = patch, what, error

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            if isinstance(self.what, int):
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (self.what, hard))
            else:
                for module in (builtins, io):
                    self.patch.setattr(module, "open", self.opened)

    def opened(self, path, mode="r", *args, _open=open, **kwargs):
        if self.what in str(path) and mode != "r" and "b" not in mode:
            with _open(path, mode) as half:
                half.write("{")
            raise OSError(self.error, os.strerror(self.error), str(path))
        return _open(path, mode, *args, **kwargs)


SIZES = {"model.safetensors": 0.5, "optimizer.pt": 1.5}  # limits, as multiples of the model's size


@pytest.mark.parametrize(
    "what", [*SIZES, "trainer_state.json", "checksums.json", "metrics.jsonl", "result.json", "checkpoint"]
)
def test_a_full_disk_stops_with_a_line_and_the_run_goes_on_when_there_is_room(what, here, whole, monkeypatch):
    size = int(SIZES.get(what, 0) * (whole / "model.safetensors").stat().st_size)
    error = errno.EROFS if what == "checkpoint" else errno.ENOSPC
    found = "File too large|is the disk full" if size else os.strerror(error)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        try:
            with pytest.raises(train.Stopped, match=f"({found}).*; --resume goes on from run/checkpoint-"):
                go(watch=Limit(patch, size or what, error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints() and not is_sealed(Path("run"))  # and every checkpoint is whole
    go(resume=True)
    assert same("run", whole) and steps() == [1, 2, 3, 4, 5, 6]


def test_a_thread_that_cannot_write_leaves_the_word_to_the_run(monkeypatch, capsys):
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    train.quieten()

    def fail(error):
        raise error

    for error in (OSError(errno.EROFS, "Read-only file system"), ValueError("a mistake")):
        thread = threading.Thread(target=fail, args=(error,))
        thread.start()
        thread.join()
    said = capsys.readouterr().err
    assert "Read-only" not in said and "a mistake" in said


if __name__ == "__main__":
    drive(Path(sys.argv[1]), int(sys.argv[2]))
