"""The table of mismatches: every op that communicates, and every way in which its calls may differ.

Rank 0 makes one call and the others another, on ranks that have met before. Each case is an error
on every rank that names the ranks and both calls, within seconds, and right calls can follow.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from weft import collectives as c
from weft.collectives.ranks.group import new_group
from weft.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh

SOON_S = 20  # on a busy machine; the bound on waits is set far beyond it
Call = Callable[[], Any]


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def tokens(n: int = 3, heads: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.ones(1, heads, n, 4, dtype=dtype) for _ in range(3)]


def ways() -> dict[str, dict[str, tuple[Call, Call]]]:
    """By op, by way to differ: what rank 0 calls, and what the others call."""
    W, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (W,))
    d = distribute_tensor(torch.arange(36.0).view(6, 6), mesh, [Shard(0)])
    even = [2] * W
    double, half = torch.float64, torch.float16
    gather = weft.all_gather_matmul
    scatter, reduce = weft.matmul_reduce_scatter, weft.matmul_all_reduce
    norm, whole = weft.reduce_scatter_rms_norm_all_gather, weft.all_reduce_residual_rms_norm
    ring, heads = weft.ring_attention, weft.ulysses_attention
    loss = weft.vocab_parallel_cross_entropy

    def entropy(
        smoothing: float = 0.0, ignored: int = -100, columns: int = 3, rows: int = 2
    ) -> Any:
        labels = torch.zeros(rows, dtype=torch.int64)
        return loss(x(rows, columns), labels, label_smoothing=smoothing, ignore_index=ignored)

    return {
        "all_gather": {
            "dtype": (lambda: c.all_gather(x(2)), lambda: c.all_gather(x(2, dtype=double))),
            "shape": (lambda: c.all_gather(x(2, 2)), lambda: c.all_gather(x(2, 3))),
            "dim": (lambda: c.all_gather(x(2, 2)), lambda: c.all_gather(x(2, 2), dim=1)),
            "sizes given": (
                lambda: c.all_gather(x(2), sizes=even),
                lambda: c.all_gather(x(2)),
            ),
            "sizes": (
                lambda: c.all_gather(x(2), sizes=even),
                lambda: c.all_gather(x(2), sizes=[2 + (r != rank) for r in range(W)]),
            ),
            "number of dims": (lambda: c.all_gather(x(4)), lambda: c.all_gather(x(4, 1))),
            "gradient": (
                lambda: c.all_gather(x(2).requires_grad_()).sum().backward(),
                lambda: c.all_gather(x(2)).sum() + c.barrier(),
            ),
        },
        "reduce_scatter": {
            "dtype": (
                lambda: c.reduce_scatter(x(6)),
                lambda: c.reduce_scatter(x(6, dtype=torch.int32)),
            ),
            "shape": (lambda: c.reduce_scatter(x(6)), lambda: c.reduce_scatter(x(12))),
            "dim": (lambda: c.reduce_scatter(x(6, 6)), lambda: c.reduce_scatter(x(6, 6), dim=1)),
            "reduce_op": (
                lambda: c.reduce_scatter(x(6)),
                lambda: c.reduce_scatter(x(6), reduce_op="max"),
            ),
            "sizes": (
                lambda: c.reduce_scatter(x(6), sizes=[6] + [0] * (W - 1)),
                lambda: c.reduce_scatter(x(6)),
            ),
        },
        "all_reduce": {
            "dtype": (lambda: c.all_reduce(x(6)), lambda: c.all_reduce(x(3, dtype=double))),
            "integers": (
                lambda: c.all_reduce(x(6)),
                lambda: c.all_reduce(x(6, dtype=torch.int32)),
            ),
            "halves": (
                lambda: c.all_reduce(x(6, dtype=half)),
                lambda: c.all_reduce(x(6, dtype=torch.bfloat16)),
            ),
            "shape": (lambda: c.all_reduce(x(6)), lambda: c.all_reduce(x(7))),
            "equal bytes": (lambda: c.all_reduce(x(6)), lambda: c.all_reduce(x(2, 3))),
            "reduce_op": (
                lambda: c.all_reduce(x(6)),
                lambda: c.all_reduce(x(6), reduce_op="product"),
            ),
            "large or small": (lambda: c.all_reduce(x(1 << 20)), lambda: c.all_reduce(x(6))),
            "twice as many windows": (
                lambda: c.all_reduce(x(1 << 19)),
                lambda: c.all_reduce(x(1 << 20)),
            ),
        },
        "all_to_all": {
            "dtype": (lambda: c.all_to_all(x(6)), lambda: c.all_to_all(x(6, dtype=double))),
            "rows": (lambda: c.all_to_all(x(6)), lambda: c.all_to_all(x(12))),
            "columns": (lambda: c.all_to_all(x(6, 2)), lambda: c.all_to_all(x(6, 3))),
            "splits given": (
                lambda: c.all_to_all(x(2 * W), even, even),
                lambda: c.all_to_all(x(2 * W)),
            ),
        },
        "broadcast": {
            "root": (lambda: c.broadcast(x(6), 0), lambda: c.broadcast(x(6), 1)),
            "dtype": (lambda: c.broadcast(x(6)), lambda: c.broadcast(x(6, dtype=double))),
            "shape": (lambda: c.broadcast(x(6)), lambda: c.broadcast(x(6, 1))),
            "large or small": (lambda: c.broadcast(x(1 << 18)), lambda: c.broadcast(x(6))),
        },
        "all_gather_matmul": {
            "dtype": (
                lambda: gather(x(2, 4), x(4, 3), sizes=even),
                lambda: gather(x(2, 4, dtype=double), x(4, 3, dtype=double), sizes=even),
            ),
            "columns": (
                lambda: gather(x(2, 4), x(4, 3), sizes=even),
                lambda: gather(x(2, 8), x(8, 3), sizes=even),
            ),
            "dim": (
                lambda: gather(x(2, 2, 4), x(4, 3), sizes=even),
                lambda: gather(x(2, 2, 4), x(4, 3), sizes=even, gather_dim=1),
            ),
            "sizes": (
                lambda: gather(x(2, 4), x(4, 3), sizes=even),
                lambda: gather(x(1, 4), x(4, 3), sizes=[1] * W),
            ),
        },
        "matmul_reduce_scatter": {
            "dtype": (
                lambda: scatter(x(6, 4), x(4, 3)),
                lambda: scatter(x(6, 4, dtype=double), x(4, 3, dtype=double)),
            ),
            "rows": (lambda: scatter(x(6, 4), x(4, 3)), lambda: scatter(x(12, 4), x(4, 3))),
            "equal bytes": (lambda: scatter(x(6, 4), x(4, 2)), lambda: scatter(x(12, 4), x(4, 1))),
            "dim": (
                lambda: scatter(x(6, 6, 4), x(4, 3)),
                lambda: scatter(x(6, 6, 4), x(4, 3), scatter_dim=1),
            ),
            "reduce_op": (
                lambda: scatter(x(6, 4), x(4, 3)),
                lambda: scatter(x(6, 4), x(4, 3), reduce_op="avg"),
            ),
            "wire_dtype": (
                lambda: scatter(x(6, 4), x(4, 3)),
                lambda: scatter(x(6, 4), x(4, 3), wire_dtype=torch.bfloat16),
            ),
        },
        "matmul_all_reduce": {
            "dtype": (
                lambda: reduce(x(6, 4), x(4, 3)),
                lambda: reduce(x(6, 4, dtype=double), x(4, 3, dtype=double)),
            ),
            "rows": (lambda: reduce(x(6, 4), x(4, 3)), lambda: reduce(x(12, 4), x(4, 3))),
            "equal bytes": (lambda: reduce(x(6, 4), x(4, 2)), lambda: reduce(x(12, 4), x(4, 1))),
            "reduce_op": (
                lambda: reduce(x(6, 4), x(4, 3)),
                lambda: reduce(x(6, 4), x(4, 3), reduce_op="avg"),
            ),
            "wire_dtype": (
                lambda: reduce(x(6, 4), x(4, 3)),
                lambda: reduce(x(6, 4), x(4, 3), wire_dtype=torch.bfloat16),
            ),
        },
        "norm": {
            "dtype": (lambda: norm(x(6, 4)), lambda: norm(x(6, 4, dtype=double))),
            "shape": (lambda: norm(x(6, 4)), lambda: norm(x(12, 4))),
            "dim": (lambda: norm(x(6, 6, 4)), lambda: norm(x(6, 6, 4), dim=1)),
            "eps": (lambda: norm(x(6, 4)), lambda: norm(x(6, 4), eps=0.5)),
            "weight": (lambda: norm(x(6, 4)), lambda: norm(x(6, 4), x(4))),
        },
        "norm of whole rows": {
            "dtype": (
                lambda: whole(x(6, 4), None, None),
                lambda: whole(x(6, 4, dtype=double), None, None),
            ),
            "shape": (lambda: whole(x(6, 4), None, None), lambda: whole(x(12, 4), None, None)),
            "eps": (
                lambda: whole(x(6, 4), None, None),
                lambda: whole(x(6, 4), None, None, eps=0.5),
            ),
            "weight": (lambda: whole(x(6, 4), None, None), lambda: whole(x(6, 4), None, x(4))),
            "residual": (
                lambda: whole(x(6, 4), None, None),
                lambda: whole(x(6, 4), x(6, 4), None),
            ),
            "quantize": (
                lambda: whole(x(6, 4), None, None),
                lambda: whole(x(6, 4), None, None, quantize="fp8"),
            ),
        },
        "ring_attention": {
            "dtype": (lambda: ring(*tokens()), lambda: ring(*tokens(dtype=double))),
            "heads": (lambda: ring(*tokens()), lambda: ring(*tokens(heads=4))),
            "causal": (lambda: ring(*tokens()), lambda: ring(*tokens(), causal=True)),
            "scale": (lambda: ring(*tokens()), lambda: ring(*tokens(), scale=0.1)),
            "window": (lambda: ring(*tokens()), lambda: ring(*tokens(), window=1)),
            "layout": (
                lambda: ring(*tokens(4)),
                lambda: ring(*tokens(4), layout="zigzag"),
            ),
        },
        "ulysses_attention": {
            "dtype": (
                lambda: heads(*tokens(heads=6)),
                lambda: heads(*tokens(heads=6, dtype=double)),
            ),
            "causal": (
                lambda: heads(*tokens(heads=6)),
                lambda: heads(*tokens(heads=6), causal=True),
            ),
        },
        "cross entropy": {
            "rows": (lambda: entropy(), lambda: entropy(rows=3)),
            "smoothing": (lambda: entropy(), lambda: entropy(smoothing=0.1)),
            "ignored": (lambda: entropy(), lambda: entropy(ignored=-1)),
        },
        "redistribute": {
            "sum or max": (lambda: d.sum().full_tensor(), lambda: d.max().full_tensor()),
            "placements": (
                lambda: d.redistribute(mesh, [Replicate()]),
                lambda: d.redistribute(mesh, [Shard(1)]),
            ),
            "dtype": (lambda: d.full_tensor(), lambda: d.double().full_tensor()),
        },
        "engine": {
            "of a collective": (
                lambda: c.all_reduce(x(6)),
                on("generic", lambda: c.all_reduce(x(6))),
            ),
            "of a fused op": (
                on("host", lambda: scatter(x(6, 4), x(4, 3))),
                on("generic", lambda: scatter(x(6, 4), x(4, 3))),
            ),
            "generic, dtype": (
                on("generic", lambda: c.all_reduce(x(6))),
                on("generic", lambda: c.all_reduce(x(6, dtype=torch.int32))),
            ),
            "generic, op": (
                on("generic", lambda: c.all_reduce(x(6))),
                on("generic", lambda: c.broadcast(x(6))),
            ),
            "generic, root": (
                on("generic", lambda: c.broadcast(x(6), 0)),
                on("generic", lambda: c.broadcast(x(6), 1)),
            ),
        },
    }


def on(engine: Any, call: Call) -> Call:
    def run() -> Any:
        with weft.engine(engine):
            return call()

    return run


def right_calls() -> dict[str, Call]:
    """One right call of each op, to be made beside one of another op."""
    return {
        op: next(iter(by_way.values()))[0] for op, by_way in ways().items() if op != "engine"
    } | {"barrier": lambda: c.barrier()}


def in_step() -> None:
    W = dist.get_world_size()
    assert c.all_reduce(x(3)).tolist() == [W] * 3
    assert c.all_gather(x(2)).tolist() == [1] * 2 * W
    assert torch.equal(weft.matmul_reduce_scatter(x(W, 2), x(2, 1)), x(1, 1) * 2 * W)
    c.barrier()


def refused(case: str, first: Call, second: Call) -> str:
    """What is wrong with how a mismatch is told; empty if nothing."""
    rank, start, told = dist.get_rank(), time.monotonic(), ""
    try:
        (first if rank == 0 else second)()
    except weft.MismatchError as error:
        told = str(error)
    except weft.WeftError as error:
        return f"{case}: {error!r}"
    if not told:
        return f"{case}: no error"
    if (took_s := time.monotonic() - start) > SOON_S:
        return f"{case}: told after {took_s:.1f} s"
    if not re.search(r"rank 0 (called|asked).*rank [12]", told):
        return f"{case}: {told}"
    in_step()
    return ""


@pytest.mark.ranks(2, 3)
def test_every_way_to_differ() -> None:
    in_step()
    table = ways()
    for call in right_calls().values():  # so that most memory is there: see docs/reliability.md
        call()
    wrong = [
        refused(f"{op}, {way}", *pair)
        for op, by_way in table.items()
        for way, pair in by_way.items()
    ]
    assert not list(filter(None, wrong)), "\n".join(filter(None, wrong))
    assert len(wrong) == 73  # as docs/reliability.md tells


@pytest.mark.ranks(2, 3)
def test_each_op_beside_the_next_one() -> None:
    """A circle of all ops: the sweep has all pairs."""
    in_step()
    calls = right_calls()
    for call in calls.values():  # so that all memory is there: see docs/reliability.md
        call()
    names = list(calls)
    pairs = zip(names, [*names[1:], names[0]], strict=True)
    wrong = [refused(f"{a} or {b}", calls[a], calls[b]) for a, b in pairs]
    assert not list(filter(None, wrong)), "\n".join(filter(None, wrong))


@pytest.mark.sweep
@pytest.mark.ranks(2, 3, timeout_s=900)
def test_each_op_beside_every_other() -> None:
    in_step()
    calls = right_calls()
    for call in calls.values():  # so that all memory is there: see docs/reliability.md
        call()
    wrong = [
        refused(f"{a} or {b}", calls[a], calls[b]) for a, b in itertools.permutations(calls, 2)
    ]
    assert not list(filter(None, wrong)), "\n".join(filter(None, wrong))


@pytest.mark.ranks(3)
def test_three_calls_on_three_ranks() -> None:
    in_step()
    calls = [lambda: c.all_reduce(x(6)), lambda: c.all_gather(x(6)), lambda: c.barrier()]
    with pytest.raises(weft.MismatchError, match="the ranks make different calls"):
        calls[dist.get_rank()]()
    in_step()


@pytest.mark.ranks(2)
def test_a_group_or_another_of_the_same_ranks() -> None:
    other = new_group((0, 1))
    c.all_reduce(x(3), other)
    in_step()
    with pytest.raises(weft.MismatchError, match=r"rank 0 called all_r.*rank 1 called all_r"):
        c.all_reduce(x(3), None if dist.get_rank() == 0 else other)
    in_step()
    assert c.all_reduce(x(3), other).tolist() == [2.0] * 3


def soak(calls: int, longest_s: float) -> None:
    """Right calls on ranks that come late at random, longer than it takes to look for a circle."""
    W, rank = dist.get_world_size(), dist.get_rank()
    late, same = random.Random(rank), random.Random(7)
    groups = [None, new_group((0, 1)) if rank < 2 else None]
    for _ in range(calls):
        if late.random() < 0.02:
            time.sleep(late.uniform(0, longest_s))
        op, small, pair = same.randrange(5), same.random() < 0.9, same.random() < 0.3
        if pair and rank >= 2:
            continue
        group = groups[pair]
        many, ranks = 5 if small else 40000, 2 if pair else W
        if op == 0:
            assert c.all_reduce(x(many), group)[0] == ranks
        elif op == 1:
            assert c.all_gather(x(many + rank), group).shape[0] == many * ranks + sum(range(ranks))
        elif op == 2:
            assert weft.matmul_reduce_scatter(x(6, 4), x(4, 3), group)[0, 0] == 4 * ranks
        elif op == 3:
            assert weft.all_gather_matmul(x(2, 4), x(4, 3), group)[-1, 0] == 4
        else:
            c.barrier(group)


@pytest.mark.ranks(3)
def test_right_calls_of_late_ranks_are_never_refused() -> None:
    soak(400, 0.3)


@pytest.mark.sweep
@pytest.mark.ranks(3, timeout_s=600)
def test_right_calls_of_late_ranks_are_never_refused_at_length() -> None:
    soak(2000, 0.4)


def fresh_memory(trials: int, seed: int) -> None:
    """Calls that differ where memory is not there yet, on ranks that are late at random; then
    right calls, which have memory to make as well."""
    W, rank = dist.get_world_size(), dist.get_rank()
    same, late = random.Random(seed), random.Random(rank)
    for _ in range(trials):
        dist.barrier()
        weft.close()
        table, right = ways(), right_calls()
        op = same.choice(sorted(table))
        way = same.choice(sorted(set(table[op]) - {"sizes"}))  # where all differ from all
        outliers = same.sample(range(W), same.randrange(1, W))
        made, then = same.sample(sorted(right), 2)
        where = f"seed {seed}: {op}, {way}, {outliers}, {made} made before, {then} after"
        in_step() if same.random() < 0.5 else right[made]()
        time.sleep(late.choice((0.0, 0.0, 0.05, 0.15)) * late.random())
        with pytest.raises(weft.MismatchError):
            table[op][way][rank in outliers]()
        try:
            right[then]()
            in_step()
        except weft.WeftError as error:
            raise AssertionError(where) from error


@pytest.mark.ranks(3)
def test_right_calls_follow_where_memory_had_to_be_made() -> None:
    fresh_memory(15, seed=0)


@pytest.mark.sweep
@pytest.mark.ranks(2, 3, 4, timeout_s=900)
@pytest.mark.parametrize("seed", range(4))
def test_right_calls_follow_where_memory_had_to_be_made_at_length(seed: int) -> None:
    fresh_memory(250, seed)
