"""The operators: our backends beside softmax and the paper's code, and their share of the machine's limit."""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..ops import State, cosformer_attention, cosformer_stream
from ..ops.operator import BACKENDS, backend_problem, declared
from ..results import Cost
from .exactness import with_gradients
from .measure import Say, Work, device_memories, in_turns, peak_memories

NAMES = ("cosformer-paper", "cosformer", "softmax", "published", "fla")
OURS = ("cosformer-paper", "cosformer")  # with the cosine; without it, with a decay per head and position
DECAYED = ("cosformer", "fla")
LENGTHS = [128, 256, 512, 1024, 2048, 4096, 16384]
ALONE = 1  # token: a forward that is mostly the call around the kernel
DECODED_AFTER = (100, 100_000)  # tokens
LONGEST_SOFTMAX = 16_384  # beyond it a step takes minutes


@dataclass(frozen=True)
class Case:
    """One thing to measure; its fields are fields of `results.Cost`."""

    mixer: str
    backend: str | None
    work: str
    causal: bool
    length: int
    heads: int
    head_dim: int
    dtype: str

    def __str__(self) -> str:
        mode = "causal" if self.causal else "bidirectional"
        return f"{name_of(self)}, {self.work}, {mode}, length {self.length}, {self.dtype}"

    @property
    def flops(self) -> float:
        """The arithmetic of linear attention: 4 N F D per head forward, with F features (the cosine doubles
        them), and three times that with backward; chunking adds to it."""
        tokens = {"forward": self.length, "training": 3 * self.length, "decoding": 1}[self.work]
        features = self.head_dim if self.mixer in DECAYED else 2 * self.head_dim
        return 4 * self.heads * features * self.head_dim * tokens


def name_of(case: Case | Cost) -> str:
    return f"{case.mixer} {case.backend}" if case.backend else case.mixer


def published(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The paper's code, rewritten from its formula: causal sums are stored for every position."""
    L = q.shape[2]
    angle = (math.pi / 2 / L * torch.arange(L)[:, None]).to(q.dtype)
    phi_q, phi_k = (torch.cat([x.relu() * angle.cos(), x.relu() * angle.sin()], -1) for x in (q, k))
    if causal:
        kv = torch.einsum("bhld,bhle->bhlde", phi_k, v).cumsum(2)  # (B, H, L, 2D, E)
        z = torch.einsum("bhld,bhld->bhl", phi_q, phi_k.cumsum(2))
        return torch.einsum("bhld,bhlde->bhle", phi_q, kv) / z.clamp_min(1e-6)[..., None]
    z = torch.einsum("bhld,bhd->bhl", phi_q, phi_k.sum(2))
    return phi_q @ (phi_k.mT @ v) / z.clamp_min(1e-6)[..., None]


def flash_linear_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """The peer on GPUs: the same sums with a decay for each position, without cosine and normaliser."""
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, -decay))
    return chunk_simple_gla(q, k, v, g=g)[0].transpose(1, 2)


def function_of(case: Case) -> Callable[..., Tensor]:
    """The operator: q, k, v and, for `cosformer`, the decay."""
    if case.mixer == "softmax":
        return partial(F.scaled_dot_product_attention, is_causal=case.causal)
    if case.mixer == "published":
        return partial(published, causal=case.causal)
    if case.mixer == "fla":
        return flash_linear_attention

    horizon = math.inf if case.mixer == "cosformer" else None

    def ours(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None) -> Tensor:
        options: dict[str, Any] = {"horizon": horizon, "causal": case.causal, "backend": case.backend}
        return cosformer_attention(q, k, v, decay=decay, **options)

    return ours


def tensors_of(case: Case, heads: int, length: int) -> list[Tensor]:
    """q, k, v, for `cosformer` and `fla` the decay, and the gradient of the output."""
    shape, dtype = (1, heads, length, case.head_dim), getattr(torch, case.dtype)
    q, k, v, dout = (torch.randn(shape).to(dtype) for _ in range(4))
    return [q, k, v, *([torch.rand(1, heads, length)] if case.mixer in DECAYED else []), dout]


def prepare(case: Case | dict) -> Work:
    """A function of no arguments that does the case's work once."""
    case = case if isinstance(case, Case) else Case(**case)
    return finished(_prepare_decoding(case) if case.work == "decoding" else _prepare(case))


