"""CosformerAttention and MixerAttention: modules with nn.MultiheadAttention's constructor and call."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .decay import DecayGate
from .mixers import build
from .ops import cosformer_attention
from .ops.checks import Horizon, Rates, check_eps, horizon_list, rate_list
from .ops.operator import check_backend

GATE_POSITIONS = 4096  # what a gate's slowest head spans at the start where no finite horizon says so


class _Attention(nn.Module):
    """What both modules share: projections, layouts, masks, weights. A subclass mixes the values in `_attend`."""

    _qkv_same_embed_dim = (
        False  # nn.TransformerEncoderLayer asks: no, its fused softmax path is not for this module
    )
    in_proj_bias = None  # ... and it looks here before that

    def __init__(
        self,
        embed_dim,
        num_heads,
        dropout,
        bias,
        add_bias_kv,
        add_zero_attn,
        kdim,
        vdim,
        batch_first,
        device,
        dtype,
        num_kv_heads,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a positive multiple of num_heads; got {embed_dim} and {num_heads}"
            )
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads; got {num_heads} and {num_kv_heads}"
            )
        if dropout:
            raise ValueError(
                f"dropout is {dropout}: attention weights are never formed here, so they cannot be dropped; "
                "use 0 and nn.Dropout on the output"
            )
        if add_bias_kv or add_zero_attn:
            raise ValueError(
                "add_bias_kv and add_zero_attn are not supported: an extra key has no position to be weighted by"
            )
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim, self.kdim, self.vdim = embed_dim // num_heads, kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first = dropout, batch_first
        made = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, **made)
        self.k_proj = nn.Linear(self.kdim, self.head_dim * num_kv_heads, bias, **made)
        self.v_proj = nn.Linear(self.vdim, self.head_dim * num_kv_heads, bias, **made)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **made)
        for layer in (self.q_proj, self.k_proj, self.v_proj):  # nn.MultiheadAttention's initialisation
            nn.init.xavier_uniform_(layer.weight)
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        self.register_load_state_dict_pre_hook(_split_fused_projection)

    def _attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """Mix the values; x (B, L, C) is what the queries were projected from."""
        raise NotImplementedError

    def _refuse(self, *, causal: bool, cross: bool) -> None:
        """Raise if the mechanism does not do what is asked."""

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
        cross, single = key is not query, query.ndim == 2
        if single:
            query, key, value = (x.unsqueeze(0 if self.batch_first else 1) for x in (query, key, value))
            key_padding_mask = key_padding_mask if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if not (
            is_causal and torch.compiler.is_compiling()
        ):  # a compiled graph cannot look at the mask, and takes the flag's word
            is_causal = _is_causal(attn_mask, query.shape[1], key.shape[1], hint=is_causal)
        causal = is_causal
        self._refuse(causal=causal, cross=cross)
        q = self.q_proj(query).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_proj(key).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(value).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        if key_padding_mask is not None and key_padding_mask.shape != (k.shape[0], k.shape[2]):
            raise ValueError(
                f"key_padding_mask must have shape (batch, keys) = {(k.shape[0], k.shape[2])}; got {tuple(key_padding_mask.shape)}"
            )
        keep = _keep(key_padding_mask)
        out = self.out_proj(
            self._attend(query, q, k, v, causal=causal, key_mask=keep).transpose(1, 2).flatten(2)
        )
        weights = None
        if (
            need_weights
        ):  # attention is linear in v, so the identity in v's place returns the weights themselves
            eye = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
            weights = self._attend(query, q, k, eye, causal=causal, key_mask=keep)
            weights = weights.mean(1) if average_attn_weights else weights
        if single:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x, size in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != size:
                raise ValueError(
                    f"{name} must be (length, {size}) or batched, with a last dimension of {size}; got {tuple(x.shape)}"
                )


class CosformerAttention(_Attention):
    """Multi-head cosFormer attention, a drop-in for `nn.MultiheadAttention` at linear cost.

    The constructor takes `nn.MultiheadAttention`'s arguments and a few more: `num_kv_heads` (grouped heads), `horizon` (a number,
    one per head, or None for the longer of the two lengths of each call) and `decay`: a rate, or one per head, learned when
    `learn_decay=True`; or "gated", one per head and position, which the linear `gate` reads from the input in self-attention.
    It loads the weights of an `nn.MultiheadAttention` of the same size and of the official cosFormer file.

    What a linear form cannot express is refused when asked for: dropout of attention weights, arbitrary attention masks,
    `add_bias_kv`, `add_zero_attn`. `need_weights` defaults to False, because the weights are quadratic.

    >>> attention = CosformerAttention(512, 8, horizon=4096, batch_first=True)
    >>> x = torch.randn(2, 1000, 512)
    >>> out, _ = attention(x, x, x, is_causal=True)
    """

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
        horizon: Horizon | None = None,
        decay: Rates | str | None = None,
        learn_decay: bool = False,
        eps: float = 1e-6,
        backend: str | None = None,
    ) -> None:
        made = (kdim, vdim, batch_first, device, dtype, num_kv_heads)
        super().__init__(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, *made)
        if learn_decay and decay is None:
            raise ValueError("learn_decay needs rates to start from; pass decay, one number or one per head")
        check_eps(eps)
        check_backend(backend)
        self.eps, self.backend = eps, backend
        if horizon is not None:
            horizons = tuple(horizon_list(horizon, num_heads))
            horizon = (
                horizons if isinstance(horizon, Sequence | Tensor) else horizon
            )  # a number stays as it was written
        self.horizon: float | tuple[float, ...] | None = horizon
        self.decay: tuple[float, ...] | None = None
        self.register_parameter("log_decay", None)
        self.gate: DecayGate | None = None
        if isinstance(decay, str):
            self._start_gate(decay, learn_decay, device, dtype)
        elif decay is not None:
            self._start_decay(decay, learn_decay, device)

    def _start_gate(self, decay: str, learn: bool, device, dtype) -> None:
        if decay != "gated":
            raise ValueError(
                f'decay must be "gated", one rate, or one per head ({self.num_heads}); got {decay!r}'
            )
        if learn:
            raise ValueError(
                'learn_decay is for rates given as numbers; decay="gated" is learned as it is, so leave learn_decay out'
            )
        horizons = () if self.horizon is None else horizon_list(self.horizon, self.num_heads)
        spans = [h for h in horizons if h < math.inf] or [GATE_POSITIONS]
        self.gate = DecayGate(
            self.embed_dim, self.num_heads, max_positions=math.ceil(max(spans)), device=device, dtype=dtype
        )

    def _start_decay(self, decay: Rates, learn: bool, device) -> None:
        rates = tuple(rate_list(decay, self.num_heads))
        if learn and min(rates) == 0:
            raise ValueError(f"decay must be above 0 if it is learned, since its logarithm is; got {decay}")
        if learn:  # as logarithms, so that learned rates stay positive
            self.log_decay = nn.Parameter(torch.tensor(rates, dtype=torch.float32, device=device).log())
        else:  # as plain numbers: no cast or late allocation can change them
            self.decay = rates

    def _attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        decay = self._rates(x, key_mask)
        backend = (
            self.backend if v.shape[-1] == self.head_dim else None
        )  # weights are asked for with values of another size
        return cosformer_attention(
            q,
            k,
            v,
            horizon=self.horizon,
            causal=causal,
            key_mask=key_mask,
            decay=decay,
            eps=self.eps,
            backend=backend,
        )

    def _rates(self, x: Tensor, key_mask: Tensor | None) -> Tensor | None:
        if self.gate is not None:
            rates = self.gate(x)
            return (
                rates if key_mask is None else rates.masked_fill(~key_mask[:, None], 0.0)
            )  # padding may hold anything, even NaN
        if self.log_decay is not None:
            return self.log_decay.float().exp()
        return None if self.decay is None else torch.tensor(self.decay, dtype=torch.float32, device=x.device)

    def _refuse(self, *, causal: bool, cross: bool) -> None:
        if cross and self.gate is not None:
            raise ValueError(
                'decay="gated" reads one rate per position from the query, so it needs self-attention, with the same tensor as '
                "query and key; for cross attention make the module with decay=None"
            )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, horizon={self.horizon}"


class MixerAttention(_Attention):
    """Multi-head attention by any mixer of the registry, called as `nn.MultiheadAttention` is.

    mixer         a name of `cosformer.mixers.names()`
    max_length    the longest sequence it will see, for the mixers that must know
    options       the mixer's own options, `cosformer.mixers.options(mixer)`
    positions     "rope", "sine_spe", "conv_spe" or None

    A key that is not the query counts as another sequence, which some mixers refuse.

    >>> attention = MixerAttention(512, 8, mixer="performer", options={"features": 128}, batch_first=True)
    >>> out, _ = attention(x, x, x, is_causal=True)
    """

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
        mixer: str,
        max_length: int = 4096,
        options: dict | None = None,
        positions: str | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
        made = (kdim, vdim, batch_first, device, dtype, num_kv_heads)
        super().__init__(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, *made)
        sizes = {"heads": num_heads, "head_dim": self.head_dim, "max_length": max_length}
        self.mixer = build(mixer, **sizes, positions=positions, **(options or {})).to(
            device=device, dtype=dtype
        )

    def _refuse(self, *, causal: bool, cross: bool) -> None:
        self.mixer.refuse(causal=causal, cross=cross)

    def _attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        return self.mixer(q, k, v, causal=causal, key_mask=key_mask)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, mixer={self.mixer.name!r}"


def _keep(key_padding_mask: Tensor | None) -> Tensor | None:
    """nn.MultiheadAttention's mask (True, or -inf, = ignore) as the operator's (True = keep)."""
    if key_padding_mask is None:
        return None
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    if not key_padding_mask.is_floating_point():
        raise TypeError(
            f"key_padding_mask must be bool (True = ignore) or float (-inf = ignore); got {key_padding_mask.dtype}"
        )
    if not torch.compiler.is_compiling() and not bool(
        ((key_padding_mask == 0) | (key_padding_mask == -math.inf)).all()
    ):
        raise ValueError(
            "key_padding_mask of a float dtype may hold 0 and -inf only: other biases have no linear form"
        )
    return key_padding_mask != -math.inf


def _is_causal(attn_mask: Tensor | None, L: int, S: int, *, hint: bool) -> bool:
    """Whether attention is causal: attn_mask is the causal mask, or hides nothing and `hint` says so; other masks are refused."""
    if attn_mask is None:
        return hint
    if attn_mask.shape[-2:] == (L, S):
        hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask == -math.inf
        if attn_mask.dtype == torch.bool or bool((attn_mask.eq(0) | hidden).all()):
            if not bool(hidden.any()):
                return hint
            future = torch.ones(L, S, dtype=torch.bool, device=attn_mask.device).triu(1)
            if L == S and bool((hidden == future).all()):
                return True
    raise ValueError(
        f"attn_mask of shape {tuple(attn_mask.shape)} is neither causal nor all-visible: a linear form never makes the scores, "
        "so it cannot mask them one by one; use is_causal, or key_padding_mask for whole keys"
    )


def _split_fused_projection(module: _Attention, state_dict: dict, prefix: str, *args) -> None:
    """Accept nn.MultiheadAttention's names: in_proj_weight, in_proj_bias, q_proj_weight, k_proj_weight, v_proj_weight.

    It has no decay, so where its names are met learned rates and a gate stay as they are.
    """
    theirs = any(f"{prefix}{name}_weight" in state_dict for name in ("in_proj", "q_proj"))
    if theirs:
        for name, own in module.named_parameters():
            if name.startswith(("log_decay", "gate.")):
                state_dict.setdefault(f"{prefix}{name}", own.detach())
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
