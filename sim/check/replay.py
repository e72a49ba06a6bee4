"""What is known from the schedules that were run: stretches of tracks, and conflicting accesses.

    track of a strand (`recording`)  ->  stretches: operations up to one whose outcome decides
    its accesses                     ->  nodes, and the rivals of each, before it or not

`weft.sim.schedule.player` plays other schedules of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from weft.sim.check.races import ATOMIC, ATOMIC_READ, FLAG, TAKE, WRITES
from weft.sim.check.recording import HOST, Op, Place, Tape, Touch, Track
from weft.sim.check.vector_clocks import Array
from weft.sim.observer import Vain

_NOBODY = np.empty(0, np.int64)


class Access(NamedTuple):
    """A node's touch of one region: `units` in order, the first and the last of them."""

    node: int
    kind: str
    scope: str
    units: Array
    low: int
    high: int


@dataclass
class Node:
    """An operation that accesses memory, in a place of its track.

    Attributes:
        rivals: nodes that access the same memory, one of the two writing, from another place.
        before: those of them that runs have put before this one.
        ordered, others: the two as arrays; `others` are rivals that must not come first.
    """

    place: int
    rank: int
    rivals: set[int] = field(default_factory=set)
    before: set[int] = field(default_factory=set)
    ordered: Array = field(default_factory=lambda: _NOBODY)
    others: Array = field(default_factory=lambda: _NOBODY)


@dataclass(eq=False)
class Stretch:
    """Operations of a track up to one whose outcome decides how it goes on, or to its end.

    Attributes:
        nodes: of each operation, -1 if it accesses nothing.
        after: what comes next, for each value that the last operation has found.
        steps: the operations as they are played: words and places are numbers, nodes come last,
            and what makes no difference is left out.
        branches: `after` the last of the steps, which may be those of stretches after this one.
    """

    ops: list[Op] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    after: dict[int, Stretch] = field(default_factory=dict)
    steps: list[Op] = field(default_factory=list)
    branches: dict[int, Stretch] = field(default_factory=dict)


