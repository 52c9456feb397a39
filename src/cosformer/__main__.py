"""The command line: `cosformer VERB ...`; each verb is one module, imported when it is used."""

import importlib
import sys

from . import __version__

VERBS = {
    "compare": ("cosformer.compare", "is linear attention as good as softmax here, and what does it save?"),
    "train": ("cosformer.train", "train any mixer on a task, from scratch or from a saved model"),
    "evaluate": ("cosformer.train.evaluate", "score a saved model on a task"),
    "finetune": ("cosformer.train.finetune", "train a saved model further on another task"),
    "bench": ("cosformer.bench", "time and memory of attention operators beside their peers"),
    "generate": ("cosformer.generate", "continue a prompt with a saved model"),
    "picture": ("cosformer.picture", "attention matrices of any mixers, side by side"),
    "report": ("cosformer.report", "an HTML page of results, or the README's tables"),
    "info": ("cosformer.info", "version, backends, and why one is unavailable"),
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
    try:
        module = importlib.import_module(VERBS[verb][0])
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("cosformer"):
            raise
        raise SystemExit(
            f"cosformer {verb}: {error.name} is missing; in the clone: pip install '.[train,report]'"
        ) from None
    module.main(sys.argv[2:])


if __name__ == "__main__":
    main()
