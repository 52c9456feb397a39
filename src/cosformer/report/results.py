"""Lines of results.jsonl: what each kind must hold, which lines count, and the cells they make over seeds.

A line that cannot be used is skipped and says why; of two lines about the same thing the later counts.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

NUMBER = (int, float)
NEEDED: dict[str, dict[str, Any]] = {
    "run": {"command": str},
    "quality": {"group": str, "task": str, "mixer": str, "seed": int, "status": str},
    "cost": {"mixer": str, "work": str, "length": int, "ms": NUMBER},
    "exactness": {
        "backend": str,
        "dtype": str,
        "mode": str,
        "what": str,
        "difference": NUMBER,
        "allowed": NUMBER,
    },
    "picture": {"mixer": str, "matrix": list},
}
OPTIONAL: dict[str, Any] = {
    **dict.fromkeys(
        ("title", "reason", "metric", "size", "data", "what", "started", "cpu", "isa", "figure", "command"),
        str,
    ),
    **dict.fromkeys(
        ("value", "seconds", "tokens_per_second", "ms_low", "ms_high", "memory_mib", "minutes", "memory_gib"),
        NUMBER,
    ),
    **dict.fromkeys(
        (
            "steps",
            "tokens",
            "parameters",
            "examples",
            "length",
            "batch",
            "cache_bytes",
            "heads",
            "threads",
            "layer",
            "head",
        ),
        NUMBER,
    ),
    **dict.fromkeys(("torch", "cosformer", "transformers", "python"), str),
    **dict.fromkeys(("metrics", "start", "settings"), dict),
    **dict.fromkeys(("curve", "seeds"), list),
    **dict.fromkeys(("greater_is_better", "causal"), bool),
}
OWN: dict[str, dict[str, Any]] = {
    "cost": {"size": NUMBER},
    "picture": {"tokens": list},
}  # same names, other types
SAME = {  # lines of a kind that agree in these are about the same thing
    "quality": ("group", "task", "title", "size", "data", "length", "mixer", "settings", "seed"),
    "cost": ("mixer", "work", "what", "causal", "length", "heads", "size"),
    "exactness": ("backend", "dtype", "mode", "what"),
    "picture": ("figure", "task", "mixer", "title", "layer", "head"),
}


@dataclass(frozen=True)
class Cell:
    """What one mixer reached in one experiment, over its seeds."""

    mixer: str
    variant: str  # the settings in which it differs from other cells of the mixer; mostly empty
    done: list[dict]
    undone: list[dict]  # refused or failed

    def over_seeds(self, field: str, metric: bool = False) -> tuple[float, float | None] | None:
        """(mean, half of the range; None with one seed) of a field, or of one of its metrics; None where it is missing."""
        found = [(row.get("metrics") or {}).get(field) if metric else row.get(field) for row in self.done]
        values = [float(v) for v in found if isinstance(v, NUMBER) and not isinstance(v, bool)]
        if not values:
            return None
        return sum(values) / len(values), (max(values) - min(values)) / 2 if len(values) > 1 else None

    @property
    def value(self) -> tuple[float, float | None] | None:
        return self.over_seeds("value")

    @property
    def why_not(self) -> str:
        """Why there is no value: "refused: reason"."""
        row = self.undone[-1] if self.undone else {}
        return ": ".join(filter(None, [row.get("status", "not measured"), row.get("reason")]))


@dataclass(frozen=True)
class Experiment:
    """One task at one size, on which mixers can be compared."""

    group: str
    task: str
    title: str
    size: str | None
    data: str | None
    length: int | None
    cells: list[Cell]

    @property
    def rows(self) -> list[dict]:
        return [row for cell in self.cells for row in cell.done]

    @property
    def metric(self) -> str:
        return next((r["metric"] for r in self.rows), "value")

    @property
    def greater(self) -> bool:
        return next((r.get("greater_is_better") for r in self.rows), None) is True

    @property
    def seeds(self) -> int:
        return max((len(cell.done) for cell in self.cells), default=0)

    @property
    def examples(self) -> int | None:
        """How many the scores were taken on, if the results say."""
        return min((int(r["examples"]) for r in self.rows if r.get("examples")), default=None)

    def cell(self, mixer: str) -> Cell | None:
        """The mixer's cell; the best, if it was tried with several settings."""
        mine = [c for c in self.cells if c.mixer == mixer]
        reached = [c for c in mine if c.value]
        return (
            (max if self.greater else min)(reached, key=lambda c: c.value[0] if c.value else 0.0)
            if reached
            else mine[0]
            if mine
            else None
        )


@dataclass
class Results:
    runs: list[dict] = field(default_factory=list)
    quality: list[dict] = field(default_factory=list)
    cost: list[dict] = field(default_factory=list)
    exactness: list[dict] = field(default_factory=list)
    pictures: list[dict] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def mixers(self) -> list[str]:
        return list(dict.fromkeys(r["mixer"] for r in [*self.quality, *self.cost, *self.pictures]))

    def group(self, name: str) -> list[Experiment]:
        return [e for e in self.experiments if e.group == name]

    @cached_property
    def experiments(self) -> list[Experiment]:
        keys: dict[tuple, list[dict]] = {}
        done = [r for r in self.quality if r["status"] == "done"]
        for row in done + [r for r in self.quality if r["status"] != "done"]:
            key = tuple(row.get(f) for f in ("group", "task", "title", "size", "data", "length"))
            if (
                row["status"] != "done"
            ):  # what was refused may not know its size: it belongs to what it agrees with
                key = next(
                    (k for k in keys if all(mine in (None, theirs) for mine, theirs in zip(key, k))), key
                )
            keys.setdefault(key, []).append(row)
        return [
            Experiment(k[0], k[1], k[2] or k[1], k[3], k[4], k[5], _cells(rows)) for k, rows in keys.items()
        ]


