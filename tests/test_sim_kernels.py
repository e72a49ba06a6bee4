"""All kernels and collectives of weft on virtual ranks, with races on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from needs import needs_interpreter
from sim_cases import (
    COLLECTIVES,
    HOST,
    KERNELS,
    heads_copied_by_several,
    triton_attention,
    triton_training,
)
from sweeps import Key, row, wanted

from weft import sim

ALL_KERNELS = KERNELS | COLLECTIVES


# Two ranks, with programs in turn, are in the sweep.
@needs_interpreter
@pytest.mark.parametrize("case", ALL_KERNELS.values(), ids=ALL_KERNELS)
def test_kernels(case: Callable[..., None]) -> None:
    sim.run(3, case, schedules=20, replay=True)


@needs_interpreter
@pytest.mark.parametrize("case", ALL_KERNELS.values(), ids=ALL_KERNELS)
def test_kernels_with_concurrent_programs(case: Callable[..., None]) -> None:
    sim.run(2, case, schedules=2, programs="concurrent", replay=True)


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
