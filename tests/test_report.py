"""From rows to the page: what counts, what the sentences say, what the HTML holds. The rows are invented."""

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import accuracy, cost, invented, quality

from cosformer import report, results
from cosformer.report import cells, chart, costs, figures, style, summary, tables
from cosformer.report.cells import Measured

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write_page(invented(), path)
    return path.read_text()


# --- rows put together


def only(rows) -> cells.Experiment:
    (experiment,) = Measured(rows).experiments
    return experiment


def test_the_later_row_counts():
    rows = [quality(value=9.0), quality(value=8.0, seed=1), quality(value=7.0)]
    assert sorted(row.value for row in only(rows).cells[0].done) == [7.0, 8.0]
    assert [row.ms for row in Measured([cost(ms=1.0), cost(ms=2.0)]).cost] == [2.0]


def test_seeds_make_a_mean_and_a_range():
    assert only(quality(value=v, seed=s) for s, v in enumerate((7.0, 8.0, 9.0))).cells[0].value == (
        8.0,
        7.0,
        9.0,
        3,
    )
    rows = [quality(value=7.0, seed=0), quality("softmax", 8.0)]
    assert "7.00" in tables.one_task(only(rows)).rows[""][0][1][0].text
    assert tables.one_task(only(rows)).note.startswith("One seed")


def test_other_steps_are_another_experiment_and_a_refusal_is_part_of_its_own():
    assert len(Measured([quality(), quality(steps=800)]).experiments) == 2
    refused = quality("performer", None, status="refused", reason="it has no causal form")
    experiment = only([quality(), refused])
    assert [cell.mixer for cell in experiment.cells] == ["cosformer", "performer"]
    table = tables.one_task(experiment)
    assert table.rows[""][1][1][0].text == "refused"
    assert "Performer: refused: it has no causal form." in table.note


# --- sentences


def said(*rows) -> str:
    return " ".join(summary.paragraphs(Measured(rows)))


def versus(ours, theirs, make=quality, **more) -> list[results.Row]:
    return [make("cosformer", ours, **more), make("softmax+rope", theirs, **more)]


@pytest.mark.parametrize(
    ("rows", "outcome", "words"),
    [
        (versus(7.0, 7.7), "ahead", "against 7.70 of softmax + RoPE, 9.1 % lower: ahead, with one seed."),
        (versus(7.9, 7.7), "behind", "against 7.70 of softmax + RoPE, 2.6 % higher: behind, with one"),
        (versus(7.72, 7.7), "tie", "a tie (0.3 % higher; less than 0.5 %)."),
        (versus(7.7, 7.7), "tie", "a tie (equal;"),
        (versus(0.5, 0.4, accuracy), "ahead", "50.0 % against 40.0 % of softmax + RoPE, 10.0 points higher"),
        (versus(0.4, 0.5, accuracy), "behind", "10.0 points lower: behind, with one seed."),
        (versus(0.504, 0.5, accuracy), "tie", "a tie (0.40 points higher; within two standard errors"),
        (versus(0.99, 0.9995, accuracy), "behind", "99.00 % against 99.95 % of softmax + RoPE, 0.95"),
        # Seeds share their test examples: with three of them, the error of 1,000 is no smaller.
        ([r for n in (0, 1, 2) for r in versus(0.995, 0.9985, accuracy, seed=n)], "tie", "0.35 points"),
        ([r for n in (0, 1, 2) for r in versus(0.99, 0.9985, accuracy, seed=n)], "worse", "0.85 points"),
        (versus(0.54, 0.5, accuracy), "tie", "4.0 points higher; within two standard errors of 1,000 test"),
        (versus(0.55, 0.5, accuracy), "ahead", "5.0 points higher: ahead, with one seed."),
        (versus(0.99, 0.96, accuracy), "ahead", "3.0 points higher: ahead, with one seed."),
        (versus(7.0, 7.7) + versus(7.8, 7.9, seed=1), "tie",
         "7.40 (7.00–7.80) against 7.80 (7.70–7.90) of softmax + RoPE, a tie (5.1 % lower; the ranges"),
        (versus(7.0, 7.7) + versus(7.02, 7.72, seed=1), "better",
         "7.01 (7.00–7.02) against 7.71 (7.70–7.72) of softmax + RoPE, 9.1 % lower, which is better."),
        ([*versus(7.0, 7.7), quality("cosformer", 7.02, seed=1)], "ahead", "9.0 % lower: ahead"),
        ([quality()], "not compared", "training cost; decoding cost; lm (softmax + RoPE not measured)."),
        ([quality("softmax")], "not compared", "lm (cosFormer not measured)."),
        ([quality(), quality("softmax", None, status="refused", reason="too long")], "not compared",
         "lm (softmax refused: too long)."),
        ([*versus(7.9, 7.7), quality("softmax", 7.5)], "behind", "against 7.50 of softmax,"),
        ([quality("cosformer-paper", 7.0), quality("softmax", 8.0)], "ahead", "cosFormer (paper) is 7.00"),
        (versus(0.19, 0.18, accuracy, most_frequent=0.18), "not learned",
         "Not learned (no mixer beats the most frequent answer by two standard errors): lm."),
        (versus(0.3, 0.18, accuracy, most_frequent=0.18), "not compared",
         "lm (softmax + RoPE has not learned)."),
        (versus(7.0, 7.7, steps=49), "not compared", "lm (49 steps are too few)."),
        (versus(7.0, 7.7, steps=50), "ahead", "9.1 % lower: ahead"),
        (versus(0.18, 0.3, accuracy, most_frequent=0.18), "behind", "18.0 % (not learned) against 30.0 % of"),
        (versus(0.37, 0.36, accuracy, published=0.371), "tie", "37.0 % (published 37.1) against 36.0 % ("),
    ],
)  # fmt: skip
def test_a_task_in_words(rows, outcome, words):
    assert cells.verdict(only(rows)).outcome == outcome
    assert words in said(*rows)


