"""All kernels and collectives of weft on virtual ranks, with races on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from needs import needs_interpreter
from sim_cases import (
    CALLS,
    COLLECTIVES,
    FLAGGED,
    HOST,
    KERNELS,
    heads_copied_by_several,
    matrix,
    triton_attention,
    triton_training,
)
from sweeps import Key, row, wanted

from weft import sim
from weft.collectives import workspace
from weft.kernels.engine.chips import Tiling
from weft.kernels.matmul import reduce_scatter_kernel

ALL_KERNELS = KERNELS | COLLECTIVES
# Variants of kernels that stay in `make test`.
VARIANTS = {
    "attention by heads, backward",
    "collectives by the switch",
    "dispatch of few tokens in fp8",
    "dispatch to experts in fp8",
    "norm of sums, two shots",
    "norm of whole sums, by the switch",
    "norm of whole sums, one shot",
    "norm of whole sums, two shots",
    "ring attention, backward",
}


def no_rows_on_the_last_rank(rank: int) -> None:
    """It has nothing to add up, and must not run ahead of those who read what it sends."""
    W, K, N, sizes = 3, 4, 17, [17, 16, 0]
    config = reduce_scatter_kernel.ReduceScatterConfig(Tiling(16, 16, 32, group_m=2), 3, 16, False)
    ws = workspace(None, 1 << 15, channel="no rows")
    xs, w = [matrix(sum(sizes), K, r) for r in range(W)], matrix(K, N, 99)
    for call in range(CALLS):
        y = reduce_scatter_kernel.launch_matmul_reduce_scatter(
            [xs[rank] * (call + 1)], [w], ws, sizes, config=config
        )
        torch.testing.assert_close(y, (sum(xs) @ w).split(sizes)[rank] * (call + 1))


@needs_interpreter
def test_a_rank_without_rows() -> None:
    sim.run(3, no_rows_on_the_last_rank, schedules=20, replay=True)


# Two ranks, with programs in turn, are in the sweep.
@needs_interpreter
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in VARIANTS else [])
        for name, case in ALL_KERNELS.items()
    ],
)
def test_kernels(case: Callable[..., None]) -> None:
    sim.run(3, case, schedules=20, replay=True)


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("case", ALL_KERNELS.values(), ids=ALL_KERNELS)
def test_kernels_with_concurrent_programs(case: Callable[..., None]) -> None:
    sim.run(2, case, schedules=2, programs="concurrent", replay=True)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("case", FLAGGED.values(), ids=FLAGGED)
def test_words_that_carry_their_flag(case: Callable[..., None]) -> None:
    sim.run(3, case, schedules=20, replay=True)
    sim.run(2, case, schedules=2, programs="concurrent", replay=True)


@pytest.mark.slow
@needs_interpreter
def test_attention_by_heads_with_several_copy_programs() -> None:
    sim.run(2, heads_copied_by_several)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("case", HOST.values(), ids=HOST)
def test_host_side(case: Callable[..., None], world_size: int) -> None:
    sim.run(world_size, case, schedules=30, replay=True)


@needs_interpreter
def test_training_on_the_triton_engine() -> None:
    sim.run(2, triton_training, schedules=10, replay=True)


@needs_interpreter
@pytest.mark.parametrize(
    "programs", ["sequential", pytest.param("concurrent", marks=pytest.mark.sweep)]
)
def test_attention_on_the_triton_engine(programs: sim.Programs) -> None:
    sim.run(2, triton_attention, schedules=10, programs=programs, replay=True)


@needs_interpreter
@pytest.mark.sweep
@pytest.mark.parametrize("key", [*wanted()], ids=str)
def test_two_thousand_interleavings(key: Key) -> None:
    assert "| nothing |" in row(*key, schedules=2000)
