"""The cache of a model with linear layers: one constant-size state per linear layer, keys and values per softmax layer."""

import math

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, EncoderDecoderCache

from ..ops import State, cosformer_stream, linear_read, linear_state


class StateLayer(CacheLayerMixin):
    """What one linear layer remembers of its sequence: a `State`, whatever the length.

    Going back (assisted decoding) needs the tokens since the last `crop`: they are kept after `activate_past_recording`.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.record_past = False

    def stream(self, q: Tensor, k: Tensor, v: Tensor, *, horizon: float, **options) -> Tensor:
        """Causal attention of the next tokens, which the state takes in."""
        if self.record_past and (self.state is None or self.state.origin is None):
            self.state = (self.state or _empty_state(q, v, horizon=horizon)).snapshot()
        out, self.state = cosformer_stream(q, k, v, self.state, horizon=horizon, **options)
        self.is_initialized = True
        return out

    def absorb(self, k: Tensor, v: Tensor, *, key_mask: Tensor | None) -> None:
        """Take in all keys and values of cross attention, once."""
        self.state = linear_state(k, v, heads=k.shape[1], relu=True, key_mask=key_mask)
        self.is_initialized = True

    def read(self, q: Tensor) -> Tensor:
        """Cross attention over what was absorbed: (B, H, L, D) -> (B, H, L, E)."""
        assert self.state is not None, "nothing was absorbed"
        return linear_read(q, self.state, relu=True)

    def get_seq_length(self) -> int:
        return 0 if self.state is None else self.state.position

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1  # none: a state does not grow

    get_max_cache_shape = get_max_length  # the name before transformers 5.13

    def reset(self) -> None:
        self.state, self.is_initialized = None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.index_select(indices.to(self.state.tensor.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            rows = torch.arange(self.state.tensor.shape[0], device=self.state.tensor.device)
            self.state = self.state.index_select(rows.repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens: int) -> None:
        """Forget the last `-tokens` tokens; a positive number is the length to return to (transformers before 5.16)."""
        surplus = -tokens if tokens <= 0 else self.get_seq_length() - tokens
        if self.state is None or not (surplus > 0 or self.record_past):
            return
        if surplus > 0 and self.state.origin is None:
            raise ValueError(
                f"crop: {surplus} tokens cannot be taken back; call cache.activate_past_recording() before them"
            )
        if surplus > 0:
            self.state = self.state.rollback(surplus)
        self.state = self.state.snapshot()  # what was verified is settled: the tokens kept so far can go

    def offload(self) -> None:
        if self.state is not None:
            self.device, self.state = self.state.tensor.device, self.state.to("cpu")

    def prefetch(self) -> None:
        if self.state is not None:
            self.state = self.state.to(self.device)

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to allocate: the first call makes the state."""

    def update(self, *args, **kwargs):
        raise TypeError(
            "a linear layer's cache holds a state, not keys and values; only the Cosformer model types can use it"
        )


class CosformerCache(DynamicCache):
    """`layer_types` says what each layer keeps: "linear_attention" a state, "full_attention" keys and values."""

    def __init__(self, layer_types: list[str]):
        Cache.__init__(
            self,
            layers=[StateLayer() if kind == "linear_attention" else DynamicLayer() for kind in layer_types],
        )

    def activate_past_recording(self) -> None:  # not in transformers before 5.16
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.activate_past_recording()

    @property
    def nbytes(self) -> int:
        """The bytes this cache holds."""
        seen = [layer for layer in self.layers if layer.is_initialized]
        states = (
            layer.state.tensor for layer in seen if isinstance(layer, StateLayer) and layer.state is not None
        )
        pairs = (t for layer in seen if isinstance(layer, DynamicLayer) for t in (layer.keys, layer.values))
        return sum(t.nbytes for t in (*states, *pairs))


def encoder_decoder_cache(layer_types: list[str]) -> EncoderDecoderCache:
    """The decoder's cache: its own tokens, and what its cross attention read from the encoder."""
    return EncoderDecoderCache(CosformerCache(layer_types), CosformerCache(layer_types))


def _empty_state(q: Tensor, v: Tensor, *, horizon: float) -> State:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    features = q.shape[3] * (1 if horizon == math.inf else 2)
    tensor = torch.zeros(q.shape[0], q.shape[1], features, v.shape[3] + 1, dtype=dtype, device=q.device)
    return State(tensor, horizons=(float(horizon),))
