"""Exchanges: one call on a workspace, seen from the host.

    with exchange(group, nbytes, op) as ex:         rank 0                      rank 1
        ex.local(shape, dtype).copy_(x)             write own half              write own half
        ex.signal_all()                             generation g ------------>  (release)
        ex.wait(peer)                               (acquire)  <--------------  generation g
        y = ex.peer(peer, shape, dtype) @ w         read peer's half in place
                                                    leave: wait for the others
On the CPU, signals are words in shared memory that ranks poll. On a GPU they are small kernels in
the current stream: the host never waits, and the block only enqueues.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from contextlib import suppress

import torch

from weft.collectives.device.launches import under_way
from weft.collectives.memory.workspace import Workspace, workspace
from weft.collectives.ranks import pad, waits
from weft.collectives.ranks.flight import GENERIC, HOST, Call, call_of
from weft.collectives.ranks.group import Group, GroupLike, resolve, unwatched
from weft.collectives.ranks.set_up import gather_words
from weft.errors import MismatchError, PeerTimeout, WeftError

_CPU = torch.device("cpu")
_END_WORD = pad.LINE - 1  # of virtual ranks' lines
_FAILED = -1  # in place of the signature of a call


class Exchange:
    """One call on a workspace on the CPU. Made by `exchange`.

    Each signal is accompanied by the hash of the whole call, so that ranks whose calls differ do
    not add up or return unrelated data.
    """

    def __init__(self, ws: Workspace, op: str, call: Call | None = None, noted: int = -1) -> None:
        self.rank, self.world_size, self.op = ws.rank, ws.world_size, op
        self._ws, self._noted, self.generation = ws, noted, 0
        self._pending = set(ws.peers)
        self._call = call.hash if call is not None and ws.addresses else None

    def __enter__(self) -> Exchange:
        ws = self._ws
        self._check()
        self._waiter = ws.waiter
        if self._call is not None:
            self._waiter.call, ws.hosted = self._call, True
        self.generation = ws.own[pad.GENERATION] + 1
        ws.own[pad.GENERATION] = self.generation
        ws.group.calls.runs(HOST, self.generation)
        self._parity = self.generation & 1
        return self

    def _check(self) -> None:
        try:
            self._ws.check(self.op)
        except WeftError:
            self._ws.group.calls.end(self._noted, failed=True)
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = True
        try:
            if kind is None:
                self.wait_all()
                failed = False
            elif self._ws.addresses and not issubclass(kind, Exception):
                self._waiter.break_off()
            elif self._call is not None and kind is not PeerTimeout:
                self._abandon()
        finally:
            self._ws.group.calls.end(self._noted, failed)

    def _abandon(self) -> None:
        """Tell the peers that this rank has failed during the call.

        It may go on to other calls, whose signals they must not take for this one's.
        """
        self._call = _FAILED
        self._signal_others()
        with suppress(WeftError):  # this rank's own error is more useful
            self._told_by_all()

    def _signal_others(self) -> None:
        """`signal` to those who have not had it: all ranks must get through the call."""
        for peer in self.peers():
            if self._waiter.words[peer][pad.HOST_SLOTS + pad.LINE * self.rank] < self.generation:
                self.signal(peer)

    def local(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """This rank's memory of this call, `offset` bytes in."""
        return self._ws.tensor(self.rank, self._parity, shape, dtype, offset)

    def peer(
        self, peer: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0
    ) -> torch.Tensor:
        """`peer`'s memory of this call, read or written in place. Valid inside the block."""
        return self._ws.tensor(peer, self._parity, shape, dtype, offset)

    def put(self, source: torch.Tensor, start: int, stop: int, offset: int = 0) -> None:
        """Copy elements `start` to `stop` of the contiguous `source` into this rank's memory.

        They go to `offset`, in bytes. Small copies by address take a tenth of the time of an op.
        """
        self._copy(source, start, stop, self.rank, offset, write=True)

    def get(self, peer: int, into: torch.Tensor, start: int, stop: int, offset: int = 0) -> None:
        """Copy from `peer`'s memory, `offset` bytes in, to elements `start` to `stop` of the
        contiguous `into`.
        """
        self._copy(into, start, stop, peer, offset, write=False)

    def _copy(
        self, x: torch.Tensor, start: int, stop: int, rank: int, offset: int, write: bool
    ) -> None:
        ws = self._ws
        if ws.addresses:
            size = x.element_size()
            if offset < 0 or offset + (stop - start) * size > ws.half_bytes:
                raise ValueError(f"{stop - start} elements at {offset=} do not fit the workspace")
            here = x.data_ptr() + start * size
            there = ws.addresses[rank] + self._parity * ws.half_bytes + offset
            to, of = (there, here) if write else (here, there)
            ctypes.memmove(to, of, (stop - start) * size)
            return
        part = x.view(-1)[start:stop]
        shared = ws.tensor(rank, self._parity, (stop - start,), x.dtype, offset)
        if write:
            shared.copy_(part)
        else:
            part.copy_(shared)

    def signal(self, peer: int) -> None:
        """Publish to `peer` all that this rank has written."""
        if self._call is not None:
            word = pad.call_word(self.rank, self.generation)
            self._waiter.words[peer][word] = self._call
        self._waiter.post(peer, self.generation)

    def signal_all(self) -> None:
        """`signal` to every peer, the next in rank order first."""
        for peer in self.peers():
            self.signal(peer)

    def wait(self, peer: int) -> None:
        """Wait until `peer` has signalled: what it wrote before is then visible.

        Raises:
            PeerTimeout: it did not signal in time, or died.
            MismatchError: it makes another call or one of other sizes, or has failed during this
                one.
        """
        if peer in self._pending:
            self._waiter.wait(peer, self.generation, self.op)
            self._pending.discard(peer)
            mine = self._call
            if mine is not None and self._told_by(peer) != mine:
                self._refuse(peer, mine)

    def _told_by(self, peer: int) -> int:
        return self._ws.own[pad.call_word(peer, self.generation)]

    def _refuse(self, peer: int, mine: int) -> None:
        """Raise that `peer` makes another call than `mine`, once all have come to this one."""
        told = {peer: self._told_by(peer)}
        self._signal_others()
        _answer(self._ws, self.generation, told, mine)
        told |= self._told_by_all()
        self._call = None
        if told[peer] == _FAILED:
            raise MismatchError(
                f"{self.op}: rank {peer} failed during the call; its own error tells why. "
                f"The next call finds all ranks in step"
            )
        raise MismatchError(_differ(self._ws.group, told | {self.rank: mine}))

    def _told_by_all(self) -> dict[int, int]:
        """What the peers say that they call which have not been waited for: the next call needs
        all signals of this one."""
        told = {}
        for peer in sorted(self._pending):
            self._waiter.wait(peer, self.generation, op=self.op)
            self._pending.discard(peer)
            told[peer] = self._told_by(peer)
            _answer(self._ws, self.generation, {peer: told[peer]}, self._waiter.call)
        return told

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, which holds what peers have sent, or will until the call ends, and has no gaps.

        A call in a stream goes on if a wait fails; then `x` becomes NaN at its end. Integers stay
        as they are; an error tells either way.
        """
        return x

    def absent(self) -> list[int]:
        """The peers that have not signalled yet; none if that cannot be seen from the host."""
        if not self._ws.addresses:
            return []
        slots = {peer: pad.HOST_SLOTS + pad.LINE * peer for peer in self.peers()}
        return sorted(p for p, slot in slots.items() if self._ws.own[slot] < self.generation)

    def wait_all(self) -> None:
        """`wait` for every peer that has not been waited for."""
        for peer in sorted(self._pending):
            self.wait(peer)

    def peers(self) -> list[int]:
        """The other ranks: rank + 1 first, so that not all ranks read from one."""
        return self._ws.peers


class _VirtualStreamExchange(Exchange):
    """A `StreamExchange` of virtual ranks that stand for GPUs: it ends with a barrier."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for peer in self.peers():
                self._waiter.post(peer, self.generation, word=_END_WORD)
            for peer in self.peers():
                self._waiter.wait(peer, self.generation, self.op, word=_END_WORD)


