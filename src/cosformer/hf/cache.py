"""The cache of a Cosformer model: for each layer what its mixer keeps of a stream, and of a source."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache

from ..layer import Interior, LayerState, Tokens
from ..mixers.keys import Keys, room, with_room
from ..ops.state import State


class KeptLayer(CacheLayerMixin):
    """What one layer keeps, of any kind: a dataclass of tensors with `position` and `index_select`."""

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False
    kept: Any = None

    def __deepcopy__(self, memo: dict) -> KeptLayer:
        """Detaches tensors that are part of a graph, which torch refuses to copy."""
        for t in tensors([*vars(self).values()]):
            if not t.is_leaf:
                memo[id(t)] = copy.deepcopy(t.detach(), memo)
        other: Any = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(vars(self), memo))
        return other

    def get_seq_length(self) -> int:
        return 0 if self.kept is None else self.kept.position

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1  # unknown here: the model refuses lengths beyond its mixers' reach

    get_max_cache_shape = get_max_length  # the name before transformers 5.13

    def keep(self, kept: Any) -> None:
        self.kept, self.is_initialized = kept, True

    def reset(self) -> None:
        self.kept, self.is_initialized = None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.kept is not None:
            self.kept = self.kept.index_select(indices.to(self.device_of()))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kept is not None:
            rows = torch.arange(len(next(tensors(self.kept))), device=self.device_of())
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def device_of(self) -> torch.device:
        return next(tensors(self.kept)).device

    @property
    def nbytes(self) -> int:
        return 0 if self.kept is None else sum(t.nbytes for t in tensors(self.kept))

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to allocate: the first call creates what is kept."""

    def update(self, *args, **kwargs):
        raise TypeError(
            "this cache holds what a mixer keeps, not keys and values; only the Cosformer model types use it"
        )


class StreamLayer(KeptLayer):
    """What a layer remembers of its own tokens.

    A state cannot forget, so going back means starting from an earlier one: after `activate_past_recording`
    the tokens since the last `crop` are recorded, and those that remain are read again.
    """

    _kept: LayerState | None = None
    ahead = 0  # tokens in the tensors of `_kept` that its position does not count
    torn = False  # while a token is being written into them

    def __init__(self) -> None:
        super().__init__()
        self.record_past = False
        self.origin: LayerState | None = None  # the state at the last crop ...
        self.since: list[Tokens] = []  # ... and what was read after it
        self.replay = False
        self.owned: LayerState | None = None  # `kept`, if nobody else holds its tensors
        self.made_by: tuple | None = None  # what `_in_words` takes, of the layer that made what is kept

    @property
    def kept(self) -> LayerState | None:
        if self.ahead and self._kept is not None:
            state = self._kept.mixer
            if isinstance(state, Keys):
                following: Any = state.behind(self.ahead)
            else:
                following = State(state.tensor, state.position + self.ahead, state.horizons)
            self.kept = self.owned = LayerState(following, self._kept.last)
        return self._kept

    @kept.setter
    def kept(self, kept: LayerState | None) -> None:
        self._kept, self.ahead = kept, 0

    def own(self) -> LayerState | None:
        """What is kept, in contiguous tensors that a caller may change in place before it calls `advance`;
        keys have room for one more behind them. None if earlier states must be kept."""
        self.check_whole()
        if self.record_past or self.replay or self.kept is None:
            return None
        keys = self.kept.mixer if type(self.kept.mixer) is Keys else None
        if self.kept is not self.owned or (keys is not None and room(keys.k) <= keys.k.shape[2]):
            own = mapped(self.kept, _cloned) if keys is None else mapped(self.kept.last, _cloned)
            self.kept = self.owned = own if keys is None else LayerState(with_room(keys), own)
        return self.owned

    @property
    def is_masked(self) -> bool:
        """Whether some of the keys it keeps may be masked."""
        return self._kept is not None and getattr(self._kept.mixer, "key_mask", None) is not None

    def owns(self, kept: LayerState) -> bool:
        """Whether `own` returned this, and would again."""
        changing = self.record_past or self.replay or self.torn
        return self._kept is kept and self.owned is kept and not changing

    def advance(self) -> None:
        """Count one more token, which was written into the kept tensors in place."""
        self.ahead += 1
        self.torn = False

    def check_whole(self) -> None:
        if self.torn:
            raise ValueError(
                "this cache was left in the middle of a token, by an interruption or an error: some layers "
                "have read it and others have not; begin with a new cache"
            )

    def check_owner(self, interior: Interior, tokens: Tokens) -> None:
        """Raise if what is kept is another layer's, or has another number of rows."""
        kind = interior.mixer.name, getattr(interior.mixer, "window", None), interior.remembered
        own = *kind, tuple(t.shape[-1] for t in (tokens.q, tokens.k, tokens.v))
        if self._kept is None or self.made_by is None:
            self.made_by = own
        if self.made_by != own:
            raise ValueError(
                f"past_key_values was made by a layer with {_in_words(*self.made_by)}, and this one has "
                f"{_in_words(*own)}; pass the cache that this model made"
            )
        held = None if self._kept is None else next(tensors(self._kept), None)
        if held is not None and len(held) != len(tokens.x):
            raise ValueError(f"past_key_values holds {len(held)} rows; got input of {len(tokens.x)}")

    def stream(self, interior: Interior, tokens: Tokens) -> Tensor:
        """The next tokens through a layer's interior: their output (B, L, .)."""
        self.check_whole()
        self.check_owner(interior, tokens)
        if self.replay:  # tokens were cropped: read those that remain again
            self.kept = self.origin
            for seen in self.since:
                self._read(interior, seen)
            self.origin, self.since, self.replay = self.kept, [], False
        if self.record_past:  # clones: the caller may reuse its buffers
            self.since.append(tokens.each(torch.clone))
        return self._read(interior, tokens)

    def _read(self, interior: Interior, tokens: Tokens) -> Tensor:
        out, after = interior.stream(tokens, self.kept)
        self.keep(after)
        return out

    def get_seq_length(self) -> int:
        if not self.replay:
            return 0 if self._kept is None else self._kept.position + self.ahead
        return (0 if self.origin is None else self.origin.position) + self._recorded()

    def _recorded(self) -> int:
        """How many tokens can be taken back."""
        return sum(tokens.x.shape[1] for tokens in self.since)

    def activate_past_recording(self) -> None:
        if not self.record_past:
            self.record_past, self.origin = True, self.kept

    def crop(self, tokens: int) -> None:
        """Forget the last `-tokens` tokens.

        A positive number is the length to return to, as in transformers before 5.16.
        """
        length = self.get_seq_length()
        surplus = -tokens if tokens <= 0 else length - tokens
        if not (surplus > 0 or self.record_past) or not length:
            return
        recorded = self._recorded()
        if surplus > recorded:
            raise ValueError(
                f"crop: {surplus} tokens cannot be taken back, {recorded} were recorded; "
                "call cache.activate_past_recording() before them"
            )
        if surplus <= 0 and not self.replay:  # nothing to take back: record from here on
            self.origin, self.since = self.kept, []
            return
        self.replay = True
        while surplus > 0:
            piece = self.since.pop()
            stay = piece.x.shape[1] - surplus
            surplus -= piece.x.shape[1]
            if stay > 0:
                self.since.append(piece.first(stay))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.origin is not None:
            self.origin = self.origin.index_select(indices)
        self.since = [seen.index_select(indices) for seen in self.since]

    def reset(self) -> None:
        super().reset()
        self.origin, self.since, self.replay, self.owned, self.torn = None, [], False, None, False
        self.made_by = None


