"""A saved config with other fields: those given, and without what followed from the ones they replace."""

from typing import Any

from .. import mixers

PATTERNS = {"layer_mixers": "mixer", "encoder_layer_mixers": "encoder_mixer"}  # and what they follow from
BY_LAYER = ("layer_types", *PATTERNS)
DEPTHS = {
    "num_hidden_layers": "layer_mixers",
    "decoder_layers": "layer_mixers",
    "encoder_layers": "encoder_layer_mixers",
}


def changed(saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A saved config's fields with those given, and without what follows from others if that may differ."""
    given, chosen = dict(given), {*BY_LAYER, *PATTERNS.values(), "full_attention_interval"} & given.keys()
    for names, mixer in PATTERNS.items():
        if isinstance(given.get(names), list | tuple):
            given.setdefault(mixer, ", ".join(map(str, given.pop(names))))
    for depth, names in DEPTHS.items():  # of fewer layers, the first stay what they are
        kept, count = saved.get(names) or [], given.get(depth)
        if isinstance(count, int) and 0 < count < len(kept) and len(set(kept)) > 1:
            given.setdefault(PATTERNS[names], ", ".join(kept[:count]))
    if {"layer_types", "full_attention_interval"} & chosen:
        kept = {
            name for name in saved.get("layer_mixers") or [] if mixers.layer_type(name) == "linear_attention"
        }
        if len(kept) == 1:
            given.setdefault("mixer", *kept)
    dropped = {*BY_LAYER, "full_attention_interval"} if chosen or DEPTHS.keys() & given.keys() else set()
    if chosen:
        dropped |= {"positions"} if saved.get("use_cache") else {"positions", "use_cache"}
    return {name: value for name, value in saved.items() if name not in dropped} | given
