"""Collectives of a group over several hosts: the tests of one host, on ranks that pretend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
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
from test_hosts import QUICK, on_hosts

import weft
from weft import collectives
from weft.collectives import cost, hosts
from weft.collectives.topology import inside_of

BODIES = [
    dtypes_body, gather_body, gradient_body, kinds_body, out_body, reduce_body,
    shared_memory_body, strides_body,
]  # fmt: skip


def all_bodies(layout: str) -> None:
    with on_hosts(layout):
        for body in BODIES:
            body()


@pytest.mark.parametrize(
    "layout", ["AB", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ABAA", "AABB"))]
)
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


def measured_body(layout: str) -> None:
    """Rates are measured, kept in the file of the first rank, and read again."""
    with on_hosts(layout, rates=None):
        group, cpu = collectives.resolve(None), torch.device("cpu")
        rates = cost.calibrate(group, cpu)
        H = len(group.hosts)
        assert [[rate > 0 for rate in row] for row in rates.between] == [
            [source != target for target in range(H)] for source in range(H)
        ], rates
        assert rates.copy > 0 and rates.between_us > 0 and (rates.sync_us > 0) == (H < 4)
        cost.forget_rates(group)
        with patch.object(cost, "calibrate", side_effect=AssertionError("measured again")):
            assert cost.machine(group, cpu) == rates
        if (near := inside_of(group)).world_size > 1:  # of whom all but the wire is known
            again = AssertionError("measured again")
            with patch.object(cost, "matmul_rate", side_effect=again):
                assert cost.calibrate(near, cpu).wire > 0


@pytest.mark.parametrize("layout", ["ABBB", "ABCD"])
def test_rates_are_measured_once(ranks: Any, layout: str) -> None:
    ranks(4, measured_body, layout)


def chosen_body(layout: str) -> None:
    """Small calls have latencies only, of which two levels have more; of large ones bytes count."""
    slow_between = replace(QUICK, wire=1e2, wire_us=20.0, between=[[80.0] * 2] * 2)
    with on_hosts(layout, rates=slow_between):
        x, w = torch.ones(2, 4), torch.ones(4, 4)
        large, v = torch.ones(1 << 10, 64), torch.ones(64, 64)
        sizes = [1 << 10] * 4
        calls: dict[str, list[Callable[[], object]]] = {
            "generic": [
                lambda: collectives.all_gather(x[:1]),
                lambda: weft.all_gather_matmul(x, w, sizes=[2] * 4),
                lambda: weft.matmul_all_reduce(x, w),
            ],
            "hosts": [
                lambda: collectives.all_gather(large, sizes=sizes),
                lambda: collectives.all_reduce(large),
                lambda: weft.all_gather_matmul(large, v, sizes=sizes),
                lambda: weft.matmul_reduce_scatter(large, v),
            ],
        }
        for engine, each in calls.items():
            for call in each:
                told = weft.explain(call)[0]
                assert told.engine == engine, told
        assert "on 2 hosts, fused inside each: predicted" in told.why


def test_the_way_is_chosen_by_price(ranks: Any) -> None:
    ranks(4, chosen_body, "ABAB")


def differing_body() -> None:
    """Calls that differ where lengths are exchanged: every rank says so, and in what."""
    with on_hosts("AAB"):
        rank = dist.get_rank()
        x = torch.ones(rank + 1, 2 if rank < 2 else 3)
        with pytest.raises(weft.MismatchError, match=r"\(\*, 2\)|'\*', 2"):
            collectives.all_gather(x)
        assert collectives.all_gather(x[:, :2]).shape == (6, 2)
        with pytest.raises(weft.MismatchError, match="on rank 0, but"):
            weft.ring_attention(*[torch.ones(1, 1, 2, 4 + 4 * (rank == 1))] * 3)


def test_calls_that_differ(ranks: Any) -> None:
    ranks(3, differing_body)


def test_rates_of_a_network_are_bounded() -> None:
    """Buffers take the first bytes at once; noise may have the fewer take longer than all."""

    def rate(us: dict[int, float]) -> float:
        took = iter(us.values())
        network = cost._Network(None, None, torch.empty(0), lambda *_: next(took))  # type: ignore[arg-type]
        return network.rate(lambda _: None, (max(us), min(us)), 100.0)

    assert rate({1 << 10: 500.0, 4 << 10: 3572.0}) == 1.0  # bytes/us
    assert rate({1 << 20: 900.0, 4 << 20: 890.0}) == 2 * (4 << 20) / 890
