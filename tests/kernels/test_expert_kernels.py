"""The kernels of experts, interpreted on processes and on virtual ranks, against float64."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from expert_tables import Routed
from needs import needs_interpreter
from sim_cases import (
    CUT,
    combined,
    dispatched,
    dispatched_in_fp8,
    few_combined,
    few_dispatched,
    few_dispatched_in_fp8,
)
from test_experts import travelled
from torch.nn import functional

from weft import sim
from weft.collectives import workspace
from weft.kernels.engine.chips import INTERPRETER, known
from weft.kernels.expert_kernels import (
    combine_launch,
    contract_grouped_kernel,
    dispatch_launch,
    few_tokens_launch,
)

pytestmark = needs_interpreter
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def within(
    actual: torch.Tensor, exact: torch.Tensor, K: int, case: str, wire: torch.dtype | None = None
) -> None:
    """One rounding, and sums of K terms in fp32, or `wire`, none of which is much larger than 1."""
    eps = torch.finfo(wire or actual.dtype).eps + torch.finfo(actual.dtype).eps
    torch.testing.assert_close(
        actual.double(),
        exact,
        rtol=eps,
        atol=eps + 2e-6 * max(K, 1) ** 0.5,
        msg=lambda text: f"{case}: {text}",
    )


KINDS = ("random", "padding", "all to one", "none", "few")


def routed(kind: str, tokens: list[int], k: int, E: int, tp: int, seed: int) -> Routed:
    """Ids of each kind that a router may come to; duplicates among a token's, too."""
    rng = random.Random(seed)

    def id() -> int:
        if kind == "none" or (kind == "padding" and rng.random() < 0.4):
            return -1
        return E - 1 if kind == "all to one" else rng.randrange(2 if kind == "few" else E)

    drawn = [torch.tensor([id() for _ in range(t * k)]).reshape(t, k) for t in tokens]
    return Routed([ids.to(torch.int32) for ids in drawn], E, tp)


def cases(count: int, W: int):
    """Number, Routed, widths, dtype; ranks without tokens, without experts, and one token among
    them.
    """
    for index in range(count):
        rng = random.Random(100 * W + index)
        tokens = [rng.choice([0, 1, 2, 5, 9, rng.randrange(40)]) for _ in range(W)]
        tp = 2 if W % 2 == 0 and index % 3 == 2 else 1
        E = rng.choice([1, W, 3 * W + 1])
        told = routed(KINDS[index % len(KINDS)], tokens, 1 + index % 3, E, tp, index)
        sizes = [rng.choice([1, 8, 17, 32, 33, 40, 70]) for _ in range(2)]
        yield index, told, sizes, DTYPES[index % 3]


def laid_out(w: torch.Tensor, index: int) -> torch.Tensor:
    """The same numbers, laid out by turns as (E, K, N), as (E, N, K), with gaps, or negated."""
    if index % 4 == 1:
        return w.transpose(1, 2).contiguous().transpose(1, 2)
    if index % 4 == 2:
        return torch.stack([w, w], 3).flatten(2)[:, :, ::2]
    return torch._neg_view(-w) if index % 4 == 3 else w


def late(index: int, rank: int, W: int) -> None:
    if index % 4 == 3 and rank == index % W:
        time.sleep(0.02)