class StreamExchange(Exchange):
    """One call on a workspace on a GPU: each step is enqueued in the current stream.

    A captured graph may be replayed with either parity, so calls end with a barrier instead of
    alternating halves.
    """

    def __enter__(self) -> Exchange:
        from weft.collectives.device import stream_signals

        self._signals, self._parity = stream_signals, 0
        self._results: list[torch.Tensor] = []
        self._check()
        self._ws.group.calls.runs(HOST, stream=self._ws.stream)
        stream_signals.begin(self._ws)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._signals.end_in_stream(self._ws, self._results)
            self._ws.launched(self.op)
        elif kind is not PeerTimeout:
            self._abandon()
        self._ws.group.calls.end(self._noted, failed=kind is not None)

    def _abandon(self) -> None:
        """This rank has failed amid the call. Peers may have enqueued calls ahead, and streams do
        not compare them: that ends the workspace for all, as a rank that is gone does."""
        if self._ws.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # nothing has run
        with suppress(RuntimeError):  # the error of this rank tells more
            self._ws.break_off()
            self.signal_all()
            self._signals.end_in_stream(self._ws)
            self._ws.launched(self.op)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point() or x.is_complex():
            self._results.append(x)
        return x

    def signal(self, peer: int) -> None:
        """Publish to `peer` all that the stream has written."""
        self._signals.post(self._ws, peer)

    def signal_all(self) -> None:
        """`signal` to every peer."""
        self._signals.post(self._ws, self.rank + 1, self.world_size - 1)

    def wait(self, peer: int) -> None:
        """Hold the stream until `peer` has signalled."""
        if peer in self._pending:
            self._signals.wait_in_stream(self._ws, peer)
            self._pending.discard(peer)

    def wait_all(self) -> None:
        """`wait` for every peer that was not waited for yet."""
        if 0 < len(self._pending) == self.world_size - 1:
            self._signals.wait_in_stream(self._ws, self.rank + 1, self.world_size - 1)
            self._pending.clear()
        super().wait_all()


