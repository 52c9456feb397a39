"""One sequence over 2 and 4 processes does what one process does: outputs, gradients, traffic.

The processes are started once. Each runs every case below and compares its part with the whole, which it
computes itself; this file is also their program.
"""

import math
import random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import Cases
from judge import error, rates

from cosformer.ops import linear_attention, linear_stream, parallel
from cosformer.ops.convolution import short_convolution
from cosformer.ops.parallel import linear_sharded
from cosformer.ops.shard import Shard, gathered

CASES = Cases()
case = CASES.add
LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5}
# The output does not depend on a query's length: along the query its gradient is 0, but computed as a
# difference of numbers that grow as the query shrinks. A tiny query makes them dwarf all other gradients.
GRADIENT_LIMIT = {torch.float64: 1e-12, torch.float32: 1e-4}


def cut(x, lengths, rank, dim=2):
    """This rank's part of x."""
    return x.split(lengths, dim)[rank]


def close(actual, expected, what, limit=None, scale=None):
    found = error(actual, expected, scale)
    limit = LIMIT[actual.dtype] if limit is None else limit
    assert found <= limit, f"{what}: error {found:.2e} > {limit:.2e}"


def places_of(B, N, rng):
    """Documents of random lengths in each row."""
    rows = []
    for _ in range(B):
        row = []
        while len(row) < N:
            row += range(rng.randint(1, max(2, N // 2)))
        rows.append(row[:N])
    return torch.tensor(rows)


def bounds(places):
    begins = (places == 0).flatten().nonzero().flatten()
    return torch.cat([begins, torch.tensor([places.numel()])])


def end_to_end(x):
    return x.transpose(0, 1).flatten(1, 2)[None]


def one_process(q, k, v, decay, places, key_mask, **options):
    if places is None:
        return linear_attention(q, k, v, decay=decay, key_mask=key_mask, **options)
    B, N = places.shape
    lam = end_to_end(decay) if decay is not None and decay.ndim == 3 else decay
    out = linear_attention(*map(end_to_end, (q, k, v)), decay=lam, cu_seqlens=bounds(places), **options)
    return out[0].unflatten(1, (B, N)).transpose(0, 1)


def compare(group, seed, dtype, *, causal, decay, lengths=None, packed=False, masked=False, **more):
    rng, rank, W = random.Random(seed), dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(seed)
    lengths = lengths or [rng.choice([0, 1, 7, 33, 130, 150]) for _ in range(W)]
    N, B, H, D, E = max(1, sum(lengths)), rng.choice([1, 2]), 4, 6, 5
    lengths[-1] += N - sum(lengths)
    Hk = rng.choice([1, 2, 4])
    q, k, v = (torch.randn(B, h, N, d, dtype=dtype) for h, d in ((H, D), (Hk, D), (Hk, E)))
    lam = rates(decay, B, H, N)
    if lam is not None:  # the strongest only in float64: gradients cancel to nearly nothing
        lam = lam.to(dtype) / (1 if dtype == torch.float64 else 20)
    places = places_of(B, N, rng) if packed else None
    mask = torch.rand(B, N) > 0.3 if masked else None
    horizon = rng.choice([N + 7.0, math.inf, [N + 1.0, N + 2.0, math.inf, 2.0 * N]])
    options = {"causal": causal, "horizon": horizon, "relu": True, **more}
    dout = torch.randn(B, H, N, E, dtype=dtype)

    def alone(dtype, **more):
        leaves = [None if t is None else t.to(dtype, copy=True).requires_grad_() for t in (q, k, v, lam)]
        out = one_process(*leaves, places, mask, **options | more)
        return out.detach(), torch.autograd.grad(out, [t for t in leaves if t is not None], dout.to(dtype))

    out, wanted = alone(torch.float64, backend="torch")
    rounded = wanted if dtype == torch.float64 else alone(dtype)[1]

    def mine(t, dim=2):
        return t if t is None or t.ndim == 1 else cut(t, lengths, rank, dim)

    parts = [None if t is None else mine(t).clone().requires_grad_() for t in (q, k, v, lam)]
    x, at = torch.empty(B, lengths[rank]), mine(places, 1)
    shard = Shard.of(group, x, places=at)
    assert shard.lengths == tuple(lengths)
    found, after = linear_sharded(*parts[:3], shard, decay=parts[3], key_mask=mine(mask, 1), **options)
    close(found, mine(out), "out")
    got = torch.autograd.grad(found, [t for t in parts if t is not None], mine(dout))
    for name, g, w, r in zip(("dq", "dk", "dv", "ddecay"), got, wanted, rounded, strict=False):
        if w.ndim == 1:  # one rate per head: the ranks' shares of the gradient add up
            g = gathered(g, shard.group).sum(0)
        close(g, mine(w), name, max(GRADIENT_LIMIT[dtype], 2 * error(r, w)), w)
    if causal and not packed:
        _, state = linear_stream(q, k, v, decay=lam, key_mask=mask, horizon=horizon, relu=options["relu"])
        close(after.tensor, state.tensor, "after")
        assert (after.position, after.horizons) == (state.position, state.horizons)


@case(*(f"{mode}-{kind}-{dtype}" for mode in ("causal", "bidirectional")
        for kind in ("none", "head", "position") for dtype in ("float64", "float32")))  # fmt: skip
def modes(group, setting):
    mode, kind, dtype = setting.split("-")
    options = {"causal": mode == "causal", "decay": kind, "backend": {"float64": "torch"}.get(dtype)}
    W = dist.get_world_size(group)
    for seed, lengths in enumerate(([65] * W, [3, 140, 0, 71][:W], [0, 0, 40, 1][-W:])):
        compare(group, seed, getattr(torch, dtype), lengths=list(lengths), masked=seed > 0, **options)
        compare(group, seed, getattr(torch, dtype), lengths=list(lengths), packed=True, **options)


@case()
def fuzz(group, _):
    for seed in range(20):
        rng = random.Random(seed)
        dtype = rng.choice([torch.float64, torch.float32])
        packed = rng.random() < 0.3
        how = {"causal": rng.random() < 0.5, "decay": rng.choice(["none", "head", "position"])}
        try:
            compare(group, seed, dtype, packed=packed, masked=not packed and rng.random() < 0.5, **how)
        except AssertionError as wrong:
            raise AssertionError(f"seed {seed}, {dtype}, packed {packed}, {how}: {wrong}") from wrong


@case()
def masked_tokens_may_hold_anything(group, _):
    rank, W = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, 20 * W, 4) for _ in range(3))
    mask = torch.rand(1, 20 * W) > 0.4
    k[:, :, ~mask[0]] = math.nan
    lam = torch.rand(1, 2, 20 * W) / 5
    parts = [cut(t, 20, rank).clone().requires_grad_() for t in (q, k, v, lam)]
    shard = Shard.of(group, torch.empty(1, 20))
    for causal in (True, False):
        out, _ = linear_sharded(
            *parts[:3], shard, decay=parts[3], key_mask=cut(mask, 20, rank, 1), relu=True, causal=causal
        )
        for t in (out, *torch.autograd.grad(out.sum(), parts)):
            assert t.isfinite().all()


@case("bfloat16", "float16")
def half_precision(group, dtype):
    """Against float32 on the same numbers: no further off than one process is."""
    rank, W = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(5)
    dtype = getattr(torch, dtype)
    q, k, v = (torch.randn(1, 2, 50 * W, 8).to(dtype) for _ in range(3))
    lam = torch.rand(1, 2, 50 * W) / 3
    shard = Shard.of(group, torch.empty(1, 50))
    parts = [cut(t, 50, rank) for t in (q, k, v, lam)]
    for causal in (True, False):
        exact = linear_attention(q.float(), k.float(), v.float(), decay=lam, relu=True, causal=causal)
        out, _ = linear_sharded(*parts[:3], shard, decay=parts[3], relu=True, causal=causal)
        assert out.dtype == dtype
        close(out, cut(exact, 50, rank), "out", 2 * torch.finfo(dtype).eps)


@case()
def weights_of_both_signs(group, _):
    for seed in range(3):
        compare(
            group,
            seed,
            torch.float64,
            causal=True,
            decay="head",
            lengths=[30, 31, 32, 33][: dist.get_world_size(group)],
            relu=False,
            signed=True,
        )


class Counted:
    """Counts what this process sends through all-gathers."""

    def __enter__(self):
        self.plain, self.sizes = dist.all_gather_single, []
        dist.all_gather_single = self
        return self

    def __call__(self, out, x, **options):
        self.sizes.append(x.nbytes)
        return self.plain(out, x, **options)

    def __exit__(self, *_):
        dist.all_gather_single = self.plain


@case()
def traffic(group, _):
    """One message per direction, of a size that does not grow with the length: the documented formula."""
    W = dist.get_world_size(group)
    B, H, D, E = 2, 3, 4, 5
    for causal, decay, horizon in (
        (True, 0.1, 1e6),
        (True, None, math.inf),
        (False, None, 1e6),
        (False, 0.1, 1e6),
    ):
        F = 2 * D if horizon < math.inf else D
        states = 2 if decay is not None and not causal else 1
        formula = [4 * B * H * (states * F * (E + 1) + (decay is not None)), 4 * B * H * states * F * (E + 1)]
        for N in (1024, 65536):
            q, k, v = (torch.rand(B, H, N // W, d).requires_grad_() for d in (D, D, E))
            shard = Shard.of(group, torch.empty(B, N // W))
            with Counted() as sent:
                out, _ = linear_sharded(
                    q, k, v, shard, causal=causal, horizon=horizon, decay=decay, relu=True
                )
                assert sent.sizes == formula[:1], (sent.sizes, formula, N)
                out.sum().backward()
                assert sent.sizes == formula, (sent.sizes, formula, N)


class Order:
    """Records what happens: messages sent and waited for, and backend calls by what they relate."""

    def __init__(self):
        self.seen = []

    def __enter__(self):
        send, forward, backward = dist.all_gather_single, parallel.attend, parallel.attend_backward
        new = {"attend": lambda x, call: self.worked(forward, x, x, call)}
        new["attend_backward"] = lambda up, x, *rest: self.worked(backward, x, up, x, *rest)
        self.patches = [patch.object(dist, "all_gather_single", lambda *a, **o: self.sent(send(*a, **o)))]
        self.patches += [patch.object(parallel, name, function) for name, function in new.items()]
        for each in self.patches:
            each.start()
        return self

    def __exit__(self, *_):
        for each in self.patches:
            each.stop()

    def worked(self, function, x, *args):
        what = {(True, True): "own", (True, False): "read", (False, True): "keys"}
        self.seen.append(what[x.q.shape[2] > 0, x.k.shape[2] > 0])
        return function(*args)

    def sent(self, work):
        self.seen.append("sent")
        wait = work.wait
        return SimpleNamespace(wait=lambda: (self.seen.append("waited"), wait()))


@case()
def messages_travel_while_a_process_works(group, _):
    """Nothing waits for a message before all work that does not need it is done."""
    shard = Shard.of(group, torch.empty(1, 9))
    for causal, decay, ways in ((True, 0.1, 1), (True, None, 1), (False, 0.1, 2)):
        q, k, v = (torch.rand(1, 2, 9, 4).requires_grad_() for _ in range(3))
        with Order() as order:
            out, _ = linear_sharded(q, k, v, shard, causal=causal, decay=decay, relu=True)
            assert order.seen == [*["keys"] * ways, "sent", "own", "waited", *["read"] * ways], order.seen
            order.seen.clear()
            out.sum().backward()
            assert order.seen == [*["read"] * ways, "sent", "own", "waited", *["keys"] * ways], order.seen


@case("one", "packed")
def the_convolution_has_its_halo(group, setting):
    packed = setting == "packed"
    rank, W = dist.get_rank(group), dist.get_world_size(group)
    for width, ahead, lengths in (
        (4, 0, [9, 1, 0, 7]),
        (4, 1, [5, 2, 1, 9]),
        (5, 2, [0, 1, 1, 8]),
        (3, 0, [6] * 4),
    ):
        lengths = lengths[-W:]
        torch.manual_seed(width)
        x, w = (
            torch.randn(2, sum(lengths), 3, dtype=torch.float64),
            torch.randn(3, width, dtype=torch.float64),
        )
        dout = torch.randn_like(x)
        x.requires_grad_()
        places = places_of(2, sum(lengths), random.Random(width)) if packed else None
        if packed:
            whole = short_convolution(
                x.flatten(0, 1)[None], w, ahead=ahead, cu_seqlens=bounds(places)
            ).view_as(x)
        else:
            whole = short_convolution(x, w, ahead=ahead)
        (wanted,) = torch.autograd.grad(whole, x, dout)
        part = cut(x.detach(), lengths, rank, 1).clone().requires_grad_()
        shard = Shard.of(group, part, places=None if places is None else cut(places, lengths, rank, 1))
        with Counted() as sent:
            found = short_convolution(part, w, ahead=ahead, shard=shard)
        assert packed or sent.sizes == [8 * 2 * (width - 1) * 3]  # B (w - 1) C numbers of float64
        close(found, cut(whole.detach(), lengths, rank, 1), "out")
        (got,) = torch.autograd.grad(found, part, cut(dout, lengths, rank, 1))
        close(got, cut(wanted, lengths, rank, 1), "dx", scale=wanted)
        assert torch.equal(shard.last(part, 2), x.detach()[:, -2:])


@case()
def what_cannot_be_is_refused(group, _):
    q = torch.randn(1, 2, 5, 4)
    shard = Shard.of(group, torch.empty(1, 5))
    with pytest.raises(ValueError, match="the shard says that this rank holds 5 tokens"):
        linear_sharded(q[:, :, :4], q[:, :, :4], q[:, :, :4], shard)
    with pytest.raises(ValueError, match="positions can lie"):
        linear_sharded(q, q, q, shard, horizon=6)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return CASES.run(__file__, tmp_path_factory.mktemp("parallel"), world=4)


@pytest.mark.parametrize("name", CASES.names)
@pytest.mark.parametrize("size", [2, 4])
def test_processes_do_what_one_does(said, name, size):
    CASES.check(said, name, size=size, world=4)


if __name__ == "__main__":
    CASES.work()
