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
