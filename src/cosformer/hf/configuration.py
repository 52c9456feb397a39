"""The configurations of the Cosformer model types: an architecture's own fields, and a few of ours.

The comments beside our fields are short; docs/hugging-face.md has a table of what each accepts.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import BartConfig, LlamaConfig
from transformers.activations import ACT2FN

from .. import mixers
from .checks import check_count, check_shared, check_spelling, wanted
from .loss import LOSSES
from .pooling import POOLINGS
from .saved import BY_LAYER, changed

FORMAT = 3  # of saved models: their fields and the names of their weights
POSITIONS = ("learned", "none", None)
WINDOWED = "sliding_attention"
BY_TYPE = {"full_attention": "softmax", WINDOWED: "local"}  # the mixer of a layer of that type


@dataclass(kw_only=True)
class CosformerFields:
    """What the three configurations share: our fields, their checks, and what follows from them."""

    causal_layers: ClassVar[bool]  # whether the layers of `mixer` are causal

    cosformer_format: int = FORMAT
    mixer: str = "cosformer"  # one for all layers, or one for each: "cosformer*3, softmax+rope"
    mixer_options: dict | None = None  # each option goes to the mixers that have it
    layer_types: Any = None  # transformers' name for each layer; if given, it selects mixers
    layer_mixers: Any = None  # the mixer of each layer; like layer_types a list[str] after `settle`
    full_attention_interval: int | None = None  # every n-th layer, and the last, is softmax
    sliding_window: int | None = None  # of `local`: how many tokens up to itself a token sees
    horizon: int | float | None = None  # the largest distance between tokens; None: the mixer's own
    positions: str | None = None  # one of POSITIONS; None: as the mixers want
    short_conv: int | None = None  # in all layers; 0: none, None: the widest that any mixer wants
    qk_norm: bool | None = None  # in all layers; None: if any mixer wants it
    output_gate: bool = False  # multiply a layer's output by a sigmoid of its input

    if TYPE_CHECKING:  # of every architecture
        attribute_map: ClassVar[dict[str, str]]
        hidden_size: int
        model_type: str
        max_position_embeddings: int
        use_cache: bool
        attention_dropout: float

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        found = config_dict.get("cosformer_format", 1)
        if found != FORMAT:
            raise ValueError(
                f"this model was saved in format {found} of cosformer, and this version reads format "
                f"{FORMAT}: load it with the version that saved it, or train it again"
            )
        # transformers would set what is given here after the checks, and after what follows from it.
        ours = {field.name for field in fields(cls)} - {"dtype"}  # which `from_pretrained` reads for itself
        alias = cls.attribute_map
        given = {own: kwargs.pop(name) for name in [*kwargs] if (own := alias.get(name, name)) in ours}
        return super().from_dict(changed(config_dict, given), **kwargs)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        """peft reads a config through this: tell it our LoRA `target_modules`, as it knows Llama's."""
        if (peft := sys.modules.get("peft.utils.constants")) is not None:
            known = peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
            known.setdefault(self.model_type, ["q_proj", "v_proj"])
        return super().to_dict()  # type: ignore[misc]

    def check_kinds(self, others: Iterable[str]) -> None:
        """Check the types of our fields, and the names of `others`: transformers checks only its own."""
        ours = [cls for cls in type(self).__mro__ if cls.__module__ == __name__]
        hints = {name: hint for cls in ours for name, hint in cls.__annotations__.items()}
        ours_alone = {field.name for field in fields(self)} & hints.keys()
        check_spelling(type(self).__name__, others, ours_alone)
        for name, hint in hints.items():
            if asked := wanted(getattr(self, name, None), hint):
                raise TypeError(f"{name} must be {asked}; got {getattr(self, name)!r}")
        if self.short_conv is not None and (self.short_conv < 0 or self.short_conv == 1):
            raise ValueError(f"short_conv is {self.short_conv}; it must be 0 or at least 2, or None")
        for name in BY_LAYER:
            named = getattr(self, name, None)
            of_names = isinstance(named, list | tuple) and all(isinstance(x, str) for x in named)
            if named is not None and not of_names:
                raise TypeError(f"{name} must be a list of names, one for each layer, or None; got {named!r}")
        if self.cosformer_format != FORMAT:  # nothing could read what such a configuration saves
            raise ValueError(
                f"cosformer_format is {self.cosformer_format}, and this version makes models of format "
                f"{FORMAT}; leave it out"
            )

    def settle(self, *, layers: int, heads: int, beside: Iterable[str] = ()) -> None:
        """Check the fields and fill in those that follow from others; `beside` are mixers besides `mixer`."""
        self._fold_types(layers)
        names = mixers.layers(self.mixer, layers)
        self._check_options({key for name in (*names, *beside) for key in mixers.options(name)})
        self._check_window((*names, *beside))
        if self.positions not in POSITIONS:
            raise ValueError(f"positions is {self.positions!r}; one of {', '.join(map(repr, POSITIONS))}")
        if self.attention_dropout:
            raise ValueError(
                f"attention_dropout is {self.attention_dropout}; there are no attention weights to drop here"
            )
        size = getattr(self, "head_dim", None) or self.hidden_size // heads
        with torch.device("meta"):
            made = {name: self.mixer_of(name, heads=heads, size=size) for name in names}
        for mixer in made.values():
            mixer.refuse(causal=self.causal_layers)
        self.layer_mixers = names
        self.layer_types = [made[name].layer_type for name in names]
        if self.positions is None:
            everyone = made.values()
            if self.causal_layers:  # a decoder learns positions only if no mixer encodes them ...
                learned = all(mixer.learned_positions for mixer in everyone)
            else:  # ... an encoder, like BERT, unless a mixer changes q and k
                learned = all(mixer.positions is None for mixer in everyone)
            self.positions = "learned" if learned else "none"
        if not all(mixer.streaming is True for mixer in made.values()):
            self.use_cache = False

    def mixer_of(self, name: str, *, heads: int, size: int, horizon: float | None = None) -> mixers.Mixer:
        """The mixer called `name`, with those of our options that it accepts, and a horizon of its own."""
        accepted = mixers.options(name)
        given = {key: value for key, value in (self.mixer_options or {}).items() if key in accepted}
        if horizon is not None:
            given["horizon"] = horizon
        elif self.horizon is not None and "horizon" in accepted:
            given.setdefault("horizon", self.horizon)
        if self.sliding_window is not None and mixers.layer_type(name) == WINDOWED:
            given.setdefault("window", self.sliding_window - 1)
        sizes = {"head_dim": size, "max_length": self.max_position_embeddings, "width": self.hidden_size}
        return mixers.build(name, heads=heads, **sizes, **given)

    def _check_options(self, accepted: set[str]) -> None:
        """Check that some mixer accepts each option."""
        if unknown := [key for key in self.mixer_options or {} if key not in accepted]:
            known = ", ".join(sorted(accepted)) or "none"
            raise ValueError(f"mixer_options has {unknown[0]!r}; mixer {self.mixer!r} accepts {known}")
        if self.horizon is not None and not self.horizon > 0:
            raise ValueError(
                f"horizon is {self.horizon}; it must be greater than 0, or None for what the mixer has"
            )
        if self.horizon is not None and "horizon" not in accepted:
            raise ValueError(f"horizon is {self.horizon}, but mixer {self.mixer!r} has none")

    def _check_window(self, names: Iterable[str]) -> None:
        """Check `sliding_window`, and that some layer has one."""
        size = self.sliding_window
        if size is None:
            return
        if size < 1:
            raise ValueError(f"sliding_window is {size}; it must be at least 1, or None")
        if "window" in (self.mixer_options or {}):
            raise ValueError(f"sliding_window is {size}, and mixer_options has 'window', too; give one")
        if all(mixers.layer_type(name) != WINDOWED for name in names):
            raise ValueError(
                f"sliding_window is {size}, but no layer is {WINDOWED!r}; mixer {self.mixer!r} has no `local`"
            )

    def _fold_types(self, layers: int) -> None:
        """Merge `layer_types` or `full_attention_interval` into `mixer`, if they say more than it does."""
        names, every = mixers.layers(self.mixer, layers), self.full_attention_interval
        kinds = None if self.layer_types is None else [*self.layer_types]
        one, own = len(set(names)) == 1, mixers.layer_type(names[0]) if names else ""
        if one and kinds is not None and set(kinds) == {own}:
            kinds = None  # they say no more; perhaps of another depth, as in a saved config's dict
        if every is not None:
            if not isinstance(every, int) or every < 1:
                raise ValueError(
                    f"full_attention_interval must be an int of at least 1, or None; got {every!r}"
                )
            full = mixers.full_layers(layers, every)
            if one:
                names = ["softmax" if f else name for f, name in zip(full, names)]
                self.mixer = ", ".join(names)
            if [mixers.layer_type(name) == "full_attention" for name in names] != full:
                raise ValueError(
                    f"full_attention_interval is {every}, but mixer {self.mixer!r} has softmax in other "
                    "layers; give one of them"
                )
        elif kinds is not None and one:
            if len(kinds) != layers:
                raise ValueError(f"layer_types must name each of the {layers} layers; got {kinds}")
            known = BY_TYPE | {own: names[0]}
            if unknown := [kind for kind in kinds if kind not in known]:
                told = f"with mixer {self.mixer!r} it may name {', '.join(map(repr, sorted(known)))}"
                raise ValueError(f"layer_types has {unknown[0]!r}; {told}")
            names = [known[kind] for kind in kinds]
            self.mixer = ", ".join(names)
        derived = [mixers.layer_type(name) for name in names]
        if kinds is not None and kinds != derived:
            raise ValueError(
                f"layer_types is {kinds}, but mixer {self.mixer!r} has {derived}; give one of them"
            )


