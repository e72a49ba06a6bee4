"""Symmetric memory: the same-sized allocation on every rank, each rank able to address all of them.

    rank 0   [ pad | data ]      buffer_ptrs = address of every rank's data, as this rank sees it
    rank 1   [ pad | data ]      signal_ptrs = address of every rank's pad
      ...                        (addresses differ from rank to rank; the bytes are the same)

Two backends, chosen by the device: `posix` (CPU ranks of one host) and `cuda` (torch's own).
Virtual ranks bring a third.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from weft import settings
from weft.collectives.memory.backends import (
    CudaMemory,
    LocalMemory,
    Memory,
    PosixMemory,
    persistent,
)
from weft.collectives.memory.waiter import Waiter, told_by
from weft.collectives.ranks import flight, pad
from weft.collectives.ranks.group import Group, GroupLike, moves_gpu_tensors, resolve
from weft.collectives.ranks.reports import Report, check_all
from weft.errors import MismatchError


def device_for(group: Group, asked: torch.device | str | None) -> torch.device:
    """The device of a buffer of `group`: the one asked for, else where the group communicates.

    "cuda" becomes the current GPU, as one device must not have two names.
    """
    device = asked if isinstance(asked, torch.device) else torch.device(asked or "cpu")
    if not asked and group.virtual is not None:
        device = group.virtual.device
    elif not asked and group.backend == "cuda" and moves_gpu_tensors(group.pg):
        device = torch.device("cuda")
    if device.type == "cuda" and device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    return device


_open: weakref.WeakSet[SymmetricBuffer] = weakref.WeakSet()


class SymmetricBuffer:
    """The same `shape` and `dtype` on every rank of `group`, each addressable by all.

    Made by `collectives.empty`. Contents are undefined; signals are zero.

    Attributes:
        group, rank, world_size: the group, this rank's number in it, its size.
        device: where the memory lies.
        local: this rank's tensor, of the shape and dtype asked for.
        buffer_ptrs: int64 tensor (world_size,) on `device`: address of each rank's data.
        signal_ptrs: likewise, of each rank's signal pad (see `weft.collectives.ranks.pad`).
        multicast_ptr: address that reaches all ranks at once; 0 where the hardware has none.
    """

    # Tensors made in inference mode could not be written outside of it.
    @torch.inference_mode(False)
    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        group: Group,
        device: torch.device,
        channel: str = "",
    ) -> None:
        shape, error = tuple(shape), ""
        if any(size < 0 for size in shape):
            error = f"sizes must be >= 0, got shape={shape}"
        elif group.world_size > pad.MAX_RANKS:
            error = f"at most {pad.MAX_RANKS} ranks share memory, got {group.world_size}"
        elif device.type not in ("cpu", "cuda"):
            error = f"symmetric memory is on cpu or cuda, got {device=}"
        elif group.virtual is not None and device.type not in ("cpu", group.virtual.device.type):
            error = f"these virtual ranks have memory on cpu only, got {device=}"
        elif device.type == "cuda" and device.index != torch.cuda.current_device():
            error = (
                f"kernels run on the current GPU, number {torch.cuda.current_device()}, and the "
                f"tensors are on {device}: call torch.cuda.set_device({device.index}) first"
            )
        if why := group.unreached(device):
            raise NotImplementedError(
                f"symmetric memory does not reach all of {group}: {why}. Collectives and "
                f"fused ops use the process group instead."
            )
        if group.world_size > 1:
            spec: tuple[Any, ...] = shape, str(dtype), device.type
            if device.type == "cuda":  # kernels' grids follow from it
                spec += (f"WEFT_SMS={settings.sms() or 'all'}",)
            _agree_on_spec(group, spec, channel, error)
        elif error:
            raise ValueError(error)

        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.device = device
        self._offset = pad.pad_bytes(group.world_size)
        self._nbytes = math.prod(shape) * dtype.itemsize
        nbytes = -(-(self._offset + self._nbytes) // 4096) * 4096
        memory: Memory
        if group.virtual is not None:
            memory = group.virtual.memory(self.rank, self._offset, self._nbytes, device)
        elif group.world_size == 1:
            memory = LocalMemory(nbytes, device)
        elif device.type == "cpu":
            memory = PosixMemory(nbytes, group)
        else:
            memory = CudaMemory(nbytes, group, device)
        self._memory: Memory | None = memory
        self._segments = memory.segments
        self.multicast_ptr = memory.multicast_ptr and memory.multicast_ptr + self._offset
        pointers = [segment.data_ptr() for segment in self._segments]
        addresses = torch.tensor(pointers, device="cpu")
        self.signal_ptrs = persistent(addresses, device)
        self.buffer_ptrs = persistent(addresses + self._offset, device)
        self.local = self.get_buffer(self.rank, shape, dtype)
        self.report = self._reported()
        self._barriers: dict[int, int] = {}
        _open.add(self)

    @torch.inference_mode(False)  # in which a view of another dtype would be an inference tensor
    def get_buffer(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int = 0
    ) -> torch.Tensor:
        """A contiguous tensor on `rank`'s memory, `offset` bytes into its data.

        Raises:
            ValueError: it would reach outside the buffer, or `offset` is not aligned to `dtype`.
            RuntimeError: the buffer is closed.
        """
        self.check_open()
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {rank=}")
        if any(size < 0 for size in shape):
            raise ValueError(f"sizes must be >= 0, got shape={tuple(shape)}")
        nbytes = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset % dtype.itemsize or offset + nbytes > self._nbytes:
            raise ValueError(
                f"a tensor of {nbytes} bytes ({tuple(shape)}, {dtype}) at {offset=} must lie "
                f"inside the buffer's {self._nbytes} bytes and be aligned to {dtype.itemsize}"
            )
        start = self._offset + offset
        flat = self._segments[rank][start : start + nbytes]
        return flat.view(dtype).view(tuple(shape))

    def pad_of(self, rank: int) -> torch.Tensor:
        """The signal pad of `rank`, int64."""
        return self._segments[rank][: self._offset].view(torch.int64)

    def status_of(self, rank: int) -> torch.Tensor:
        """The word STATUS in the pad of `rank`, int64 (1,): see `pad.status_in`."""
        return self.pad_of(rank)[pad.STATUS : pad.STATUS + 1]

    def words(self, rank: int) -> memoryview:
        """The signal pad of `rank` as int64 words; CPU only.

        An aligned 8-byte access through it is one machine instruction, and a poll costs 50 ns.
        """
        segment = self._segments[rank][: self._offset]
        words: memoryview = memoryview(segment.numpy()).cast("q")  # type: ignore[arg-type]
        return words

    def waiter(self, timeout: float | None = None) -> Waiter:
        """Host-side signals on this buffer's pads; CPU only. `timeout` as in `barrier`."""
        if self.group.virtual is not None:
            return self.group.virtual.waiter(self)
        return Waiter(self, timeout)

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called."""
        return self._memory is not None

    def check_open(self) -> None:
        """Raise RuntimeError if `close` was called."""
        if not self.is_open:
            raise RuntimeError("this symmetric buffer is closed: make a new one")

    def _reported(self) -> Report | None:
        """Where kernels on this memory tell the host of failures; None in a simulation, which sees
        them itself.
        """
        virtual, on_gpu = self.group.virtual is not None, self.device.type == "cuda"
        if virtual and not on_gpu:
            return None
        processes = self.group.processes
        peers = {peer: processes[peer] for peer in self.group.peers()} if processes else {}
        told = partial(told_by, calls=self.group.calls, ranks=self.group.ranks)
        report = Report(self.rank, {} if virtual else peers, on_gpu, told)
        if on_gpu:
            report.compare = self.group.calls.compare
        weakref.finalize(self, report.close)
        own = self.pad_of(self.rank)
        own[pad.PADS].fill_(self.signal_ptrs.data_ptr())
        own[pad.RANKS].fill_(self.world_size)
        own[pad.REPORT].fill_(report.address)
        if on_gpu:  # the kernels of other streams read it, too
            torch.cuda.current_stream(self.device).synchronize()
        return report

    def check_report(self, op: str) -> None:
        """Begin the call `op` of kernels: raise if one has told of a failure, on this buffer or on
        another of this process.

        Raises:
            PeerTimeout, MismatchError, WeftError: see `told_by`.
        """
        if self.report is not None:
            self.report.check()  # the backward of a virtual rank runs in a thread of torch's
            check_all()
            self.report.op = op
            self.report.watch()

    def barrier(self, channel: int = 0, timeout: float | None = None) -> None:
        """Wait until every rank of the group has called this with the same `channel`.

        What any rank wrote before it is visible to every rank after it. `channel` (0 to 6)
        separates barriers that may be in flight at the same time. `timeout` is in seconds;
        WEFT_TIMEOUT_S if None. On a GPU it is ordered in the current stream and does not stop the
        host: a later call tells of a time-out.

        Raises:
            PeerTimeout: a rank did not come in time.
            ValueError: no such channel.
            RuntimeError: the buffer is closed.
        """
        self.check_open()
        if not 0 <= channel < pad.LINE - 1:
            raise ValueError(f"channel must be in 0..{pad.LINE - 2}, got {channel=}")
        if self.device.type == "cuda":
            from weft.collectives.device import stream_signals

            self.check_report("barrier")
            stream_signals.barrier_in_stream(self, channel, timeout)
            return
        generation = self._barriers[channel] = self._barriers.get(channel, 0) + 1
        waiter = self.waiter(timeout)
        call = flight.call_of("barrier of a symmetric buffer", (), f"{channel=}")
        with self.group.calls.noting(call):
            for peer in range(self.world_size):
                waiter.post(peer, generation, word=channel)
            for peer in range(self.world_size):
                waiter.wait(peer, generation, "barrier", word=channel)

    def close(self) -> None:
        """Give the memory back. Local: the other ranks keep theirs until they close it too."""
        self._memory, self._segments = None, []
        if self.report is not None:
            self.report.close()
        self.local = torch.empty(0, device="cpu")
        _open.discard(self)

    def __repr__(self) -> str:
        state = "closed" if self._memory is None else f"{self._nbytes} bytes on {self.device}"
        return f"SymmetricBuffer({state}, rank {self.rank} of {self.world_size})"


def _agree_on_spec(group: Group, spec: tuple[Any, ...], channel: str, error: str) -> None:
    mine = spec, channel, group.calls.under_way(), error
    specs = group.gather_objects(mine, "a symmetric buffer")
    for rank, (*_, text) in enumerate(specs):
        if text:
            raise ValueError(text if rank == group.rank else f"on rank {rank}: {text}")
    first, channel, first_call, _ = specs[0]
    for rank, (other, name, call, _) in enumerate(specs):
        if name != channel:
            calls = [first_call or channel or "empty", call or name or "empty"]
            raise MismatchError(
                f"the ranks make different calls: rank 0 called {calls[0]}; rank {rank} called "
                f"{calls[1]}"
            )
        if other != first:
            raise MismatchError(
                f"every rank must ask for the same symmetric memory: rank 0 asked for shape, "
                f"dtype, device = {first}, rank {rank} for {other}"
                + (f". They called {first_call} and {call}" if call != first_call else "")
            )


def empty(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    group: GroupLike = None,
    *,
    device: torch.device | str | None = None,
) -> SymmetricBuffer:
    """Allocate symmetric memory. Collective: every rank of `group` calls it with the same
    arguments.

    Args:
        shape, dtype: of each rank's tensor.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        device: "cpu" or "cuda"; by default where the group's process group communicates.

    Raises:
        MismatchError: the ranks asked for different things. Raised on every rank.
        NotImplementedError: symmetric memory does not reach all of the group.

    Example:
        >>> buffer = collectives.empty((4,), torch.float32)
        >>> buffer.local.fill_(buffer.rank)
        >>> buffer.barrier()
        >>> buffer.get_buffer(rank=1, shape=(4,), dtype=torch.float32)  # rank 1's memory, in place
    """
    group = resolve(group)
    return SymmetricBuffer(shape, dtype, group, device_for(group, device))


def open_buffers() -> list[SymmetricBuffer]:
    """Every buffer of this process that is not closed."""
    return list(_open)


def close_buffers() -> None:
    """Close every buffer of this process."""
    for buffer in open_buffers():
        buffer.close()
