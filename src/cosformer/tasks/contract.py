"""What a task is: three sets, a collate function, metrics, and the few numbers that a model is built with."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

KINDS = ("causal-lm", "masked-lm", "sequence-classification", "pair-classification", "seq2seq")
SPLITS = ("train", "validation", "test")
IGNORE = -100  # the label that torch's cross entropy, and so every Hugging Face model, ignores


def shown(value: Any, most: int = 60) -> str:
    """A value for an error message, cut if long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def listed(names: Collection[Any], most: int = 8) -> str:
    """Names joined by commas; only the first `most` if there are more."""
    first = ", ".join(name if len(name) <= 40 else f"{name[:40]}..." for name in map(str, [*names][:most]))
    return first if len(names) <= most else f"{first} and {len(names) - most:,} more"


class DataError(ValueError):
    """What is wrong with the data, and where: `path:line: what`."""

    everywhere = False  # whether all rows have it, so that leaving some out does not help

    def __init__(self, what: str, *, path: Any = None, line: int | None = None):
        place = path if line is None else f"{path}:{line}"
        super().__init__(what if place is None else f"{place}: {what}")


@dataclass(frozen=True, kw_only=True)
class Special:
    """Special token ids. Vocabularies made here put them first: content id = value + `Special.count`."""

    pad: int = 0
    bos: int = 1  # also the class token: the first of every classified text
    eos: int = 2
    sep: int = 3
    mask: int = 4

    count = 5
    names = ("<pad>", "<s>", "</s>", "<sep>", "<mask>")


class Rows(Dataset[dict[str, Any]]):
    """A map-style data set with `__len__`, which torch's Dataset does not promise."""

    def __len__(self) -> int:
        raise NotImplementedError

    def check(self, index: int) -> None:
        """Raises IndexError if out of range, which is also what ends iteration over a set."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")


class Collate:
    """Pads rows to the batch's longest: ids with `pad`, labels with `IGNORE`.

    Every text gets an attention mask, except `packed` windows: there `position_ids` make the padding a
    document of its own, and in a causal model it comes last anyway.
    """

    def __init__(self, pad: int, *, packed: bool = False):
        self.pad, self.packed = pad, packed

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = {}
        for name in items[0]:
            rows = [item[name] for item in items]
            if not isinstance(rows[0], Tensor):  # a class label
                batch[name] = torch.tensor(rows)
            elif name == "position_ids":
                length = max(map(len, rows))
                batch[name] = torch.stack([torch.cat([p, torch.arange(length - len(p))]) for p in rows])
            else:
                fill = self.pad if name.endswith("input_ids") else IGNORE
                batch[name] = pad_sequence(rows, batch_first=True, padding_value=fill)
            if name.endswith("input_ids") and not self.packed:
                mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
                batch[name.replace("input_ids", "attention_mask")] = mask
        return batch


@dataclass(frozen=True, kw_only=True)
class Task:
    """Data in, batches and metrics out. Knows nothing of models.

    What `collate` returns, by kind (B rows, L tokens, all int64; labels of `IGNORE` carry no loss):

        causal-lm                 input_ids, labels (B, L), not shifted: output t - 1 predicts labels[t]
        masked-lm                 input_ids, labels (B, L): labels only where a token was hidden
                                  both with position_ids (B, L) when packed: 0 where a document begins
        sequence-classification   input_ids, attention_mask (B, L), labels (B,)
        pair-classification       the same, and pair_input_ids, pair_attention_mask (B, L2): the second text
        seq2seq                   input_ids, attention_mask (B, L), labels (B, T) that end in `special.eos`;
                                  decoding starts from `special.bos`

    `compute_metrics` and `preprocess_logits_for_metrics` go to `transformers.Trainer` as they are. Sets
    depend on the data, the settings and the seed only: not on the process or the order of access.
    """

    name: str
    kind: str
    train: Rows
    validation: Rows
    test: Rows
    collate: Callable[[list[dict[str, Any]]], dict[str, Tensor]]
    compute_metrics: Callable[[Any], dict[str, float]]
    preprocess_logits_for_metrics: Callable[[Any, Tensor], Tensor]
    metric: str  # the one that chooses the best checkpoint
    greater_is_better: bool
    vocab_size: int
    max_length: int  # no input is longer
    max_target_length: int | None = None  # seq2seq only
    labels: tuple[str, ...] = ()  # classification only: class names, in order of id
    special: Special = Special()
    tokenizer: Any = None  # Hugging Face's, to be saved beside the model; None where the input is not text
    published: Mapping[str, int] | None = None  # a benchmark's model: layers, width, heads, feedforward
    settings: Mapping[str, Any] = field(default_factory=dict)  # all the data depends on, JSON-serialisable
    fingerprint: str  # hash of the content read (and its vocabulary), or of how it is made; not of paths
    majority: float | None = None  # classification only: the share of the test set's most frequent class
    left_out: tuple[str, ...] = ()  # a line about the rows that could not be read, if any
    notes: tuple[str, ...] = ()  # what else to tell the user about the data, a line each

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {self.kind!r}")

    @property
    def num_labels(self) -> int | None:
        """The number of classes; None unless this is classification."""
        return len(self.labels) or None
