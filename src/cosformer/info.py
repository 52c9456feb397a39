"""cosformer info: version, backends, instruction set, threads, and why a backend is unavailable."""

import argparse
import platform

import torch

from . import __version__
from .ops.operator import BACKENDS, backend_info, backend_problem


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser("cosformer info", description=__doc__).parse_args(argv)
    print(
        f"cosformer {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads"
    )
    for name in BACKENDS:
        problem = backend_problem(name)
        details = ", ".join(
            f"{k}: {', '.join(v) if isinstance(v, list) else v}" for k, v in backend_info(name).items()
        )
        print(
            f"  {name:<8}"
            + (f"unavailable: {problem}" if problem else "available" + (f" ({details})" if details else ""))
        )
