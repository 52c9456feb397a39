"""MixerAttention and CosformerAttention: modules with nn.MultiheadAttention's constructor and call."""

import math

import torch
from torch import Tensor, nn

from .decay import Decay, DecaySpec, span_of
from .layer import Interior, LayerState, Tokens
from .mixers import build
from .ops import modes
from .ops.checks import Horizon, horizon_list, shown

ANOTHER = "attention to another sequence (query and key are two tensors; for self-attention pass one as both)"
BIASED = "key_padding_mask of a float dtype may hold 0 and -inf only: other biases have no linear form"
UNKNOWN_LENGTH = 4096  # the default max_length, and a decay's span without a finite horizon


class NoWeight(Tensor):
    """What stands where torch looks for a weight that these modules do not have."""


class MixerAttention(nn.Module):
    """Multi-head attention by any mixer of the registry, called as `nn.MultiheadAttention` is.

    mixer         a name in `cosformer.mixers.names()`, for some with positions, such as "softmax+rope"
    max_length    the longest sequence, for mixers that need to know it
    options       the mixer's own options, `cosformer.mixers.options(mixer)`
    num_kv_heads  key and value heads, if fewer than query heads (grouped heads)
    short_conv    the width of a causal convolution of q, k and v; None: as the mixer wants, 0: none
    qk_norm       RMS norms of q and k; None: as the mixer wants
    output_gate   multiply the output by sigmoid(W query + b)

    A key counts as another sequence, which some mixers refuse, unless it is the query tensor or shares its
    memory. Requests without a linear form raise an error: dropout of attention weights, arbitrary attention
    masks, `add_bias_kv`, `add_zero_attn`. `need_weights` defaults to False, because the weights are
    quadratic. It loads the weights of an `nn.MultiheadAttention` of the same size.

    >>> attention = MixerAttention(512, 8, mixer="performer", options={"features": 128}, batch_first=True)
    >>> out, _ = attention(x, x, x, is_causal=True)
    """

    _qkv_same_embed_dim = False  # keeps nn.TransformerEncoderLayer off its fused softmax ...
    in_proj_bias = None  # ... whose check reads this first; an nn.TransformerEncoder made around softmax ...
    in_proj_weight = torch.empty(0).as_subclass(NoWeight)  # ... declines it for arguments of another class

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
        max_length: int = UNKNOWN_LENGTH,
        options: dict | None = None,
        num_kv_heads: int | None = None,
        short_conv: int | None = None,
        qk_norm: bool | None = None,
        output_gate: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sized = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, size in (sized | {"kdim": kdim or 1, "vdim": vdim or 1}).items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"{name} must be an int; got {shown(size)}")
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
                "add_bias_kv and add_zero_attn are not supported: "
                "an extra key has no position to be weighted by"
            )
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim, self.kdim, self.vdim = embed_dim // num_heads, kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first = dropout, batch_first
        made: dict = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, **made)
        self.k_proj = nn.Linear(self.kdim, self.head_dim * num_kv_heads, bias, **made)
        self.v_proj = nn.Linear(self.vdim, self.head_dim * num_kv_heads, bias, **made)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **made)
        for layer in (self.q_proj, self.k_proj, self.v_proj):  # nn.MultiheadAttention's initialisation
            nn.init.xavier_uniform_(layer.weight)
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        sizes = {"heads": num_heads, "head_dim": self.head_dim, "max_length": max_length, "width": embed_dim}
        around: dict = {"short_conv": short_conv, "qk_norm": qk_norm, "output_gate": output_gate}
        inner = build(mixer, **sizes, **(options or {}))
        self.interior = Interior(inner, kv_heads=num_kv_heads, **around).to(**made)
        self.register_load_state_dict_pre_hook(_accept_multihead_attention)
        self.register_load_state_dict_post_hook(_place_constants)

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

        `key_padding_mask` (B, S): True or -inf = ignore. `attn_mask` may be all-visible or causal, since
        nothing else has a linear form; `is_causal=True` needs no mask. With `need_weights` the exact weights
        are formed, at quadratic cost: (B, L, S) averaged over the heads, or (B, H, L, S).
        """
        self._check(query, key, value)
        cross, single = not _is_one(query, key), query.ndim == 2
        if single:
            query, key, value = (x.unsqueeze(0 if self.batch_first else 1) for x in (query, key, value))
            key_padding_mask = key_padding_mask if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        trusted = is_causal and torch.compiler.is_compiling()  # a graph cannot inspect the mask
        if not trusted:
            is_causal = _is_causal(attn_mask, query.shape[1], key.shape[1], hint=is_causal)
        self.interior.mixer.refuse(causal=is_causal, cross=cross and ANOTHER)
        if cross and self.interior.conv is not None:
            raise ValueError(
                "short_conv is for self-attention, with the same tensor as query and key; pass short_conv=0"
            )
        keep = _keep(key_padding_mask, key)
        tokens = Tokens(query, self.q_proj(query), self.k_proj(key), self.v_proj(value), keep)
        out = self.out_proj(self.interior(tokens, causal=is_causal))
        weights = None
        if need_weights:
            weights = self.interior.weights(tokens, causal=is_causal)
            weights = weights.mean(1) if average_attn_weights else weights
        if single:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def stream(
        self, query: Tensor, state: LayerState | None = None, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, LayerState]:
        """Causal self-attention over a stream's next tokens: their output, and the state after them."""
        self._check(query, query, query)
        if query.ndim != 3:
            raise ValueError(f"query must be batched, with 3 dimensions, in a stream; got {shown(query)}")
        x = query if self.batch_first else query.transpose(0, 1)
        if state is not None:
            _check_state(state, len(x))
        tokens = Tokens(x, self.q_proj(x), self.k_proj(x), self.v_proj(x), _keep(key_padding_mask, x))
        out, state = self.interior.stream(tokens, state)
        out = self.out_proj(out)
        return out if self.batch_first else out.transpose(0, 1), state

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{heads}, mixer={self.interior.mixer.name!r}"

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        sized = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, x, size in sized:
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor; got {shown(x)}")
            if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != size:
                raise ValueError(
                    f"{name} must be (length, {size}) or batched, with a last dimension of {size}; "
                    f"got {tuple(x.shape)}"
                )


