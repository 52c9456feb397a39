"""The benches run, check before they report, and the tables of docs/speed.md come from the committed results."""

import json
import math
from pathlib import Path

import pytest
import torch

from cosformer import bench, report
from cosformer.bench import mixers, operators

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_operators(tmp_path, capsys):
    out, plot = tmp_path / "deep" / "results.jsonl", tmp_path / "cost.png"
    short = [
        "--lengths",
        "64",
        "128",
        "--heads",
        "2",
        "--sizes",
        "8",
        "--seconds",
        "0.1",
        "--decay",
        "--threads",
        "1",
    ]
    bench.main([*short, "--out", str(out), "--plot", str(plot)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = {r["operator"] for r in rows}
    assert {"softmax", "published", "cosformer torch"} <= names
    assert all(
        r["ms"] > 0 and r["low_ms"] <= r["ms"] <= r["high_ms"] and r["torch"] == torch.__version__
        for r in rows
    )
    assert all(r["error"] < 1e-4 for r in rows if r["operator"] != "softmax" and r["work"] != "step")
    assert all(
        r["memory_mib"] >= 0 for r in rows if r["work"] == "training" and r["causal"] and not r["decay"]
    )
    assert {r["length"] for r in rows if r["work"] == "step"} == {100, 100_000}
    assert plot.stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "forward + backward, causal" in printed
    assert "largest difference from the definition" in printed


def test_a_wrong_operator_gets_no_speed(monkeypatch):
    right = operators.published
    monkeypatch.setattr(operators, "published", lambda q, k, v, causal: 1.01 * right(q, k, v, causal))
    with pytest.raises(SystemExit, match="published differs from the definition"):
        bench.main(["--operators", "published", "--lengths", "32", "--work", "forward", "--seconds", "0.1"])


def test_mixers(tmp_path):
    out = tmp_path / "results.jsonl"
    asked = [
        "--mixers",
        "cosformer",
        "softmax",
        "bigbird",
        "--lengths",
        "64",
        "128",
        "256",
        "--seconds",
        "0.1",
        "--no-memory",
    ]
    bench.main([*asked, "--out", str(out), "--plot", str(tmp_path / "growth.png")])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(r["mixer"], r["length"]) for r in rows} == {
        (m, n) for m in ("cosformer", "softmax", "bigbird") for n in (64, 128, 256)
    }


def test_exponent():
    assert mixers.exponent([(n, 3.0 * n**1.5) for n in (1, 2, 4, 8, 16, 32)]) == pytest.approx(1.5)
    assert mixers.exponent([(n, 100.0 + n**2) for n in (1, 2, 400, 800, 1600, 3200)]) == pytest.approx(
        2, abs=0.01
    )
    assert math.isnan(mixers.exponent([(1, 1.0)]))


def test_models(tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "results.jsonl"
    bench.main(["--models", "--quick", "--lengths", "64", "--seconds", "0.1", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {r["what"] for r in rows} == {"training", "decoding"}
    assert {r["model"] for r in rows} == {"cosformer", "cosformer, no decay", "sdpa"}


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (["--operators", "fast"], "operator 'fast' is unknown"),
        (["--mixers", "fast"], "mixer 'fast' is unknown"),
    ],
)
def test_unknown_names(asked, match):
    with pytest.raises(SystemExit, match=match):
        bench.main(asked)


def test_the_tables_of_speed_come_from_the_committed_results(tmp_path):
    results = [ROOT / "benchmarks" / f"{name}.jsonl" for name in ("operators", "models")]
    page = tmp_path / "speed.md"
    page.write_text((ROOT / "docs" / "speed.md").read_text())
    report.main([*map(str, results), "--page", str(page)])
    assert page.read_text() == (ROOT / "docs" / "speed.md").read_text()


def test_report_refuses_what_is_not_a_result(tmp_path):
    bad, page = tmp_path / "bad.jsonl", tmp_path / "page.md"
    bad.write_text("{}\n{oops\n")
    page.write_text(f"{report.BEGIN}{report.END}")
    with pytest.raises(SystemExit, match="bad.jsonl:2: not a line of results"):
        report.main([str(bad), "--page", str(page)])
    page.write_text("nothing here")
    with pytest.raises(SystemExit, match="has no place for tables"):
        report.main([str(bad), "--page", str(page)])
