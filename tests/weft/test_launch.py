"""The launcher of local ranks: their results, and how one that fails or hangs ends the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft.launch import RankError, launch

LONG_S = 600


def fails_on_rank_one(rank: int, progress: Callable[[Any], None]) -> None:
    progress("started")
    if rank == 1:
        raise ZeroDivisionError("of rank one")
    time.sleep(LONG_S)


def dies_on_rank_one(rank: int, progress: Callable[[Any], None]) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG_S)


def hangs_on_rank_one(rank: int, progress: Callable[[Any], None]) -> int:
    if rank == 1:
        time.sleep(LONG_S)
    return rank


def works(rank: int, progress: Callable[[Any], None], add: int) -> tuple[int, int]:
    progress(rank)
    return rank + add, torch.get_num_threads()


@pytest.mark.parametrize(
    "body, said",
    [
        (fails_on_rank_one, r"(?s)rank 1 failed:.*ZeroDivisionError: of rank one.*rank 0 was at:"),
        pytest.param(dies_on_rank_one, r"rank 1 was killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param(
            hangs_on_rank_one,
            r"(?s)no progress for 1 s.*rank 1 was at:.*in hangs_on_rank_one",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_fails_ends_the_run(body: Callable[..., Any], said: str) -> None:
    begun = time.monotonic()
    with pytest.raises(RankError, match=said):
        launch(2, body, stall_s=1 if body is hangs_on_rank_one else 50)
    assert time.monotonic() - begun < LONG_S / 2  # on a busy machine ranks take long to start


def test_launch_returns_results_in_rank_order() -> None:
    seen: list[Any] = []
    assert launch(2, works, 10, threads=1, on_progress=seen.append) == [(10, 1), (11, 1)]
    assert seen == [0]


def returns_a_function(rank: int, progress: Callable[[Any], None]) -> Any:
    return lambda: rank


@pytest.mark.slow
def test_a_result_that_cannot_be_sent_is_told() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 failed:.*returns_a_function.*lambda"):
        launch(1, returns_a_function)
