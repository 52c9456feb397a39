"""docs/train.md: every command runs, in order, in one folder, at toy size: TOY is appended to each."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from cosformer import tasks
from cosformer.__main__ import main
from cosformer.hf import CosformerEncoderConfig
from cosformer.train import models, settings

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "train.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
    for line in block.splitlines()
    if line
]
ALONE, TOGETHER = ([c for c in COMMANDS if c.startswith("torchrun") is many] for many in (False, True))
SMALL = ["--length", "32", "--test-examples", "2"]
TOY = shlex.split(
    "--size toy --max_steps 2 --per_device_train_batch_size 2 --eval-examples 2 --warmup_steps 0 "
    "--report_to none"
)
SHARDED = importlib.util.find_spec("cosformer.train.sharded") is not None


def toy(words: list[str]) -> list[str]:
    """A command of the page, made small; of a repeated argument the last counts."""
    verb = words[1]
    if verb == "generate":
        return [*words, "--max-new-tokens", "2"]
    if verb == "evaluate":
        return [*words, "--test-examples", "2"]
    if "--dry-run" in words:
        return words
    words = [re.sub(r"pretrain.max_steps=\d+", "pretrain.max_steps=2", word) for word in words]
    if words[2] == "listops":
        return [*words, *TOY, "--test-examples", "2", "--set", "task.examples=[20,4,4]"]
    size = TOY[2:] if verb == "finetune" else TOY  # a saved model has its size
    tokens = ["--tokenizer", "bpe:300"] if any(word.startswith("bpe:") for word in words) else []
    recipe = ["--data", "my-texts"] if "recipes/laptop/wikitext-lm.toml" in words else []
    return [*words, *recipe, *tokens, *size, *SMALL]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the page takes for granted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COSFORMER_CACHE", str(tmp_path / "cache"))
    for name in ("my-texts", "other-texts"):
        Path(name).mkdir()
        for split in ("train", "valid", "test"):
            Path(name, f"{split}.txt").write_text(
                f"The {split} text of {name}, not a long one, again.\n" * 20
            )
    rows = [(f"number {i}", f"the {i}th one", "yes" if i % 3 else "no") for i in range(60)]
    Path("reviews.csv").write_text(
        "\n".join(["text,label", *(f"{a} was {c},{c}" for a, b, c in rows)]) + "\n"
    )
    Path("no-header.csv").write_text(
        "\n".join([*(f"{c},{a} was {c}" for a, b, c in rows), "one field"]) + "\n"
    )
    Path("questions.tsv").write_text(
        "\n".join(["first\tsecond\tsame", *("\t".join(row) for row in rows)]) + "\n"
    )
    Path("ours.toml").write_text(re.search(r"^```toml\n(.*?)^```", PAGE, re.M | re.S).group(1))
    shutil.copytree(ROOT / "recipes", "recipes")
    return tmp_path


def test_every_command_of_one_process(folder, monkeypatch, capsys):
    assert len(ALONE) > 12
    for command in ALONE:
        words = toy(shlex.split(command))
        assert words[0] == "cosformer"
        monkeypatch.setattr(sys, "argv", words)
        main()
        capsys.readouterr()
        if words[1] in ("train", "finetune") and "--dry-run" not in words and "--out" in words:
            assert (folder / words[words.index("--out") + 1] / "result.json").exists(), command


@pytest.mark.skipif(not SHARDED, reason="several processes: with cosformer.train.sharded")
@pytest.mark.parametrize(
    "command", TOGETHER, ids=lambda command: "-".join(re.findall(r"--(fsdp|nnodes)", command)) or "ddp"
)
def test_every_command_of_several_processes(folder, command):
    words = toy(shlex.split(command)[shlex.split(command).index("-m") + 1 :])
    words = [*words, "--data", "my-texts", "--tokenizer", "bytes", "--set", "model.num_attention_heads=2"]
    given = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        *words,
    ]
    made = subprocess.run(line, env=given, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr[-2000:]


def test_the_documentation_has_the_defaults():
    page, size, rows = " ".join(PAGE.split()), models.SIZES[settings.Run.size], settings.ROWS
    steps, length = settings.DEFAULTS["max_steps"], tasks.settings("lm")["length"]
    assert f"{length} tokens in a row, {size.layers} layers of width {size.width}, {steps:,} steps" in page
    assert f"steps of {rows[0]} rows (of shorter texts more, up to {rows[1]})" in page
    *first, last = models.SIZES
    assert f"`--size` is {', '.join(first)} or {last};" in page
    assert CosformerEncoderConfig.pooling == "attention" and "`attention` (the default)" in page