class CosformerAttention(MixerAttention):
    """Multi-head cosFormer attention, a drop-in for `nn.MultiheadAttention` at linear cost.

    Its arguments besides those of `nn.MultiheadAttention`, and num_kv_heads, short_conv, qk_norm and
    output_gate of `MixerAttention`:

    horizon        a number, one per head, or None: the longer of each call's two lengths
    decay          None (the paper's operator), "ladder", one rate or one per head, or "gated" (recommended):
                   one per head and position, from a linear gate on the input (self-attention only).
                   With decay q, k and v are convolved and q and k normed by default (short_conv=0,
                   qk_norm=False: not); cross attention needs short_conv=0
    learn_decay    learn the constant rates
    eps, backend   as in `cosformer_attention`

    It also loads the weights of the official cosFormer module.

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
        horizon: Horizon | None = None,
        decay: DecaySpec = None,
        learn_decay: bool = False,
        eps: float = 1e-6,
        backend: str | None = None,
        **layer,
    ) -> None:
        unknown = set(layer) - {"num_kv_heads", "short_conv", "qk_norm", "output_gate"}
        if unknown:
            raise TypeError(f"CosformerAttention got an unexpected keyword argument {min(unknown)!r}")
        horizons = [] if horizon is None else horizon_list(horizon, num_heads)
        operator = {"horizon": "length" if horizon is None else horizon, "eps": eps, "backend": backend}
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
            device, dtype, mixer="cosformer", max_length=math.ceil(span_of(horizons, UNKNOWN_LENGTH)),
            options={"decay": decay, "learn_decay": learn_decay, **operator}, **layer,
        )  # fmt: skip
        self.horizon = horizon


def _is_one(query: Tensor, key: Tensor) -> bool:
    """Whether query and key are one tensor, or share memory, as when checkpointing recomputes."""
    if key is query:
        return True
    plain = all(modes.is_plain(x) and x.layout is torch.strided for x in (query, key))
    if torch.compiler.is_compiling() or not plain or modes.transforming(query, key):
        return False
    one, other = ((x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x.is_neg()) for x in (query, key))
    return one == other


def _check_state(state: LayerState, rows: int) -> None:
    if not isinstance(state, LayerState):
        raise TypeError(f"state must be a LayerState, as the stream returned it, or None; got {shown(state)}")
    if torch.compiler.is_compiling():
        return
    kept = next((t for t in (*state.last, *vars(state.mixer).values()) if isinstance(t, Tensor)), None)
    if kept is not None and len(kept) != rows:
        raise ValueError(f"state is of {len(kept)} batch rows; got a query of {rows}")


def _keep(key_padding_mask: Tensor | None, key: Tensor) -> Tensor | None:
    """nn.MultiheadAttention's mask (True or -inf = ignore) as the operator's (True = keep).

    key is (B, S, ...).
    """
    if key_padding_mask is None:
        return None
    if not isinstance(key_padding_mask, Tensor):
        raise TypeError(f"key_padding_mask must be a tensor; got {shown(key_padding_mask)}")
    if key_padding_mask.shape != key.shape[:2]:
        raise ValueError(
            f"key_padding_mask must have shape (batch, keys) = {tuple(key.shape[:2])}; "
            f"got {tuple(key_padding_mask.shape)}"
        )
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    if not key_padding_mask.is_floating_point():
        raise TypeError(
            "key_padding_mask must be bool (True = ignore) or float (-inf = ignore); "
            f"got {key_padding_mask.dtype}"
        )
    hidden = key_padding_mask == -math.inf
    plain = (hidden | (key_padding_mask == 0)).all()
    if torch.compiler.is_compiling():  # a graph cannot raise from Python
        torch._assert_async(plain, BIASED)
    elif not bool(plain):
        raise ValueError(BIASED)
    return ~hidden


def _is_causal(attn_mask: Tensor | None, L: int, S: int, *, hint: bool) -> bool:
    """Whether attention is causal: attn_mask is the causal mask, or hides nothing and `hint` says so.

    Other masks are refused.
    """
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
        f"attn_mask of shape {tuple(attn_mask.shape)} is neither causal nor all-visible: a linear form never "
        "makes the scores, so it cannot mask them one by one; use is_causal, or key_padding_mask for keys"
    )


def _accept_multihead_attention(module: MixerAttention, state_dict: dict, prefix: str, *args) -> None:
    """Accept nn.MultiheadAttention's names: in_proj_weight, in_proj_bias, and q_, k_ and v_proj_weight.

    It has nothing between its projections, so with these names the interior keeps its own values.
    """
    theirs = any(f"{prefix}{name}_weight" in state_dict for name in ("in_proj", "q_proj"))
    if theirs:
        for name, own in module.interior.state_dict(prefix=f"{prefix}interior.").items():
            state_dict.setdefault(name, own)
    for kind in ("weight", "bias"):
        fused = state_dict.pop(f"{prefix}in_proj_{kind}", None)
        if fused is not None:
            if module.num_kv_heads != module.num_heads:
                raise ValueError(
                    f"in_proj_{kind} holds {module.num_heads} key heads; "
                    f"this module has num_kv_heads={module.num_kv_heads}"
                )
            for name, part in zip(("q_proj", "k_proj", "v_proj"), fused.chunk(3), strict=True):
                state_dict[f"{prefix}{name}.{kind}"] = part
    for name in ("q_proj", "k_proj", "v_proj"):
        if (split := state_dict.pop(f"{prefix}{name}_weight", None)) is not None:
            state_dict[f"{prefix}{name}.weight"] = split


def _place_constants(module: MixerAttention, _) -> None:
    """Take decay constants off meta: they are not saved, so load_state_dict(assign=True) leaves them."""
    for part in module.interior.modules():
        if isinstance(part, Decay) and part.constant is not None and part.constant.is_meta:
            part.constant = part.start(module.q_proj.weight.device)
