"""docs/hugging-face.md: every snippet runs, in order, in one namespace."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

PAGE = Path(__file__).parent.parent / "docs" / "hugging-face.md"


def test_every_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(snippets) > 10
    namespace: dict = {}
    for snippet in snippets:
        exec(compile(snippet, str(PAGE), "exec"), namespace)


def test_every_public_name_and_field_is_told():
    from cosformer import hf

    page = PAGE.read_text()
    ours = {
        name
        for config in hf.MODELS
        for name in vars(config).get("__annotations__", {})
        if name not in dir(config.__mro__[1])
    }
    assert {"horizon", "pooling", "encoder_layer_types"} <= ours
    names = set(hf.__all__) - {"CosformerCache"}  # new_cache() makes it
    untold = [name for name in sorted(ours | names) if name not in page]
    assert not untold
    rows = re.findall(r"^\| `(\w+)` \|", page[page.index("These fields are ours") :], re.M)
    assert ours <= set(rows)
