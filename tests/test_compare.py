"""cosformer compare: cells run once, with the same losses after any interruption, within the time given."""

import dataclasses
import json
import math
import shlex

import pytest
import torch

from cosformer import compare, reference, tasks, train
from cosformer.compare import budget, comparison, looks, plan, quality
from cosformer.compare.comparison import Comparison
from cosformer.compare.quality import TrainingCell
from cosformer.hf.pooling import POOLINGS
from cosformer.results import Cost, Exactness, Machine, Picture, Positions, Quality, Run, Search, of, read
from cosformer.train import cli, models

TOY = plan.Subject(
    name="copy",
    group="toy",
    title="Copying",
    data="generated",
    task="copy",
    settings={"length": 16, "examples": [64, 16, 16]},
    size="toy",
    batch=4,
    eval_examples=8,
    test_examples=8,
)
MIXERS = ["softmax+rope", "cosformer-paper", "linformer"]
KINDS = {"lm": "causal-lm", "recall": "causal-lm", "mlm": "masked-lm", "seq2seq": "seq2seq"}
KINDS |= dict.fromkeys(("listops", "text", "image", "classify"), "sequence-classification")


def run(out, *, subjects=(TOY,), mixers=MIXERS, seeds=None, steps=4, minutes=None):
    """Train what is missing; returns all rows."""
    made = Comparison(out, minutes=minutes)
    made.train(list(subjects), mixers, seeds=seeds, steps=steps)
    return made.end("cosformer compare")


