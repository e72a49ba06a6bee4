"""Workspaces: symmetric memory that calls share, allocated once and grown when a call needs more.

A workspace belongs to a (group, device, channel). Its data are two halves, used in turn: call
number g (its *generation*) writes half g % 2, so that no call needs a barrier at its end; the rules
behind that are in `weft.collectives.device.signals`. Calls that overlap in time, like the gather
and the scatter of one backward, use two channels.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weft import settings
from weft.collectives.device.launches import under_way
from weft.collectives.memory.symmetric import (
    SymmetricBuffer,
    close_buffers,
    device_for,
    open_buffers,
)
from weft.collectives.ranks import caches, pad, reports, waits
from weft.collectives.ranks.caches import KeptDict
from weft.collectives.ranks.flight import TRITON, Call, call_of
from weft.collectives.ranks.group import (
    Group,
    GroupLike,
    forget_meshes,
    here,
    kept_by_group,
    resolve,
    unwatched,
)
from weft.errors import WeftError

_ALIGN = 4096
_VECTOR = 16  # bytes to which the addresses of halves are aligned at least
_SMALLEST_HALF = 256 << 10


_Results = Sequence[torch.Tensor]
_Repeat = Callable[[Hashable, Sequence["torch.Tensor | None"], Callable[[], _Results]], _Results]


class Workspace:
    """Symmetric memory of one (group, device, channel), and its signals.

    Attributes:
        group, rank, world_size, device: as in `SymmetricBuffer`.
        peers: the other ranks, as `Group.peers` orders them.
        buffer_ptrs, signal_ptrs: int64 tensors (world_size,): each rank's data, each rank's pad.
        half_bytes: capacity of one call on each rank; half g % 2 starts at (g % 2) * half_bytes.
        addresses: of each rank's data if the host can use them, else empty.
        hosted: whether CPU ranks have met here by signals of the host.
        captured: whether a CUDA graph refers to this memory.
        on_host: whether it is memory of the CPU.
        failed: the op of a call that this rank began and did not make; else empty.
        retired: whether another workspace has taken its place.
    """

    def __init__(self, group: Group, device: torch.device, half_bytes: int, name: str) -> None:
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.device, self.half_bytes, self.name = device, half_bytes, name
        self.peers = group.peers()
        self.buffer = SymmetricBuffer((2 * half_bytes,), torch.uint8, group, device, name)
        self.buffer_ptrs, self.signal_ptrs = self.buffer.buffer_ptrs, self.buffer.signal_ptrs
        self._views = KeptDict[tuple[object, ...], torch.Tensor](512)
        # The host may copy to and from these; accesses of virtual ranks must be visible as ops.
        self.on_host = device.type == "cpu"
        plain = self.on_host and group.virtual is None
        self.addresses: list[int] = self.buffer_ptrs.tolist() if plain else []
        if self.on_host:
            self.waiter = self.buffer.waiter()
            self.own = self.waiter.own
        if plain and group.world_size > 1:
            self._pids = {each.pid: rank for rank, each in enumerate(group.processes)}
            waits.meet_on(self)
        self.hosted = False
        self.captured = False
        self._repeated: _Repeat | None = None
        self._launches: dict[float, dict[Hashable, Callable[[], object]]] = {}
        self.failed, self.retired = "", False

    @property
    def stream(self) -> int:
        """The current stream, as CUDA names it; 0 on the host."""
        if self.device.type != "cuda":
            return 0
        return _handle(self.device)

    @property
    def timeout_ns(self) -> int:
        """How long a kernel polls a signal before it gives up."""
        from weft.collectives.device import signals

        return signals.nanoseconds(settings.timeout_s())

    def tensor(
        self, rank: int, parity: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0
    ) -> torch.Tensor:
        """A tensor on `rank`'s memory, in the half of `parity`. Kept, as making one takes 4 us."""
        key = (rank, parity, shape, dtype, offset)
        view = self._views.get(key)
        if view is None:
            with unwatched(self.group):
                view = self._views[key] = self.buffer.get_buffer(
                    rank, shape, dtype, parity * self.half_bytes + offset
                )
        return view

    def call(self, op: str, told: tuple[Hashable, ...] = (), call: Call | None = None) -> OneCall:
        """For the launches of a call: `check` before them, `launched` after.

        Kernels of CPU ranks take milliseconds in the interpreter: these compare their calls first.

        Args:
            told: what must be the same on every rank beside `op`, to be noted: see `flight`.
            call: the call that this is a part of, if its caller has noted that.

        If this rank fails inside, say for lack of memory, its next call waits until its peers have
        failed likewise: otherwise they are in this call still, or past it, and would take the next
        one's data for this one's.
        """
        if call is None:
            return OneCall(self, op, call_of(op, told, self.name), notes=True)
        return OneCall(self, op, call, notes=False)

    def agree(self, op: str, call: Call) -> None:
        """Wait for all ranks, which compare their calls."""
        from weft.collectives.memory.exchange import agree

        agree(self.group, op, 0, call=call)

    def repeat(
        self,
        key: Hashable,
        operands: Sequence[torch.Tensor | None],
        make: Callable[[], Sequence[torch.Tensor]],
    ) -> Sequence[torch.Tensor]:
        """The results of `make()`, whose launches are kept: see `weft.collectives.device.launches`.

        Inside `call`. Virtual ranks that run at the same time keep step in each launch, so that
        theirs are made anew.

        Args:
            key: all that `make` goes by, such as the layouts of `operands`.
            operands: all tensors that it is given.
            make: makes all launches of the call, and returns new tensors.
        """
        if self._repeated is None:
            self._repeated = self._repeater()
        return self._repeated((key, settings.timeout_s(), settings.sms()), operands, make)

    def forget_launches(self) -> None:
        """Let calls be made anew, and kept once more: `repeat` and `kept_launches`."""
        self._repeated = None
        self._launches.clear()

    def _repeater(self) -> _Repeat:
        from weft.collectives.device import launches, signals

        virtual = self.group.virtual
        if signals.INTERPRETED or (virtual is not None and virtual.sharing > 1):
            return lambda key, operands, make: make()
        return launches.Repeated(self.device, [self.buffer_ptrs, self.signal_ptrs]).call

    @property
    def is_open(self) -> bool:
        """Whether its memory has not been freed."""
        return self.buffer.is_open

    def kept_launches(self) -> dict[Hashable, Callable[[], object]]:
        """What `launch_kept` keeps for this workspace, by the time-out that is set now."""
        timeout_s = settings.timeout_s()
        if timeout_s not in self._launches:
            self._launches[timeout_s] = KeptDict(1024)
        return self._launches[timeout_s]

    def lacks(self, pid: int) -> bool:
        """Whether the process `pid` has begun a call here that this rank has not."""
        rank, next_call = self._pids.get(pid), self.own[pad.GENERATION] + 1
        return (
            self.hosted
            and rank is not None
            and self.waiter.words[rank][pad.GENERATION] == next_call
        )

    def answer(self, call: int, number: int) -> None:
        """Take part in the next call here by telling all ranks that this one makes `call`, and the
        `number` of its calls."""
        generation = self.own[pad.GENERATION] = self.own[pad.GENERATION] + 1
        word = pad.call_word(self.rank, generation)
        for peer in self.peers:
            words = self.waiter.words[peer]
            words[word - 1], words[word] = number, call
            self.waiter.post(peer, generation)

    def check(self, op: str) -> None:
        """Begin a call: raise `PeerTimeout` if a wait here has timed out, on any rank, or
        `MismatchError` if a rank has failed amid a call of a stream, or makes other ones.

        On a GPU that is what kernels have told of so far, on any memory of this process: it never
        stops the host, so the error may be raised by a later call. What is enqueued next runs after
        the previous call of this rank on this GPU, on whatever channel and in whatever stream.
        """
        self.buffer.check_open()
        self.check_peers(op)
        if not self.on_host:
            self.group.calls.check()
            self.captured |= _after_calls_before(self.device)

    def check_peers(self, op: str) -> None:
        """Raise `PeerTimeout` if a wait here has timed out, on any rank."""
        if self.on_host:
            self.waiter.check(op)
        else:
            self.buffer.check_report(op)

    def launched(self, op: str) -> None:
        """The end of a call on the host; call it after launching kernels."""
        if self.on_host:
            self.waiter.check(op)
        else:
            _note_call(self.device)

    def break_off(self) -> None:
        """Tell all ranks in the current stream, this one as well, that this one has failed amid a
        call."""
        told = pad.status_word(pad.FAILED, self.rank, self.rank, 0)
        for rank in range(self.world_size):
            self.buffer.status_of(rank).fill_(told)


