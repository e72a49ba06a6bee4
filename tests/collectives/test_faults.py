"""Ranks that die or stay away: an error with names within the time-out, never a hang, no litter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from needs import needs_interpreter
from torch.distributed.checkpoint import FileSystemWriter

import weft
from weft import collectives
from weft.collectives import cost
from weft.collectives.ranks.group import Process
from weft.kernels.engine import shards

ROOT = Path(__file__).resolve().parents[2]

SOON_S = 10  # interpreted, on a busy machine; the usual time-out is 60


def shared_memory_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def call(op: str) -> None:
    x, w = torch.ones(8, 8), torch.ones(8, 8)
    large = torch.ones(1 << 20)  # read straight from the peers' memory, where the system allows it
    {
        "all_reduce": lambda: collectives.all_reduce(x),
        "large all_reduce": lambda: collectives.all_reduce(large),
        "barrier": lambda: collectives.barrier(),
        "all_gather_matmul": lambda: weft.all_gather_matmul(x, w),
        "matmul_reduce_scatter": lambda: weft.matmul_reduce_scatter(x, w),
    }[op]()


def doomed_body(op: str, engine: weft.settings.Engine, victim: int, timeout_s: float) -> Any:
    """Call `op` until the victim is gone; what the others got, and how long it took."""
    os.environ["WEFT_TIMEOUT_S"] = str(timeout_s)
    rank = dist.get_rank()
    with weft.engine(engine):
        call(op)
        collectives.barrier()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            for _ in range(3):
                call(op)
        except weft.PeerTimeout as error:
            return time.monotonic() - start, error.rank, error.peer, error.op, str(error)
    return None


@pytest.mark.parametrize(
    ("op", "engine"),
    [
        ("all_reduce", "auto"),
        ("large all_reduce", "auto"),
        ("barrier", "auto"),
        ("all_gather_matmul", "host"),
        ("matmul_reduce_scatter", "host"),
        ("all_gather_matmul", "triton"),
        ("matmul_reduce_scatter", "triton"),
    ],
)
def test_a_killed_rank_is_an_error_on_every_other(own_ranks: Any, op: str, engine: str) -> None:
    before, victim, timeout_s = shared_memory_files(), 1, 2 if engine == "triton" else 5
    three = own_ranks(3)
    three.start(doomed_body, op, engine, victim, timeout_s)
    replies = three.finish(timeout_s=60, dead=(victim,))
    assert sorted(replies) == [0, 2]
    for rank, (succeeded, value) in replies.items():
        assert succeeded, value
        assert value is not None, f"rank {rank} did not notice"
        seconds, waiter, peer, name, text = value
        assert seconds < timeout_s + SOON_S
        assert waiter == rank and peer == victim
        assert op.split()[-1] in name and "died, or did not make the same call" in text
        if engine != "triton":  # seen at once, by one of the two
            assert f"waited {timeout_s} s" not in text
    three.close()
    assert shared_memory_files() <= before


def absent_body(timeout_s: float) -> Any:
    os.environ["WEFT_TIMEOUT_S"] = str(timeout_s)
    rank = dist.get_rank()
    x = torch.ones(4)
    collectives.all_reduce(x)
    if rank == 2:
        time.sleep(2 * timeout_s)  # alive, but elsewhere
    start = time.monotonic()
    with pytest.raises(weft.PeerTimeout) as caught:
        collectives.all_reduce(x)
    seconds = time.monotonic() - start
    os.environ["WEFT_TIMEOUT_S"] = "600"  # the group stays broken, and says so without a wait
    with pytest.raises(weft.PeerTimeout, match="rank"):
        weft.collectives.check_peers()
    with pytest.raises(weft.PeerTimeout):
        collectives.all_reduce(x)
    return seconds, caught.value.peer


def test_a_rank_that_stays_away_times_out(own_ranks: Any) -> None:
    results = own_ranks(3).run(absent_body, 1.0, timeout_s=60)
    for rank, (seconds, peer) in enumerate(results):
        assert seconds < SOON_S
        if rank != 2:
            assert seconds > 0.5 and peer == 2


def test_a_process_that_ends_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = replace(Process.here(), pid=child.pid)
    with open(f"/proc/{child.pid}/stat") as looked_at:
        child.kill()
        child.wait()
        monkeypatch.setattr(Path, "read_text", lambda path: looked_at.read())
        assert not process.alive()


def set_up_body(timeout_s: float) -> Any:
    os.environ["WEFT_TIMEOUT_S"] = str(timeout_s)
    rank = dist.get_rank()
    if rank == 1:
        time.sleep(2 * timeout_s)
    start = time.monotonic()
    with pytest.raises(weft.PeerTimeout, match="set-up of the group") as caught:
        collectives.all_reduce(torch.ones(4))
    seconds = time.monotonic() - start
    dist.barrier()
    assert collectives.all_reduce(torch.ones(4)).tolist() == [2.0] * 4
    return seconds, caught.value.peer


def settings_body(name: str, value: str) -> None:
    if dist.get_rank() == 1:
        os.environ[name] = value
    with pytest.raises(weft.MismatchError, match=f"{name} .* not set on rank 0 and {value} on"):
        weft.collectives.all_reduce(torch.ones(3))
    os.environ.pop(name, None)
    assert weft.collectives.all_reduce(torch.ones(3)).tolist() == [2.0] * 3


@pytest.mark.parametrize(("name", "value"), [("WEFT_ENGINE", "generic"), ("WEFT_CHECK", "1")])
def test_settings_that_must_agree_are_told_by_name(own_ranks: Any, name: str, value: str) -> None:
    own_ranks(2).run(settings_body, name, value, timeout_s=60)


def away_body(engine: Any) -> str:
    """Rank 1 is away, whatever the engine; it may come from another one, too."""
    x = torch.ones(5)
    with weft.engine(engine):
        weft.collectives.all_reduce(x)
    os.environ["WEFT_TIMEOUT_S"] = "1"
    if dist.get_rank() == 1:
        time.sleep(3)
        return ""
    start = time.monotonic()
    with weft.engine(engine), pytest.raises(weft.PeerTimeout, match=r"waited .* for rank 1"):
        weft.collectives.all_reduce(x)
    assert time.monotonic() - start < 3
    return "told"


@pytest.mark.parametrize("engine", ["generic", "host", "triton"])
def test_one_bound_for_every_engine(own_ranks: Any, engine: str) -> None:
    assert own_ranks(2).run(away_body, engine, timeout_s=60) == ["told", ""]


def test_a_rank_that_misses_the_first_call_of_a_group(own_ranks: Any) -> None:
    """The set-up of a group is bounded as all waits are, and can be had again."""
    for rank, (seconds, peer) in enumerate(own_ranks(2).run(set_up_body, 1.0, timeout_s=60)):
        assert 0.5 < seconds < SOON_S and peer == 1 - rank


def blame_body(timeout_s: float) -> Any:
    """Rank 1 stays away; rank 0 gives up first, and rank 2 asks later, once rank 0 has given up."""
    os.environ["WEFT_TIMEOUT_S"] = str(timeout_s * (1 + dist.get_rank()))
    if dist.get_rank() == 1:
        time.sleep(4 * timeout_s)
        return 1
    with pytest.raises(weft.PeerTimeout, match="set-up of the group") as caught:
        collectives.all_reduce(torch.ones(4))
    return caught.value.peer


def test_the_set_up_blames_who_is_away_and_not_who_gave_up(own_ranks: Any) -> None:
    assert own_ranks(3).run(blame_body, 1.0, timeout_s=60) == [1, 1, 1]


def saving_body(folder: str) -> str:
    """The save's thread gathers in the process group while the main thread sets weft up in it."""
    saving, go = {"w": torch.ones(4)}, threading.Event()

    class Held(FileSystemWriter):
        def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
            assert go.wait(30)  # in the thread, before its collectives
            super().set_up_storage_writer(*args, **kwargs)

    if dist.get_rank() == 1:  # here the save's collectives come first, there weft's
        go.set()
    done = dcp.async_save(saving, storage_writer=Held(folder), process_group=dist.group.WORLD)
    if dist.get_rank() == 1:
        time.sleep(1)
    weft.collectives.all_reduce(torch.ones(4))
    cost.calibrate(weft.collectives.resolve(), torch.device("cpu"))
    go.set()
    done.result(timeout=30)
    weft.close()
    return "held"


