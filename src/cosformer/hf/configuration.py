"""The configurations of the Cosformer model types: a transformers architecture's own fields, and a few of ours.

mixer           what mixes tokens: a name of cosformer.mixers for all layers, or one for each, as "cosformer*3, softmax+rope" or
                "cosformer-hybrid". `layer_mixers` has the name of each layer, `layer_types` transformers' word for it
full_attention_interval   shorthand: every so manieth layer, and the last, is softmax
mixer_options   options of the mixers, each given to those that have it
horizon         the distance at which a key stops mattering, for the mixers that have one; None means max_position_embeddings.
                No two tokens may lie further apart, so a longer text is an error; math.inf drops the cosine, and the length
                is then unlimited, unless positions are learned: those end at max_position_embeddings
positions       "learned" (an embedding added to the input), "none", or None for what the mixers want
short_conv      the width of a convolution of q, k and v; None for what the mixer wants, 0 for none
qk_norm         RMS norms of q and k; None for what the mixer wants
output_gate     a layer's output times a sigmoid of its input
cross_mixer     encoder-decoder only: what reads the source; None means "relu" (no cosine) beside cosformer, else the mixer itself
dropout         on the embeddings and on what each block adds
loss            what training minimises: "softmax", or "one-vs-each" over `loss_samples` classes drawn for each batch (loss.py);
                evaluation is always the softmax
pooling         encoder only: how a text becomes one vector, see pooling.py
"""

from typing import Any

import torch
from transformers import BartConfig, LlamaConfig

from .. import mixers
from .loss import LOSSES
from .pooling import POOLINGS

FORMAT = 2  # of a saved model: its fields and the names of its weights
POSITIONS = ("learned", "none", None)
BY_TYPE = {
    "full_attention": "softmax",
    "sliding_attention": "local",
}  # the mixer of a layer named by its type


class CosformerFields:
    """What the three configurations share: their checks, and what follows from the fields."""

    causal_layers: bool  # whether the layers of `mixer` see only what is before them

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        found = config_dict.get("cosformer_format", 1)
        if found != FORMAT:
            raise ValueError(
                f"this model was saved in format {found} of cosformer, and this version reads format {FORMAT}: "
                "load it with the version that saved it, or train it again"
            )
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]

    def settle(self, *, layers: int, heads: int, size: int, dropout: str) -> None:
        """Check the fields, and fill in those that follow from others."""
        self._fold_types(layers)
        names = mixers.layers(self.mixer, layers)
        accepted = {key for name in names for key in mixers.options(name)}
        if unknown := [key for key in self.mixer_options or {} if key not in accepted]:
            raise ValueError(
                f"mixer_options has {unknown[0]!r}; mixer {self.mixer!r} accepts {', '.join(sorted(accepted)) or 'none'}"
            )
        if self.horizon is not None and not self.horizon > 0:
            raise ValueError(
                f"horizon is {self.horizon}; it must be greater than 0, or None for max_position_embeddings"
            )
        if self.horizon is not None and "horizon" not in accepted:
            raise ValueError(f"horizon is {self.horizon}, but mixer {self.mixer!r} has none")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions is {self.positions!r}; one of {', '.join(map(repr, POSITIONS))}")
        if getattr(self, "loss", "softmax") not in LOSSES or getattr(self, "loss_samples", 1) < 1:
            raise ValueError(
                f"loss is {self.loss!r} over {self.loss_samples} samples; one of {', '.join(map(repr, LOSSES))}, "
                "over 1 sample or more"
            )
        if getattr(self, dropout):
            raise ValueError(
                f"{dropout} is {getattr(self, dropout)}; there are no attention weights to drop here"
            )
        with torch.device("meta"):
            made = [self.mixer_of(name, heads=heads, size=size) for name in dict.fromkeys(names)]
        for mixer in made:
            mixer.refuse(causal=self.causal_layers)
        self.layer_mixers = names
        self.layer_types = [{m.name: m.layer_type for m in made}[name] for name in names]
        if self.positions is None:
            # BERT and BART have learned positions whatever mixes; a decoder only where no layer knows where it is.
            turned = any(m.positions is not None for m in made)
            learned = all(m.learned_positions for m in made) if self.causal_layers else not turned
            self.positions = "learned" if learned else "none"
        if not all(m.streaming is True for m in made):
            self.use_cache = False

    def mixer_of(self, name: str, *, heads: int, size: int) -> mixers.Mixer:
        """The mixer called `name` with the options of this configuration that it has."""
        accepted = mixers.options(name)
        given = {key: value for key, value in (self.mixer_options or {}).items() if key in accepted}
        if self.horizon is not None and "horizon" in accepted:
            given.setdefault("horizon", self.horizon)
        length = self.max_position_embeddings
        return mixers.build(
            name, heads=heads, head_dim=size, max_length=length, width=self.hidden_size, **given
        )

    def _fold_types(self, layers: int) -> None:
        """`layer_types` or `full_attention_interval`, where they say more than `mixer`, become part of it."""
        one = len(set(mixers.layers(self.mixer, layers))) == 1
        if self.full_attention_interval and one:
            every = self.full_attention_interval
            full = [(i + 1) % every == 0 or i == layers - 1 for i in range(layers)]
            self.mixer = ", ".join("softmax" if f else self.mixer for f in full)
        elif (
            self.layer_types is not None and one and set(self.layer_types) != {mixers.layer_type(self.mixer)}
        ):
            if len(self.layer_types) != layers:
                raise ValueError(f"layer_types must name each of the {layers} layers; got {self.layer_types}")
            known = BY_TYPE | {"linear_attention": self.mixer}
            if unknown := [kind for kind in self.layer_types if kind not in known]:
                raise ValueError(f"layer_types has {unknown[0]!r}; one of {', '.join(map(repr, known))}")
            self.mixer = ", ".join(known[kind] for kind in self.layer_types)


