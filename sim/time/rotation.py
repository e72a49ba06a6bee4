"""Rotational symmetry: the kernels of rank 0 are run, and stand for those of all ranks.

What rank 0's program p does to rank s, program p of rank r does to rank (r + s) % W. So the trace
of rank r is that of rank 0 with every owner, and every source rank of a signal word, advanced by r:
W ranks for the price of one.

Ops of torch are those of rank 0, too: the others have not been told what kernels would have told
them, as how many rows came for an expert. This holds for calls whose ranks have equal shares. A
program that waits for a word of a peer's kernel, which does not run, finds the first change of that
word since the last it saw. Kernels that number their tiles through all ranks deal them to other
programs on rank r than here, which differ by at most one tile.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from weft.collectives.ranks import pad
from weft.sim.time.trace import HostOp, KernelLaunch, ProgramEvent, Store, Trace, Wait, Work


class Pads:
    """The signal pads of all symmetric buffers, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pads: list[tuple[int, int, int]] = []  # end, number of the buffer, rank
        self._buffers: dict[int, list[int]] = {}  # number -> start of each rank's pad

    def add(self, start: int, nbytes: int, buffer: int, rank: int) -> None:
        """The pad of `rank`, which is added after those of lower ranks."""
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._pads.insert(at, (start + nbytes, buffer, rank))
        self._buffers.setdefault(buffer, []).append(start)

    def rotated(self, address: int, by: int) -> int:
        """The word that is to rank r + `by` what the one at `address` is to rank r."""
        at = bisect_right(self._starts, address) - 1
        end, buffer, owner = self._pads[at] if at >= 0 else (0, 0, 0)
        if address >= end:
            raise NotImplementedError(
                f"the word at {address:#x} is in no signal pad: what stands for it on another rank "
                f"is not known. Run without symmetric=True."
            )
        starts = self._buffers[buffer]
        word = _turned((address - self._starts[at]) // pad.WORD_BYTES, by, len(starts))
        return starts[(owner + by) % len(starts)] + word * pad.WORD_BYTES


def _turned(word: int, by: int, ranks: int) -> int:
    """Number of a word of a pad, its source rank moved on."""
    if word < pad.HOST_SLOTS:
        return word
    first, size = (
        (pad.KERNEL_SLOTS, pad.MAX_PROGRAMS)
        if word >= pad.KERNEL_SLOTS
        else (pad.HOST_SLOTS, pad.LINE)
    )
    line, inside = divmod(word - first, size)
    phase, source = divmod(line, ranks)
    return first + (phase * ranks + (source + by) % ranks) * size + inside


def complete(trace: Trace, pads: Pads) -> None:
    """Fill in what the ranks above 0 launch, which does not have its programs yet."""
    first = _launched_on(trace, 0)
    for rank in range(1, len(trace.streams)):
        launches = _launched_on(trace, rank)
        if (names := [*map(_name, launches)]) != [*map(_name, first)]:
            raise ValueError(
                f"symmetric=True needs ranks that launch the same kernels, but rank 0 launches "
                f"{[*map(_name, first)]}, rank {rank} {names}"
            )
        turn = _Turn(pads, rank, len(trace.streams))
        for launch, model in zip(launches, first, strict=True):
            if isinstance(launch, KernelLaunch) and isinstance(model, KernelLaunch):
                launch.programs = [[turn.event(e) for e in program] for program in model.programs]
            elif isinstance(launch, HostOp) and isinstance(model, HostOp):
                launch.reads, launch.writes = turn.owners(model.reads), turn.owners(model.writes)
                launch.matmul = model.matmul


def _launched_on(trace: Trace, rank: int) -> list[KernelLaunch | HostOp]:
    return [e for e in trace.events(rank) if isinstance(e, KernelLaunch | HostOp)]


def _name(launch: KernelLaunch | HostOp) -> str:
    return launch.kernel if isinstance(launch, KernelLaunch) else launch.name


class _Turn:
    """Events of rank 0 as they are on rank `by`."""

    def __init__(self, pads: Pads, by: int, ranks: int) -> None:
        self._pads, self._by, self._ranks = pads, by, ranks
        self._words: dict[int, int] = {}

    def event(self, event: ProgramEvent) -> ProgramEvent:
        """The one that rank `by` has in its place."""
        if isinstance(event, Work):
            loads = {(at, self._owner(o)): region for (at, o), region in event.loads.items()}
            return replace(event, loads=loads)
        if isinstance(event, Store):
            return replace(event, owner=self._owner(event.owner))
        if isinstance(event, Wait):
            versions = {self._word(word): at for word, at in event.versions.items()}
            return replace(event, versions=versions)
        return replace(event, address=self._word(event.address), owner=self._owner(event.owner))

    def owners(self, nbytes: dict[int, int]) -> dict[int, int]:
        """Bytes by whose memory they are of."""
        return {self._owner(owner): each for owner, each in nbytes.items()}

    def _owner(self, owner: int) -> int:
        return (owner + self._by) % self._ranks

    def _word(self, address: int) -> int:
        word = self._words.get(address)
        if word is None:
            word = self._words[address] = self._pads.rotated(address, self._by)
        return word
