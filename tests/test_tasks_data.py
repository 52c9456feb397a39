"""Reading, splitting, tokenising, packing, caching: what goes in comes out, once, and nothing leaks."""

import gzip
import json
import lzma
import pickle
import re
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosformer import tasks
from cosformer.tasks import DataError, build, cu_seqlens
from cosformer.tasks.contract import Collate
from cosformer.tasks.corpus import Corpus
from cosformer.tasks.packing import Masked, Packed
from cosformer.tasks.reading import BadRows
from cosformer.tasks.source import Holdout, files, rows
from cosformer.tasks.table import Table, write
from cosformer.tasks.tokens import byte_characters, encoder

TEXTS = [
    "the quick brown fox",
    'he said "no", twice',
    "naïve café – 東京",
    "tab-free, comma, done",
    "line five",
]


pytestmark = pytest.mark.usefixtures("own_cache")


def leftovers(cache: Path) -> list[Path]:
    """What a failure left behind, without vocabularies that were finished before it."""
    return [p for p in cache.glob("*") if not p.name.startswith("tokenizer-")]


def table(path: Path, documents) -> Table:
    path.mkdir(exist_ok=True)
    write(path, [("train", {"tokens": document}) for document in documents], dtype="uint16")
    return Table(path / "train")


def pieces(data, *, holdout=0.05):
    """What a corpus yields: (split, text, end of document)."""
    return list(Corpus(data=data, holdout=holdout, text=None))


def tokens_of(packed: Packed):
    return [packed[i] for i in range(len(packed))]


# packing


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(2, 33), st.integers(1, 32))
def test_packed_windows_lose_nothing_and_leak_nothing(tmp_path_factory, lengths, length, stride):
    # Token = number of its document, so a leak shows in the ids themselves.
    made = table(tmp_path_factory.mktemp("t"), [np.full(n, d + 1) for d, n in enumerate(lengths)])
    stream = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    train = tokens_of(Packed(made, length=length))
    joined = np.concatenate([item["input_ids"].numpy() for item in train])
    np.testing.assert_array_equal(joined, stream[: len(joined)])
    assert len(stream) - len(joined) < length
    windows = list(train)
    if stride < length:
        sliding = tokens_of(Packed(made, length=length, stride=stride))
        windows += sliding
        scored = np.zeros(len(stream), int)
        for index, item in enumerate(sliding):
            where = np.flatnonzero(item["labels"].numpy() != -100) + index * stride
            scored[where] += 1
            if index:
                assert (where - index * stride >= length - stride).all(), "less context than promised"
        starts = np.cumsum(lengths) - lengths
        expected = np.ones(len(stream), int)
        expected[starts] = 0  # a document's first token cannot be predicted: nothing of it comes before
        np.testing.assert_array_equal(scored, expected)
    for item in windows:
        ids, labels, positions = (item[k].numpy() for k in ("input_ids", "labels", "position_ids"))
        for t in np.flatnonzero(labels != -100):
            assert ids[t] == ids[t - 1], "a label is predicted from another document"
            assert labels[t] == ids[t]
        batch = Collate(0, packed=True)([item, windows[0]])
        for row in range(2):
            edges = cu_seqlens(batch["position_ids"][row : row + 1]).tolist()
            for a, b in zip(edges, edges[1:]):
                assert len(set(batch["input_ids"][row, a:b].tolist())) == 1, "two documents in one segment"
        assert (positions == 0).sum() == len(set(ids.tolist()))


def test_documents_of_a_batch():
    positions = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 0, 0, 1]])
    assert cu_seqlens(positions).tolist() == [0, 3, 5, 7, 8, 10]


def test_window_arguments_are_checked(tmp_path):
    made = table(tmp_path / "t", [[1, 2, 3]])
    for wrong, message in (
        ({"length": 1}, "length must be at least 2"),
        ({"length": 4, "stride": 4}, "stride must lie in 1 ... length - 1 = 3"),
    ):
        with pytest.raises(ValueError, match=message):
            Packed(made, **wrong)
    with pytest.raises(IndexError):
        Packed(made, length=2)[5]