def finished(work: Work) -> Work:
    """The work, finished when it returns: waits for a GPU."""
    if torch.get_default_device().type == "cpu":
        return work

    def waited() -> None:
        work()
        torch.accelerator.synchronize()

    return waited


def _prepare(case: Case) -> Work:
    call, (*given, dout) = function_of(case), tensors_of(case, case.heads, case.length)
    if case.work == "forward":
        return torch.no_grad()(lambda: call(*given))
    leaves = [x.requires_grad_() for x in given]
    return lambda: torch.autograd.grad(call(*leaves), leaves, dout)


def _prepare_decoding(case: Case) -> Work:
    q, k, v, *rates, _ = tensors_of(case, case.heads, 1)
    if case.mixer == "softmax":  # one query against the whole cache
        keys, values, *_ = tensors_of(case, case.heads, case.length)
        return torch.no_grad()(lambda: F.scaled_dot_product_attention(q, keys, values))
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    features = case.head_dim if case.mixer == "cosformer" else 2 * case.head_dim
    state = State(torch.rand(1, case.heads, features, case.head_dim + 1, dtype=sums), case.length)
    horizon = math.inf if case.mixer == "cosformer" else 2 * max(DECODED_AFTER)
    options: dict[str, Any] = {"horizon": horizon, "decay": next(iter(rates), None), "backend": case.backend}
    return torch.no_grad()(lambda: cosformer_stream(q, k, v, state, **options))


def check(case: Case) -> float:
    """The largest difference from the definition at a length that is quick to check.

    An error if outputs or gradients differ by more than rounding: no speed is reported for a wrong answer.
    """
    L = min(case.length, 300)
    tensors, horizon = tensors_of(case, 2, L), math.inf if case.mixer == "cosformer" else L

    def definition(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None) -> Tensor:
        return reference.attention(q, k, v, horizon=horizon, causal=case.causal, decay=decay)

    found = with_gradients(function_of(case), *tensors)
    exact = with_gradients(definition, *(x.double() for x in tensors))
    unit = torch.finfo(getattr(torch, case.dtype)).eps
    allowed = 40 * unit if unit > 1e-6 else 1e-4
    differences = [(ours.double() - theirs).abs().max().item() for ours, theirs in zip(found, exact)]
    for difference, theirs in zip(differences, exact):
        if not difference < allowed * theirs.abs().max().item():
            wrong = f"{case.mixer} differs from the definition by {difference:.1e} ({case})"
            raise SystemExit(f"bench: {wrong}; no speed is reported")
    return differences[0]


def cases(args: argparse.Namespace) -> list[Case]:
    """The cases asked for, without those out of reach, such as softmax beyond LONGEST_SOFTMAX."""
    here = [backend for backend in BACKENDS if backend_problem(backend, args.device) is None]
    _known("operator", args.operators, NAMES)
    _known("backend", args.backends, here)
    if "fla" in (args.operators or ()) and (args.device == "cpu" or find_spec("fla") is None):
        needed = "--device cuda, and `pip install flash-linear-attention`"
        raise SystemExit(f"bench: operator 'fla' needs {needed}")
    usual = [n for n in NAMES if n not in DECAYED and not (args.quick and n == "published")]
    operators: list[tuple[str, str | None]] = []
    for name in args.operators or usual:
        operators += [(name, backend) for backend in (args.backends or here if name in OURS else [None])]
    modes = [mode for mode in (False, True) if args.causal in ("both", "yes" if mode else "no")]
    chosen = []
    every = itertools.product(operators, args.work, modes, args.head_dims, args.dtypes)
    for (name, backend), work, causal, head_dim, dtype in every:
        default = [ALONE, *LENGTHS] if work == "forward" else LENGTHS
        for length in DECODED_AFTER if work == "decoding" else args.lengths or default:
            case = Case(name, backend, work, causal, length, args.heads, head_dim, dtype)
            if _in_reach(case):
                chosen.append(case)
    if not chosen:
        only = "published and fla do not decode, nor does anything that is not causal; published needs memory"
        raise SystemExit(f"bench: nothing to measure: {only}")
    return sorted(chosen, key=lambda case: case.length)  # cases to be compared take turns close together


def _known(what: str, given: list[str] | None, known: tuple[str, ...] | list[str]) -> None:
    for name in given or ():
        if name not in known:
            raise SystemExit(f"bench: {what} {name!r} is unknown; one of {', '.join(map(repr, known))}")


