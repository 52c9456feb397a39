"""What the kernel reads of a decoder, where it takes it: of a block, and of what stands around the blocks."""

import math
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..decay import LARGEST_EXPONENT, Decay, Gate
from ..layer import Interior, ShortConvolution
from ..mixers.kernel import Cosformer, Identity, Kernel, Relu
from ..mixers.positions import Rope, speeds
from ..mixers.softmax import Softmax
from ..ops.step import Block, Ends, Linear
from .int8 import Int8Linear

LINEARS = (nn.Linear, Int8Linear)


def outer(stack: Any, model: Any) -> tuple[Any, Any, Any, Any]:
    return stack.embed_tokens, stack._modules.get("embed_positions"), stack.norm, model.lm_head


def ends_of(stack: Any, model: Any) -> Ends | None:
    """The parts around the blocks; None if the kernel cannot take them."""
    table, positions, norm, head = outer(stack, model)
    tables = [table] if positions is None else [table, positions]
    plain = all(type(t) is nn.Embedding and t.max_norm is None for t in tables)
    if (
        not plain
        or type(norm) is not stack.parts[-1]
        or type(head) not in LINEARS
        or is_hooked(norm, head, *tables)
    ):
        return None
    at = None if positions is None else positions.weight
    ends = Ends(table.weight, norm.weight, norm.variance_epsilon, _linear(head), at)
    return ends if ends.is_taken() and table.weight.shape[1] == norm.weight.shape[0] else None


def is_hooked(*modules: nn.Module) -> bool:
    """Whether any module has forward hooks, or a method set on the instance."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or any(map(_is_method, vars(m).values())) for m in modules
    )


def _is_method(x: object) -> bool:
    return callable(x) and not isinstance(x, type)


def block_of(layer: Any, parts: tuple[type, ...], place: int) -> Block | None:
    """What the kernel reads of a block; None if it cannot take it. `parts` are the classes it knows, `place`
    is where it stands: a block that was moved keeps its tokens elsewhere in the cache."""
    if type(layer) is not parts[0]:
        return None
    layer = cast(Any, layer)
    if getattr(layer.self_attn, "layer_idx", None) != place:
        return None
    norms = layer.input_layernorm, layer.post_attention_layernorm
    if tuple(map(type, (layer.self_attn, layer.mlp, *norms))) != (*parts[1:], parts[-1]):
        return None
    hooked = is_hooked(*layer.modules())
    attention, mlp = layer.self_attn, layer.mlp
    interior = attention.interior
    mixer = interior.mixer
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    plain = type(interior) is Interior and all(type(linear) in LINEARS for linear in linears)
    dropping = any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in layer.modules())
    plain = plain and not dropping and norms[0].variance_epsilon == norms[1].variance_epsilon
    if hooked or _has_any_global_hook() or not plain or not _is_silu(mlp.act_fn):
        return None
    softmax = _is_softmax(mixer)
    if not softmax and not _is_linear(mixer):
        return None
    decay = getattr(mixer, "decay", None)
    gates = [getattr(decay, "gate", None), interior.gate]
    if any(gate is not None and type(gate) is not Gate for gate in gates):
        return None
    convs = [] if interior.conv is None else list(interior.conv.values())
    if any(type(conv) is not ShortConvolution or conv.ahead for conv in convs):
        return None
    rate_gate, output_gate = (None if gate is None else _linear(gate) for gate in gates)
    q, k, v, o, gate, up, down = map(_linear, linears)
    horizon = math.inf if softmax else mixer.horizon_of(0)
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
        relu=not softmax and mixer.relu,
        signed=not softmax and mixer.signed,
        eps=0.0 if softmax else mixer.eps,
        rates=None if decay is None else decay.constant,
        rate_gate=rate_gate,
        largest_exponent=LARGEST_EXPONENT,
        output_gate=output_gate,
        conv=tuple(conv.weight for conv in convs),
        q_norm=None if interior.q_norm is None else interior.q_norm.weight,
        k_norm=None if interior.k_norm is None else interior.k_norm.weight,
        qk_norm_eps=interior.norm_eps,
        softmax=softmax,
        turns=_turns(mixer) if softmax else None,
    )
    return block if block.is_taken() else None


def _linear(module: Any) -> Linear:
    return Linear(module.weight, module.bias, getattr(module, "scales", None))


def _is_linear(mixer: Any) -> bool:
    """Whether a mixer's stream is the core's, with q and k unchanged."""
    if not isinstance(mixer, Kernel) or type(mixer) not in (Cosformer, Relu, Identity):
        return False
    decay: Decay | None = getattr(mixer, "decay", None)
    changed = (
        (decay is not None and decay.log_rates is not None)
        or getattr(mixer, "both_signs", False)
        or mixer.positions is not None
    )
    return mixer.streaming is True and not changed and mixer.backend in (None, "native")


def _is_softmax(mixer: Any) -> bool:
    return type(mixer) is Softmax and (mixer.positions is None or type(mixer.positions) is Rope)


def _turns(mixer: Softmax) -> Tensor | None:
    """How far rotary positions turn each pair per position."""
    return None if mixer.positions is None else speeds(mixer.head_dim, cast(Rope, mixer.positions).base)


def _is_silu(activation: object) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")