def test_what_softmax_wins_stands_in_the_first_paragraph():
    wins = [*versus(0.4, 0.5, accuracy, task="a"), cost(ms=31), cost("softmax+rope", ms=10)]
    for rows in (wins, [*wins, *versus(7.0, 7.7)]):
        first = summary.paragraphs(Measured(rows))[0]
        assert re.search(
            r"Softmax wins 1 of \d comparisons? of quality \(a: cosFormer 10.0 points lower\)\.", first
        )
        assert "Softmax + RoPE trains faster at length 4,096." in first
    assert "Softmax wins none of 1 comparison of quality." in said(*versus(7.0, 7.7))


def test_many_tasks_are_counted():
    tasks = (("a", 0.5, 0.4), ("b", 0.4, 0.5), ("c", 0.5, 0.5))
    rows = [row for task, ours, theirs in tasks for row in versus(ours, theirs, accuracy, task=task)]
    text = said(*versus(7.9, 7.7), *rows)
    assert "wins 2 of 4 comparisons of quality (lm: cosFormer 2.6 % higher; b: cosFormer 10.0 points" in text
    assert "is ahead, with one seed, in 1 (a: 10.0 points higher) and not told apart in 1 (c: equal)." in text
    recall = [row for title in "xyz" for row in versus(0.3, 0.9, accuracy, task="recall", title=title)]
    assert "wins 3 of 4 comparisons of quality (recall, 3 of 3 settings)." in said(*versus(7.0, 7.7), *recall)


def test_a_page_shows_the_better_softmax_with_its_positions():
    rows = [*versus(0.4, 0.5, accuracy, task="a"), accuracy("softmax", 0.45, task="a")]
    line = "| a | behind | 10.0 points lower | accuracy, % (1 seed) | 40.0 | 50.0 (RoPE) |"
    assert report.numbers(rows).splitlines()[-1] == line
    ahead = [*rows, accuracy("softmax", 0.6, task="a", seed=1), accuracy("cosformer-hybrid", 0.7, task="a")]
    more = "40.0 | 52.5 (learned positions; 45.0–60.0) | 70.0 |"
    assert report.numbers(ahead).splitlines()[-1].endswith(more)


def test_what_is_no_contest_stands_in_no_verdict(tmp_path):
    part = quality("softmax+rope", 3.8, group="parts", title="with norms")
    measured = Measured([*versus(7.0, 7.7), part, quality(title="alone")])
    told = " ".join(summary.paragraphs(measured))
    assert "with norms" not in told and "alone (softmax + RoPE not measured)" in told
    assert [title for title, _ in tables.verdicts(measured).rows[""]] == ["lm"]
    table = tables.parts([*measured.group("parts"), *measured.group("lm")])
    assert [title for title, _ in table.rows[""]] == ["with norms", "lm", "alone"]
    assert [entry.text for entry in table.rows[""][0][1]] == ["perplexity", "–", "3.80"]
    report.write_page([*versus(7.0, 7.7), part], tmp_path / "page.html")
    assert "with norms" in (tmp_path / "page.html").read_text()


