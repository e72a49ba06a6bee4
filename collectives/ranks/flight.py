"""The flight recorder: what every rank has called lately, in memory that the others can read.

A process keeps a ring of its last CALLS calls, in an anonymous file that its peers map when they
first meet. An error about a peer shows what that has called, also if it has died since. Where
$WEFT_FLIGHT_DIR names a folder the file is there, for `weft doctor --flight`: see `flight_files`.

The first ENTRY bytes hold the NUMBER of the last call, and what the process waits for: see `waits`.
Then come the entries:

    word        holds
    NUMBER      of the call among all of this process; 0 while the entry is written
    GROUP       hash of the group that makes it
    POSITION    of the call among those of the group: 1, 2, ...
    CALL        hash of all that must be the same on all ranks
    BEGAN       ns of the machine's clock
    ENDED       likewise; 0 while the call is under way, negative if it has failed
    ENGINE      that runs it, in ENGINES; 0 until that is known
    GENERATION  of the workspace, as errors name it; 0 where only kernels count it
    STREAM      of a GPU; 0 on the host
    TEXT        what CALL is the hash of, to be read

To note a call takes a microsecond. Nobody is told anything: peers look only for an error.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from weft import settings
from weft.collectives.ranks import flight_files
from weft.errors import MismatchError

CALLS, ENTRY = 256, 320
_HASHES = 4096  # of this rank's calls: peers may be so far behind
# What comes after an error amid the calls of streams.
UNUSABLE = (
    ". Results since are no good, and the group cannot be used until all of its ranks have called "
    "weft.close()"
)
ENGINES = ("", "triton", "host", "generic")
TRITON, HOST, GENERIC = 1, 2, 3
_TEXT = ENTRY - 9 * 8
_ENTRY = struct.Struct(f"9q{_TEXT}s")
_WORDS, _ENDED, _ENGINE = ENTRY // 8, 5, 6
THREADS = 7  # of the first entry: 1 once threads other than the main one have made calls
_HEAD = struct.Struct("8q")
_MASK = (1 << 62) - 1
BYTES = (CALLS + 1) * ENTRY


def _entry_at(number: int) -> int:
    """In bytes."""
    return (number % CALLS + 1) * ENTRY


class Call(NamedTuple):
    """A call as all ranks must make it: its hash, and its words as they go into an entry."""

    hash: int
    text: bytes
    where: str


def hash_of_words(text: str) -> int:
    """The same on all ranks."""
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

    Of long lists in words that do not fit the beginning is told, the length, and a hash.
    """

    def said(in_brief: bool) -> str:
        words = op + "".join(f", {_in_words(value, in_brief)}" for value in told)
        if where:
            words += f" ({where})" if nbytes < 0 else f" ({where}, {nbytes} bytes)"
        return words

    words = said(in_brief=False)
    text = words.encode()
    if len(text) > _TEXT:
        text = fitted(said(in_brief=True), _TEXT)
    return Call(hash_of_words(words), text, where)


def fitted(words: str, nbytes: int) -> bytes:
    """`words` in so many bytes: of longer ones the beginning, and a hash of all."""
    text = words.encode()
    if len(text) <= nbytes:
        return text
    mark = f" .. #{hash_of_words(words):x}".encode()
    return text[: nbytes - len(mark)].decode(errors="ignore").encode() + mark


def _in_words(value: Hashable, in_brief: bool) -> str:
    name = ""
    if isinstance(value, tuple) and len(value) == 2 and str(value[0])[0].isalpha():
        name, value = f"{value[0]} ", value[1]
    plain = list(value) if isinstance(value, tuple) else value
    words = str(plain).removeprefix("torch.")
    if in_brief and isinstance(plain, list) and len(words) > 64:
        first = ", ".join(map(str, plain[:3]))
        words = f"[{first}, .. {len(plain)} in all, #{hash_of_words(words):x}]"
    return name + words


