"""Pictures of attention matrices show the matrices themselves, for any mixer."""

import math

import pytest
import torch
from torch.testing import assert_close

from cosformer import picture

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("causal", [False, True])
def test_a_picture_is_drawn_of_the_matrices_themselves(tmp_path, monkeypatch, causal):
    from cosformer import report

    drawn, real = {}, report.matrices
    monkeypatch.setattr(report, "matrices", lambda panels, path: drawn.update(panels) or real(panels, path))
    names = ["softmax", "cosformer-paper", "cosformer", "relu"]
    path = picture.draw(names, tmp_path / "attention.png", length=12, head_dim=8, causal=causal)
    assert path.read_bytes().startswith(b"\x89PNG")
    titles = ["softmax", "cosFormer (paper)", "cosFormer", "ReLU (paper, no cosine)"]
    assert list(drawn) == [*titles, "cosine of the distance"]
    q, k = picture.example(12, 8)
    past = torch.ones(12, 12, dtype=torch.bool).tril() if causal else torch.ones(12, 12, dtype=torch.bool)
    softmax = (q @ k.mT / math.sqrt(8))[0, 0].masked_fill(~past, -math.inf).softmax(-1)
    assert_close(torch.from_numpy(drawn["softmax"]), softmax.masked_fill(~past, math.nan), equal_nan=True)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--out", "nowhere/p.png"], "out is nowhere/p.png, but there is no folder nowhere"),
        (["--length", "0"], "length must be at least 1; got 0"),
        (["--head-dim", "0"], "head_dim must be an int of at least 1; got 0"),
    ],
)
def test_what_cannot_be_drawn_ends_in_one_line(asked, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^cosformer picture: .*{said}"):
        picture.main(["softmax", *asked])
