"""The paper's tables (paper.toml). They are shown apart from ours: they come from other data and models."""

import tomllib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class PaperTable:
    number: int
    title: str
    setting: str
    note: str
    columns: list[str]
    least: list[str]  # columns where less is better
    rows: dict[str, str]  # figures with the paper's digits, - for none


_FILE = resources.files(__package__).joinpath("paper.toml").read_text(encoding="utf-8")
TABLES = {name: PaperTable(**table) for name, table in tomllib.loads(_FILE).items()}
