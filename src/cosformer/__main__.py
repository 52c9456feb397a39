"""The command line: `cosformer VERB ...`; each verb is one function, imported when it is used."""

import importlib
import os
import sys

from . import __version__

VERBS = {
    "compare": ("compare:main", "is linear attention as good as softmax here, and what does it save?"),
    "train": ("train.cli:train_verb", "train any mixer on a task, from scratch or from a saved model"),
    "evaluate": ("train.cli:evaluate_verb", "score a saved model on a task"),
    "finetune": ("train.cli:finetune_verb", "train a saved model further on another task"),
    "bench": ("bench:main", "time and memory of attention operators beside their peers"),
    "generate": ("generate:main", "continue a prompt with a saved model"),
    "picture": ("picture:main", "attention matrices of any mixers, side by side"),
    "report": ("report:main", "an HTML page of results, or the README's tables"),
    "info": ("info:main", "version, backends, and why one is unavailable"),
}


def main() -> None:
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-h", "--help"):
        width = max(map(len, VERBS))
        print("usage: cosformer VERB [--help] ...\n       cosformer --version\n")
        print("\n".join(f"  {name:<{width}}  {help_}" for name, (_, help_) in VERBS.items()))
        return
    if verb == "--version":
        print(f"cosformer {__version__}")
        return
    if verb not in VERBS:
        raise SystemExit(f"cosformer: unknown verb {verb!r}; one of {', '.join(VERBS)}")
    module, function = VERBS[verb][0].split(":")
    try:
        getattr(importlib.import_module(f"cosformer.{module}"), function)(sys.argv[2:])
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("cosformer"):
            raise
        way = "in the clone: pip install '.[train,report]'"
        raise SystemExit(f"cosformer {verb}: {error.name} is missing; {way}") from None
    except KeyboardInterrupt:
        print(f"\ncosformer {verb}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # whoever read the output, such as head, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
