"""Virtual ranks: results, determinism, deadlocks, errors."""

from __future__ import annotations

import pytest
import torch

from weft import collectives, sim


def mean(rank: int) -> torch.Tensor:
    return collectives.all_reduce(torch.tensor([float(rank)]), reduce_op="avg")


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_results_come_in_rank_order(world_size: int) -> None:
    assert sim.run(world_size, lambda rank: rank * 10) == [10 * r for r in range(world_size)]
    want = torch.tensor([(world_size - 1) / 2])
    for value in sim.run(world_size, mean, schedules=5):
        torch.testing.assert_close(value, want)


def test_many_ranks() -> None:
    assert torch.stack(sim.run(64, mean)).eq(31.5).all()
