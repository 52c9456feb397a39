"""The next token of a decoder through all its blocks at once: which blocks and which calls go this way.

The kernel takes a block as `CosformerStack` makes it, with a linear mixer or softmax, in float32 or bfloat16
on the CPU, unmodified and without hooks; and, under the same conditions, the embedding before the blocks and
the last norm and output layer after them. Other blocks, and softmax over padded rows, are called as modules
in between. A call that records, differentiates, traces, masks the token or asks for more than the last hidden
state or logits goes the general way; `tests/test_hf_step.py` compares the two.
"""

import math
from collections.abc import Iterator
from operator import is_
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.models.llama.modeling_llama import LlamaAttention

from ..decay import Decay
from ..layer import Interior, LayerState, ShortConvolution
from ..mixers import Mixer
from ..mixers.keys import Keys, room
from ..mixers.positions import Rope
from ..ops.state import State
from ..ops.step import Block, Blocks, takes
from .blocks import block_of, ends_of, is_hooked, outer
from .cache import CosformerCache
from .interface import padding
from .reach import reaches

READ_OF: dict[type[nn.Module], tuple[str, ...]] = {  # attributes that the kernel's blocks depend on
    LlamaAttention: ("layer_idx",),
    Interior: ("norm_eps",),
    Mixer: ("eps", "relu", "signed", "both_signs", "horizon", "backend", "streaming"),
    Rope: ("base",),
    ShortConvolution: ("ahead",),
    nn.Embedding: ("max_norm",),
}
READ = (Interior, Mixer, Rope, ShortConvolution, Decay)

_known: WeakKeyDictionary = WeakKeyDictionary()  # for each stack or language model, its parts as found
_bound: WeakKeyDictionary = WeakKeyDictionary()  # for each cache, its streams as found


def next_token(stack: Any, x: Tensor, cache: CosformerCache, mask: Tensor | None) -> Tensor | None:
    """x (B, 1, C) after all blocks, or None if they must be called one by one."""
    if stack.training or not takes(x, len(x)) or (mask is not None and padding(mask[:, -1:]) is not None):
        return None
    found: _Found | None = _known.get(stack)
    if found is None or not found.current:
        found = _known[stack] = _Found(stack)
    ready = None if x.shape[-1] != found.width or x.dtype != found.dtype else _ready(found, cache, len(x))
    hidden = None if ready is None else ready(cache, _own(x))
    return None if hidden is None else hidden[:, None].to(x.dtype)


def next_logits(
    model: Any, ids: Tensor, cache: CosformerCache, mask: Tensor | None, position_ids: Tensor | None
) -> Tensor | None:
    """The logits (B, 1, vocabulary) after tokens ids (B, 1), or None if the model must be called."""
    if model.training or not ids.is_cpu or ids.dtype != torch.int64 or (mask is not None and mask.ndim != 2):
        return None
    if mask is not None and mask.shape[1] not in (1, cache.get_seq_length() + 1):
        return None  # refused later
    ready = ready_for_ids(model, cache, len(ids))
    if ready is None or (mask is not None and padding(mask[:, -1:]) is not None):
        return None
    places = None
    if ready.found.learned:
        places = model.model.places(mask, position_ids, cache.get_seq_length())[:, -1].expand(len(ids))
    logits = ready.logits(cache, ids.flatten(), places)
    return None if logits is None else logits[:, None].to(ready.found.dtype)


def ready_for_ids(model: Any, cache: CosformerCache, rows: int) -> "Ready | None":
    """What takes the next token ids of `rows` rows to their logits; None if the kernel cannot."""
    stack = model.model
    if model.training or stack.training or not takes(stack.norm.weight, rows):
        return None
    found: _Found | None = _known.get(model)
    if found is None or not found.current:
        found = _known[model] = _Found(stack, model)
    return None if found.ends is None or is_hooked(stack) else _ready(found, cache, rows)


def _ready(found: "_Found", cache: CosformerCache, rows: int) -> "Ready | None":
    layers: list[Any] = cache.layers
    if any(layers[i].is_masked for i in found.softmax):
        found = found.linear
    ready: Ready | None = _bound.get(cache)
    if ready is None or ready.found is not found or not ready.is_current(cache, rows):
        ready = _bound[cache] = Ready(found, cache, rows)
    return ready if ready.fits else None


def _own(x: Tensor) -> Tensor:
    """A copy of x (B, 1, C) for the kernel to change: (B, C), in float32."""
    return x[:, 0].to(torch.float32, memory_format=torch.contiguous_format, copy=True)


