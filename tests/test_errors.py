"""Bad input raises an error that names the argument, what was given and what is accepted."""

import math

import numpy as np
import pytest
import torch
from judge import inputs

from cosformer import State, cosformer_attention, cosformer_stream

q, k, v = inputs(L=10, S=10)
packed = [x[:1] for x in (q, k, v)]


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (ValueError, r"q must have 4 dimensions .* got shape \(4, 10, 6\)", {"q": q[0]}),
        (TypeError, "v must be a tensor; got list", {"v": [1.0]}),
        (TypeError, "k must be float64, .* got torch.int64", {"k": k.long()}),
        (TypeError, "q, k and v must share one dtype; got torch.float32, torch.float64", {"k": k.double()}),
        (
            ValueError,
            r"k and v must agree in batch, heads and length; got q \(2, 4, 10, 6\)",
            {"v": v[:, :, :9]},
        ),
        (
            ValueError,
            "q's heads must be a multiple of k's",
            {"k": k.repeat(1, 3, 1, 1), "v": v.repeat(1, 3, 1, 1)},
        ),
        (ValueError, "the same batch size", {"q": q[:1]}),
        (ValueError, "the same size of at least 1 in their last dimension", {"q": q[..., :3]}),
        (
            TypeError,
            "key_mask must be a bool tensor, True = keep; got torch.float32",
            {"key_mask": torch.ones(2, 10)},
        ),
        (
            ValueError,
            r"key_mask must have shape \(batch, keys\) = \(2, 10\); got \(2, 9\)",
            {"key_mask": torch.ones(2, 9).bool()},
        ),
        (ValueError, "horizon must be greater than 0; got 0.0", {"horizon": 0}),
        (ValueError, "horizon must be greater than 0; got nan", {"horizon": math.nan}),
        (
            ValueError,
            r"horizon must be one number or one per head \(4\); got 3 numbers",
            {"horizon": [20, 20, 20]},
        ),
        (TypeError, "horizon must be a number, or one per head; got str 'long'", {"horizon": "long"}),
        (
            ValueError,
            "horizon is 5, but positions can lie 9 apart here; pass a horizon of more than 9",
            {"horizon": 5},
        ),
        (ValueError, "horizon is 10, but positions can lie 12 apart", {"q_offset": 3}),
        (ValueError, "horizon is 7, but positions can lie 9 apart", {"horizon": [20, 20, 7, math.inf]}),
        (ValueError, "q_offset is -1", {"q_offset": -1}),
        (TypeError, "q_offset must be an int.* got float 1.0", {"q_offset": 1.0}),
        (ValueError, "q_offset is 1180591620717411303424; .* less than 2.62", {"q_offset": 2**70}),
        (TypeError, "causal must be True or False; got str 'no'", {"causal": "no"}),
        (TypeError, "causal must be True or False; got NoneType None", {"causal": None}),
        (TypeError, "causal must be True or False; got a torch.bool tensor", {"causal": torch.tensor(True)}),
        (TypeError, "eps must be a number, the smallest normaliser; got str 'a'", {"eps": "a"}),
        (TypeError, "eps must be a number, .*; got NoneType None", {"eps": None}),
        (TypeError, r"horizon must be a number, .*; got list \['a', 'a', 'a', 'a'\]", {"horizon": ["a"] * 4}),
        (TypeError, r"horizon must be a number, or one per head, as numbers", {"horizon": [None] * 4}),
        (TypeError, r"q must be a dense tensor .* got layout torch.sparse_coo", {"q": q.to_sparse()}),
        (TypeError, r"k must be a dense tensor .* got layout torch._mkldnn", {"k": k.to_mkldnn()}),
        (
            ValueError,
            "decay rates must be finite and 0 or more; those given reach from -0.5 to 0.1",
            {"decay": torch.tensor([0.1, -0.5, 0, 0])},
        ),
        (
            ValueError,
            r"decay must have shape \(heads,\) = \(4,\) or .* = \(2, 4, 10\); got \(3,\)",
            {"decay": torch.rand(3)},
        ),
        (ValueError, "decay rates must be finite", {"decay": torch.tensor([0.1, math.inf, 0, 0])}),
        (ValueError, "decay rates must be finite", {"decay": torch.tensor([0.1, math.nan, 0, 0])}),
        (ValueError, "eps must be at least 1.17549e-38, the smallest normaliser; got 0", {"eps": 0}),
        (ValueError, "eps must be at least 1.17549e-38, .* got 1e-40", {"eps": 1e-40}),
        (
            ValueError,
            r"horizon must be one number or one per head .* got shape \(4, 1\)",
            {"horizon": torch.full((4, 1), 50)},
        ),
        (
            ValueError,
            "horizon is 7, but positions can lie 7 apart here",
            {"q": q[:, :, :1], "q_offset": 2, "horizon": 7},
        ),
        (
            TypeError,
            "decay must be a floating-point tensor of rates; got a torch.int64",
            {"decay": torch.ones(4).long()},
        ),
        (
            TypeError,
            r"decay must be one rate, or one per head \(4\), as numbers; got str 'gated'",
            {"decay": "gated"},
        ),
        (
            ValueError,
            r"decay must be one rate, or one per head \(4\), finite and 0 or more; got \[0.1, 0.2\]",
            {"decay": [0.1, 0.2]},
        ),
        (ValueError, r"decay must be one rate, .*; got -0.1", {"decay": -0.1}),
        (
            ValueError,
            "decay with one rate per position needs self-attention",
            {"q": q[:, :, :5], "decay": torch.rand(2, 4, 10)},
        ),
        (
            ValueError,
            "backend 'cuda' is unknown; one of .*'torch', or None for the best",
            {"backend": "cuda"},
        ),
        (
            ValueError,
            "horizon=None has no meaning for packed sequences",
            {"cu_seqlens": torch.tensor([0, 10])},
        ),
    ],
)
def test_attention(error, match, change):
    for backend in (None, "torch"):
        with pytest.raises(error, match=match):
            cosformer_attention(**{"q": q, "k": k, "v": v, "backend": backend, **change})


