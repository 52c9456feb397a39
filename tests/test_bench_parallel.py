"""cosformer bench --parallel: what it measures of processes that share a sequence; its picture and table."""

from pathlib import Path

from cosformer import bench, report
from cosformer.report import tables
from cosformer.report.cells import Measured
from cosformer.results import Machine, Shared, of, read

ROOT = Path(__file__).parents[1]
ROWS, PICTURE, PAGE = (
    ROOT / name for name in ("benchmarks/parallel.jsonl", "docs/parallel.svg", "docs/parallel.md")
)


def test_it_measures_processes_that_share_a_sequence(tmp_path, capsys):
    out, picture = tmp_path / "rows.jsonl", tmp_path / "picture.svg"
    bench.main(["--parallel", "2", "--lengths", "65", "130", "--out", str(out), "--plot", str(picture)])
    rows = of(read(out), Shared)
    assert [(row.processes, row.length) for row in rows] == [(2, 65), (2, 130)]
    assert rows[0].sent_bytes == rows[1].sent_bytes > 0  # whatever the length
    for row in rows:
        assert all(0 < share < 1 for share in (row.waiting, row.scan, row.states))
        assert row.ms_at_once > 0 and row.memory_mib > 0 and 0 < row.ms_beside < row.ms
    assert "130     2          " in capsys.readouterr().out
    assert "2 processes" in picture.read_text()


def invented(processes, length, **more):
    given = {"mixer": "cosformer", "size": "small", "ms": 2e3 * length / processes, "memory_mib": 400.0}
    given |= {"sent_bytes": 1000, "waiting": 0.02, "scan": 0.001, "states": 0.05, "ms_beside": 7.0}
    if processes > 1:
        given["ms_at_once"] = given["ms"] + 30
    return Shared(processes=processes, length=length, **{**given, **more})


def test_the_tables():
    slow = {"ms": 1500.0, "waited": 0.5, "ms_low": 1400.0, "ms_high": 1550.0, "ms_at_once": 1520.0}
    two = invented(2, 64, **slow)
    time, memory, shares = tables.speeds(Measured([two, invented(1, 64)]))
    assert time.markdown().splitlines()[2:] == ["| 1 process | 128,000 |", "| 2 processes | 1,500 † |"]
    assert memory.markdown().splitlines()[2:] == ["| 1 process | 400 |", "| 2 processes | 400 |"]
    row = "| 64 | 2 | 1.500† | 1.520† | 2.0% | 0.10% | 5.0% | 7.0 ms |"
    assert shares.markdown().splitlines()[2:] == [row]
    assert shares.note.startswith("A process sent 1,000 bytes a step, whatever the length")
    assert "took +1.3% to +1.3% off a step" in shares.note
    more = tables.overlap([two, invented(4, 64, ms_at_once=31_000.0, sent_bytes=1200)])
    assert more.startswith("A process sent 1,000 to 1,200 bytes a step. The overlap took -3.2% to +1.3% off")
    assert more.endswith("lay up to 10.0% apart: no benefit is shown here.")
    quick = tables.overlap([invented(2, 64, ms=1000.0, ms_at_once=1500.0)])
    assert quick.endswith("lay up to 0.0% apart: a benefit.")


def test_the_page_and_its_picture_are_of_the_committed_rows(tmp_path):
    rows = read(ROWS)
    assert of(rows, Machine) and {row.processes for row in of(rows, Shared)} == {1, 2, 4}
    picture, page = tmp_path / "parallel.svg", tmp_path / "parallel.md"
    page.write_text(PAGE.read_text())
    report.plot(rows, picture)
    report.main([str(ROWS), "--page", str(page)])
    assert picture.read_text() == PICTURE.read_text()
    assert page.read_text() == PAGE.read_text()
