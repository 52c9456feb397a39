"""What is compared, as data: the subjects (a task as every mixer gets it) and the mixers."""

import dataclasses
from typing import Any

MIXERS = ["softmax", "softmax+rope", "cosformer-paper", "cosformer", "cosformer-hybrid"]
EVIDENCE = ["softmax+rope", "cosformer-paper", "cosformer", "cosformer-hybrid"]  # the mixers of --full
# The paper's studies: what softmax does (against identity, LeakyReLU, ReLU), the cosine, and decay.
STUDY = ["elu", "identity", "leaky_relu", "relu", "cosformer-ladder", "cosformer-cosine"]
EVALUATIONS = 5  # while training; more would take too much of a short run's time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A task with the size, batch and optimiser that every mixer gets."""

    name: str
    group: str  # section of the report: lm, finetune, lra, recall, seq2seq, parts, toy
    title: str
    data: str  # in words
    task: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # the task's; see TrainingCell.run
    size: str = "tiny"
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)  # the model's
    batch: int = 8
    parts: int = 1  # a batch is computed in so many, as fewer tokens stay in a CPU's caches
    rates: tuple[float, ...] = (1e-3,)  # learning rates; of several, the best for each mixer is searched ...
    search_share: float = 0.1  # ... by training for this share of the steps ...
    search_on: "Subject | None" = None  # ... on another subject, whose best rate is then taken
    training: dict[str, Any] = dataclasses.field(default_factory=dict)  # transformers' other arguments
    steps: int | None = None  # None: what fits the time
    weight: float = 1.0  # in sharing out the time
    most_steps: int = 10_000
    seeds: tuple[int, ...] = (0,)
    eval_examples: int = 64
    test_examples: int = 256
    after: str | None = None  # start from the same mixer's model for this subject
    pretrain: dict[str, Any] | None = None  # arguments of masked pre-training on its own texts
    study: bool = False  # also compare the paper's studies on it
    only: tuple[str, ...] = ()  # instead of the default mixers: others would take too long
    by_position: bool = False  # also the loss by position in the context
    note: str | None = None  # how it departs from a published protocol
    published: dict[str, float] = dataclasses.field(default_factory=dict)  # by mixer, same protocol

    def mixers(self, chosen: list[str]) -> list[str]:
        """The mixers compared on it; the paper's studies join the default ones."""
        if self.study and chosen == MIXERS:
            return [*chosen, *STUDY]
        return list(self.only) if self.only and chosen == EVIDENCE else chosen


# fmt: off
def demo(data: str | None = None, length: int | None = None) -> list[Subject]:
    """Subjects that run anywhere in minutes, on data that every machine has or makes."""
    sizes = [50_000, 1_000, 1_000]
    return [
        Subject(
            name="lm", group="lm", title="Language model on bytes", task="lm",
            data=data or "the Python standard library's source",
            settings={"length": length or 256, "isolate": False, "tokenizer": "bytes",
                      **({"data": data} if data else {})},
            size="toy", rates=(3e-3,), weight=2.0, eval_examples=32, test_examples=128, study=True,
        ),
        Subject(
            name="recall", group="toy", title="Associative recall", task="recall",
            data="generated: 8 pairs of keys and values, then every key again, in 32 tokens",
            settings={"length": 32, "pairs": 8, "vocabulary": 32, "examples": sizes},
            size="toy", rates=(3e-3,), batch=64, weight=2.0, eval_examples=256, test_examples=1_000,
            most_steps=600,  # enough; what is left goes to ListOps
        ),
        Subject(
            name="listops", group="lra", title="ListOps, short", task="listops",
            data="generated: depth 3, up to 4 arguments, 32 tokens",
            settings={"length": 32, "depth": 3, "args": 4, "least": 6, "examples": sizes},
            size="toy", rates=(2e-3,), batch=64, eval_examples=256, test_examples=1_000, most_steps=1_000,
        ),
    ]