def cells(rows):
    return {(row.mixer, row.seed): row for row in of(rows, Quality)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished comparison, and what it returned."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("compare")
    with pytest.MonkeyPatch.context() as short:
        short.setattr(comparison, "MOST_SECONDS", 0.2)
        Comparison(out, minutes=None).measure(MIXERS, [256])
    return out, run(out)


def test_every_cell_has_a_row_and_a_refusal_its_reason(finished):
    out, rows = finished
    found = cells(rows)
    assert {mixer for mixer, _ in found} == set(MIXERS)
    refused = found.pop(("linformer", 0))
    assert refused.status == "refused" and "mixture of all positions" in refused.reason
    for row in found.values():
        assert row.status == "done" and row.metric == "accuracy" and row.value == row.metrics["accuracy"]
        assert row.tokens == 4 * 4 * 16 and row.parameters > 50_000 and row.seconds > 0
        assert [p["step"] for p in row.curve if "value" in p] == [0, 1, 2, 3, 4]
        assert all(math.isfinite(p["loss"]) for p in row.curve if "loss" in p)
        assert "--max_steps 4" in row.command and "task.length=16" in row.command
        assert 0 <= row.waited <= 1 and row.learned is False  # four steps teach nothing
    assert read(out / "results.jsonl") == rows
    assert not list(out.glob("cells/*/checkpoint-*"))


def test_the_other_rows_are_there(finished):
    _, rows = finished
    assert {(row.mixer, row.work) for row in of(rows, Cost)} == {
        (mixer, work) for mixer in MIXERS[:2] for work in ("training", "decoding")
    }
    for row in of(rows, Cost):
        assert 0 < row.ms_low <= row.ms <= row.ms_high
        assert row.memory_mib > 0 if row.work == "training" else row.cache_bytes > 0
    assert {row.what for row in of(rows, Exactness)} == {"output", "gradient"}
    assert isinstance(rows[0], Machine) and rows[0].torch == torch.__version__ and isinstance(rows[-1], Run)


def test_a_second_start_repeats_nothing(finished, capsys):
    out, rows = finished
    before = (out / "results.jsonl").read_text()
    again = run(out)
    assert (out / "results.jsonl").read_text().startswith(before)
    assert [row.kind for row in again[len(rows) :]] == ["run"]
    assert "copy: 3 of 3 cells are done already" in capsys.readouterr().out


def test_mixers_are_added_to_a_comparison(finished):
    out, rows = finished
    added = [row.mixer for row in of(run(out, mixers=[*MIXERS, "elu"]), Quality) if row not in rows]
    assert added == ["elu"]


class Killed(BaseException):
    """As sudden as a kill: none of our code catches it."""


@pytest.mark.parametrize("moment", range(6))
def test_killed_at_any_moment_it_finishes_with_the_same_losses(finished, tmp_path, monkeypatch, moment):
    want = cells(finished[1])
    steps = 0

    def die(self, *args, **kwargs):
        nonlocal steps
        steps += 1
        if steps == moment + 1:
            raise Killed

    with monkeypatch.context() as broken:
        broken.setattr(comparison.Board, "on_step_end", die)
        with pytest.raises(Killed):
            run(tmp_path)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"kind": "quality", "mixer": "sof')  # the line it was writing
    got = run(tmp_path)
    lines = [(row.mixer, row.seed) for row in of(got, Quality)]
    assert sorted(lines) == sorted(set(lines)) and set(lines) == {(m, 0) for m in MIXERS}
    for key, row in cells(got).items():
        assert row.value == want[key].value
        losses = [[(p["step"], p.get("loss"), p.get("eval_loss")) for p in r.curve] for r in (row, want[key])]
        assert losses[0] == losses[1]


def test_another_comparison_in_the_same_folder_is_refused(finished):
    with pytest.raises(ValueError, match="holds another comparison of copy; choose another --out"):
        run(finished[0], subjects=[dataclasses.replace(TOY, size="tiny")], mixers=["elu", "relu"])
    with pytest.raises(ValueError, match="holds another comparison of copy"):
        run(finished[0], steps=5, mixers=["relu"])


def test_seeds_are_different_runs(tmp_path):
    found = cells(run(tmp_path, mixers=["cosformer"], seeds=[0, 3], steps=2))
    assert set(found) == {("cosformer", 0), ("cosformer", 3)}
    assert found["cosformer", 0].curve[0]["eval_loss"] != found["cosformer", 3].curve[0]["eval_loss"]


def test_a_subject_starts_from_the_model_of_another_and_reads_with_its_tokenizer(tmp_path):
    said = [f"number {i} is {'odd' if i % 2 else 'even'}" for i in range(600)]
    table = "text,label\n" + "\n".join(f"{line},{i % 2}" for i, line in enumerate(said[:60]))
    (tmp_path / "texts.csv").write_text(table)
    (tmp_path / "texts.txt").write_text("\n".join(said))
    first = dataclasses.replace(
        TOY, name="before", task="mlm", test_examples=4,
        settings={"data": str(tmp_path / "texts.txt"), "length": 64, "holdout": 0.2, "tokenizer": "bpe:300"},
    )  # fmt: skip
    then = dataclasses.replace(
        TOY, name="after", task="classify", test_examples=4, after="before", pretrain={"max_steps": 1},
        settings={"data": str(tmp_path / "texts.csv"), "length": 64, "holdout": 0.2, "tokenizer": "start"},
    )  # fmt: skip
    rows = run(tmp_path / "out", subjects=[first, then], mixers=["cosformer"], steps=2)
    assert [row.status for row in of(rows, Quality)] == ["done", "done"]
    last = of(rows, Quality)[-1]
    assert "--start before-cosformer-0" in last.command and "--pretrain-first" in last.command
    vocabulary = [
        models.AutoConfig.from_pretrained(tmp_path / "out" / "cells" / f"{name}-cosformer-0").vocab_size
        for name in ("before", "after")
    ]
    assert vocabulary == [300, 300]
    assert [row.subject for row in of(rows, Picture)] == ["before"]


def test_a_model_that_could_not_be_trained_is_not_started_from(tmp_path, monkeypatch):
    def diverges(run, **more):
        raise quality.train.NotFinite("the loss is nan at step 1; lower the rate")

    monkeypatch.setattr(quality.train, "train", diverges)
    subjects = [dataclasses.replace(TOY, name="first"), dataclasses.replace(TOY, name="then", after="first")]
    first, then = of(run(tmp_path, subjects=subjects, mixers=["elu"]), Quality)
    assert (first.status, first.reason) == ("failed", "the loss is nan at step 1")
    assert (then.status, then.reason) == ("failed", "first left no model to start from")


def test_speed_counts_tokens_not_lines():
    """1,000 tokens at 10 per second, 10 at 1,000: few tokens have the median line's speed."""
    timed = ((5, 1_000.0), (1_005, 10.0), (1_010, 1_000.0))
    lines = [{"tokens": n, "tokens_per_second": s} for n, s in timed] + [{"tokens": 1_010, "eval_loss": 1.0}]
    assert quality.speed_of(lines) == pytest.approx(1_010 / (5 / 1_000 + 1_000 / 10 + 5 / 1_000))


def test_the_most_frequent_answer_is_that_of_the_examples_scored():
    task = tasks.build("copy", length=8, symbols=2, examples=(1, 1, 40))
    labels = torch.stack([task.test[i]["labels"] for i in range(40)])
    counts = torch.bincount(labels[labels != tasks.IGNORE])
    assert quality.most_frequent(task, 40) == pytest.approx(counts.max().item() / counts.sum().item())
    assert quality.most_frequent(dataclasses.replace(task, metric="perplexity"), 40) is None


# Learning rates.


def test_every_mixer_is_searched_alike_and_trained_with_its_best_rate(tmp_path, monkeypatch, capsys):
    subject = dataclasses.replace(TOY, rates=(1e-30, 1e-3))
    mixers, seen = ["softmax+rope", "cosformer"], []
    real = quality.train.train
    monkeypatch.setattr(quality.train, "train", lambda run, **more: seen.append(run) or real(run, **more))
    rows = run(tmp_path, subjects=[subject], mixers=mixers, seeds=[0, 1], steps=20)
    search = of(rows, Search)
    alike = [(mixer, rate, 2) for mixer in mixers for rate in subject.rates]
    assert [(row.mixer, row.rate, row.steps) for row in search] == alike  # once for all seeds
    assert all(slow.loss > fast.loss for slow, fast in zip(search[0::2], search[1::2]))
    assert {row.rate for row in of(rows, Quality)} == {1e-3}
    assert not list((tmp_path / "search").rglob("*.safetensors"))
    assert "cosformer: rate 0.001; loss after 2 steps " in capsys.readouterr().out
    seen.clear()
    again = run(tmp_path, subjects=[subject], mixers=mixers, seeds=[0, 1, 2], steps=20)
    assert len(of(again, Search)) == len(search) and len(seen) == 2  # no search is repeated


def test_a_subject_may_take_the_rate_found_on_another(tmp_path):
    """The search runs on that subject, with its share of its own steps, and only once."""
    first = dataclasses.replace(TOY, rates=(1e-30, 1e-3), search_share=0.5, steps=20)
    others = [dataclasses.replace(first, name=f"copy-{n}", search_on=first, steps=10 * n) for n in (2, 3)]
    rows = run(tmp_path, subjects=others, mixers=["cosformer"], seeds=[0], steps=None)
    assert [row.steps for row in of(rows, Quality)] == [20, 30]
    assert [(row.subject, row.rate, row.steps) for row in of(rows, Search)] == [
        (first.name, rate, 10) for rate in first.rates
    ]
    assert [(row.subject, row.rate) for row in of(rows, Quality)] == [("copy-2", 1e-3), ("copy-3", 1e-3)]


# What a language model does with its context.


def test_loss_by_position_has_the_mean_of_the_whole(tmp_path):
    (tmp_path / "a.txt").write_text("a few words, again and again. " * 300)
    settings = {"data": str(tmp_path / "a.txt"), "length": 64, "isolate": False}
    subject = dataclasses.replace(TOY, name="lm", task="lm", settings=settings, by_position=True)
    (row,) = of(run(tmp_path / "out", subjects=[subject], mixers=["cosformer"]), Positions)
    assert row.ends == [16, 32, 63] and row.texts >= 1
    cell = TrainingCell(subject, "cosformer", 0, tmp_path / "out")
    task = quality.task_of(cell.run(4, 1e-3))
    model = models.load(str(cell.folder("lm")), task.kind).eval()
    windows = [
        task.test[i]["input_ids"] for i in range(len(task.test)) if len(task.test[i]["input_ids"]) == 64
    ]
    ids = torch.stack(windows)
    with torch.no_grad():
        want = model(input_ids=ids, labels=ids).loss.item()
    sizes = [end - start for start, end in zip([0, *row.ends], row.ends)]
    assert sum(n * loss for n, loss in zip(sizes, row.loss)) / 63 == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("mixer", ["softmax", "softmax+rope", "cosformer-paper", "cosformer", "elu"])
def test_a_picture_shows_weights(mixer):
    task = tasks.build("copy", length=16, examples=(4, 4, 4))
    model = models.build(task, mixer=mixer, size="toy")
    found = looks.matrices(model, task.test[0]["input_ids"][None], 1)
    assert found.shape == (2, 16, 16) and found.min() >= 0
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 16), rtol=1e-4, atol=1e-4)
    assert torch.equal(found, found.tril())


