"""Symmetric buffers, workspaces and exchanges: layout, order, misuse."""

from __future__ import annotations

import gc
import os
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import weft
from weft import collectives
from weft.collectives.device import signals, stream_signals
from weft.collectives.memory import rendezvous
from weft.collectives.memory.backends import PosixMemory
from weft.collectives.memory.exchange import StreamExchange, agree, exchange
from weft.collectives.memory.waiter import Waiter
from weft.collectives.memory.workspace import workspace
from weft.collectives.ranks import pad


@pytest.mark.ranks(2, 3)
def test_buffer() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffer = collectives.empty((3, 4), torch.int32)
    assert (buffer.rank, buffer.world_size, buffer.multicast_ptr) == (rank, world_size, 0)
    assert buffer.local.shape == (3, 4) and buffer.local.dtype == torch.int32
    buffer.local.fill_(rank)
    buffer.barrier()
    for peer in range(world_size):
        view = buffer.get_buffer(peer, (12,), torch.int32)
        assert view.tolist() == [peer] * 12
        assert view.data_ptr() == buffer.buffer_ptrs[peer]
        assert buffer.signal_ptrs[peer] + pad.pad_bytes(world_size) == buffer.buffer_ptrs[peer]
    buffer.barrier(channel=3)
    # Writes into a peer's memory arrive, at an offset and as another dtype.
    right = (rank + 1) % world_size
    buffer.get_buffer(right, (1,), torch.float32, offset=8).fill_(rank + 0.5)
    buffer.barrier()
    left = (rank - 1) % world_size
    assert buffer.local.view(torch.float32)[0, 2] == left + 0.5
    for offset, shape in ((-4, (1,)), (48, (1,)), (0, (13,))):
        with pytest.raises(ValueError, match="must lie inside"):
            buffer.get_buffer(0, shape, torch.int32, offset)
    with pytest.raises(ValueError, match="be aligned to"):
        buffer.get_buffer(0, (1,), torch.int32, 2)
    with pytest.raises(ValueError, match="rank must be in"):
        buffer.get_buffer(world_size, (1,), torch.int32)
    with pytest.raises(ValueError, match="sizes must be >= 0"):
        buffer.get_buffer(0, (-1,), torch.int32)
    buffer.barrier()
    buffer.close()
    for use in (buffer.barrier, lambda: buffer.get_buffer(0, (1,), torch.int32)):
        with pytest.raises(RuntimeError, match="is closed"):
            use()


@pytest.mark.ranks(3)
def test_bad_requests_are_errors_on_every_rank() -> None:
    rank = dist.get_rank()
    with pytest.raises(weft.MismatchError, match=r"rank 1 for \(\(5,\)"):
        collectives.empty((4 + (rank == 1),))
    with pytest.raises(weft.MismatchError, match="same symmetric memory"):
        collectives.empty((4,), torch.float32 if rank else torch.float64)
    with pytest.raises(ValueError, match="sizes must be >= 0"):
        collectives.empty((-1,) if rank == 1 else (1,))
    with pytest.raises(ValueError, match="cpu or cuda"):
        collectives.empty((1,), device="meta")
    assert collectives.empty((0,)).local.numel() == 0


class TorchsRendezvous:
    """What ranks tell each other in torch's: each message by a number of the process."""

    number = 0

    def __call__(self, own: torch.Tensor, group: Any) -> list[int]:
        c10d: Any = torch._C._distributed_c10d
        pg = c10d._resolve_process_group(group) if isinstance(group, str) else group
        store = dist.PrefixStore("", pg.get_group_store())  # C++, as torch's
        for _ in range(2):
            keys = [f"CUDASymmetricMemory/{self.number}/{r}" for r in range(pg.size())]
            self.number += 1
            store.set(keys[pg.rank()], str(own.item()))
            store.wait(keys, timedelta(seconds=5))
            told = [int(store.get(key)) for key in keys]
        return told


