"""docs/hugging-face.md: every snippet runs, in order, in one namespace."""

import re
from pathlib import Path

import pytest
import torch
from conftest import python_of

pytest.importorskip("transformers")

PAGE = Path(__file__).parent.parent / "docs" / "hugging-face.md"


def test_every_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    snippets = python_of(PAGE)
    assert len(snippets) > 10
    namespace: dict = {}
    for snippet in snippets:
        exec(compile(snippet, str(PAGE), "exec"), namespace)


def test_every_public_name_and_field_is_told():
    from cosformer import hf

    page = PAGE.read_text()
    kinds = [
        kind for config in hf.CONFIGS for kind in config.__mro__ if kind.__module__.startswith("cosformer")
    ]
    ours = {name for kind in kinds for name in vars(kind).get("__annotations__", {})}
    ours -= {"causal_layers", "use_cache", "tie_word_embeddings", "model_type"}
    assert {"horizon", "pooling", "cross_mixer"} <= ours
    names = set(hf.__all__) - {"CosformerCache"}  # new_cache() makes it
    untold = [name for name in sorted(ours | names) if name not in page]
    assert not untold
    table = page[page.index("These fields are ours") :]
    rows = {
        name for row in re.findall(r"^\| (`.*?`) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)
    }
    assert ours <= rows
