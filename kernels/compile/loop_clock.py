"""How long a step of a loop with wgmma takes: its instructions, one by one, on one scheduler.

NVIDIA's assembler writes into every instruction how many cycles its warp waits before the next one,
which of six counters it holds until its result is there or its operands are read, and for which
counters it waits. So what depends on what need not be guessed: two warps, one of each warp group,
take turns as these words let them, with what an instruction takes on its unit.

Sources
  [CUDA]    CUDA C++ Programming Guide, throughput of arithmetic instructions, 9.0: 128 results of
            fp32 arithmetic a cycle and SM, 64 of most others, 16 of exponentials and the like
  [Hopper]  Luo et al., arXiv 2402.13499: shared memory answers after 29 cycles, memory after 480
  [H200]    times of 9 forwards of ring attention on one H200: `docs/virtual_time.md` has them
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

GHZ = 1.62  # the clock that a step's cycles fit. [H200]
_SPECIAL, _FULL, _HALF = 8, 1, 2  # cycles that a warp's instruction keeps its unit busy. [CUDA]
_NEAR = (
    24  # until a counter is let go, or a barrier: shared memory takes more, shuffles less. [H200]
)
_FAR = 600  # of loads and copies from memory, most of which are in L2: [Hopper] when idle, [H200]
_READ = 10  # until operands have been read; between two of [H200]'s forwards it matters little
# In which an SM's path from L2 takes a warp's copy: 16 bytes for each lane, at 64 a cycle. Narrower
# ones take as long, by [H200].
_COPY = 8
_SCHEDULERS = 4
_STEPS = 6  # that are played; the first ones fill the copies' stages

# Waits for nothing and holds nothing.
NO_CONTROL = 7 << 46 | 7 << 49

_WIDE = re.compile(
    r"FFMA|FADD|FMUL|HFMA2|MOV|NOP|BRA|BAR|WARP|DEPBAR|LDGDEPBAR|BS|U|R2UR|CS2R|\wGMMA"
)
_GMMA = re.compile(r"\wGMMA\.64x(\d+)x\d+\S* R\d+, (gdesc)?")


@dataclass(frozen=True)
class Instruction:
    """One of a disassembly.

    Attributes:
        text: with its predicate.
        target: number of the instruction that a branch goes to.
        falls: whether the next one can follow.
        control: the upper half of its machine code, if the disassembly has it.
    """

    text: str
    target: int | None
    falls: bool
    control: int = NO_CONTROL

    @property
    def name(self) -> str:
        """Without a predicate."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text)


def left_in_flight(line: str) -> int | None:
    """How many groups of matrix instructions a wait for them leaves in flight; None: no wait."""
    found = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)", line)
    return int(found[1], 16) if found else None


def matrix_cycles(name: str) -> float:
    """In which the matrix units do an instruction of a warp group; 0 if it is none of theirs.

    Of 64 rows and N columns it takes N / 2 cycles; at 128 bytes a cycle its rows, unless they are
    in registers, take 16, and its columns N / 4.
    """
    found = _GMMA.match(name)
    if not found:
        return 0.0
    columns = int(found[1])
    return max(columns / 2, columns / 4 + 16 if found[2] else 0.0)


class _Timed:
    """What an instruction takes, and what it waits for."""

    def __init__(self, each: Instruction) -> None:
        name, word = each.name, each.control
        self.stall = max(word >> 41 & 15, 1)
        self.held, self.read = word >> 46 & 7, word >> 49 & 7  # counters; 7: none
        self.waits = [counter for counter in range(6) if word >> 52 >> counter & 1]
        special = name.startswith("MUFU")
        self.unit = _SPECIAL if special else _FULL if _WIDE.match(name) else _HALF
        self.after = _FAR if re.match(r"LDG\b(?!STS)", name) else _NEAR
        self.matrix, self.closes = matrix_cycles(name), "gsb0" in name
        self.left = left_in_flight(name)
        waited = re.match(r"DEPBAR\.LE SB0, (0x\w+)", name)
        self.copies_left = int(waited[1], 16) if waited else None
        self.copies = name.startswith("LDGSTS")
        self.commits, self.barrier = name.startswith("LDGDEPBAR"), name.startswith("BAR.")


@dataclass
class _Warp:
    number: int = 0  # of its next instruction
    steps: int = 0
    ready: float = 0.0
    counters: list[float] = field(default_factory=lambda: [0.0] * 8)
    groups: deque[float] = field(default_factory=deque)  # when each of its wgmma groups ends
    copies: deque[float] = field(default_factory=deque)  # when each group of copies has come
    copying: int = 0  # of the group that is open
    at_barrier: float | None = None

    def earliest(self, each: _Timed) -> float:
        """When it can begin an instruction, as far as it knows."""
        found = max([self.ready, *(self.counters[i] for i in each.waits)])
        for ends, left in ((self.groups, each.left), (self.copies, each.copies_left)):
            if left is not None and len(ends) > left:
                found = max(found, ends[-1 - left])
        return found


def step_cycles(lines: Sequence[Instruction], warps: int) -> float:
    """Cycles from one step of a loop of `warps` warps to the next, where nothing else is late."""
    timed = [_Timed(each) for each in lines]
    held = [_Warp() for _ in range(max(1, warps // 4))]
    units = dict.fromkeys((_SPECIAL, _FULL, _HALF), 0.0)
    now = matrix = memory = 0.0  # the scheduler; when the matrix units and the copies end
    ends: list[float] = []
    while len(ends) < _STEPS:
        free = [w for w in held if w.at_barrier is None and w.steps < _STEPS]
        warp = min(
            free, key=lambda w: max(w.earliest(timed[w.number]), units[timed[w.number].unit])
        )
        each = timed[warp.number]
        begun = max(now, warp.earliest(each), units[each.unit])
        now, units[each.unit], warp.ready = begun + 1, begun + each.unit, begun + each.stall
        for counter, until in ((each.held, each.unit + each.after), (each.read, _READ)):
            warp.counters[counter] = max(warp.counters[counter], begun + until)
        if each.matrix:
            matrix = max(matrix, begun) + each.matrix
            if each.closes:
                warp.groups.append(matrix)
        warp.copying += each.copies
        if each.commits:  # as do the other schedulers' warps
            memory = max(memory, begun) + warp.copying * _SCHEDULERS * _COPY
            warp.copies.append(max(memory, begun + _FAR))
            warp.copying = 0
        if each.barrier:
            warp.at_barrier = begun
            if all(w.at_barrier is not None for w in held):
                for w in held:
                    w.ready, w.at_barrier = begun + _NEAR, None
        warp.number = (warp.number + 1) % len(timed)
        if warp.number == 0:
            warp.steps += 1
            if warp.steps == min(w.steps for w in held):
                ends.append(now)
    return (ends[-1] - ends[1]) / (_STEPS - 2)