def decodings(*contexts) -> list[results.Row]:
    sizes = [("cosformer", lambda n: 524_288), ("softmax", lambda n: 8192 * n)]
    return [cost(m, n, n / 100, work="decoding", cache_bytes=size(n)) for m, size in sizes for n in contexts]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([cost(ms=10), cost("softmax+rope", ms=31)], "At length 4,096 cosFormer trains 3.1× as fast as"),
        ([cost(ms=31), cost("softmax", ms=10)], "trains 0.3× as fast as softmax."),
        ([cost(ms=10), cost("softmax", ms=10.2)], "trains as fast (the measured ranges overlap) as softmax."),
        ([cost(ms=10, waited=0.5), cost("softmax", ms=20)], "trains 2.0× as fast (on a busy machine) as"),
        ([cost(ms=10), cost("softmax", length=512)], "Not compared: training cost"),
        ([cost(ms=10, what="mixer"), cost("softmax", ms=20, what="mixer")], ", one attention alone, cos"),
        (decodings(512, 16384), ", with a cache of 0.5 MiB that does not grow against 128 MiB."),
        (decodings(512), "After 512 tokens cosFormer decodes as fast (the measured ranges overlap) as"),
        ([], "Not compared: training cost; decoding cost; quality on any task."),
    ],
)  # fmt: skip
def test_cost_in_words(rows, words):
    assert words in said(*rows)


def test_terminal_summary():
    text = report.terminal_summary(invented())
    assert "At length 16,384 cosFormer trains" in text
    assert re.search(r"^ListOps +not learned +– +accuracy, % \(1 seed\) +11.0 \(not learned\) ", text, re.M)
    assert max(map(len, text.split("\n\n")[0].splitlines())) <= 100
    assert report.terminal_summary([]) == said()


# --- numbers behind charts and tables


def test_crossing():
    x, y = costs.crossing([(100, 10.0), (1000, 100.0)], [(100, 1.0), (1000, 1000.0)])
    assert (x, y) == (pytest.approx(100 * 10**0.5), pytest.approx(10 * 10**0.5))
    assert costs.crossing([(1, 1.0), (2, 2.0)], [(1, 2.0), (2, 3.0)]) is None


def test_growth_needs_three_lengths_and_says_how_many_it_used():
    points = [(n, 3.0 * n**1.5) for n in (1, 2, 4, 8, 16, 32)]
    assert costs.growth(points) == (pytest.approx(1.5), 4)
    assert costs.growth(points[:3]) == (pytest.approx(1.5), 3)
    assert costs.growth(points[:2]) is None and costs.growth([(8, 1.0)] * 3) is None
    mixed = [(1, 1e6), (2, 1e6), *((n, float(n)) for n in (64, 128, 256, 512))]
    assert costs.growth(mixed) == (pytest.approx(1.0), 4)  # only the longest count


def test_an_exponent_is_shown_with_its_lengths_and_two_give_none():
    def growths(*lengths) -> list[tuple[str, str]]:
        table = tables.cost("", [cost(length=n, ms=0.01 * n**1.5) for n in lengths])
        return [(entry.text, entry.more) for entry in table.rows[""][0][1][len(lengths) :]]

    assert growths(256, 512) == []
    assert growths(256, 512, 1024) == [("n^1.50", "(3)")]


def test_the_fastest_backend_is_shown():
    rows = [cost(ms=9.0, backend="torch"), cost(ms=3.0, backend="native"), cost("softmax", ms=5.0)]
    ((_, found),) = costs.groups(Measured(rows), "training")
    assert {row.mixer: row.ms for row in found} == {"cosformer": 3.0, "softmax": 5.0}


def bold(table) -> set[str]:
    """The mixers that are best in the first column."""
    return {table.rows[""][i][0] for i, j in table.winners("") if j == 0}


def test_the_best_is_what_reads_best_and_no_guess():
    values = {"cosformer": 7.701, "softmax": 7.699, "elu": 8.0, "performer": 7.7}
    table = tables.one_task(only(quality(mixer, value) for mixer, value in values.items()))
    assert bold(table) == {"cosFormer", "softmax", "Performer"}
    guesses = [
        accuracy(mixer, value, most_frequent=0.3) for mixer, value in (("cosformer", 0.5), ("elu", 0.3))
    ]
    assert bold(tables.one_task(only([*guesses, accuracy("relu", 0.4, most_frequent=0.3)]))) == {"cosFormer"}
    assert tables.one_task(only(guesses)).rows[""][1][1][0].more == "not learned"
    alike = [
        accuracy(mixer, value, most_frequent=0.3) for mixer, value in (("cosformer", 0.31), ("elu", 0.3))
    ]
    assert bold(tables.one_task(only(alike))) == set()