def test_masking_follows_its_rule_and_its_seed():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return {
                "input_ids": torch.from_numpy(np.r_[1, np.random.default_rng(i).integers(5, 105, 500), 2])
            }

    inner = Rows()
    hide = Masked(inner, content=np.arange(5, 105), mask=4, seed=3, copies=2, share=0.15)
    assert len(hide) == 80
    chosen = masked = other = kept = 0
    for i in range(80):
        item, source = hide[i], inner[i % 40]["input_ids"]
        hidden = item["labels"] != -100
        assert (item["labels"][hidden] == source[hidden]).all()
        assert (item["input_ids"][~hidden] == source[~hidden]).all(), "a token without a label changed"
        assert not hidden[0] and not hidden[-1], "a special token was hidden"
        now = item["input_ids"][hidden]
        assert (((now >= 5) & (now < 105)) | (now == 4)).all()
        chosen += int(hidden.sum())
        masked += int((now == 4).sum())
        kept += int((now == source[hidden]).sum())
        other += int(((now != 4) & (now != source[hidden])).sum())
    assert abs(chosen / (80 * 500) - 0.15) < 0.01
    np.testing.assert_allclose(
        [masked / chosen, other / chosen, kept / chosen], [0.8, 0.099, 0.101], atol=0.015
    )
    assert (hide[0]["input_ids"] == hide[0]["input_ids"]).all()
    assert (hide[0]["labels"] != hide[40]["labels"]).any(), "the second copy must be masked differently"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_whole_words_are_hidden_together(tmp_path, tokenizer):
    (tmp_path / "d").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "d" / f"{split}.txt").write_text(
            "several longer words, about café and naïve writing; " * 40
        )
    task = build("mlm", data=tmp_path / "d", length=128, whole_word=True, tokenizer=tokenizer)
    whole, byte = 0, {c: b for b, c in enumerate(byte_characters())}
    for i in range(min(len(task.train), 40)):
        item = task.train[i]
        hidden = (item["labels"] != -100).numpy()
        source = torch.where(item["labels"] != -100, item["labels"], item["input_ids"])
        inside = (source != task.special.bos) & (source != task.special.eos)
        source, hidden = source[inside], hidden[inside.numpy()]
        tokens = [task.tokenizer.convert_ids_to_tokens(int(t)) for t in source]
        ends = np.cumsum([len(t) for t in tokens])  # a character of a token is a byte of the text
        text = bytes(byte[c] for c in "".join(tokens))
        for word in re.finditer(rb"[A-Za-z\x80-\xff]+", text):
            first = np.searchsorted(ends, word.start(), side="right")
            last = np.searchsorted(ends, word.end(), side="left")
            covered = hidden[first : last + 1]
            assert covered.all() or not covered.any(), f"{word.group()} is hidden in part"
            whole += bool(covered.all())
    assert whole > 10


# tables, files, splits


def write_rows(folder: Path, kind: str, count: int = 60) -> Path:
    path = folder / f"data{kind}"
    records = [(TEXTS[i % 5] + f" {i}", "yes" if i % 3 else "no") for i in range(count)]
    packer = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with packer(path, "wt", encoding="utf-8", newline="") as file:
        if ".jsonl" in kind:
            file.writelines(
                json.dumps({"text": t, "label": label}, ensure_ascii=False) + "\n" for t, label in records
            )
        elif ".tsv" in kind:
            file.write("text\tlabel\n" + "".join(f"{t}\t{label}\n" for t, label in records))
        else:
            import csv

            csv.writer(file).writerows([("text", "label"), *records])
    return path


def contents(task):
    sets = (task.train, task.validation, task.test)
    return [[(task.tokenizer.decode(r["input_ids"][1:]), task.labels[r["labels"]]) for r in s] for s in sets]


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".jsonl", ".csv.gz", ".tsv.xz", ".jsonl.gz", ".jsonl.xz"])
def test_every_form_of_a_table_gives_the_same_rows(tmp_path, kind):
    found = contents(build("classify", data=write_rows(tmp_path, kind)))
    assert sorted(row for side in found for row in side) == sorted(
        (TEXTS[i % 5] + f" {i}", "yes" if i % 3 else "no") for i in range(60)
    )
    assert [len(s) for s in found] == [48, 6, 6]
    (tmp_path / "other").mkdir()
    assert found == contents(build("classify", data=write_rows(tmp_path / "other", ".csv")))