def _cells(rows: list[dict]) -> list[Cell]:
    cells = []
    for mixer in dict.fromkeys(r["mixer"] for r in rows):
        mine = [r for r in rows if r["mixer"] == mixer]
        variants: dict[str, list[dict]] = {}
        for row in [r for r in mine if r["status"] == "done"]:
            variants.setdefault(json.dumps(_settings(row), sort_keys=True, default=str), []).append(row)
        undone = [r for r in mine if r["status"] != "done"]
        if not variants:
            cells.append(Cell(mixer, "", [], undone))
        for done in variants.values():
            cells.append(Cell(mixer, _difference(done[0], [v[0] for v in variants.values()]), done, undone))
    return cells


def _settings(row: dict) -> dict:
    return {k: v for k, v in (row.get("settings") or {}).items() if k != "seed"}


def _difference(row: dict, rows: list[dict]) -> str:
    """The settings of a row that are not the same in all: "lr=0.001"."""
    mine, all_ = _settings(row), [_settings(r) for r in rows]
    differs = [
        k
        for k in sorted({k for s in all_ for k in s})
        if len({json.dumps(s.get(k), default=str) for s in all_}) > 1
    ]
    return ", ".join(f"{k}={mine.get(k)}" for k in differs)


def read(paths: Iterable[Path]) -> Results:
    """The results of these files, later ones after earlier ones."""
    lines: list[tuple[str, Any]] = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            if line.strip():
                lines.append((f"{path.name}:{number}", line))
    return _gather(lines)


def check(rows: Iterable[Any]) -> Results:
    """The results of rows in memory."""
    return _gather((f"row {number}", row) for number, row in enumerate(rows, 1))


def _gather(lines: Iterable[tuple[str, Any]]) -> Results:
    results = Results()
    kept: dict[tuple, dict] = {}
    for number, (where, line) in enumerate(lines):
        try:
            row = _clean(json.loads(line, parse_constant=_refuse) if isinstance(line, str) else line)
            kind = _check(row)
        except (ValueError, RecursionError) as wrong:
            what = (
                "not JSON"
                if isinstance(wrong, json.JSONDecodeError)
                else "nested too deeply" * isinstance(wrong, RecursionError)
            )
            results.skipped.append(f"{where}: {what or wrong}")
            continue
        fields = [_settings(row) if f == "settings" else row.get(f) for f in SAME.get(kind, ())] or [number]
        key = (kind, json.dumps(fields, sort_keys=True, default=str))
        kept.pop(key, None)
        kept[key] = row
    for (kind, _), row in kept.items():
        {"run": results.runs, "picture": results.pictures}.get(kind, getattr(results, kind, [])).append(row)
    return results


def _clean(value: Any) -> Any:
    """The same with a space for what neither a page nor a terminal may be sent: control characters, half characters."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else " " for c in value)
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, list) else value


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")


def _check(row: Any) -> str:
    """The kind of a row that can be used; ValueError says why another cannot."""
    if not isinstance(row, dict):
        raise ValueError(f"not an object but {type(row).__name__}")
    kind = row.get("kind")
    if not isinstance(kind, str) or kind not in NEEDED:
        raise ValueError(f"unknown kind {kind!r}")
    done = kind == "quality" and row.get("status") == "done"
    needed = {**NEEDED[kind], **({"metric": str, "value": NUMBER} if done else {})}
    for name in needed:
        if row.get(name) is None:
            raise ValueError(f"{kind} without {name}")
    types = {**OPTIONAL, **OWN.get(kind, {}), **needed}
    for name, type_ in types.items():
        if not _is(row.get(name), type_):
            raise ValueError(f"{kind} whose {name} is {str(row[name])[:40]!r}")
    if kind == "quality" and row["status"] not in ("done", "refused", "failed"):
        raise ValueError(f"quality whose status is {row['status']!r}")
    if kind == "cost" and not (row["length"] > 0 and row["ms"] > 0):
        raise ValueError("cost that is not above 0")
    if not all(
        isinstance(p, dict) and all(_is(v, NUMBER) for v in p.values()) for p in row.get("curve") or []
    ):
        raise ValueError("quality whose curve is not a list of points")
    if kind == "picture":
        lines = row["matrix"]
        if not lines or not all(
            isinstance(x, list) and len(x) == len(lines[0]) > 0 and all(_is(v, NUMBER) for v in x)
            for x in lines
        ):
            raise ValueError("picture whose matrix is not a matrix")
        if all(v is None for x in lines for v in x):
            raise ValueError("picture whose matrix is empty")
    return kind


def _is(value: Any, type_: Any) -> bool:
    """None is no answer, which is allowed; true is not a number, and neither is infinity."""
    if value is None:
        return True
    if isinstance(value, bool):
        return type_ is bool
    return isinstance(value, type_) and not (isinstance(value, float) and not math.isfinite(value))
