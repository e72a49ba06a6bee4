"""The pytest fixture `sim_run`: virtual ranks in a test, seeded from the command line.

pytest finds it by itself where weft is installed (the entry point `weft_sim`). Every session of
pytest there imports this module: nothing of weft is, and no torch, until a test asks for ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from weft.sim.run.runner import Results


def pytest_addoption(parser: pytest.Parser) -> None:
    """--sim-schedules, --sim-seed, --sim-schedule."""
    group = parser.getgroup("weft", "virtual ranks")
    group.addoption(
        "--sim-schedules",
        metavar="N",
        help="interleavings that every sim_run tries, in the place of what the tests say; or "
        "`exhaustive`",
    )
    group.addoption("--sim-seed", type=int, metavar="N", help="seed of every sim_run")
    group.addoption("--sim-schedule", metavar="S", help="only this one, as an error named it")


@pytest.fixture
def sim_run(pytestconfig: pytest.Config) -> Callable[..., Results]:
    """`weft.sim.run`, with --sim-schedules, --sim-seed and --sim-schedule before its arguments.

    Example:
        >>> def test_mean(sim_run):
        ...     assert sim_run(3, lambda rank: my_mean(rank), schedules=50) == [1.0] * 3
    """
    from weft.sim.run.runner import run

    told: dict[str, Any] = {
        "schedules": pytestconfig.getoption("--sim-schedules"),
        "seed": pytestconfig.getoption("--sim-seed"),
        "schedule": pytestconfig.getoption("--sim-schedule"),
    }
    told = {name: value for name, value in told.items() if value is not None}
    if told.get("schedules", "").isdecimal():
        told["schedules"] = int(told["schedules"])

    def sim_run(world_size: int, fn: Callable[[int], Any], **options: Any) -> Results:
        __tracebackhide__ = True  # pytest shows the test, and what it was running
        return run(world_size, fn, **{**options, **told})

    return sim_run