def test_a_saved_hugging_face_dataset(tmp_path):
    import datasets

    part = {"sentence": [f"row {i}" for i in range(30)], "label": [i % 2 for i in range(30)]}
    whole = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict(part) for name in ("train", "validation", "test")}
    )
    whole.save_to_disk(str(tmp_path / "saved"))
    task = build("classify", data=tmp_path / "saved")
    assert [len(s) for s in (task.train, task.validation, task.test)] == [30, 30, 30]
    assert contents(task)[2][7] == ("row 7", "1")
    datasets.Dataset.from_dict({"text": [f"document {i} " * 5 for i in range(40)]}).save_to_disk(
        str(tmp_path / "flat")
    )
    assert build("lm", data=tmp_path / "flat", length=32).kind == "causal-lm"


def test_holdout_is_exact_in_every_block_and_depends_on_the_seed():
    splits = [[Holdout(["all"], share=0.1, seed=s)("all", i) for i in range(1000)] for s in (0, 0, 1)]
    first, again, other = splits
    assert first == again != other
    for start in range(0, 1000, 10):
        assert sorted(first[start : start + 10]) == ["test"] + ["train"] * 8 + ["validation"]
    with pytest.raises(ValueError, match="holdout must lie in"):
        Holdout(["all"], share=0.5, seed=0)


def test_pairs_are_joined_and_the_longer_gives_way(tmp_path):
    lines = ["question1\tquestion2\tlabel"] + [f"{'a' * 50}\t{'b' * 5}\t{i % 2}" for i in range(40)]
    (tmp_path / "p.tsv").write_text("\n".join(lines))
    task = build("classify", data=tmp_path / "p.tsv", pair="question2", length=32, tokenizer="bytes")
    ids = task.train[0]["input_ids"]
    assert task.tokenizer.decode(ids) == "<s>" + "a" * 24 + "<sep>" + "b" * 5 + "</s>"
    assert len(ids) == 32


def test_documents_by_row_by_file_and_by_size(tmp_path):
    stories = [f"Story {i}.\nIt ends.\n" for i in range(45)]
    (tmp_path / "s.jsonl").write_text("\n".join(json.dumps({"text": story}) for story in stories))
    found = pieces(tmp_path / "s.jsonl", holdout=0.1)
    assert [text for _, text, _ in found] == stories and all(end for *_, end in found)
    assert sum(split == "test" for split, *_ in found) >= 4

    text = "".join(f"line {i}\n" for i in range(2000))
    (tmp_path / "one.txt").write_text(text)
    sides = {}
    for split, piece, _ in pieces(tmp_path / "one.txt", holdout=0.1):
        sides[split] = sides.get(split, "") + piece
    assert sides["train"] + sides["validation"] + sides["test"] == text
    assert all(side.startswith("line") for side in sides.values()), "cut inside a line"
    np.testing.assert_allclose(
        [len(sides[s]) / len(text) for s in ("train", "validation", "test")], [0.8, 0.1, 0.1], atol=0.01
    )

    folder = tmp_path / "named"
    folder.mkdir()
    for name in ("wiki.train.txt", "wiki.valid.txt", "notes.md"):
        (folder / name).write_text(name * 3)
    found = {split for split, text, _ in pieces(folder) if text}
    assert found == {"train", "validation", "test"}
    assert not any("notes" in text for _, text, _ in pieces(folder)), "a file that names no split was read"


def test_a_name_of_two_splits(tmp_path):
    """A folder named after a split decides; a file whose name mentions two is refused."""
    for name in ("train/a.txt", "train/test_plan.txt", "test/train-notes.txt", "val/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text\n")
    found = {split: [file.name for file in members] for split, members in files(tmp_path).items()}
    assert found == {
        "train": ["a.txt", "test_plan.txt"],
        "validation": ["b.txt"],
        "test": ["train-notes.txt"],
    }
    (tmp_path / "train_and_test.txt").write_text("text\n")
    with pytest.raises(DataError, match="train_and_test.txt: the name says train and test; rename it"):
        files(tmp_path)


# tokenizers


def test_the_byte_tokenizer_and_its_shortcut_agree(tmp_path):
    encode = encoder("bytes")
    text = "naïve\n\t東京 <mask> </s> 🙂 \x00 \u2028"
    ids = encode.encode([text])[0]
    assert ids.tolist() == encode.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert ids.tolist() == [b + 5 for b in text.encode()]
    assert encode.tokenizer.decode(ids) == text
    assert encode.size == 261 and encode.byte_lengths().tolist() == [0] * 5 + [1] * 256
    encode.tokenizer.save_pretrained(tmp_path / "tok")
    again = encoder(str(tmp_path / "tok"))
    assert again.encode([text])[0].tolist() == ids.tolist() and again.special == encode.special


