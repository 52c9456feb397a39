"""The configurations of the Cosformer model types: a transformers architecture's own fields, and a few of ours.

horizon         the distance at which a key stops mattering; None means max_position_embeddings. No two tokens may lie
                further apart, so a longer text is an error; math.inf drops the cosine, and the length is then unlimited,
                unless positions are learned: those end at max_position_embeddings
decay           "gated" (rates read from the layer's input), "ladder" (a constant rate per head), None (the paper's operator)
layer_types     one of "linear_attention" and "full_attention" (softmax) per layer; None means every layer is linear
positions       "learned" (an embedding added to the input), "rope" (for mixers that admit it) or None; the decoder has None by
                default, the encoder and the encoder-decoder have "learned", as BERT and BART do
mixer           what mixes tokens in the linear layers: "cosformer", or any other name of cosformer.mixers, for comparisons.
                Others take no horizon and no decay, and keep no cache: they generate by reading the whole text at every step
mixer_options   options of that other mixer
pooling         encoder only: a text's vector is that of its first token ("cls"), the mean of all ("mean"), or that mean with
                batch normalisation ("normed-mean"), for long texts: the means of thousands of tokens are nearly the same for
                every text, and without it a new model's head takes thousands of steps to tell them apart
"""

from typing import Any

from transformers import BartConfig, BertConfig, LlamaConfig

from .. import mixers

DECAYS = ("gated", "ladder", None)
LAYER_TYPES = ("linear_attention", "full_attention")
POSITIONS = ("learned", "rope", None)
POOLINGS = ("cls", "mean", "normed-mean")


class CosformerConfig(LlamaConfig):
    """A decoder with Llama's blocks."""

    model_type = "cosformer"
    base_model_tp_plan = None  # Llama's would split the heads but not their gates

    horizon: int | float | None = None
    decay: str | None = "gated"
    layer_types: Any = None  # list[str] as soon as it is made
    positions: str | None = None
    mixer: str = "cosformer"
    mixer_options: dict | None = None

    def __post_init__(self, **kwargs):
        self.layer_types = check_layer_types("layer_types", self.layer_types, self.num_hidden_layers)
        super().__post_init__(**kwargs)
        check_fields(self, dropout=self.attention_dropout, dropout_name="attention_dropout")


class CosformerEncoderConfig(BertConfig):
    """An encoder with BERT's blocks."""

    model_type = "cosformer_encoder"

    attention_probs_dropout_prob: float | int = 0.0
    horizon: int | float | None = None
    decay: str | None = "gated"
    layer_types: Any = None  # list[str] as soon as it is made
    positions: str | None = "learned"
    mixer: str = "cosformer"
    mixer_options: dict | None = None
    pooling: str = "cls"

    def __post_init__(self, **kwargs):
        self.layer_types = check_layer_types("layer_types", self.layer_types, self.num_hidden_layers)
        super().__post_init__(**kwargs)
        check_fields(
            self, dropout=self.attention_probs_dropout_prob, dropout_name="attention_probs_dropout_prob"
        )
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling is {self.pooling!r}; one of {', '.join(map(repr, POOLINGS))}")
        if self.is_decoder:
            raise ValueError("is_decoder=True: this is the encoder; CosformerConfig is the decoder")


class CosformerSeq2SeqConfig(BartConfig):
    """An encoder-decoder with BART's blocks. `layer_types` is the decoder's, `encoder_layer_types` the encoder's."""

    model_type = "cosformer_seq2seq"

    horizon: int | float | None = None
    decay: str | None = "gated"
    layer_types: Any = None  # list[str] as soon as it is made
    positions: str | None = "learned"
    mixer: str = "cosformer"
    mixer_options: dict | None = None
    encoder_layer_types: Any = None

    def __post_init__(self, **kwargs):
        self.layer_types = check_layer_types("layer_types", self.layer_types, self.decoder_layers)
        self.encoder_layer_types = check_layer_types(
            "encoder_layer_types", self.encoder_layer_types, self.encoder_layers
        )
        super().__post_init__(**kwargs)
        check_fields(self, dropout=self.attention_dropout, dropout_name="attention_dropout")
        if self.positions != "learned":
            raise ValueError(
                f'positions is {self.positions!r}; the encoder-decoder has only "learned", as BART does'
            )

    def validate_layer_type(self):
        """transformers would compare the decoder's `layer_types` with the number of encoder layers; checked above."""


def check_layer_types(name: str, given: list[str] | None, layers: int) -> list[str]:
    if given is None:
        return ["linear_attention"] * layers
    if len(given) != layers or not set(given) <= set(LAYER_TYPES):
        raise ValueError(
            f"{name} must have one of {LAYER_TYPES} for each of the {layers} layers; got {given}"
        )
    return list(given)


def check_fields(config, *, dropout: float, dropout_name: str) -> None:
    if config.decay not in DECAYS:
        raise ValueError(f"decay is {config.decay!r}; one of {', '.join(map(repr, DECAYS))}")
    if config.horizon is not None and not config.horizon > 0:
        raise ValueError(
            f"horizon is {config.horizon}; it must be greater than 0, or None for max_position_embeddings"
        )
    if config.positions not in POSITIONS:
        raise ValueError(f"positions is {config.positions!r}; one of {', '.join(map(repr, POSITIONS))}")
    if config.mixer == "cosformer":
        if config.positions == "rope":
            raise ValueError(
                'positions="rope": the re-weighting of mixer "cosformer" is its position encoding'
            )
        if config.mixer_options:
            raise ValueError(
                f'mixer_options is {config.mixer_options}; mixer "cosformer" has the fields horizon and decay instead'
            )
    else:
        check_other_mixer(config)
    if dropout and "linear_attention" in config.layer_types:
        raise ValueError(
            f"{dropout_name} is {dropout}; linear layers have no attention weights to drop, so it must be 0"
        )


def check_other_mixer(config) -> None:
    if config.mixer not in mixers.names():
        raise ValueError(f"mixer is {config.mixer!r}; one of {', '.join(mixers.names())}")
    accepted = mixers.options(config.mixer)
    if unknown := [name for name in config.mixer_options or {} if name not in accepted]:
        raise ValueError(
            f"mixer_options has {unknown[0]!r}; mixer {config.mixer!r} accepts {', '.join(accepted) or 'none'}"
        )
    if config.horizon is not None or config.decay not in (
        "gated",
        None,
    ):  # "gated" is the default, not a wish
        raise ValueError(
            f"horizon={config.horizon} and decay={config.decay!r} are cosformer's; mixer is {config.mixer!r}"
        )
    config.decay = None
    config.use_cache = False
