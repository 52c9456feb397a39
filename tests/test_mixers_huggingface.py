"""Mixers against Hugging Face's own modules at toy size: other authors' code for the same mechanisms."""

import pytest
import torch
from torch.testing import assert_close

from cosformer import mixers

transformers = pytest.importorskip("transformers")
HEADS, DIM = 2, 8
SIZES = {"num_attention_heads": HEADS, "hidden_size": HEADS * DIM}


def split(x, heads=HEADS):
    """(B, N, heads * D) -> (B, heads, N, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join(x):
    return x.transpose(1, 2).flatten(2)


def inputs(length, size=HEADS * DIM):
    torch.manual_seed(0)
    return 2 * torch.randn(2, length, size)


def projected(module, x):
    return [split(projection(x)) for projection in (module.query, module.key, module.value)]


def test_nystrom_is_nystromformer():
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    config = transformers.NystromformerConfig(
        num_attention_heads=1, hidden_size=DIM, num_landmarks=4, segment_means_seq_len=24, conv_kernel_size=5
    )
    theirs = NystromformerSelfAttention(config).eval()
    ours = mixers.build("nystrom", heads=1, head_dim=DIM, max_length=24, landmarks=4, conv=5)
    ours.conv.load_state_dict(theirs.conv.state_dict())
    # One matrix per call: theirs starts its inverse from the largest of all of them.
    for row in inputs(24, DIM).split(1):
        q, k, v = (split(projection(row), 1) for projection in (theirs.query, theirs.key, theirs.value))
        assert_close(join(ours(q, k, v)), theirs(row)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("leading", [0, 3])
def test_local_is_longformer(leading):
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    theirs = LongformerSelfAttention(
        transformers.LongformerConfig(**SIZES, attention_window=[8]), layer_id=0
    ).eval()
    # Their global tokens have projections of their own; a mixer has none.
    for name in (
        "query",
        "key",
        "value",
    ):
        getattr(theirs, f"{name}_global").load_state_dict(getattr(theirs, name).state_dict())
    x = inputs(32)
    is_global = (torch.arange(32) < leading).expand(2, -1)
    out = theirs(
        x,
        attention_mask=is_global * 10000.0,
        is_index_masked=torch.zeros(2, 32, dtype=torch.bool),
        is_index_global_attn=is_global,
        is_global_attn=leading > 0,
    )[0]
    ours = mixers.build("local", heads=HEADS, head_dim=DIM, max_length=32, window=4, globals=leading)
    assert_close(join(ours(*projected(theirs, x))), out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", [0, 6])
def test_bigbird_is_bigbird(padding, monkeypatch):
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    block, n = 4, 10
    theirs = BigBirdBlockSparseAttention(
        transformers.BigBirdConfig(**SIZES, block_size=block, num_random_blocks=2)
    ).eval()
    ours = mixers.build(
        "bigbird",
        heads=HEADS,
        head_dim=DIM,
        max_length=block * n,
        block=block,
        random=2,
        global_blocks=(0, -1),
    )
    kept = torch.arange(block * n).expand(2, -1) < block * n - padding
    # Theirs takes the last block of the padded length as global, ours that of the row's own tokens.
    if padding:
        ours.global_blocks = (0, n - 1)
    _, seen = ours.pattern(kept.unflatten(1, (n, block)))
    drawn = seen[0, :, 1:-1, -2:]  # their random blocks are those we drew
    monkeypatch.setattr(
        theirs, "_bigbird_block_rand_mask_with_head", lambda **_: list(drawn.clamp_min(0).numpy())
    )
    blocked, band, from_mask, to_mask = BigBirdModel.create_masks_for_block_sparse_attn(kept.float(), block)
    x = inputs(block * n)
    out = theirs(
        x,
        band_mask=band,
        from_mask=from_mask,
        to_mask=to_mask,
        from_blocked_mask=blocked,
        to_blocked_mask=blocked,
    )[0]
    real = block * n - padding
    assert (drawn >= 0).all()
    expected = join(ours(*projected(theirs, x), key_mask=kept))
    assert_close(expected[:, :real], out[:, :real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_reformer_with_one_bucket_is_reformer_in_one_chunk(causal):
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    config = transformers.ReformerConfig(
        **SIZES, attention_head_size=DIM, lsh_attn_chunk_length=32, is_decoder=causal
    )
    theirs = LSHSelfAttention(config, layer_idx=0).eval()
    x = inputs(24)
    qk, v = split(theirs.query_key(x)), split(theirs.value(x))
    ours = mixers.build("reformer", heads=HEADS, head_dim=DIM, max_length=24, buckets=1, chunk=24)
    assert_close(join(ours(qk, qk, v, causal=causal)), theirs(x).hidden_states, rtol=1e-4, atol=1e-5)
