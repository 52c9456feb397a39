"""CosformerAttention: cosFormer as a module with nn.MultiheadAttention's constructor and call."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .ops import cosformer_attention


class CosformerAttention(nn.Module):
    """Multi-head cosFormer attention, a drop-in for `nn.MultiheadAttention` at linear cost.

    The constructor takes `nn.MultiheadAttention`'s arguments and three more: `num_kv_heads` (grouped heads), `horizon` (a number,
    one per head, or None for the longer of the two lengths of each call) and `decay` (rates, one per head; learned when
    `learn_decay=True`). It loads the weights of an `nn.MultiheadAttention` of the same size and of the official cosFormer file.

    What a linear form cannot express is refused when asked for: dropout of attention weights, arbitrary attention masks,
    `add_bias_kv`, `add_zero_attn`. `need_weights` defaults to False, because the weights are quadratic.

    >>> attention = CosformerAttention(512, 8, horizon=4096, batch_first=True)
    >>> x = torch.randn(2, 1000, 512)
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
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        horizon: float | Sequence[float] | None = None,
        decay: float | Sequence[float] | None = None,
        learn_decay: bool = False,
        eps: float = 1e-6,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a positive multiple of num_heads; got {embed_dim} and {num_heads}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads; got {num_heads} and {num_kv_heads}")
        if dropout:
            raise ValueError(
                f"dropout is {dropout}: attention weights are never formed in linear attention, so they cannot be dropped; "
                "use 0 here and nn.Dropout on the output"
            )
        if add_bias_kv or add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn are not supported: an extra key has no position to be weighted by")
        if learn_decay and decay is None:
            raise ValueError("learn_decay needs rates to start from; pass decay, one number or one per head")
        self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim = (
            embed_dim,
            num_heads,
            num_kv_heads,
            embed_dim // num_heads,
        )
        self.dropout, self.batch_first, self.eps, self.backend = dropout, batch_first, eps, backend
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.horizon = tuple(horizon) if isinstance(horizon, Sequence) else horizon
        made = {"device": device, "dtype": dtype}
        kv_dim = self.head_dim * num_kv_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, **made)
        self.k_proj = nn.Linear(self.kdim, kv_dim, bias, **made)
        self.v_proj = nn.Linear(self.vdim, kv_dim, bias, **made)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **made)
        self._start_decay(decay, learn_decay, device)
        self._reset_parameters()
        self.register_load_state_dict_pre_hook(_split_fused_projection)

    def _start_decay(self, decay: float | Sequence[float] | None, learn: bool, device) -> None:
        if decay is None:
            self.register_parameter("log_decay", None)
            return
        rates = [float(r) for r in decay] if isinstance(decay, Sequence) else [float(decay)] * self.num_heads
        if len(rates) != self.num_heads or min(rates) < 0 or (learn and min(rates) == 0):
            raise ValueError(
                f"decay must be one rate, or one per head ({self.num_heads}), of at least 0 (above 0 if learned); got {decay}"
            )
        log_rates = torch.tensor(rates, dtype=torch.float32, device=device).log()  # the logarithm: a learned rate stays positive
        if learn:
            self.log_decay: nn.Parameter | Tensor | None = nn.Parameter(log_rates)
        else:
            self.register_buffer("log_decay", log_rates, persistent=False)

    def _reset_parameters(self) -> None:
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
        """Attend as `nn.MultiheadAttention` does; returns (output, weights or None).

        `key_padding_mask` (B, S): True, or -inf, = ignore. `attn_mask` may be all-visible or causal, since nothing else has a
        linear form; `is_causal=True` needs no mask. With `need_weights` the exact weights are formed, at quadratic cost:
        (B, L, S) averaged over the heads, or (B, H, L, S).
        """
        self._check(query, key, value)
        single = query.ndim == 2
        if single:
            query, key, value = (x.unsqueeze(0 if self.batch_first else 1) for x in (query, key, value))
            key_padding_mask = key_padding_mask if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        causal = is_causal or _is_causal(attn_mask, query.shape[1], key.shape[1])
        q = self.q_proj(query).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_proj(key).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(value).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        options: dict[str, Any] = {
            "horizon": self.horizon,
            "causal": causal,
            "key_mask": _keep(key_padding_mask, k),
            "decay": None if self.log_decay is None else self.log_decay.exp(),
            "eps": self.eps,
        }
        out = cosformer_attention(q, k, v, backend=self.backend, **options)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        weights = None
        if need_weights:  # attention is linear in v, so the identity in v's place returns the weights themselves
            eye = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
            weights = cosformer_attention(q, k, eye, **options)
            weights = weights.mean(1) if average_attn_weights else weights
        if single:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x, size in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != size:
                raise ValueError(
                    f"{name} must be (length, {size}) or batched, with a last dimension of {size}; got {tuple(x.shape)}"
                )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, horizon={self.horizon}"


def _keep(key_padding_mask: Tensor | None, k: Tensor) -> Tensor | None:
    """nn.MultiheadAttention's mask (True, or -inf, = ignore) as the operator's (True = keep)."""
    if key_padding_mask is None:
        return None
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    if not key_padding_mask.is_floating_point():
        raise TypeError(f"key_padding_mask must be bool (True = ignore) or float (-inf = ignore); got {key_padding_mask.dtype}")
    if not torch.compiler.is_compiling() and not bool(((key_padding_mask == 0) | (key_padding_mask == -math.inf)).all()):
        raise ValueError("key_padding_mask of a float dtype may hold 0 and -inf only: other biases have no linear form")
    return key_padding_mask == 0


def _is_causal(attn_mask: Tensor | None, L: int, S: int) -> bool:
    """Whether attn_mask is the causal mask (True) or hides nothing (False); every other mask is refused."""
    if attn_mask is None:
        return False
    if attn_mask.shape[-2:] == (L, S):
        hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask == -math.inf
        if attn_mask.dtype == torch.bool or bool((attn_mask.eq(0) | hidden).all()):
            if not bool(hidden.any()):
                return False
            future = torch.ones(L, S, dtype=torch.bool, device=attn_mask.device).triu(1)
            if L == S and bool((hidden == future).all()):
                return True
    raise ValueError(
        f"attn_mask of shape {tuple(attn_mask.shape)} is neither causal nor all-visible: a linear form never makes the scores, "
        "so it cannot mask them one by one; use is_causal, or key_padding_mask for whole keys"
    )


def _split_fused_projection(module: CosformerAttention, state_dict: dict, prefix: str, *args) -> None:
    """Accept nn.MultiheadAttention's names: in_proj_weight, in_proj_bias, q_proj_weight, k_proj_weight, v_proj_weight."""
    for kind in ("weight", "bias"):
        fused = state_dict.pop(f"{prefix}in_proj_{kind}", None)
        if fused is not None:
            if module.num_kv_heads != module.num_heads:
                raise ValueError(
                    f"in_proj_{kind} holds {module.num_heads} key heads; this module has num_kv_heads={module.num_kv_heads}"
                )
            for name, part in zip(("q_proj", "k_proj", "v_proj"), fused.chunk(3), strict=True):
                state_dict[f"{prefix}{name}.{kind}"] = part
    for name in ("q_proj", "k_proj", "v_proj"):
        if (split := state_dict.pop(f"{prefix}{name}_weight", None)) is not None:
            state_dict[f"{prefix}{name}.weight"] = split
