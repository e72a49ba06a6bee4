"""The flight recorder: what every rank has called lately, in memory that the others can read.

A process keeps a ring of its last CALLS calls, in an anonymous file that its peers map when they
first meet. An error about a peer shows what that has called, also if it has died since.

The first ENTRY bytes hold the NUMBER of the last call, then come the entries:

    word      holds
    NUMBER    of the call among all of this process; 0 while the entry is written
    GROUP     hash of the group that makes it
    POSITION  of the call among those of the group: 1, 2, ...
    CALL      hash of all that must be the same on all ranks
    BEGAN     ns of the machine's clock
    ENDED     likewise; 0 while the call is under way
    TEXT      what CALL is the hash of, to be read

To note a call takes half a microsecond. Nobody is told anything: peers look only for an error.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

CALLS, ENTRY = 256, 256
_ENTRY = struct.Struct(f"6q{ENTRY - 6 * 8}s")
_WORDS, _ENDED = ENTRY // 8, 5
_MASK = (1 << 62) - 1
_BYTES = (CALLS + 1) * ENTRY


def _place(number: int) -> int:
    """In bytes."""
    return (number % CALLS + 1) * ENTRY


class Call(NamedTuple):
    """A call as all ranks must make it: its hash, and its words as they go into an entry."""

    hash: int
    text: bytes
    where: str


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _MASK


@lru_cache(maxsize=4096)
def call_of(op: str, told: tuple[Hashable, ...], where: str = "", nbytes: int = -1) -> Call:
    """The call of `op` with what is `told` of its arguments: shapes, dtypes, sizes.

    Args:
        told: values, or pairs of a name and a value.
        where: what else must agree: the engine, or the channel of the memory that is used.
        nbytes: of that memory.

    Example:
        all_gather, float32, [4], dim 1 (exchange, 64 bytes)
    """
    words = op + "".join(f", {_words(value)}" for value in told)
    if where:
        words += f" ({where})" if nbytes < 0 else f" ({where}, {nbytes} bytes)"
    return Call(_hash(words), words.encode(), where)


def _words(value: Hashable) -> str:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return f"{value[0]} {_words(value[1])}"
    return str(list(value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")


class FlightRecorder:
    """The ring of this process."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("weft calls")
        os.ftruncate(self.fd, _BYTES)
        self.ring = mmap.mmap(self.fd, _BYTES)
        self._words = memoryview(self.ring).cast("q")
        self._number = 0

    def note(self, group: int, position: int, call: Call) -> int:
        """Write an entry; its number in the ring, for `end`."""
        self._number = number = self._number + 1
        at, began = _place(number), time.monotonic_ns()
        _ENTRY.pack_into(self.ring, at, number, group, position, call.hash, began, 0, call.text)
        self._words[0] = number
        return number

    def end(self, number: int) -> None:
        """The call has ended."""
        self._words[(number % CALLS + 1) * _WORDS + _ENDED] = time.monotonic_ns()


_own: FlightRecorder | None = None


def recorder() -> FlightRecorder:
    """That of this process."""
    global _own
    if _own is None:
        _own = FlightRecorder()
    return _own


def _after_fork() -> None:
    global _own
    _own = None  # the memory is the parent's


os.register_at_fork(after_in_child=_after_fork)


class Noted(NamedTuple):
    """An entry, read."""

    number: int
    group: int
    position: int
    hash: int
    began: int
    ended: int
    text: str


class Reader:
    """The ring of a process, this one or another."""

    def __init__(self, ring: mmap.mmap | bytes) -> None:
        self._ring = ring

    @staticmethod
    def of(pid: int, fd: int) -> Reader | None:
        """None where the process cannot be looked at."""
        try:
            with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
                return Reader(mmap.mmap(file.fileno(), _BYTES, prot=mmap.PROT_READ))
        except (OSError, ValueError):
            return None

    def noted(self, group: int | None = None) -> Iterator[Noted]:
        """What the ring holds of a group (of all), the last one first."""
        last, *_ = _ENTRY.unpack_from(self._ring, 0)
        for number in range(last, max(last - CALLS, 0), -1):
            entry = _ENTRY.unpack_from(self._ring, _place(number))
            # NUMBER is written first: if it is still the one expected, all has been read.
            intact = _ENTRY.unpack_from(self._ring, _place(number))[0] == number
            if intact and group in (None, entry[1]):
                text = entry[-1].rstrip(b"\0").decode(errors="replace")
                yield Noted._make((*entry[:-1], text))


class Calls:
    """The calls of one group: notes those of this rank, reads those of all.

    Attributes:
        group: hash of the group, the same on all of its ranks.
    """

    def __init__(
        self,
        group: str = "",
        readers: Mapping[int, Reader] | None = None,
        own: FlightRecorder | None = None,
    ) -> None:
        """
        Args:
            group: a name that only this group has.
            readers: by rank, of those that can be looked at.
            own: where to note; without one nothing is.
        """
        self.group, self._readers = _hash(group), dict(readers or {})
        self._position, self._own = 0, own

    def begin(self, call: Call) -> int:
        """Note a call of this rank; its number, for `end`. -1: nothing is noted."""
        if self._own is None:
            return -1
        self._position += 1
        return self._own.note(self.group, self._position, call)

    def end(self, noted: int) -> None:
        """A call that was noted has ended."""
        if noted >= 0 and self._own is not None:
            self._own.end(noted)

    def words(self, rank: int, hash: int) -> str:
        """What `rank` has called, given the hash of it."""
        ring = self._readers.get(rank)
        found = ring and next((e.text for e in ring.noted(self.group) if e.hash == hash), None)
        return found or "another"

    def history(self, last: int = 6) -> str:
        """The last calls of all ranks side by side, a line each."""
        calls = self._by_position()
        now, lines = time.monotonic_ns(), []
        for position in sorted(calls)[-last:]:
            told = [
                f"{_ranks(ranks)}: {text}{_state(calls[position], ranks, now)}"
                for text, ranks in _by_text(calls[position]).items()
            ]
            missing = sorted(set(self._readers) - set(calls[position]))
            if missing and position > max(calls) - CALLS // 2:
                told.append(f"{_ranks(missing)}: not begun")
            lines.append(f"  call {position}   " + "; ".join(told))
        return "\n".join(["the last calls of the group:", *lines]) if lines else ""

    def _by_position(self) -> dict[int, dict[int, Noted]]:
        calls: dict[int, dict[int, Noted]] = {}
        for rank, ring in self._readers.items():
            for entry in ring.noted(self.group):
                calls.setdefault(entry.position, {})[rank] = entry
        return calls


def _by_text(entries: Mapping[int, Noted]) -> dict[str, list[int]]:
    """Ranks by what they called."""
    ranks: dict[str, list[int]] = {}
    for rank, entry in entries.items():
        ranks.setdefault(entry.text, []).append(rank)
    return ranks


def _ranks(ranks: Iterable[int]) -> str:
    some = list(ranks)
    return f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some))}"


def _state(entries: Mapping[int, Noted], ranks: Iterable[int], now: int) -> str:
    some = [entries[rank] for rank in ranks]
    under_way = [now - entry.began for entry in some if not entry.ended]
    return f" (under way for {max(under_way) / 1e9:.3g} s)" if under_way else ""
