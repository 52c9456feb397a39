"""The interior of an attention layer: what stands between its projections, in every module and model.

    projections of x  ->  q, k, v  ->  short convolution  ->  norms of q and k  ->  mixer  ->  output gate

    short convolution   depthwise along the sequence, a few tokens wide, on q, k and v; starts as the identity
    norms               RMS norm of each head's q and k, with a learned weight
    output gate         out * sigmoid(W x + b), which starts as one half everywhere

Each is optional, and a mixer says which it wants. All leave the weights of a kernel mixer non-negative and
its split exact. A stream keeps the mixer's own state and the last few tokens of the convolution: a constant
size, if the mixer's is.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .decay import Gate
from .mixers import Mixer, weights
from .ops.convolution import short_convolution
from .ops.norm import rms_norm
from .ops.shard import Shard


@dataclass(frozen=True)
class LayerState:
    """What a layer remembers of a stream: its mixer's state, and the last (B, width - 1, C) of q, k and v."""

    mixer: Any
    last: tuple[Tensor, ...] = ()

    @property
    def position(self) -> int:
        return self.mixer.position

    def index_select(self, index: Tensor) -> "LayerState":
        """The state with batch rows chosen by `index`: the reordering that beam search asks for."""
        return LayerState(self.mixer.index_select(index), tuple(t.index_select(0, index) for t in self.last))


