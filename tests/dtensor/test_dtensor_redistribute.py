"""Redistribution on real ranks: all pairs of layouts, by symmetric memory and by process group."""

from __future__ import annotations

import itertools
import math
import random
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from dtensors import as_if_on_two_hosts
from test_hosts import on_hosts
from torch.distributed.tensor.placement_types import _StridedShard

import weft
from weft.collectives import hosts
from weft.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    redistribute_plan,
)
from weft.dtensor.layout.boxes import layout_of
from weft.dtensor.layout.placements import REDUCE
from weft.dtensor.move.redistribute import move


def all_pairs(mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
    strided: Any = _StridedShard(0, split_factor=2)
    shards: list[Any] = [Replicate(), Shard(0), Shard(1), strided]
    whole = torch.randn(shape)
    for source in itertools.product([*shards, Partial()], repeat=mesh.ndim):
        x = distribute_tensor(whole, mesh, source)
        for target in itertools.product(shards, repeat=mesh.ndim):
            y = x.redistribute(placements=target)
            assert y.placements == target
            torch.testing.assert_close(y.full_tensor(), whole, msg=f"{source} -> {target}")
    for dtype in (torch.int16, torch.float8_e4m3fn):  # of which process groups know nothing
        exact = whole.to(dtype)
        x = distribute_tensor(exact, mesh, [Shard(0)] * mesh.ndim)
        y = x.redistribute(placements=[Shard(1)] * mesh.ndim).full_tensor()
        assert torch.equal(y.double(), exact.double())


@pytest.mark.ranks
@pytest.mark.parametrize("reach", [True, False], ids=["memory", "group"])
@pytest.mark.parametrize(
    ("mesh", "shape"), [((3,), (7, 4)), ((2, 2), (5, 2)), ((4,), (2, 9))], ids=str
)
def test_all_pairs(mesh: Any, shape: tuple[int, ...], reach: bool) -> None:
    mesh = init_device_mesh("cpu", mesh)
    with nullcontext() if reach else as_if_on_two_hosts(mesh):
        all_pairs(mesh, shape)


def over_hosts_body(sizes: tuple[int, ...], layout: str) -> None:
    with on_hosts(layout):
        mesh = init_device_mesh("cpu", sizes)
        part = torch.arange(7).tensor_split(mesh.size())[torch.distributed.get_rank()]
        uneven = DTensor.from_local(part, init_device_mesh("cpu", (mesh.size(),)), [Shard(0)])
        assert torch.equal(uneven.full_tensor(), torch.arange(7))
        all_pairs(mesh, (6, 5))
        x = distribute_tensor(torch.randn(6, 5), mesh, [Shard(1)] * mesh.ndim, src_data_rank=None)
        told = weft.explain(lambda: x.redistribute(placements=[Replicate()] * mesh.ndim))
        assert "hosts" in {each.engine for each in told}, told
        for op in ("sum", "avg", "max", "band"):
            term = torch.arange(5) % (torch.distributed.get_rank() + 2)
            terms = [torch.arange(5) % (rank + 2) for rank in range(mesh.size())]
            y = DTensor.from_local(term, mesh, [Partial(op)] * mesh.ndim).full_tensor()
            expected = terms[0]
            for other in terms[1:]:
                expected = REDUCE["sum" if op == "avg" else op](expected, other)
            assert torch.equal(y, expected // mesh.size() if op == "avg" else expected), op


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ((4,), "ABAA"),
        *(pytest.param((2, 2), each, marks=pytest.mark.slow) for each in ("ABAB", "AABB")),
    ],
    ids=str,
)
def test_all_pairs_over_hosts(ranks: Any, mesh: tuple[int, ...], layout: str) -> None:
    ranks(4, over_hosts_body, mesh, layout)


def all_mesh_dims_body(layout: str) -> None:
    """What changes alike along all mesh dims goes in two levels: no row crosses twice."""
    with on_hosts(layout):
        mesh = init_device_mesh("cpu", (2, 2))
        rank, S0, R, P = mesh.get_rank(), Shard(0), Replicate(), Partial()
        whole = torch.arange(7 * 3, dtype=torch.float32).view(7, 3)
        crossed: list[int] = []
        begun = hosts.OnTheWay

        def counting(x: torch.Tensor, *rest: Any) -> Any:
            crossed.append(x.numel())
            return begun(x, *rest)

        for before, after, sent in (([S0, S0], [R, R], 21), ([P, P], [R, R], 2 * 21)):
            x = distribute_tensor(whole, mesh, before if before[0] == S0 else [R, R])
            if before[0] == P:
                x = DTensor.from_local(whole * (rank + 1), mesh, before, run_check=False)
            crossed.clear()
            with patch.object(hosts, "OnTheWay", counting):
                told = weft.explain(lambda x=x, after=after: x.redistribute(placements=after))
                made = x.redistribute(placements=after).to_local()
            assert [each.engine for each in told if each.op == "redistribute"] == ["hosts"], told
            assert torch.equal(made, whole if before[0] == S0 else 10 * whole)
            total = torch.tensor(sum(crossed))
            assert int(weft.collectives.all_reduce(total)) == 2 * sent  # two calls


