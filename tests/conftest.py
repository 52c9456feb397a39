"""What every test shares: the backends to run on, fixed seeds, and fresh memory poisoned with NaN."""

import itertools
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from cosformer import results
from cosformer.ops import operator
from cosformer.ops.operator import BACKENDS, backend_problem, declared

settings.register_profile(
    "cosformer", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("cosformer")

_device_constructors()  # cached here: `with torch.device(...)` must know the torch.empty that is not poisoned
torch.set_num_threads(1)  # small tensors, and tests run in parallel; those about threads set their own


RUNNING = [name for name in BACKENDS if backend_problem(name) is None]
if only := os.environ.get("COSFORMER_TEST_BACKEND"):  # run the suite on one backend
    RUNNING = [name for name in RUNNING if name == only]
    assert RUNNING, f"COSFORMER_TEST_BACKEND={only}: {backend_problem(only)}"
    if only == "triton":
        import interpreter

        interpreter.serve()
BACKEND_DTYPES = [(name, dtype) for name in RUNNING for dtype in declared(name).dtypes]


def examples(count: int) -> int:
    """How many examples to try a property on: a quarter in Triton's interpreter, where one takes seconds."""
    return max(1, count // 4) if RUNNING == ["triton"] else count


def widest(name: str) -> torch.dtype:
    """The most exact dtype a backend runs."""
    return max(declared(name).dtypes, key=lambda dtype: dtype.itemsize)


def pytest_generate_tests(metafunc):
    """`backend` runs over the backends this machine has; `backend, dtype` over all pairs they declare."""
    names = metafunc.fixturenames
    if "backend" in names and "dtype" in names:
        metafunc.parametrize(
            ("backend", "dtype"),
            BACKEND_DTYPES,
            ids=[f"{name}-{dtype}".replace("torch.", "") for name, dtype in BACKEND_DTYPES],
        )
    elif "backend" in names:
        metafunc.parametrize("backend", RUNNING)


def pytest_report_header(config):
    missing = [f"{name} ({backend_problem(name)})" for name in BACKENDS if name not in RUNNING]
    return f"cosformer backends: {', '.join(RUNNING)}; not tested: {', '.join(missing) or 'none'}"


# Shows where a GPU would be waited for, without one.

WAITING = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "unique")


class Watch(TorchDispatchMode):
    """Fails where a GPU would be waited for, also inside our own operators, which are opaque to torch."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        assert name not in WAITING, f"{func} waits"
        assert not (name == "_to_copy" and kwargs.get("device") == torch.device("cpu")), "moved to the CPU"
        if func.namespace == "cosformer":
            run = operator._flat_backward if "backward" in name else operator._flat_forward
            with self:
                return run(*args)
        return func(*args, **kwargs)


# Rows of results as `compare` writes them, for the tests of the report. The numbers are made up.


def quality(mixer="cosformer", value: float | None = 7.9, **more) -> results.Quality:
    """One training, of a language model unless `more` says otherwise."""
    task = more.get("task", "lm")
    row = {
        "subject": more.get("title", task), "group": "lm", "task": task, "title": task, "data": "its data",
        "seed": 0, "size": "tiny (4 layers)", "length": 1024, "batch": 4, "steps": 400, "rate": 1e-3,
        "metric": "perplexity", "greater_is_better": False, "examples": 1000, "settings": {"length": 1024},
        "status": "done", "tokens": 1_638_400, "seconds": 95.2, "tokens_per_second": 17_200.0,
        "parameters": 1_843_200, "command": f"cosformer train {task} --mixer {mixer}",
    }  # fmt: skip
    return results.Quality(mixer=mixer, value=value, **{**row, **more})


def accuracy(mixer="cosformer", value: float | None = 0.9, **more) -> results.Quality:
    return quality(mixer, value, **{"metric": "accuracy", "greater_is_better": True, "group": "lra", **more})


def cost(mixer="cosformer", length=4096, ms=12.3, **more) -> results.Cost:
    row = {"what": "model", "work": "training", "causal": True, "ms_low": 0.97 * ms, "ms_high": 1.04 * ms}
    return results.Cost(mixer=mixer, length=length, ms=ms, **{**row, **more})


INVENTED = {
    "softmax": 1.3,
    "softmax+rope": 1.0,
    "cosformer-paper": 1.2,
    "cosformer": 0.98,
    "cosformer-hybrid": 0.9,
}


def invented() -> list[results.Row]:
    """Everything a report can show: seeds, a refusal, searches, positions, costs, matrices, exactness."""
    title = "WikiText-2 language model"
    text = {"task": "text", "title": "Text, IMDB bytes"}
    rows: list[results.Row] = [
        results.Machine(
            cpu="AMD EPYC",
            isa="avx2",
            threads=2,
            torch="2.13",
            cosformer="0.2",
            python="3.11",
            date="2026-11-16",
        ),
        results.Run(command="cosformer compare --full", started="2026-11-15T23:00:00Z", minutes=611.5),
        accuracy("performer", None, **text, status="refused", reason="no such form"),
    ]
    for mixer, factor in {**INVENTED, "relu": 1.25, "cosformer*3, softmax+rope": 0.95}.items():
        for seed in (0, 1, 2):
            scale = factor * (1 + 0.01 * seed)
            metrics = {"loss": 2 * scale, "perplexity": 8 * scale, "bits_per_byte": 2.9 * scale}
            curve = []
            for step in range(0, 401, 50):
                loss = scale * (2 + 50 / (step + 10))
                curve.append(
                    {"step": step, "tokens": 4096 * step, "seconds": step * scale, "eval_loss": loss}
                )
            more = {"title": title, "seed": seed, "metrics": metrics, "curve": curve}
            rows.append(quality(mixer, 8 * scale, **more, waited=0.3 if mixer == "relu" else 0.01))
            about = {"subject": title, "mixer": mixer, "seed": seed, "texts": 64}
            losses = [scale * (2 + 1 / (i + 1)) for i in range(4)]
            rows.append(results.Positions(**about, ends=[16, 64, 256, 1023], loss=losses))
    for mixer, factor in INVENTED.items():
        rows.append(accuracy(mixer, 0.5 / factor, **text, published=0.64, note="a quarter"))
        rows.append(accuracy(mixer, 0.1 + factor / 100, task="listops", title="ListOps", most_frequent=0.18))
        for length, pairs in ((64, 4), (64, 8), (128, 8), (128, 16), (128, 32)):
            more = {"title": f"Recall of {pairs} pairs in {length} tokens", "settings": {"pairs": pairs}}
            rows.append(accuracy(mixer, 0.6 / factor, group="recall", task="recall", length=length, **more))
        for rate in (1e-3, 2e-3, 4e-3):
            about = {
                "subject": title,
                "mixer": mixer,
                "seed": 0,
                "steps": 100,
                "command": "",
                "status": "done",
            }
            more = {"metric": "perplexity", "greater_is_better": False, "loss": 2 + rate}
            rows.append(results.Search(**about, **more, rate=rate))
        for length in (256, 512, 1024, 2048, 4096, 8192, 16384):
            slow = "softmax" in mixer
            ms = factor * (1 + (0.004 * length + 3e-6 * length**2 if slow else 0.0075 * length))
            about = {"size": "tiny (4 layers)", "waited": 0.2 if length == 512 else 0.0}
            rows.append(cost(mixer, length, ms, **about, memory_mib=8 + length / 60))
            kept = 8192 * length if slow else 524_288
            rows.append(cost(mixer, length, 1 + ms / 10, **about, work="decoding", cache_bytes=kept))
        matrix = [[0.9 ** (i - j) if j <= i else None for j in range(16)] for i in range(16)]
        picture = {"subject": title, "mixer": mixer, "layer": 3, "tokens": list("def rotate(x, a)")}
        rows.append(results.Picture(**picture, matrix=matrix))
    for mode in ("bidirectional", "causal", "stream"):
        about = {"backend": "native", "dtype": "float32", "mode": mode, "allowed": 1e-5}
        rows += [results.Exactness(**about, what=what, difference=1.2e-7) for what in ("output", "gradient")]
    return rows


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fills memory from torch.empty with NaN, so that an output element nobody writes shows."""

    def poisoned(make):
        def empty(*args, **kwargs):
            x = make(*args, **kwargs)
            plain = (
                type(x) is torch.Tensor
                and not x.is_meta
                and x.is_floating_point()
                and not torch.compiler.is_compiling()
            )
            return x.fill_(float("nan")) if plain else x

        return empty

    for owner, name in itertools.chain(
        ((torch, n) for n in ("empty", "empty_like", "empty_strided")),
        ((torch.Tensor, n) for n in ("new_empty", "new_empty_strided")),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


# Toy models and texts, for every test that needs one. transformers is imported only on use.

VOCAB = 61
TOY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOY_DECODER = {**TOY, "num_key_value_heads": 2}
TOY_ENCODER = {**TOY, "dropout": 0.0}
TOY_SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "init_std": 0.2,
    "dropout": 0.0,
}


def toy_config(model, **fields):
    """The configuration of one of our model classes at toy size."""
    config = model.config_class
    sizes = {"cosformer": TOY_DECODER, "cosformer_encoder": TOY_ENCODER}.get(config.model_type, TOY_SEQ2SEQ)
    return config(**{**sizes, **fields})


def toy_model(model, seed: int = 0, **fields):
    """A toy of one of our model classes, its weights moved off their initial values."""
    torch.manual_seed(seed)
    return moved(model(toy_config(model, **fields))).eval()


def moved(module, by: float = 0.1):
    """Moves every weight off its initial value: zeros and ones would hide mistakes."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p), alpha=by)
    return module


def token_ids(rows: int = 2, length: int = 17, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def toy_mixer(name, *, heads=4, head_dim=8, max_length=64, **options):
    """A mixer in float64, with the sizes of `qkv`."""
    from cosformer import mixers

    return mixers.build(name, heads=heads, head_dim=head_dim, max_length=max_length, **options).double()


def qkv(length, keys=None, *, batch=2, heads=4, kv_heads=None, dim=8, size=None, dtype=torch.float64, seed=0):
    """q (batch, heads, length, dim), k (batch, kv_heads, keys, dim), v (batch, kv_heads, keys, size)."""
    generator = torch.Generator().manual_seed(seed)
    keys, kv_heads, size = keys or length, kv_heads or heads, size or dim
    shapes = (batch, heads, length, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, size)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def byte_tokenizer():
    """A tokenizer of single bytes, with <pad> 0, <mask> 1 and <unk> 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "mask_token": "<mask>", "unk_token": "<unk>"}
    letters = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def python_of(page: Path) -> list[str]:
    """The Python blocks of a documentation page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """The test's own folder for prepared data."""
    monkeypatch.setenv("COSFORMER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Made-up files in the form of Long-Range Arena's, for the tasks and whatever trains on them.


def texts(folder):
    folder.mkdir()
    for split in ("train", "valid", "test"):
        lines = (f"Line {i} of the {split} texts: {i * i} is the square of {i}.\n" for i in range(100))
        (folder / f"{split}.txt").write_text("".join(lines))
    return folder


def imdb(folder):
    folder.mkdir()
    for split in ("train", "test"):
        lines = [
            f'{i % 2}\t{i % 10}\t{i}\tA "{split}" film, {"great" if i % 2 else "dull"}. {"x" * (i * 40)}\n'
            for i in range(30)
        ]
        (folder / f"{split}.tsv.xz").write_bytes(lzma.compress("".join(lines).encode()))
    return folder


def aan(folder):
    folder.mkdir()
    for split in ("train", "eval", "test"):
        lines = [f"{i % 2}.0\tP{i}\tQ{i}\tpaper {i} in {split}\tanother paper {i}\n" for i in range(12)]
        (folder / f"new_aan_pairs.{split}.tsv").write_text("".join(lines))
    return folder


def cifar(folder, form="binary", count=20):
    """The same made-up images in either form; channels equal, so that grey is exact."""
    folder.mkdir()
    for name, seed in [*((f"data_batch_{i}", i) for i in range(1, 6)), ("test_batch", 6)]:
        rng = np.random.default_rng(seed)
        grey, labels = (
            rng.integers(0, 256, (count, 1024), dtype=np.uint8),
            rng.integers(0, 10, count, dtype=np.uint8),
        )
        colour = np.tile(grey, 3)
        if form == "binary":
            np.concatenate([labels[:, None], colour], 1).tofile(folder / f"{name}.bin")
        else:
            from PIL import Image

            stem = "test" if name == "test_batch" else f"train_{name[-1]}"
            Image.fromarray(grey.reshape(-1, 32)).save(folder / f"{stem}.png")
            with open(folder / f"{stem[:5].rstrip('_')}_labels.u8", "ab") as file:
                labels.tofile(file)
    return folder


# A run that takes a second, for every test of training.

FEW = [24, 8, 8]
COPY = {"length": 8, "examples": FEW}
LISTOPS = {"length": 32, "least": 4, "depth": 3, "args": 3, "examples": FEW}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Runs go to a folder of their own; prepared data is shared by the tests of a process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COSFORMER_CACHE", str(tmp_path.parent / "cache"))


def run_of(task="copy", out="run", **changes):
    from cosformer.train import Run

    training = {"max_steps": 6, "eval_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4}
    training |= {"report_to": []} | changes.pop("training", {})
    changes.setdefault("eval_examples", 8)  # all there are
    settings = changes.pop("task_settings", COPY if task == "copy" else {})
    return Run(task=task, out=out, size="toy", task_settings=settings, training=training, **changes)


def go(run=None, *, watch=None, resume=False):
    """Train, without a bar."""
    from transformers import TrainerCallback

    from cosformer.train import train

    return train(run or run_of(), watch=watch or TrainerCallback(), resume=resume)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    go(run_of(out=str(out)))
    return out


def complaint(capsys, verb, *argv: str) -> str:
    """The one line a command stops with; on a busy machine another may say that data is being prepared."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        verb(list(argv))
    line = re.sub(r"^preparing .*\n", "", capsys.readouterr().err) or str(stop.value.code)
    assert stop.value.code and line.rstrip().count("\n") == 0, line
    return line


def weights(folder) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def same(a, b) -> bool:
    """Whether two folders hold the same model, bit for bit."""
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def losses(out="run", key="loss") -> dict[int, float]:
    """What a run logged, by step."""
    from cosformer.train.progress import read

    return {row["step"]: row[key] for row in read(Path(out) / "metrics.jsonl") if key in row}


def steps(out="run", key="loss") -> list[int]:
    """The steps at which a run logged `key`."""
    from cosformer.train.progress import read

    return [row["step"] for row in read(Path(out) / "metrics.jsonl") if key in row]


def checkpoints(out="run") -> list[str]:
    """The names of a run's checkpoints, all of which must be whole."""
    from cosformer.seal import damage, is_sealed

    assert all(is_sealed(path) and damage(path) is None for path in Path(out).glob("checkpoint-*"))
    return sorted(path.name for path in Path(out).glob("checkpoint-*"))


def Signal(step: int, number: int = signal.SIGINT, times: int = 1):
    """A callback that sends the process a signal in a step, once or several times."""
    from transformers import TrainerCallback

    class Signal(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step + 1 == step:
                for _ in range(times):
                    os.kill(os.getpid(), number)

    return Signal()


# Several processes together.


def two_sets(folder: Path) -> None:
    """Texts of several lengths, texts.jsonl, and labelled rows, rows.csv."""
    texts = [f"row {i}: " + "abc de fgh. " * (1 + i % 7) for i in range(150)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    rows = [f"number {i} was {'good' if i % 3 else 'bad'},{'yes' if i % 3 else 'no'}" for i in range(150)]
    (folder / "rows.csv").write_text("\n".join(["text,label", *rows]))


def torchrun(*command: str, processes: int = 2) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program += ["--nproc-per-node", str(processes), *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(program, env=environment, start_new_session=True, **pipes)


class Cases:
    """Cases that processes run together: functions of a process group, of each pair and of all processes.

    The processes are started once per test file, which is also their program; each reports what went wrong
    in each case. A failure ends its process, and so all later cases: others would wait for it.
    """

    def __init__(self):
        self.names = {}

    def add(self, *settings):
        """Adds a function of a group and a setting, run once per setting (none: once, with None)."""

        def add(function):
            for setting in settings or (None,):
                name = function.__name__ if setting is None else f"{function.__name__}-{setting}"
                self.names[name] = (function, setting)
            return function

        return add

    def run(self, program: str, folder: Path, *, world: int) -> Path:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        started = [
            subprocess.Popen([sys.executable, program, str(folder), str(world), str(rank)], env=environment)
            for rank in range(world)
        ]
        for process in started:
            process.wait(timeout=300)
        return folder

    def work(self) -> None:
        torch.set_num_threads(1)
        folder, world, rank, soon = Path(sys.argv[1]), *map(int, sys.argv[2:]), timedelta(seconds=30)
        given = {"rank": rank, "world_size": world, "timeout": soon}
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", **given)
        pairs = [dist.new_group([2 * i, 2 * i + 1], timeout=soon) for i in range(world // 2)]
        groups = {2: pairs[rank // 2], world: dist.group.WORLD}
        for name, (function, setting) in self.names.items():
            for size, group in groups.items():
                try:
                    function(group, setting)
                    (folder / f"{rank}-{name}-{size}").write_text("")
                except Exception:
                    (folder / f"{rank}-{name}-{size}").write_text(traceback.format_exc())
                    os._exit(1)
        dist.destroy_process_group()

    def check(self, said: Path, name: str, *, size: int, world: int) -> None:
        files = [said / f"{rank}-{name}-{size}" for rank in range(world)]
        wrong = [path.read_text() for path in files if path.exists()]
        assert not any(wrong), "\n".join(wrong)
        assert len(wrong) == world, "an earlier case failed"


def pytest_collection_modifyitems(items):
    """Tests that take minutes start first: started last, they keep one core busy while the other idles."""
    long = ("interpreter", "compile", "launch")
    items.sort(
        key=lambda item: (
            not (item.fspath.basename.startswith("test_triton") and any(w in item.name for w in long))
        )
    )