def _readable(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


class FlightRecorder:
    """The ring of this process.

    Attributes:
        words: of the ring, int64.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where to keep it; None for anonymous memory."""
        if folder is None:
            self.fd = os.memfd_create("weft calls")
            os.ftruncate(self.fd, BYTES)
        else:
            self.fd = flight_files.make(folder, BYTES)
        self.ring = mmap.mmap(self.fd, BYTES)
        self.words = memoryview(self.ring).cast("q")
        self.pid = os.getpid()
        self._number, self._main = 0, threading.main_thread().ident
        self._in_folder = folder is not None
        self._groups: dict[int, tuple[tuple[int, ...], int]] = {}

    def note(self, group: int, position: int, call: Call) -> int:
        """Write an entry; its number in the ring, for `end`."""
        self._number = number = self._number + 1
        at, began = _entry_at(number), time.monotonic_ns()
        _ENTRY.pack_into(
            self.ring, at, number, group, position, call.hash, began, 0, 0, 0, 0, call.text
        )
        self.words[0] = number
        if threading.get_ident() != self._main:
            self.words[THREADS] = 1
        return number

    def end(self, number: int, failed: bool) -> None:
        """The call has ended."""
        now = time.monotonic_ns()
        self.words[(number % CALLS + 1) * _WORDS + _ENDED] = -now if failed else now

    def runs(self, number: int, engine: int, generation: int, stream: int) -> None:
        """How the call runs that is under way."""
        at, words = (number % CALLS + 1) * _WORDS + _ENGINE, self.words
        words[at], words[at + 1], words[at + 2] = engine, generation, stream

    def joined(self, group: int, ranks: tuple[int, ...], rank: int) -> None:
        """This process is number `rank` of these global `ranks`."""
        if self._in_folder:
            self._groups[group] = ranks, rank
            flight_files.tell(self.fd, BYTES, self._groups)

    def under_way(self, number: int) -> str:
        """The words of the call with this number; empty if it has ended or is not held any more."""
        if not self._number - CALLS < number <= self._number or number < 1:
            return ""
        entry = _ENTRY.unpack_from(self.ring, _entry_at(number))
        return "" if entry[_ENDED] else _readable(entry[-1])


_own: FlightRecorder | None = None


def recorder() -> FlightRecorder:
    """That of this process."""
    global _own
    if _own is None:
        _own = FlightRecorder(settings.flight_dir())
    return _own


def _drop_ring_of_parent() -> None:
    global _own
    _own = None  # the memory is the parent's


os.register_at_fork(after_in_child=_drop_ring_of_parent)


class Noted(NamedTuple):
    """An entry, read."""

    number: int
    group: int
    position: int
    hash: int
    began: int
    ended: int
    engine: int
    generation: int
    stream: int
    text: str

    @property
    def run(self) -> str:
        """How it runs, as far as that is known."""
        engine = ENGINES[self.engine] if 0 < self.engine < len(ENGINES) else ""
        return f"{engine} {self.generation}" if engine and self.generation else engine


class Reader:
    """The ring of a process, this one or another.

    Attributes:
        words: of the ring, int64.
    """

    def __init__(self, ring: mmap.mmap | bytes) -> None:
        self._ring, self.words = ring, memoryview(ring).cast("q")

    @staticmethod
    def of(pid: int, fd: int) -> Reader | None:
        """None where the process cannot be looked at."""
        try:
            with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
                return Reader(mmap.mmap(file.fileno(), BYTES, prot=mmap.PROT_READ))
        except (OSError, ValueError):
            return None

    def head(self) -> tuple[int, ...]:
        """The words of the first entry."""
        return _HEAD.unpack_from(self._ring, 0)

    def noted(self, group: int | None = None) -> Iterator[Noted]:
        """What the ring holds of a group (of all), the last one first."""
        last, *_ = _ENTRY.unpack_from(self._ring, 0)
        for number in range(last, max(last - CALLS, 0), -1):
            entry = _ENTRY.unpack_from(self._ring, _entry_at(number))
            # NUMBER is written first: if it is still the one expected, all has been read.
            intact = _ENTRY.unpack_from(self._ring, _entry_at(number))[0] == number
            if intact and group in (None, entry[1]):
                yield Noted._make((*entry[:-1], _readable(entry[-1])))


class Calls:
    """The calls of one group: notes those of this rank, reads those of all.

    Attributes:
        group: hash of the group, the same on all of its ranks.
        position: of the last call of this rank among those of the group.
        last: hash of the last call of this rank.
        parting: how the calls of ranks differ, once `compare` has found that.
    """

    def __init__(
        self,
        group: str = "",
        readers: Mapping[int, Reader] | None = None,
        own: FlightRecorder | None = None,
        rank: int = 0,
    ) -> None:
        """
        Args:
            group: a name that only this group has.
            readers: by rank, of those that can be looked at.
            own: where to note; without one nothing is.
            rank: this one's.
        """
        self.group, self._readers = hash_of_words(group), dict(readers or {})
        self.position, self._own = 0, own
        self.last, self.parting = 0, ""
        self._rank, self._hashes = rank, [0] * _HASHES
        self._seen = {peer: 0 for peer in self._readers if peer != rank}  # NUMBERs, compared
        W = len(self._readers)
        self._beside = {(rank - 1) % W, (rank + 1) % W} & set(self._seen) if W else set()
        self._last = self._around = -1  # the call under way, and the one that it is a part of

    def begin(self, call: Call) -> int:
        """Note a call of this rank; its number, for `end`. -1: nothing is noted."""
        if self._own is None:
            return -1
        self._hashes[(self.position + 1) % _HASHES] = call.hash
        self.position += 1
        self.last = call.hash
        self._around = self._last
        self._last = self._own.note(self.group, self.position, call)
        return self._last

    def runs(self, engine: int, generation: int = 0, stream: int = 0) -> None:
        """How the call runs that is under way. `engine`: its place in ENGINES."""
        if self._own is not None and self._last >= 0:
            self._own.runs(self._last, engine, generation, stream)

    def end(self, noted: int, failed: bool = False) -> None:
        """A call that was noted has ended."""
        if noted >= 0 and self._own is not None:
            self._own.end(noted, failed)
            if noted == self._last:
                self._last = self._around

    @contextmanager
    def noting(self, call: Call) -> Iterator[None]:
        """Note a call of this rank that other calls are made of.

        One whose result is dropped unread, as of a move that is under way, has not failed.
        """
        noted = self.begin(call)
        try:
            yield
        except BaseException as error:
            self.end(noted, failed=not isinstance(error, GeneratorExit))
            raise
        self.end(noted)

    def under_way(self) -> str:
        """The last call of this rank, unless it has ended."""
        return self._own.under_way(self._last) if self._own is not None else ""

    def compare(self) -> str:
        """Compare what others have begun with this rank's calls: `parting`."""
        for peer in self._seen:
            self._compare(peer)
        return self.parting

    def check(self) -> None:
        """Compare the calls of the ranks beside this one with its own, in 1 us.

        Calls in the streams of GPUs are waited for by kernels, which do not compare them. If two
        ranks differ, so do two that are beside each other. Of these the one that comes last sees
        it here, before it launches anything, so that no call of the others gets done: their waits
        are ended by the threads that look after peers, which compare all. If both come within
        100 ns, they see it one call later.

        Raises:
            MismatchError: they differ.
        """
        for peer in self._beside:
            self._compare(peer)
        if self.parting:
            raise MismatchError(self.parting + UNUSABLE)

    def _compare(self, peer: int) -> None:
        position = self._differs(peer)
        if position and not self.parting:
            time.sleep(1e-3)  # the words of an entry may come out of order
            if self._differs(peer) == position:
                calls = by_position({peer: self._readers[peer]}, self.group).get(position, {})
                theirs = {rank: each.hash for rank, each in calls.items()}
                mine = self._hashes[position % _HASHES]
                self.parting = self.differ(theirs | {self._rank: mine})

    def _differs(self, peer: int) -> int:
        """Position of the first call of `peer` that differs; 0: none of those that both have begun
        and that have not been compared yet."""
        words, number = self._readers[peer].words, self._seen[peer]
        newest = words[0]
        if number <= newest - CALLS:
            number = newest - CALLS + 1  # what was written over cannot be compared
        while number < newest:
            at = ((number + 1) % CALLS + 1) * _WORDS
            if words[at + 1] == self.group:
                position, hash = words[at + 2], words[at + 3]
                if position > self.position:
                    break
                differs = hash != self._hashes[position % _HASHES] and words[at] == number + 1
                if differs and position > self.position - _HASHES:
                    return position
            number += 1
        self._seen[peer] = number
        return 0

    def differ(self, calls: Mapping[int, int]) -> str:
        """What ranks have called, given the hashes."""
        told = (f"rank {rank} called {self.words(rank, calls[rank])}" for rank in sorted(calls))
        history = self.history()
        return f"the ranks make different calls: {'; '.join(told)}" + f"\n{history}" * bool(history)

    def words(self, rank: int, hash: int) -> str:
        """What `rank` has called, given the hash of it."""
        ring = self._readers.get(rank)
        found = ring and next((e for e in ring.noted() if e.hash == hash), None)
        if not found:
            return "another"
        return found.text + ("" if found.group == self.group else ", of another group")

    def history(self, last: int = 6) -> str:
        """The last calls of all ranks side by side, a line each, and where they part."""
        calls = by_position(self._readers, self.group)
        if not calls:
            return ""
        now, parts, lines = time.monotonic_ns(), parting(calls), []
        shown = sorted(calls)[-last:]
        if parts is not None and parts not in shown:
            shown = [parts, *shown[1:]]
        for position in shown:
            entries = calls[position]
            told = [
                f"{ranks_told(ranks)}: {text}{_state(entries, ranks, now)}"
                for text, ranks in by_text(entries).items()
            ]
            missing = sorted(set(self._readers) - set(entries))
            if missing and position > max(calls) - CALLS // 2:
                told.append(f"{ranks_told(missing)}: not begun")
            here = "   <- here they part" if position == parts else ""
            lines.append(f"  call {position}   " + "; ".join(told) + here)
        return "\n".join(["the last calls of the group:", *lines])


def by_position(rings: Mapping[int, Reader], group: int) -> dict[int, dict[int, Noted]]:
    """The calls of a group by position, and by rank."""
    calls: dict[int, dict[int, Noted]] = {}
    for rank, ring in rings.items():
        for entry in ring.noted(group):
            calls.setdefault(entry.position, {})[rank] = entry
    return calls


def parting(calls: Mapping[int, Mapping[int, Noted]]) -> int | None:
    """The first position at which ranks have made different calls, as far as rings go back.

    Where a call has failed on every rank, and another one ended well since, all were told: what
    differed until then is for the mismatch of that time, with the calls made inside of that one.
    """
    hashes = {at: {each.hash for each in calls[at].values()} for at in sorted(calls)}
    ended = {at: [each.ended for each in calls[at].values()] for at in calls}
    well = max((at for at in calls if len(hashes[at]) == 1 and min(ended[at]) > 0), default=-1)
    told = max((at for at in calls if at < well and max(ended[at]) < 0), default=-1)
    ends = {rank: -each.ended for rank, each in calls.get(told, {}).items()}
    later = (at for at in hashes if at > told and len(hashes[at]) > 1)
    return next(
        (at for at in later if any(e.began > ends.get(r, 0) for r, e in calls[at].items())), None
    )


def by_text(entries: Mapping[int, Noted]) -> dict[str, list[int]]:
    """Ranks by what they called."""
    ranks: dict[str, list[int]] = {}
    for rank, entry in sorted(entries.items()):
        ranks.setdefault(entry.text, []).append(rank)
    return ranks


def ranks_told(ranks: Iterable[int]) -> str:
    """Example: ranks 0, 2."""
    some = list(ranks)
    return f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some))}"


def _state(entries: Mapping[int, Noted], ranks: Iterable[int], now: int) -> str:
    some = [entries[rank] for rank in ranks]
    under_way = [now - entry.began for entry in some if not entry.ended]
    runs = sorted({entry.run for entry in some} - {""})
    state = [f"on {', '.join(runs)}"] * bool(runs)
    if any(entry.ended < 0 for entry in some):
        state.append("failed")
    if under_way:
        state.append(f"under way for {max(under_way) / 1e9:.3g} s")
    return f" ({', '.join(state)})" if state else ""
