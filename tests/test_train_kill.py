"""kill -9 at any moment of a run: resuming never fails and ends, bit for bit, as if nothing had happened.

Run as a script this file is the driver: it imports once and forks a child for every attempt, before torch has
threads.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

KILLS = 20
STEPS = 24
SEED = 7


def run_of(out: Path):
    from cosformer import train

    rows = out.parent / "rows.csv"
    if not rows.exists():
        rows.write_text(
            "\n".join(["text,label", *(f"{'good' if i % 3 else 'bad'} {i},{i % 3 > 0}" for i in range(50))])
        )
    training = {
        "max_steps": STEPS,
        "save_steps": 1,
        "eval_steps": 1,
        "logging_steps": 3,
        "per_device_train_batch_size": 4,
    }
    training |= {
        "report_to": [],
        "seed": 1,
        "learning_rate": 1e-2,
    }  # 40 rows to train on: two epochs and a half
    fields = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    fields |= {"dropout": 0.1}  # the state of the random numbers must come back, too
    settings = {"length": 8, "data": str(rows), "cache": str(out.parent / "cache")}
    return train.Run(
        task="classify",
        out=str(out),
        size="toy",
        task_settings=settings,
        model_fields=fields,
        training=training,
    )


def child(out: Path) -> tuple[int, int]:
    """Train, or go on; the process id, and a pipe that says when training begins."""
    begun, tell = os.pipe()
    pid = os.fork()
    if pid:
        os.close(tell)
        return pid, begun
    from transformers import TrainerCallback

    from cosformer import train

    class Tell(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            os.write(tell, b".")

    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        train.train(run_of(out), resume=True, watch=Tell())
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def finish(out: Path) -> float:
    """Let a run end by itself; the seconds it trained."""
    pid, begun = child(out)
    os.read(begun, 1)
    start = time.monotonic()
    assert wait(pid) == 0
    os.close(begun)
    return time.monotonic() - start


def states(out: Path) -> str:
    """What a kill found: which checkpoint is last, and whether one was half written."""
    complete = sorted(int(p.parent.name.split("-")[1]) for p in out.glob("checkpoint-*/checksums.json"))
    half = sorted(p.name for p in out.glob("checkpoint-*") if not (p / "checksums.json").exists())
    return f"complete {complete}, half written {half}, finished {(out / 'result.json').exists()}"


def drive(folder: Path) -> None:
    import torch

    from cosformer import train

    torch.set_num_threads(1)
    train.quieten()
    took = finish(folder / "whole")
    rng, kills, runs, halves, failures = random.Random(SEED), 0, 0, 0, 0
    while kills < KILLS:
        out = folder / f"killed-{runs}"
        runs += 1
        while kills < KILLS:
            pid, begun = child(out)
            if rng.random() < 0.9:  # one in ten dies before it trains
                os.read(begun, 1)
            time.sleep(rng.uniform(0, 0.4) * took)
            os.kill(pid, signal.SIGKILL)
            code = wait(pid)
            os.close(begun)
            if code == 0:
                break
            kills += 1
            failures += code != -signal.SIGKILL
            halves += "half written []" not in states(out)
            print(f"kill {kills}: exit {code}, {states(out)}", flush=True)
        finish(out)
    print(
        json.dumps(
            {"runs": runs, "kills": kills, "half_written": halves, "failures": failures, "seconds": took}
        )
    )


def test_twenty_kills_and_every_run_ends_as_if_nothing_had_happened(tmp_path):
    import torch
    from safetensors.torch import load_file

    from cosformer.train.progress import read

    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    print(f"seed {SEED}\n{done.stdout}\n{done.stderr}")
    assert done.returncode == 0
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == KILLS and found["failures"] == 0, found
    assert found["half_written"] > 0, (
        "no kill met a checkpoint half written; the test is weaker than it should be"
    )

    whole, timed = tmp_path / "whole", ("seconds", "tokens_per_second")
    for out in (tmp_path / f"killed-{i}" for i in range(found["runs"])):
        for name in ("model.safetensors", f"checkpoint-{STEPS}/model.safetensors"):
            a, b = load_file(out / name), load_file(whole / name)
            assert all(torch.equal(a[key], b[key]) for key in b) and a.keys() == b.keys()
        rows, want = (
            [{k: v for k, v in row.items() if k not in timed} for row in read(o / "metrics.jsonl")]
            for o in (out, whole)
        )
        assert rows == want
        a, b = (json.loads((o / "result.json").read_text()) for o in (out, whole))
        assert {k: a[k] for k in a if k not in timed} == {k: b[k] for k in b if k not in timed}
        assert {p.name for p in out.glob("checkpoint-*")} == {p.name for p in whole.glob("checkpoint-*")}


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
