"""The operators: cosFormer's backends beside softmax and the published algorithm, and their share of the machine's limit."""

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..ops import State, cosformer_attention, cosformer_stream
from ..ops.operator import BACKENDS, backend_problem
from .measure import gemm_works, in_turns, peak_memory, spread

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

    def __str__(self) -> str:
        return f"{self.operator}, {self.work}, {'causal' if self.causal else 'bidirectional'}, length {self.length}, {self.dtype}"

    @property
    def flops(self) -> float:
        """The arithmetic of linear attention itself: 8 N D^2 a head forward, 24 with backward; what chunks add is overhead."""
        return (
            self.heads
            * self.size**2
            * {"forward": 8 * self.length, "training": 24 * self.length, "step": 8}[self.work]
        )


def published(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The algorithm of the paper's published code, written from its formula: causal sums are stored for every position."""
    L = q.shape[2]
    angle = (math.pi / 2 / L * torch.arange(L)[:, None]).to(q.dtype)
    phi_q, phi_k = (torch.cat([x.relu() * angle.cos(), x.relu() * angle.sin()], -1) for x in (q, k))
    if causal:
        kv = torch.einsum("bhld,bhle->bhlde", phi_k, v).cumsum(2)  # (B, H, L, 2D, E)
        z = torch.einsum("bhld,bhld->bhl", phi_q, phi_k.cumsum(2))
        return torch.einsum("bhld,bhlde->bhle", phi_q, kv) / z.clamp_min(1e-6)[..., None]
    z = torch.einsum("bhld,bhd->bhl", phi_q, phi_k.sum(2))
    return phi_q @ (phi_k.mT @ v) / z.clamp_min(1e-6)[..., None]


def _attention(backend: str):
    return lambda q, k, v, causal, decay=None: cosformer_attention(
        q, k, v, causal=causal, decay=decay, backend=backend
    )


def operators() -> dict[str, Callable]:
    """Every operator that can run here, by name."""
    ours = {f"cosformer {b}": _attention(b) for b in BACKENDS if backend_problem(b) is None}
    softmax = {"softmax": lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal)}
    return {**ours, **softmax, "published": published}


def prepare(case: "Case | dict") -> Callable[[], object]:
    """A function of no arguments that does the case's work once."""
    case = case if isinstance(case, Case) else Case(**case)
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
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    state = State(torch.rand(1, case.heads, 2 * case.size, case.size + 1, dtype=sums), case.length)
    horizon = 2 * max(STEP_POSITIONS)

    return torch.no_grad()(lambda: cosformer_stream(q, k, v, state, horizon=horizon, backend=backend))


