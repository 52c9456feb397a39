"""The paper's tables (paper.toml): shown beside ours and marked, for they come from other data and models."""

import tomllib
from dataclasses import dataclass
from importlib import resources

from ..results import Quality

# Our mixers under the paper's names. softmax + RoPE stands in for plain softmax where that was not run.
NAMES = {
    "softmax": "Transformer",
    "cosformer-paper": "cosFormer",
    "relu": "ReLU",
    "leaky_relu": "LeakyReLU",
    "identity": "identity",
    "elu": "Linear Transformer",
    "performer": "Performer",
    "rfa": "RFA",
    "linformer": "Linformer",
    "reformer": "Reformer",
    "bigbird": "BigBird",
    "sparse": "Sparse Transformer",
    "local": "local attention",
}


@dataclass(frozen=True)
class PaperTable:
    number: int
    title: str
    setting: str
    note: str
    columns: list[str]
    least: list[str]  # columns where less is better
    rows: dict[str, str]  # figures with the paper's digits, - for none

    def figures(self, model: str) -> dict[str, str]:
        """By column, of one model; empty if it is not there."""
        return dict(zip(self.columns, self.rows.get(model, "").split()))


_FILE = resources.files(__package__).joinpath("paper.toml").read_text(encoding="utf-8")
TABLES = {name: PaperTable(**table) for name, table in tomllib.loads(_FILE).items()}


def beside(row: Quality, mixers: list[str]) -> tuple[str, dict[str, str]] | None:
    """The paper's column for a task and its figures by mixer; a fine-tuning task is known by its title."""
    table = TABLES.get(row.group)
    if table is None or row.group not in ("lm", "lra", "finetune"):
        return None
    words = {"lm": "test", "lra": row.task, "finetune": row.title}[row.group].lower()
    column = next((column for column in table.columns if column.lower() in words), None)
    if column is None:
        return None
    names = NAMES if "softmax" in mixers else NAMES | {"softmax+rope": "Transformer"}
    found = {mixer: table.figures(names.get(mixer, "")).get(column, "-") for mixer in mixers}
    return column, {mixer: figure for mixer, figure in found.items() if figure != "-"}