class ShortConvolution(nn.Module):
    """Depthwise convolution of (B, L, C) over `width` tokens: up to each one, or around it if `centred`."""

    def __init__(self, channels: int, *, width: int, centred: bool, device=None, dtype=None):
        super().__init__()
        self.width, self.ahead = width, ((width - 1) // 2 if centred else 0)
        self.weight = nn.Parameter(torch.empty(channels, width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity."""
        with torch.no_grad():
            self.weight.copy_(self.identity())

    def identity(self) -> Tensor:
        return torch.eye(self.weight.shape[1])[self.ahead].expand(self.weight.shape)

    def forward(self, x: Tensor, before: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        return short_convolution(x, self.weight, ahead=self.ahead, before=before, cu_seqlens=cu_seqlens)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.weight.shape[1]}, ahead={self.ahead}"


class Interior(nn.Module):
    """A mixer and what a layer puts around it: q (B, L, H D), k, v (B, S, Hk D) -> (B, L, H D).

    short_conv, qk_norm    None for what the mixer wants; a width of 0 is no convolution
    centred                the convolution looks around each token, for layers that are never causal
    """

    def __init__(
        self,
        mixer: Mixer,
        *,
        kv_heads: int | None = None,
        short_conv: int | None = None,
        qk_norm: bool | None = None,
        output_gate: bool = False,
        centred: bool = False,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        width = mixer.short_conv if short_conv is None else short_conv
        if not isinstance(width, int) or isinstance(width, bool) or width < 0 or width == 1:
            raise ValueError(f"short_conv must be a width of 2 or more tokens, or 0 for none; got {width!r}")
        size, heads = mixer.head_dim, mixer.heads
        channels = {"q": heads * size, "k": (kv_heads or heads) * size, "v": (kv_heads or heads) * size}
        self.mixer = mixer.to(device=device, dtype=dtype)
        self.conv = None
        if width:
            options = {"width": width, "centred": centred, **made}
            self.conv = nn.ModuleDict({name: ShortConvolution(c, **options) for name, c in channels.items()})
        normed = mixer.qk_norm if qk_norm is None else qk_norm
        self.norm_eps = norm_eps
        self.q_norm = nn.RMSNorm(size, eps=norm_eps, **made) if normed else None
        self.k_norm = nn.RMSNorm(size, eps=norm_eps, **made) if normed else None
        self.gate = Gate(mixer.width, heads * size, **made) if output_gate else None

    def forward(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Whole sequences. x (B, L, C) is the layer's input, key_mask (B, S) bool, True = keep.

        cu_seqlens are the boundaries of packed sequences, with the rows of the batch laid end to end.
        """
        if cu_seqlens is not None:
            rows, (x, q, k, v) = len(x), (t.flatten(0, 1).unsqueeze(0) for t in (x, q, k, v))
        heads = self.heads(q, k, v, key_mask=key_mask, cu_seqlens=cu_seqlens)
        out = self.mixer(*heads, x=x, causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens)
        out = self.gated(out, x)
        return out if cu_seqlens is None else out.unflatten(1, (rows, -1)).squeeze(0)

    def stream(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LayerState | None,
        *,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """The next tokens of a causal stream: their output, and the state after them."""
        if self.conv is not None and self.conv["q"].ahead:
            raise ValueError(
                "this layer's convolution looks ahead, so it cannot stream; make it with centred=False"
            )
        last: tuple[Tensor, ...] = ()
        before = (None, None, None) if state is None or not state.last else state.last
        if self.conv is not None:
            q, k, v = _masked(q, k, v, key_mask)
            count: Any = self.conv["q"].width
            last = tuple(_last(t, b, count - 1) for t, b in zip((q, k, v), before))
        q, k, v = self.heads(q, k, v, before=before, key_mask=key_mask)
        inner = None if state is None else state.mixer
        out, inner = self.mixer.stream(q, k, v, inner, x=x, key_mask=key_mask)
        return self.gated(out, x), LayerState(inner, last)

    def sharded(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shard: Shard,
        *,
        causal: bool,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """A part of a sequence that several processes hold: its output and, if causal, the state after all
        of it, the same in every process."""
        last: tuple[Tensor, ...] = ()
        if self.conv is not None and causal and not torch.is_grad_enabled():
            together = torch.cat(_masked(q, k, v, key_mask), -1)
            sizes = [t.shape[-1] for t in (q, k, v)]
            last = shard.last(together, cast(int, self.conv["q"].width) - 1).split(sizes, -1)
        q, k, v = self.heads(q, k, v, key_mask=key_mask, shard=shard)
        out, inner = self.mixer.sharded(q, k, v, shard, x=x, causal=causal, key_mask=key_mask)
        return self.gated(out, x), LayerState(inner, last)

    def weights(
        self, x: Tensor, q: Tensor, k: Tensor, *, causal: bool, key_mask: Tensor | None = None
    ) -> Tensor:
        """The attention matrix (B, H, L, S), at quadratic cost."""
        q, k, _ = self.heads(q, k, k, key_mask=key_mask)
        return weights(self.mixer, q, k, x=x, causal=causal, key_mask=key_mask)

    def heads(
        self, q, k, v, *, before=(None, None, None), key_mask=None, cu_seqlens=None, shard=None
    ) -> tuple[Tensor, ...]:
        """What the mixer sees: convolved, split into heads (B, H, L, D), normed."""
        if self.conv is not None:
            q, k, v = _masked(q, k, v, key_mask)
            if shard is not None:
                q, k, v = self._convolved_together(q, k, v, shard)
            else:
                parts = zip(self.conv.values(), (q, k, v), before)
                q, k, v = (conv(t, b, cu_seqlens) for conv, t, b in parts)
        q, k, v = (t.unflatten(-1, (-1, self.mixer.head_dim)) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm.weight, self.norm_eps)
            k = rms_norm(k, self.k_norm.weight, self.norm_eps)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _convolved_together(self, q: Tensor, k: Tensor, v: Tensor, shard: Shard) -> tuple[Tensor, ...]:
        """As one, so that their ends are one message."""
        assert self.conv is not None
        weight = torch.cat([cast(Tensor, conv.weight) for conv in self.conv.values()])
        ahead = cast(int, self.conv["q"].ahead)
        y = short_convolution(torch.cat([q, k, v], -1), weight, ahead=ahead, shard=shard)
        return y.split([t.shape[-1] for t in (q, k, v)], -1)

    def gated(self, out: Tensor, x: Tensor) -> Tensor:
        """(B, H, L, E) -> (B, L, H E), through the output gate."""
        out = out.transpose(1, 2).flatten(2)
        return out if self.gate is None else out * torch.sigmoid(self.gate(x))


def _masked(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """A neighbour that is padding counts as none: zero, as beyond the ends, whatever it holds."""
    if key_mask is None:
        return q, k, v
    hidden = ~key_mask[..., None]
    return q.masked_fill(hidden, 0), k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)


def _last(x: Tensor, before: Tensor | None, count: int) -> Tensor:
    """The last `count` tokens of a stream that ends with x."""
    if before is None:
        before = x.new_zeros(x.shape[0], count, x.shape[2])
    return torch.cat([before, x[:, -count:]], 1)[:, -count:]
