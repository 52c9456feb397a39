"""cosformer info: version, backends, instruction set, threads, and why a backend is unavailable."""

import argparse
import platform

import torch

from . import __version__
from .ops.operator import BACKENDS, backend_problem, declared


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser("cosformer info", description=__doc__).parse_args(argv)
    versions = f"cosformer {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    threads = torch.get_num_threads()
    print(f"{versions}, {threads} thread{'s' * (threads > 1)}")
    for name in BACKENDS:
        print(f"  {name:<8}{_availability(name)}")


def _availability(name: str) -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    problems = {d: backend_problem(name, d) for d in ("cpu", *([accelerator.type] if accelerator else []))}
    runs = [device for device, problem in problems.items() if problem is None]
    if not runs:
        return "unavailable: " + "; ".join(str(problem) for problem in problems.values())
    details = {"on": runs, **declared(name).info()} if runs != ["cpu"] else declared(name).info()
    words = ", ".join(f"{k}: {', '.join(v) if isinstance(v, list) else v}" for k, v in details.items())
    return f"available ({words})" if words else "available"