@pytest.mark.ranks(3)
def test_rendezvous_after_some_ranks_have_had_one_without_the_others() -> None:
    rank, some = dist.get_rank(), dist.new_group([0, 1])
    with patch.object(symm_mem, "rendezvous", TorchsRendezvous()):
        for turn in range(3):
            for pg in (some, dist.group.WORLD)[0 if rank < 2 else 1 :]:
                group = collectives.resolve(pg)
                own = torch.tensor(10 * turn + rank)
                counts = group.gather_objects(rendezvous.count(), "test")
                told = rendezvous.meet(own, group, counts)
                assert told == [10 * turn + r for r in range(group.world_size)]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_fast_rank_never_overwrites_what_a_slow_one_reads(slow: int) -> None:
    """A fast rank calls on while a slow one still reads: it must never see later data."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for call in range(12):
        with exchange(None, 1 << 16, "test") as ex:
            ex.local((1 << 13,), torch.int64).fill_(100 * call + rank)
            ex.signal_all()
            for peer in ex.peers():
                ex.wait(peer)
                if rank == slow:
                    time.sleep(0.002)
                assert (ex.peer(peer, (1 << 13,), torch.int64) == 100 * call + peer).all()
    assert agree(None, "test", rank) == list(range(world_size))


@pytest.mark.ranks(2, 3)
def test_exchanges_and_barriers_by_kernels() -> None:
    """What a GPU does with kernels in a stream, with the kernels interpreted."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ws = workspace(None, 1 << 12, channel="stream")
    for call in range(6):
        with StreamExchange(ws, "test") as ex:
            ex.local((8,), torch.int64).fill_(100 * call + rank)
            for peer in ex.peers() if call % 2 else []:
                ex.signal(peer)
            if call % 2 == 0:
                ex.signal_all()
            if call % 3 == 0:
                ex.wait_all()
            for peer in ex.peers():
                ex.wait(peer)
                assert (ex.peer(peer, (8,), torch.int64) == 100 * call + peer).all()
    buffer = collectives.empty((1,), torch.int64)
    for call in range(3):
        buffer.local.fill_(10 * call + rank)
        stream_signals.barrier_in_stream(buffer, call % 2)
        seen = [int(buffer.get_buffer(r, (1,), torch.int64)) for r in range(world_size)]
        assert seen == [10 * call + r for r in range(world_size)]
        stream_signals.barrier_in_stream(buffer, call % 2)
    if rank == 0:  # alone, and not for WEFT_TIMEOUT_S
        stream_signals.barrier_in_stream(buffer, 2, timeout=0.01)
        assert pad.status_in(int(buffer.status_of(0))) == (pad.TIMED_OUT, 0, world_size - 1, 1)


def broken_off_body() -> tuple[list[str], int]:
    """Rank 0 fails amid a call and goes on, as do the others: what is told, and what is right."""
    rank, told, right = dist.get_rank(), [], 0
    for turn in range(6):
        ws = workspace(None, 1 << 12, channel="broken off")
        if turn == 1:
            dist.barrier()  # a rank still at the end of its first call would be told, too
        try:
            with StreamExchange(ws, "test") as ex:
                ex.local((8,), torch.int64).fill_(100 * turn + rank)
                if turn == 1 and rank == 0:
                    ex.signal(1)
                    raise MemoryError("no room")
                ex.signal_all()
                ex.wait_all()
                parts = [ex.peer(peer, (8,), torch.int64).clone() for peer in ex.peers()]
        except (MemoryError, weft.MismatchError) as error:
            told.append(str(error))
            if turn == 3:
                weft.close()
                dist.barrier()
        else:
            right += all(
                (x == 100 * turn + r).all() for x, r in zip(parts, ex.peers(), strict=True)
            )
    return told, right