def test_searches_published_figures_and_busy_machines_are_shown(page):
    measured = Measured(invented())
    table = tables.searches(measured)
    assert [column.head for column in table.columns] == ["0.001", "0.002", "0.004"]
    assert [(e.text, e.more) for e in table.rows["WikiText-2 language model, 100 steps"][0][1][:2]] == [
        ("2.001", "chosen"),
        ("2.002", ""),
    ]
    again = [replace(row, steps=1000, loss=1.5) for row in measured.searches[:1]]
    table = tables.searches(Measured([*invented(), *again]))
    assert list(table.rows)[-1].endswith(", 1,000 steps")  # a longer trial is not part of the search
    assert tables.searches(Measured(measured.searches)).rows[next(iter(table.rows))][0][1][0].more == ""
    text = next(e for e in measured.experiments if e.row.task == "text")
    assert tables.one_task(text).rows[""][0][1][0].more == "published 64.0"
    assert "a quarter." in tables.one_task(text).note
    ((what, rows),) = costs.groups(measured, "training")
    entries = tables.cost(what, rows).rows[""][0][1]
    assert [entry.more for entry in entries[:3]] == ["(0.8×)", "† (0.8×)", "(1.0×)"]
    assert costs.CONTENDED_NOTE in page


def test_recall_and_context_are_drawn():
    measured = Measured(invented())
    recall = figures.recall(measured.group("recall"))
    assert [(panel.heading, panel.x) for panel in recall.panels] == [
        ("64 tokens", "pairs to remember"),
        ("128 tokens", "pairs to remember"),
    ]
    assert [x for x, _ in recall.panels[1].lines[0].points] == [8, 16, 32]
    (panel,) = figures.positions(measured.group("lm"), measured).panels
    line = next(line for line in panel.lines if line.mixer == "softmax+rope")
    assert line.points[0] == (16, pytest.approx(3 * 1.01))
    assert line.band[0] == (16, pytest.approx(3.0), pytest.approx(3 * 1.02))


@pytest.mark.parametrize(
    "values", [(1, 2), (0.013, 0.0131), (7, 7), (-3, 1e250), (99_990, 100_010), (1, 9), (3, 4e60)]
)
def test_scales(values):
    log = values[1] > 4 * values[0] > 0
    scale = chart.Scale(list(values), 0, 100, log)
    places = [scale(value) for value in scale.ticks()]
    assert 1 <= len(places) <= 8
    assert places == sorted(places)
    assert 0 <= places[0] and places[-1] <= 100
    assert 0 < scale(values[0]) <= scale(values[1]) < 100


@pytest.mark.parametrize("name", ["finetune", "lra"])
def test_the_papers_averages(name):
    """A slip in copying would show: the last column is the mean of the others."""
    for model, row in tables.PAPER[name]["rows"].items():
        *values, average = map(float, row.split())
        if model != "Sinkhorn":  # the paper prints another average
            assert sum(values) / len(values) == pytest.approx(average, abs=0.011), model


# --- names and looks


def test_names():
    assert style.name("cosformer-hybrid+rope") == "cosFormer hybrid + RoPE"
    assert style.name("performer+rope") == "Performer + RoPE"
    assert style.name("cosformer*3, softmax+rope") == "3 × cosFormer, softmax + RoPE"
    assert style.name("mine*x, +, mine+rope") == "mine*x, +, mine+rope"


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
def test_contrast(theme, page):
    root = re.findall(r":root \{(.*?)\}", page, re.S)[theme]
    colour = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", root))
    for i, pair in enumerate(style.PALETTE):
        assert colour[f"c{i}"] == pair[theme]
        assert contrast(pair[theme], colour["bg"]) >= 3
    for text in ("ink", "muted", "accent", "good", "bad"):
        assert contrast(colour[text], colour["bg"]) >= 4.5
        assert contrast(colour[text], colour["soft"]) >= 4.5


# --- the page


