"""The next token of a decoder through all its blocks at once: which blocks and which calls go this way.

The kernel takes a block as `CosformerStack` makes it, with a linear mixer, in float32 or bfloat16 on the CPU,
that nobody has changed and nobody listens to. Another block, as a hybrid's softmax layers are, is called
between the others. A call that records, differentiates, traces, masks the token or asks for more than the
last hidden state goes the general way, which `tests/test_hf_step.py` compares this one with.
"""

from collections.abc import Iterator
from operator import is_
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..decay import LARGEST_EXPONENT, Decay, Gate
from ..layer import Interior, ShortConvolution
from ..mixers.kernel import Cosformer, Identity, Kernel, Relu
from ..ops.state import State
from ..ops.step import Block, Blocks, Linear, takes
from .cache import CosformerCache
from .interface import padding, reaches

_known: WeakKeyDictionary = WeakKeyDictionary()  # of each stack, its blocks as they were found


def next_token(stack: Any, x: Tensor, cache: CosformerCache, mask: Tensor | None) -> Tensor | None:
    """x (B, 1, C) after all blocks, or None where they must be called one by one."""
    if stack.training or not takes(x) or (mask is not None and padding(mask[:, -1:]) is not None):
        return None
    found: _Found | None = _known.get(stack)
    if found is None or not found.current:
        found = _known[stack] = _Found(stack)
    layers: list[Any] = cache.layers
    kept = {i: layers[i].own() for i in found.taken}
    position = cache.get_seq_length()
    if not kept or not all(_fits(kept[i], found.blocks[i], x, position) for i in found.taken):
        return None
    if not reaches(position + 1, found.reach, causal=True):
        return None
    hidden = _own(x)
    for run in found.runs:
        if isinstance(run, nn.Module):
            hidden = _own(run(hidden[:, None].to(x.dtype), past_key_values=cache, use_cache=True))
        else:
            blocks, numbers = run
            blocks(hidden, [(kept[i].mixer.tensor, *kept[i].last) for i in numbers], position)
    for i in found.taken:
        layers[i].advance()
    return hidden[:, None].to(x.dtype)