def check(case: Case) -> float:
    """The largest difference from the definition, of outputs and gradients, at a length that is quick to check.

    An error if it is too large to be rounding: no speed is reported for a wrong answer.
    """
    dtype = getattr(torch, case.dtype)
    L = min(case.length, 300)
    tensors = [torch.randn(1, 2, L, case.size).to(dtype) for _ in range(3)]
    tensors += [torch.rand(1, 2, L)] if case.decay else []
    dout = torch.randn(1, 2, L, case.size).to(dtype)
    call = operators()[case.operator]

    def definition(q, k, v, decay=None):
        return reference.attention(q, k, v, horizon=L, causal=case.causal, decay=decay)

    def results(function, tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    found = results(lambda q, k, v, *decay: call(q, k, v, case.causal, *decay), tensors)
    exact = results(definition, [x.double() for x in tensors])
    unit = torch.finfo(dtype).eps
    for ours, theirs in zip(found, exact):
        difference, size = (ours.double() - theirs).abs().max().item(), theirs.abs().max().item()
        if not difference < (40 * unit if unit > 1e-6 else 1e-4) * size:
            raise SystemExit(
                f"bench: {case.operator} differs from the definition by {difference:.1e} ({case}); no speed is reported"
            )
    return (found[0].double() - exact[0]).abs().max().item()


def cases(args: argparse.Namespace) -> list[Case]:
    """The cases asked for, less those out of reach: stored prefix sums beyond 2 GB, softmax beyond --longest-softmax."""
    lengths = args.lengths or [256, 512, 1024, 2048, 4096, 16384]
    known = operators()
    for name in args.operators or ():
        if name not in known:
            raise SystemExit(f"bench: operator {name!r} is unknown; one of {', '.join(map(repr, known))}")
    chosen = []
    names = args.operators or [n for n in known if not (args.quick and n == "published")]
    modes = [mode for mode in (False, True) if args.causal in ("both", "yes" if mode else "no")]
    for name, work, causal, size, dtype in itertools.product(
        names, args.work, modes, args.sizes, args.dtypes
    ):
        if name == "cosformer native" and (dtype == "float64" or size > 256):
            continue  # not for this backend
        common = {"heads": args.heads, "size": size, "dtype": dtype}
        if work == "step":
            positions = STEP_POSITIONS if causal and name != "published" else ()
            chosen += [Case(name, position, True, "step", **common) for position in positions]
            continue
        for length in lengths:
            too_large = name == "published" and causal and 3 * args.heads * length * 2 * size * size * 4 > 2e9
            if too_large or (name == "softmax" and length > args.longest_softmax):
                continue
            chosen.append(Case(name, length, causal, work, **common))
            if args.decay and name.startswith("cosformer"):
                chosen.append(Case(name, length, causal, work, **common, decay=True))
    return sorted(chosen, key=lambda case: case.length)  # those to be compared take their turns together


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
        lines.append(f"{'position' if work == 'step' else 'length':>8}" + "".join(f"{n:>42}" for n in names))
        for length in sorted({r["length"] for r in mine}):
            at = {r["operator"]: r for r in mine if r["length"] == length}
            lines.append(
                f"{length:>8}" + "".join(f"{_cell(at.get(n), at.get('softmax')):>42}" for n in names)
            )
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


def run(args: argparse.Namespace, progress: Callable[[str], None]) -> list[dict]:
    """Check every operator against the definition, then measure all cases in turns; one row a case."""
    todo = cases(args)
    if args.operators and not todo:
        raise SystemExit(
            "bench: nothing to measure: the published algorithm has no decode step, and causal at length needs memory"
        )
    kinds = {
        (c.operator, c.causal, c.size, c.dtype, c.decay): c
        for c in todo
        if c.operator != "softmax" and c.work != "step"
    }
    errors = {kind: check(case) for kind, case in kinds.items()}
    limits = gemm_works()
    works: dict = {case: prepare(case) for case in todo} | {name: work for name, (work, _) in limits.items()}
    samples = in_turns(works, seconds=args.seconds, progress=progress)
    limit = max(flops / (spread(samples[name])["ms"] * 1e6) for name, (_, flops) in limits.items())
    rows = []
    for case in todo:
        row = {"bench": "operators", **asdict(case), **spread(samples[case])}
        row |= {"gflops": case.flops / (row["ms"] * 1e6), "limit_gflops": limit}
        row["error"] = errors.get((case.operator, case.causal, case.size, case.dtype, case.decay))
        if (
            args.memory
            and case.work == "training"
            and case.causal == (args.causal != "no")
            and not case.decay
        ):
            progress(f"memory: {case}")
            row["memory_mib"] = peak_memory("cosformer.bench.operators", asdict(case))
        rows.append(row)
    return rows


def summary(rows: list[dict]) -> str:
    found: dict[str, float] = {}
    for row in rows:
        if row["error"] is not None and row["dtype"] == "float32":
            found[row["operator"]] = max(found.get(row["operator"], 0.0), row["error"])
    lines = [
        f"largest difference from the definition, {name}, float32: {error:.1e}"
        for name, error in found.items()
    ]
    return "\n".join(
        [*lines, f"the machine's batched matrix product: {rows[0]['limit_gflops']:.0f} GFLOP/s", table(rows)]
    )
