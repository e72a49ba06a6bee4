"""Redistribution on real ranks: all pairs of layouts, by symmetric memory and by process group."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor.placement_types import _StridedShard

from weft.collectives import spanning_group
from weft.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from weft.dtensor.layout import layout_of
from weft.dtensor.redistribute import move


def all_pairs(mesh_shape: tuple[int, ...], shape: tuple[int, ...], reach: bool) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    group = spanning_group(mesh)
    why = group.why
    if not reach:
        object.__setattr__(group, "why", "as if on two hosts")
    strided: Any = _StridedShard(0, split_factor=2)
    shards: list[Any] = [Replicate(), Shard(0), Shard(1), strided]
    whole = torch.randn(shape)
    for source in itertools.product([*shards, Partial()], repeat=mesh.ndim):
        x = distribute_tensor(whole, mesh, source)
        for target in itertools.product(shards, repeat=mesh.ndim):
            y = x.redistribute(placements=target)
            assert y.placements == target
            torch.testing.assert_close(y.full_tensor(), whole, msg=f"{source} -> {target}")
    object.__setattr__(group, "why", why)


@pytest.mark.parametrize("reach", [True, False], ids=["memory", "group"])
@pytest.mark.parametrize(
    ("mesh", "shape"), [((3,), (7, 4)), ((2, 2), (5, 2)), ((4,), (2, 9))], ids=str
)
def test_all_pairs(ranks: Any, mesh: Any, shape: Any, reach: bool) -> None:
    ranks(torch.Size(mesh).numel(), all_pairs, mesh, shape, reach)


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


def to_partial() -> None:
    mesh = init_device_mesh("cpu", (3,))
    for op in ("sum", "avg", "max", "min", "product", "band", "bor", "bxor"):
        whole = torch.arange(7)
        plain = layout_of(mesh, (Replicate(),), (7,), (1,), torch.int64)
        partial = plain.with_placements((Partial(op),))
        back = move(move(whole, plain, partial), partial, plain)
        assert torch.equal(back, whole), op


def test_a_replicated_tensor_becomes_terms_exactly(ranks: Any) -> None:
    ranks(3, to_partial)
