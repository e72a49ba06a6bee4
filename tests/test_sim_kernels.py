"""All kernels and collectives of weft on virtual ranks, with races on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sim_cases import COLLECTIVES, HOST, KERNELS, triton_attention, triton_training

from weft import sim
from weft.collectives import signals

ALL_KERNELS = KERNELS | COLLECTIVES
needs_interpreter = pytest.mark.skipif(
    not signals.interpreter_ready()[0], reason=signals.interpreter_ready()[1]
)


@needs_interpreter
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("case", ALL_KERNELS.values(), ids=ALL_KERNELS)
def test_kernels(case: Callable[..., None], world_size: int) -> None:
    sim.run(world_size, case, schedules=3)


@needs_interpreter
@pytest.mark.parametrize("case", ALL_KERNELS.values(), ids=ALL_KERNELS)
def test_kernels_with_concurrent_programs(case: Callable[..., None]) -> None:
    sim.run(3, case, schedules=3, programs="concurrent")


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("case", HOST.values(), ids=HOST)
def test_host_side(case: Callable[..., None], world_size: int) -> None:
    sim.run(world_size, case, schedules=8)


@needs_interpreter
def test_training_on_the_triton_engine() -> None:
    sim.run(2, triton_training, schedules=2)


@needs_interpreter
@pytest.mark.parametrize("programs", ["sequential", "concurrent"])
def test_attention_on_the_triton_engine(programs: sim.Programs) -> None:
    sim.run(2, triton_attention, schedules=1, programs=programs)


@needs_interpreter
@pytest.mark.sweep
@pytest.mark.parametrize("programs", ["sequential", "concurrent"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_attention_on_the_triton_engine_long(world_size: int, programs: sim.Programs) -> None:
    sim.run(world_size, triton_attention, schedules=2000 // world_size**2, programs=programs)


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("case", HOST.values(), ids=HOST)
def test_host_side_long(case: Callable[..., None], world_size: int) -> None:
    sim.run(world_size, case, schedules=2000)


@needs_interpreter
@pytest.mark.sweep
@pytest.mark.parametrize("programs", ["sequential", "concurrent"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("case", ALL_KERNELS.values(), ids=ALL_KERNELS)
def test_kernels_long(case: Callable[..., None], world_size: int, programs: sim.Programs) -> None:
    sim.run(world_size, case, schedules=2000, programs=programs)
