"""cosformer compare: is linear attention as good as softmax here, and what does it save?

    OUT/results.jsonl    a row for each finished cell      OUT/report.html    the answer
    OUT/plan.json        what is run, for how many steps   OUT/cells/         the trained models

Interrupted at any moment, the same command goes on where it stopped: finished cells are not run again.
"""

from .command import main

__all__ = ["main"]