@pytest.mark.parametrize("layout", ["AABB", "BABA"])
def test_all_mesh_dims_over_hosts(ranks: Any, layout: str) -> None:
    ranks(4, all_mesh_dims_body, layout)


@pytest.mark.ranks
@pytest.mark.parametrize(("mesh", "shape"), [((3,), (7, 4)), ((2, 2), (5, 2))], ids=str)
def test_kernel_pulls_as_the_host(mesh: Any, shape: tuple[int, ...]) -> None:
    """Bit for bit."""
    mesh = init_device_mesh("cpu", mesh)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    rank = torch.distributed.get_rank()
    sources: list[Any] = [Shard(0), Shard(1), Partial(), Partial("avg")]
    for source, *rest in itertools.product(sources, [Shard(1), Replicate()][: mesh.ndim]):
        placements = [source, *rest][: mesh.ndim]
        x = distribute_tensor(
            whole, mesh, [Replicate() if p.is_partial() else p for p in placements]
        )
        if source.is_partial():
            x = DTensor.from_local(x.to_local() * (rank + 1), mesh, placements)
        for target in (Shard(0), Shard(1), Replicate()):
            onto = [target, *rest][: mesh.ndim]
            expected = x.redistribute(placements=onto).to_local()
            with weft.engine("triton"):
                actual = x.redistribute(placements=onto).to_local()
            assert torch.equal(actual, expected), (placements, onto)


def sums_are_equal_on_every_rank() -> list[float]:
    mesh = init_device_mesh("cpu", (4,))
    local = torch.randn(1000, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    total = DTensor.from_local(local, mesh, [Partial()]).full_tensor()
    values: list[float] = total.tolist()
    return values


def test_replicas_of_a_sum_are_bitwise_equal(ranks: Any) -> None:
    results = ranks(4, sums_are_equal_on_every_rank)
    assert all(result == results[0] for result in results)
    assert ranks(4, sums_are_equal_on_every_rank)[0] == results[0]


@pytest.mark.ranks(3)
def test_a_replicated_tensor_becomes_terms_exactly() -> None:
    mesh = init_device_mesh("cpu", (3,))
    for op in ("sum", "avg", "max", "min", "product", "band", "bor", "bxor"):
        whole = torch.arange(7)
        plain = layout_of(mesh, (Replicate(),), (7,), (1,), torch.int64)
        partial = plain.with_placements((Partial(op),))
        back = move(move(whole, plain, partial), partial, plain)
        assert torch.equal(back, whole), op


@pytest.mark.ranks(3)
def test_reductions_that_do_not_exist_are_refused_alike_on_every_rank() -> None:
    """Also on a rank that has nothing to reduce, which would wait for the others."""
    mesh = init_device_mesh("cpu", (3,))
    for make in (DTensor.from_local, distribute_tensor):
        with pytest.raises(ValueError, match=r"'product'"):
            make(torch.ones(1), mesh, [Partial("prod")])
    cases: list[tuple[str, torch.dtype]] = [
        ("bxor", torch.float32),
        ("max", torch.complex64),
        ("avg", torch.bool),
        ("sum", torch.float8_e4m3fn),
    ]
    for op, dtype in cases:
        x = DTensor.from_local(torch.ones(1).to(dtype), mesh, [Partial(op)])
        with pytest.raises(ValueError, match=f"no such {op}"):
            x.redistribute(placements=[Shard(0)])
    either = DTensor.from_local(torch.ones(1, dtype=torch.bool), mesh, [Partial("sum")])
    assert either.redistribute(placements=[Shard(0)]).full_tensor().all()


@pytest.mark.ranks(4)
def test_to_a_mesh_of_other_ranks() -> None:
    """Meshes that share no rank, or some, or have other shapes; forward and gradient."""
    rank = torch.distributed.get_rank()
    meshes = [
        DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3], [3, 1, 2], [[0, 2], [3, 1]], [2])
    ]
    whole = torch.arange(35.0).view(5, 7)
    every: list[Any] = [Replicate(), Shard(0), Shard(1)]
    for here, there in itertools.permutations(meshes, 2):
        for old, new in ((every[0], every[1]), (every[1], every[2]), (every[2], every[0])):
            x = distribute_tensor(whole.clone(), here, [old] * here.ndim).requires_grad_()
            y = x.redistribute(there, [new] * there.ndim)
            assert y.device_mesh == there and y.placements == (new,) * there.ndim
            if rank in there.mesh:
                assert torch.equal(y.full_tensor(), whole), (here, there, old, new)
            (y * y).sum().backward()
            assert x.grad.device_mesh == here
            if rank in here.mesh:
                assert torch.equal(x.grad.full_tensor(), 2 * whole), (here, there, old, new)
            # The same placements, another mesh: it moves.
            if here.ndim == there.ndim:
                z = x.detach().redistribute(there, x.placements)
                assert z.device_mesh == there
                assert rank not in there.mesh or torch.equal(z.full_tensor(), whole)
    # A sum that is reduced on the way.
    here, there = meshes[3], meshes[1]
    local = torch.full((4, 3), float(rank + 1))
    terms = DTensor.from_local(local, here, [Partial(), Partial()])
    total = terms.redistribute(there, [Shard(0)])
    if rank in there.mesh:
        assert torch.equal(total.full_tensor(), torch.full((4, 3), 10.0))