def exchange(
    group: GroupLike,
    nbytes: int,
    op: str,
    device: torch.device = _CPU,
    *,
    channel: str = "exchange",
    told: tuple[Hashable, ...] = (),
    call: Call | None = None,
) -> Exchange:
    """One call in which every rank of `group` offers `nbytes` of symmetric memory to the others.

    Args:
        nbytes: room a rank, the same on every rank.
        op: name of the call, for errors.
        channel: calls under way at the same time need different ones.
        told: what else must be the same on every rank: shapes, dtypes, dims.
        call: the call that this is a part of, if its caller has noted that: see `flight`.

    Every rank must signal every peer exactly once in the block; leaving it waits for the peers that
    were not waited for.
    """
    group = resolve(group)
    noted = -1
    if call is None:
        call = call_of(op, told, channel, nbytes)
        noted = group.calls.begin(call)  # before memory is made, which peers may not come to
    ws = workspace(group, nbytes, channel=channel, device=device)
    return exchange_on(ws, op, device, call=call, noted=noted)


def exchange_on(
    ws: Workspace,
    op: str,
    device: torch.device,
    told: tuple[Hashable, ...] = (),
    call: Call | None = None,
    noted: int = -1,
) -> Exchange:
    """One call on a workspace, of tensors on `device`.

    Args:
        told, call: as in `exchange`.
        noted: its number, if the caller has noted the call for this exchange to end.
    """
    if call is None:
        call = call_of(op, told, ws.name)
        noted = ws.group.calls.begin(call)
    if ws.addresses:
        return Exchange(ws, op, call, noted)
    if device.type != "cpu":
        return StreamExchange(ws, op, call, noted)
    kind = _VirtualStreamExchange if ws.group.on_gpus(device) else Exchange
    return kind(ws, op, call, noted)


