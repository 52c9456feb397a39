"""From results.jsonl to the page: which lines count, what the sentences say, what the HTML holds. Results are invented."""

import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from invented import RUN, cost, decodings, demo, full, quality, refused

from cosformer import report
from cosformer.report import figures, paper, results, style, summary, tables

pytest.importorskip("matplotlib")


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """The full page, and everything a page can hold that could do harm."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write_page(full(), path)
    return path.read_text()


# --- which lines count

BAD = {
    '{"kind": "quality", "group"': "not JSON",
    "hello": "not JSON",
    "[1, 2]": "not an object",
    "3": "not an object",
    '{"bench": "operators", "ms": 3}': "unknown kind None",
    '{"kind": ["run"]}': "unknown kind",
    json.dumps({**quality(), "value": float("nan")}): "NaN is not a number",
    json.dumps(cost(ms=1.0)).replace("1.0,", "1e999,", 1): "cost whose ms",
    json.dumps({**quality(), "value": "7.9"}): "quality whose value is '7.9'",
    json.dumps({**quality(), "value": True}): "quality whose value is 'True'",
    json.dumps({**quality(), "value": None}): "quality without value",
    json.dumps({**quality(), "status": "lost"}): "status is 'lost'",
    json.dumps({**quality(), "curve": [1, 2]}): "curve is not a list of points",
    json.dumps({**quality(), "metrics": [1]}): "quality whose metrics",
    json.dumps({k: v for k, v in quality().items() if k != "mixer"}): "quality without mixer",
    json.dumps(cost(ms=0)): "not above 0",
    json.dumps({"kind": "picture", "mixer": "softmax", "matrix": [[1, 2], [3]]}): "not a matrix",
    "[" * 100_000: "nested too deeply",
}


@pytest.mark.parametrize(("line", "reason"), BAD.items(), ids=range(len(BAD)))
def test_a_bad_line_is_skipped_with_its_place_and_reason(line, reason, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(f"{json.dumps(quality())}\n\n{line}\n{json.dumps(cost())}\n")
    found = results.read([path])
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith("results.jsonl:3: ")
    assert reason in found.skipped[0]
    assert (len(found.quality), len(found.cost)) == (1, 1)


def test_no_field_of_any_type_breaks_the_page(tmp_path):
    """Each field of each kind is replaced by each of these; what is not skipped must be shown."""
    odd = [
        None,
        True,
        -1,
        0,
        1e300,
        0.5,
        "",
        "x",
        "\x00\ud800<b>",
        [],
        [None],
        [[]],
        {},
        {"a": None},
        {"a": [{}]},
    ]
    kinds = {row["kind"]: row for row in demo()} | {
        "quality": quality()
    }  # without curves, which take long to draw
    rows = [{**row, name: value} for row in kinds.values() for name in row for value in odd]
    points = [
        {"step": 1, "tokens": 1, "seconds": 1, "loss": 1},
        {"step": 2, "tokens": 2, "seconds": 2, "loss": 0.5},
    ]
    rows += [
        quality(mixer=f"m{i}", curve=[*points, {**points[0], "step": v}, {"loss": v}])
        for i, v in enumerate(odd)
    ]
    rows += [
        quality(mixer="still", curve=[{**p, "tokens": 0, "seconds": 0} for p in points]),
        refused(task="nobody"),
    ]
    rows += [cost("once", 64, what=None), cost("once", 64, what="operator")]
    report.write_page(rows, tmp_path / "report.html")
    report.terminal_summary(rows).encode()
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<b>" not in text
    assert "\x00" not in text


def test_the_later_line_counts():
    rows = [quality(value=9.0), quality(value=8.0, seed=1), quality(value=7.0)]
    (cell,) = results.check(rows).experiments[0].cells
    assert sorted(r["value"] for r in cell.done) == [7.0, 8.0]
    assert [r["ms"] for r in results.check([cost(ms=1.0), cost(ms=2.0)]).cost] == [2.0]


def test_seeds_make_a_mean_and_half_a_range():
    cells = (
        results.check([quality(value=v, seed=s) for s, v in enumerate((7.0, 8.0, 9.0))]).experiments[0].cells
    )
    assert [c.value for c in cells] == [(8.0, 1.0)]
    assert results.check([quality(value=7.0)]).experiments[0].cells[0].value == (7.0, None)


def test_other_settings_are_another_cell():
    rows = [
        quality(value=8.0, settings={"lr": 0.1, "seed": 0}),
        quality(value=7.0, settings={"lr": 0.2, "seed": 0}),
    ]
    (experiment,) = results.check(rows).experiments
    assert [c.variant for c in experiment.cells] == ["lr=0.1", "lr=0.2"]
    assert experiment.cell("cosformer").value == (7.0, None)
    assert [label for label, _ in tables.one_task(experiment).rows[""]] == [
        "cosFormer (recommended: gated decay), lr=0.1",
        "cosFormer (recommended: gated decay), lr=0.2",
    ]


def test_what_was_refused_joins_its_task():
    rows = [refused(mixer="performer", size=None, data=None, length=None), quality()]
    (experiment,) = results.check(rows).experiments
    assert {c.mixer for c in experiment.cells} == {"performer", "cosformer"}


# --- sentences


def said(*rows) -> str:
    return " ".join(summary.sentences(results.check(rows)))


def versus(ours, theirs, **more) -> list[dict]:
    return [
        quality(mixer="cosformer", value=ours, **more),
        quality(mixer="softmax+rope", value=theirs, **more),
    ]


def accuracy(ours, theirs, **more) -> list[dict]:
    return versus(ours, theirs, metric="accuracy", greater=True, **more)


@pytest.mark.parametrize(
    ("rows", "outcome", "words"),
    [
        (versus(7.0, 7.7), "better", "7.00 against 7.70 of softmax + RoPE, 9.1 % lower, which is better."),
        (versus(7.9, 7.7), "worse", "7.90 against 7.70 of softmax + RoPE, 2.6 % higher, which is worse."),
        (versus(7.72, 7.7), "tie", "a tie (0.3 % higher; less than 0.5 %)."),
        (versus(7.7, 7.7), "tie", "a tie (equal;"),
        (accuracy(0.5, 0.4), "better", "50.0 % against 40.0 % of softmax + RoPE, 10.0 points higher, which is better."),
        (accuracy(0.4, 0.5), "worse", "10.0 points lower, which is worse."),
        (accuracy(0.504, 0.5), "tie", "a tie (0.4 points higher;"),
        (accuracy(0.54, 0.5, examples=1000), "tie", "a tie (4.0 points higher; within the error of 1,000 test examples)."),
        (accuracy(0.55, 0.5, examples=1000), "better", "5.0 points higher, which is better."),
        (accuracy(0.99, 0.96, examples=1000), "better", "3.0 points higher, which is better."),
        (accuracy(0.502, 0.5) + accuracy(0.502, 0.5, seed=1), "tie", "a tie (0.2 points higher; less than 0.5 %)."),
        (versus(7.0, 7.7) + versus(7.8, 7.9, seed=1), "tie", "7.40 ± 0.40 against 7.80 ± 0.10 of softmax + RoPE, a tie (5.1 %"),
        (versus(7.0, 7.7) + versus(7.02, 7.72, seed=1), "better", "7.01 ± 0.01 against 7.71 ± 0.01"),
        ([quality()], "missing", "Not measured for both: training cost; decoding cost; lm (softmax + RoPE not measured)."),
        ([quality(mixer="softmax")], "missing", "lm (cosFormer (recommended) not measured)."),
        ([quality(), refused()], "missing", "lm (softmax refused: it has no causal form)."),
        ([*versus(7.9, 7.7), quality(mixer="softmax", value=7.5)], "worse", "against 7.50 of softmax,"),
        ([quality(mixer="cosformer-paper", value=7.0), quality(mixer="softmax", value=8.0)], "better", "cosFormer (paper) is 7.00"),
    ],
)  # fmt: skip
def test_a_task_in_words(rows, outcome, words):
    (experiment,) = results.check(rows).experiments
    assert summary.verdict(experiment).outcome == outcome
    assert words in said(*rows)


def test_many_tasks_are_counted():
    three = [
        row
        for task, ours, theirs in (("a", 0.5, 0.4), ("b", 0.4, 0.5), ("c", 0.5, 0.5))
        for row in accuracy(ours, theirs, task=task, group="lra")
    ]
    assert (
        "Of 3 other tasks it is better than softmax on 1 (a: 10.0 points higher), level with softmax on 1 (c: equal) and worse than"
        " softmax on 1 (b: 10.0 points lower)."
    ) in said(*versus(7.9, 7.7), *three)
    paper = [{**row, "mixer": row["mixer"].replace("cosformer", "cosformer-paper")} for row in three]
    assert "Of 3 other tasks cosFormer is better than softmax on 1 (a:" in said(
        *versus(7.9, 7.7), *paper
    )  # not the same one
    worse = [{**row, "value": 0.4 if row["mixer"] == "cosformer" else 0.5} for row in three]
    assert "On all 3 tasks cosFormer (recommended) is worse than softmax (a: 10.0 points lower; b:" in said(
        *worse
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([cost(ms=10), cost("softmax+rope", ms=31)], "At length 4,096 cosFormer (recommended) trains 3.1× faster than softmax +"),
        ([cost(ms=31), cost("softmax", ms=10)], "trains 3.1× slower than softmax."),
        ([cost(ms=10), cost("softmax", ms=10.2)], "trains as fast (the measured ranges overlap) as softmax."),
        ([cost(ms=10), cost("softmax", length=512)], "Not measured for both: training cost"),
        ([cost(ms=10, what="operator"), cost("softmax", ms=20, what="operator")], "At length 4,096, one attention alone, cos"),
        (decodings(["cosformer", "softmax"], [512, 16384]), ", with a cache of 0.5 MiB that does not grow against 128 MiB."),
        (decodings(["cosformer", "softmax"], [512]), "with a cache of 0.5 MiB against 4.00 MiB."),
        ([], "Not measured for both: training cost; decoding cost; quality on any task."),
    ],
)  # fmt: skip
def test_cost_in_words(rows, words):
    assert words in said(*rows)


def test_terminal_summary():
    text = report.terminal_summary([*demo(), quality("\x1b[31mred", group="toy"), "foreign"])
    assert "cosFormer (recommended) trains 2.0× faster than softmax + RoPE" in text
    assert re.search(r"^ListOps +\w+ +[\d.]+ points (higher|lower) ", text, re.M)
    assert "\x1b" not in text
    assert (
        report.terminal_summary([])
        == "Not measured for both: training cost; decoding cost; quality on any task."
    )


# --- numbers behind figures and tables


def test_fit_and_crossing():
    assert figures.fit([(n, 3 * n**1.5) for n in (64, 128, 256, 512, 1024)]) == pytest.approx(1.5)
    assert figures.fit([(64, 1.0)]) is None
    x, y = figures.crossing([(100, 10.0), (1000, 100.0)], [(100, 1.0), (1000, 1000.0)])
    assert (x, y) == (pytest.approx(100 * 10**0.5), pytest.approx(10 * 10**0.5))
    assert figures.crossing([(1, 1.0), (2, 2.0)], [(1, 2.0), (2, 3.0)]) is None


def test_the_best_is_what_reads_best():
    rows = [
        quality(mixer=m, value=v)
        for m, v in (("cosformer", 7.701), ("softmax", 7.699), ("elu", 8.0), ("performer", 7.7))
    ]
    table = tables.one_task(results.check(rows).experiments[0])
    best = {table.rows[""][i][0] for i, j in table.winners("") if j == 0}
    assert best == {"cosFormer (recommended: gated decay)", "softmax", "Performer"}


@pytest.mark.parametrize("table", [paper.FINETUNE, paper.LRA], ids=["fine-tuning", "LRA"])
def test_the_papers_averages(table):
    """A slip in copying would show: the last column is the mean of the others."""
    for name, (*values, average) in table.rows.items():
        if name == "Sinkhorn":  # printed like this
            continue
        assert sum(values) / len(values) == pytest.approx(average, abs=0.011), name


def test_the_papers_figures_stand_beside_the_right_mixers():
    assert paper.figure(paper.LM, "cosformer-paper", "test", []) == 23.1
    assert (
        paper.figure(paper.LM, "cosformer", "test", []) is None
    )  # the paper knows nothing of the recommended one
    assert paper.figure(paper.LRA, "softmax+rope", "Text", ["softmax+rope"]) == 64.27
    assert paper.figure(paper.LRA, "softmax+rope", "Text", ["softmax", "softmax+rope"]) is None


def test_looks_are_stable_and_distinct():
    alone, together = style.looks(["elu"]), style.looks(["x", "performer", "elu", "softmax", "y"])
    assert alone["elu"] == together["elu"]
    assert list(together) == ["softmax", "elu", "performer", "x", "y"]
    everyone = style.looks([*style.KNOWN, "a", "b", "c"]).values()
    assert len({(look.marker, look.dash) for look in everyone}) == len(everyone)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast(theme):
    css = Path(results.__file__).with_name("page.css").read_text()
    root = re.findall(r":root \{(.*?)\}", css, re.S)[theme]
    colour = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", root))
    for pair in style.PALETTE:
        assert contrast(pair[theme], colour["bg"]) >= 3
    for text in ("ink", "muted", "accent", "good", "bad"):
        assert contrast(colour[text], colour["bg"]) >= 4.5
        assert contrast(colour[text], colour["soft"]) >= 4.5


# --- the page


class Outline(HTMLParser):
    """What a page is made of: counts of elements, ids, tables without a caption or scope, links, text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.ids, self.bare, self.out, self.texts, self.open = [], [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        if tag == "th" and "scope" not in given:
            self.bare.append("th without scope")
        if tag == "svg" and not (given.get("aria-label") or given.get("aria-hidden")):
            self.bare.append("svg without a label")
        if tag == "img" and not given.get("alt"):
            self.bare.append("img without alt")
        for name in ("src", "href", "xlink:href"):
            if name in given and not given[name].startswith(("#", "data:")):
                self.out.append(given[name])
        self.bare += [f"{name} runs script" for name in given if name.startswith("on")]

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_is_sound(page):
    outline = Outline(page)
    assert outline.tags.count("h1") == outline.tags.count("main") == outline.tags.count("nav") == 1
    assert outline.tags.count("table") == outline.tags.count("caption") > 20
    assert outline.bare == []
    assert outline.out == []
    assert "script" not in outline.tags
    assert len(set(outline.ids)) == len(outline.ids)
    assert not re.search(r"url\((?!#)|@import", page)
    used = set(
        re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[;\"])", re.sub(r"<style>.*?</style>", "", page, flags=re.S))
    )
    assert used == set(), "a colour that does not follow the theme"
    targets = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert targets <= set(outline.ids)


def test_sections_follow_the_results(page, tmp_path):
    heads = re.findall(r"<h2[^>]*>([^<]*)", page)
    assert heads == [
        "Summary", "Language modelling", "Pre-training and fine-tuning", "Long-Range Arena", "Speed and memory",
        "Quality against cost", "Ablation", "Attention matrices", "Exactness", "How these numbers were made",
    ]  # fmt: skip
    report.write_page([quality()], tmp_path / "small.html")
    small = (tmp_path / "small.html").read_text()
    heads = re.findall(r"<h2[^>]*>([^<]*)", small)
    assert heads == ["Summary", "Language modelling", "Not measured here", "How these numbers were made"]
    assert "do not say on what machine" in small


def test_all_text_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>\"'&"
    rows = [
        {
            **row,
            **{
                k: evil
                for k, v in row.items()
                if isinstance(v, str) and k not in ("kind", "status", "metric")
            },
        }
        for row in demo()
    ]
    rows += [
        quality(mixer=evil, value=v, seed=s, title=evil, settings={evil: evil})
        for s, v in ((0, 7.0), (1, 8.0))
    ]
    rows += [
        refused(mixer=evil + "2", reason=evil),
        {**RUN, "seeds": [evil]},
        quality(metric=evil, title="m", metrics={evil: 1.0}),
    ]
    (tmp_path / "results.jsonl").write_text(lines(rows) + evil + '\n{"kind": "<script>"}\n')
    report.main([str(tmp_path / "results.jsonl"), "--html", str(tmp_path / "report.html")])
    text = (tmp_path / "report.html").read_text()
    outline = Outline(text)
    assert "script" not in outline.tags
    assert outline.bare == []
    assert "<script" not in text
    assert evil in "".join(outline.texts)


def test_the_same_results_give_the_same_bytes(tmp_path):
    (tmp_path / "results.jsonl").write_text(lines(row for row in demo() if row.get("task", "lm") == "lm"))
    code = "import sys; from cosformer import report; report.main(sys.argv[1:])"
    digests = set()
    for seed in ("1", "2"):
        folder = tmp_path / seed
        command = [
            sys.executable,
            "-c",
            code,
            tmp_path / "results.jsonl",
            "--html",
            folder / "report.html",
            "--plots",
            folder / "plots",
        ]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        made = sorted(p for p in folder.rglob("*") if p.is_file())
        digests.add(
            tuple((str(p.relative_to(folder)), hashlib.sha256(p.read_bytes()).hexdigest()) for p in made)
        )
    assert len(digests) == 1
    names = {name for name, _ in digests.pop()}
    assert {
        "report.html",
        "plots/learning-lm-0-lm-tokens.png",
        "plots/cost-0-ms.svg",
        "plots/attention-after-training-on-lm.png",
    } <= names


def test_command_line(tmp_path, capsys):
    good, bad = tmp_path / "results.jsonl", tmp_path / "bad.jsonl"
    good.write_text(lines(versus(7.9, 7.7)) + "{oops\n")
    bad.write_text("{oops\n")
    report.main([str(good), "--html", str(tmp_path / "deep" / "report.html")])
    printed = capsys.readouterr()
    assert "2.6 % higher" in printed.out
    assert printed.err == "skipped results.jsonl:3: not JSON\n"
    assert "results.jsonl:3: not JSON" in (tmp_path / "deep" / "report.html").read_text()
    with pytest.raises(SystemExit, match="there are no results in"):
        report.main([str(bad), "--html", str(tmp_path / "none.html")])
    with pytest.raises(SystemExit, match="is not a file"):
        report.main([str(tmp_path / "missing"), "--html", str(tmp_path / "none.html")])
    with pytest.raises(SystemExit, match="--plots goes with --html"):
        report.main([str(good), "--plots", str(tmp_path)])
    assert not (tmp_path / "none.html").exists()


def test_the_readme_and_the_published_report_come_from_the_committed_results(tmp_path):
    root = Path(__file__).parents[1]
    page, made = tmp_path / "README.md", tmp_path / "report.html"
    page.write_text((root / "README.md").read_text())
    report.main([str(root / "benchmarks" / "compare.jsonl"), "--page", str(page)])
    assert page.read_text() == (root / "README.md").read_text()
    report.main([str(root / "benchmarks" / "compare.jsonl"), "--html", str(made)])

    def text(file: Path) -> str:  # without the drawings: they are as matplotlib made them then
        return re.sub(r'<svg.*?</svg>|src="data:[^"]*"', "", file.read_text(), flags=re.S)

    assert text(made) == text(root / "benchmarks" / "compare.html")
