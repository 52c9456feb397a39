"""What is compared: the subjects (a task as every mixer gets it) and the mixers."""

import dataclasses
from typing import Any

from .. import tasks

MIXERS = ("softmax", "softmax+rope", "cosformer-paper", "cosformer", "elu")
# The paper's studies: what softmax does (identity, LeakyReLU, ReLU, softmax), the cosine (with and without), and decay.
STUDY = ("identity", "leaky_relu", "relu", "cosformer-ladder", "cosformer-no-cosine")
# A class from thousands of tokens, learned from scratch: with plain means or wider first weights, hundreds of steps show nothing.
LONG = {"pooling": "normed-mean", "initializer_range": 0.02}
ALIKE = {"train_sampling_strategy": "group_by_length"}  # texts of like length in a batch: less padding
EVALUATIONS = 5  # while training; more would take much of a short run's time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A task with the size, batch and optimiser that every mixer gets."""

    name: str
    group: str  # of the report: lm, finetune, lra, toy
    title: str
    data: str  # in words
    task: str
    task_settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    size: str = "tiny"
    model_fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight: float = 1.0  # of the time there is
    most_steps: int = 10_000
    eval_examples: int = 64
    test_examples: int = 256
    after: str | None = None  # start from the same mixer's model of this subject
    study: bool = False  # also compare the paper's studies on it

    def build(self) -> tasks.Task:
        return tasks.build(self.task, **self.task_settings)


def fast(rate: float, batch: int, **more: Any) -> dict[str, Any]:
    return {
        "learning_rate": rate,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        **more,
    }


def demo(data: str | None = None, length: int | None = None) -> list[Subject]:
    """What runs anywhere in minutes: data that every machine has or makes."""
    whose = data or "the Python standard library's source"
    corpus = {"data": data} if data else {}
    return [
        Subject(
            name="lm",
            group="lm",
            title="Language model on bytes",
            data=whose,
            task="lm",
            task_settings={"length": length or 256, "isolate": False, **corpus},
            size="toy",
            training=fast(3e-3, 8),
            weight=2.0,
            eval_examples=32,
            test_examples=128,
            study=True,
        ),
        Subject(
            name="listops",
            group="lra",
            title="ListOps, short",
            data="generated: depth 3, up to 4 arguments, 32 tokens",
            task="listops",
            task_settings={
                "length": 32,
                "depth": 3,
                "args": 4,
                "least": 6,
                "examples": [50_000, 1_000, 1_000],
            },
            size="toy",
            training=fast(2e-3, 64),
            eval_examples=256,
            test_examples=1_000,
            most_steps=1_000,
        ),
        Subject(
            name="recall",
            group="toy",
            title="Associative recall",
            data="generated: 8 pairs of keys and values, then every key again, in 32 tokens",
            task="recall",
            task_settings={"length": 32, "pairs": 8, "vocabulary": 32, "examples": [50_000, 1_000, 1_000]},
            size="toy",
            training=fast(3e-3, 64),
            eval_examples=256,
            test_examples=1_000,
            most_steps=600,
        ),
    ]


def full(root: str) -> list[Subject]:
    """The real sets, in the folder `root`: wikitext-2, imdb, sst2, cifar10-gray; ListOps is generated as published."""
    pretraining = {"data": f"{root}/wikitext-2", "length": 512, "isolate": False}
    return [
        Subject(
            name="wikitext2-lm",
            group="lm",
            title="WikiText-2 language model, bytes",
            data="WikiText-2",
            task="lm",
            task_settings={"data": f"{root}/wikitext-2", "length": 1024, "isolate": False},
            training=fast(2e-3, 4),
            eval_examples=64,
            test_examples=512,
            weight=1.5,
        ),
        Subject(
            name="wikitext2-mlm",
            group="finetune",
            title="WikiText-2 masked pre-training, bytes",
            data="WikiText-2",
            task="mlm",
            task_settings=pretraining,
            training=fast(1e-3, 8),
            eval_examples=64,
            test_examples=256,
        ),
        Subject(
            name="sst2",
            group="finetune",
            title="SST-2, fine-tuned from the masked model",
            data="SST-2",
            task="classify",
            task_settings={"data": f"{root}/sst2", "length": 256},
            model_fields={"pooling": "mean"},
            training=fast(5e-4, 32),
            eval_examples=872,
            test_examples=1821,
            after="wikitext2-mlm",
            weight=0.7,
        ),
        Subject(
            name="imdb",
            group="lra",
            title="Text: IMDB as bytes, 4,096",
            data="IMDB",
            task="text",
            task_settings={"data": f"{root}/imdb", "holdout": 0.04},
            size="toy",
            model_fields=LONG,
            training=fast(1e-3, 16, **ALIKE),
            eval_examples=256,
            test_examples=1_000,
            weight=1.5,
        ),
        Subject(
            name="cifar10",
            group="lra",
            title="Image: CIFAR-10, grey pixels, 1,024",
            data="CIFAR-10",
            task="image",
            task_settings={"data": f"{root}/cifar10-gray"},
            size="toy",
            model_fields=LONG,
            training=fast(2e-3, 16),
            eval_examples=256,
            test_examples=1_000,
        ),
        Subject(
            name="listops-2000",
            group="lra",
            title="ListOps, 2,000",
            data="generated as published",
            task="listops",
            size="toy",
            training=fast(1e-3, 8, **ALIKE),
            eval_examples=128,
            test_examples=500,
        ),
    ]


def mixers_of(subject: Subject, mixers: list[str]) -> list[str]:
    """The mixers compared on a subject; the paper's studies come with the default ones."""
    return list(dict.fromkeys([*mixers, *(STUDY if subject.study and set(MIXERS) <= set(mixers) else ())]))
