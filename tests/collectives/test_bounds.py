"""Process groups, and saves and loads of torch's, wait no longer than our bound, and name who is
absent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import weft
from weft import collectives as c
from weft.collectives.ranks.group import Process, new_group
from weft.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from weft.dtensor.checkpoint import async_save, load, save

BOUND_S, SOON_S = 2.0, 20.0
often = patch("weft.collectives.ranks.bounds._BEAT_S", 0.2)


@contextmanager
def on_several_hosts() -> Iterator[None]:
    """Each rank as on a host of its own: nothing is shared."""
    here = replace(Process.here(), host=f"host {dist.get_rank()}")
    with patch.object(Process, "here", lambda on_gpus=False: here):
        yield


def told(call: Callable[[], object], absent: tuple[int, ...]) -> None:
    start = time.monotonic()
    with pytest.raises(weft.PeerTimeout) as caught:
        call()
    assert caught.value.absent == absent, caught.value
    assert time.monotonic() - start < BOUND_S + SOON_S


def met(what: str, ranks: int) -> None:
    """Wait until so many ranks have come here."""
    store: Any = dist.distributed_c10d._get_default_store()
    store.add(what, 1)
    while store.add(what, 0) < ranks:
        time.sleep(0.01)


def redistributed() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)], src_data_rank=None)
    return whole.redistribute(mesh, [Replicate()]).to_local()


@pytest.mark.ranks(3)
def test_all_calls_are_right_on_several_hosts() -> None:
    W, rank = dist.get_world_size(), dist.get_rank()
    with on_several_hosts():
        group = c.resolve(new_group((0, 1, 2)))
    assert "several hosts" in group.why
    x = torch.arange(3.0) + rank
    assert torch.equal(c.all_reduce(x, group), W * torch.arange(3.0) + 3)
    assert c.all_gather(torch.full((rank + 1,), rank), group).tolist() == [0, 1, 1, 2, 2, 2]
    assert c.reduce_scatter(x, group).tolist() == [3.0 * (rank + 1)]
    assert c.all_to_all(x, group=group).tolist() == [rank, rank + 1.0, rank + 2.0]
    assert c.broadcast(x, 1, group).tolist() == [1.0, 2.0, 3.0]
    assert group.gather_objects("a" * rank, "words") == ["", "a", "aa"]
    c.barrier(group)


@often
def several_hosts_body() -> None:
    groups = [new_group((0, 1, 2)) for _ in range(2)]
    x, rank = torch.ones(4), dist.get_rank()
    with on_several_hosts():
        for group in [*groups, None]:
            c.barrier(group)
        redistributed()
        os.environ["WEFT_TIMEOUT_S"] = str(BOUND_S)
        calls: list[Callable[[], object]] = [
            lambda: c.all_reduce(x, groups[0]),
            lambda: c.barrier(groups[1]),
            redistributed,
        ]
        if rank != 2:  # which stays away
            for number, call in enumerate(calls):
                if rank == 1 and number == 0:
                    time.sleep(0.8 * BOUND_S)  # late is not absent
                told(call, (2,))
        met("done", 3)


@pytest.mark.slow
def test_an_absent_rank_is_named_on_several_hosts(own_ranks: Any) -> None:
    own_ranks(3).run(several_hosts_body, timeout_s=90)


@often
def saves_body(folder: str, victim_dies: bool) -> str:
    rank, path = dist.get_rank(), Path(folder)
    mesh = init_device_mesh("cpu", (3,))

    def state(value: float) -> dict[str, Any]:
        return {"w": distribute_tensor(torch.full((9,), value), mesh, [Shard(0)])}

    save(state(0.0), path)
    written = async_save(state(1.0), path)
    load(back := state(2.0), path)  # which waits for the save
    assert written.done() and back["w"].full_tensor().tolist() == [1.0] * 9
    assert async_save({"v": 7}, path / "values").result() is None
    next_states = [state(3.0 + i) for i in range(3)]
    os.environ["WEFT_TIMEOUT_S"] = str(600 if victim_dies else BOUND_S)
    if rank == 1 and victim_dies:
        os.kill(os.getpid(), signal.SIGKILL)
    calls: list[Callable[[], object]] = [
        lambda: save(next_states[0], path),
        lambda: async_save(next_states[1], path).result(),
        lambda: load(next_states[2], path),
    ]
    if rank != 1:
        for number, call in enumerate(calls[: 1 if victim_dies else 3]):
            met(f"call {number}", 2)  # on a busy machine one may be late by more than the bound
            told(call, (1,))
    if not victim_dies:
        met("done", 3)
    if rank == 1:
        with pytest.raises(weft.PeerTimeout):
            calls[0]()
    return "held"


@pytest.mark.slow
def test_a_rank_that_is_away_from_a_save_is_named(own_ranks: Any, tmp_path: Path) -> None:
    replies = own_ranks(3).run(saves_body, str(tmp_path), False, timeout_s=90)
    assert replies == ["held"] * 3


def test_a_rank_that_dies_before_a_save_is_named_at_once(own_ranks: Any, tmp_path: Path) -> None:
    ranks = own_ranks(3)
    ranks.start(saves_body, str(tmp_path), True)
    replies = ranks.finish(timeout_s=60, dead=(1,))
    assert replies == {0: (True, "held"), 2: (True, "held")}