@dataclass(kw_only=True)
class StackFields(CosformerFields):
    """Further fields of decoder and encoder, which are stacks of the same blocks."""

    dropout: float = 0.0  # on the embeddings and on the output of attention and MLP
    loss: str = "softmax"  # what training minimises, one of LOSSES; evaluation always uses the softmax
    loss_samples: int = 256  # the classes that one-vs-each draws per batch

    if TYPE_CHECKING:
        num_hidden_layers: int
        num_attention_heads: int
        num_key_value_heads: int | None
        head_dim: int | None
        hidden_act: str

    def __post_init__(self, **kwargs):
        self.check_kinds(kwargs)
        self._check_sizes()
        self.settle(layers=self.num_hidden_layers, heads=self.num_attention_heads)
        if self.loss not in LOSSES or self.loss_samples < 1:
            given, known = f"{self.loss!r} over {self.loss_samples} samples", ", ".join(map(repr, LOSSES))
            raise ValueError(f"loss is {given}; one of {known}, over 1 sample or more")
        super().__post_init__(**kwargs)  # type: ignore[misc]

    def _check_sizes(self) -> None:
        """Llama's own checks come too late, and leave some of this to its layers."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        check_count("num_hidden_layers", self.num_hidden_layers, least=0)
        check_count("num_attention_heads", heads)
        if self.head_dim is None:
            check_shared("num_attention_heads", heads, "hidden_size", self.hidden_size, ", or give head_dim")
        if groups is not None and (groups < 1 or heads % groups):
            raise ValueError(
                f"num_key_value_heads is {groups}; it must divide num_attention_heads, which is {heads}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and less than 1")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act is {self.hidden_act!r}; one of {', '.join(ACT2FN)}")


class CosformerConfig(StackFields, LlamaConfig):
    """A decoder with Llama's blocks."""

    model_type = "cosformer"
    base_model_tp_plan = None  # Llama's would split the heads, but not the gates that read a layer's input
    causal_layers = True


