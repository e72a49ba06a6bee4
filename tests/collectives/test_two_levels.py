"""Collectives of a group over several hosts: the tests of one host, on ranks that pretend."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_collectives import (
    dtypes_body,
    gather_body,
    gradient_body,
    kinds_body,
    out_body,
    reduce_body,
    shared_memory_body,
    strides_body,
    windows_body,
)
from test_hosts import on_hosts

import weft
from weft import collectives
from weft.collectives import hosts

BODIES = [
    dtypes_body, gather_body, gradient_body, kinds_body, out_body, reduce_body,
    shared_memory_body, strides_body,
]  # fmt: skip


def all_bodies(layout: str) -> None:
    with on_hosts(layout):
        for body in BODIES:
            body()


@pytest.mark.parametrize("layout", ["AABB", "ABAA", "AB"])
def test_collectives(ranks: Any, layout: str) -> None:
    ranks(len(layout), all_bodies, layout)


def ways_body(layout: str) -> None:
    """An all_to_all sends each byte once in any case."""
    x, calls = torch.ones(4, 4), [
        collectives.all_gather, collectives.reduce_scatter, collectives.all_reduce,
        collectives.broadcast, collectives.all_to_all,
    ]  # fmt: skip
    engines: tuple[weft.settings.Engine, ...] = "auto", "host", "generic"
    for engine in engines:
        with on_hosts(layout), weft.engine(engine):
            told = [weft.explain(call, x)[0] for call in calls]
        expected = "generic" if engine == "generic" else "hosts"
        assert [each.engine for each in told] == [expected] * 4 + ["generic"], told


@pytest.mark.parametrize("layout", ["ABBB", "ABCD"])
def test_which_calls_run_in_two_levels(ranks: Any, layout: str) -> None:
    ranks(4, ways_body, layout)


def parts_body(layout: str) -> torch.Tensor:
    with on_hosts(layout), patch.object(hosts, "_PART_BYTES", 1 << 12):
        return windows_body(1 << 16)


@pytest.mark.parametrize("layout", ["AABB", "BABB"])
def test_parts(ranks: Any, layout: str) -> None:
    """Several parts a call; bitwise the same on all ranks and again."""
    first, *others = ranks(4, parts_body, layout)
    assert all(torch.equal(first, other) for other in others)
