"""What a new user meets: defaults that learn, changed data, tables nearly right, files that are not text."""

import io
import json
import os
import random
import re
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cosformer import tasks
from cosformer.tasks import DataError, build, cache, generated, texts, tokens
from cosformer.tasks.tokens import encoder, sensible_size

WORDS = [
    "market",
    "shares",
    "rise",
    "and",
    "fall,",
    "a",
    "team",
    "wins",
    "the",
    "league;",
    "new",
    "chips",
    "run",
]


pytestmark = pytest.mark.usefixtures("own_cache")


def news(path: Path, count: int = 300, longest: int = 40) -> Path:
    draw = random.Random(0)
    rows = [(" ".join(draw.choices(WORDS, k=draw.randint(3, longest))), i % 10 > 6) for i in range(count)]
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{int(label)}\n" for text, label in rows))
    return path


# the fingerprint


@pytest.mark.parametrize("task", ["lm", "classify"])
def test_any_changed_byte_changes_the_fingerprint_and_a_move_does_not(tmp_path, task):
    (tmp_path / "a").mkdir()
    path = news(tmp_path / "a" / "x.tsv")
    settings = {"tokenizer": "bytes", "length": 32}
    first = build(task, data=path, **settings).fingerprint
    assert first == build(task, data=path, cache=tmp_path / "other", **settings).fingerprint
    (tmp_path / "b").mkdir()
    moved = path.rename(tmp_path / "b" / "y.tsv")
    assert build(task, data=moved, **settings).fingerprint == first
    content = moved.read_bytes()
    for place in (content.index(b"\n") + 1, content.rindex(b"\t") - 1):  # the first letter, and the last
        changed = bytearray(content)
        changed[place] ^= 1
        moved.write_bytes(changed)
        assert build(task, data=moved, **settings).fingerprint != first
    moved.write_bytes(content)
    assert build(task, data=moved, **settings).fingerprint == first
    assert build(task, data=moved, length=32).fingerprint != first, "other tokens of the same text"


def test_the_fingerprint_of_what_is_generated_is_that_of_its_settings(tmp_path):
    for name, change in (("copy", {"symbols": 9}), ("recall", {"power": 0.5}), ("reverse", {"seed": 1})):
        few = {"examples": (20, 5, 5)}
        assert build(name, **few).fingerprint == build(name, **few).fingerprint
        assert build(name, **few).fingerprint != build(name, **{**few, **change}).fingerprint
    made = {"length": 32, "least": 4, "depth": 3, "args": 3, "examples": (20, 5, 5)}
    one, two = (build("listops", **made, cache=tmp_path / c) for c in "ab")
    assert one.fingerprint == two.fingerprint != build("listops", **made, seed=1).fingerprint
    assert tasks.pretraining(one).fingerprint == one.fingerprint


def test_a_large_file_is_read_once_and_again_when_it_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "LARGE", 1)
    monkeypatch.setattr(cache, "TICK", -1.0)
    path = tmp_path / "large"
    path.write_bytes(b"content")
    found = cache.digest(path)
    with monkeypatch.context() as patch:
        patch.setattr(cache.hashlib, "file_digest", None)
        assert cache.digest(path) == found
    before = path.stat()
    path.write_bytes(b"Content")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same modification time
    assert cache.digest(path) != found


# defaults


def test_tokens_and_length_come_from_the_data_and_are_said_aloud(tmp_path, own_cache):
    task = build("classify", data=news(tmp_path / "x.tsv"))
    assert 261 < task.vocab_size <= tokens.FEWEST and task.max_length % 8 == 0
    full = build("classify", data=tmp_path / "x.tsv", length=1000)
    lengths = sorted(len(full.train[i]["input_ids"]) for i in range(len(full.train)))
    held = np.mean(np.array(lengths) <= task.max_length)
    assert 0.95 <= held and np.mean(np.array(lengths) <= task.max_length - 8) < 0.95
    cut = sum(length > task.max_length for length in lengths)
    assert task.notes == (
        f"a vocabulary of {task.vocab_size} tokens was made from the training texts; "
        "--tokenizer bytes, bpe:SIZE or a path takes another",
        f"texts have up to {task.max_length} tokens, which holds 95 % of the training texts; "
        "--length sets another length",
        f"{cut} of {len(lengths)} training texts are longer than {task.max_length} tokens and are cut; "
        "--length sets it",
    )
    assert len(list(own_cache.glob("tokenizer-*"))) == 1, "the vocabulary is made once"
    assert build("classify", data=tmp_path / "x.tsv", length=1000, tokenizer="bytes").notes == ()


