"""One contract over every task; recall, copy, reverse, generated tables; Long-Range Arena's made-up files."""

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import aan, cifar, imdb, python_of

from cosformer import tasks
from cosformer.tasks import cache, generated, pathfinder, texts, tokens
from cosformer.tasks.generated import BAD, GOOD, dates, reviews
from cosformer.tasks.published import PUBLISHED

LRA = ("listops", "text", "retrieval", "image", "pathfinder")
few = (40, 8, 8)


def make(name, folder):
    options = {
        "lm": {"length": 64},
        "mlm": {"length": 64},
        "listops": {"length": 64, "depth": 4, "args": 4, "examples": few},
        "pathfinder": {"difficulty": "easy", "examples": few},
        "recall": {"length": 32, "pairs": 4, "examples": few},
        "copy": {"examples": few},
        "reverse": {"examples": few},
    }.get(name, {})
    if name in ("lm", "mlm"):
        (folder / "t.txt").write_text("".join(f"some line number {i}\n" for i in range(2000)))
        options["data"] = folder / "t.txt"
    if name in ("text", "retrieval", "image"):
        options["data"] = {"text": imdb, "retrieval": aan, "image": cifar}[name](folder / name)
    return options


@pytest.mark.parametrize("name", tasks.names())
def test_every_task_keeps_the_contract(name, tmp_path, monkeypatch):
    monkeypatch.setattr(generated, "SIZES", (200, 40, 40))
    options = make(name, tmp_path)
    takes_cache = "cache" in tasks.settings(name)
    built = [
        tasks.build(name, **options, **({"cache": tmp_path / c} if takes_cache else {})) for c in ("a", "b")
    ]
    task = built[0]
    assert task.name == name and task.kind in tasks.KINDS
    for split in ("train", "validation", "test"):
        first, second = (getattr(t, split) for t in built)
        assert len(first) == len(second) > 0
        n = min(len(first), 16)
        batch, again = (t.collate([s[i] for i in range(n)]) for t, s in zip(built, (first, second)))
        assert batch.keys() == again.keys() and all((batch[k] == again[k]).all() for k in batch), (
            "not a function of the seed"
        )
        assert all(v.dtype == torch.int64 and len(v) == n for v in batch.values())
        for key in ("input_ids", "pair_input_ids"):
            if key in batch:
                assert (
                    batch[key].shape[1] <= task.max_length
                    and 0 <= batch[key].min()
                    and batch[key].max() < task.vocab_size
                )
        labels = batch["labels"]
        if "classification" in task.kind:
            assert (
                labels.shape == (n,)
                and 0 <= labels.min()
                and labels.max() < task.num_labels == len(task.labels)
            )
            assert (batch["input_ids"][batch["attention_mask"] == 0] == task.special.pad).all()
            predictions = task.preprocess_logits_for_metrics(torch.eye(task.num_labels)[labels], labels)
        else:
            length = labels.shape[1]
            logits = torch.nn.functional.one_hot(labels.clamp_min(0), task.vocab_size).float() * 50
            if task.kind == "causal-lm":
                logits = logits.roll(-1, 1)
            predictions = task.preprocess_logits_for_metrics(logits, labels)
            assert (
                length == (batch["input_ids"].shape[1] if task.kind != "seq2seq" else length)
                and (labels != -100).any(1).all()
            )
        perfect = task.compute_metrics(
            type("P", (), {"predictions": predictions.numpy(), "label_ids": labels.numpy()})
        )
        assert task.metric in perfect and {type(value) for value in perfect.values()} == {float}
        best = perfect.get("accuracy", perfect.get("sequence_accuracy"))
        assert best == pytest.approx(1.0), "an oracle must score perfectly"
    for part in (task.train, task.collate, task.compute_metrics, task.preprocess_logits_for_metrics):
        pickle.loads(pickle.dumps(part))  # what worker processes are sent
    json.dumps(dict(task.settings))


def test_the_registry_says_what_it_takes(tmp_path):
    with pytest.raises(ValueError, match="unknown task 'lmm'; one of lm, mlm"):
        tasks.build("lmm")
    with pytest.raises(TypeError, match="task 'listops' has no setting 'tokenizer'; it takes data, length"):
        tasks.build("listops", tokenizer="bytes")
    for name in ("text", "retrieval", "image"):
        with pytest.raises(TypeError, match=f"task '{name}' needs --data"):
            tasks.build(name)


def test_importing_the_registry_is_light():
    heavy = ("transformers", "datasets", "tokenizers", "PIL", "sacrebleu")
    code = f"import sys; import cosformer.tasks; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_published_sizes_come_with_every_arena_task(tmp_path):
    assert set(PUBLISHED) == set(LRA)
    for name in LRA:
        task = tasks.build(name, **make(name, tmp_path), cache=tmp_path / "c")
        assert task.published == PUBLISHED[name]
        assert task.published["width"] % task.published["heads"] == 0


# recall and the toys