def _in_reach(case: Case) -> bool:
    if case.work == "decoding":
        return case.causal and case.mixer in (*OURS, "softmax") and _runs(case)
    if case.mixer == "fla":
        return case.causal
    if case.mixer == "published":  # up to 2 GB of stored sums
        return not case.causal or 3 * case.heads * case.length * 2 * case.head_dim**2 * 4 <= 2e9
    return _runs(case) and (case.mixer != "softmax" or case.length <= LONGEST_SOFTMAX)


def _runs(case: Case) -> bool:
    """Whether the backend takes this dtype and size at all."""
    try:
        function_of(case)(*tensors_of(case, 1, 1)[:-1])
    except ValueError:
        return False
    return True


def gemm_works(dtype: str) -> dict[str, tuple[Work, float]]:
    """Matrix products with their flops: the fastest is what a kernel of such products can reach.

    On the CPU torch has two libraries for them: MKL, which multiplies batches, and oneDNN, which compiled
    models use. MKL leaves AVX-512 alone on processors that are not Intel's.
    """
    one_dnn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if torch.get_default_device().type != "cpu" or not torch.backends.mkldnn.is_available():
        one_dnn = None
    works: dict[str, tuple[Work, float]] = {}
    for batch, n, m, p in ((8, 1024, 64, 128), (8, 64, 1024, 128), (8, 512, 256, 256), (2, 1024, 1024, 1024)):
        shapes = (batch, n, m), (batch, m, p), (batch, n, p)
        a, b, out = (torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes)
        shape, flops = f"{batch}x{n}x{m}x{p}, {dtype}", 2.0 * batch * n * m * p
        works[f"gemm {shape}"] = finished(partial(torch.bmm, a, b, out=out)), flops
        if one_dnn is not None:
            rows, weight = a.flatten(0, 1), b[0].mT.contiguous()
            works[f"linear {shape}"] = partial(one_dnn, rows, weight, None, "none", [], ""), flops
    return works


def narrow(dtype: str) -> bool:
    """Whether the native kernel multiplies this dtype as it is."""
    return dtype == "bfloat16" and declared("native").info().get("instruction set") == "avx512bf16"


def run(args: argparse.Namespace, say: Say) -> Iterator[Cost]:
    """Check every operator against the definition, then measure all cases in turns; one row per case."""
    todo = cases(args)

    def kind(case: Case) -> tuple:
        return case.mixer, case.backend, case.causal, case.head_dim, case.dtype

    judged = {kind(c): c for c in todo if c.mixer not in ("softmax", "fla") and c.work != "decoding"}
    errors = {key: check(case) for key, case in judged.items()}
    # A GPU multiplies half precision many times faster; a CPU may support it only in name.
    compared = {dtype: dtype if args.device != "cpu" or narrow(dtype) else "float32" for dtype in args.dtypes}
    products = {dtype: gemm_works(dtype) for dtype in set(compared.values())}
    works: dict = {case: prepare(case) for case in todo}
    for some in products.values():
        works |= {name: work for name, (work, _) in some.items()}
    timed = in_turns(works, seconds=args.seconds, say=say)

    def limit(dtype: str) -> float:
        some = products[compared[dtype]].items()
        return max(flops / (timed[name]["ms"] * 1e6) for name, (_, flops) in some)

    weighed = [c for c in todo if args.memory and c.work == "training" and c.causal == (args.causal != "no")]
    say(f"memory of {len(weighed)} cases")
    memories = peak_memories if args.device == "cpu" else device_memories
    memory = dict(zip(weighed, memories(__name__, [asdict(case) for case in weighed])))
    for case in todo:
        gflops, fields = case.flops / timed[case]["ms"] / 1e6, asdict(case) | timed[case]
        row = partial(Cost, what="operator", limit_gflops=limit(case.dtype), gflops=gflops, **fields)
        yield row(error=errors.get(kind(case)), memory_mib=memory.get(case))


def notes(rows: list[Cost]) -> list[str]:
    """The largest differences from the definition."""
    found: dict[str, float] = {}
    for row in rows:
        if row.error is not None and row.dtype == "float32":
            found[name_of(row)] = max(found.get(name_of(row), 0.0), row.error)
    return [f"largest difference from the definition, {n}, float32: {e:.1e}" for n, e in found.items()]
