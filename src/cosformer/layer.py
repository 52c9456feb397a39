"""The interior of an attention layer: what stands between its projections, in every module and model.

    projections of x  ->  q, k, v  ->  short convolution  ->  norms of q and k  ->  mixer  ->  output gate

    short convolution   depthwise along the sequence, a few tokens wide, on q, k and v; starts as the identity
    norms               RMS norm of each head's q and k, with a learned weight
    output gate         out * sigmoid(W x + b), which starts as one half everywhere

Each part is optional; a mixer declares which ones it wants. With all of them a kernel mixer's weights stay
non-negative and its factorisation exact. A stream keeps the mixer's state and the last few tokens for the
convolution, so its size is constant if the mixer's is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .decay import Gate
from .mixers import Mixer, weights
from .ops.convolution import short_convolution
from .ops.norm import rms_norm
from .ops.shard import Shard


class Tokens(NamedTuple):
    """A layer's input x (B, L, C) and its projections q (B, L, H D), k and v (B, S, Hk D)."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None  # (B, S) bool, True = keep

    def each(self, change: Callable[[Tensor], Tensor]) -> "Tokens":
        """The tokens with `change` applied to every tensor."""
        return Tokens(*(t if t is None else change(t) for t in self))  # type: ignore[arg-type]

    def first(self, count: int) -> "Tokens":
        return self.each(lambda t: t[:, :count])

    def index_select(self, index: Tensor) -> "Tokens":
        return self.each(lambda t: t.index_select(0, index))

    def without_padding(self) -> "Tokens":
        """Zero q, k and v of padding, so that a convolution sees it like the ends of the sequence."""
        if self.key_mask is None:
            return self
        hidden = ~self.key_mask[..., None]
        q, k, v = (t.masked_fill(hidden, 0) for t in (self.q, self.k, self.v))
        return self._replace(q=q, k=k, v=v)


@dataclass(frozen=True)
class LayerState:
    """A layer's streaming state: its mixer's state, and the last q, k and v, (B, width - 1, C) each."""

    mixer: Any
    last: tuple[Tensor, ...] = ()

    @property
    def position(self) -> int:
        return self.mixer.position

    def index_select(self, index: Tensor) -> "LayerState":
        """The state with the batch rows in `index`, as beam search needs."""
        return LayerState(self.mixer.index_select(index), tuple(t.index_select(0, index) for t in self.last))


torch.serialization.add_safe_globals([LayerState])


class ShortConvolution(nn.Module):
    """Depthwise convolution of (B, L, C) over `width` tokens, causal or, if `centred`, around each token."""

    def __init__(self, channels: int, *, width: int, centred: bool):
        super().__init__()
        self.width, self.ahead = width, ((width - 1) // 2 if centred else 0)
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, copy: Callable[[Tensor, Tensor], Any] = Tensor.copy_) -> None:
        """Reset to the identity. `copy(a, b)` writes b into a."""
        copy(self.weight, torch.eye(self.weight.shape[1])[self.ahead].expand(self.weight.shape))

    def forward(self, x: Tensor, before: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        return short_convolution(x, self.weight, ahead=self.ahead, before=before, cu_seqlens=cu_seqlens)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.weight.shape[1]}, ahead={self.ahead}"