class Ready:
    """The blocks of a model and the streams of a cache: all that one more token per row needs.

    It holds the streams, and is valid as long as `is_current` says that they are still the cache's own.
    """

    def __init__(self, found: "_Found", cache: CosformerCache, rows: int):
        self.found, self.rows = found, rows
        self._bind(cache)

    def _bind(self, cache: CosformerCache) -> None:
        found = self.found
        self.layers: list[Any] = [cache.layers[i] for i in found.taken]
        kept = [layer.own() for layer in self.layers]
        position = self.layers[0].get_seq_length() if kept else 0
        blocks = [found.blocks[i] for i in found.taken]
        self.fits = bool(kept) and all(_fits(k, b, self.rows, position) for k, b in zip(kept, blocks))
        if self.fits:
            self.kept = cast(list[LayerState], kept)
            tensors = {i: _tensors(k) for i, k in zip(found.taken, self.kept)}
            self._tensors = [t for of in tensors.values() for t in of]
            self._places = [*map(Tensor.data_ptr, self._tensors)]
            self.room = min(
                (room(k.mixer.k) for k in self.kept if isinstance(k.mixer, Keys)), default=math.inf
            )
            self._packed = [
                None if isinstance(run, nn.Module) else run[0].packed([tensors[i] for i in run[1]])
                for run in found.runs
            ]

    def is_current(self, cache: CosformerCache, rows: int) -> bool:
        """Whether the streams are still the cache's, all at one position and at the same addresses."""
        if not self.fits or rows != self.rows:
            return False
        ahead, now = self.layers[0].ahead, cache.layers
        for i, layer, kept in zip(self.found.taken, self.layers, self.kept):
            if now[i] is not layer or layer.ahead != ahead or not layer.owns(kept):
                return False
        return [*map(Tensor.data_ptr, self._tensors)] == self._places

    def parameters(self) -> list[Tensor]:
        """The parameters: keeping the list keeps them where they are."""
        return [t for run in self.found.runs if isinstance(run, tuple) for t in run[0].parameters()]

    def logits(self, cache: CosformerCache, ids: Tensor, places: Tensor | None) -> Tensor | None:
        """The logits (B, vocabulary), in float32, of ids (B,), at `places` (B,) if positions are learned."""
        found = self.found
        ids, places = ids.contiguous(), None if places is None else places.long().contiguous()
        x = ids.new_empty((self.rows, found.width), dtype=torch.float32)
        logits = ids.new_empty((self.rows, found.vocabulary), dtype=torch.float32)
        return None if self(cache, x, ids, places, logits) is None else logits

    def __call__(self, cache, x: Tensor, ids=None, places=None, logits=None) -> Tensor | None:
        """x (B, C), in float32, after all blocks; None, with streams unchanged, if it cannot be done."""
        found, position = self.found, self.layers[0].get_seq_length()
        if not reaches(position + 1, found.reach, causal=True):
            return None
        if position >= self.room:  # no room for another key
            self._bind(cache)
            if not self.fits:
                return None
        last = len(found.runs) - 1
        for layer in self.layers:  # an interruption from here on leaves some of them a token ahead
            layer.torn = True
        for i, (run, packed) in enumerate(zip(found.runs, self._packed)):
            if packed is None:
                x = _own(run(x[:, None].to(found.dtype), past_key_values=cache, use_cache=True))
                continue
            first = (ids, places) if i == 0 else (None, None)
            if not run[0](x, packed, position, *first, logits if i == last else None):
                for layer in self.layers:
                    layer.torn = False
                return None
        for layer in self.layers:
            layer.advance()
        return x


def _tensors(kept: LayerState) -> tuple[Tensor, ...]:
    state = kept.mixer
    return ((state.k, state.v) if isinstance(state, Keys) else (state.tensor,)) + kept.last