class CosformerEncoderConfig(StackFields, LlamaConfig):
    """An encoder with the same blocks, whose layers see the whole text."""

    model_type = "cosformer_encoder"
    base_model_tp_plan = None
    causal_layers = False

    use_cache: bool = False
    tie_word_embeddings: bool = True
    pooling: str = "attention"  # how a text becomes one vector, one of POOLINGS

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling is {self.pooling!r}; one of {', '.join(map(repr, POOLINGS))}")


class CosformerSeq2SeqConfig(CosformerFields, BartConfig):
    """An encoder-decoder with BART's blocks; `mixer` and the fields about layers are the decoder's."""

    model_type = "cosformer_seq2seq"
    causal_layers = True

    positions: str | None = "learned"
    encoder_mixer: str | None = None  # None: the decoder's
    encoder_layer_mixers: Any = None
    cross_mixer: str | None = None  # reads the source; None: `cross_mixer_of` chooses
    cross_horizon: int | float | None = None  # of what reads the source; None: `horizon`

    def __post_init__(self, **kwargs):
        self.check_kinds(kwargs)
        if self.encoder_mixer is None:
            self.encoder_mixer = self.mixer  # as given: `settle` may expand it for the decoder
        for part in ("encoder", "decoder"):
            name = f"{part}_attention_heads"
            check_count(name, getattr(self, name))
            check_count(f"{part}_layers", getattr(self, f"{part}_layers"), least=0)
            check_shared(name, getattr(self, name), "d_model", self.d_model)
        self.encoder_layer_mixers = mixers.layers(self.encoder_mixer, self.encoder_layers)
        if self.cross_horizon is not None:
            if not self.cross_horizon > 0:
                raise ValueError(f"cross_horizon is {self.cross_horizon}; it must be greater than 0, or None")
            if self.cross_mixer is None or "horizon" not in mixers.options(self.cross_mixer):
                raise ValueError(
                    f"cross_horizon is {self.cross_horizon}, but cross_mixer {self.cross_mixer!r} has none; "
                    'one that has is "cosformer-paper"'
                )
        beside = [*self.encoder_layer_mixers, *filter(None, [self.cross_mixer])]
        self.settle(layers=self.decoder_layers, heads=self.decoder_attention_heads, beside=beside)
        with torch.device("meta"):
            self._check_readers()
        super().__post_init__(**kwargs)
        if self.positions != "learned":
            raise ValueError(
                f'positions is {self.positions!r}; the encoder-decoder has only "learned", as BART does'
            )

    def _check_readers(self) -> None:
        """Check the mixers that read the source: the encoder's, and those of cross attention."""
        heads = self.encoder_attention_heads
        for name in {*self.encoder_layer_mixers}:
            self.mixer_of(name, heads=heads, size=self.d_model // heads).refuse(causal=False)
        heads = self.decoder_attention_heads
        for name in {self.cross_mixer_of(name) for name in self.layer_mixers}:
            mixer = self.mixer_of(name, heads=heads, size=self.d_model // heads, horizon=self.cross_horizon)
            mixer.refuse(cross="attention to what the encoder wrote (cross_mixer)", absorbing=True)

    def cross_mixer_of(self, name: str) -> str:
        """What reads the source in a decoder layer with the mixer `name`: the same without positions, or a
        relative that can."""
        if self.cross_mixer is not None:
            return self.cross_mixer
        if mixers.layer_type(name) == WINDOWED:  # a window is laid out on one sequence
            return "softmax"
        return "relu" if name.startswith("cosformer") else name.partition("+")[0]

    def validate_layer_type(self):
        """Left to `settle`: transformers compares the decoder's `layer_types` with the encoder's layers."""