class CosformerConfig(CosformerFields, LlamaConfig):
    """A decoder with Llama's blocks."""

    model_type = "cosformer"
    base_model_tp_plan = None  # Llama's would split the heads but not what reads the layer's input for them
    causal_layers = True

    cosformer_format: int = FORMAT
    mixer: str = "cosformer"
    mixer_options: dict | None = None
    layer_types: Any = None  # list[str] as soon as it is made
    layer_mixers: Any = None
    full_attention_interval: int | None = None
    horizon: int | float | None = None
    positions: str | None = None
    short_conv: int | None = None
    qk_norm: bool | None = None
    output_gate: bool = False
    dropout: float = 0.0
    loss: str = "softmax"
    loss_samples: int = 256

    def __post_init__(self, **kwargs):
        layers, heads = self.num_hidden_layers, self.num_attention_heads
        size = self.head_dim or self.hidden_size // heads
        self.settle(layers=layers, heads=heads, size=size, dropout="attention_dropout")
        super().__post_init__(**kwargs)


class CosformerEncoderConfig(CosformerFields, LlamaConfig):
    """An encoder with the same blocks, whose layers see the whole text."""

    model_type = "cosformer_encoder"
    base_model_tp_plan = None
    causal_layers = False

    cosformer_format: int = FORMAT
    mixer: str = "cosformer"
    mixer_options: dict | None = None
    layer_types: Any = None  # list[str] as soon as it is made
    layer_mixers: Any = None
    full_attention_interval: int | None = None
    horizon: int | float | None = None
    positions: str | None = None
    short_conv: int | None = None
    qk_norm: bool | None = None
    output_gate: bool = False
    dropout: float = 0.0
    pooling: str = "max"
    loss: str = "softmax"
    loss_samples: int = 256
    use_cache: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        layers, heads = self.num_hidden_layers, self.num_attention_heads
        size = self.head_dim or self.hidden_size // heads
        self.settle(layers=layers, heads=heads, size=size, dropout="attention_dropout")
        super().__post_init__(**kwargs)
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling is {self.pooling!r}; one of {', '.join(map(repr, POOLINGS))}")


class CosformerSeq2SeqConfig(CosformerFields, BartConfig):
    """An encoder-decoder with BART's blocks. `mixer` is the decoder's, `encoder_mixer` the encoder's (None: the same)."""

    model_type = "cosformer_seq2seq"
    causal_layers = True

    cosformer_format: int = FORMAT
    mixer: str = "cosformer"
    encoder_mixer: str | None = None
    cross_mixer: str | None = None
    mixer_options: dict | None = None
    layer_types: Any = None  # list[str] as soon as it is made
    layer_mixers: Any = None
    encoder_layer_mixers: Any = None
    full_attention_interval: int | None = None
    horizon: int | float | None = None
    positions: str | None = "learned"
    short_conv: int | None = None
    qk_norm: bool | None = None
    output_gate: bool = False

    def __post_init__(self, **kwargs):
        heads = self.decoder_attention_heads
        spec = self.mixer  # before it is unfolded to the decoder's layers
        self.settle(
            layers=self.decoder_layers, heads=heads, size=self.d_model // heads, dropout="attention_dropout"
        )
        spec = spec if self.encoder_mixer is None else self.encoder_mixer
        self.encoder_layer_mixers = mixers.layers(spec, self.encoder_layers)
        super().__post_init__(**kwargs)
        if self.positions != "learned":
            raise ValueError(
                f'positions is {self.positions!r}; the encoder-decoder has only "learned", as BART does'
            )

    def cross_mixer_of(self, name: str) -> str:
        """What reads the source beside a decoder layer with the mixer `name`."""
        if self.cross_mixer is not None:
            return self.cross_mixer
        return "relu" if name.startswith("cosformer") else name.partition("+")[0]

    def validate_layer_type(self):
        """transformers would compare the decoder's `layer_types` with the number of encoder layers; checked above."""