def test_set_up_amid_an_asynchronous_save(own_ranks: Any, tmp_path: Path) -> None:
    assert own_ranks(2).run(saving_body, str(tmp_path), timeout_s=90) == ["held"] * 2


def forking_body() -> str:
    collectives.all_reduce(torch.ones(4))
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            collectives.all_reduce(torch.ones(4))
        except RuntimeError as error:
            os.write(tell, str(error).encode())
        os._exit(0)
    os.close(tell)
    text = os.read(told, 1000).decode()
    os.waitpid(pid, 0)
    assert collectives.all_reduce(torch.ones(4)).tolist() == [2.0] * 4
    return text


def test_a_child_of_a_rank_is_no_rank(own_ranks: Any) -> None:
    for text in own_ranks(2).run(forking_body, timeout_s=60):
        assert "forked from a rank" in text


def failing_body(name: str) -> str:
    """Rank 0 fails amid its third call, and goes on to the next as the others do."""
    rank, W = dist.get_rank(), dist.get_world_size()
    told, right = "", []
    with weft.engine("host"):
        for turn in range(6):
            x, w = torch.full((2, 3), float(turn * 10 + rank)), torch.ones(3, 1)
            failing = patch.object(shards, name, side_effect=MemoryError("no room"))
            with failing if rank == 0 and turn == 2 else nullcontext():
                try:
                    y = weft.matmul_reduce_scatter(weft.all_gather_matmul(x, w), w[:1])
                except (MemoryError, weft.MismatchError) as error:
                    told = str(error)
                    continue
            sums = torch.tensor([30.0 * turn + 3 * r for r in range(W) for _ in range(2)])
            right.append(torch.equal(y.view(-1), W * sums.chunk(W)[rank]))
    return told if all(right) and len(right) >= 5 else f"{told}: {right}"