def test_a_length_from_the_data_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LONGEST", 16)
    task = build("classify", data=news(tmp_path / "x.tsv"))
    assert task.max_length == 16 and any("16 tokens, the most taken unasked" in note for note in task.notes)
    task = build("seq2seq", data=news(tmp_path / "x.tsv"), source="text", target="label")
    assert (task.max_length, task.max_target_length) == (16, 8)
    assert any("--set task.target_length=N sets another" in note for note in task.notes)


def test_a_vocabulary_fits_the_amount_of_text():
    assert sensible_size(["cat", "kæt"] * 1000) == tokens.LEAST, "words are spelled"
    assert sensible_size(["a text of more than a few words"]) == tokens.FEWEST
    assert sensible_size(["x" * 1024] * 1024) == 2048
    assert sensible_size(["x" * 1024] * 100_000) == tokens.MOST
    asked = []
    list(tokens._enough(asked.append(1) or "x" * (1 << 20) for _ in range(100)))
    assert len(asked) == 64, "no more than the first so many bytes are read"


def test_generated_data_has_sensible_defaults_too(monkeypatch):
    monkeypatch.setattr(generated, "SIZES", (400, 40, 40))
    task = build("seq2seq")
    assert task.vocab_size == tokens.LEAST and task.max_target_length == 16
    assert build("classify").max_length in (24, 32)


def test_the_share_of_the_most_frequent_class(tmp_path):
    path = news(tmp_path / "x.tsv", 1000)
    task = build("classify", data=path, tokenizer="bytes")
    labels = [row["labels"] for row in task.test]
    assert task.majority == max(labels.count(0), labels.count(1)) / len(labels) > 0.5
    made = build("listops", length=32, least=4, depth=3, args=3, examples=(20, 5, 50))
    counts = np.bincount(made.test.values("labels"))
    assert made.majority == counts.max() / 50
    assert build("copy", examples=(5, 5, 5)).majority is None


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_saved_tokenizer_gives_a_model_what_training_gave_it(tmp_path, tokenizer):
    from transformers import AutoTokenizer

    def saved(task):
        task.tokenizer.save_pretrained(tmp_path / "saved")
        return AutoTokenizer.from_pretrained(tmp_path / "saved")

    path = news(tmp_path / "x.tsv")
    lines = [line.split("\t")[0] for line in path.read_text().splitlines()[1:]]
    task = build("classify", data=path, tokenizer=tokenizer, length=24)
    ours, theirs = {tuple(row["input_ids"].tolist()) for row in task.train}, saved(task)
    assert theirs.model_max_length == 24
    found = {tuple(theirs(line, truncation=True)["input_ids"]) for line in lines}
    assert ours <= found and max(map(len, found)) == 24

    task = build("seq2seq", data=path, source="text", target="label", tokenizer=tokenizer, length=300)
    ours, theirs = {tuple(row["input_ids"].tolist()) for row in task.train}, saved(task)
    assert ours <= {tuple(theirs(line)["input_ids"]) for line in lines}

    task = build("mlm", data=path, tokenizer=tokenizer, length=64)
    theirs = saved(task)
    assert theirs.model_max_length == 64
    ids = theirs(lines[0])["input_ids"]
    assert ids[0] == task.special.bos and ids[-1] == task.special.eos
    again = encoder(str(tmp_path / "saved"))
    assert again.encode(lines[:1])[0].tolist() == ids[1:-1] and again.special == task.special


# the command line's words


