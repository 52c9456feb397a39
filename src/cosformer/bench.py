"""cosformer bench: time and memory of attention beside its peers, in one interleaved run -> a table and JSON lines.

Speed is reported only for operators that agree with the definition, on the machine that runs, as medians with their spread.
The limit is the machine's own: the best rate of torch's batched matrix product over a few shapes, measured in the same run.
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from . import __version__, reference
from .ops import State, cosformer_attention, cosformer_stream
from .ops.linear import BACKENDS, backend_problem

PASSES = ("forward", "training", "step")  # training is forward and backward; a step decodes one token
STEP_POSITIONS = (100, 100_000)


@dataclass(frozen=True)
class Case:
    """One thing to measure; batch 1."""

    operator: str
    length: int
    causal: bool
    work: str  # one of PASSES; for a step, length is the position of the token
    heads: int = 8
    size: int = 64
    dtype: str = "float32"
    decay: bool = False

    @property
    def flops(self) -> float:
        """The arithmetic of linear attention itself: 8 N D^2 a head forward, 24 with backward; what chunks add is overhead."""
        return self.heads * self.size**2 * {"forward": 8 * self.length, "training": 24 * self.length, "step": 8}[self.work]


def published(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The algorithm of the paper's published code, written from its formula: causal sums are stored for every position."""
    L = q.shape[2]
    angle = math.pi / 2 / L * torch.arange(L)[:, None]
    phi_q, phi_k = (torch.cat([x.relu() * angle.cos(), x.relu() * angle.sin()], -1) for x in (q, k))
    if causal:
        kv = torch.einsum("bhld,bhle->bhlde", phi_k, v).cumsum(2)  # (B, H, L, 2D, E)
        z = torch.einsum("bhld,bhld->bhl", phi_q, phi_k.cumsum(2))
        return torch.einsum("bhld,bhlde->bhle", phi_q, kv) / z.clamp_min(1e-6)[..., None]
    z = torch.einsum("bhld,bhd->bhl", phi_q, phi_k.sum(2))
    return phi_q @ (phi_k.mT @ v) / z.clamp_min(1e-6)[..., None]


def _attention(backend: str):
    return lambda q, k, v, causal, decay=None: cosformer_attention(q, k, v, causal=causal, decay=decay, backend=backend)


def operators() -> dict[str, Callable]:
    """Every operator that can run here, by name."""
    ours = {f"cosformer {b}": _attention(b) for b in BACKENDS if backend_problem(b) is None}
    softmax = {"softmax": lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal)}
    return {**ours, **softmax, "published": published}


def prepare(case: Case) -> Callable[[], object]:
    """A function of no arguments that does the case's work once."""
    dtype = getattr(torch, case.dtype)
    shape = (1, case.heads, 1 if case.work == "step" else case.length, case.size)
    q, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
    if case.work == "step":
        return _prepare_step(case, q, k, v)
    call = operators()[case.operator]
    extra = {"decay": torch.rand(1, case.heads, case.length)} if case.decay else {}
    if case.work == "forward":
        return torch.no_grad()(lambda: call(q, k, v, case.causal, **extra))
    leaves = [x.requires_grad_() for x in (q, k, v, *extra.values())]
    dout = torch.randn(shape).to(dtype)

    def training():
        out = call(q, k, v, case.causal, **extra)
        return torch.autograd.grad(out, leaves, dout)

    return training