class CosformerCache(DynamicCache):
    """One `StreamLayer` per layer or, for cross attention, which absorbs the source once, one `KeptLayer`."""

    def __init__(self, layers: int, *, kind: type[KeptLayer] = StreamLayer):
        Cache.__init__(self, layers=[kind() for _ in range(layers)])

    def activate_past_recording(self) -> None:  # not in transformers before 5.16
        for layer in self.layers:
            if isinstance(layer, StreamLayer):
                layer.activate_past_recording()

    @property
    def nbytes(self) -> int:
        """The bytes of what this cache keeps, without the room behind keys and values."""
        return sum(layer.nbytes for layer in self.layers)


def encoder_decoder_cache(layers: int) -> EncoderDecoderCache:
    """The decoder's cache: its own tokens, and what its cross attention read from the encoder."""
    return EncoderDecoderCache(CosformerCache(layers), CosformerCache(layers, kind=KeptLayer))


def _in_words(mixer: str, window: int | None, remembered: int, widths: tuple[int, ...]) -> str:
    seen = "" if window is None else f" over a window of {1 + window} tokens"
    before = f", a convolution over {1 + remembered} tokens" if remembered else ""
    return f"mixer {mixer!r}{seen}{before}, q, k and v of the widths {widths}"


def _cloned(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def tensors(kept: Any) -> Iterator[Tensor]:
    """Every tensor of what a mixer keeps."""
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, tuple | list):
        for part in kept:
            yield from tensors(part)
    elif dataclasses.is_dataclass(kept):
        yield from tensors([getattr(kept, field.name) for field in dataclasses.fields(kept)])


def mapped(kept: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`kept` with `change` applied to every tensor."""
    if isinstance(kept, Tensor):
        return change(kept)
    if isinstance(kept, tuple):
        return tuple(mapped(part, change) for part in kept)
    if dataclasses.is_dataclass(kept) and not isinstance(kept, type):
        changed = {
            field.name: mapped(getattr(kept, field.name), change) for field in dataclasses.fields(kept)
        }
        return dataclasses.replace(kept, **changed)
    return kept