# A class from thousands of tokens: plain means or larger initial weights learn nothing in hundreds of steps.
LONG = {"pooling": "normed-mean", "initializer_range": 0.02}
ALIKE = {"train_sampling_strategy": "group_by_length"}  # similar lengths in a batch: less padding
# Nystromformer's models for Long-Range Arena, its optimiser and its rate, which is not searched.
SMALL = {"intermediate_size": 128, "pooling": "mean", "dropout": 0.1}
PUBLISHED = ("softmax", "cosformer")  # with learned positions, as published
ITS_OWN = {"lr_scheduler_type": "linear", "weight_decay": 0.0, "adam_beta2": 0.999}
POOLINGS = ("first", "mean", "max", "mean-max", "attention", "normed-mean")
PRETRAINED = {"max_steps": 1_000, "learning_rate": 1e-3}  # on a task's own texts
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {  # of a layer, off by default: what they would be worth
    "gate": ("with an output gate", {"output_gate": True}),
    "signs": ("with both signs", {"mixer_options": {"both_signs": True}}),
}
GRID = {64: (4, 16), 128: (16, 8), 256: (32, 16, 64)}  # tokens: pairs to recall, beside 8 in 64 and 32 in 128


def recall(length: int, pairs: int, search_on: Subject | None = None) -> Subject:
    """Half of the steps to search a rate: until a model begins to recall, its loss tells little."""
    return Subject(
        name=f"recall-{length}-{pairs}", group="recall", task="recall",
        title=f"Recall of {pairs} pairs in {length} tokens", data="generated, vocabulary 256",
        settings={"length": length, "pairs": pairs, "vocabulary": 256},
        fields={"num_hidden_layers": 2, "initializer_range": 0.02}, training={"adam_beta2": 0.95},
        batch=32, rates=(5e-4, 1e-3, 2e-3, 4e-3), search_share=0.5, search_on=search_on,
        steps=4_000 if length > 128 else 2_000,  # at 256 tokens softmax has hardly begun after 2,000
        seeds=(0, 1, 2) if (length, pairs) in ((64, 8), (128, 16)) else (0,),
        eval_examples=256, test_examples=1_000,
    )


