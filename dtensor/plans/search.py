"""The cheapest combination of options: exact dynamic programming over what is alive.

    state    how the tensors that later nodes read are placed
    label    us, data-parallel us and bytes of one way to get to a state

Nodes are taken in order. Of the labels of a state those remain that no other one beats in all three
numbers, so that every trade of time for memory is kept. A segment's way from each state into each
state is found once for all segments of its structure: a model with 80 equal layers costs little
more than one with two.

It is exact as long as few tensors are alive at a time. Where there are more than `_STATES` states,
as with many experts whose results wait to be added up, the quickest of them and the smallest go on;
where a state has more than `_MOST` labels, the quickest in each of so many ranges of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from weft.dtensor.plans.bills import Option, Value
from weft.dtensor.plans.graph import Graph, ModelNode, Segment
from weft.dtensor.plans.options import NodeOptions

_MOST, _STATES = 64, 128

State = tuple[tuple[Value, ...], ...]
# Whether a kind of plan has this option; every option of a node is one of a plan without limits.
Allows = Callable[[ModelNode, Option], bool]


class Trail(NamedTuple):
    """The choices that led to a label, the last one first."""

    before: Trail | None
    choices: tuple[Option, ...]


class Label(NamedTuple):
    us: float
    data_us: float
    nbytes: float
    trail: Trail | None

    def joined(self, later: Label) -> Label:
        choices = () if later.trail is None else _taken(later.trail)
        us, data_us = self.us + later.us, self.data_us + later.data_us
        return Label(us, data_us, self.nbytes + later.nbytes, Trail(self.trail, choices))


Labels = dict[State, list[Label]]


def search_layouts(options: NodeOptions, allows: Allows | None = None) -> list[Label]:
    """The labels of the whole model; none if no combination fits."""
    graph = options.graph
    labels: Labels = {(): [Label(0.0, 0.0, 0.0, None)]}
    known: dict[tuple[object, State], Labels] = {}
    for segment in graph.segments:
        after: Labels = {}
        for state, reached in labels.items():
            key = segment.signature, state
            if key not in known:
                known[key] = through(options, segment, state, allows)
            for end, ways in known[key].items():
                joined = (label.joined(way) for label in reached for way in ways)
                after.setdefault(end, []).extend(joined)
        labels = {state: undominated(found) for state, found in after.items()}
    return undominated([label for found in labels.values() for label in found])


def through(
    options: NodeOptions, segment: Segment, state: State, allows: Allows | None = None
) -> Labels:
    """The labels of a segment, from a state of what is alive before it."""
    graph = options.graph
    alive = segment.alive
    labels: Labels = {state: [Label(0.0, 0.0, 0.0, None)]}
    for node in graph.nodes[segment.start : segment.stop]:
        later, after = remaining(graph, alive, node), dict[State, list[Label]]()
        for before, reached in labels.items():
            for option, end in search_steps(options, node, alive, before, later):
                if allows is not None and not allows(node, option):
                    continue
                after.setdefault(end, []).extend(
                    Label(
                        label.us + option.us,
                        label.data_us + option.data_us,
                        label.nbytes + option.nbytes,
                        Trail(label.trail, (option,)),
                    )
                    for label in reached
                )
        labels = _narrowed({end: undominated(found) for end, found in after.items()})
        alive = later
    return labels


def _narrowed(labels: Labels) -> Labels:
    if len(labels) <= _STATES:
        return labels
    quickest = sorted(labels, key=lambda state: min(e.us + e.data_us for e in labels[state]))
    smallest = sorted(labels, key=lambda state: min(e.nbytes for e in labels[state]))
    kept = dict.fromkeys([*quickest[: _STATES // 2], *smallest[: _STATES // 2]])
    return {state: labels[state] for state in kept}


def remaining(graph: Graph, alive: tuple[int, ...], node: ModelNode) -> tuple[int, ...]:
    """What is alive after a node."""
    born = (*alive, node.index) if node.kind not in ("constant", "output") else alive
    return tuple(i for i in born if graph.nodes[i].last_use > node.index)


def search_steps(
    options: NodeOptions,
    node: ModelNode,
    alive: tuple[int, ...],
    state: State,
    later: tuple[int, ...],
) -> Iterator[tuple[Option, State]]:
    """Each option of a node in a state, and the state that it leads to."""
    held = dict(zip(alive, state, strict=True))
    read: list[Value] = []
    for ref in node.refs:
        constant = options.graph.nodes[ref].kind == "constant"
        read += options.of(options.graph.nodes[ref], ())[0].values if constant else held[ref]
    for option in options.of(node, read):
        now = held | {ref: (value,) for ref, value in option.paid} | {node.index: option.values}
        yield option, tuple(now[i] for i in later)


def choices_of(label: Label) -> list[Option]:
    """The options of all nodes, in order."""
    return [] if label.trail is None else list(_taken(label.trail))


def _taken(trail: Trail) -> tuple[Option, ...]:
    found: list[tuple[Option, ...]] = []
    at: Trail | None = trail
    while at is not None:
        found.append(at.choices)
        at = at.before
    return tuple(option for choices in reversed(found) for option in choices)


def undominated(labels: list[Label]) -> list[Label]:
    """Those that no other one beats in time, data-parallel time and memory."""
    kept: list[Label] = []
    for label in sorted(labels, key=lambda each: each[:3]):
        if not any(k.data_us <= label.data_us and k.nbytes <= label.nbytes for k in kept):
            kept.append(label)
    if len(kept) <= _MOST:
        return kept
    least, most = (pick(each.nbytes for each in kept) for pick in (min, max))
    best: dict[int, Label] = {}
    for label in kept:
        cell = int((_MOST - 1) * (label.nbytes - least) / max(most - least, 1.0))
        if cell not in best or label.us + label.data_us < best[cell].us + best[cell].data_us:
            best[cell] = label
    smallest = min(kept, key=lambda each: each.nbytes)
    return list({id(each): each for each in (*best.values(), smallest)}.values())
