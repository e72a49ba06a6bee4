"""Layouts in the notations of other libraries, there and back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_layout import layout
from torch.distributed.tensor.placement_types import _StridedShard

from weft.dtensor import Partial, Replicate, Shard
from weft.dtensor.notation import (
    format_colossalai,
    format_jax,
    format_oneflow,
    format_torch,
    parse_colossalai,
    parse_jax,
    parse_oneflow,
    parse_torch,
    placements_of_cuts,
)

SIZES, NAMES = (2, 4, 2), ("x", "y", "z")
STRIDED: Any = _StridedShard(0, split_factor=4)
EVERY: list[Any] = [Replicate(), Shard(0), Shard(1), Partial()]


def test_all_layouts_come_back() -> None:
    for placements in itertools.product(EVERY, repeat=3):
        assert parse_torch(format_torch(placements)) == placements
        assert parse_oneflow(format_oneflow(placements)) == placements
        assert parse_jax(format_jax(placements, 2, SIZES, NAMES), SIZES, NAMES) == placements
        if Partial() not in placements:
            assert parse_colossalai(format_colossalai(placements, 2, SIZES), SIZES) == placements


@pytest.mark.parametrize(
    ("placements", "colossalai", "jax", "oneflow"),
    [
        ((Shard(0), Replicate()), "[S0, R]", "P('x', None)", "(split(0), broadcast)"),
        ((Shard(0), Shard(0)), "[S01, R]", "P(('x', 'y'), None)", "(split(0), split(0))"),
        ((Shard(1), Shard(0)), "[S1, S0]", "P('y', 'x')", "(split(1), split(0))"),
        ((Shard(0), Partial()), None, "P('x', None, unreduced={'y'})", "(split(0), partial_sum)"),
        ((STRIDED, Shard(0)), "[S10, R]", "P(('y', 'x'), None)", None),
    ],
    ids=str,
)
def test_what_it_looks_like(placements: Any, colossalai: Any, jax: str, oneflow: Any) -> None:
    sizes, names = SIZES[:2], NAMES[:2]
    assert format_jax(placements, 2, sizes, names) == jax
    assert parse_jax(jax, sizes, names) == placements
    if colossalai is not None:
        assert format_colossalai(placements, 2, sizes) == colossalai
        assert parse_colossalai(colossalai, sizes) == placements
    if oneflow is not None:
        assert format_oneflow(placements) == oneflow
        assert parse_oneflow(oneflow) == placements


def test_the_order_of_cuts_is_the_order_of_chunks() -> None:
    whole = torch.arange(32)
    for order in itertools.permutations(range(3)):
        placed = layout((32,), SIZES, placements_of_cuts([order], SIZES))
        for index, coordinate in enumerate(placed.place.coordinates):
            mine = whole
            for mesh_dim in order:
                mine = mine.chunk(SIZES[mesh_dim])[coordinate[mesh_dim]]
            held = [i for start, size in placed.boxes[index][0] for i in range(start, start + size)]
            assert held == mine.tolist(), (order, coordinate)


def test_other_spellings_are_read() -> None:
    assert parse_torch("[Shard(dim=0), Replicate(), Partial(max)]") == (
        Shard(0), Replicate(), Partial("max"),
    )  # fmt: skip
    assert parse_torch(str([STRIDED])) == (STRIDED,)
    text = "(oneflow.sbp.split(dim=1), oneflow.sbp.broadcast)"
    assert parse_oneflow(text) == (Shard(1), Replicate())
    assert parse_jax("PartitionSpec('y')", (2, 4), ("x", "y")) == (Replicate(), Shard(0))


@pytest.mark.parametrize(
    ("parse", "match"),
    [
        (lambda: parse_torch("[S0, Q]"), "none of S"),
        (lambda: parse_oneflow("(split)"), "none of split"),
        (lambda: parse_colossalai("[S0, S0]", (2, 2)), "cuts two tensor dims"),
        (lambda: parse_colossalai("[S5]", (2, 2)), "not one of 2"),
        (lambda: parse_colossalai("[T]", (2, 2)), "neither R nor S"),
        (lambda: parse_jax("P('q')", (2,), ("x",)), "not \\['q'\\]"),
        (lambda: parse_jax("Q('x')", (2,), ("x",)), "not like P"),
        (lambda: parse_jax("P(0)", (2,), ("x",)), "names, or tuples of names"),
        (lambda: parse_jax("P('x', unreduced=0)", (2,), ("x",)), "not like P"),
        (lambda: parse_jax("P('x', unreduced={'x'})", (2,), ("x",)), "unreduced as well"),
        (lambda: format_colossalai([Partial()], 1, (2,)), "no partial sums"),
        (lambda: format_jax([Partial("max")], 1, (2,), ("x",)), "no other reductions"),
        (lambda: format_oneflow([STRIDED]), "no word"),
    ],
)
def test_what_cannot_be_said_is_an_error(parse: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse()