def test_lists_are_given_by_comma(tmp_path):
    (tmp_path / "x.csv").write_text(
        "".join(f"{'no' if i % 3 else 'yes'},text number {i}\n" for i in range(60))
    )
    task = build(
        "classify", data=tmp_path / "x.csv", columns="label, text", labels="yes,no", tokenizer="bytes"
    )
    assert task.labels == ("yes", "no")
    texts = build("lm", data=tmp_path / "x.csv", columns="label,text", tokenizer="bytes", length=32)
    assert "text number 0" in texts.tokenizer.decode(texts.train.table.values("tokens")[:40])
    assert len(build("copy", examples="30,4,5").train) == 30
    for wrong, message in (
        ("30,4", "examples takes 3 numbers, of train, validation, test; got '30,4'"),
        ("many", "examples takes whole numbers by comma, 1000,100,100; got 'many'"),
        (30, "examples takes 3 numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            build("copy", examples=wrong)


@pytest.mark.parametrize(
    "name, lines, message",
    [
        ("x.csv", ["text;label", "a;1"], r"x\.csv:2: .* the header 'text;label' has no comma but ';': save"),
        ("x.csv", ["text\tlabel", "a\t1"], r"no comma but '\\t': save the table with commas, or as \.tsv"),
        ("x.csv", ["3,Wall St. falls", "1,Goal"], r"the first line \(3, Wall St\. falls\) looks like data\. "
         r"Name its 2 columns: --set task\.columns=label,text"),
        ("x.tsv", ["neg\t" + "a long text " * 9, "pos\tb"], r"\(neg, a long .*\.\.\.\) looks like data"),
        ("x.csv", [",".join(f"c{i}" for i in range(30)), ",".join("x" * 30)], "c0, .*, c7 and 22 more"),
        ("x.jsonl", [json.dumps({"text": ["word"] * 500, "label": 1})], 
         r"must hold text; got \['word', .{40,60}\.\.\. \(4,000 characters\) \(--skip-bad-rows N leaves"),
    ],
)  # fmt: skip
def test_a_table_that_is_not_understood_gets_a_hint(tmp_path, name, lines, message):
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=message) as error:
        build("classify", data=tmp_path / name)
    assert len(str(error.value)) - len(str(tmp_path)) < 400


def test_measurements_are_no_classes_and_are_not_dumped(tmp_path):
    rows = [json.dumps({"text": f"row {i}", "label": i / 1000}) for i in range(1, 1000)]
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    with pytest.raises(
        DataError, match=r"have 7\d\d label\(s\) \(0.\d+, .* and 7\d\d more\); classes are needed"
    ):
        build("classify", data=tmp_path / "x.jsonl")
    half_stars = [json.dumps({"text": f"row {i}", "label": i % 6 / 2}) for i in range(100)]
    (tmp_path / "x.jsonl").write_text("\n".join(half_stars))
    assert build("classify", data=tmp_path / "x.jsonl").labels == ("0", "0.5", "1", "1.5", "2", "2.5")


# what is not text


def archives(folder: Path) -> list[tuple[Path, str]]:
    inside = b"a perfectly good text\n" * 50
    with zipfile.ZipFile(folder / "x.zip", "w") as file:
        file.writestr("a.txt", inside)
    for name, mode in (("x.tar", "w"), ("x.tar.gz", "w:gz"), ("x.tgz", "w:gz"), ("x.tar.xz", "w:xz")):
        with tarfile.open(folder / name, mode) as file:
            info = tarfile.TarInfo("a.txt")
            info.size = len(inside)
            file.addfile(info, io.BytesIO(inside))
    kinds = {"x.zip": "zip", "x.tar": "tar", "x.tar.gz": "tar", "x.tgz": "gzip", "x.tar.xz": "tar"}
    return [(folder / name, kind) for name, kind in kinds.items()]


def test_archives_and_control_bytes_are_refused_by_name(tmp_path):
    for path, kind in archives(tmp_path):
        with pytest.raises(
            DataError, match=rf"{path.name}: a {kind} archive, not text; unpack it and give --data"
        ):
            build("lm", data=path)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_text("some text\n" * 30)
    (tmp_path / "d" / "b.bin").write_bytes(bytes(range(32)) * 40)
    with pytest.raises(
        DataError, match=r"b\.bin: not text: 81% of its first 1,280 bytes are control characters"
    ):
        build("lm", data=tmp_path / "d")
    (tmp_path / "t.csv").write_bytes(b"text,label\n" + b"\0\1" * 200)
    with pytest.raises(DataError, match=r"t\.csv: not text"):
        build("classify", data=tmp_path / "t.csv")


# rows that cannot be read


BAD = [
    ("x.csv", b"only one field", "expected 2 fields"),
    ("x.csv", b"\xff\xfe broken,1", "byte 0xff is not UTF-8"),
    ("x.csv", b'a "quote" inside,1\n"never closed,1', "not CSV"),
    ("x.csv", b"  ,1", "must hold text"),
    ("x.tsv", b"no label\t ", "must hold a label"),
    ("x.jsonl", b'{"text": "half', "not JSON"),
    ("x.jsonl", b"[1, 2]", "expected a JSON object, got list"),
    ("x.jsonl", b'{"text": "a"}', "no column named label"),
]


@pytest.mark.parametrize("name, line, message", BAD)
def test_bad_rows_are_left_out_and_counted_up_to_a_number(tmp_path, name, line, message):
    good = {
        "x.csv": (b"text,label\n", b"a text,1\nanother text,0\n"),
        "x.tsv": (b"text\tlabel\n", b"a text\t1\nanother text\t0\n"),
        "x.jsonl": (b"", b'{"text": "a text", "label": 1}\n{"text": "another text", "label": 0}\n'),
    }[name]
    path = tmp_path / name
    path.write_bytes(good[0] + good[1] * 30 + line + b"\n")
    with pytest.raises(DataError, match=rf"{name}:6\d: .*{message}"):
        build("classify", data=path)
    for _ in range(2):  # made, and from the cache
        task = build("classify", data=path, skip_bad_rows=1)
        assert re.search(
            r"^1 rows that cannot be read are left out; the first: .*:6\d: .*" + message, task.left_out[0]
        )
        assert sum(len(getattr(task, split)) for split in tasks.SPLITS) >= 60
    path.write_bytes(good[0] + line + b"\n" + good[1] * 30 + line + b"\n")
    with pytest.raises(DataError, match=rf"{name}:[123]: .*--skip-bad-rows allows 1 rows .*; there are more"):
        build("classify", data=path, skip_bad_rows=1)


def test_files_that_are_not_read_are_named(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for name in ("the-night-train.txt", "emma.txt", "persuasion.txt"):
        (folder / name).write_text("It is a truth universally acknowledged. " * 200)
    (note,) = [note for note in build("lm", data=folder, length=32).notes if "not read" in note]
    assert note.startswith("2 files are not read, such as emma.txt: the-night-train.txt is named train")
    (folder / "the-night-train.txt").rename(folder / "the-night.txt")
    assert not any("not read" in note for note in build("lm", data=folder, length=32).notes)


def test_the_tokenizer_of_a_language_model_pads_where_generation_needs_it(tmp_path):
    (tmp_path / "x.txt").write_text("It is a truth universally acknowledged. " * 200)
    sides = [build(task, data=tmp_path / "x.txt", length=32).tokenizer.padding_side for task in ("lm", "mlm")]
    assert sides == ["left", "right"]


@pytest.mark.parametrize("task", ["lm", "mlm", "classify"])
def test_text_that_is_no_unicode_is_a_bad_row(tmp_path, task):
    rows = [f'{{"label": {i % 2}, "text": "good {i}"}}' for i in range(60)]
    (tmp_path / "x.jsonl").write_text("\n".join([*rows, '{"label": 1, "text": "half \\ud800"}']))
    with pytest.raises(DataError, match=r"x\.jsonl:61: column 'text' is no valid Unicode"):
        build(task, data=tmp_path / "x.jsonl")
    assert "1 rows" in build(task, data=tmp_path / "x.jsonl", skip_bad_rows=1).left_out[0]


def test_whole_labels_may_be_written_as_floats(tmp_path):
    for name, labels in (("floats", ("-1.0", "1.0")), ("ints", ("-1", "1"))):
        rows = "".join(f"{labels[i % 2]},text {i}\n" for i in range(60))
        (tmp_path / f"{name}.csv").write_text("label,text\n" + rows)
        assert build("classify", data=tmp_path / f"{name}.csv").labels == ("-1", "1")


def test_bad_rows_of_other_tasks(tmp_path):
    rows = [f'{{"source": "go {i}", "target": "gone {i}", "text": "gone {i}"}}' for i in range(60)]
    (tmp_path / "x.jsonl").write_text("\n".join([*rows, "{}", "nothing"]))
    for task in ("seq2seq", "lm", "mlm"):
        with pytest.raises(DataError, match=r"x\.jsonl:61: no column named"):
            build(task, data=tmp_path / "x.jsonl")
        left_out = build(task, data=tmp_path / "x.jsonl", skip_bad_rows=5).left_out
        assert left_out[0].startswith("2 rows that cannot be read are left out; the first: ")