def test_a_tokenizer_trained_on_the_data_counts_bytes_exactly(tmp_path):
    text = "".join(
        f"the {w} of the {v}\n"
        for w in ("café", "house", "house")
        for v in ("north", "south")
        for _ in range(60)
    )
    (tmp_path / "t.txt").write_text(text)
    task = build("lm", data=tmp_path / "t.txt", tokenizer="bpe:320", length=32)
    assert task.vocab_size <= 320 and task.tokenizer.backend_tokenizer.get_vocab_size() == task.vocab_size
    stream = task.train.table.values("tokens")
    size = task.preprocess_logits_for_metrics.byte_lengths
    assert int(size[torch.from_numpy(stream.astype(np.int64))].sum()) == len(
        task.tokenizer.decode(stream[1:-1]).encode()
    )
    with pytest.raises(ValueError, match="at least 261"):
        build("lm", data=tmp_path / "t.txt", tokenizer="bpe:100")
    with pytest.raises(DataError, match="must be 'bytes', 'bpe', 'bpe:SIZE', or a path"):
        build("lm", data=tmp_path / "t.txt", tokenizer=str(tmp_path / "nowhere"))


def test_bare_vocabularies_are_read(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "mat", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    encode = encoder(str(tmp_path))
    assert encode.encode(["the cats sat ."])[0].tolist() == [5, 6, 8, 7, 10]
    assert (encode.special.pad, encode.special.bos, encode.special.eos, encode.special.mask) == (0, 2, 3, 4)
    left, right = encode.joins()
    assert left.nonzero()[0].tolist() == [8] and right[6] and encode.byte_lengths() is None


# cache


def test_prepared_data_is_made_once_and_again_when_anything_changes(tmp_path, own_cache):
    path = write_rows(tmp_path, ".csv")
    build = partial(tasks.build, tokenizer="bytes")
    build("classify", data=path)
    before = {p.name: p.stat().st_mtime_ns for p in own_cache.iterdir()}
    build("classify", data=path)
    assert {p.name: p.stat().st_mtime_ns for p in own_cache.iterdir()} == before, "made twice"
    build("classify", data=path, length=64)
    assert {p.name for p in own_cache.iterdir()} == set(before), "what is kept does not depend on the length"
    for change in ({"seed": 1}, {"holdout": 0.2}, {"label": "label"}):
        build("classify", data=path, **change)
        after = {p.name for p in own_cache.iterdir()}
        assert len(after) == len(before) + 1, f"{change} did not change the key"
        before = dict.fromkeys(after)
    path.write_text(path.read_text().replace("fox", "cat"))
    assert any("cat" in text for text, _ in contents(build("classify", data=path))[0])
    moved = path.rename(tmp_path / "renamed.csv")
    build("classify", data=moved)
    assert len(list(own_cache.iterdir())) == len(before) + 1, "the key is the content, not the path"


def test_a_failure_leaves_nothing_behind(tmp_path, own_cache):
    path = write_rows(tmp_path, ".csv")
    with open(path, "a") as file:
        file.write("only one field\n")
    with pytest.raises(DataError, match=r"data.csv:62: expected 2 fields \(text, label\), got 1"):
        build("classify", data=path)
    assert not leftovers(own_cache)


def test_a_cache_by_argument_and_two_processes_at_once(tmp_path):
    code = (
        "import sys; from cosformer.tasks import build;"
        "task = build('listops', length=64, depth=4, examples=(3000, 10, 10), cache=sys.argv[1]);"
        "print(int(task.train.values('input_ids').astype('int64').sum()))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "c")], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    sums = {process.communicate()[0] for process in both}
    assert [process.returncode for process in both] == [0, 0] and len(sums) == 1
    assert len(list((tmp_path / "c").iterdir())) == 1


def test_tables_survive_workers(tmp_path):
    made = table(tmp_path / "t", [[1, 2], [], [3]])
    copy = pickle.loads(pickle.dumps(made))
    assert len(pickle.dumps(made)) < 500, "a worker would copy the data"
    assert [copy[i]["tokens"].tolist() for i in range(3)] == [[1, 2], [], [3]]
    with pytest.raises(IndexError):
        made[3]


@pytest.mark.parametrize("lines", [True, False], ids=["lines", "one-line"])
def test_text_larger_than_the_memory_budget_streams(tmp_path, lines):
    size, budget = 24 << 20, 6 << 20
    with open(tmp_path / "big.txt", "w") as file:
        for i in range(size >> 10):
            file.write(f"{i:08d} " + "x" * 1014 + ("\n" if lines else " "))
    build("copy", examples=(1, 1, 1))
    encoder("bytes")  # imports are not data
    tracemalloc.start()
    task = build("lm", data=tmp_path / "big.txt", length=4096, tokenizer="bytes")
    item = task.train[len(task.train) - 1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < budget, f"{peak >> 20} MB for a file of {size >> 20} MB"
    assert len(task.train) > 5_000 and len(item["input_ids"]) == 4096


# everything that can be wrong with a file


def put(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "task, name, content, message",
    [
        ("lm", "a.txt", b"", r"a\.txt: the file is empty"),
        ("lm", "a.txt", b"  \n \n", r"a\.txt: the file is empty"),
        ("lm", "a.txt", b"good\nb\xff\xfed\n", r"a\.txt:2: byte 0xff is not UTF-8"),
        (
            "lm",
            "a.txt",
            "text".encode("utf-16"),
            r"a\.txt:1: byte 0xff is not UTF-8 \(UTF-16 by its first bytes\)",
        ),
        ("lm", "a.txt", b"cut off \xe6\x9d", r"a\.txt:1: byte 0xe6 is not UTF-8"),
        ("lm", "a.txt.gz", b"not gzip at all", r"a\.txt\.gz: damaged \.gz file"),
        ("lm", "a.txt.xz", lzma.compress(b"x" * 99999)[:60], r"a\.txt\.xz: damaged \.xz file"),
        ("lm", "a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2: not JSON"),
        ("lm", "a.jsonl", b'{"text": "a"}\n["b"]\n', r"a\.jsonl:2: expected a JSON object, got list"),
        ("lm", "a.jsonl", b'{"body": "a"}\n', r"a\.jsonl:1: no column named text .* found body"),
        ("lm", "a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: column 'text' must hold text; got 3"),
        ("lm", "a.jsonl", b'{"text": "too"}\n{"text": "few"}\n', "split is empty"),
        ("classify", "a.csv", b"", r"a\.csv: no rows"),
        ("classify", "a.csv", b"text,label\n", r"a\.csv: no rows"),
        ("classify", "a.csv", b"text,label\nx,1\ny\n", r"a\.csv:3: expected 2 fields \(text, label\), got 1"),
        ("classify", "a.csv", b'text,label\n"x\ny",1\nz\n', r"a\.csv:4: expected 2 fields"),
        ("classify", "a.csv", b'text,label\n"x,1\n', r"a\.csv:2: not CSV"),
        ("classify", "a.csv", b"text,text\nx,1\n", r"a\.csv:1: a column is named twice"),
        (
            "classify",
            "a.csv",
            b"words,label\nx,1\ny,0\n",
            r"a\.csv:2: no column named text .*; found words, label\. Name it: --set task\.text=COLUMN",
        ),
        (
            "classify",
            "a.tsv",
            b"text\tmark\nx\t1\n",
            r"a\.tsv:2: no column named label .* Name it: --set task\.label=COLUMN",
        ),
        ("classify", "a.tsv", b"text\tlabel\n\xe9\t1\n", r"a\.tsv:2: byte 0xe9 is not UTF-8"),
        (
            "classify",
            "a.tsv",
            b"text\tlabel\n \t1\ny\t0\n",
            r"a\.tsv:2: column 'text' must hold text; got ' '",
        ),
        ("classify", "a.tsv", b"text\tlabel\nx\t\n", r"a\.tsv:2: column 'label' must hold a label"),
        (
            "classify",
            "a.tsv",
            b"text\tlabel\n" + b"x\t1\n" * 30,
            r"24 training rows have 1 label\(s\) \(1\); two or more",
        ),
        ("classify", "a.tsv", b"text\tlabel\nx\t1\ny\t0\n", "split is empty"),
        ("classify", "a.parquet", b"PAR1", r"expected one of \.csv, \.tsv, \.jsonl"),
        ("seq2seq", "a.tsv", b"source\tgoal\nx\ty\n", r"a\.tsv:2: no column named target"),
        ("text", "a.tsv", b"1\t9\t0\tfine\n", "expected a folder with files named train and test"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, own_cache, task, name, content, message):
    path = put(tmp_path, name, content)
    with pytest.raises(DataError, match=message):
        build(task, data=path)
    assert not leftovers(own_cache)


def test_labels_outside_the_set(tmp_path, own_cache):
    put(tmp_path, "d/train.tsv", b"text\tlabel\na\t0\nb\t1\n")
    put(tmp_path, "d/valid.tsv", b"text\tlabel\na\t0\nb\t2\n")
    put(tmp_path, "d/test.tsv", b"text\tlabel\na\t0\n")
    with pytest.raises(DataError, match=r"valid\.tsv:3: label '2' is not one of 0, 1"):
        build("classify", data=tmp_path / "d")
    with pytest.raises(DataError, match=r"train\.tsv:3: label '1' is not one of 0, 2"):
        build("classify", data=tmp_path / "d", labels=[0, 2])
    assert not leftovers(own_cache)
    assert build("classify", data=tmp_path / "d", labels=[0, 1, 2]).labels == ("0", "1", "2")


def test_folders(tmp_path):
    with pytest.raises(DataError, match="neither a file nor a folder"):
        build("lm", data=tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no files"):
        build("lm", data=tmp_path / "empty")
    put(tmp_path, "mixed/a.txt", b"text")
    put(tmp_path, "mixed/b.csv", b"text\nx\n")
    with pytest.raises(DataError, match="either text or tables"):
        build("lm", data=tmp_path / "mixed")


def numbered(path: Path, first: int, last: int) -> None:
    path.parent.mkdir(exist_ok=True)
    rows = (f"text {i} of {'no' if i % 2 else 'yes'},{i % 2}" for i in range(first, last))
    path.write_text("\n".join(["text,label", *rows]))


def test_a_table_called_test_is_never_trained_on(tmp_path):
    """Where none is called train the others are; a title that only mentions a split is no set."""
    numbered(tmp_path / "alone/test.csv", 0, 40)
    for name in ("classify", "lm"):
        with pytest.raises(
            DataError, match="alone: nothing is for training, only for test; name a file train"
        ):
            build(name, data=tmp_path / "alone")
    numbered(tmp_path / "two/test.csv", 0, 40)
    numbered(tmp_path / "two/reviews.csv", 40, 240)
    task = build("classify", data=tmp_path / "two")
    assert (len(task.train), len(task.validation), len(task.test)) == (180, 20, 40)
    numbered(tmp_path / "titles/the-test-of-time.csv", 0, 100)
    assert len(build("classify", data=tmp_path / "titles").test) == 10


@pytest.mark.parametrize("split", ["test", "validation", "train"])
def test_data_to_be_scored_is_of_one_split(tmp_path, split):
    """With `whole` a table without sets is all of that split; sets with names keep theirs."""
    numbered(tmp_path / "d/rows.csv", 0, 30)
    vocabulary = {"tokenizer": "bytes", "whole": split}
    task = build("classify", data=tmp_path / "d", labels=["0", "1"], **vocabulary)
    assert len(getattr(task, split)) == 30 and task.max_length >= 16
    assert all(not len(getattr(task, other)) for other in {"train", "test"} - {split})
    pairs = put(tmp_path, "pairs.tsv", b"source\ttarget\n" + b"a b\tc d e\n" * 3)
    assert len(getattr(build("seq2seq", data=pairs, **vocabulary), split)) == 3
    text = put(tmp_path, "short.txt", b"one line\n")
    assert len(getattr(build("lm", data=text, **vocabulary), split)) == 1
    numbered(tmp_path / "d/test.csv", 30, 40)
    numbered(tmp_path / "d/train.csv", 40, 140)
    assert len(build("classify", data=tmp_path / "d", **vocabulary | {"whole": "test"}).test) == 10
    with pytest.raises(ValueError, match="whole is 'all'; one of train, validation, test, or None"):
        build("lm", data=text, whole="all")


def test_a_long_field_is_no_error(tmp_path):
    path = put(tmp_path, "a.csv", b"text,label\n" + b"x" * 300_000 + b",1\n")
    assert len(next(rows(path, bad=BadRows())).fields["text"]) == 300_000


def test_without_data_the_standard_library_is_read():
    task = build("lm", length=256, tokenizer="bytes")
    text = task.tokenizer.decode(task.validation.table.values("tokens")[:20_000])
    assert "import" in text and "def " in text
    assert len(task.train) > 5_000
