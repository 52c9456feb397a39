"""Measured rows: one dataclass for each kind, one writer, one reader of JSON lines; needs no torch.

Results files are append-only, each row written as soon as it is known; of rows about one thing the last wins.
"""

import json
import math
import os
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

CONTENDED = 0.1  # share of time waited above which a speed counts as disturbed by other processes

Status = Literal["done", "refused", "failed"]  # refused: the mixer cannot do it; failed: training broke off


class ResultsError(ValueError):
    """A line that is not a row of results; the message names file and line."""


@dataclass(frozen=True, kw_only=True)
class Row:
    kind: ClassVar[str]
    about: ClassVar[tuple[str, ...]]  # rows of a kind that agree in these fields are about the same thing

    @property
    def key(self) -> str:
        """The same for rows about the same thing."""
        return json.dumps([self.kind, *(getattr(self, name) for name in self.about)])

    @property
    def contended(self) -> bool:
        """Whether other processes took so much of the machine that the speed cannot be trusted."""
        return (getattr(self, "waited", None) or 0.0) > CONTENDED


@dataclass(frozen=True, kw_only=True)
class Machine(Row):
    """What the rows that follow it in the file were measured on."""

    kind = "machine"
    about = ("cpu", "isa", "threads", "torch", "cosformer", "transformers", "commit")
    cpu: str
    isa: str
    threads: int
    torch: str
    cosformer: str
    python: str
    date: str
    system: str | None = None
    memory_gib: float | None = None
    transformers: str | None = None
    commit: str | None = None


@dataclass(frozen=True, kw_only=True)
class Run(Row):
    """A command that wrote rows, added when it ends."""

    kind = "run"
    about = ("command", "started")
    command: str
    started: str  # 2026-11-16T04:33:02Z
    minutes: float


@dataclass(frozen=True, kw_only=True)
class Trained(Row):
    """The fields of any training: one mixer on one subject, with one seed and learning rate."""

    subject: str  # its name in the plan; rows of one subject are comparable
    mixer: str  # a name, or the layers of a hybrid: "cosformer*3, softmax+rope"
    seed: int
    steps: int
    rate: float  # learning rate
    metric: str
    greater_is_better: bool
    command: str
    status: Status
    reason: str | None = None  # why it is not done
    value: float | None = None  # the metric on the test set; in a search, on the validation set
    seconds: float | None = None  # of training alone; in a search, of the whole run


@dataclass(frozen=True, kw_only=True)
class Quality(Trained):
    """A training with the rate that was best on the validation set, scored on the test set."""

    kind = "quality"
    about = ("subject", "mixer", "seed", "size", "length", "steps")
    group: str  # section of the report: lm, finetune, lra, recall, seq2seq, parts, toy
    task: str
    title: str
    data: str  # in words
    size: str  # "tiny (4 layers of width 128, 4 heads)"
    length: int
    batch: int
    examples: int  # of the test set that were scored
    settings: dict[str, Any]  # of task, model and training
    note: str | None = None  # how it departs from a published protocol
    published: float | None = None  # the published score of this mixer by the same protocol
    most_frequent: float | None = None  # for accuracies: the share of the test set's most frequent answer
    metrics: dict[str, float] = field(default_factory=dict)  # all of them, on the test set
    validation: dict[str, float] = field(default_factory=dict)
    # Points have step, tokens, seconds (of training alone) and any of loss, eval_loss, value.
    curve: list[dict[str, float]] = field(default_factory=list)
    parameters: int | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    waited: float | None = None  # as in Timed

    @property
    def learned(self) -> bool | None:
        """Whether it beats the most frequent answer by two standard errors; None if that is meaningless."""
        if self.value is None or self.most_frequent is None:
            return None
        share = self.most_frequent
        return self.value > share + 2 * math.sqrt(share * (1 - share) / max(1, self.examples))


@dataclass(frozen=True, kw_only=True)
class Search(Trained):
    """A short run with one learning rate: every mixer is searched alike, then trained with its best."""

    kind = "search"
    about = ("subject", "mixer", "rate", "steps")
    loss: float | None = None  # on the validation set; decides, as it moves before the metric does


@dataclass(frozen=True, kw_only=True)
class Positions(Row):
    """Loss by the position in the context: does more context help?"""

    kind = "positions"
    about = ("subject", "mixer", "seed")
    subject: str
    mixer: str
    seed: int
    ends: list[int]  # each bin's last position + 1; it begins where the one before ends
    loss: list[float]  # in nats per token, the mean over the bin
    texts: int


@dataclass(frozen=True, kw_only=True)
class Timed(Row):
    """The fields of any timed work."""

    ms: float  # the median of the samples
    ms_low: float | None = None  # the middle half of the samples
    ms_high: float | None = None
    samples: int | None = None
    waited: float | None = None  # share of the time in which threads were ready but not running


