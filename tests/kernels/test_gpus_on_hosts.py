"""Groups of GPUs over several hosts, by CPU ranks that stand for them.

They choose as ranks with a GPU do, and do not look at what such a host does not know: kernels,
interpreted, inside a host, and the process group between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import test_host_moves
import torch
import torch.distributed as dist
from needs import needs_interpreter
from test_experts import CASES
from test_experts_hosts import engines_of
from test_hosts import on_hosts

import weft
from weft import collectives, sim
from weft.collectives.ranks.group import Group
from weft.dtensor import DTensor, Replicate, Shard, init_device_mesh
from weft.kernels.experts import across, launched, routing

pytestmark = needs_interpreter


@contextmanager
def gpus() -> Iterator[None]:
    """Ranks stand for GPUs inside the block."""
    with (
        patch.object(Group, "on_gpus", lambda group, device: True),
        # Routings have room for all rows that may come, not for those that do.
        patch.object(routing, "on_cpu", lambda x: False),
    ):
        yield


@contextmanager
def on_gpus_of(layout: str) -> Iterator[None]:
    """As `on_hosts`, where every rank stands for a GPU."""
    with on_hosts(layout), gpus():
        yield


def experts_body(layout: str, case: dict[str, Any]) -> None:
    case = case | {"tokens": case["tokens"][: len(layout)]}
    with (
        on_gpus_of(layout),
        patch.object(launched, "dispatched", wraps=launched.dispatched) as kernel,
    ):
        assert engines_of(case) == {"hosts"}
        assert kernel.called


def test_experts(ranks: Any) -> None:
    """Against a loop over tokens in float64, every gradient, and again bit for bit."""
    ranks(3, experts_body, "ABB", {"tokens": (1, 0, 2), "E": 3, "k": 1})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "all to one", "bfloat16", "fp8 of bfloat16"])
def test_more_experts(ranks: Any, name: str) -> None:
    ranks(3, experts_body, "ABA", CASES[name])


def rooms_body(layout: str) -> None:
    T, k, E, rank = 1100, 2, 6, dist.get_rank()
    rooms, counts = set(), set()
    with on_gpus_of(layout):
        for seed in range(10):
            draw = torch.Generator().manual_seed(2 * seed + rank)
            whole = weft.kernels.route(torch.randint(E, (T, k), generator=draw), E)
            levels = across.Levels(whole)
            near, far = levels.near, levels.far
            rooms.add((levels.held, near.count, far.count))
            counts.add((sum(levels.receives), int(near.ends[-1]), int(far.ends[-1])))
            assert (whole.rows_each, near.rows_each, far.rows_each) == (733, 366, 366)
    assert len(rooms) < 7 < len(counts), (rooms, counts)


def test_few_launches_are_kept_whatever_tokens_choose(ranks: Any) -> None:
    """They go by the sizes of rooms, and by the rows that an expert gets on average."""
    assert [across.roomy(n) for n in (0, 1, 15, 17, 100, 1025)] == [0, 1, 15, 18, 104, 1152]
    ranks(2, rooms_body, "AB")


def refused_body() -> None:
    """What no kernel takes is not run host by host: nothing else is inside."""
    with on_gpus_of("AAB"):
        x, ids, w = torch.ones(2, 4).double(), torch.zeros(2, 1).long(), torch.ones(1, 4, 2)
        told = weft.explain(weft.dispatch_grouped_matmul, x, ids, w.double())
        assert told[-1].engine == "generic", told


def test_what_kernels_do_not_take(ranks: Any) -> None:
    ranks(3, refused_body)


def collectives_body(layout: str) -> None:
    with on_gpus_of(layout):
        rank, W = dist.get_rank(), len(layout)
        rows = [3, 0, 5, 2][:W]
        whole = torch.arange(sum(rows) * 4.0).view(-1, 4)
        terms = [whole * (r + 1) for r in range(W)]
        total, mine = torch.stack(terms).sum(0), terms[rank]
        calls: list[tuple[Callable[[], torch.Tensor], torch.Tensor]] = [
            (lambda: collectives.all_gather(whole.split(rows)[rank], sizes=rows), whole),
            (lambda: collectives.reduce_scatter(mine, sizes=rows), total.split(rows)[rank]),
            (lambda: collectives.all_reduce(mine), total),
            (lambda: collectives.broadcast(mine, src=1), terms[1]),
        ]
        for call, exact in calls * 2:
            told = weft.explain(call)
            first, *inside = [each.engine for each in told]
            assert first == "hosts", told
            assert {*inside} == {"triton"} or layout.count(layout[rank]) == 1, told
            assert torch.equal(told.result, exact)


@pytest.mark.parametrize("layout", ["ABB", pytest.param("BABA", marks=pytest.mark.slow)])
def test_collectives(ranks: Any, layout: str) -> None:
    """Host by host, and by kernels inside each."""
    ranks(len(layout), collectives_body, layout)


def moves_body(*args: Any) -> list[tuple[str, int, int]]:
    with patch.object(test_host_moves, "on_hosts", on_gpus_of):
        return test_host_moves.walk_body(*args)


@pytest.mark.parametrize(
    "later", [pytest.param(False, marks=pytest.mark.slow), True], ids=["now", "later"]
)
def test_moves(ranks: Any, later: bool) -> None:
    """Of DTensors: at the least of bytes."""
    told = ranks(4, moves_body, "BAAB", [[3, 0], [1, 2]], (6, 9), 4, later)
    for moves in zip(*told, strict=True):
        assert sum(each for _, each, _ in moves) == moves[0][2], moves[0][0]


def virtual_body(rank: int) -> None:
    """A move, a sum, and tokens that go to experts of both hosts and come back."""
    x, R = torch.arange(6.0).view(3, 2), Replicate()
    told = weft.explain(collectives.all_reduce, x)
    assert told[0].engine == "hosts" and torch.equal(told.result, 3 * x)
    mesh = init_device_mesh("cpu", (3,))
    moved = DTensor.from_local(x[rank : rank + 1], mesh, [Shard(0)], run_check=False)
    assert torch.equal(moved.redistribute(placements=[R]).to_local(), x)
    ids, w = torch.tensor([[0, 2], [1, -1]]), torch.ones(1, 2, 4)
    x = (x[:2] + rank).requires_grad_()
    told = weft.explain(weft.dispatch_grouped_matmul, x, ids, w)
    assert "hosts" in {each.engine for each in told if "dispatch" in each.op}, told
    h, routing = told.result
    y = weft.grouped_matmul_combine(h, w.transpose(1, 2), None, routing)
    y.sum().backward()
    times = torch.tensor([[2.0], [1.0]])
    assert torch.equal(y, times * 4 * x.sum(1, keepdim=True).expand(-1, 2))
    assert torch.equal(x.grad, times.expand(-1, 2) * 8)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [[1, 2]])
def test_races(hosts: list[int]) -> None:
    with gpus():
        sim.run(3, virtual_body, hosts=hosts, schedules=2, timeout=300)