@pytest.mark.ranks(2, 3)
def test_workspaces_grow_and_close() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first = workspace(None, 1000, channel="growth")
    assert workspace(None, 1000, channel="growth") is first
    assert workspace(None, 1000, channel="other") is not first
    with torch.inference_mode():  # what is made here must be of use outside
        grown = workspace(None, first.half_bytes + 1, channel="growth")
    assert grown.half_bytes == 2 * first.half_bytes
    with exchange(None, grown.half_bytes, "test", channel="growth") as ex:
        mine = ex.local((grown.half_bytes,), torch.uint8)
        mine[-1] = rank
        ex.signal_all()
        ex.wait_all()
        ends = [int(ex.peer(r, tuple(mine.shape), torch.uint8)[-1]) for r in range(world_size)]
        assert ends == list(range(world_size))
    weft.close()
    with pytest.raises(RuntimeError, match="is closed"):
        grown.check("test")
    assert collectives.all_gather(torch.tensor([rank])).tolist() == list(range(world_size))


def test_a_peer_that_dies_in_set_up_leaves_no_open_file() -> None:
    class Dying:
        rank, world_size = 0, 2

        def gather_objects(self, value: Any, what: str) -> list[Any]:
            raise weft.PeerTimeout(0, 1, what, 1, 0.0)

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(weft.PeerTimeout):
        PosixMemory(4096, Dying())  # type: ignore[arg-type]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.ranks(2)
def test_check_peers_looks_at_buffers_of_the_user_too() -> None:
    """Their barriers are replayed by CUDA graphs as well. The status is as a GPU would tell it."""

    class Told:
        def check(self) -> None:
            raise weft.PeerTimeout(0, 1, "barrier", 1, 0.0)

        def close(self) -> None:
            pass

    buffer = collectives.empty((4,))
    collectives.check_peers()
    buffer.report = Told()  # type: ignore[assignment]
    with pytest.raises(weft.PeerTimeout, match="barrier"):
        collectives.check_peers()
    buffer.close()
    collectives.check_peers()


@pytest.mark.ranks(2)
def test_memory_of_destroyed_groups_is_given_back() -> None:
    pg = dist.new_group()
    collectives.all_reduce(torch.ones(2), pg)
    kept = weakref.ref(workspace(pg).buffer)
    dist.destroy_process_group(pg)
    collectives.resolve(dist.new_group())
    gc.collect()
    assert kept() is None
    mesh = dist.DeviceMesh.from_group(pg := dist.new_group(), "cpu")
    dist.destroy_process_group(pg)
    with pytest.raises(RuntimeError, match=r"destroy_process_group\(\) has ended it"):
        collectives.all_reduce(torch.ones(2), mesh)
    mesh = dist.DeviceMesh("cpu", [0])
    if dist.get_rank() > 0:
        with pytest.raises(ValueError, match="only its members may make the call"):
            collectives.all_reduce(torch.ones(2), mesh)


@pytest.mark.ranks(2)
def test_a_backend_named_by_device_shares_memory() -> None:
    pg = dist.new_group(backend="cpu:gloo")
    assert collectives.resolve(pg).why == ""
    assert collectives.empty((2,), group=pg).world_size == 2


@pytest.mark.ranks(3)
def test_weft_check_names_the_rank_that_differs() -> None:
    rank = dist.get_rank()
    os.environ["WEFT_CHECK"] = "1"
    try:
        x = torch.ones(4, 6)
        collectives.all_reduce(x)
        with pytest.raises(weft.MismatchError, match=r"but all_reduce\(sum\) of \[3, 6\].* rank 1"):
            collectives.all_reduce(x if rank != 1 else x[:3])
        with pytest.raises(weft.MismatchError, match=r"but reduce_scatter.* on rank 2"):
            if rank == 2:
                collectives.reduce_scatter(x)
            else:
                collectives.all_reduce(x)
        with pytest.raises(weft.MismatchError, match=r"but matmul_all_reduce.*float64.* rank 0"):
            y = x.double() if rank == 0 else x
            weft.matmul_all_reduce(y, y.t())
        with (
            pytest.raises(weft.MismatchError, match=r'but .* on the "host" engine on rank 1'),
            weft.engine("host" if rank == 1 else "auto"),
        ):
            weft.matmul_all_reduce(x, x.t())
        weft.matmul_all_reduce(x, x.t())
        splits = [2] * 3 if rank == 1 else None
        with pytest.raises(weft.MismatchError, match=r"equal shares of 6 .* given on rank 1"):
            collectives.all_to_all(x.t(), splits, splits)
        sizes = [4, 4, 4] if rank else [4, 4, 5]
        heads = x.view(1, 1, 4, 6)
        for call in (
            lambda: collectives.all_gather(x, sizes=sizes),
            lambda: weft.all_gather_matmul(x, x.t(), sizes=sizes),
            lambda: weft.ring_attention(heads, heads, heads, sizes=sizes),
        ):
            with pytest.raises(weft.MismatchError, match=r"\[4, 4, 5\].* on rank 0"):
                call()
    finally:
        del os.environ["WEFT_CHECK"]


