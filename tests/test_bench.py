"""The benches run, check before they report, notice other processes; docs/speed.md has the committed rows."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cosformer import bench, reference, report
from cosformer.bench import exactness, measure, models, operators
from cosformer.bench.measure import Sample
from cosformer.results import Cost, Machine, of, read

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(out, *asked) -> list[Cost]:
    bench.main([*asked, "--seconds", "0.1", "--threads", "1", "--out", str(out)])
    rows = read(out)
    assert [row.torch for row in of(rows, Machine)] == [torch.__version__]
    return of(rows, Cost)


def test_operators(tmp_path, capsys, monkeypatch):
    drawn = {}
    monkeypatch.setattr(report, "plot", lambda rows, path: drawn.update({path: rows}))
    out, names = tmp_path / "deep" / "results.jsonl", ["cosformer-paper", "cosformer", "softmax", "published"]
    small = ["--lengths", "64", "--heads", "1", "--head-dims", "8", "--operators", *names]
    rows = run(out, *small, "--plot", str(tmp_path / "cost.svg"))
    assert {row.mixer for row in rows} == set(names) and {row.what for row in rows} == {"operator"}
    assert {row.backend for row in rows if row.mixer == "cosformer"} >= {"torch"}
    assert all(0 < row.ms_low <= row.ms <= row.ms_high and 0 <= row.waited <= 1 for row in rows)
    assert all(row.error < 1e-4 for row in rows if row.mixer != "softmax" and row.work != "decoding")
    weighed = [row for row in rows if row.work == "training" and row.causal and row.mixer != "cosformer"]
    assert weighed and all(row.memory_mib >= 0 for row in weighed)
    assert {row.length for row in rows if row.work == "decoding"} == {100, 100_000}
    assert of(drawn[tmp_path / "cost.svg"], Cost) == rows
    printed = capsys.readouterr().out
    assert "one attention alone, causal, 1 heads of 8: forward and backward" in printed
    assert (
        "cosformer native" in printed
        and "GFLOP/s" in printed
        and "largest difference from the definition" in printed
    )
    assert "other processes" in printed


def test_the_operator_called_cosformer_is_the_recommended_one():
    """It has a decay per position and no cosine, so half the features."""
    case = operators.Case("cosformer", "torch", "forward", True, 40, 2, 8, "float32")
    *given, _ = operators.tensors_of(case, 2, 40)
    q, k, v, decay = (x.double() for x in given)
    want = reference.attention(q, k, v, horizon=math.inf, causal=True, decay=decay)
    torch.testing.assert_close(operators.function_of(case)(*given).double(), want, rtol=1e-5, atol=1e-5)
    assert 2 * case.flops == replace(case, mixer="cosformer-paper").flops


def test_a_wrong_operator_gets_no_speed(monkeypatch):
    right = operators.published
    monkeypatch.setattr(operators, "published", lambda *qkv, causal: 1.01 * right(*qkv, causal))
    with pytest.raises(SystemExit, match="published differs from the definition"):
        bench.main(["--operators", "published", "--lengths", "32", "--work", "forward", "--seconds", "0.1"])


def test_a_backend_is_not_measured_where_it_cannot_run():
    asked = ["--operators", "cosformer-paper", "--lengths", "32", "--work", "forward", "--dtypes", "float64"]
    assert {case.backend for case in operators.cases(bench.settings(asked))} == {"torch"}


def test_what_is_measured_of_the_operators():
    """One token (the call itself) and 128 (where softmax is at its best), besides longer texts."""
    asked = operators.cases(
        bench.settings(["--operators", "cosformer-paper", "softmax", "--backends", "torch"])
    )
    lengths = {work: sorted({c.length for c in asked if c.work == work}) for work in bench.WORKS}
    assert lengths["forward"] == [1, *lengths["training"]] and lengths["training"][0] == 128
    assert {(c.mixer, c.causal) for c in asked if c.length == 1} == {
        (mixer, causal) for mixer in ("cosformer-paper", "softmax") for causal in (False, True)
    }
    operators.prepare(next(c for c in asked if c.length == 1))()


def test_mixers(tmp_path, capsys):
    asked = ["--mixers", "cosformer", "softmax", "bigbird", "--no-memory", "--lengths"]
    rows = run(tmp_path / "results.jsonl", *asked, "64", "128", "256")
    assert {(row.mixer, row.length) for row in rows} == {
        (mixer, n) for mixer in ("cosformer", "softmax", "bigbird") for n in (64, 128, 256)
    }
    assert "growth (lengths fitted)" in capsys.readouterr().out


def test_models(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(models, "SIZE", models.Size(1, 32, 2))
    monkeypatch.setattr(models, "CONTEXTS", [64])
    rows = run(tmp_path / "results.jsonl", "--models", "--quick", "--lengths", "64")
    assert {(row.mixer, row.work) for row in rows} == {
        (mixer, work) for mixer in models.MIXERS for work in ("training", "decoding", "generating")
    }
    assert all(row.bound_ms > 0 and row.ms > 0 for row in rows if row.work == "generating")
    assert all(row.cache_bytes > 0 for row in rows if row.work == "decoding")
    said = capsys.readouterr().out
    assert "Decoding with a whole model" in said and "×" in said and "weights read once " in said
    assert (
        "A token of generate with a whole model" in said
        and "tokens a second of generate: cosformer, float32: " in said
    )


def test_variants_of_a_model(tmp_path, capsys):
    names = ["cosformer", "cosformer:short_conv=0,qk_norm=false", "cosformer:both_signs=true"]
    given = ["--models", *names, "--size", "toy", "--work", "training", "--lengths", "32", "--quick"]
    assert [row.mixer for row in run(tmp_path / "results.jsonl", *given)] == names
    assert "cosFormer, short_conv=0, qk_norm=false" in capsys.readouterr().out
    plain, bare, signs = (models.build(name, 16, models.Size(1, 32, 2)) for name in names)
    interiors = [model.model.layers[0].self_attn.interior for model in (plain, bare, signs)]
    assert (
        [i.conv is None for i in interiors] == [i.q_norm is None for i in interiors] == [False, True, False]
    )
    assert [i.mixer.both_signs for i in interiors] == [False, False, True]
    for name, told in {
        "cosformer:shortconv=0": "'shortconv=0' is no FIELD=VALUE of a config or of its mixer",
        "cosformer:short_conv": "'short_conv' is no FIELD=VALUE",
        "cosformer:short_conv=x": 'short_conv must be JSON, such as 0, false or "x"; got x',
        "cosformer:short_conv=1": "short_conv is 1; it must be 0 or at least 2",
    }.items():
        with pytest.raises(SystemExit, match=f"bench: --models .*{told}"):
            bench.main(["--models", name, "--work", "training", "--lengths", "32"])


def test_models_with_rounded_weights(tmp_path, capsys):
    given = ["--models", "cosformer", "llama", "--size", "toy", "--contexts", "16", "--quick"]
    weights = ["--work", "generating", "--weights", "float32", "bfloat16", "int8"]
    rows = run(tmp_path / "results.jsonl", *given, *weights)
    ours = {row.dtype: row for row in rows if row.mixer == "cosformer"}
    assert list(ours) == ["float32", "bfloat16", "int8"] and len(rows) == 5  # only our models have int8
    assert {(row.work, row.length, row.size) for row in rows} == {
        ("generating", 16, str(models.SIZES["toy"]))
    }
    assert ours["int8"].bound_ms < ours["bfloat16"].bound_ms < ours["float32"].bound_ms
    said = capsys.readouterr().out
    assert "tokens a second of generate: cosformer, int8: " in said
    with pytest.raises(
        SystemExit, match="--work forward is not for models; some of training, decoding, generating"
    ):
        bench.main(["--models", "--work", "forward"])
    with pytest.raises(SystemExit, match="--size huge is unknown; one of toy, tiny"):
        bench.main(["--models", "--size", "huge"])


def test_the_weights_that_a_token_needs():
    """All but the embedding table."""
    size = models.Size(1, 32, 2)
    model = models.build("llama", 16, size)
    every = sum(p.nbytes for p in model.parameters())
    every += sum(b.nbytes for b in model.buffers())
    assert models.bytes_read(model) == every - 4 * models.VOCABULARY * 32
    assert models.bandwidth() > 1e8


def test_softmax_is_measured_after_as_long_a_context():
    """Llama's cache is filled at random, without reading a text."""
    model = models.build("llama", 64, models.Size(2, 32, 2))
    read = model(input_ids=torch.zeros(1, 40, dtype=torch.long), use_cache=True).past_key_values
    made = models.filled(model, 40)
    assert [layer.keys.shape for layer in made.layers] == [layer.keys.shape for layer in read.layers]
    assert made.get_seq_length() == 40