def test_the_picture_of_the_paper_is_the_definition():
    task = tasks.build("copy", length=16, examples=(4, 4, 4))
    model = models.build(task, mixer="cosformer-paper", size="toy").eval()
    seen = {}
    attention = model.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda m, a, out: seen.update(q=out))
    attention.k_proj.register_forward_hook(lambda m, a, out: seen.update(k=out))
    found = looks.matrices(model, task.test[0]["input_ids"][None], 0)
    q, k = (seen[name].unflatten(-1, (2, -1)).transpose(1, 2) for name in "qk")
    want = reference.weights(q, k, horizon=16, causal=True)[0]
    torch.testing.assert_close(found, want / want.sum(-1, keepdim=True), rtol=1e-4, atol=1e-5)


# What fits the time.


def test_steps_that_fit_keep_the_budget_and_are_round():
    seconds = [0.1, 0.3]
    subject = dataclasses.replace(TOY, test_examples=16)
    found = [budget.steps_that_fit(subject, seconds, room) for room in (0, 10, 60, 600, 1e9)]
    assert found == sorted(found) and set(found) <= set(budget.STEPS)
    assert found[0] == budget.STEPS[0] and found[-1] == budget.STEPS[-1]
    for room, steps in zip((60, 600), found[2:4]):
        assert steps * sum(seconds) <= room < 2.2 * steps * sum(seconds) + 20
    assert budget.steps_that_fit(dataclasses.replace(subject, most_steps=100), seconds, 1e9) == 100


