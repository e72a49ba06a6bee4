"""Plans of redistributions among thousands of ranks: found by arithmetic, without listing ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weft.dtensor.layout.boxes import Layout, contiguous_layout
from weft.dtensor.layout.placements import normalize
from weft.dtensor.layout.places import StandInMesh
from weft.dtensor.move import transfers
from weft.dtensor.move.collective_plans import collective_plan
from weft.dtensor.move.transfers import PulledPiece, Step, cut_box, move_plan

P, R, S0, S1 = Partial(), Replicate(), Shard(0), Shard(1)
MOVES = [
    ((64, 64), (S0, S1), (S1, S0)),
    ((64, 64), (S0, R), (R, R)),
    ((64, 64), (S0, S0), (R, S1)),
    ((64, 64), (P, S0), (S0, R)),
    ((64, 64), (P, P), (S0, S1)),
    ((64, 64), (P, R), (R, R)),
    ((8, 64, 8), (S0, S0, S1), (R, R, S1)),
    ((8, 64, 8), (P, S0, R), (R, S0, S1)),
]


def layout(mesh: Any, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> Layout:
    return contiguous_layout(mesh, normalize(placements, len(shape), mesh.ndim), shape, torch.half)


@pytest.mark.parametrize("sizes, before, after", MOVES)
def test_no_rank_of_4096_is_listed(sizes: Any, before: Any, after: Any) -> None:
    """Neither for the plan, nor for what one rank then takes and sends."""
    mesh: Any = StandInMesh(torch.arange(4096).view(sizes))
    source, target = (layout(mesh, each, (8192, 28672)) for each in (before, after))
    counted = []
    for plan in move_plan(source, target), collective_plan(source, target):
        assert plan.steps and plan.source is source
        for step in plan.steps:
            assert step.room > 0 and len(step.bytes_received) == 4096
            if step.mesh_dim is not None and not step.is_local:
                counted.append(len(step.pieces_of(77)))
                here, dim = source.place.coordinate(77), step.mesh_dim
                line = [(*here[:dim], i, *here[dim + 1 :]) for i in range(sizes[dim])]
                to = [source.place.index_at(at) for at in line]
                assert any(step.taken_from(77, receiver) for receiver in to if receiver != 77)
            for each in step.source, step.target:
                assert "boxes" not in vars(each), step
    assert "coordinates" not in vars(source.place)
    assert max(counted, default=0) <= 64


def listed(step: Step) -> list[tuple[PulledPiece, ...]]:
    """What every rank takes, by looking at every rank."""
    source, target = step.source, step.target
    kept, summed, born = transfers._partial_dims(source, target)
    families: dict[Any, list[int]] = {}
    for index, at in enumerate(source.place.coordinates):
        first = tuple(0 if dim in summed else i for dim, i in enumerate(at))
        families.setdefault(first, []).append(index)
    every = []
    for receiver, here in enumerate(target.place.coordinates):
        found: list[PulledPiece] = []
        by_box: dict[Any, list[Any]] = {}
        wants = all(transfers._contributes(target.placements[dim], here[dim]) for dim in born)
        for first, members in families.items() if wants else ():
            if all(first[dim] == here[dim] for dim in kept):
                near = here if source.mesh is target.mesh else None
                far = [transfers._distance(near, source.place.coordinates[m]) for m in members]
                by_box.setdefault(source.boxes[members[0]], []).append((min(far), members))
        for box, holders in by_box.items():
            for s, t, numel in cut_box(box, target.boxes[receiver]):
                rank = target.place.ranks[receiver]
                chosen = transfers._nearest(holders, source, rank, receiver)
                found.append(PulledPiece(tuple(chosen), s, t, numel))
        every.append(tuple(found))
    return every


def drawn(chance: random.Random, dims: int, kept: tuple[Placement, ...]) -> tuple[Placement, ...]:
    found = []
    for dim in range(dims):
        choices: list[Placement] = [R, S0, S1, *([P] if not kept else []), *kept[dim : dim + 1]]
        found.append(chance.choice(choices))
    if chance.random() < 0.3 and found[0] == S0 and S0 not in found[1:]:
        found[0] = _StridedShard(0, split_factor=2)
    return tuple(found)


def test_what_one_rank_takes_is_what_listing_all_finds() -> None:
    """Also of uneven, empty and strided shards, sums, and moves between two meshes."""
    chance = random.Random(0)
    for _ in range(150):
        sizes = chance.choice([(2, 3), (4,), (2, 2, 2), (3, 2)])
        shape = chance.choice([(7, 5), (8, 6), (1, 12), (3, 0)])
        ranks = torch.arange(torch.Size(sizes).numel()).view(sizes)
        mesh: Any = StandInMesh(ranks)
        other: Any = mesh if chance.random() < 0.7 else StandInMesh(ranks.flatten() + 2)
        source = layout(mesh, drawn(chance, mesh.ndim, ()), shape)
        kept = source.placements if other is mesh else ()
        target = layout(other, drawn(chance, other.ndim, kept or (R,)), shape)
        for plan in move_plan(source, target), collective_plan(source, target):
            for step in plan.steps:
                every = listed(step)
                fresh = Step(step.source, step.target)
                count = range(len(step.source.place.ranks))
                for receiver, pieces in enumerate(every):
                    for holder in count:
                        expected = [piece for piece in pieces if holder in piece.holders]
                        assert fresh.taken_from(holder, receiver) == expected, step
                    assert step.pieces_of(receiver) == pieces, step
                received = [
                    sum(
                        piece.numel
                        for piece in pieces
                        for holder in piece.holders
                        if step.source.place.ranks[holder] != step.target.place.ranks[receiver]
                    )
                    for receiver, pieces in enumerate(every)
                ]
                if not any(isinstance(p, Partial) for p in step.target.placements):
                    assert step.bytes_received == [2 * n for n in received], step