class OneCall:
    """A call on a workspace, as `Workspace.call` tells. A class, as a generator takes 1 us longer.

    Args:
        notes: whether the call is noted here, and not by what it is a part of.
    """

    __slots__ = ("_call", "_noted", "_notes", "_op", "_ws")

    def __init__(self, ws: Workspace, op: str, call: Call, notes: bool) -> None:
        self._ws, self._op, self._call, self._notes, self._noted = ws, op, call, notes, -1

    def __enter__(self) -> None:
        ws, op = self._ws, self._op
        calls = ws.group.calls
        if under_way.watched is not None:
            under_way.watched.begun.append((ws, op, self._call, self._notes))
        if self._notes:
            self._noted = calls.begin(self._call)
        try:
            ws.check(op)
        except WeftError:
            calls.end(self._noted, failed=True)
            raise
        if ws.failed:
            # Not noted: ranks come here one by one, as they have failed.
            ws.agree(op, call_of(op, (("after a failed", ws.failed),)))
            ws.buffer.pad_of(ws.rank)[pad.CLAIM].zero_()  # of kernels that were not launched
            ws.failed = ""
        if ws.addresses:
            ws.agree(op, self._call)
        calls.runs(TRITON, stream=ws.stream)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        ws = self._ws
        if error is None:
            ws.launched(self._op)
            ws.group.calls.end(self._noted)
            return
        captured = not ws.on_host and torch.cuda.is_current_stream_capturing()
        if isinstance(error, Exception):
            if not captured:
                ws.failed = self._op
        # Of a signal's handler: peers are told, no call of theirs waits for us.
        elif ws.addresses:
            ws.waiter.break_off()
        elif not ws.on_host and not captured:
            ws.break_off()
        ws.group.calls.end(self._noted, failed=True)