def _fits(kept, block: Block, rows: int, position: int) -> bool:
    """Whether a layer keeps a plain state, or plain keys, of this block's kind, for `rows` rows.

    The kernel writes where it is told, so what another model keeps must not reach it.
    """
    state = None if kept is None else kept.mixer
    if type(state) is not (Keys if block.softmax else State) or state.position != position:
        return False
    tensors, shapes = _tensors(kept), block.kept(rows, position)
    if [(t.shape, t.dtype) for t in tensors] != shapes or not all(t.is_cpu for t in tensors):
        return False
    if isinstance(state, Keys):  # torch gives a tensor without elements no address, whatever its room
        plain = position > 0 and state.key_mask is None and len(state.at) == position
        rooms = [room(t) for t in (state.k, state.v)]
        return plain and rooms[0] == rooms[1] > position and all(t.is_contiguous() for t in kept.last)
    plain = state.origin is None and state.fade is None and not state.start
    made, own = (
        list(h) * (block.heads // len(h)) for h in (state.horizons or block.horizons, block.horizons)
    )
    plain = plain and made == own  # one for all heads equals one per head
    return plain and all(t.is_contiguous() for t in tensors)


class _Found:
    """The blocks of a stack: runs of those that the kernel takes, and single ones that it does not.

    For a language model also its ends: then the first and the last run are the kernel's, even without
    blocks. With `softmax` false, softmax layers are not taken: the kernel cannot mask keys.
    """

    def __init__(self, stack: Any, model: Any = None, *, softmax: bool = True):
        layers, dropout = list(stack.layers), stack.dropout
        plain = type(dropout) is nn.Dropout and not is_hooked(dropout)
        plain = plain and not (dropout.training and dropout.p)
        blocks = [block_of(layer, stack.parts, i) if plain else None for i, layer in enumerate(layers)]
        known = {i: block for i, block in enumerate(blocks) if block is not None}
        self.blocks = {i: block for i, block in known.items() if softmax or not block.softmax}
        self.softmax = [i for i, block in self.blocks.items() if block.softmax]
        self.linear = _Found(stack, model, softmax=False) if self.softmax else self
        self.taken = list(self.blocks)
        self.reach = min((layers[i].self_attn.interior.mixer.reach for i in self.taken), default=0)
        self.width, self.dtype = stack.norm.weight.shape[0], stack.norm.weight.dtype
        own = all((b.norm.shape[0], b.dtype) == (self.width, self.dtype) for b in self.blocks.values())
        self.ends = ends_of(stack, model) if model is not None and plain and own else None
        self.vocabulary = 0 if self.ends is None else len(self.ends.head.weight)
        self.learned = self.ends is not None and self.ends.positions is not None
        self.runs = self._runs_of(layers)
        self._fingerprint = _Fingerprint(stack, model)

    def _runs_of(self, layers: list[Any]) -> list[Any]:
        """Of consecutive blocks that the kernel takes: (Blocks, their indices); of others, the module."""
        runs: list[Any] = [] if self.ends is None else [[]]
        for i, layer in enumerate(layers):
            if i not in self.blocks:
                runs.append(layer)
            elif runs and isinstance(runs[-1], list):
                runs[-1].append(i)
            else:
                runs.append([i])
        if self.ends is not None and not isinstance(runs[-1], list):
            runs.append([])
        return [
            run if isinstance(run, nn.Module) else (Blocks([self.blocks[i] for i in run], self.ends), run)
            for run in runs
        ]

    @property
    def current(self) -> bool:
        """Whether all is still as found: the same modules, tensors and hooks."""
        same = self._fingerprint.matches()
        return same and all(run[0].current for run in self.runs if isinstance(run, tuple))


class _Fingerprint:
    """The modules, tensors and hooks of a stack, and of a language model around it, as they were."""

    def __init__(self, stack: Any, model: Any = None):
        parts = [stack.dropout, *(m for layer in stack.layers for m in layer.modules())]
        entries = [(stack._modules, name, stack._modules[name]) for name in ("layers", "dropout")]
        if model is not None:
            parts += [part for part in outer(stack, model) if part is not None]
            entries += [(model._modules, "model", stack), (model._modules, "lm_head", model.lm_head)]
            names = ("embed_tokens", "embed_positions", "norm")
            entries += [(stack._modules, name, stack._modules.get(name)) for name in names]
        entries += [entry for m in (stack.layers, *parts) for entry in _entries(m)]
        self._owners, self._names, self._values = zip(*entries)
        self._hooks = [hooks for m in parts for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooked = [*map(bool, self._hooks)]
        self._parts, self._kinds = parts, [*map(type, parts)]
        self._own = [vars(m) for m in parts if isinstance(m, READ)]  # a method set on one of them changes it
        self._sizes = [*map(len, self._own)]
        self._norms = [(m, m.variance_epsilon) for m in parts if hasattr(m, "variance_epsilon")]
        self._dropouts = [m for m in parts if isinstance(m, nn.Dropout) and m.p > 0]

    def matches(self) -> bool:
        """Whether all is still as it was."""
        same = all(map(is_, map(dict.get, self._owners, self._names), self._values))
        same = same and [*map(type, self._parts)] == self._kinds and [*map(len, self._own)] == self._sizes
        same = same and all(m.variance_epsilon == eps for m, eps in self._norms)
        same = same and not any(m.training for m in self._dropouts)
        return same and not _has_any_global_hook() and [*map(bool, self._hooks)] == self._hooked


def _entries(module: nn.Module) -> Iterator[tuple[dict, str, object]]:
    """Where a module holds its parts: (dict, name, part); its forward, if set on the instance; and what else
    `block_of` reads of it."""
    for owned in (module._modules, module._parameters, module._buffers):
        for name, part in owned.items():
            yield owned, name, part
    read = next((names for kind, names in READ_OF.items() if isinstance(module, kind)), ())
    for name in ("forward", *read):
        yield module.__dict__, name, module.__dict__.get(name)