def _prepare_step(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    if case.operator == "softmax":  # one query against the whole cache
        keys, values = (torch.randn(1, case.heads, case.length, case.size).to(q.dtype) for _ in range(2))
        return torch.no_grad()(lambda: F.scaled_dot_product_attention(q, keys, values))
    backend = case.operator.split()[-1]
    state = State(torch.rand(1, case.heads, 2 * case.size, case.size + 1), case.length)
    horizon = 2 * max(STEP_POSITIONS)

    return torch.no_grad()(lambda: cosformer_stream(q, k, v, state, horizon=horizon, backend=backend))


def check(case: Case) -> float:
    """The largest difference from the definition at a length that is quick to check; an error if it is too large to be rounding."""
    dtype = getattr(torch, case.dtype)
    L = min(case.length, 300)
    q, k, v = (torch.randn(1, 2, L, case.size).to(dtype) for _ in range(3))
    decay = torch.rand(1, 2, L) if case.decay else None
    extra = {} if decay is None else {"decay": decay}
    out = operators()[case.operator](q, k, v, case.causal, **extra)
    exact = reference.attention(
        q.double(), k.double(), v.double(), horizon=L, causal=case.causal, decay=None if decay is None else decay.double()
    )
    difference = (out.double() - exact).abs().max().item()
    if difference > 20 * torch.finfo(dtype).eps * exact.abs().max().item() + 1e-5:
        raise SystemExit(f"bench: {case.operator} differs from the definition by {difference:.2e} ({case}); no speed is reported")
    return difference


def gemm_limit(repeats: int = 30) -> float:
    """The machine's best batched matrix product, in GFLOP/s: what a kernel made of such products can hope for."""
    best = 0.0
    for batch, n, m, p in ((8, 1024, 64, 128), (8, 64, 1024, 128), (8, 512, 256, 256), (2, 1024, 1024, 1024)):
        a, b = torch.randn(batch, n, m), torch.randn(batch, m, p)
        out = torch.empty(batch, n, p)
        torch.bmm(a, b, out=out)
        for _ in range(repeats):
            start = time.perf_counter()
            torch.bmm(a, b, out=out)
            best = max(best, 2 * batch * n * m * p / (time.perf_counter() - start) / 1e9)
    return best


def measure(cases: list[Case], *, seconds: float, progress: Callable[[str], None]) -> list[dict]:
    """Warm every case up, then time them in turn, round after round, until the time is spent; at least five rounds each.

    Interleaving means that a busy moment of the machine falls on all of them.
    """
    works = {}
    for case in cases:
        progress(f"warming up {case.operator}, {case.work}, length {case.length}")
        run = prepare(case)
        run()
        start = time.perf_counter()
        run()
        works[case] = (run, max(1, int(0.002 / max(time.perf_counter() - start, 1e-7))))  # calls a sample: at least 2 ms
    samples: dict[Case, list[float]] = {case: [] for case in cases}
    limits, begun, rounds = [], time.perf_counter(), 0
    while rounds < 5 or time.perf_counter() - begun < seconds:
        progress(f"round {rounds + 1}")
        limits.append(gemm_limit(5))
        for case, (run, calls) in works.items():
            if rounds >= 5 and statistics.median(samples[case]) * calls > seconds / 20:
                continue  # slow cases are steady; the rounds left are for the quick ones
            start = time.perf_counter()
            for _ in range(calls):
                run()
            samples[case].append((time.perf_counter() - start) / calls)
        rounds += 1
    limit = max(limits)
    rows = []
    for case in cases:
        times = sorted(samples[case])
        median = statistics.median(times)
        row = {**asdict(case), "ms": median * 1e3, "low_ms": times[0] * 1e3, "high_ms": times[-1] * 1e3, "rounds": len(times)}
        row["gflops"], row["limit_gflops"] = case.flops / median / 1e9, limit
        rows.append(row)
    return rows


def peak_memory(case: Case) -> float:
    """MiB that the case's work adds to a fresh process's peak, beyond its inputs."""
    code = f"from cosformer import bench; bench._print_peak_memory(bench.Case(**{asdict(case)!r}), {torch.get_num_threads()})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return float(run.stdout) if run.returncode == 0 else math.nan


def _print_peak_memory(case: Case, threads: int) -> None:
    import resource

    unit = 2**20 if sys.platform == "darwin" else 2**10
    torch.set_num_threads(threads)
    run, small = prepare(case), prepare(Case(**{**asdict(case), "length": 16}))
    small()  # code, thread pools and libraries are not the operator's memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit)


def machine() -> dict:
    """What the numbers depend on: processor, threads, versions, commit."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    return {
        "cpu": cpu,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cosformer": __version__,
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
    }


def cases(args: argparse.Namespace) -> list[Case]:
    """The cases asked for, less those that could not finish: an operator whose cost is quadratic or stored grows out of reach."""
    chosen = []
    for name in args.operators or operators():
        for work in args.work:
            for causal in {"no": [False], "yes": [True], "both": [False, True]}[args.causal]:
                for size, dtype in ((s, d) for s in args.sizes for d in args.dtypes):
                    common = {"heads": args.heads, "size": size, "dtype": dtype}
                    if work == "step":
                        if causal and name != "published":
                            chosen += [Case(name, at, True, "step", **common) for at in STEP_POSITIONS]
                        continue
                    for length in args.lengths:
                        stored = 3 * args.heads * length * 2 * size * size * 4
                        if name == "published" and causal and stored > 6e9:
                            continue
                        if name == "softmax" and length > args.longest_softmax:
                            continue
                        chosen.append(Case(name, length, causal, work, **common))
    return chosen


def table(rows: list[dict]) -> str:
    """The rows as text: one line a length, one column an operator, each with its ratio to softmax or its share of the limit."""
    lines = []
    kinds = sorted({(r["work"], r["causal"], r["size"], r["dtype"], r["decay"]) for r in rows}, key=str)
    for kind in kinds:
        mine = [r for r in rows if (r["work"], r["causal"], r["size"], r["dtype"], r["decay"]) == kind]
        work, causal, size, dtype, decay = kind
        names = list(dict.fromkeys(r["operator"] for r in mine))
        lines.append("")
        what = {"forward": "forward", "training": "forward + backward", "step": "one decode step"}[work]
        lines.append(
            f"{what}, {'causal' if causal else 'bidirectional'}{', with decay' if decay else ''}, head size {size}, {dtype}"
        )
        lines.append(f"{'position' if work == 'step' else 'length':>8}" + "".join(f"{n:>36}" for n in names))
        for length in sorted({r["length"] for r in mine}):
            at = {r["operator"]: r for r in mine if r["length"] == length}
            lines.append(f"{length:>8}" + "".join(f"{_cell(at.get(n), at.get('softmax')):>36}" for n in names))
    return "\n".join(lines)


def _cell(row: dict | None, softmax: dict | None) -> str:
    if row is None:
        return "-"
    notes = []
    if softmax is not None and row is not softmax:
        notes.append(f"{softmax['ms'] / row['ms']:.1f}x")
    if row["operator"].startswith("cosformer") and row["work"] != "step":
        notes.append(f"{row['gflops'] / row['limit_gflops']:.0%} of limit")
    if row.get("memory_mib") is not None:
        notes.append(f"{row['memory_mib']:.0f} MiB")
    return f"{row['ms']:.3g} ms" + (f" ({', '.join(notes)})" if notes else "")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="cosformer bench", description=__doc__.split("\n")[0])
    p.add_argument("--quick", action="store_true", help="a small set that finishes within a minute")
    p.add_argument("--operators", nargs="+", help=f"which to measure (default: all): {', '.join(operators())}")
    p.add_argument("--lengths", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096, 16384])
    p.add_argument("--sizes", nargs="+", type=int, default=[64], help="head sizes")
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16", "float64"])
    p.add_argument("--causal", choices=["yes", "no", "both"], default="both")
    p.add_argument("--work", nargs="+", choices=PASSES, default=list(PASSES))
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--seconds", type=float, default=60.0, help="time for the rounds, after warming up")
    p.add_argument("--longest-softmax", type=int, default=16384, help="beyond this length softmax is left out")
    p.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, default=True, help="also measure peak memory, a process a case"
    )
    p.add_argument("--out", type=Path, help="append the results to this file as JSON lines")
    p.add_argument("--plot", type=Path, help="draw time and memory against length to this PNG (needs the [report] extra)")
    return p


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.quick:
        args.lengths, args.seconds, args.work, args.longest_softmax = [512, 2048, 8192], 10.0, ["training", "step"], 8192
        args.operators = args.operators or [n for n in operators() if n != "published"]
    for name in args.operators or ():
        if name not in operators():
            raise SystemExit(f"bench: operator {name!r} is unknown; one of {', '.join(operators())}")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    here = machine()
    print(f"{here['cpu']}, {here['threads']} threads, {here['isa']}; torch {here['torch']}, cosformer {here['cosformer']}")
    show = _progress if sys.stderr.isatty() else (lambda text: None)
    todo = cases(args)
    kinds = {(c.operator, c.causal, c.size, c.dtype): c for c in todo if c.operator != "softmax" and c.work != "step"}
    errors = {kind: check(case) for kind, case in kinds.items()}
    for (name, causal, size, dtype), difference in errors.items():
        mode = "causal" if causal else "bidirectional"
        print(f"largest difference from the definition, {name}, {mode}, {size}, {dtype}: {difference:.1e}")
    rows = measure(todo, seconds=args.seconds, progress=show)
    for row, case in zip(rows, todo, strict=True):
        row |= {"bench": "operators", "error": errors.get((case.operator, case.causal, case.size, case.dtype)), **here}
        if args.memory and case.work == "training":
            show(f"memory of {case.operator}, length {case.length}")
            row["memory_mib"] = peak_memory(case)
    show("")
    print(f"the machine's batched matrix product: {rows[0]['limit_gflops']:.0f} GFLOP/s" if rows else "nothing to measure")
    print(table(rows))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    if args.plot:
        from .report import cost_plot

        cost_plot(rows, args.plot)


def _progress(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
