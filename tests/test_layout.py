"""Layouts against torch's own arithmetic, and redistribution plans, without any process."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weft.dtensor import Partial, Replicate, Shard
from weft.dtensor.layout import Layout, chunk, contiguous_stride, layout_of, normalize
from weft.dtensor.transfers import plan

MESHES = [(1,), (2,), (3,), (4,), (7,), (2, 2), (2, 3), (4, 2), (2, 2, 2)]
SHAPES = [(0,), (1,), (5,), (8,), (3, 4), (5, 7), (8, 8), (2, 3, 5)]


class Mesh:
    """As much of a DeviceMesh as layouts look at."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.ndim = shape, len(shape)
        self.mesh = torch.arange(math.prod(shape)).view(shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and other.shape == self.shape

    def __hash__(self) -> int:
        return hash(self.shape)


def layout(shape: tuple[int, ...], mesh: tuple[int, ...], placements: Any) -> Layout:
    place: Any = Mesh(mesh)
    normal = normalize(placements, len(shape), len(mesh))
    return layout_of(place, normal, shape, contiguous_stride(shape), torch.float32)


def placements_of(ndim: int, mesh_ndim: int) -> list[tuple[Placement, ...]]:
    each: list[Placement] = [Replicate(), *(Shard(d) for d in range(ndim))]
    return list(itertools.product(each, repeat=mesh_ndim))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_boxes_are_those_of_torch(mesh: tuple[int, ...]) -> None:
    for shape in SHAPES:
        for placements in placements_of(len(shape), len(mesh)):
            ours = layout(shape, mesh, placements)
            for index, coordinate in enumerate(ours.place.coordinates):
                local, offset = _compute_local_shape_and_global_offset(
                    shape, mesh, lambda dim, at=coordinate: at[dim], placements
                )
                assert ours.shape_at(index) == tuple(local)
                if 0 not in local:
                    assert tuple(runs[0][0] for runs in ours.boxes[index]) == tuple(offset)


@pytest.mark.parametrize("size", [1, 5, 12, 13, 24])
@pytest.mark.parametrize("factor", [1, 2, 3, 4])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_strided_shards_select_what_torch_selects(size: int, factor: int, parts: int) -> None:
    strided = _StridedShard(0, split_factor=factor)
    ours = layout((size,), (parts,), [strided])
    shards, _ = strided._split_tensor(
        torch.arange(size), parts, with_padding=False, contiguous=False
    )
    for index in range(parts):
        runs = ours.boxes[index][0]
        selected = [i for start, length in runs for i in range(start, start + length)]
        assert selected == shards[index].tolist()


def test_trailing_chunks_are_empty() -> None:
    assert [chunk(5, 4, i) for i in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]


def test_equal_layouts_are_one_object() -> None:
    assert layout((4, 4), (2,), [Shard(-1)]) is layout((4, 4), (2,), [Shard(1)])


def test_bad_placements_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="one placement per mesh dim"):
        layout((4,), (2, 2), [Shard(0)])
    with pytest.raises(ValueError, match="shards dim 2, but the tensor has 2 dims"):
        layout((4, 4), (2,), [Shard(2)])


def _lower_bound(source: Layout, target: Layout) -> list[int]:
    """Bytes of the target box that a rank does not hold already."""
    needs = []
    for mine, wanted in zip(source.boxes, target.boxes, strict=True):
        own = math.prod(
            sum(max(0, min(a + n, b + m) - max(a, b)) for a, n in of_mine for b, m in of_wanted)
            for of_mine, of_wanted in zip(mine, wanted, strict=True)
        )
        whole = math.prod(sum(n for _, n in runs) for runs in wanted)
        needs.append(4 * (whole - own))
    return needs


@pytest.mark.parametrize("mesh", [(3,), (2, 4)], ids=str)
@pytest.mark.parametrize("shape", [(8, 8, 8), (5, 7, 1)], ids=str)
def test_pulls_move_the_fewest_bytes(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    layouts = [layout(shape, mesh, p) for p in placements_of(len(shape), len(mesh))]
    for source, target in itertools.product(layouts, layouts):
        found = plan(source, target)
        assert found.bytes_received == (
            [0] * math.prod(mesh) if source is target else _lower_bound(source, target)
        )
        assert len(found.steps) <= 1


def test_partial_plans_stay_below_the_stated_total() -> None:
    """Sum over the pairs with Partial of a 2x4 mesh, in full tensors received per rank."""
    shape, mesh = (16, 16, 16), (2, 4)
    every: list[Placement] = [Replicate(), Shard(0), Shard(1), Shard(2), Partial()]
    sources = [p for p in itertools.product(every, repeat=2) if Partial() in p]
    targets = list(itertools.product(every[:-1], repeat=2))
    total = 0.0
    for s, t in itertools.product(sources, targets):
        received = plan(layout(shape, mesh, s), layout(shape, mesh, t)).bytes_received
        total += sum(received) / len(received) / (4 * math.prod(shape))
    assert total <= 72.35


def test_plans_print_their_steps() -> None:
    found = plan(layout((4, 4), (2,), [Shard(0)]), layout((4, 4), (2,), [Shard(1)]))
    assert str(found) == (
        "float32[4, 4] [S(0)] on [2] -> float32[4, 4] [S(1)] on [2]: 1 steps\n"
        "  [S(0)] -> [S(1)]: pull, at most 16 bytes a rank"
    )


def test_sums_and_maxima_do_not_mix() -> None:
    with pytest.raises(ValueError, match="Mixed Partial reduce types"):
        plan(
            layout((4,), (2, 2), [Partial("sum"), Partial("max")]),
            layout((4,), (2, 2), [Replicate(), Replicate()]),
        )
