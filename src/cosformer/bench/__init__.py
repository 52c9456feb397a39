"""cosformer bench: time and memory beside the peers, measured in turns -> a table and rows of results."""

import argparse
import importlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from ..mixers import pattern
from ..ops.operator import backend_problem
from ..results import Cost, Row, Shared, Writer, of
from . import measure, operators

WORKS = ["forward", "training", "decoding"]  # of operators
OF_MODELS = ["training", "decoding", "generating"]
LONG, QUICK = 60.0, 10.0  # seconds of measuring
WEIGHTS = ["float32", "bfloat16", "int8"]

__all__ = ["main"]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be a whole number of at least 1; got {text}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"it must be a number above 0; got {text}")
    return seconds


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="cosformer bench",
        description="Time and memory of attention beside its peers, as medians on the machine that runs.",
        epilog="Speed is reported only for operators that agree with the definition.",
    )
    add = p.add_argument
    # fmt: off
    add("--quick", action="store_true", help="a small set that finishes within a minute")
    add("--operators", nargs="+", metavar="NAME", help="some of cosformer-paper, cosformer (no cosine, a"
        " decay for each position), softmax, published (the paper's code), fla (flash-linear-attention, where"
        " it is installed, on a GPU; default: all but cosformer and fla)")
    add("--backends", nargs="+", metavar="NAME", help="of our operators (default: all that run here)")
    add("--device", default="cpu", help="of the operators: cpu or cuda (default: %(default)s)")
    add("--tune", action="store_true", help="instead of measuring, fill the table of the triton kernels'"
        " block sizes for this GPU (with --device cuda), for the --head-dims and --dtypes given")
    add("--mixers", nargs="+", metavar="NAME", help="measure these mixers instead, or `all`")
    add("--models", nargs="*", metavar="MIXER", help="measure whole models instead, also `llama`, which is"
        " transformers' own, and variants: cosformer:short_conv=0,qk_norm=false (needs the [hf] extra)")
    add("--parallel", nargs="*", type=_count, metavar="W", help="measure one sequence over 1, 2 and 4"
        " processes, or these (needs the [hf] extra)")
    add("--lengths", nargs="+", type=_count, metavar="N", help="text lengths (default: a few up to 16384)")
    add("--head-dims", nargs="+", type=_count, metavar="D", default=[64],
        help="of operators (default: %(default)s)")
    add("--heads", type=_count, default=8, help="of the operators (default: %(default)s)")
    add("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16", "float64"],
        help="of the operators (default: %(default)s)")
    add("--causal", choices=["yes", "no", "both"], help="mixers are bidirectional unless it is yes, models"
        " are causal (default: both)")
    add("--work", nargs="+", choices=[*WORKS, "generating"], help="of operators and models (default: all they"
        " have); training is forward and backward, decoding one token, generating a token of `generate`")
    add("--size", metavar="NAME", help="of --models, as of `train` (default: 4 layers of width 256)")
    add("--weights", nargs="+", choices=WEIGHTS, default=["float32"], help="of --models, for generating"
        " (default: %(default)s)")
    add("--contexts", nargs="+", type=_count, metavar="N", help="of --models: tokens before those decoded")
    add("--threads", type=_count, default=torch.get_num_threads(), help="torch's (default: %(default)s)")
    add("--seconds", type=_seconds, help="for the rounds after warming up (default:"
        f" {LONG:g}; --quick: {QUICK:g}); twice that if other processes disturb")
    add("--memory", action=argparse.BooleanOptionalAction, default=True, help="peak memory (default: yes)")
    add("--out", type=Path, help="append the results to this file as JSON lines")
    add("--plot", type=Path, help="draw the results to this SVG (needs the [report] extra)")
    # fmt: on
    return p


def settings(argv: list[str] | None) -> argparse.Namespace:
    """The arguments as given; --quick changes only the others."""
    args = parser().parse_args(argv)
    asked = [kind for kind in ("parallel", "mixers", "models") if getattr(args, kind) is not None]
    args.kind = asked[0] if asked else "operators"
    args.seconds = args.seconds or (QUICK if args.quick else LONG)
    args.causal = args.causal or ("yes" if args.quick else "both")
    known = OF_MODELS if args.kind == "models" else WORKS
    for work in args.work or ():
        if work not in known:
            raise SystemExit(f"bench: --work {work} is not for {args.kind}; some of {', '.join(known)}")
    quick = args.quick and args.kind != "models"
    args.work = args.work or (["training", "decoding"] if quick else known)
    if args.quick:
        args.lengths = args.lengths or [512, 2048, 8192]
        args.memory &= args.kind == "operators"
    args.mixers, args.models = (given and [*dict.fromkeys(given)] for given in (args.mixers, args.models))
    alone = [name for name in args.mixers or [] if name != "all"]
    for mixer in [*(name for name in args.models or [] if name != "llama"), *alone]:
        try:
            layers = pattern(mixer.partition(":")[0] if args.models else mixer)
        except ValueError as error:
            raise SystemExit(f"bench: {error}" + ("; or `all`" if args.mixers else "")) from None
        if mixer in alone and layers != [mixer]:
            raise SystemExit(f"bench: --mixers measures one mixer; {mixer!r} names layers, as --models takes")
    if args.device != "cpu" and args.kind != "operators":
        raise SystemExit(f"cosformer bench: --device is for operators; {args.kind} are measured on the CPU")
    if (problem := backend_problem("torch", args.device)) is not None:
        raise SystemExit(f"cosformer bench: --device {args.device}: {problem}")
    if args.tune and args.device == "cpu":
        raise SystemExit("cosformer bench: --tune fills a table for a GPU: give it with --device cuda")
    if args.plot and args.plot.suffix != ".svg":
        raise SystemExit(f"cosformer bench: --plot draws an SVG: its name ends in .svg; got {args.plot}")
    if args.plot and not args.plot.parent.is_dir():
        raise SystemExit(f"cosformer bench: --plot {args.plot}: there is no folder {args.plot.parent}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = settings(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if (index := torch.device(args.device).index) is not None and args.device != "cpu":
        torch.accelerator.set_device_index(index)  # for the device's name, and for synchronising
    with torch.device(args.device) if args.device != "cpu" else nullcontext():
        _measure(args)


def _measure(args: argparse.Namespace) -> None:
    if args.tune:
        from . import tune

        return tune.run(args, measure.say)
    here = measure.machine()
    if args.device != "cpu":
        here = replace(here, cpu=torch.cuda.get_device_name() if torch.cuda.is_available() else args.device)
    versions = f"torch {here.torch}, cosformer {here.cosformer}"
    print(f"{here.cpu}, {here.threads} threads, {here.isa}; {versions}", flush=True)
    bench = importlib.import_module(f".{args.kind}", __package__)
    file = Writer(args.out) if args.out else None
    if file:
        file.add_once(here)
    rows: list[Row] = [here]
    for row in bench.run(args, measure.say):
        rows.append(row)
        if file:
            file.add(row)
    measure.say("")
    from .. import report  # it takes a while to load

    found = of(rows, Cost)
    apart = [replace(row, mixer=operators.name_of(row)) for row in found]  # a line for every backend
    print(report.terminal_speeds([here, *of(rows, Shared), *apart]))
    if args.kind in ("operators", "models"):
        print("", *bench.notes(found), sep="\n")
    print(measure.disturbance(rows[1:]))
    if args.plot:
        report.plot(rows, args.plot)
