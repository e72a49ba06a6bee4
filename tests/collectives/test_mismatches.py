"""Calls that differ between ranks: an error on every rank that tells both, and never a hang."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import weft
from weft import collectives
from weft.collectives.ranks import waits
from weft.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh

SOON_S = 20  # on a busy machine; the bound on waits is set far beyond it


Call = Callable[[], object]


def plain_pairs() -> dict[str, tuple[Call, Call, str, str]]:
    """By name: what rank 0 calls, what the others call, and a word of each call."""
    x = torch.ones(4, 4)
    c = collectives
    return {
        "dtype": (lambda: c.all_reduce(x), lambda: c.all_reduce(x.int()), "float32", "int32"),
        "halves": (
            lambda: c.all_reduce(x.half()),
            lambda: c.all_reduce(x.bfloat16()),
            "float16",
            "bfloat16",
        ),
        "reduce_op": (
            lambda: c.all_reduce(x, reduce_op="max"),
            lambda: c.all_reduce(x),
            r"all_reduce\(max\)",
            r"all_reduce\(sum\)",
        ),
        "shapes of equal bytes": (
            lambda: c.all_reduce(x),
            lambda: c.all_reduce(x.view(2, 8)),
            r"\[4, 4\]",
            r"\[2, 8\]",
        ),
        "dim": (
            lambda: c.reduce_scatter(x),
            lambda: c.reduce_scatter(x, dim=1),
            "dim 0",
            "dim 1",
        ),
        "dim of a gather": (
            lambda: c.all_gather(x, sizes=[4] * dist.get_world_size()),
            lambda: c.all_gather(x, dim=1, sizes=[4] * dist.get_world_size()),
            "dim 0",
            "dim 1",
        ),
        "source": (lambda: c.broadcast(x, 0), lambda: c.broadcast(x, 1), "rank 0", "rank 1"),
        "op": (lambda: c.all_reduce(x), lambda: c.all_to_all(x.repeat(3, 1)), "sum", "all_to_all"),
        "barrier": (lambda: c.barrier(), lambda: c.all_reduce(x), "barrier", "all_reduce"),
    }


def dtensor_pairs() -> dict[str, tuple[Call, Call, str, str]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    d = distribute_tensor(torch.arange(36.0).view(6, 6), mesh, [Shard(0)])
    return {
        "sum or max": (
            lambda: d.sum().full_tensor(),
            lambda: d.max().full_tensor(),
            r"P\(sum\)",
            r"P\(max\)",
        ),
        "placements": (
            lambda: d.redistribute(mesh, [Replicate()]),
            lambda: d.redistribute(mesh, [Shard(1)]),
            r"-> float32\[6, 6\] \[R\]",
            r"-> float32\[6, 6\] \[S\(1\)\]",
        ),
        "dtypes": (
            lambda: d.full_tensor(),
            lambda: d.double().full_tensor(),
            "float32",
            "float64",
        ),
        "a redistribution or a barrier": (
            lambda: d.full_tensor(),
            lambda: collectives.barrier(),
            "redistribute",
            "barrier",
        ),
    }


def told_on_all_ranks(pairs: dict[str, tuple[Call, Call, str, str]], name: str) -> None:
    """Both calls of a pair are told on every rank, and a right call can follow."""
    first, second, *words = pairs[name]
    rank, world_size, x = dist.get_rank(), dist.get_world_size(), torch.ones(3)
    assert collectives.all_reduce(x).tolist() == [world_size] * 3
    start = time.monotonic()
    with pytest.raises(weft.MismatchError) as caught:
        (first if rank == 0 else second)()
    assert time.monotonic() - start < SOON_S
    assert re.search(
        f"rank 0 called .*{words[0]}.*; rank [12] called .*{words[1]}", str(caught.value)
    )
    assert collectives.all_reduce(x).tolist() == [world_size] * 3


NAMES = (
    "dtype", "halves", "reduce_op", "shapes of equal bytes", "dim", "dim of a gather", "source",
    "op", "barrier",
)  # fmt: skip
OF_DTENSORS = ("sum or max", "placements", "dtypes", "a redistribution or a barrier")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", NAMES)
def test_collectives_that_differ(name: str) -> None:
    told_on_all_ranks(plain_pairs(), name)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", OF_DTENSORS)
def test_dtensors_that_differ(name: str) -> None:
    told_on_all_ranks(dtensor_pairs(), name)


def absent_body() -> str:
    os.environ["WEFT_TIMEOUT_S"] = "1"
    collectives.all_reduce(torch.ones(4))
    collectives.all_reduce(torch.ones(5), reduce_op="max")
    if dist.get_rank() == 1:
        time.sleep(3)
        return ""
    with pytest.raises(weft.PeerTimeout) as caught:
        collectives.all_gather(torch.ones(7), sizes=[7, 7])
    return caught.value.history


def test_a_time_out_shows_the_last_calls_of_all_ranks(own_ranks: Any) -> None:
    history, _ = own_ranks(2).run(absent_body, timeout_s=60)
    *_, before, last = history.split("\n")
    assert re.search(r"ranks 0, 1: all_reduce\(max\), float32, \[5\]", before)
    assert re.search(
        r"rank 0: all_gather.*sizes \[7, 7\].*under way for .*; rank 1: not begun", last
    )


class Ring:
    """Of a process that waits for another, as `waits` reads it; the last state stays."""

    def __init__(self, *states: tuple[int, ...]) -> None:
        self.states = list(states)

    def head(self) -> tuple[int, ...]:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


MS = 1_000_000
OF_1 = (5, 1, 102, 0, 0, 1000 * MS, 1100 * MS, 0)  # waits for 102 since 1000, looked at 1100
OF_2 = (7, 1, 101, 0, 0, 1050 * MS, 1150 * MS, 0)


@pytest.mark.parametrize(
    ("first", "second", "certain"),
    [
        ([OF_1], [OF_2], True),
        ([OF_1], [(7, 0, *OF_2[2:])], False),  # does not wait
        ([OF_1], [(*OF_2[:2], 103, *OF_2[3:])], False),  # waits for a process that is not known
        ([(*OF_1[:6], 1055 * MS, 0)], [OF_2], False),  # a signal of just before may be on its way
        ([OF_1], [(*OF_2[:7], 1)], False),  # threads of it may go on
        ([OF_1], [OF_2, OF_2, (7, 2, *OF_2[2:])], False),  # another wait by now
        ([OF_1], [OF_2, (7, 2, *OF_2[2:])], False),  # while it was read
    ],
)
def test_a_circle_is_certain(first: Any, second: Any, certain: bool) -> None:
    class Process:
        def __init__(self, pid: int) -> None:
            self.pid = pid

        def alive(self) -> bool:
            return True

    known = {101: (Process(101), Ring(*first)), 102: (Process(102), Ring(*second))}
    with patch.object(waits, "_known", known):
        assert list(waits._circle(101)) == ([101, 102] if certain else [])


@pytest.mark.ranks(2)
def test_lines_of_the_program_are_told_on_demand() -> None:
    """WEFT_CHECK=1: who called what, from which line."""
    x, rank = torch.ones(4), dist.get_rank()
    os.environ["WEFT_CHECK"] = "1"
    try:
        with pytest.raises(weft.MismatchError, match=r"test_mismatches\.py:\d+.*test_mismatches"):
            collectives.all_reduce(x if rank else x.int())
        assert collectives.all_reduce(x).tolist() == [2.0] * 4
        # What differs comes after a long list, on an engine that does not compare calls itself.
        q, cuts = torch.ones(1, 1, 2000, 8), [0, *range(7, 4000, 13), 4000]
        asked: Any = {"cu_seqlens": cuts, "sizes": [2000, 2000], "scale": 0.5 + rank}
        with (
            weft.engine("generic"),
            pytest.raises(weft.MismatchError, match=r"scale 1\.5.* 310 in"),
        ):
            weft.ring_attention(q, q, q, **asked)
        for pad in "", "x":  # paths longer than what is told of them, cut amid a letter
            at = {"__name__": "program", "all_reduce": collectives.all_reduce}
            source = "def made(x): return all_reduce(x)"
            exec(compile(source, f"/{pad}{'é' * 600}.py", "exec"), at)
            made: Any = at["made"]
            assert made(x).tolist() == [2.0] * 4
            with pytest.raises(weft.MismatchError, match=r"é\.py:1\).*é\.py:1\)"):
                made(x if rank else x.int())
    finally:
        del os.environ["WEFT_CHECK"]
