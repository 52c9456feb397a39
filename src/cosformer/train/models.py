"""A run's model: what a task needs, a mixer by name and a size -> a Hugging Face model, alike for all mixers.

A mixer is named as everywhere (cosformer/mixers): cosformer, softmax+rope, "cosformer*3, softmax+rope",
cosformer-hybrid ...
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from .. import hf
from ..hf.sizes import SIZES, Size
from ..tasks import Task

CLASSES: dict[str, Any] = {
    "causal-lm": hf.CosformerForCausalLM,
    "masked-lm": hf.CosformerForMaskedLM,
    "sequence-classification": hf.CosformerForSequenceClassification,
    "pair-classification": hf.CosformerForPairClassification,
    "seq2seq": hf.CosformerForConditionalGeneration,
}


def size_of(name: str, task: Task) -> Size:
    """A preset, or "published": the sizes the task was published with."""
    if name in SIZES:
        return SIZES[name]
    if name != "published" or task.published is None:
        known = f"one of {', '.join(SIZES)}, or published for Long-Range Arena tasks"
        raise ValueError(f"size is {name!r}; task {task.name!r} takes {known}")
    return Size(**task.published)


def config_of(
    task: Task,
    *,
    mixer: str = "cosformer",
    size: str = "tiny",
    fields: dict[str, Any] | None = None,
    start: str | None = None,
):
    """The config: new, or that of the saved model `start`; `fields` override it."""
    check_fields(task.kind, fields or {})
    if start is not None:
        own = label_fields(task) | (fields or {})
        return CLASSES[task.kind].config_class.from_pretrained(start, local_files_only=True, **own)
    shape, special = size_of(size, task), task.special
    spread = max(0.02, 0.8 / math.sqrt(shape.width))  # with 0.02 small models barely start
    known: dict[str, Any] = {"mixer": mixer, "vocab_size": task.vocab_size, **label_fields(task)}
    known |= {"pad_token_id": special.pad, "bos_token_id": special.bos, "eos_token_id": special.eos}
    if task.kind == "seq2seq":
        known |= {"d_model": shape.width, "dropout": 0.0, "init_std": spread}
        for part in ("encoder", "decoder"):
            known |= {f"{part}_layers": shape.layers, f"{part}_attention_heads": shape.heads}
            known[f"{part}_ffn_dim"] = shape.wide
        known |= {"decoder_start_token_id": special.bos, "forced_eos_token_id": None}
        known["max_position_embeddings"] = max(task.max_length, task.max_target_length or 0)
    else:
        known |= {**shape.fields(), "initializer_range": spread, "max_position_embeddings": task.max_length}
    return CLASSES[task.kind].config_class(**{**known, **(fields or {})})


def check_fields(kind: str, fields: Iterable[str]) -> None:
    """Refuse unknown config fields: transformers takes any, and a misspelt one changes nothing."""
    config = CLASSES[kind].config_class()
    if unknown := [name for name in fields if not hasattr(config, name)]:
        raise ValueError(f"no field {unknown[0]!r}; see {type(config).__name__}")


def label_fields(task: Task) -> dict[str, Any]:
    """The config fields that name a task's classes."""
    if task.num_labels is None:
        return {}
    named = {"id2label": dict(enumerate(task.labels)), "label2id": {x: i for i, x in enumerate(task.labels)}}
    return {"num_labels": task.num_labels, **named}


def build(task: Task, *, seed: int = 0, **chosen: Any) -> PreTrainedModel:
    """A new model for the task, `config_of(task, **chosen)`, its weights drawn from `seed`."""
    config = config_of(task, **chosen)
    torch.manual_seed(seed)
    return CLASSES[task.kind](config)


def load(directory: str, kind: str, **fields: Any) -> PreTrainedModel:
    """The model saved in a directory, for tasks of `kind`; a head that it lacks is initialised."""
    return CLASSES[kind].from_pretrained(directory, local_files_only=True, **fields)


def labels_of(directory: str) -> list[str]:
    """The classes a saved model tells apart, in order of id."""
    names = AutoConfig.from_pretrained(directory, local_files_only=True).id2label
    return [names[i] for i in sorted(names)]


def parameters(model: PreTrainedModel) -> int:
    """The number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