def test_a_rank_that_fails_amid_a_call_of_a_stream(own_ranks) -> None:
    """No rank takes another call's data for this one's, nobody waits, and a new start helps."""
    for rank, (told, right) in enumerate(own_ranks(3).run(broken_off_body, timeout_s=50)):
        assert told[0] == "no room" if rank == 0 else "rank 0 has failed or was" in told[0]
        assert all("until all of its ranks have called weft.close()" in text for text in told[1:])
        assert (len(told), right) == (3, 3)


class OwnPad:
    """As much of a symmetric buffer as a wait looks at."""

    rank, world_size, group = 0, 2, None

    def __init__(self) -> None:
        self.own = [0] * pad.KERNEL_SLOTS

    def words(self, rank: int) -> list[int]:
        return self.own


@pytest.mark.parametrize("yield_us, slept", [(1, False), (4000, True)])
def test_who_has_lost_a_core_by_yielding_sleeps(
    monkeypatch: pytest.MonkeyPatch, yield_us: int, slept: bool
) -> None:
    """A peer's signal comes after 1 ms, twice; another program takes 4 ms of each yielded core."""
    now, done = 0, []
    buffer = OwnPad()
    waiter = Waiter(buffer, timeout=1)  # type: ignore[arg-type]

    def passes(us: int, what: str) -> None:
        nonlocal now
        now += us
        done.append(what)
        if now >= sent_at + 1000:
            buffer.own[pad.HOST_SLOTS + pad.LINE] = value

    def clock() -> float:
        nonlocal now
        now += 1
        return now * 1e-6

    monkeypatch.setattr(os, "sched_yield", lambda: passes(yield_us, "yields"))
    monkeypatch.setattr(time, "sleep", lambda s: passes(round(s * 1e6), "sleeps"))
    monkeypatch.setattr(time, "perf_counter", clock)
    for value in (1, 2):
        sent_at = now
        done.clear()
        waiter.wait(1, value, "test")
    assert set(done) == {"sleeps" if slept else "yields"}


def test_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="WEFT_TIMEOUT_S must be a number"):
        weft.settings.timeout_s()
    monkeypatch.setenv("WEFT_TIMEOUT_S", "inf")  # kernels count ns in 64 bits
    forever = signals.nanoseconds(weft.settings.timeout_s())
    assert 1 << 60 < forever < 1 << 63
    for name in weft.settings.VARIABLES:
        monkeypatch.setenv(name, "")
    assert (weft.settings.timeout_s(), weft.settings.current_engine()) == (600.0, "auto")
    assert weft.settings.cache_dir() == Path("~/.cache/weft").expanduser()
    assert weft.settings.direct_reads() and not weft.settings.check_calls()
    assert not weft.settings.multimem()
    monkeypatch.setenv("WEFT_MULTIMEM", "false")
    with pytest.raises(ValueError, match="WEFT_MULTIMEM must be 0 or 1, got 'false'"):
        weft.settings.multimem()
    with pytest.raises(ValueError, match="engine must be one of"):
        weft.engine("fast").__enter__()  # type: ignore[arg-type]
    monkeypatch.setenv("WEFT_ENGINE", "fast")
    with pytest.raises(ValueError, match="WEFT_ENGINE must be one of auto"):
        weft.settings.current_engine()


def test_no_process_group_is_a_clear_error() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        collectives.all_reduce(torch.ones(1))