@pytest.mark.parametrize("blank", [True, False])
@pytest.mark.parametrize("length, pairs, vocabulary", [(64, 4, 8192), (128, 32, 8192), (32, 8, 20)])
def test_recall_asks_for_the_value_that_followed_the_key(length, pairs, vocabulary, blank):
    task = tasks.build(
        "recall", length=length, pairs=pairs, vocabulary=vocabulary, blank=blank, examples=(300, 10, 10)
    )
    gaps = []
    for row in task.train:
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        memory = dict(zip(ids[0 : 2 * pairs : 2], ids[1 : 2 * pairs : 2]))
        assert len(memory) == pairs and all(0 < k < vocabulary // 2 for k in memory)
        assert (
            all(vocabulary // 2 <= v < vocabulary for v in memory.values())
            and len(set(memory.values())) == pairs
        )
        asked = [t for t, label in enumerate(labels) if label != -100]
        assert len(asked) == pairs and min(asked) > 2 * pairs
        assert sorted(ids[t - 1] for t in asked) == sorted(memory), "each key is asked for once"
        assert all(memory[ids[t - 1]] == labels[t] for t in asked)
        if blank:
            assert all(token == 0 for t, token in enumerate(ids) if t >= 2 * pairs and t + 1 not in asked)
        gaps += [(t - 1 - 2 * pairs) // 2 for t in asked]
    if 4 * pairs < length:  # otherwise every place is taken
        places = (length - 2 * pairs) // 2
        assert np.mean(gaps) < 0.85 * (places - 1) / 2, "queries must crowd to the front, by the power law"


def test_recall_refuses_what_does_not_fit():
    for wrong, message in (
        ({"length": 30, "pairs": 8}, "at least 4"),
        ({"length": 33}, "must be even"),
        ({"vocabulary": 8, "pairs": 8}, "fewer than pairs=8"),
    ):
        with pytest.raises(ValueError, match=message):
            tasks.build("recall", **wrong)


def test_copy_and_reverse_ask_for_what_was_given():
    task = tasks.build("copy", length=12, examples=few)
    for row in task.train:
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        assert ids[0] == 1 and ids[6] == 3 and ids[1:6] == ids[7:] == labels[7:] and labels[:7] == [-100] * 7
    task = tasks.build("reverse", length=9, examples=few)
    for row in task.train:
        assert row["labels"].tolist() == [*row["input_ids"].tolist()[::-1], task.special.eos]
    assert task.max_target_length == 10


# generated tables


def test_reviews_need_more_than_counting_words():
    rows = list(reviews(seed=0))
    assert [sum(s == split for s, _ in rows) for split in ("train", "validation", "test")] == [
        8000,
        1000,
        1000,
    ]
    votes = []
    for _, row in rows:
        text = row.fields["text"]
        label = row.fields["label"] == "positive"
        # The deciding clause, found backwards: after every "but", before every "although".
        clause = text.split(" but ")[-1].split(" although ")[0]
        said = any(word in clause.split() for word in GOOD)
        assert said != any(word in clause.split() for word in BAD)
        assert (said != ("never" in clause)) == label
        score = sum(w in GOOD for w in text.split()) - sum(w in BAD for w in text.split())
        votes.append((score > 0) == label if score else 0.5)
    assert abs(np.mean(votes) - 0.5) < 0.03, "counting good and bad words must not solve it"
    assert abs(np.mean([r.fields["label"] == "positive" for _, r in rows]) - 0.5) < 0.02
    assert rows == list(reviews(seed=0)) != list(reviews(seed=1))


def test_dates_are_right():
    for _, row in list(dates(seed=0))[:2000]:
        year, month, day = row.fields["target"].split("-")
        numbers = {int(n) for n in re.findall(r"\d+", row.fields["source"])}
        assert int(year) in numbers and int(day) in numbers
        names = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
        assert names[int(month) - 1] in row.fields["source"].lower() or int(month) in numbers


# Long-Range Arena from files


def test_imdb_is_cut_to_bytes_and_validates_on_test_as_published(tmp_path):
    data = imdb(tmp_path / "imdb")
    task = tasks.build("text", data=data, length=512, cache=tmp_path / "c")
    assert (len(task.train), len(task.validation), len(task.test)) == (30, 30, 30)
    assert task.validation is task.test
    assert task.tokenizer.decode(task.train[3]["input_ids"][:24]) == '<s>A "train" film, great. '[:26]
    assert task.train[29]["input_ids"].shape == (512,)
    held = tasks.build("text", data=data, length=512, holdout=0.1, cache=tmp_path / "c")
    assert (len(held.train), len(held.validation), len(held.test)) == (27, 3, 30)


def test_retrieval_reads_the_published_form(tmp_path):
    task = tasks.build("retrieval", data=aan(tmp_path / "aan"), length=64, cache=tmp_path / "c")
    row = task.validation[5]
    assert row["labels"] == 1 and task.tokenizer.decode(row["input_ids"]) == "<s>paper 5 in eval"
    assert task.tokenizer.decode(row["pair_input_ids"]) == "<s>another paper 5"
    batch = task.collate([task.train[i] for i in range(12)])
    assert set(batch) == {"input_ids", "attention_mask", "pair_input_ids", "pair_attention_mask", "labels"}
    with open(tmp_path / "aan" / "new_aan_pairs.test.tsv", "a") as file:
        file.write("2.0\tP\tQ\ta\tb\n")
    with pytest.raises(tasks.DataError, match=r"new_aan_pairs.test.tsv:13: label '2' is not one of 0, 1"):
        tasks.build("retrieval", data=tmp_path / "aan", length=64, cache=tmp_path / "c")


def test_every_form_of_cifar_gives_the_same_pixels(tmp_path):
    folders = [cifar(tmp_path / form, form) for form in ("binary", "png")]
    binary, strips = (tasks.build("image", data=folder, cache=tmp_path / "c") for folder in folders)
    assert [len(s) for s in (binary.train, binary.validation, binary.test)] == [90, 10, 20]
    expected = np.random.default_rng(1).integers(0, 256, (20, 1024), dtype=np.uint8)
    mixed, grey = (task.train.values("input_ids").astype(int) for task in (binary, strips))
    np.testing.assert_array_equal(grey.reshape(90, 1024)[:20] - 5, expected)
    # The weights of red, green and blue sum to 0.9999, so equal channels come out within one level.
    assert np.abs(mixed - grey).max() <= 1
    np.testing.assert_array_equal(binary.test.values("labels"), strips.test.values("labels"))


def test_damaged_images_are_refused(tmp_path):
    def broken(form, name, content):
        folder = cifar(tmp_path / f"{form}-{name}-{len(list(tmp_path.iterdir()))}", form)
        (folder / name).write_bytes(content)
        return folder

    bad_label = bytearray((cifar(tmp_path / "x") / "data_batch_2.bin").read_bytes())
    bad_label[3073 * 4] = 11
    cases = [
        (
            broken("binary", "data_batch_2.bin", b"123"),
            "data_batch_2.bin: not a CIFAR-10 binary batch: 3 bytes",
        ),
        (
            broken("binary", "data_batch_2.bin", bytes(bad_label)),
            "data_batch_2.bin: image 4 has label 11; labels are 0 ... 9",
        ),
        (broken("png", "train_2.png", b"not a png"), "train_2.png: not a readable PNG"),
        (broken("png", "train_labels.u8", b"\0\1"), "2 labels for 100 images"),
    ]
    for folder, message in cases:
        with pytest.raises(tasks.DataError, match=message):
            tasks.build("image", data=folder, cache=tmp_path / "c")
    (tmp_path / "none").mkdir()
    with pytest.raises(tasks.DataError, match="expected CIFAR-10 as"):
        tasks.build("image", data=tmp_path / "none", cache=tmp_path / "c")
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").iterdir())


# self-pretraining


@pytest.mark.parametrize("name", ["listops", "retrieval", "pathfinder"])
def test_self_pretraining_hides_the_tasks_own_inputs(name, tmp_path):
    task = tasks.build(name, **make(name, tmp_path), cache=tmp_path / "c")
    before = tasks.pretraining(task, copies=3)
    factor = 2 if task.kind == "pair-classification" else 1
    assert (
        before.kind == "masked-lm"
        and len(before.train) == 3 * factor * len(task.train)
        and before.vocab_size == task.vocab_size
    )
    batch = before.collate([before.train[i] for i in range(8)])
    hidden = batch["labels"] != -100
    restored = torch.where(hidden, batch["labels"], batch["input_ids"])
    assert 0.05 < hidden.float().mean() < 0.25 and (batch["input_ids"] == task.special.mask).any()
    for row, ids in enumerate(restored):
        source = task.train[row // factor]["pair_input_ids" if row % factor else "input_ids"]
        assert (ids[: len(source)] == source).all()
    with pytest.raises(ValueError, match="takes a classification task; 'copy' is causal-lm"):
        tasks.pretraining(tasks.build("copy", examples=few))


PAGE = Path(__file__).parents[1] / "docs" / "tasks.md"


def test_the_documentation_runs(tmp_path, monkeypatch):
    blocks = python_of(PAGE)
    assert len(blocks) >= 4
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COSFORMER_CACHE", str(tmp_path / "cache"))
    exec("\n".join(blocks), {})


def test_the_documentation_has_the_constants():
    page = " ".join(PAGE.read_text().split())
    assert f"up to {tokens.MOST:,} entries" in page
    assert f"it holds {texts.HELD} % of the training texts and is at most {texts.LONGEST:,}" in page
    assert all(f"windows of `length` ({tasks.settings(name)['length']})" in page for name in ("lm", "mlm"))
    assert f"those of {cache.LARGE >> 20} MB and more" in page
    assert re.search(r"published for ([\d, ]+) \(Path-X\) and (\d+) pixels", page).groups() == (
        "32, 64, 128",
        "256",
    )
    assert list(pathfinder.DRAWINGS) == [32, 64, 128, 256]
