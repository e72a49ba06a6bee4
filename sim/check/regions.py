"""Memory that several strands can reach, and who has accessed what of it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.sim.check.vector_clocks import Array

_MAP_NORESERVE = 0x4000  # Linux; in `mmap` since Python 3.13
_FIRST_COLUMNS = 8  # strands whose reads of a region there is room for at first


def untouched_zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros whose pages cost nothing until touched: malloc would clear memory that it has again.

    There may be more of them than the machine has memory: real sizes are not touched.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < 1 << 16:
        return np.zeros(shape, dtype)
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, nbytes, flags), dtype).reshape(shape)


@dataclass
class Region:
    """Memory from `start` to `end`, whose accesses are kept by granules of `granule` bytes.

    Attributes:
        name: what it is, for messages; `guard` regions must not be touched at all.
        words: whether it is a signal pad, of words.
        defined: whether what was never written may be read.
        key: the same in every schedule, as its address is not.
    """

    start: int
    end: int
    name: str
    key: Hashable = None
    granule: int = 4
    defined: bool = True
    guard: bool = False
    words: bool = False
    writer: Array = field(default_factory=lambda: np.empty(0))  # slot + 1 of the last write, or 0
    written: Array = field(default_factory=lambda: np.empty(0))  # its number there
    columns: dict[int, int] = field(default_factory=dict)  # slot -> its column of the tables below
    slots: Array = field(default_factory=lambda: np.zeros(_FIRST_COLUMNS, np.int64))  # of columns
    reads: Array = field(default_factory=lambda: np.empty((0, 0)))  # last number of each slot
    atomics: Array | None = None
    seen: Array = field(default_factory=lambda: np.empty(0))  # whether a granule has any history

    def make(self) -> None:
        """Set up an empty history."""
        count = -(-(self.end - self.start) // self.granule)
        # Fresh pages, which are zero, say "never": large buffers cost nothing.
        self.writer = untouched_zeros((count,), np.int32)
        self.written = untouched_zeros((count,), np.int32)
        self.reads = untouched_zeros((count, len(self.slots)), np.int32)
        self.atomics = None
        self.seen = untouched_zeros((count,), np.bool_)

    def refine(self, granule: int) -> None:
        """Keep the history by smaller granules from now on."""
        writer, written, reads, atomics = self.writer, self.written, self.reads, self.atomics
        old, factor = np.flatnonzero(self.seen), self.granule // granule
        new = (old[:, None] * factor + np.arange(factor)).reshape(-1)
        self.granule = granule
        self.make()
        self.seen[new] = True
        self.writer[new] = writer[old].repeat(factor)
        self.written[new] = written[old].repeat(factor)
        self.reads[new] = reads[old].repeat(factor, axis=0)
        if atomics is not None:
            self.atomics = untouched_zeros(self.reads.shape, np.int32)
            self.atomics[new] = atomics[old].repeat(factor, axis=0)

    def column(self, slot: int) -> int:
        """The column of `slot`: few of all strands reach any one region."""
        at = self.columns.get(slot)
        if at is None:
            at = self.columns[slot] = len(self.columns)
            if at == len(self.slots):
                self.slots = np.pad(self.slots, (0, at))
                self.reads = self._wider(self.reads)
                self.atomics = None if self.atomics is None else self._wider(self.atomics)
            self.slots[at] = slot
        return at

    def _wider(self, table: Array) -> Array:
        count, columns = table.shape
        wider = untouched_zeros((count, 2 * columns), np.int32)
        seen = np.flatnonzero(self.seen)
        wider[seen, :columns] = table[seen]
        return wider