def dispatching(count: int) -> None:
    ws = workspace(None, 1 << 15, channel="dispatching")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    for index, told, (K, N), dtype in cases(count, W):
        case = (
            f"case {index}: {told.tokens}, {told.ids[rank].shape}, {told.E=}, {K=}, {N=}, {dtype}"
        )
        xs = [normal(t, 2 * K, dtype=dtype, seed=r)[:, ::2] for r, t in enumerate(told.tokens)]
        xs = xs if index % 2 else [x.contiguous() for x in xs]
        numbers = [normal(t, told.k, seed=50 + r) for r, t in enumerate(told.tokens)]
        experts, activation = told.own(rank), (None, "swiglu", "gelu", None)[index % 4]
        widths = {0: [N], 1: [N, N], 2: [N], 3: [N, 33]}[index % 4]
        whole = [
            normal(told.E, K, n, dtype=dtype, seed=90 + i) / K**0.5 for i, n in enumerate(widths)
        ]
        weights = [laid_out(w[experts.start : experts.stop], index // 2) for w in whole]
        table, spare = told.table(rank, 3 * (index % 2)), 3 * (index % 2)
        config = dispatch_launch.dispatch_config(
            16, N, dtype, W, INTERPRETER, pair=activation == "swiglu"
        )
        if index % 5 == 4:
            config = replace(config, copy_programs=0)
        elif index % 2:
            config = replace(config, copy_programs=2, programs=4, chunk_rows=8, copy_m=4)
        config = replace(config, descriptors=index // 2 % 2 == 1)
        late(index, rank, W)
        quantize = index % 3 == 0 and config.copy_programs > 0
        made = dispatch_launch.launch_dispatch(
            xs[rank],
            weights,
            ws,
            table,
            told.tokens,
            numbers=numbers[rank] if index % 3 else None,
            activation=activation,
            keep_sums=index % 4 == 2,
            quantize=quantize,
            config=config,
        )
        ws.check("dispatching")
        xs = [travelled(x) for x in xs] if quantize else xs
        real = len(table.ranks) - spare
        pairs = [*zip(table.ranks[:real].tolist(), table.slots[:real].tolist(), strict=True)]
        rows = (
            torch.stack([xs[r][s // told.k] for r, s in pairs]) if pairs else xs[0].new_zeros(0, K)
        )
        of = [
            e
            for e, end in enumerate(table.ends.tolist())
            for _ in range(end - ([0, *table.ends.tolist()][e]))
        ]
        sums = [
            (rows.double().unsqueeze(1) @ w.double()[of]).squeeze(1)
            if pairs
            else rows.new_zeros(0, w.shape[2]).double()
            for w in weights
        ]
        if config.copy_programs:
            assert torch.equal(made.rows[:real], rows), case
            if index % 3:
                want = torch.tensor([numbers[r].reshape(-1)[s] for r, s in pairs])
                assert torch.equal(made.numbers[:real], want.reshape(-1)), case
        wanted = sums
        if activation == "swiglu":
            wanted = [functional.silu(sums[0]) * sums[1]]
        elif activation:
            wanted = [functional.gelu(sums[0])]
        for y, want in zip(made.ys, wanted, strict=True):
            within(y[:real], want, K, case)
        for z, want in zip(made.sums, sums, strict=False):
            within(z[:real], want, K, case)


def poisoned(ws) -> None:
    """NaN in all of this rank's memory, while nobody writes there."""
    dist.barrier()
    for parity in (0, 1):
        ws.tensor(ws.rank, parity, (ws.half_bytes,), torch.uint8).fill_(255)
    dist.barrier()


def few(count: int) -> None:
    """Dispatch of few tokens in one launch, with the tables that it makes."""
    ws = workspace(None, 1 << 16, channel="few")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    for index, told, (K, N), dtype in cases(count, W):
        case = f"case {index}: {told}, {K=}, {N=}, {dtype}"
        xs = [normal(t, 2 * K, dtype=dtype, seed=r)[:, ::2] for r, t in enumerate(told.tokens)]
        experts, activation = told.own(rank), (None, "swiglu", "gelu")[index % 3]
        widths = [N] * (1 + (activation == "swiglu"))
        whole = [
            normal(told.E, K, n, dtype=dtype, seed=90 + i) / K**0.5 for i, n in enumerate(widths)
        ]
        weights = [laid_out(w[experts.start : experts.stop], index) for w in whole]
        config = few_tokens_launch.few_config(
            16, N, dtype, 2, told.k, W, INTERPRETER, pair=len(widths) > 1
        )
        roles = replace(config.roles, senders=1 + index % 3, clerks=1 + index % 2)
        config = replace(config, programs=6, roles=roles, descriptors=index // 2 % 2 == 1)
        quantize = index // 3 % 2 == 1
        late(index, rank, W)
        made = few_tokens_launch.launch_few_tokens(
            xs[rank],
            told.ids[rank],
            weights,
            ws,
            told.tokens,
            [len(told.own(r)) for r in range(W)],
            activation=activation,
            tensor_parallel_size=told.tp,
            quantize=quantize,
            config=config,
        )
        ws.check("few")
        xs = [travelled(x) for x in xs] if quantize else xs
        table = told.table(rank)
        real, counts = len(table.ranks), table.ends.diff(prepend=table.ends.new_zeros(1))
        for got, want in zip(made.table, table, strict=True):
            assert torch.equal(got[: len(want)], want), case
        of = torch.arange(len(experts)).repeat_interleave(counts)
        pairs = zip(table.ranks.tolist(), table.slots.tolist(), strict=True)
        rows = torch.stack([xs[r][s // told.k] for r, s in pairs] or [torch.zeros(K)]).double()
        sums = [
            (rows[:real].unsqueeze(1) @ w[experts.start :][of].double()).squeeze(1) for w in whole
        ]
        want = sums[0]
        if activation:
            want = functional.silu(want) * sums[1] if sums[1:] else functional.gelu(want)
        within(made.ys[0][:real], want, K, case)
        ids = torch.cat([each.reshape(-1) for each in told.ids])
        load = ids[ids >= 0].bincount(minlength=told.E)[: told.E]
        assert torch.equal(made.load, load), case
        sources = table.ranks.long() * len(experts) + of
        assert torch.equal(
            made.counts.long().reshape(-1), sources.bincount(minlength=made.counts.numel())
        ), case


def combining(count: int) -> None:
    ws = workspace(None, 1 << 17, channel="combining")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    for index, told, (N, H), dtype in cases(count, W):
        case = f"case {index}: {told}, {N=}, {H=}, {dtype}"
        terms, weighted = index % 4 if index % 4 < 3 else 1, index % 5 > 0
        H = 1 if index % 7 == 6 else H
        if index % 6 == 5:  # what is in each slot
            told = Routed([ids.reshape(-1, 1) for ids in told.ids], told.E, told.tp)
        tables = [told.table(r) for r in range(W)]
        widths = [N, 32][:terms] or [H]
        hs = [
            [normal(len(table.rows), n, dtype=dtype, seed=10 * r + i) for i, n in enumerate(widths)]
            for r, table in enumerate(tables)
        ]
        ws_of = [
            [
                normal(len(told.own(r)), n, H, dtype=dtype, seed=70 + 10 * r + i) / n**0.5
                for i, n in enumerate(widths)
            ]
            for r in range(W)
        ]
        # Padding has weights that must not count.
        gates = [normal(t, told.k, seed=50 + r) for r, t in enumerate(told.tokens)]
        gate = gates[rank].masked_fill(told.ids[rank] < 0, float("nan"))
        config = combine_launch.combine_config(16, H, dtype, INTERPRETER)
        config = replace(
            config,
            programs=1 + index % 3,
            descriptors=index // 2 % 2 == 1,
            weighers=(0, 1, 1)[index % 3],
        )
        wire = torch.float32 if told.tp > 1 or index % 2 else None
        late(index, rank, W)
        given = [laid_out(w, index // 2) for w in ws_of[rank]] if terms else []
        y = combine_launch.launch_combine(
            [h.T.contiguous().T if index % 4 == 3 else h for h in hs[rank]],
            given,
            ws,
            tables[rank],
            told.tokens,
            told.ids[rank],
            told.E,
            topk_weights=gate if weighted else None,
            tensor_parallel_size=told.tp,
            wire_dtype=wire,
            out_dtype=torch.float32 if index % 2 else None,
            config=config,
        )
        ws.check("combining")
        want = torch.zeros(told.tokens[rank], H, dtype=torch.float64)
        for r, table in enumerate(tables):
            starts = [0, *table.ends.tolist()]
            for e, (first, end) in enumerate(pairwise(starts)):
                for p in range(first, end):
                    if table.ranks[p] == rank:
                        slot = int(table.slots[p])
                        o = hs[r][0][p].double()
                        if terms:
                            o = sum(
                                h[p].double() @ w[e].double()
                                for h, w in zip(hs[r], ws_of[r], strict=True)
                            )
                        factor = gates[rank].reshape(-1)[slot].double() if weighted else 1.0
                        want[slot // told.k] += factor * o.to(wire or dtype).double()
        within(y, want, 4 * told.k, case, wire or dtype)


@pytest.mark.parametrize(("tokens", "weighers"), [(64, 16), (65, 33), (256, 33), (257, 0)])
def test_of_few_tokens_fewer_programs_add_up(tokens: int, weighers: int) -> None:
    """On an H100, whose other programs read the experts' weights meanwhile."""
    chip = known("sm_90")
    made = combine_launch.combine_config(
        tokens, 4096, torch.bfloat16, chip, experts=16, tokens=tokens
    )
    assert (made.programs, made.weighers) == (132, weighers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contraction_against_float64(dtype):
    for index, (ends, K, N) in enumerate([([5, 5, 40, 41], 33, 17), ([0, 0], 8, 64), ([70], 1, 1)]):
        E, R = len(ends), ends[-1]
        a, b = normal(R + 2, K, dtype=dtype, seed=1), normal(R + 2, N, dtype=dtype, seed=2)
        a[R:], b[R:] = float("nan"), float("nan")  # beyond the last expert's rows
        like = laid_out(normal(E, K, N, dtype=dtype), index)
        out = torch.empty_like(like).fill_(float("nan")) if index else None
        given = [x.T.contiguous().T if index == 0 else x for x in (a, b)]
        made = contract_grouped_kernel.launch_contract_grouped(
            *given, torch.tensor(ends, dtype=torch.int32), out=out
        )
        assert out is None or made is out
        for e, (first, end) in enumerate(pairwise([0, *ends])):
            want = a[first:end].double().T @ b[first:end].double()
            within(made[e], want, 16 * R, f"case {index}, expert {e}")


BODIES = [dispatching, few, combining]


@pytest.mark.parametrize(
    "world_size", [1, 2, *(pytest.param(W, marks=pytest.mark.slow) for W in (3, 4))]
)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_against_float64(ranks, virtual_ranks, body, world_size):
    run = ranks if world_size > 2 else virtual_ranks
    run(world_size, body, {1: 5, 2: 12, 3: 4, 4: 4}[world_size])


@pytest.mark.slow_where(case=[dispatched_in_fp8, few_dispatched_in_fp8, *CUT.values()])
@pytest.mark.parametrize(
    "case",
    [
        dispatched,
        partial(dispatched, direct=True),
        dispatched_in_fp8,
        combined,
        few_dispatched,
        few_dispatched_in_fp8,
        few_combined,
        *CUT.values(),
    ],
    ids=["fetched", "direct", "fp8", "combined", "few", "few in fp8", "few back", *CUT],
)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_schedules_without_a_race(case, world_size):
    sim.run(world_size, case, schedules=200 if world_size == 2 else 2000, replay=True)


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_many_routings_against_float64(ranks, body, world_size):
    ranks(world_size, body, 60, timeout_s=900)
