"""cosformer bench: time and memory beside the peers, in one interleaved run -> a table on the terminal and JSON lines.

Three benches: the operators (default), every mixer (--mixers), whole models (--models). Speed is reported only for operators
that agree with the definition, on the machine that runs, as medians with their spread.
"""

import argparse
import importlib
import json
from pathlib import Path

import torch

from . import measure


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="cosformer bench", description=__doc__.split("\n")[0])
    p.add_argument("--quick", action="store_true", help="a small set that finishes within a minute")
    p.add_argument("--mixers", nargs="+", metavar="NAME", help="measure these mixers instead, or `all`")
    p.add_argument(
        "--models",
        action="store_true",
        help="measure whole models instead: training and decoding (needs the [hf] extra)",
    )
    p.add_argument(
        "--operators", nargs="+", metavar="NAME", help="which operators (default: all that run here)"
    )
    p.add_argument(
        "--lengths", nargs="+", type=int, metavar="N", help="text lengths (default: a few up to 16384)"
    )
    p.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        metavar="D",
        default=[64],
        help="head sizes of the operators (default: 64)",
    )
    p.add_argument("--heads", type=int, default=8, help="heads of the operators (default: %(default)s)")
    p.add_argument(
        "--dtypes",
        nargs="+",
        default=["float32"],
        choices=["float32", "bfloat16", "float16", "float64"],
        help="of the operators (default: float32)",
    )
    p.add_argument(
        "--causal",
        choices=["yes", "no", "both"],
        default="both",
        help="causal or bidirectional attention; mixers are bidirectional unless it is yes (default: %(default)s)",
    )
    p.add_argument(
        "--work",
        nargs="+",
        choices=["forward", "training", "step"],
        default=["forward", "training", "step"],
        help="of the operators: forward, training (forward and backward), step (decode one token) (default: all three)",
    )
    p.add_argument("--decay", action="store_true", help="also the operators with one decay rate per position")
    p.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="torch's threads (default: %(default)s)"
    )
    p.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="time for the rounds, after warming up (default: %(default)g; --quick: 10)",
    )
    p.add_argument(
        "--longest-softmax",
        type=int,
        metavar="N",
        default=16384,
        help="beyond this length the softmax operator is left out (default: %(default)s; --quick: 8192)",
    )
    p.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also peak memory, one process a case (default: yes)",
    )
    p.add_argument("--out", type=Path, help="append the results to this file as JSON lines")
    p.add_argument("--plot", type=Path, help="draw the results to this PNG (needs the [report] extra)")
    return p


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    kind = "mixers" if args.mixers else "models" if args.models else "operators"
    if args.quick:
        args.seconds, args.longest_softmax, args.memory = 10.0, 8192, kind == "operators"
        args.lengths = args.lengths or [512, 2048, 8192]
        args.work, args.causal = ["training", "step"], "yes"
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    here = measure.machine()
    print(
        f"{here['cpu']}, {here['threads']} threads, {here['isa']}; torch {here['torch']}, cosformer {here['cosformer']}",
        flush=True,
    )
    bench = importlib.import_module(f".{kind}", __name__)
    rows = [{**row, **here} for row in bench.run(args, measure.show_progress)]
    measure.show_progress("")
    print(bench.summary(rows))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    if args.plot:
        from .. import report

        report.plot(rows, args.plot)
