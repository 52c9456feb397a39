"""How far a model reads: the horizon of its mixers, and its learned positions."""

import math


def check_reach(tokens: int, horizon, *, causal: bool) -> None:
    """Raise where the operator would, but say where a model's horizon is set.

    Invalid horizons are left to the operator.
    """
    if isinstance(horizon, int | float) and horizon > 0 and not reaches(tokens, horizon, causal=causal):
        raise ValueError(
            f"{tokens} tokens reach past the horizon of {horizon:g}; use shorter texts, or set a larger "
            f"horizon: config.cosformer = {{'horizon': {tokens}}} (math.inf drops the cosine; "
            "by default, the maximum positions)"
        )


def reaches(tokens: int, horizon: float, *, causal: bool) -> bool:
    """Whether the first and last of `tokens` tokens lie within the horizon.

    A key exactly at the horizon may only be behind its query.
    """
    return tokens - 1 <= horizon if causal else tokens - 1 < horizon


def max_positions(config) -> int:
    """How many positions an architecture has."""
    if positions := getattr(config, "max_position_embeddings", None):
        return positions
    if hasattr(config, "image_size") and hasattr(config, "patch_size"):
        sizes = (s if isinstance(s, list | tuple) else (s, s) for s in (config.image_size, config.patch_size))
        patches = math.prod(image // patch for image, patch in zip(*sizes, strict=True))
        return patches + 1  # and the class token
    raise ValueError(
        f"{type(config).__name__} does not say how many positions it has; "
        "set it: config.cosformer = {'horizon': ...}"
    )


def most_tokens(config) -> float:
    """The most tokens a model can read, given its horizon and its learned positions; of an encoder-decoder
    the decoder."""
    if config.model_type.startswith("cosformer"):
        heads = getattr(config, "decoder_attention_heads", None) or config.num_attention_heads
        learned = config.positions == "learned"
        made = [config.mixer_of(name, heads=heads, size=2) for name in dict.fromkeys(config.layer_mixers)]
        horizon = min((mixer.reach for mixer in made), default=math.inf)
        reach = _tokens(horizon, causal=config.causal_layers)
    else:  # a foreign architecture, which checks softmax's limit itself
        options = getattr(config, "cosformer", None)
        given = math.inf if options is None else options.get("horizon")
        learned = given is None  # it may have learned positions
        given = max_positions(config) if given is None else given
        reach = _tokens(min(given) if isinstance(given, list | tuple) else given, causal=True)
    return min(reach, max_positions(config)) if learned else reach


def _tokens(horizon: float, *, causal: bool) -> float:
    """The most tokens that `reaches` admits."""
    if horizon == math.inf:
        return horizon
    return int(horizon) + 1 if causal else math.ceil(horizon)
