"""cosformer train: a run, from its settings to a model, its scores and all it takes to go on or do it again.

OUT/run.json       the settings, as given           OUT/checkpoint-N/    the last and the best, to resume from
OUT/resolved.json  all of them, and the versions    OUT/config.json ...  the best model, for from_pretrained
OUT/metrics.jsonl  what was logged                  OUT/result.json      final scores; the run is finished

The same command works under torchrun: every process runs this code, and the first one writes.
"""

from .build import evaluate
from .malloc import keep_memory
from .progress import quieten
from .run import train
from .settings import Run, SettingsError
from .trainer import Interrupted, NotFinite, Stopped

__all__ = [
    "Interrupted", "NotFinite", "Run", "SettingsError", "Stopped", "evaluate", "keep_memory", "quieten",
    "train",
]  # fmt: skip