def _answer(ws: Workspace, generation: int, told: dict[int, int], call: int) -> None:
    """Answer those who are in another call: see `waits`."""
    group = ws.group
    stay = {
        group.processes[rank].pid: ws.own[pad.call_word(rank, generation) - 1]
        for rank, each in told.items()
        if each != _FAILED and each & waits.STAYS
    }
    waits.answer(stay, call)


def _differ(group: Group, told: dict[int, int]) -> str:
    """What ranks have called, given what they have told."""
    known = {rank: each & ~waits.STAYS for rank, each in told.items() if each != _FAILED}
    return group.calls.differ(known)


def agree(
    group: GroupLike,
    op: str,
    value: int,
    told: tuple[Hashable, ...] = (),
    call: Call | None = None,
) -> list[int]:
    """Every rank's `value`, in rank order, after checking that all make the same call `op`.

    Uses host memory only, whatever the tensors' device: 3 us on top of waiting for the last rank.
    Ranks that share none, as on several hosts, make a small collective of their process group.

    Args:
        told: what must be the same on every rank beside `op`: dtypes, fixed sizes.
        call: as in `exchange`.

    Raises:
        MismatchError: on every rank, if one's call differs.
    """
    group = resolve(group)
    if group.world_size == 1:
        return [value]
    if under_way.agreed and call is None:  # a moment ago, by a call that was to be repeated
        (asked, values), *more = under_way.agreed
        under_way.agreed = (*more,)
        assert asked == (op, value, told), f"{asked} was agreed on, not {(op, value, told)}"
        return [*values]
    noted, notes = -1, call is None
    if call is None:
        call = call_of(op, told, "")
        noted = group.calls.begin(call)
    try:
        values = _agreed(group, op, value, call)
    except BaseException:
        group.calls.end(noted, failed=True)
        raise
    group.calls.end(noted)
    if under_way.watched is not None and notes:
        # Made again, a call agrees before all else.
        under_way.watched.refused |= bool(under_way.watched.begun)
        under_way.watched.agreed.append(((op, value, told), values))
    return values


def _agreed(group: Group, op: str, value: int, call: Call) -> list[int]:
    if group.unreached(_CPU):
        group.calls.runs(GENERIC)
        with unwatched(group):
            values, hashes = zip(*gather_words(group, op, [value, call.hash]), strict=True)
        if len(set(hashes)) > 1:
            group.gather_objects(None, call.text.decode())  # which finds out who differs
        return [*values]
    ws = workspace(group, channel="agree", device=_CPU)
    ws.check(op)
    # A pared-down `Exchange`: two words of the cache line that holds the signal, so that there is
    # one message and no data to fetch.
    waiter, own, signature = ws.waiter, ws.own, call.hash
    if ws.addresses:
        waiter.call, ws.hosted = signature, True
    generation = own[pad.GENERATION] = own[pad.GENERATION] + 1
    group.calls.runs(HOST, generation)
    mine = pad.call_word(ws.rank, generation)
    for words in waiter.words:
        words[mine - 1], words[mine] = value, signature
    waiter.meet(ws.peers, generation, op)
    first = pad.call_word(0, generation)
    end = first + pad.LINE * ws.world_size
    if own[first : end : pad.LINE].tolist().count(signature) != ws.world_size:
        calls = {rank: own[pad.call_word(rank, generation)] for rank in range(ws.world_size)}
        _answer(ws, generation, calls, signature)
        raise MismatchError(_differ(group, calls))
    told: list[int] = own[first - 1 : end - 1 : pad.LINE].tolist()
    return told
