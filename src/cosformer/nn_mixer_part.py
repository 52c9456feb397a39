"""MixerAttention: any mixer as a module with nn.MultiheadAttention's constructor and call (to be merged into nn.py)."""

import torch
from torch import Tensor, nn

from .mixers import build, weights


class MixerAttention(nn.Module):
    """Multi-head attention by any mixer of the registry, called as `nn.MultiheadAttention` is.

    mixer         a name of `cosformer.mixers.names()`
    max_length    the longest sequence it will see, for the mixers that must know
    options       the mixer's own options, `cosformer.mixers.options(mixer)`
    positions     "rope", "sine_spe", "conv_spe" or None
    num_kv_heads  fewer key and value heads than query heads (grouped heads)

    >>> attention = MixerAttention(512, 8, mixer="performer", options={"features": 128}, batch_first=True)
    >>> out, _ = attention(x, x, x, is_causal=True)
    """

    _qkv_same_embed_dim = False  # nn.TransformerEncoderLayer asks: no, its fused softmax path is not for this module
    in_proj_bias = None  # ... and it looks here before that

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mixer: str,
        max_length: int = 4096,
        options: dict | None = None,
        positions: str | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a positive multiple of num_heads; got {embed_dim} and {num_heads}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads; got {num_heads} and {num_kv_heads}")
        if dropout:
            raise ValueError(
                f"dropout is {dropout}: most mixers never form their weights; use 0 here and nn.Dropout on the output"
            )
        self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim = (
            embed_dim,
            num_heads,
            num_kv_heads,
            embed_dim // num_heads,
        )
        self.kdim, self.vdim, self.batch_first = kdim or embed_dim, vdim or embed_dim, batch_first
        made = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, **made)
        self.k_proj = nn.Linear(self.kdim, self.head_dim * num_kv_heads, bias, **made)
        self.v_proj = nn.Linear(self.vdim, self.head_dim * num_kv_heads, bias, **made)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **made)
        sizes = {"heads": num_heads, "head_dim": self.head_dim, "max_length": max_length}
        self.mixer = build(mixer, **sizes, positions=positions, **(options or {})).to(device=device, dtype=dtype)
        for layer in (self.q_proj, self.k_proj, self.v_proj):  # nn.MultiheadAttention's initialisation
            nn.init.xavier_uniform_(layer.weight)
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `nn.MultiheadAttention` does; returns (output, weights or None). key_padding_mask (B, S): True = ignore.

        `is_causal=True` needs no mask, and no other mask is taken. A key that is not the query counts as another sequence,
        which some mixers refuse.
        """
        if attn_mask is not None:  # merging: nn.py's _is_causal accepts the causal and the all-visible mask here
            raise ValueError(
                "attn_mask is not taken: mixers choose their own keys; use is_causal, or key_padding_mask for whole keys"
            )
        self.mixer.refuse(causal=is_causal, cross=key is not query)
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q = self.q_proj(query).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_proj(key).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(value).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        asked = {
            "causal": is_causal,
            "key_mask": None if key_padding_mask is None else ~key_padding_mask,
        }  # merging: nn.py's _keep
        out = self.out_proj(self.mixer(q, k, v, **asked).transpose(1, 2).flatten(2))
        matrix = weights(self.mixer, q, k, **asked) if need_weights else None
        if matrix is not None and average_attn_weights:
            matrix = matrix.mean(1)
        return out if self.batch_first else out.transpose(0, 1), matrix

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, mixer={self.mixer.name!r}"
