"""cosformer compare: cells are run once, in any order of interruptions, with the same losses; what it measures is so."""

import dataclasses
import json
import math

import pytest
import torch

from cosformer import compare, reference, tasks
from cosformer.bench import exactness
from cosformer.compare import budget, pictures, plan
from cosformer.compare import quality as quality_of
from cosformer.report.results import check
from cosformer.train import models

TOY = plan.Subject(
    name="copy",
    group="toy",
    title="Copying",
    data="generated",
    task="copy",
    task_settings={"length": 16, "examples": [64, 16, 16]},
    size="toy",
    training=plan.fast(1e-3, 4),
    eval_examples=8,
    test_examples=8,
)
MIXERS = ["softmax+rope", "cosformer-paper", "linformer"]


def run(out, *, subjects=(TOY,), mixers=MIXERS, **options):
    options = {"minutes": 0.01, "steps": 4, "lengths": [256], **options}
    return compare.compare(list(subjects), mixers, out=out, **options)


@pytest.fixture
def only_quality(monkeypatch):
    """Leave the measurements out: `finished` has them, and they start processes."""
    monkeypatch.setattr(compare, "measure", lambda *args, **kwargs: None)


def quality(rows):
    return {(row["mixer"], row["seed"]): row for row in rows if row["kind"] == "quality"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished comparison, and what it returned."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("compare")
    return out, run(out)


def test_every_cell_has_a_row_and_a_refusal_its_reason(finished):
    out, rows = finished
    cells = quality(rows)
    assert {mixer for mixer, _ in cells} == set(MIXERS)
    refused = cells.pop(("linformer", 0))
    assert refused["status"] == "refused" and "mixture of all positions" in refused["reason"]
    for row in cells.values():
        assert (
            row["status"] == "done"
            and row["metric"] == "accuracy"
            and row["value"] == row["metrics"]["accuracy"]
        )
        assert row["tokens"] == 4 * 4 * 16 and row["parameters"] > 50_000 and row["seconds"] > 0
        assert [p["step"] for p in row["curve"] if "value" in p] == [0, 1, 2, 3, 4]
        assert all(math.isfinite(p["loss"]) for p in row["curve"] if "loss" in p)
        assert "--max_steps 4" in row["command"] and "task.length=16" in row["command"]
    assert [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()] == rows
    assert not list(out.glob("cells/*/checkpoint-*"))


def test_the_other_rows_are_there(finished):
    _, rows = finished
    assert {(r["mixer"], r["work"]) for r in rows if r["kind"] == "cost"} == {
        (mixer, work) for mixer in ("softmax+rope", "cosformer-paper") for work in ("training", "decoding")
    }
    for row in (r for r in rows if r["kind"] == "cost"):
        assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["memory_mib"] > 0 if row["work"] == "training" else row["cache_bytes"] > 0
    assert {r["what"] for r in rows if r["kind"] == "exactness"} == {"output", "gradient"}
    assert rows[-1]["kind"] == "run" and rows[-1]["seeds"] == [0] and rows[-1]["torch"] == torch.__version__


def test_a_second_start_repeats_nothing(finished, capsys):
    out, rows = finished
    before = (out / "results.jsonl").read_text()
    again = run(out)
    assert (out / "results.jsonl").read_text().startswith(before)
    assert [row["kind"] for row in again[len(rows) :]] == ["run"]
    assert "3 of 3 cells are done already" in capsys.readouterr().out


def test_mixers_are_added_to_a_comparison(finished, only_quality):
    out, rows = finished
    again = run(out, mixers=[*MIXERS, "elu"])
    assert [(r["kind"], r.get("mixer")) for r in again if r not in rows and r["kind"] == "quality"] == [
        ("quality", "elu")
    ]


class Killed(BaseException):
    """As sudden as a kill: nothing of ours catches it."""


@pytest.mark.parametrize("moment", range(6))
def test_killed_at_any_moment_it_finishes_with_the_same_losses(
    finished, only_quality, tmp_path, monkeypatch, moment
):
    want = quality(finished[1])
    steps = 0

    def die(self, *args, **kwargs):
        nonlocal steps
        steps += 1
        if steps == moment + 1:
            raise Killed

    with monkeypatch.context() as broken:
        broken.setattr(compare.Board, "on_step_end", die)
        with pytest.raises(Killed):
            run(tmp_path)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"kind": "quality", "mixer": "sof')  # the line it was writing
    got = run(tmp_path)
    lines = [(r["mixer"], r["seed"]) for r in got if r["kind"] == "quality"]
    assert sorted(lines) == sorted(set(lines)) and set(lines) == {(m, 0) for m in MIXERS}
    for key, row in quality(got).items():
        assert row.get("value") == want[key].get("value")
        losses = [
            [(p["step"], p.get("loss"), p.get("eval_loss")) for p in r.get("curve", [])]
            for r in (row, want[key])
        ]
        assert losses[0] == losses[1]


def test_another_comparison_in_the_same_folder_is_refused(finished):
    with pytest.raises(ValueError, match="holds another comparison of copy; choose another --out"):
        run(finished[0], subjects=[dataclasses.replace(TOY, size="tiny")])
    with pytest.raises(ValueError, match="holds another comparison of copy"):
        run(finished[0], steps=5)


def test_seeds_are_different_runs(tmp_path, only_quality):
    cells = quality(run(tmp_path, mixers=["cosformer"], seeds=2, steps=2))
    assert set(cells) == {("cosformer", 0), ("cosformer", 1)}
    assert cells["cosformer", 0]["curve"][0]["eval_loss"] != cells["cosformer", 1]["curve"][0]["eval_loss"]


def test_a_subject_starts_from_the_model_of_another(tmp_path, only_quality):
    said = [f"number {i} is {'odd' if i % 2 else 'even'}" for i in range(600)]
    (tmp_path / "texts.csv").write_text(
        "text,label\n" + "\n".join(f"{line},{i % 2}" for i, line in enumerate(said[:60]))
    )
    (tmp_path / "texts.txt").write_text("\n".join(said))
    shared = {"title": "", "data": "ours", "group": "finetune", "size": "toy", "training": plan.fast(1e-3, 4)}
    shared |= {"eval_examples": 4, "test_examples": 4}
    texts, table = (
        {"data": str(tmp_path / name), "length": 64, "holdout": 0.2} for name in ("texts.txt", "texts.csv")
    )
    first = plan.Subject(name="before", task="mlm", task_settings=texts, **shared)
    then = plan.Subject(name="after", task="classify", task_settings=table, after="before", **shared)
    rows = run(tmp_path / "out", subjects=[first, then], mixers=["cosformer"], steps=2)
    assert [r["status"] for r in rows if r["kind"] == "quality"] == ["done", "done"]
    assert "--start before-cosformer-0" in next(r["command"] for r in rows if r.get("subject") == "after")


def test_a_model_that_could_not_be_trained_is_not_started_from(tmp_path, monkeypatch, only_quality):
    real = compare.cell

    def diverges(subject, *args, **kwargs):
        if subject.name == "first":
            return {
                "kind": "quality",
                "subject": "first",
                "mixer": "elu",
                "seed": 0,
                "status": "failed",
                "reason": "the loss is nan",
            }
        return real(subject, *args, **kwargs)

    monkeypatch.setattr(compare, "cell", diverges)
    subjects = [dataclasses.replace(TOY, name="first"), dataclasses.replace(TOY, name="then", after="first")]
    *_, row, _ = run(tmp_path, subjects=subjects, mixers=["elu"])
    assert (row["subject"], row["status"], row["reason"]) == (
        "then",
        "failed",
        "first left no model to start from",
    )


def test_speed_counts_tokens_not_lines(tmp_path):
    """A thousand long tokens at 10 a second and ten short ones at 1,000: the median line would say what hardly any token had."""
    lines = [
        {"tokens": n, "tokens_per_second": s} for n, s in ((5, 1_000.0), (1_005, 10.0), (1_010, 1_000.0))
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(json.dumps(line) for line in [*lines, {"tokens": 1_010, "eval_loss": 1.0}]) + "\n"
    )
    assert quality_of.speed_of(str(tmp_path)) == pytest.approx(1_010 / (5 / 1_000 + 1_000 / 10 + 5 / 1_000))


# What fits the time.


def test_steps_that_fit_keep_the_budget_and_are_round():
    seconds = {"a": 0.1, "b": 0.3}
    subject = dataclasses.replace(TOY, eval_examples=8, test_examples=16)
    found = [budget.steps_that_fit(subject, seconds, room) for room in (0, 10, 60, 600, 1e9)]
    assert found == sorted(found) and set(found) <= set(budget.STEPS)
    assert found[0] == budget.STEPS[0] and found[-1] == budget.STEPS[-1]
    for room, steps in zip((60, 600), found[2:4]):
        assert steps * sum(seconds.values()) <= room < 2.2 * steps * sum(seconds.values()) + 20
    assert budget.steps_that_fit(dataclasses.replace(subject, most_steps=100), seconds, 1e9) == 100


@pytest.mark.parametrize(("slower", "steps"), [(1.0, 400), (1.4, 400), (1.6, 200), (4.0, 100)])
def test_a_machine_that_grows_slow_trains_what_has_not_begun_for_fewer_steps(
    slower, steps, monkeypatch, capsys, tmp_path, only_quality
):
    """Planned at a tenth of a second a step; then the first subject's cells take `slower` times what was expected."""
    clock, trained = [0.0], []
    monkeypatch.setattr(budget.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(budget, "seconds_a_step", lambda *args: 0.1)

    def cell(subject, mixer, seed, *, steps, **rest):
        clock[0] += slower * budget.cell_seconds(
            subject, 0.1, steps
        )  # what was reckoned with when the steps were chosen
        trained.append((subject.name, mixer, steps))
        return {
            "kind": "quality",
            "subject": subject.name,
            "mixer": mixer,
            "seed": seed,
            "status": "refused",
            "reason": "invented",
        }

    monkeypatch.setattr(compare, "cell", cell)
    subjects = [dataclasses.replace(TOY, name=name) for name in ("first", "second")]
    run(tmp_path, subjects=subjects, mixers=["softmax", "elu"], minutes=4, steps=None)
    planned = trained[0][2]
    assert planned == 400 and trained[:2] == [("first", "softmax", planned), ("first", "elu", planned)]
    assert trained[2:] == [("second", "softmax", steps), ("second", "elu", steps)]
    assert json.loads((tmp_path / "plan.json").read_text())["second"]["steps"] == steps
    told = f"second: {steps} steps instead of 400; the machine is {slower / budget.STARTING:.1f}x slower than planned"
    assert (told in capsys.readouterr().out) == (steps < planned)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--full"], "--full needs --data"),
        (["--tasks", "lm", "poetry"], "--tasks poetry: one of lm, listops, recall"),
        (["--mixers", "softmax", "nobody"], "mixer is 'nobody'; one of cosformer"),
        (["--mixers", "softmax+sine"], "after \\+ only rope is known"),
        (["--full", "--data", "nowhere"], "nowhere/wikitext-2"),
        (["--minutes", "0"], "--minutes is 0; it must be more"),
        (["--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(argv, said, tmp_path):
    with pytest.raises(SystemExit, match=said):
        compare.main([*argv, "--out", str(tmp_path / "out")])


# Pictures and exactness.


@pytest.mark.parametrize("mixer", ["softmax", "softmax+rope", "cosformer-paper", "cosformer", "elu"])
def test_a_picture_shows_weights(mixer):
    task = tasks.build("copy", length=16, examples=(4, 4, 4))
    model = models.build(task, mixer=mixer, size="toy")
    found = pictures.matrices(model, task.test[0]["input_ids"][None], 1)
    assert found.shape == (2, 16, 16) and found.min() >= 0
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 16), rtol=1e-4, atol=1e-4)
    assert torch.equal(found, found.tril())


def test_a_row_of_a_picture_is_one_the_report_takes(finished):
    out, _ = finished
    task = tasks.build("copy", length=16, examples=(4, 4, 4))
    rows = pictures.rows("copy", task, "cosformer-paper", str(out / "cells" / "copy-cosformer-paper-0"))
    assert [row["figure"] for row in rows] == ["trained", "paper"]
    found = check(json.loads(json.dumps(rows)))
    assert len(found.pictures) == 2 and not found.skipped


def test_the_report_takes_every_row(finished):
    found = check(finished[1])
    assert not found.skipped and len(found.quality) == 3 and found.cost and found.exactness and found.runs


def test_the_picture_of_the_paper_is_the_definition():
    task = tasks.build("copy", length=16, examples=(4, 4, 4))
    model = models.build(task, mixer="cosformer-paper", size="toy").eval()
    seen = {}
    attention = model.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda m, a, out: seen.update(q=out))
    attention.k_proj.register_forward_hook(lambda m, a, out: seen.update(k=out))
    found = pictures.matrices(model, task.test[0]["input_ids"][None], 0)
    q, k = (seen[name].unflatten(-1, (2, -1)).transpose(1, 2) for name in "qk")
    want = reference.weights(q, k, horizon=16, causal=True)[0]
    torch.testing.assert_close(found, want / want.sum(-1, keepdim=True), rtol=1e-4, atol=1e-5)


def test_exactness_sees_a_wrong_backend(monkeypatch):
    assert all(0 <= row["difference"] <= row["allowed"] for row in exactness.rows())
    right = exactness.cosformer_attention
    monkeypatch.setattr(
        exactness, "cosformer_attention", lambda *x, horizon, **o: right(*x, horizon=1.01 * horizon, **o)
    )
    wrong = [row for row in exactness.rows() if row["mode"] != "stream"]
    assert wrong and all(row["difference"] > row["allowed"] for row in wrong)


def test_measurements_are_taken_where_they_are_missing(finished, monkeypatch):
    """A kill between two rows, a mixer or a length that came later: the rest is measured, nothing twice."""
    out, _ = finished
    results = compare.Results(out / "results.jsonl")
    results.rows = [row for row in results.rows if row["kind"] != "exactness"]
    asked = []
    monkeypatch.setattr(results, "add", results.rows.append)
    monkeypatch.setattr(compare.exactness, "rows", lambda: [{"kind": "exactness"}])
    for work in ("training", "decoding"):
        say = lambda mixers, lengths, work=work, **_: asked.append((work, mixers, lengths)) or []
        monkeypatch.setattr(compare.cost, work, say)
    again = lambda mixers, lengths: compare.measure(
        results, mixers, [TOY], out=out, lengths=lengths, seconds=1.0, board=compare.Board()
    )
    again(MIXERS, [256])
    assert not asked and {"kind": "exactness"} in results.rows
    again(MIXERS, [256, 512])
    assert asked == [(work, MIXERS[:2], [512]) for work in ("training", "decoding")]
    again([*MIXERS, "elu"], [256])
    assert asked[2:] == [("training", [*MIXERS[:2], "elu"], [256])]


def test_a_text_of_a_few_rows_is_enough(tmp_path):
    (tmp_path / "a.txt").write_text("a few words, again and again. " * 60)
    subject = plan.demo(str(tmp_path / "a.txt"), 64)[0]
    assert budget.seconds_a_step(subject, subject.build(), "cosformer") > 0


def test_a_subject_has_begun_when_a_run_of_it_has(tmp_path):
    results = compare.Results(tmp_path / "results.jsonl")
    asked = lambda: compare.is_begun(TOY, MIXERS, 2, results, out=tmp_path)
    assert not asked()
    folder = compare.folder_of(TOY, MIXERS[1], 1, out=tmp_path)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")  # interrupted: no row yet, but its number of steps is fixed
    assert asked()


def test_a_step_is_timed_on_batches_like_those_of_the_training():
    """Grouped by length: of neighbours in length, from the longer half; else as they come."""
    grouped = dataclasses.replace(TOY, training=plan.fast(1e-3, 4, **plan.ALIKE))
    task, seen = TOY.build(), []
    batch = task.collate([task.train[i] for i in range(4)])
    rows = [{"input_ids": torch.arange(2 + 5 * i % 32)} for i in range(32)]

    def collate(rows):
        seen.append(sorted(len(row["input_ids"]) for row in rows))
        return batch

    made = dataclasses.replace(task, train=rows, collate=collate)
    budget.seconds_a_step(grouped, made, "elu")
    budget.seconds_a_step(TOY, made, "elu")
    assert seen[:3] == [list(range(n, n + 4)) for n in (18, 22, 26)]
    assert seen[3:] == [sorted(len(row["input_ids"]) for row in rows[n : n + 4]) for n in (0, 4, 8)]
