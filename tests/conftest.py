"""Ranks to test on: processes started once per session and reused, watched for errors and hangs."""

from __future__ import annotations

import os
import sys

# Before torch and triton are imported anywhere: one thread a rank, kernels interpreted on CPU, also
# where there are GPUs, which `-m gpu` asks for.
if "gpu" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # weft sets it too late for a file that imports triton before weft, as the alphabet has it.
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WEFT_TIMEOUT_S", "60")

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import GpuRanks, RankPool, poisoned


class Pools:
    """`ranks(world_size, body, *args)`: run `body(*args)` on that many ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(
        self, world_size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 120
    ) -> list[Any]:
        pool = self._pools.get(world_size)
        if pool is None or not pool.alive:
            pool = self._pools[world_size] = RankPool(world_size)
        return pool.run(body, *args, timeout_s=timeout_s)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.hookimpl(trylast=True)  # after pytest's own parameters
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked `ranks(2, 3)` runs twice: once on 2 ranks, once on 3."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None and mark.args:
        metafunc.fixturenames.append("world_size")
        metafunc.parametrize("world_size", mark.args)
    for mark in metafunc.definition.iter_markers("slow_where"):
        check_slow_where(metafunc.definition.nodeid, mark, [c.params for c in metafunc._calls])


def check_slow_where(test: str, mark: pytest.Mark, told: list[dict[str, Any]]) -> None:
    """Raise ValueError if the test is never given what the mark names: a slow test would be an
    ordinary one.

    Args:
        told: the parameters of each of its runs.
    """
    if mark.args or not mark.kwargs:
        raise ValueError(f"{test}: slow_where takes parameters by their names, at least one")
    for name, some in mark.kwargs.items():
        given = [one[name] for one in told if name in one]
        for value in some if isinstance(some, list) else [some]:
            if value not in given:
                raise ValueError(
                    f"{test} is slow_where {name} is {value!r}, which it never is, but {given}"
                )


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a test marked `slow_where(engine="triton", W=[3, 4])` is given decides if it is slow."""
    for item in items:
        for mark in item.iter_markers("slow_where"):
            assert isinstance(item, pytest.Function)
            told = item.callspec.params
            every = ((told[name], some) for name, some in mark.kwargs.items())
            if all(one in some if isinstance(some, list) else one == some for one, some in every):
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """All of a test marked `ranks` runs on every rank; without numbers, `world_size` or `mesh` is
    among its parameters."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    ranks = pyfuncitem._request.getfixturevalue("ranks")
    names = inspect.signature(pyfuncitem.function).parameters
    if "monkeypatch" in names:
        raise TypeError("ranks get a copy of monkeypatch, which nothing undoes: use mock.patch")
    body = partial(pyfuncitem.function, **{name: pyfuncitem.funcargs[name] for name in names})
    told = pyfuncitem.callspec.params
    world_size = told["world_size"] if "world_size" in told else math.prod(told["mesh"])
    ranks(world_size, body, **mark.kwargs)
    return True


@pytest.fixture
def virtual_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """As `ranks`, on virtual ones: a kernel that reaches beyond its arguments, or races, fails."""
    from weft import sim

    for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))

    def run(world_size: int, body: Callable[..., Any], *args: Any, races: bool = True) -> list[Any]:
        def on_rank(rank: int) -> Any:
            dist.init_process_group("gloo")
            return body(*args)

        return list(sim.run(world_size, on_rank, races=races, timeout=120))

    return run


@pytest.fixture
def own_ranks() -> Iterator[Callable[[int], RankPool]]:
    """`own_ranks(world_size)`: ranks of this test's own, which it may break."""
    made: list[RankPool] = []

    def make(world_size: int) -> RankPool:
        made.append(RankPool(world_size, quick=True))
        return made[-1]

    yield make
    for each in made:
        each.close()


_GPU_RANKS = [int(count) for count in os.environ.get("GPU_RANKS", "2 4").split()]


@pytest.fixture(scope="module", params=_GPU_RANKS)
def gpu_ranks(request: pytest.FixtureRequest) -> Iterator[GpuRanks]:
    ranks = GpuRanks(request.param)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