class Outline(HTMLParser):
    """What a page is made of: counts of elements, ids, what lacks a label, links, text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.ids, self.bare, self.out, self.texts = [], [], [], [], []
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
    assert outline.tags.count("sup") > 5
    assert outline.bare == []
    assert outline.out == []
    assert "script" not in outline.tags
    assert len(set(outline.ids)) == len(outline.ids)
    assert not re.search(r"url\((?!#)|@import", page)
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b(?=[;\"])", body), "a colour that does not follow the theme"
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(outline.ids)


def test_sections_follow_the_results(page, tmp_path):
    def headings(text):
        return re.findall(r"<h2[^>]*>([^<]*)", text)

    assert headings(page) == [
        "Summary", "Language modelling", "Long-Range Arena", "Recall", "Speed and memory",
        "Quality against cost", "Ablation", "Learning rates", "Attention matrices", "Exactness",
        "How these numbers were made",
    ]  # fmt: skip
    report.write_page([quality(group="mine")], tmp_path / "small.html")
    small = (tmp_path / "small.html").read_text()
    assert headings(small) == ["Summary", "mine", "How these numbers were made"]
    assert "do not say on what machine" in small


def test_all_text_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>\"'&"
    kept = {"kind", "status", "metric", "what", "work"}  # fields with fixed words
    rows = []
    for row in invented():
        strings = {
            f.name: evil for f in fields(row) if isinstance(getattr(row, f.name), str) and f.name not in kept
        }
        rows.append(replace(row, **strings))
    rows.append(quality(evil, metric=evil, metrics={evil: 1.0}, group=evil, note=evil))
    rows.append(quality(evil + "2", None, status="refused", reason=evil))
    report.write_page(rows, tmp_path / "report.html", plots=tmp_path)
    outline = Outline(text := (tmp_path / "report.html").read_text())
    assert "script" not in outline.tags
    assert outline.bare == []
    assert "<script" not in text
    assert evil in "".join(outline.texts)
    for file in tmp_path.glob("*.svg"):
        assert not ElementTree.parse(file).findall(".//{*}script")


def test_the_same_results_give_the_same_bytes_without_torch(tmp_path):
    results.Writer(tmp_path / "results.jsonl")
    lines = [results.line_of(row) for row in invented()]
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    code = """
import sys, types
sys.modules["torch"] = None  # importing it fails
package = sys.modules["cosformer"] = types.ModuleType("cosformer")
package.__path__ = [sys.argv.pop(1)]
from cosformer import report
report.main(sys.argv[1:])
"""
    digests = set()
    for seed in ("1", "2"):
        folder = tmp_path / seed
        arguments = [
            tmp_path / "results.jsonl",
            "--html",
            folder / "report.html",
            "--plots",
            folder / "plots",
        ]
        command = [sys.executable, "-c", code, Path(results.__file__).parent, *arguments]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        made = sorted(p for p in folder.rglob("*") if p.is_file())
        digests.add(
            tuple((str(p.relative_to(folder)), hashlib.sha256(p.read_bytes()).hexdigest()) for p in made)
        )
    assert len(digests) == 1
    names = {name for name, _ in digests.pop()}
    assert {
        "report.html",
        "plots/learning-lm-0-lm-tokens.svg",
        "plots/training-0-ms.svg",
        "plots/recall-64.svg",
    } <= names
    assert "plots/attention-after-training-wikitext-2-language-model.png" in names


def test_a_chart_is_an_svg_that_needs_no_page(tmp_path):
    report.plot(invented(), tmp_path / "deep" / "cost.svg")
    tree = ElementTree.parse(tmp_path / "deep" / "cost.svg")
    texts = [text.text for text in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert "Training a whole model, causal, tiny (4 layers); AMD EPYC, 2 threads" in texts
    assert {"time, ms", "peak memory, MiB", "16,384", "softmax + RoPE"} <= set(texts)
    with pytest.raises(ValueError, match=r"ends in \.svg; got .*cost\.png"):
        report.plot(invented(), tmp_path / "cost.png")
    with pytest.raises(ValueError, match="no training at two lengths"):
        report.plot([cost()], tmp_path / "cost.svg")


def test_command_line(tmp_path, capsys):
    good, bad, empty = (tmp_path / f"{name}.jsonl" for name in ("results", "bad", "empty"))
    good.write_text("".join(results.line_of(row) + "\n" for row in versus(7.9, 7.7)))
    bad.write_text(good.read_text() + "{oops\n")
    empty.write_text("")
    report.main([str(good), "--html", str(tmp_path / "deep" / "report.html")])
    assert "2.6 % higher" in capsys.readouterr().out
    report.main([str(good)])
    assert "2.6 % higher" in capsys.readouterr().out
    for arguments, wrong in (
        ([bad, "--html", tmp_path / "none.html"], r"cosformer report: .*bad\.jsonl:3: not a row of results"),
        ([empty, "--html", tmp_path / "none.html"], "there are no results in"),
        ([tmp_path / "missing", "--html", tmp_path / "none.html"], "No such file"),
        ([good, "--plots", tmp_path], "--plots goes with --html"),
        ([good, "--page", empty], "has no place for tables"),
    ):
        with pytest.raises(SystemExit, match=wrong):
            report.main([*map(str, arguments)])
    assert not (tmp_path / "none.html").exists()


@pytest.mark.parametrize("name", ["cost", "mixers", "compare-cost", "compare-learning"])
def test_the_pictures_of_the_docs_come_from_the_committed_results(name, tmp_path):
    source = {"cost": "operators", "mixers": "mixers"}.get(name, "compare")
    rows = results.read(ROOT / "benchmarks" / f"{source}.jsonl")
    if source == "compare":
        report.write_page(rows, tmp_path / "report.html", plots=tmp_path)
        made = {"compare-cost": "training-0-ms", "compare-learning": "learning-lm-0-lm-tokens"}[name]
    else:
        made = name
        report.plot(rows, tmp_path / f"{name}.svg")
    assert (tmp_path / f"{made}.svg").read_text() == (ROOT / "docs" / f"{name}.svg").read_text()


def test_the_readme_and_the_published_report_come_from_the_committed_results(tmp_path):
    page, made = tmp_path / "README.md", tmp_path / "report.html"
    page.write_text((ROOT / "README.md").read_text())
    report.main([str(ROOT / "benchmarks" / "compare.jsonl"), "--page", str(page)])
    assert page.read_text() == (ROOT / "README.md").read_text()
    report.main([str(ROOT / "benchmarks" / "compare.jsonl"), "--html", str(made)])

    def text(file: Path) -> str:  # without the matrices: their bytes depend on matplotlib's version
        return re.sub(r'src="data:[^"]*"', "", file.read_text())

    assert text(made) == text(ROOT / "benchmarks" / "compare.html")


def test_speeds_of_a_busy_machine_are_not_drawn():
    def beside(waited):
        is_run = [isinstance(row, results.Quality) for row in invented()]
        return Measured(replace(row, waited=waited) if run else row for run, row in zip(is_run, invented()))

    calm, busy = beside(0.0), beside(0.5)
    drawn = [{panel.x for panel in figures.learning(m.group("lm")).panels} for m in (calm, busy)]
    assert drawn == [{"tokens seen", "seconds of training"}, {"tokens seen"}]
    assert figures.trade(calm) is not None and figures.trade(busy) is None


def test_speeds_of_different_machines_are_not_compared():
    rows = invented()
    machine = next(row for row in rows if isinstance(row, results.Machine))
    last = next(i for i in reversed(range(len(rows))) if getattr(rows[i], "task", "") == "lm")
    one, two = (Measured([*rows[:at], replace(machine, threads=1), *rows[at:]]) for at in (len(rows), last))
    heads = [{column.head for column in tables.one_task(m.group("lm")[0]).columns} for m in (one, two)]
    assert {"seconds", "tokens/s"} <= heads[0] and heads[0] - heads[1] == {"seconds", "tokens/s"}
    assert "speeds are not compared" in tables.one_task(two.group("lm")[0]).note
    drawn = [{panel.heading for panel in figures.trade(m).panels} for m in (one, two)]
    assert "WikiText-2 language model" in drawn[0] - drawn[1] and "ListOps" in drawn[1]
    assert {panel.x for panel in figures.learning(two.group("lm")).panels} == {"tokens seen"}


def test_settings_of_recall_are_in_order_of_length_and_pairs():
    settings = [(64, 8), (128, 16), (64, 16), (128, 8)]
    more = {"group": "recall", "task": "recall"}
    rows = [accuracy(**more, title=f"{n}, {p}", length=n, settings={"pairs": p}) for n, p in settings]
    assert [e.row.title for e in Measured(rows).experiments] == ["64, 8", "64, 16", "128, 8", "128, 16"]


def test_an_old_metric_is_another_experiment():
    rows = [quality(task="mlm"), quality("softmax", 3.9, task="mlm", metric="loss_per_token")]
    assert len(Measured(rows).experiments) == 2


def test_seeds_that_differ_in_number_are_both_said():
    rows = [accuracy("cosformer", 0.4, task="a", seed=seed) for seed in (0, 1, 2)]
    rows += [accuracy("softmax", 0.5, task="a")]
    assert "| accuracy, % (3 and 1 seeds) |" in report.numbers(rows)
