"""Numbers of Markdown pages: the README's from rows of `compare`, docs/speed.md's from rows of `bench`."""

from collections.abc import Iterable

from ..results import Cost, Machine, Row
from . import costs
from .cells import Measured
from .style import NOTHING, digits, mib, name, times
from .summary import paragraphs, verdict_table

BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"


def numbers(rows: Iterable[Row]) -> str:
    """What a page says of the rows, as Markdown."""
    measured = Measured(rows)
    if measured.quality:
        return "\n\n".join([*paragraphs(measured), _markdown(*verdict_table(measured))])
    found = [row for row in measured.cost if row.dtype == "float32"]
    operators = [row for row in found if row.what == "operator" and row.work != "decoding"]
    models = [row for row in found if row.what == "model"]
    parts = [_operators(operators, measured.machines[0])] if operators and measured.machines else []
    return "\n\n".join(parts + ([_models(models)] if models else []))


def fill(text: str, rows: Iterable[Row]) -> str:
    """The page with the numbers of these rows between BEGIN and END."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{numbers(rows)}\n{END}{after}"


def _markdown(heads: list[str], lines: list[list[str]]) -> str:
    rows = [f"| {' | '.join(cells)} |" for cells in [heads, *lines]]
    rows.insert(1, "|---" * len(heads) + "|")
    return "\n".join(rows)


def _operators(rows: list[Cost], machine: Machine) -> str:
    """The published operator beside softmax: time, and memory of a causal training step."""
    ours, softmax = "cosformer-paper", "softmax"
    rows = sorted(rows, key=lambda row: -row.ms)  # of several backends the fastest stays
    at: dict[tuple, Cost] = {(row.mixer, row.work, row.causal, row.length): row for row in rows}
    kinds = [("forward", False), ("forward", True), ("training", False), ("training", True)]
    lines = []
    for length in sorted({row.length for row in rows if row.mixer == ours and row.work == "training"}):
        pairs = [[at.get((mixer, *kind, length)) for mixer in (ours, softmax)] for kind in kinds]
        memory = [f"{row.memory_mib:.0f} MiB" if row and row.memory_mib else NOTHING for row in pairs[-1]]
        lines.append([f"{length:,}", *(_time(*pair) for pair in pairs), *memory])
    one = rows[0]
    where = f"{one.heads} heads of {one.head_dim}, batch 1, float32, {machine.cpu}, {machine.threads} threads"
    what = (
        f"One attention of {where} (`make bench`, torch {machine.torch.split('+')[0]}); in brackets, how many"
        " times faster than softmax (`scaled_dot_product_attention`):"
    )
    steps = ["forward", "causal forward", "training step", "causal training step"]
    return f"{what}\n\n" + _markdown(["length", *steps, "its memory", "softmax's"], lines)


def _time(ours: Cost | None, softmax: Cost | None) -> str:
    if ours is None:
        return NOTHING
    mark = costs.CONTENDED if ours.contended else ""
    faster = f" ({times(softmax.ms / ours.ms)})" if softmax else ""
    return f"{digits(ours.ms)} ms{mark}{faster}"


def _models(rows: list[Cost]) -> str:
    """Training by length and decoding by context, one line a mixer."""
    at = {(row.mixer, row.work, row.length): row for row in rows}
    lengths = sorted({row.length for row in rows if row.work == "training"})
    contexts = sorted({row.length for row in rows if row.work == "decoding"})
    heads = ["model", *(f"training, {n:,} tokens" for n in lengths)]
    heads += [f"decoding after {n:,}" for n in contexts] + [f"cache after {n:,}" for n in contexts[-1:]]
    lines = []
    for mixer in costs.mixers(rows):
        training = [at.get((mixer, "training", n)) for n in lengths]
        decoding = [at.get((mixer, "decoding", n)) for n in contexts]
        caches = [costs.CACHE.read(row) if row else None for row in decoding[-1:]]
        cells = [f"{row.tokens_per_second:,.0f} tokens/s" if row else NOTHING for row in training]
        cells += [f"{row.ms:.2f} ms/token" if row else NOTHING for row in decoding]
        lines.append([name(mixer), *cells, *(mib(size) if size else NOTHING for size in caches)])
    what = f"A byte-level language model of {rows[0].size}, batch 1 (`cosformer bench --models`):"
    return f"{what}\n\n{_markdown(heads, lines)}"