@pytest.mark.parametrize("slower", [0.8, 1.0, 1.6, 4.0])
def test_it_keeps_the_minutes_it_was_asked_for(slower, monkeypatch, tmp_path):
    """Steps are timed at a tenth of a second; then cells take `slower` times as long as expected."""
    clock, trained = [0.0], []
    monkeypatch.setattr(budget.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(budget, "seconds_a_step", lambda cell: 0.1)

    def pretend(cell, steps, rate, watch):
        clock[0] += slower * budget.cell_seconds(cell.subject, 0.1, steps)
        trained.append(steps)
        return dataclasses.replace(ROW, subject=cell.subject.name, mixer=cell.mixer)

    monkeypatch.setattr(comparison, "trained", pretend)
    subjects = [dataclasses.replace(TOY, name=name) for name in "abcd"]
    run(tmp_path, subjects=subjects, mixers=["softmax", "elu"], minutes=8, steps=None)
    assert trained[0::2] == trained[1::2]  # the same for all mixers of a subject
    least = slower > 2  # the first subject alone takes its share four times over
    assert 0.5 * 480 < clock[0] < (1.3 if least else 1.05) * 480
    if slower > 1.5:
        assert trained[-1] < trained[0]  # later subjects are shortened


ROW = Quality(
    subject="", group="toy", task="copy", title="", data="", mixer="", seed=0, size="", length=16, batch=4,
    steps=1, rate=1e-3, metric="accuracy", greater_is_better=True, examples=8, settings={}, command="",
    status="refused",
)  # fmt: skip


def test_measurements_are_taken_where_they_are_missing(finished, monkeypatch):
    """After a kill between two rows only the rest is measured; a new mixer repeats all at its length."""
    made = Comparison(finished[0], minutes=1.0)
    made.results.rows = [row for row in made.results.rows if not isinstance(row, Exactness)]
    monkeypatch.setattr(made.results, "add", made.results.rows.append)
    asked = []
    for work in ("training", "decoding"):
        say = lambda mixers, length, work=work, **_: asked.append((work, mixers, length)) or []
        monkeypatch.setattr(comparison.bench, work, say)
    made.measure(MIXERS, [256])
    assert not asked and of(made.results.rows, Exactness)
    made.measure(MIXERS, [256, 512])
    assert asked == [(work, MIXERS[:2], 512) for work in ("training", "decoding")]
    made.measure([*MIXERS, "elu"], [256])
    assert asked[2:] == [(work, [*MIXERS[:2], "elu"], 256) for work in ("training", "decoding")]


def test_cost_takes_no_more_than_twice_its_share_of_the_time(tmp_path, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(comparison.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(comparison.exactness, "rows", list)
    monkeypatch.setattr(comparison.bench, "able", lambda mixer, work: True)
    for work in ("training", "decoding"):
        slow = lambda mixers, length, **_: clock.__setitem__(0, clock[0] + length) or []
        monkeypatch.setattr(comparison.bench, work, slow)
    Comparison(tmp_path, minutes=10.0).measure(["elu"], [16, 64, 128])
    assert clock[0] == 16 + 16 + 64 + 64 + 128  # its share of 600 seconds is 90
    assert "cost: the time for it is up; decoding at 128 is left out" in capsys.readouterr().out


def test_a_text_of_a_few_rows_is_enough(tmp_path):
    (tmp_path / "a.txt").write_text("a few words, again and again. " * 60)
    subject = plan.demo(str(tmp_path / "a.txt"), 64)[0]
    assert budget.seconds_a_step(TrainingCell(subject, "cosformer", 0, tmp_path)) > 0


def test_a_step_is_timed_on_batches_like_those_of_the_training(monkeypatch, tmp_path):
    """If grouped by length, on texts of similar length from the longer half; else in the given order."""
    grouped = dataclasses.replace(TOY, training=plan.ALIKE)
    cell, seen = TrainingCell(TOY, "elu", 0, tmp_path), []
    task = quality.task_of(cell.run(1, 1e-3))
    batch = task.collate([task.train[i] for i in range(4)])
    rows = [{"input_ids": torch.arange(2 + 5 * i % 32)} for i in range(32)]

    def collate(rows):
        seen.append(sorted(len(row["input_ids"]) for row in rows))
        return batch

    made = dataclasses.replace(task, train=rows, collate=collate)
    monkeypatch.setattr(budget, "task_of", lambda run: made)
    budget.seconds_a_step(dataclasses.replace(cell, subject=grouped))
    budget.seconds_a_step(cell)
    assert seen[:3] == [list(range(n, n + 4)) for n in (18, 22, 26)]
    assert seen[3:] == [sorted(len(row["input_ids"]) for row in rows[n : n + 4]) for n in (0, 4, 8)]
    seen.clear()
    budget.seconds_a_step(dataclasses.replace(cell, subject=dataclasses.replace(grouped, parts=2)))
    assert seen == [[n, n + 1] for n in (18, 20, 22, 24, 26, 28)]  # in parts, as they are computed


# The command line.


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--full"], "wikitext2-lm needs --data: the folder that holds wikitext-2"),
        (["--full", "--data", "/nowhere"], "wikitext2-lm needs /nowhere/wikitext-2: there is no such file"),
        (["--data", "/nowhere"], "lm needs /nowhere: there is no such file or folder"),
        (["--full", "--minutes", "9"], "--minutes goes with the default comparison"),
        (["--subjects", "lm", "poetry"], "--subjects poetry: one of lm, recall, listops, cost"),
        (["--mixers", "softmax", "nobody"], "unknown mixer 'nobody'; one of bigbird"),
        (["--mixers", "softmax+sine"], "positions 'sine' is unknown; one of rope"),
        (["--full", "--data", "nowhere", "--subjects", "sst2"], "nowhere/wikitext-2"),
        (["--minutes", "0"], "--minutes is 0; it must be more"),
        (["--seeds", "-1"], "--seeds -1: a seed is at least 0"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(argv, said, tmp_path):
    with pytest.raises(SystemExit, match=said):
        compare.main([*argv, "--out", str(tmp_path / "out")])


def test_the_plan_is_said_before_anything_is_done(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(compare, "carry_out", lambda *args, **kwargs: None)
    compare.main(["--minutes", "3", "--out", "there"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "21 cells, 3 minutes, steps sized to them; results in there"
    assert "lm                 11 mixers: Language model on bytes" in lines[2]
    (tmp_path / "wikitext-2").mkdir()
    compare.main(["--full", "--data", str(tmp_path), "--subjects", "wikitext2-lm", "cost"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "12 cells, as long as it takes; results in runs/compare-full"
    assert "4 mixers x 3 seeds x 1,000 steps, the best of 3 rates" in lines[2]


def test_the_subjects_of_the_evidence_can_be_had():
    """Subjects that need no data build their task and models; for others the task knows all settings."""
    for subject in plan.full("nowhere"):
        assert set(subject.settings) <= set(tasks.settings(subject.task)), subject.name
        models.check_fields(KINDS[subject.task], subject.fields)
        if "data" not in subject.settings:
            small = {"examples": (32, 4, 4)} | subject.settings
            task = tasks.build(subject.task, **small)
            for mixer in subject.mixers(plan.EVIDENCE):
                models.build(task, mixer=mixer, size=subject.size, fields=subject.fields)
    assert sorted(plan.POOLINGS) == sorted(POOLINGS)  # every one that there is
    names = [subject.name for subject in plan.full("nowhere")]
    assert len(names) == len(set(names)) and {"recall-64-8", "recall-128-16"} <= set(names)


def test_a_recorded_command_repeats_its_run(tmp_path):
    for subject in plan.full("nowhere"):
        run = TrainingCell(subject, "cosformer", 3, tmp_path).run(400, 2e-3)
        argv = shlex.split(quality.command(run))
        assert argv[:2] == ["cosformer", "train"]
        again = train.Run(**cli.merge(*cli.parse(cli.train_parser(), argv[2:]))).plain()
        wanted = run.plain() | {name: again[name] for name in ("out", "start")}  # folders beside one another
        wanted["training"].pop("report_to")
        assert again == wanted, subject.name


def test_from_the_command_to_the_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "demo", lambda *args: [TOY])
    compare.main(["--subjects", "copy", "--mixers", "cosformer", "--steps", "2", "--out", str(tmp_path)])
    assert (tmp_path / "report.html").stat().st_size > 1_000
    assert "The report: " in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["copy"]["steps"] == 2