def test_decoding_costs_the_same_after_any_number_of_steps(monkeypatch):
    """A cache that grew while timed would be timed at another length than the row says."""
    monkeypatch.setattr(models, "TOKENS", 1)
    for mixer in ("llama", "softmax+rope", "cosformer"):
        model = models.build(mixer, 16, models.Size(1, 16, 1)).eval()
        step, size = models.decoder(model, 8)
        seen = []
        forward = model.forward
        model.forward = lambda *args, **kwargs: (
            seen.append(kwargs["past_key_values"].get_seq_length()) or forward(*args, **kwargs)
        )
        for _ in range(7):
            step()
        assert max(seen) <= 8 + 4 and size > 0, mixer


def test_generating_goes_on_behind_as_long_a_context(monkeypatch):
    monkeypatch.setattr(models, "TOKENS", 3)
    for mixer in ("llama", "softmax+rope", "cosformer"):
        model = models.build(mixer, 64, models.Size(1, 16, 1)).eval()
        write, seen, generate = models.generator(model, 8), [], model.generate

        def watched(text, past_key_values, seen=seen, generate=generate, **given):
            seen.append((past_key_values.get_seq_length(), text.shape[1]))
            return generate(text, past_key_values=past_key_values, **given)

        model.generate = watched
        for _ in range(9):
            write()
        assert all(length == cached + 1 for cached, length in seen) and seen[0] == (8, 9)
        assert max(cached for cached, _ in seen) <= 8 + 12, mixer


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (["--operators", "fast"], "operator 'fast' is unknown; one of 'cosformer-paper'"),
        (["--backends", "fast"], "backend 'fast' is unknown"),
        (["--mixers", "fast"], "unknown mixer 'fast'; one of"),
        (["--mixers", "cosformer-hybrid"], "measures one mixer; 'cosformer-hybrid' names layers"),
        (["--mixers", "elu*2"], "measures one mixer; 'elu.2' names layers, as --models takes"),
        (["--models", "fast"], "unknown mixer 'fast'; one of"),
        (["--operators", "published", "--work", "decoding"], "nothing to measure"),
    ],
)
def test_unknown_names(asked, match):
    with pytest.raises(SystemExit, match=match):
        bench.main(asked)