class Recording:
    """All that is known from the schedules run so far."""

    def __init__(self, world_size: int, concurrent: bool) -> None:
        self.concurrent = concurrent
        self.unfit = ""
        self.vain: set[Vain] = set()
        self.world_size = world_size
        self.stretches: dict[Hashable, Stretch] = {}
        self.nodes: list[Node] = []
        self.places: dict[Place, int] = {(rank, HOST): rank for rank in range(world_size)}
        self._accesses: dict[Hashable, list[Access]] = {}
        self._words: dict[Hashable, int] = {}
        self._written: set[Hashable] = set()

    def learn(self, tape: Tape) -> None:
        """Take in what a schedule has left."""
        self.unfit = self.unfit or tape.unfit
        self.vain |= tape.vain
        if self.unfit:
            return
        found: dict[tuple[Hashable, int], int] = {}
        known = len(self.nodes)
        if not all(self._take_in(track, found) for track in tape.tracks.values()):
            self.unfit = "a strand does not do the same again"
            return
        for region in self._accesses.values():
            self._find_rivals(region, known)
        self._put_in_order([found[where] for where in tape.order])
        for node in self.nodes:
            node.ordered = np.array(sorted(node.before), np.int64)
            node.others = np.array(sorted(node.rivals - node.before), np.int64)
        self._written = {
            op[1] for stretch in self._all_stretches() for op in stretch.ops if _writes(op)
        }
        for stretch in self._all_stretches():
            stretch.steps, stretch.branches = [], stretch.after
            self._prepare(stretch, stretch.steps)
            last = stretch
            # A word that is never written leaves no choice.
            while list(last.after) == [0] and last.ops[-1][1] not in self._written:
                last = last.after[0]
                self._prepare(last, stretch.steps)
                stretch.branches = last.after

    def _all_stretches(self) -> Iterator[Stretch]:
        left = list(self.stretches.values())
        while left:
            stretch = left.pop()
            yield stretch
            left += stretch.after.values()

    def _take_in(self, track: Track, found: dict[tuple[Hashable, int], int]) -> bool:
        """Add what is new in `track`; False if it goes on otherwise where it has found the same."""
        stretch, at = self.stretches.get(track.key), 0
        fresh = stretch is None
        if stretch is None:
            stretch = self.stretches[track.key] = Stretch()
        for number, op in enumerate(track.ops):
            if op[0] == "saw":
                if at != len(stretch.ops):
                    return False
                fresh = op[1] not in stretch.after
                stretch, at = stretch.after.setdefault(op[1], Stretch()), 0
                continue
            if fresh:
                stretch.ops.append(op)
                stretch.nodes.append(self._new_node(op))
            elif at == len(stretch.ops) or stretch.ops[at] != op:
                return False
            if stretch.nodes[at] >= 0:
                found[track.key, number] = stretch.nodes[at]
            at += 1
        return track.awaited is None and at == len(stretch.ops) and not stretch.after

    def _new_node(self, op: Op) -> int:
        if op[0] not in _TOUCHING:
            return -1
        place, touches = op[-2:]
        number = len(self.nodes)
        self.nodes.append(Node(self._place(place), place[0]))
        for touch in touches:
            region, access = _access(number, touch)
            self._accesses.setdefault(region, []).append(access)
        return number

    def _place(self, place: Place) -> int:
        return self.places.setdefault(place, len(self.places))

    def _word(self, word: Hashable) -> int:
        return self._words.setdefault(word, len(self._words))

    def _prepare(self, stretch: Stretch, steps: list[Op]) -> None:
        """Add the operations of `stretch` to `steps`."""
        for op, node in zip(stretch.ops, stretch.nodes, strict=True):
            kind = op[0]
            if kind == "touch":
                if self.nodes[node].rivals:
                    steps.append((kind, node))
            # Of an atomic on a word that is never written, only that it polls counts.
            elif kind == "atomic" and list(stretch.after) == [0] and op[1] not in self._written:
                steps.append(("glance", self._word(op[1]), op[4] == "sys"))
            elif kind in ("atomic", "wait"):
                steps.append((kind, self._word(op[1]), *op[2:-2], self._place(op[-2]), node))
            elif kind in ("flag", "take"):
                words = [self._word(word) for word in op[1]]
                steps.append((kind, words, *op[2:-2], self._place(op[-2]), node))
            elif kind in ("post", "await"):
                steps.append((kind, self._word(op[1]), op[2], self._place(op[3]), node))
            elif kind in ("look", "put", "poke"):
                steps.append((kind, self._word(op[1]), *op[2:]))
            elif kind in ("barrier", "place"):
                steps.append((kind, self._place(op[1])))
            elif kind in ("fork", "join", "restart"):
                steps.append((kind, self._place(op[1]), [self._place(place) for place in op[2]]))
            elif kind == "start":
                steps.append((kind, op[1], [self._place(place) for place in op[2]]))
            else:
                steps.append(op)

    def _find_rivals(self, region: list[Access], known: int) -> None:
        """Rivals among the accesses to one region, of nodes from `known` on with all."""
        lows, highs = (np.array([a[i] for a in region]) for i in (4, 5))
        writes = np.array([a.kind in (*WRITES, ATOMIC) for a in region])
        places = np.array([self.nodes[a.node].place for a in region])
        for access in region:
            if access.node < known:
                continue
            near = (lows <= access.high) & (highs >= access.low)
            near &= places != self.nodes[access.node].place
            if access.kind not in (*WRITES, ATOMIC):
                near &= writes
            for at in np.flatnonzero(near):
                other = region[at]
                if self._conflict(access, other):
                    self.nodes[access.node].rivals.add(other.node)
                    self.nodes[other.node].rivals.add(access.node)

    def _conflict(self, one: Access, other: Access) -> bool:
        if one.kind in _ATOMICS and other.kind in _ATOMICS:
            near = self.nodes[one.node].rank == self.nodes[other.node].rank
            enough = ("gpu", "sys") if near else ("sys",)
            if one.scope in enough and other.scope in enough:
                return False
        if {one.kind, other.kind} == {FLAG, TAKE} and one.scope == other.scope:
            return False  # of one generation: it was looked for
        return bool(np.isin(one.units, other.units, assume_unique=True).any())

    def _put_in_order(self, nodes: list[int]) -> None:
        """`nodes` came in this order."""
        at = {node: number for number, node in enumerate(nodes)}
        pairs = [
            (node, rival)
            for node in nodes
            for rival in self.nodes[node].rivals
            if rival in at and at[rival] < at[node]
        ]
        if any(node in self.nodes[rival].before for node, rival in pairs):
            return  # the other way round than in another run: it may have read other values
        for node, rival in pairs:
            self.nodes[node].before.add(rival)


_ATOMICS = (ATOMIC, ATOMIC_READ)
_TOUCHING = ("touch", "wait", "atomic", "post", "await", "flag", "take")


def _access(node: int, touch: Touch) -> tuple[Hashable, Access]:
    region, kind, scope, units = touch
    array = np.frombuffer(units, np.int64)
    return region, Access(node, kind, scope, array, int(array[0]), int(array[-1]))


def _writes(op: Op) -> bool:
    """Whether a word may have another value after it."""
    if op[0] == "atomic":
        return op[2] not in (("load",), ("add", 0))
    return op[0] in ("put", "poke", "post")