@pytest.mark.parametrize("name", ["publish", "publish_product", "reduce_rows"])
def test_a_rank_that_fails_amid_a_call(own_ranks: Any, name: str) -> None:
    """Peers never take what it has not written for its data, and the next call is right."""
    first, *others = own_ranks(3).run(failing_body, name, timeout_s=60)
    assert first == "no room"
    for told in others:  # what is published already, they have
        assert ("rank 0 failed during" in told) == name.startswith("publish")


def interrupted_body(op: str, engine: weft.settings.Engine) -> None:
    """Rank 0 is interrupted while it waits for rank 1, and both go on to a call of other data."""
    os.environ["WEFT_TIMEOUT_S"] = "5"
    x, w = torch.ones(4, 4), torch.ones(4, 4)
    calls = {
        "all_reduce": lambda x: collectives.all_reduce(x),
        "all_gather": lambda x: collectives.all_gather(x),
        "matmul_reduce_scatter": lambda x: weft.matmul_reduce_scatter(x, w),
        "matmul_all_reduce": lambda x: weft.matmul_all_reduce(x, w),
    }

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    with weft.engine(engine):
        right = calls[op](x)
        dist.barrier()
        if dist.get_rank() == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                calls[op](x * 7)
        dist.barrier()
        for _ in range(2):
            with pytest.raises(weft.MismatchError, match="rank 0 has failed or was interrupted"):
                calls[op](x)
        dist.barrier()
        weft.collectives.close()
        assert torch.equal(calls[op](x), right)


@pytest.mark.parametrize(
    ("op", "engine"),
    [
        ("all_reduce", "host"),
        ("all_gather", "host"),
        ("matmul_reduce_scatter", "host"),
        ("matmul_all_reduce", "triton"),
    ],
)
def test_a_rank_that_is_interrupted_amid_a_call(own_ranks: Any, op: str, engine: str) -> None:
    """What it has published is not taken for the data of a later call."""
    own_ranks(2).run(interrupted_body, op, engine, timeout_s=60)


def no_room_body(failing: tuple[int, ...]) -> list[float | str]:
    """Some ranks have no memory for the second of four launches, and go on to the third."""
    from weft.kernels.matmul import two_shot_kernel

    rank = dist.get_rank()
    told: list[float | str] = []
    os.environ["WEFT_TIMEOUT_S"] = "2"
    no_room = patch.object(two_shot_kernel, "launch_matmul_all_reduce", side_effect=MemoryError)
    for turn in range(4):
        x = torch.full((2, 4), float(10 * turn + rank))
        with no_room if turn == 1 and rank in failing else nullcontext(), weft.engine("triton"):
            try:
                told.append(weft.matmul_all_reduce(x, torch.ones(4, 2))[0, 0].item())
            except (MemoryError, weft.PeerTimeout) as error:
                told.append(type(error).__name__)
    return told


@needs_interpreter
def test_a_rank_that_fails_before_a_launch(own_ranks: Any) -> None:
    """Its next launch never meets the one that its peers are in; where all fail, they go on."""
    both = own_ranks(2).run(no_room_body, (0, 1), timeout_s=60)
    assert both == [[4.0, "MemoryError", 164.0, 244.0]] * 2
    one = own_ranks(2).run(no_room_body, (0,), timeout_s=60)
    assert one[0] == [4.0, "MemoryError", "PeerTimeout", "PeerTimeout"]
    assert one[1] == [4.0, "PeerTimeout", "PeerTimeout", "PeerTimeout"]


def busy_body() -> None:
    x = torch.ones(1 << 16)
    while True:
        collectives.all_reduce(x)


def test_nothing_stays_when_all_are_killed(own_ranks: Any) -> None:
    before = shared_memory_files()
    two = own_ranks(2)
    two.start(busy_body)
    time.sleep(1.0)
    for pid in two.pids:
        os.kill(pid, signal.SIGKILL)
    two.close()
    assert shared_memory_files() <= before


def test_no_thread_is_left_at_exit() -> None:
    """What a script leaves open: one that Python stops in the middle of torch's code aborts."""
    code = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # runs last
from weft.collectives.ranks import reports
reports._Watch.begin()
assert len(threading.enumerate()) == 2
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "['MainThread']\n", run.stderr