@pytest.mark.parametrize(
    "option", ["--lengths", "--heads", "--head-dims", "--threads", "--contexts", "--parallel", "--seconds"]
)
def test_sizes_below_one_are_refused(option, capsys):
    for given in ("0", "-2", "many", "nan"):
        with pytest.raises(SystemExit):
            bench.settings([f"{option}={given}"])
        number = "number above 0" if option == "--seconds" else "whole number of at least 1"
        assert f"argument {option}: it must be a {number}; got {given}" in capsys.readouterr().err


def test_a_plot_in_no_folder_is_refused_before_anything_is_measured():
    with pytest.raises(SystemExit, match="--plot nowhere/a.svg: there is no folder nowhere"):
        bench.settings(["--plot", "nowhere/a.svg"])


# Other processes.


def test_disturbed_samples_count_only_where_there_are_too_few_others():
    calm = [Sample(0.001 * n, 0.0) for n in (1, 2, 3)]
    disturbed = [Sample(0.1, 0.5)] * 4
    found = measure.timing([*disturbed, *calm])
    assert (found["ms"], found["samples"], found["waited"]) == (pytest.approx(2.0), 3, 0.0)
    found = measure.timing([*disturbed, *calm[:2]])
    assert found["samples"] == 6 and found["waited"] == 0.5


@pytest.mark.parametrize(("busy", "samples"), [(0, 3), (2, 5), (99, 6)])
def test_a_disturbed_work_is_repeated_and_then_marked(busy, samples, monkeypatch):
    """`busy` samples are disturbed: it is repeated until three are not, or six are taken."""
    taken = []

    def times():
        began = len(taken) % 2 == 0
        taken.append(began)
        return (0.0, 0.0) if began else (1.0, 1.0 if len(taken) // 2 <= busy else 0.0)

    monkeypatch.setattr(measure.Watch, "_times", staticmethod(times))
    clock = iter(range(10**6))
    # A call takes two seconds.
    monkeypatch.setattr(measure.time, "perf_counter", lambda: 2.0 * next(clock))
    found = measure.in_turns({"work": lambda: None}, seconds=60.0)["work"]
    assert len(taken) // 2 == samples
    row = Cost(what="mixer", work="training", mixer="elu", causal=False, length=8, **found)
    assert row.contended == (busy > 3)
    assert (
        "1 of 1 times were taken while other processes ran" in measure.disturbance([row])
    ) == row.contended


def test_a_watch_sees_time_without_the_processor():
    with measure.Watch() as watch:
        sum(range(10_000))
    assert 0 <= watch.waited <= 1


# Exactness.


def test_exactness_sees_a_wrong_backend(monkeypatch):
    assert all(0 <= row.difference <= row.allowed for row in exactness.rows())
    right = exactness.cosformer_attention
    monkeypatch.setattr(
        exactness, "cosformer_attention", lambda *x, horizon, **o: right(*x, horizon=1.01 * horizon, **o)
    )
    wrong = [row for row in exactness.rows() if row.mode != "stream"]
    assert wrong and all(row.difference > row.allowed for row in wrong)


# The tables.


@pytest.mark.parametrize(
    ("name", "sources"), [("speed.md", ("operators", "models")), ("speed-avx512.md", ("avx512",))]
)
def test_the_tables_of_speed_come_from_the_committed_results(name, sources, tmp_path):
    results = [ROOT / "benchmarks" / f"{source}.jsonl" for source in sources]
    page, published = tmp_path / name, (ROOT / "docs" / name).read_text()
    page.write_text(published)
    report.main([*map(str, results), "--page", str(page)])
    assert page.read_text() == published
