"""The command line as such: what it says about itself, and about what is missing."""

import subprocess
import sys

import pytest

import cosformer
from cosformer import __main__ as cli
from cosformer import bench, info


def said(capsys, monkeypatch, *argv: str) -> str:
    monkeypatch.setattr(sys, "argv", ["cosformer", *argv])
    try:
        cli.main()
    except SystemExit as stop:
        assert not stop.code, stop.code
    return capsys.readouterr().out


def test_version(capsys, monkeypatch):
    assert said(capsys, monkeypatch, "--version") == f"cosformer {cosformer.__version__}\n"
    ran = subprocess.run(
        [sys.executable, "-m", "cosformer", "--version"], capture_output=True, text=True, check=True
    )
    assert ran.stdout == f"cosformer {cosformer.__version__}\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["nonsense"]])
def test_what_needs_no_torch_does_not_wait_for_it(words):
    code = "import sys, cosformer.__main__ as c\ntry: c.main()\nfinally: assert 'torch' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    if words == ["nonsense"]:
        assert ran.stderr.startswith("cosformer: unknown verb 'nonsense'; one of compare, train"), ran.stderr
    else:
        assert ran.returncode == 0 and ran.stdout, ran.stderr


def test_public_names_are_there_when_asked_for():
    assert set(cosformer.__all__) < set(dir(cosformer))
    assert all(getattr(cosformer, name) is not None for name in cosformer.__all__)
    assert cosformer.State is cosformer.ops.State
    with pytest.raises(AttributeError, match="module 'cosformer' has no attribute 'nothing'"):
        _ = cosformer.nothing


def test_help_names_every_verb_and_option(capsys, monkeypatch):
    out = said(capsys, monkeypatch, "--help")
    assert out == said(capsys, monkeypatch) == said(capsys, monkeypatch, "-h")
    assert "--version" in out and all(f"\n  {verb} " in out for verb in cli.VERBS)


def test_info_has_help_and_takes_nothing_else(capsys, monkeypatch):
    out = said(capsys, monkeypatch, "info", "--help")
    assert "usage: cosformer info" in out and "backends" in out and "torch " not in out
    assert f"cosformer {cosformer.__version__}, torch " in said(capsys, monkeypatch, "info")
    with pytest.raises(SystemExit):
        info.main(["surplus"])


def test_every_bench_option_has_help_and_its_default():
    for action in bench.parser()._actions:
        assert action.help, action.option_strings
        silent = action.default in (None, False, "==SUPPRESS==")
        assert silent or "(default: " in action.help, f"{action.option_strings[0]} does not say its default"
    bench.parser().format_help()  # fails on a % that argparse does not know


def test_a_missing_library_is_named_with_what_brings_it(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'datasets'", name="datasets")

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    monkeypatch.setattr(sys, "argv", ["cosformer", "train"])
    with pytest.raises(
        SystemExit,
        match=r"cosformer train: datasets is missing; in the clone: pip install '\.\[train,report\]'",
    ):
        cli.main()
