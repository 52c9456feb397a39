"""cosFormer in Hugging Face: an attention for any architecture, and models with a constant-size cache.

Importing this package registers both with transformers.
"""

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .. import mixers
from .cache import CosformerCache
from .configuration import CosformerConfig, CosformerEncoderConfig, CosformerSeq2SeqConfig
from .decoder import CosformerForCausalLM, CosformerModel
from .encoder import (
    CosformerEncoderModel,
    CosformerForMaskedLM,
    CosformerForPairClassification,
    CosformerForSequenceClassification,
    CosformerForTokenClassification,
)
from .int8 import to_int8
from .interface import attach, enter
from .parallel import prefill, sequence_parallel
from .seq2seq import CosformerForConditionalGeneration, CosformerSeq2SeqModel

__all__ = [
    "CosformerCache", "CosformerConfig", "CosformerEncoderConfig", "CosformerEncoderModel",
    "CosformerForCausalLM", "CosformerForConditionalGeneration", "CosformerForMaskedLM",
    "CosformerForPairClassification", "CosformerForSequenceClassification", "CosformerForTokenClassification",
    "CosformerModel", "CosformerSeq2SeqConfig", "CosformerSeq2SeqModel", "attach", "prefill",
    "sequence_parallel", "to_int8",
]  # fmt: skip

CONFIGS = (CosformerConfig, CosformerEncoderConfig, CosformerSeq2SeqConfig)
MODELS: dict[Any, list[Any]] = {
    AutoModel: [CosformerModel, CosformerEncoderModel, CosformerSeq2SeqModel],
    AutoModelForCausalLM: [CosformerForCausalLM],
    AutoModelForMaskedLM: [CosformerForMaskedLM],
    AutoModelForSequenceClassification: [CosformerForSequenceClassification],
    AutoModelForTokenClassification: [CosformerForTokenClassification],
    AutoModelForSeq2SeqLM: [CosformerForConditionalGeneration],
}

for implementation in ("cosformer", *(f"cosformer:{name}" for name in mixers.names())):
    enter(implementation)
for config in CONFIGS:
    AutoConfig.register(config.model_type, config, exist_ok=True)
for auto, models in MODELS.items():
    for model in models:
        auto.register(model.config_class, model, exist_ok=True)