@dataclass
class _Last:
    """The last call of a rank on a GPU.

    Attributes:
        stream: in which it was made, or captured.
        handle: of that stream.
        end: recorded behind it, once there have been calls in several streams.
    """

    stream: torch.cuda.Stream
    handle: int
    end: torch.cuda.Event | None = None
    several: bool = False


_last_calls: dict[tuple[torch.device, int, bool], _Last] = {}


def _handle(device: torch.device) -> int:
    """The current stream, as CUDA names it: in a tenth of the time of an object for it."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def _key_of(device: torch.device) -> tuple[torch.device, int, bool]:
    captured = torch.cuda.is_current_stream_capturing()
    return device, here.world.rank if here.world else 0, captured


def _after_calls_before(device: torch.device) -> bool:
    """Have what is enqueued next on a GPU run after the calls that this rank has made there before.

    Calls in two streams could otherwise run in one order on one rank and in the other order on
    another, each on all cores, waiting for each other. A graph is ordered in itself; what it runs
    beside is up to the streams in which it is replayed.

    Returns whether the current stream is being captured.
    """
    key, handle = _key_of(device), _handle(device)
    captured = key[-1]
    last = _last_calls.get(key)
    if last is None:
        _last_calls[key] = _Last(torch.cuda.current_stream(device), handle)
    elif last.handle != handle:
        stream = torch.cuda.current_stream(device)
        if last.end is not None:
            stream.wait_event(last.end)  # not for what was enqueued behind that call
        else:
            with torch.cuda.stream(last.stream):
                same = torch.cuda.is_current_stream_capturing() == captured
            if same:  # neither one that an earlier graph was captured in nor one captured since
                stream.wait_stream(last.stream)
        _last_calls[key] = _Last(stream, handle, several=not captured)
    return captured


def _note_call(device: torch.device) -> None:
    """The end of a call in the current stream. It costs an event only where streams take turns."""
    last = _last_calls.get(_key_of(device))
    if last is not None and last.several:
        last.end = torch.cuda.Event()
        last.end.record(torch.cuda.current_stream(device))


def check_room(ws: Workspace, nbytes: int, ask: str) -> None:
    """Raise ValueError unless `ws` has room for a call of `nbytes`, which `ask` computes."""
    if nbytes > ws.half_bytes:
        raise ValueError(
            f"the workspace must hold {nbytes} bytes a call, got {ws.half_bytes=}; ask for {ask}"
        )


class Link(NamedTuple):
    """How a kernel reaches its peers: see `weft.collectives.device.signals`.

    Triton passes named tuples to kernels, and on to their functions, field by field.
    """

    buffer_ptrs: Any
    signal_ptrs: Any
    half_bytes: Any
    timeout_ns: Any


def link_of(ws: Workspace) -> Link:
    """How kernels reach the peers of `ws`."""
    return Link(ws.buffer_ptrs, ws.signal_ptrs, ws.half_bytes, ws.timeout_ns)


_workspaces: dict[tuple[Group, torch.device, str], Workspace] = {}
kept_by_group.append(_workspaces)
_outgrown: list[Workspace] = []  # replaced, but still used by CUDA graphs


def workspace(
    group: GroupLike = None,
    nbytes: int = 0,
    *,
    channel: str = "exchange",
    device: torch.device | str | None = None,
) -> Workspace:
    """The workspace of (`group`, `device`, `channel`) with room for `nbytes` a rank and call.

    Collective when it has to be made or to grow, so `nbytes` must be the same on every rank. Call
    it once with the largest size ahead of a CUDA-graph capture: growing is refused there. An
    all_reduce of at most 384 KiB may have a channel of its own: call one of these as well.

    Raises:
        RuntimeError: it would have to grow while a CUDA graph is captured.
        NotImplementedError: symmetric memory does not reach all of the group.
    """
    if isinstance(group, Group) and isinstance(device, torch.device):  # as in our own calls
        found = _workspaces.get((group, device, channel))
        if found is not None and found.half_bytes >= nbytes:
            return found
    group = resolve(group)
    on = device_for(group, device)
    key = (group, on, channel)
    found = _workspaces.get(key)
    if found is not None and found.half_bytes >= nbytes:
        return found
    if on.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the workspace for {channel!r} has room for {found.half_bytes if found else 0} bytes "
            f"and cannot grow to {nbytes} during CUDA-graph capture: run the call once before, or "
            f"weft.collectives.workspace(group, {nbytes}, channel={channel!r})"
        )
    had = found.half_bytes if found else 0
    if group.virtual is not None:  # no more than was asked for, to catch writes beyond it
        half = max(had, -(-max(nbytes, 1) // _VECTOR) * _VECTOR)
    else:
        half = max(_SMALLEST_HALF, had)
        while half < nbytes:
            half *= 2
        half = -(-half // _ALIGN) * _ALIGN
    # The old memory stays alive if a graph replays calls on it; nobody else writes to it any more.
    if found is not None:
        found.retired = True
        if found.captured:
            _outgrown.append(found)
    with unwatched(group):
        _workspaces[key] = Workspace(group, on, half, channel)
    return _workspaces[key]


def workspaces() -> list[Workspace]:
    """All that calls of this process use."""
    return [*_workspaces.values()]


def check_peers() -> None:
    """Raise if a call of this process has waited in vain for a rank, so its results are invalid.

    Or the barrier of a `SymmetricBuffer` on a GPU. Every call checks that first. A program that
    only replays CUDA graphs makes no calls: it should check here whenever it has waited for the
    GPU, say for the tokens of a step. Takes a few us of the host, and none of the GPU.

    Raises:
        PeerTimeout: naming the rank that did not come.
        MismatchError: naming the rank that has failed amid a call on a GPU.
    """
    world = here.world

    def is_mine(buffer: SymmetricBuffer) -> bool:
        if buffer.group.virtual is None:
            return world is None
        return world is not None and buffer.group.ranks[buffer.rank] == world.rank

    for ws in list(_workspaces.values()):
        if ws.device.type == "cpu" and is_mine(ws.buffer):
            ws.check_peers(ws.name)
    for buffer in open_buffers():  # those of workspaces, outgrown ones too, and the user's own
        if buffer.report is not None and is_mine(buffer):
            buffer.report.check()


def close() -> None:
    """Free all workspaces and symmetric buffers of this process, and all that it keeps for later
    calls: see `caches`.

    Call it on every rank while no call is in flight, before `destroy_process_group`. Later calls
    make new workspaces. It is not needed at exit: nothing outlives the processes.
    """
    if here.world is not None:
        forget(here.world.rank)
        return
    _outgrown.clear()
    _last_calls.clear()
    for kept in kept_by_group:
        kept.clear()
    for forget_mesh in forget_meshes:
        forget_mesh()
    caches.forget()
    close_buffers()
    reports.forget()


atexit.register(close)


def give_back(group: Group, channel: str, device: torch.device) -> None:
    """Free the workspace of a channel that is not needed again soon, on every rank of `group`."""
    found = _workspaces.pop((group, device_for(group, device), channel), None)
    if found is not None:
        found.retired = True


def forget(rank: int) -> None:
    """Drop the workspaces of virtual rank `rank`, and what else is kept by its groups."""

    def is_its(part: Any) -> bool:
        its = isinstance(part, Group) and part.virtual is not None
        return its and part.ranks[part.rank] == rank

    for kept in kept_by_group:
        for key in list(kept):
            if any(map(is_its, key if isinstance(key, tuple) else (key,))):
                kept.pop(key, None)