def full(root: str) -> list[Subject]:
    """The real sets in the folder `root`, and generated ones; steps are the same on every machine."""
    wikitext = {"data": f"{root}/wikitext-2", "length": 1024, "isolate": False}
    few, many_pairs = recall(64, 8), recall(128, 32)  # the rate that is best for 8 pairs may fail for 32
    bytes_ = Subject(
        name="wikitext2-lm", group="lm", title="WikiText-2 language model, bytes", task="lm",
        data="WikiText-2", settings={**wikitext, "tokenizer": "bytes"}, batch=4,
        rates=(1e-3, 2e-3, 4e-3), steps=1_000,
        seeds=(0, 1, 2), test_examples=512, by_position=True,
    )
    # What the convolution and the norms alone are worth, to softmax and to us.
    ablated = dataclasses.replace(bytes_, group="parts", seeds=(0,), by_position=False, search_on=bytes_)
    pairs = dataclasses.replace(recall(128, 16, search_on=few), group="parts", seeds=(0,))
    spelling = Subject(
        name="cmudict", group="seq2seq", title="Spelling to phonemes, by cross attention", task="seq2seq",
        data="CMUdict", settings={"data": f"{root}/cmudict", "length": 40, "target_length": 96,
                                  "tokenizer": "bytes"},
        fields={"encoder_layers": 2, "decoder_layers": 2}, batch=64, rates=(5e-4, 1e-3, 2e-3),
        training=ALIKE, steps=4_000, eval_examples=256, test_examples=1_000,
    )
    bytes_of_imdb = Subject(  # how a text becomes one vector: from bytes ...
        name="pooling-imdb", group="parts", title="IMDB as 512 bytes", task="text", data="IMDB",
        settings={"data": f"{root}/imdb", "length": 512, "holdout": 0.04}, size="toy", batch=16, steps=300,
        eval_examples=256, test_examples=2_000, only=("cosformer",),
    )
    subwords_of_sst2 = dataclasses.replace(  # ... and from subwords
        bytes_of_imdb, name="pooling-sst2", title="SST-2 as 4,000 subwords", task="classify", data="SST-2",
        settings={"data": f"{root}/sst2", "length": 64, "tokenizer": "bpe:4000"}, batch=32,
        eval_examples=872, test_examples=1_821,
    )
    many = Subject(
        name="wikitext2-lm-30000", group="parts", title="WikiText-2 language model, 30,000 tokens", task="lm",
        data="WikiText-2", settings={**wikitext, "length": 256, "tokenizer": "bpe:30000"}, batch=8,
        rates=(5e-4, 1e-3, 2e-3), steps=400, test_examples=256, only=("cosformer",),
    )
    listops = Subject(
        name="listops-2000", group="lra", title="ListOps, 2,000", task="listops",
        data="generated as published", size="toy", fields=SMALL, batch=32, parts=4, rates=(1e-4,),
        training={**ITS_OWN, **ALIKE, "warmup_steps": 1_000}, steps=5_000, eval_examples=500,
        test_examples=2_000, published={"softmax": 0.371},
        only=("softmax", *EVIDENCE),  # relative positions alone hardly tell which operator is the first
        note="Nystromformer's protocol, by which softmax with learned positions has 37.1 %.",
    )
    shorter = dataclasses.replace(  # to search a rate: after a tenth of the steps no model has begun to learn
        listops, name="listops-500", title="ListOps, 500", settings={"length": 500}, published={}, note=None,
        training={**listops.training, "warmup_steps": 250}, steps=1_250, search_share=1.0,
    )
    long = dataclasses.replace(  # does who learns faster also end lower?
        bytes_, name="wikitext2-lm-long", title="WikiText-2 language model, bytes, 5,000 steps",
        steps=5_000, seeds=(0,),
    )
    longer = dataclasses.replace(  # as many tokens, where linear attention pays
        bytes_, name="wikitext2-lm-8192", title="WikiText-2 language model, bytes, 8,192 tokens",
        settings={**bytes_.settings, "length": 8192}, batch=1, steps=500, seeds=(0,), test_examples=64,
        eval_examples=16,
    )
    image = Subject(
        name="image", group="lra", title="Image: CIFAR-10, grey pixels, 1,024", task="image",
        data="CIFAR-10", settings={"data": f"{root}/cifar10-gray"}, size="toy", fields=LONG, batch=32,
        rates=(5e-4, 1e-3, 2e-3), steps=2_000, eval_examples=256, test_examples=2_000, only=PUBLISHED,
        note="0.7 % of the tokens of the published 35,000 steps of 256, with which softmax has 38.2 %.",
    )
    return [
        bytes_,
        long,
        longer,
        *(dataclasses.replace(of, name=f"{of.name}-conv", title=f"{title}, with convolution and norms",
                              group="parts", seeds=(0,), by_position=False, search_on=of, note=None,
                              fields={**of.fields, "short_conv": 4, "qk_norm": True}, only=(mixer,))
          for of, title, mixer in ((bytes_, "WikiText-2 bytes", "softmax+rope"),
                                   (long, "WikiText-2 bytes, 5,000 steps", "softmax+rope"),
                                   (image, "Image: CIFAR-10, grey pixels, 1,024", "softmax"))),
        dataclasses.replace(
            ablated, name="wikitext2-lm-bare", title="WikiText-2 bytes, without convolution and norms",
            fields={"short_conv": 0, "qk_norm": False}, only=("cosformer",),
        ),
        *(dataclasses.replace(of, name=f"{of.name}-{option}", title=f"{of.title}, {said}",
                              fields=of.fields | fields, only=("cosformer",))
          for of in (ablated, pairs) for option, (said, fields) in OPTIONS.items()),
        Subject(
            name="wikitext2-lm-bpe", group="lm", title="WikiText-2 language model, BPE", task="lm",
            data="WikiText-2", settings={**wikitext, "tokenizer": "bpe:8000"}, batch=4,
            rates=(1e-3, 2e-3, 4e-3), steps=1_500, test_examples=256, by_position=True,
        ),
        few,
        many_pairs,
        *(recall(length, pairs, search_on=many_pairs if length == 256 else few)
          for length, several in GRID.items() for pairs in several),
        *(dataclasses.replace(of, name=f"{of.name}-conv", title=f"{of.title}, with convolution and norms",
                              group="parts", seeds=(0,), only=("softmax+rope",),
                              fields={**of.fields, "short_conv": 4, "qk_norm": True})
          for of in (few, many_pairs)),
        dataclasses.replace(  # four layers: one in four of the hybrid's is softmax
            recall(128, 16), name="recall-128-16-deep", seeds=(0,),  # with rates of its own
            title="Recall of 16 pairs in 128 tokens, four layers",
            fields={"num_hidden_layers": 4, "initializer_range": 0.02},
            only=("softmax+rope", "cosformer", "cosformer-hybrid"),
        ),
        listops,
        dataclasses.replace(
            listops, name="listops-2000-rates", title="ListOps, 2,000, best of three rates",
            search_on=shorter, rates=(3e-4, 1e-3, 3e-3), steps=2_500, published={},
            training={**listops.training, "warmup_steps": 500},
            note="The same, with half of the steps and the best of three larger learning rates.",
        ),
        Subject(
            name="text", group="lra", title="Text: IMDB as bytes, 4,096", data="IMDB", task="text",
            settings={"data": f"{root}/imdb", "holdout": 0.04}, size="toy", fields=SMALL, batch=32, parts=4,
            rates=(1e-4,), training={**ITS_OWN, **ALIKE, "warmup_steps": 2_000}, steps=5_000,
            eval_examples=256, test_examples=2_000, only=PUBLISHED,
            note="Nystromformer's protocol, a quarter of its 20,000 steps; in full, softmax has 65.0 %.",
        ),
        image,
        Subject(
            name="wikitext2-mlm", group="finetune", title="WikiText-2 masked pre-training, BPE", task="mlm",
            data="WikiText-2", settings={**wikitext, "length": 512, "tokenizer": "bpe:8000"},
            rates=(1e-3, 2e-3, 4e-3), steps=2_000,
        ),
        Subject(
            name="sst2", group="finetune", title="SST-2, pre-trained, then fine-tuned", task="classify",
            data="SST-2", settings={"data": f"{root}/sst2", "length": 64, "tokenizer": "start"},
            fields={"pooling": "mean"}, batch=32, rates=(1e-4, 3e-4, 1e-3), training=ALIKE, steps=2_000,
            eval_examples=872, test_examples=1_821, after="wikitext2-mlm", pretrain=PRETRAINED,
        ),
        Subject(
            name="imdb", group="finetune", title="IMDB, pre-trained, then fine-tuned", task="classify",
            data="IMDB", settings={"data": f"{root}/imdb", "columns": ["label", "rating", "id", "text"],
                                   "length": 512, "tokenizer": "start", "holdout": 0.04},
            fields={"pooling": "mean"}, batch=16, rates=(1e-4, 3e-4, 1e-3), training=ALIKE, steps=3_000,
            eval_examples=256, test_examples=2_000, after="wikitext2-mlm", pretrain=PRETRAINED,
        ),
        spelling,
        dataclasses.replace(
            spelling, name="cmudict-cosine", title="Spelling to phonemes, cross attention with the cosine",
            group="parts",
            fields={**spelling.fields, "cross_mixer": "cosformer-paper"}, search_on=spelling,
            only=("cosformer-paper", "cosformer"),
        ),
        *(dataclasses.replace(of, name=f"{of.name}-{pooling}", title=f"{of.title}, pooling: {pooling}",
                              fields={"pooling": pooling})
          for of in (bytes_of_imdb, subwords_of_sst2) for pooling in POOLINGS),
        many,
        dataclasses.replace(
            many, name="wikitext2-lm-one-vs-each", title="The same with one-vs-each over 512 of them",
            fields={"loss": "one-vs-each", "loss_samples": 512},
        ),
    ]
# fmt: on
