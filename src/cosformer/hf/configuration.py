"""The configurations of the Cosformer model types: a transformers architecture's own fields, and three of ours.

horizon       the distance at which a key stops mattering; None means max_position_embeddings. No two tokens may lie
              further apart, so a longer text is an error; math.inf drops the cosine, and the length is then unlimited.
decay         "gated" (rates read from the layer's input), "ladder" (a constant rate per head), None (the paper's operator)
layer_types   one of "linear_attention" and "full_attention" (softmax) per layer; None means every layer is linear
"""

from transformers import BartConfig, BertConfig, LlamaConfig

DECAYS = ("gated", "ladder", None)
LAYER_TYPES = ("linear_attention", "full_attention")


class CosformerConfig(LlamaConfig):
    """A decoder with Llama's blocks."""

    model_type = "cosformer"
    base_model_tp_plan = None  # Llama's would split the heads but not their gates

    horizon: int | float | None = None
    decay: str | None = "gated"
    layer_types: list[str] | None = None

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
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs):
        self.layer_types = check_layer_types("layer_types", self.layer_types, self.num_hidden_layers)
        super().__post_init__(**kwargs)
        check_fields(self, dropout=self.attention_probs_dropout_prob, dropout_name="attention_probs_dropout_prob")
        if self.is_decoder:
            raise ValueError("is_decoder=True: this is the encoder; CosformerConfig is the decoder")


class CosformerSeq2SeqConfig(BartConfig):
    """An encoder-decoder with BART's blocks. `layer_types` is the decoder's, `encoder_layer_types` the encoder's."""

    model_type = "cosformer_seq2seq"

    horizon: int | float | None = None
    decay: str | None = "gated"
    layer_types: list[str] | None = None
    encoder_layer_types: list[str] | None = None

    def __post_init__(self, **kwargs):
        self.layer_types = check_layer_types("layer_types", self.layer_types, self.decoder_layers)
        self.encoder_layer_types = check_layer_types("encoder_layer_types", self.encoder_layer_types, self.encoder_layers)
        super().__post_init__(**kwargs)
        check_fields(self, dropout=self.attention_dropout, dropout_name="attention_dropout")

    def validate_layer_type(self):
        """transformers would compare the decoder's `layer_types` with the number of encoder layers; checked above."""


def check_layer_types(name: str, given: list[str] | None, layers: int) -> list[str]:
    if given is None:
        return ["linear_attention"] * layers
    if len(given) != layers or not set(given) <= set(LAYER_TYPES):
        raise ValueError(f"{name} must have one of {LAYER_TYPES} for each of the {layers} layers; got {given}")
    return list(given)


def check_fields(config, *, dropout: float, dropout_name: str) -> None:
    if config.decay not in DECAYS:
        raise ValueError(f"decay is {config.decay!r}; one of {', '.join(map(repr, DECAYS))}")
    if config.horizon is not None and not config.horizon > 0:
        raise ValueError(f"horizon is {config.horizon}; it must be greater than 0, or None for max_position_embeddings")
    if dropout and "linear_attention" in config.layer_types:
        raise ValueError(f"{dropout_name} is {dropout}; linear layers have no attention weights to drop, so it must be 0")
