"""The ground that the tests stand on: failures and hangs of ranks are reported, with tracebacks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import check_slow_where
from rank_pool import RankError, RankPool


@pytest.fixture
def pool(own_ranks: Callable[[int], RankPool]) -> RankPool:
    return own_ranks(2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engin": "triton"}, "is slow_where engin is 'triton', which it never is, but \\[\\]"),
        ({"engine": ["host", "tritn"]}, "engine is 'tritn', which it never is, but .*'triton'"),
        ({}, "at least one"),
    ],
)
def test_a_misspelt_slow_where_is_an_error(given: dict[str, Any], said: str) -> None:
    runs = [{"engine": "host", "W": 2}, {"engine": "triton", "W": 2}]
    with pytest.raises(ValueError, match=said):
        check_slow_where("a test", pytest.mark.slow_where(**given).mark, runs)
    check_slow_where("a test", pytest.mark.slow_where(engine="triton", W=[2]).mark, runs)


def failing_body(guilty: int) -> None:
    if dist.get_rank() == guilty:
        raise KeyError("the reason")


def hanging_body() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)  # the line that the report must show


def exiting_body() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def good_body(x: torch.Tensor) -> tuple[int, float]:
    assert torch.empty(3).isnan().all(), "torch.empty is poisoned in ranks"
    return dist.get_rank(), float(x.sum())


@pytest.mark.ranks(2, 3)
def test_a_marked_test_runs_on_as_many_ranks(world_size: int) -> None:
    assert dist.get_world_size() == world_size


@pytest.mark.xfail(raises=RankError, strict=True)
@pytest.mark.ranks(2)
def test_a_marked_test_fails_where_one_rank_does() -> None:
    assert dist.get_rank() == 0


def test_a_failure_carries_its_traceback_and_the_pool_goes_on(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"rank 0: KeyError[\s\S]*rank 1: KeyError") as caught:
        ranks(2, _all_fail)
    assert "in failing_body" in str(caught.value)
    assert ranks(2, good_body, torch.ones(3)) == [(0, 3.0), (1, 3.0)]


def test_the_pool_goes_on_after_an_error_that_was_missing(ranks: Any) -> None:
    """pytest's own error is no Exception: it ended the ranks, and the tests after it failed."""
    with pytest.raises(RankError, match=r"rank 0: DID NOT RAISE[\s\S]*rank 1: DID NOT RAISE"):
        ranks(2, _none_raises)
    assert ranks(2, good_body, torch.ones(3)) == [(0, 3.0), (1, 3.0)]


def _all_fail() -> None:
    failing_body(dist.get_rank())


def _none_raises() -> None:
    with pytest.raises(KeyError):
        pass


def test_a_hang_is_reported_with_its_stack(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 hangs at[\s\S]*in hanging_body"):
        pool.run(hanging_body, timeout_s=1)
    assert time.monotonic() - start < 100
    assert not pool.alive


def test_one_failing_rank_does_not_wait_for_the_time_limit(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1: KeyError"):
        pool.run(failing_body, 1, timeout_s=600)
    assert time.monotonic() - start < 100


def test_a_rank_that_exits_is_reported(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1: rank process ended"):
        pool.run(exiting_body, timeout_s=20)