@pytest.mark.ranks(2)
def test_a_mesh_that_is_made_again_has_its_own_group() -> None:
    """Also while tensors of the old mesh, whose group is destroyed, are alive."""
    whole, kept = torch.arange(12.0).view(3, 4), []
    meshes: list[DeviceMesh] = []
    for _ in range(2):
        group: Any = torch.distributed.new_group([0, 1])
        meshes.append(DeviceMesh.from_group(group, "cpu"))
        x = distribute_tensor(whole, meshes[-1], [Shard(0)])
        kept.append(x)
        assert torch.equal(x.redistribute(placements=[Shard(1)]).full_tensor(), whole)
        assert torch.equal((x @ x.t()).full_tensor(), whole @ whole.t())
        torch.distributed.barrier()
        torch.distributed.destroy_process_group(group)
    assert meshes[0] == meshes[1]
    assert torch.equal((kept[0] + kept[1]).to_local(), 2 * kept[0].to_local())


def sample_of_pairs(sizes: tuple[int, ...], count: int, seed: int) -> None:
    mesh = init_device_mesh("cpu", sizes)
    chosen = random.Random(seed)
    ends: list[Any] = [Replicate(), Shard(0), Shard(1), Shard(2)]
    strided: Any = _StridedShard(1, split_factor=2)
    whole = torch.arange(240.0).view(5, 8, 6)
    for _ in range(count):
        source = [chosen.choice([*ends, strided, Partial()]) for _ in sizes]
        target = [chosen.choice([*ends, strided]) for _ in sizes]
        x = distribute_tensor(whole, mesh, source)
        y = x.redistribute(placements=target)
        torch.testing.assert_close(y.full_tensor(), whole, msg=f"{source} -> {target}")


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 1, 2, 2)], ids=str)
def test_cubes_and_beyond_on_virtual_ranks(sizes: tuple[int, ...]) -> None:
    weft.sim.run(math.prod(sizes), lambda rank: sample_of_pairs(sizes, 12, 0), races=False)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("sizes", "count"), [((2, 4), 100), ((2, 2, 2), 100), ((2, 2, 2, 2), 25)], ids=str
)
def test_many_pairs_on_virtual_ranks(sizes: tuple[int, ...], count: int) -> None:
    weft.sim.run(math.prod(sizes), lambda rank: sample_of_pairs(sizes, count, 1), races=False)


@pytest.mark.ranks(4)
def test_steps_along_one_dim_use_its_group() -> None:
    """Where no memory spans the mesh, steps along one mesh dim go through its own group."""
    mesh = init_device_mesh("cpu", (2, 2))
    with as_if_on_two_hosts(mesh):
        x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0), Shard(1)], src_data_rank=None)
        told = weft.explain(lambda: x.redistribute(placements=[Shard(0), Replicate()]))
        # The ranks of the inner dim share memory, and use it.
        assert [d.engine for d in told] == ["pull"], told
        told = weft.explain(lambda: x.redistribute(placements=[Shard(1), Shard(0)]))
        assert {d.engine for d in told} == {"generic"}, told
        plan = redistribute_plan(
            mesh, (4, 6), torch.float32, x.placements, [Replicate()] * 2, by_groups=True
        )
        assert len(plan.steps) >= 1 and "pull" in str(plan)