def test_numbers_of_numpy_are_numbers():
    want = cosformer_attention(q, k, v, causal=True, q_offset=3, horizon=20, eps=1e-3)
    numbers = {"q_offset": np.int64(3), "horizon": np.int64(20), "eps": np.float64(1e-3), "causal": np.True_}
    for _ in range(2):
        assert torch.equal(cosformer_attention(q, k, v, **numbers), want)


@pytest.mark.parametrize(
    ("error", "match", "cu_seqlens"),
    [
        (
            ValueError,
            r"cu_seqlens must rise from 0 to the packed length 10; got \[0, 6, 4, 10\]",
            torch.tensor([0, 6, 4, 10]),
        ),
        (ValueError, r"got \[1, 10\]", torch.tensor([1, 10])),
        (ValueError, r"got \[0, 9\]", torch.tensor([0, 9])),
        (ValueError, r"got \[0\]", torch.tensor([0])),
        (TypeError, "cu_seqlens must be a 1-D int32 or int64 tensor .* got list", [0, 10]),
        (TypeError, "got a torch.float32 tensor", torch.tensor([0.0, 10.0])),
    ],
)
def test_packed(error, match, cu_seqlens):
    with pytest.raises(error, match=match):
        cosformer_attention(*packed, cu_seqlens=cu_seqlens, horizon=20)


def test_packed_longer_than_the_horizon():
    with pytest.raises(ValueError, match="horizon is 5, but positions can lie 7 apart"):
        cosformer_attention(*packed, cu_seqlens=torch.tensor([0, 2, 10]), horizon=5)


def test_packed_needs_one_batch_row():
    with pytest.raises(ValueError, match=r"one batch row.* got q \(2, 4, 10, 6\)"):
        cosformer_attention(q, k, v, cu_seqlens=torch.tensor([0, 10]), horizon=20)


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (ValueError, "horizon=None has no meaning for a stream", {"horizon": None}),
        (ValueError, "horizon is 15, but positions can lie 19 apart", {"horizon": 15, "position": 10}),
        (
            ValueError,
            r"state must have shape .* = \(2, 4, 12, 6\); got \(2, 4, 6, 6\)",
            {"tensor": torch.zeros(2, 4, 6, 6)},
        ),
        (
            TypeError,
            "state must be torch.float32 on cpu; got torch.float64",
            {"tensor": torch.zeros(2, 4, 12, 6).double()},
        ),
        (
            ValueError,
            "q has length 10 and k has 9; a stream takes as many queries as keys",
            {"shorter": True},
        ),
    ],
)
def test_stream(error, match, change):
    state = State(change.pop("tensor", torch.zeros(2, 4, 12, 6)), change.pop("position", 0))
    n = 9 if change.pop("shorter", False) else 10
    with pytest.raises(error, match=match):
        cosformer_stream(q, k[:, :, :n], v[:, :, :n], state, **{"horizon": 100, **change})


def test_a_state_that_is_a_tensor():
    with pytest.raises(
        TypeError,
        match="state must be a State, as the stream returned it, or None; got a torch.float32 tensor",
    ):
        cosformer_stream(q, k, v, torch.zeros(2, 4, 12, 6), horizon=100)


def test_states_name_what_is_wrong():
    state = State(torch.zeros(2, 4, 12, 6)).snapshot()
    with pytest.raises(TypeError, match="rollback: tokens must be an int; got float 1.5"):
        state.rollback(1.5)
    with pytest.raises(TypeError, match="to: device must be one; got torch.float64"):
        state.to(torch.float64)
