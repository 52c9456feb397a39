"""The command line of `cosformer bench`: operators, every mixer (--mixers) or whole models (--models)."""

import argparse
import importlib
from pathlib import Path

import torch

from ..results import Cost, Row, Writer
from . import measure

WORKS = ("forward", "training", "decoding")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="cosformer bench",
        description="Time and memory of attention beside its peers, as medians on the machine that runs.",
        epilog="Speed is reported only for operators that agree with the definition.",
    )
    add = p.add_argument
    add("--quick", action="store_true", help="a small set that finishes within a minute")
    add(
        "--operators",
        nargs="+",
        metavar="NAME",
        help="some of cosformer-paper, cosformer (with a decay for each position), softmax, published"
        " (the paper's code; default: all but cosformer)",
    )
    add("--backends", nargs="+", metavar="NAME", help="of our operators (default: all that run here)")
    add("--mixers", nargs="+", metavar="NAME", help="measure these mixers instead, or `all`")
    add("--models", nargs="*", metavar="MIXER", help="measure whole models instead (needs the [hf] extra)")
    add("--lengths", nargs="+", type=int, metavar="N", help="text lengths (default: a few up to 16384)")
    add("--head-dims", nargs="+", type=int, metavar="D", default=[64], help="of the operators (default: 64)")
    add("--heads", type=int, default=8, help="of the operators (default: %(default)s)")
    add(
        "--dtypes",
        nargs="+",
        default=["float32"],
        choices=["float32", "bfloat16", "float16", "float64"],
        help="of the operators (default: float32)",
    )
    add(
        "--causal",
        choices=["yes", "no", "both"],
        default="both",
        help="causal or bidirectional; mixers are bidirectional unless it is yes (default: %(default)s)",
    )
    add(
        "--work",
        nargs="+",
        choices=WORKS,
        default=list(WORKS),
        help="of the operators; training is forward and backward, decoding one token (default: all)",
    )
    add("--threads", type=int, default=torch.get_num_threads(), help="torch's (default: %(default)s)")
    add(
        "--seconds",
        type=float,
        default=60.0,
        help="for the rounds, after warming up; twice that if other processes disturb"
        " (default: %(default)g; --quick: 10)",
    )
    add(
        "--longest-softmax",
        type=int,
        metavar="N",
        default=16384,
        help="beyond this length the softmax operator is left out (default: %(default)s; --quick: 8192)",
    )
    add(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also peak memory (default: yes)",
    )
    add("--out", type=Path, help="append the results to this file as JSON lines")
    add("--plot", type=Path, help="draw the results to this PNG (needs the [report] extra)")
    return p  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    kind = "mixers" if args.mixers else "models" if args.models is not None else "operators"
    if args.quick:
        args.seconds, args.longest_softmax, args.memory = 10.0, 8192, kind == "operators"
        args.lengths = args.lengths or [512, 2048, 8192]
        args.work, args.causal = ["training", "decoding"], "yes"
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    here = measure.machine()
    versions = f"torch {here.torch}, cosformer {here.cosformer}"
    print(f"{here.cpu}, {here.threads} threads, {here.isa}; {versions}", flush=True)
    bench = importlib.import_module(f".{kind}", __package__)
    file = Writer(args.out) if args.out else None
    rows: list[Row] = [here]
    if file and here.key not in {row.key for row in file.rows}:
        file.add(here)
    for row in bench.run(args, measure.say):
        rows.append(row)
        if file:
            file.add(row)
    measure.say("")
    costs = [row for row in rows if isinstance(row, Cost)]
    print(bench.summary(costs))
    print(measure.disturbance(costs))
    if args.plot:
        from .. import report

        report.plot(rows, args.plot)
