"""Results: read as they were written, refused with file and line."""

import pytest

from cosformer import results
from cosformer.results import Cost, Picture, Quality, ResultsError, latest, read

COST = Cost(what="model", work="training", mixer="softmax", causal=True, length=512, ms=3.0, ms_low=2.5)
PICTURE = Picture(subject="lm", mixer="relu", layer=1, matrix=[[1.0, None], [0.5, 0.5]], tokens=["a", "é"])
QUALITY = Quality(
    subject="recall", group="recall", task="recall", title="Recall", data="generated", mixer="cosformer",
    seed=0, size="toy", length=32, batch=8, steps=10, rate=1e-3, metric="accuracy", greater_is_better=True,
    examples=100, settings={"pairs": 8}, command="cosformer train", status="done", value=0.5,
    metrics={"accuracy": 0.5},
    curve=[{"step": 0, "tokens": 0, "seconds": 0.0, "loss": 2.0}], most_frequent=0.25,
)  # fmt: skip


def changed(row, **fields):
    return type(row)(**{**vars(row), **fields})


def test_rows_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    writer = results.Writer(path)
    for row in (COST, QUALITY, PICTURE):
        writer.add(row)
        assert read(path)[-1] == row  # on the disk at once
    assert read(path) == writer.rows == results.Writer(path).rows == [COST, QUALITY, PICTURE]


def test_a_torn_last_line_is_cut_off_by_the_writer(tmp_path):
    path = tmp_path / "results.jsonl"
    results.Writer(path).add(COST)
    whole = path.read_text()
    path.write_text(whole + '{"kind": "cost", "mixer": "sof')
    with pytest.raises(ResultsError, match=r"results.jsonl:2: not a row of results"):
        read(path)
    assert results.Writer(path).rows == [COST] and path.read_text() == whole


def test_of_rows_about_the_same_thing_the_last_counts():
    again, other = changed(COST, ms=9.0), changed(COST, length=1024)
    assert latest([COST, QUALITY, other, again]) == [again, QUALITY, other]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{oops", "Expecting property name"),
        ("[" * 100_000, "maximum recursion depth"),
        ("[]", "an object is one, not a list"),
        ('{"kind": "speed"}', "unknown kind 'speed'; one of machine, run, quality"),
        (results.line_of(COST).replace('"ms": 3.0, ', ""), "cost: ms is missing"),
        (results.line_of(COST).replace('"ms"', '"speed"'), "cost: unknown field 'speed'"),
        (results.line_of(COST).replace("3.0", "true"), "cost: ms is 'True'"),
        (results.line_of(COST).replace("3.0", "NaN"), "cost: ms is 'nan'"),
        (results.line_of(COST).replace("3.0", "0"), "cost: length and ms must be above 0"),
        (results.line_of(COST).replace("training", "resting"), "cost: work is 'resting'"),
        (
            results.line_of(QUALITY).replace('"value": 0.5, ', ""),
            "quality: value is missing from what is done",
        ),
        (results.line_of(QUALITY).replace('"loss": 2.0', '"loss": "low"'), "quality: curve is"),
        (results.line_of(PICTURE).replace("[0.5, 0.5]", "[0.5]"), "picture: matrix is not a matrix"),
    ],
)
def test_what_is_no_row_is_refused_with_file_and_line(tmp_path, line, says):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{results.line_of(COST)}\n\n{line}\n")
    with pytest.raises(ResultsError) as refused:
        read(path)
    assert f"{path}:3: not a row of results: {says}" in str(refused.value)


def test_control_characters_do_not_reach_a_page_or_a_terminal(tmp_path):
    path = tmp_path / "results.jsonl"
    results.Writer(path).add(changed(QUALITY, title="a\x1b[31mb\ud800"))
    assert read(path)[0].title == "a [31mb "


def test_learned_is_two_standard_errors_above_the_most_frequent_answer():
    assert QUALITY.learned is True
    assert changed(QUALITY, value=0.33).learned is False  # 0.25 + 2 * 0.043
    assert changed(QUALITY, value=0.34).learned is True
    assert changed(QUALITY, most_frequent=None).learned is None


def test_contended_is_said_by_the_share_of_time_waited():
    assert not COST.contended and not changed(COST, waited=0.05).contended
    assert changed(COST, waited=0.2).contended and changed(QUALITY, waited=0.2).contended