@dataclass(frozen=True, kw_only=True)
class Cost(Timed):
    """Time and memory of one piece of work, batch 1."""

    kind = "cost"
    about = ("what", "work", "mixer", "backend", "causal", "length", "heads", "head_dim", "size", "dtype")
    what: Literal["operator", "mixer", "model"]  # one attention; with its parameters; a whole model
    work: Literal["forward", "training", "decoding", "generating"]  # see WORK in report/costs.py
    mixer: str  # of operators: one of NAMES in bench/operators.py
    causal: bool
    length: int  # of the sequence; for decoding, of the context before the token
    backend: str | None = None  # of our operators
    heads: int | None = None
    head_dim: int | None = None
    size: str | None = None  # of models, as in Quality
    dtype: str = "float32"
    memory_mib: float | None = None  # added to the peak
    cache_bytes: int | None = None  # after the context
    bound_ms: float | None = None  # time to read the weights once from memory
    gflops: float | None = None  # per second, counting only what linear attention needs
    limit_gflops: float | None = None  # of torch's fastest matrix product on the machine
    error: float | None = None  # the largest difference from the definition

    @property
    def share(self) -> float | None:
        """The share of the machine's limit; only for our operators, whose arithmetic is counted."""
        if self.backend is None or self.work == "decoding" or not (self.gflops and self.limit_gflops):
            return None
        return self.gflops / self.limit_gflops


@dataclass(frozen=True, kw_only=True)
class Shared(Timed):
    """A training step of one sequence split over several processes, batch 1, one thread each.

    Shares are of the step's time, as means over the processes; the time is the slowest process's."""

    kind = "shared"
    about = ("mixer", "processes", "length", "size")
    mixer: str
    processes: int
    length: int  # of the whole sequence
    size: str
    memory_mib: float  # added by a first step to the peak of the largest process
    sent_bytes: int  # by the first process, per step
    waiting: float  # share spent idle, waiting for messages
    scan: float  # share spent combining the states of all processes
    states: float  # share spent making, reading and differentiating states, which one process does not need
    ms_beside: float  # of work beside messages: they may take this long at no cost
    ms_at_once: float | None = None  # if every message is waited for at once, with no work beside it


@dataclass(frozen=True, kw_only=True)
class Exactness(Row):
    """How far a backend is from the definition in float64, relative to the largest value."""

    kind = "exactness"
    about = ("backend", "dtype", "mode", "what")
    backend: str
    dtype: str
    mode: str  # bidirectional, causal, stream
    what: str  # output, gradient
    difference: float
    allowed: float


@dataclass(frozen=True, kw_only=True)
class Picture(Row):
    """The weights of a trained model's layer on the first tokens of a text, its heads averaged."""

    kind = "picture"
    about = ("subject", "mixer", "layer")
    subject: str
    mixer: str
    layer: int
    matrix: list[list[float | None]]  # queries down, keys across
    tokens: list[str]


ROWS: list[type[Row]] = [Machine, Run, Quality, Search, Positions, Cost, Exactness, Picture, Shared]
KINDS = {kind.kind: kind for kind in ROWS}
R = TypeVar("R", bound=Row)


def of(rows: Iterable[Row], kind: type[R]) -> list[R]:
    """The rows of one kind."""
    return [row for row in rows if isinstance(row, kind)]


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last of the rows about each thing, in the order in which the things first came."""
    return list({row.key: row for row in rows}.values())


def read(*paths: Path | str) -> list[Row]:
    """All rows of these files; ResultsError, with file and line, for any other line."""
    rows = []
    for path in paths:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in ((n, line) for n, line in enumerate(lines, 1) if line.strip()):
            try:
                rows.append(_checked(_printable(json.loads(line))))
            except (ValueError, RecursionError) as error:
                raise ResultsError(f"{path}:{number}: not a row of results: {error}") from None
    return rows


class Writer:
    """A results file being written, with its rows; a last line torn by a crash is cut off."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self.rows = read(path)

    def add(self, row: Row) -> None:
        """Append the row; on return it is on the disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line_of(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(row)

    def add_once(self, row: Row) -> None:
        """Append the row unless there is one about the same thing."""
        if row.key not in {known.key for known in self.rows}:
            self.add(row)

    def has(self, kind: type[Row], **values: Any) -> bool:
        """Whether there is a row of this kind with these values."""
        return any(all(getattr(row, k) == v for k, v in values.items()) for row in of(self.rows, kind))


def line_of(row: Row) -> str:
    """The row as one line of JSON without fields that are None; NaN and infinity are refused."""
    kept = {name: value for name, value in vars(row).items() if value is not None}
    return json.dumps({"kind": row.kind, **kept}, allow_nan=False)


def _checked(found: Any) -> Row:
    if not isinstance(found, dict):
        raise ValueError(f"an object is one, not a {type(found).__name__}")
    kind = found.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; one of {', '.join(KINDS)}")
    known = {f.name: f for f in fields(KINDS[kind])}
    for name, value in found.items():
        if name not in known:
            raise ValueError(f"{kind}: unknown field {name!r}")
        if not _fits(value, known[name].type):
            raise ValueError(f"{kind}: {name} is {str(value)[:40]!r}")
    for name, f in known.items():
        if name not in found and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{kind}: {name} is missing")
    row = KINDS[kind](**found)
    if isinstance(row, Quality) and row.status == "done" and row.value is None:
        raise ValueError("quality: value is missing from what is done")
    if isinstance(row, Cost) and not (row.length > 0 and row.ms > 0):
        raise ValueError("cost: length and ms must be above 0")
    if isinstance(row, Picture) and len({len(line) for line in row.matrix} | {0}) != 2:
        raise ValueError("picture: matrix is not a matrix")
    return row


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has a field's type; true is not a number, an integer is also a float."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is types.UnionType:
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin in (list, dict):
        items = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(_fits(item, args[-1]) for item in items)
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return isinstance(value, (int, float)) and math.isfinite(value)
    return isinstance(value, hint)


def _printable(value: Any) -> Any:
    """The value with unprintable characters replaced by spaces: control characters, lone surrogates."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else " " for c in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value