class Interior(nn.Module):
    """A mixer and the parts around it: tokens -> (B, L, H D).

    short_conv, qk_norm    None: as the mixer wants; short_conv=0: no convolution
    centred                centre the convolution on each token, for layers that are never causal
    """

    norm_eps = 1e-6

    def __init__(
        self,
        mixer: Mixer,
        *,
        kv_heads: int | None = None,
        short_conv: int | None = None,
        qk_norm: bool | None = None,
        output_gate: bool = False,
        centred: bool = False,
    ) -> None:
        super().__init__()
        width = mixer.short_conv if short_conv is None else short_conv
        if not isinstance(width, int) or isinstance(width, bool) or width < 0 or width == 1:
            raise ValueError(f"short_conv must be a width of 2 or more tokens, or 0 for none; got {width!r}")
        for name, given in (("qk_norm", qk_norm), ("output_gate", output_gate)):
            if given not in (None, True, False):
                raise ValueError(f"{name} must be True or False, or None; got {given!r}")
        size, of_queries = mixer.head_dim, mixer.heads * mixer.head_dim
        of_keys = size * (kv_heads or mixer.heads)
        self.mixer = mixer
        self.conv = None
        if width:
            channels = {"q": of_queries, "k": of_keys, "v": of_keys}
            convs = {name: ShortConvolution(c, width=width, centred=centred) for name, c in channels.items()}
            self.conv = nn.ModuleDict(convs)
        normed = mixer.qk_norm if qk_norm is None else qk_norm
        self.q_norm = nn.RMSNorm(size, eps=self.norm_eps) if normed else None
        self.k_norm = nn.RMSNorm(size, eps=self.norm_eps) if normed else None
        self.gate = Gate(mixer.width, of_queries) if output_gate else None

    def forward(self, tokens: Tokens, *, causal: bool, cu_seqlens: Tensor | None = None) -> Tensor:
        """Whole sequences; cu_seqlens are the boundaries of packed ones, with batch rows laid end to end."""
        rows = tokens.x.shape[0]
        if cu_seqlens is not None:
            tokens = tokens.each(lambda t: t.flatten(0, 1).unsqueeze(0))
        x, mask = tokens.x, tokens.key_mask
        q, k, v = self.heads(self.readable(tokens), cu_seqlens=cu_seqlens)
        out = self.gated(self.mixer(q, k, v, x=x, causal=causal, key_mask=mask, cu_seqlens=cu_seqlens), x)
        return out if cu_seqlens is None else out.unflatten(1, (rows, -1)).squeeze(0)

    @property
    def remembered(self) -> int:
        """How many tokens a stream keeps for the convolution."""
        return 0 if self.conv is None else cast(int, self.conv["q"].width) - 1

    def stream(self, tokens: Tokens, state: LayerState | None) -> tuple[Tensor, LayerState]:
        """The next tokens of a causal stream: their output, and the state after them."""
        if self.conv is not None and self.conv["q"].ahead:
            raise ValueError(
                "this layer's convolution looks ahead, so it cannot stream; make it with centred=False"
            )
        tokens = self.readable(tokens)
        count = self.remembered
        held = count if state is None else state.last[0].shape[1] if state.last else 0
        if held != count:  # none, too, of what `sharded` returns while gradients are recorded
            raise ValueError(f"state holds {held} tokens for a convolution, and this layer needs {count}")
        before = (None, None, None) if state is None or not state.last else state.last
        last: tuple[Tensor, ...] = ()
        if self.conv is not None:
            last = tuple(_last(t, b, count) for t, b in zip((tokens.q, tokens.k, tokens.v), before))
        q, k, v = self.heads(tokens, before=before)
        inner = None if state is None else state.mixer
        out, inner = self.mixer.stream(q, k, v, inner, x=tokens.x, key_mask=tokens.key_mask)
        return self.gated(out, tokens.x), LayerState(inner, last)

    def sharded(self, tokens: Tokens, shard: Shard, *, causal: bool) -> tuple[Tensor, LayerState]:
        """This process's part of a sequence: its output and, if causal, the state after the whole sequence,
        the same in every process."""
        tokens = self.readable(tokens)
        last: tuple[Tensor, ...] = ()
        if self.conv is not None and causal and not torch.is_grad_enabled():
            parts = [tokens.q, tokens.k, tokens.v]
            ends = shard.last(torch.cat(parts, -1), self.remembered)
            last = ends.split([t.shape[-1] for t in parts], -1)
        q, k, v = self.heads(tokens, shard=shard)
        x, mask = tokens.x, tokens.key_mask
        out, inner = self.mixer.sharded(q, k, v, shard, x=x, causal=causal, key_mask=mask)
        return self.gated(out, x), LayerState(inner, last)

    def weights(self, tokens: Tokens, *, causal: bool) -> Tensor:
        """The attention matrix (B, H, L, S), at quadratic cost."""
        q, k, _ = self.heads(self.readable(tokens))
        return weights(self.mixer, q, k, x=tokens.x, causal=causal, key_mask=tokens.key_mask)

    def readable(self, tokens: Tokens) -> Tokens:
        """The tokens, with padding zeroed if there is a convolution."""
        return tokens if self.conv is None else tokens.without_padding()

    def heads(
        self, tokens: Tokens, *, before=(None, None, None), cu_seqlens=None, shard: Shard | None = None
    ) -> tuple[Tensor, ...]:
        """q, k and v as the mixer sees them: convolved, split into heads (B, H, L, D), normed."""
        q, k, v = tokens.q, tokens.k, tokens.v
        if self.conv is not None and shard is not None:  # as one, so that their ends travel in one message
            weight = torch.cat([cast(Tensor, conv.weight) for conv in self.conv.values()])
            ahead, sizes = cast(int, self.conv["q"].ahead), [t.shape[-1] for t in (q, k, v)]
            together = short_convolution(torch.cat([q, k, v], -1), weight, ahead=ahead, shard=shard)
            q, k, v = together.split(sizes, -1)
        elif self.conv is not None:
            parts = zip(self.conv.values(), (q, k, v), before)
            q, k, v = (conv(t, b, cu_seqlens) for conv, t, b in parts)
        q, k, v = (t.unflatten(-1, (-1, self.mixer.head_dim)) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm.weight, self.norm_eps)
            k = rms_norm(k, self.k_norm.weight, self.norm_eps)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def gated(self, out: Tensor, x: Tensor) -> Tensor:
        """(B, H, L, E) -> (B, L, H E), through the output gate."""
        out = out.transpose(1, 2).flatten(2)
        return out if self.gate is None else out * torch.sigmoid(self.gate(x))


def _last(x: Tensor, before: Tensor | None, count: int) -> Tensor:
    """The last `count` tokens of a stream that ends with x."""
    if before is None:
        before = x.new_zeros(x.shape[0], count, x.shape[2])
    return torch.cat([before, x[:, -count:]], 1)[:, -count:]
