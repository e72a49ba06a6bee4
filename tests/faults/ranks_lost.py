"""Ranks that are killed, or stopped for shorter or longer than the bound on waits."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from trials import GRACE_S, Replies, own_ranks, until
from workloads import STEADY, WORK, are_ready, work_until_told

_BOUND_S = 2.0


def _check_survivors(
    replies: Replies, ranks: list[int], lost: int, since: float, within_s: float, where: str
) -> None:
    """All raise a PeerTimeout that names the lost rank, in time."""
    for rank in ranks:
        assert rank in replies, f"{where}: rank {rank} still waits"
        ok, value = replies[rank]
        assert ok, f"{where}: rank {rank}: {value}"
        assert isinstance(value, tuple), f"{where}: rank {rank} noticed nothing in {value} steps"
        kind, named, at, text = value
        assert kind == "PeerTimeout" and named == (lost,), f"{where}: rank {rank}: {text}"
        assert at - since < within_s, f"{where}: rank {rank} waited {at - since:.1f} s"


def kills(chance: random.Random, folder: Path) -> Iterator[None]:
    world_size, name = chance.choice((2, 3)), chance.choice(list(WORK))
    victim, pause_s = chance.randrange(world_size), chance.uniform(0, 0.3)
    where = f"{name} on {world_size} ranks, rank {victim} killed"
    with own_ranks(world_size) as ranks:
        # The bound is far away: a dead process is noticed without it.
        ranks.start(work_until_told, name, chance.randrange(1 << 30), 300.0, str(folder))
        until(lambda: are_ready(folder, world_size), where)
        time.sleep(pause_s)
        os.kill(ranks.pids[victim], signal.SIGKILL)
        since = time.monotonic()
        replies = ranks.finish(GRACE_S + 5, dead=(victim,))
        others = [rank for rank in range(world_size) if rank != victim]
        _check_survivors(replies, others, victim, since, GRACE_S, where)
    yield


def kills_at_set_up(chance: random.Random, folder: Path) -> Iterator[None]:
    """At any moment from the first call on, before ranks know each other as well."""
    world_size, name = chance.choice((2, 3)), chance.choice(list(WORK))
    victim, pause_s = chance.randrange(world_size), chance.uniform(0, 0.15)
    where = f"{name} on {world_size} ranks, rank {victim} killed after {pause_s:.3f} s"
    with own_ranks(world_size) as ranks:
        ranks.start(work_until_told, name, chance.randrange(1 << 30), _BOUND_S, str(folder))
        time.sleep(pause_s)
        os.kill(ranks.pids[victim], signal.SIGKILL)
        since = time.monotonic()
        replies = ranks.finish(_BOUND_S + GRACE_S + 5, dead=(victim,))
        others = [rank for rank in range(world_size) if rank != victim]
        _check_survivors(replies, others, victim, since, _BOUND_S + GRACE_S, where)
    yield


def long_stops(chance: random.Random, folder: Path) -> Iterator[None]:
    yield from _stopped_beyond(chance, folder, chance.choice(list(WORK)))


def long_stops_in_steady_work(chance: random.Random, folder: Path) -> Iterator[None]:
    for name in STEADY:
        inside = folder / name
        inside.mkdir()
        yield from _stopped_beyond(chance, inside, name)


def _stopped_beyond(chance: random.Random, folder: Path, name: str) -> Iterator[None]:
    world_size = chance.choice((2, 3))
    victim, pause_s = chance.randrange(world_size), chance.uniform(0, 0.3)
    where = f"{name} on {world_size} ranks, rank {victim} stopped"
    with own_ranks(world_size) as ranks:
        ranks.start(work_until_told, name, chance.randrange(1 << 30), _BOUND_S, str(folder))
        until(lambda: are_ready(folder, world_size), where)
        time.sleep(pause_s)
        os.kill(ranks.pids[victim], signal.SIGSTOP)
        since = time.monotonic()
        replies = ranks.finish(_BOUND_S + GRACE_S + 5, dead=(victim,))
        others = [rank for rank in range(world_size) if rank != victim]
        os.kill(ranks.pids[victim], signal.SIGCONT)
        _check_survivors(replies, others, victim, since, _BOUND_S + GRACE_S, where)
        back = ranks.finish(_BOUND_S + GRACE_S, dead=tuple(others))
        assert victim in back, f"{where}: and waits since it goes on"
        ok, value = back[victim]
        assert ok and isinstance(value, tuple), f"{where}: and goes on as if nothing was: {value}"
    yield


def short_stops(chance: random.Random, folder: Path) -> Iterator[None]:
    world_size, name = chance.choice((2, 3)), chance.choice(list(WORK))
    where = f"{name} on {world_size} ranks"
    with own_ranks(world_size) as ranks:
        ranks.start(work_until_told, name, chance.randrange(1 << 30), 60.0, str(folder))
        until(lambda: are_ready(folder, world_size), where)
        for _ in range(3):
            victim = ranks.pids[chance.randrange(world_size)]
            os.kill(victim, signal.SIGSTOP)
            time.sleep(chance.uniform(0.05, 0.5))
            os.kill(victim, signal.SIGCONT)
            time.sleep(chance.uniform(0, 0.1))
        (folder / "stop").touch()
        replies = ranks.finish(60)
        assert sorted(replies) == list(range(world_size)), f"{where}: {replies}"
        steps = {rank: value for rank, (_, value) in replies.items()}
        alike = all(isinstance(n, int) for n in steps.values()) and len(set(steps.values())) == 1
        assert alike, f"{where}: {steps}"
    yield