def _own(x: Tensor) -> Tensor:
    """The tokens of x (B, 1, C) as the kernel changes them: (B, C), in float32."""
    return x[:, 0].to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def _fits(kept, block: Block, x: Tensor, position: int) -> bool:
    """Whether what a layer keeps is a plain state of this block's, for as many rows as x has.

    The kernel writes where it is told: what is kept of another model must not reach it.
    """
    state = None if kept is None else kept.mixer
    if type(state) is not State or state.position != position:
        return False
    if x.shape[-1] != block.norm.shape[0] or x.dtype != block.dtype:
        return False
    tensors = (state.tensor, *kept.last)
    if [(t.shape, t.dtype) for t in tensors] != block.kept(x.shape[0]):
        return False
    plain = state.origin is None and state.fade is None and not state.start
    made, own = (
        list(h) * (block.heads // len(h)) for h in (state.horizons or block.horizons, block.horizons)
    )
    plain = plain and made == own  # one for all is the same as one per head
    return plain and all(t.is_cpu and t.is_contiguous() for t in tensors)


class _Found:
    """The blocks of a stack: runs of those that the kernel takes, and single ones that it does not."""

    def __init__(self, stack: Any):
        layers = list(stack.layers)
        blocks = [_block(layer, stack.parts) for layer in layers]
        self.blocks = {i: block for i, block in enumerate(blocks) if block is not None}
        self.taken = list(self.blocks)
        self.reach = min((layers[i].self_attn.interior.mixer.reach for i in self.taken), default=0)
        self.runs: list = []
        for i, (layer, block) in enumerate(zip(layers, blocks)):
            if block is None:
                self.runs.append(layer)
            elif self.runs and isinstance(self.runs[-1], tuple):
                self.runs[-1][1].append(i)
            else:
                self.runs.append(([], [i]))
        self.runs = [
            run if isinstance(run, nn.Module) else (Blocks([self.blocks[i] for i in run[1]]), run[1])
            for run in self.runs
        ]
        parts = [m for layer in layers for m in layer.modules()]
        entries = [entry for m in (stack.layers, *parts) for entry in _entries(m)]
        entries.append((stack._modules, "layers", stack.layers))
        self._owners, self._names, self._values = zip(*entries)
        self._hooks = [hooks for m in parts for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._heard = [*map(bool, self._hooks)]
        self._parts, self._kinds = parts, [*map(type, parts)]
        self._norms = [(m, m.variance_epsilon) for m in parts if hasattr(m, "variance_epsilon")]
        self._dropouts = [m for m in parts if isinstance(m, nn.Dropout) and m.p > 0]

    @property
    def current(self) -> bool:
        """Whether they still are what was found: the same modules and tensors, and the same who listen."""
        same = all(map(is_, map(dict.get, self._owners, self._names), self._values))
        same = same and [*map(type, self._parts)] == self._kinds
        same = same and all(m.variance_epsilon == eps for m, eps in self._norms)
        same = same and not any(m.training for m in self._dropouts)
        if not same or _has_any_global_hook() or [*map(bool, self._hooks)] != self._heard:
            return False
        return all(run[0].current for run in self.runs if isinstance(run, tuple))


def _entries(module: nn.Module) -> Iterator[tuple[dict, str, object]]:
    """Where a module holds its parts: (dict, name, part); and that its forward is its class's."""
    for owned in (module._modules, module._parameters, module._buffers):
        for name, part in owned.items():
            yield owned, name, part
    yield module.__dict__, "forward", module.__dict__.get("forward")


def _block(layer: Any, parts: tuple[type, ...]) -> Block | None:
    """What the kernel reads of a block; None if it does not take it: `parts` are the classes it knows."""
    if type(layer) is not parts[0]:
        return None
    layer = cast(Any, layer)
    norms = layer.input_layernorm, layer.post_attention_layernorm
    if tuple(map(type, (layer.self_attn, layer.mlp, *norms))) != (*parts[1:], parts[-1]):
        return None
    heard = any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in layer.modules())
    attention, mlp = layer.self_attn, layer.mlp
    interior = attention.interior
    mixer = interior.mixer
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    plain = type(interior) is Interior and all(type(linear) is nn.Linear for linear in linears)
    dropping = any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in layer.modules())
    plain = plain and not dropping and norms[0].variance_epsilon == norms[1].variance_epsilon
    if heard or _has_any_global_hook() or not plain or not _is_linear(mixer) or not _is_silu(mlp.act_fn):
        return None
    decay = getattr(mixer, "decay", None)
    gates = [getattr(decay, "gate", None), interior.gate]
    if any(gate is not None and type(gate) is not Gate for gate in gates):
        return None
    convs = [] if interior.conv is None else list(interior.conv.values())
    if any(type(conv) is not ShortConvolution or conv.ahead for conv in convs):
        return None
    rate_gate, output_gate = (None if gate is None else Linear(gate.weight, gate.bias) for gate in gates)
    q, k, v, o, gate, up, down = (Linear(linear.weight, linear.bias) for linear in linears)
    horizon = mixer.horizon_of(0)
    block = Block(
        heads=mixer.heads,
        kv_heads=k.weight.shape[0] // mixer.head_dim,
        size=mixer.head_dim,
        norm=norms[0].weight,
        mlp_norm=norms[1].weight,
        norm_eps=norms[0].variance_epsilon,
        q=q,
        k=k,
        v=v,
        o=o,
        gate=gate,
        up=up,
        down=down,
        horizons=horizon if isinstance(horizon, tuple) else (horizon,),
        relu=mixer.relu,
        signed=mixer.signed,
        eps=mixer.eps,
        rates=None if decay is None else decay.constant,
        rate_gate=rate_gate,
        largest_exponent=LARGEST_EXPONENT,
        output_gate=output_gate,
        conv=tuple(conv.weight for conv in convs),
        q_norm=None if interior.q_norm is None else interior.q_norm.weight,
        k_norm=None if interior.k_norm is None else interior.k_norm.weight,
        qk_norm_eps=interior.norm_eps,
    )
    return block if block.is_taken() else None


def _is_linear(mixer: Any) -> bool:
    """Whether a mixer's stream is the core's, on q and k as they are."""
    if not isinstance(mixer, Kernel) or type(mixer) not in (Cosformer, Relu, Identity):
        return False
    decay: Decay | None = getattr(mixer, "decay", None)
    changed = (
        (decay is not None and decay.log_rates is not None)
        or getattr(mixer, "both_signs", False)
        or mixer.positions is not None
    )
    return mixer.streaming is True and not changed and mixer.backend in (None, "native")


def _is_silu(activation: object) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")
