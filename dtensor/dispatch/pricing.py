"""Pricing: what each strategy of a call takes along a mesh dim, and the choice of the cheapest.

    candidate = (inputs -> outputs, way)        price = us that it takes beyond its computation

Without a way every argument that has to move is a collective of its own, before the op begins: one
pull, along however many mesh dims. A fused op moves while it computes. Both are priced by the model
that engines are chosen by (`weft.kernels.engine.engines`), at rates that are typical of the kind of
device: results are then placed alike on every machine, and on ranks that have measured other rates.
The engine of a fused op is chosen by the measured ones, when it runs.

A sum over ranks costs nothing yet. Where arguments were moved to get one it counts, as it has to
be reduced on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft import settings
from weft.collectives import cost
from weft.dtensor.dispatch.call import PENDING, Choices, Chosen, OpCall, Strategy, Way
from weft.dtensor.layout.boxes import Layout, layout_of
from weft.dtensor.layout.placements import is_shard, shard_dim, show
from weft.dtensor.layout.symbolic import present
from weft.dtensor.move.transfers import elements_received, same_shard, transition_bytes
from weft.kernels.engine.engines import collective_us

_IMPOSSIBLE = float("inf")


@dataclass(frozen=True)
class Candidate:
    """A strategy along one mesh dim: what it takes, how many tensors it changes; why it is out."""

    strategy: Strategy
    us: float
    changes: int = 0
    refusal: str = ""

    def told(self, taken: Candidate) -> str:
        """A line for `weft.explain`."""
        strategy = self.strategy
        way = "" if strategy.way is None else f" by {strategy.way.name}"
        line = f"{show(strategy.inputs)} -> {show(strategy.outputs)}{way}: "
        if self.refusal:
            return line + self.refusal
        price = f"{self.us:.3g} us"
        if self is taken:
            return f"{line}{price}, taken"
        if (self.us, self.changes) == (taken.us, taken.changes):
            return f"{line}{price}, the same as what is taken"
        if self.us == taken.us:
            return f"{line}{price}, but cuts {self.changes} tensors instead of {taken.changes}"
        return f"{line}dearer, {price} against {taken.us:.3g}"


def choose_strategies(
    call: OpCall, choices: Choices, writes: list[int], plain: list[bool]
) -> Chosen:
    """Take the cheapest strategy for each mesh dim; the first among equals.

    One fused op serves a call, along the first mesh dim that takes one. Sums along others are then
    left to be reduced by themselves.
    """
    told = choices.told or any(s.way is not None for s in choices.strategies)
    taken: list[Strategy] = []
    considered: list[tuple[Candidate, list[Candidate]]] = []
    way, way_dim = None, 0
    moving: set[int] = set()
    for mesh_dim in range(call.mesh.ndim):
        running = _is_at_once(way)
        offers = [
            _priced(call, s, mesh_dim, writes, plain, running, moving) for s in choices.strategies
        ]
        if choices.stays is not None:
            offers = _with_weight_in_place(call, offers, choices.stays, mesh_dim)
        best = min(offers, key=lambda offer: (offer.us, offer.changes))
        if best.refusal:
            raise RuntimeError(
                f"{call}: no strategy fits mesh dim {mesh_dim}. Redistribute its tensors to "
                f"Replicate() first."
            )
        taken.append(best.strategy)
        moving |= {
            i
            for i, (layout, wanted) in enumerate(
                zip(call.inputs, best.strategy.inputs, strict=True)
            )
            if _moving_us(layout, mesh_dim, wanted)
        }
        if best.strategy.way is not None and not running:
            way, way_dim = best.strategy.way, mesh_dim
        if told:
            considered.append((best, offers))
    if _is_at_once(way) and (apart := _in_one_pull(call, choices, taken, way_dim)):
        offers = considered[way_dim][1]
        taken[way_dim], way = apart.strategy, None
        considered[way_dim] = (
            apart,
            [apart if o.strategy == apart.strategy else o for o in offers],
        )
    inputs, outputs, _ = zip(*taken, strict=True)
    placed = [*zip(*inputs, strict=True)], [*zip(*outputs, strict=True)]
    return Chosen(*placed, choices.localize, way, way_dim, considered)


def _in_one_pull(
    call: OpCall, choices: Choices, taken: list[Strategy], way_dim: int
) -> Candidate | None:
    """The fused op's work before the op, if its first argument moves along other mesh dims, too,
    and one pull of all that is cheaper than a pull and the fused op.
    """
    fused, x = taken[way_dim], call.inputs[0]
    wanted = (Replicate(), *fused.inputs[1:])
    plain = next(
        (s for s in choices.strategies if s == Strategy(wanted, fused.outputs, None)), None
    )
    others = [dim for dim in range(call.mesh.ndim) if dim != way_dim]
    if plain is None or not any(_moving_us(x, dim, taken[dim].inputs[0]) for dim in others):
        return None
    begun = collective_us(0, cost.typical(call.mesh.device_type))
    us = _moving_us(x, way_dim, Replicate()) - begun
    assert fused.way is not None
    price = fused.way.price(call, way_dim)
    changes = sum(
        layout.placements[way_dim] != p for layout, p in zip(call.inputs, wanted, strict=True)
    )
    return Candidate(plain, us, changes) if not isinstance(price, str) and us < price else None


def tell_choice(
    op: str,
    considered: Sequence[tuple[Candidate, list[Candidate]]],
    way: Way | None,
    *layouts: Layout | None,
) -> None:
    """Tell `weft.explain` the candidates of each mesh dim, with their prices, if it listens."""
    if not (settings.tracing() and considered):
        return
    several = len(considered) > 1
    lines = tuple(
        (f"mesh dim {mesh_dim}: " if several else "") + offer.told(best)
        for mesh_dim, (best, offers) in enumerate(considered)
        for offer in offers
    )
    why = "the cheapest" if way is None else f"{way.name} is the cheapest"
    shapes = ", ".join(repr(layout) for layout in layouts if layout is not None)
    settings.record(op, "shards", why, shapes, candidates=lines)


def _priced(
    call: OpCall,
    strategy: Strategy,
    mesh_dim: int,
    writes: list[int],
    plain: list[bool],
    running: bool,
    moving: set[int],
) -> Candidate:
    """A strategy on one mesh dim.

    Args:
        running: whether another mesh dim has taken a fused op.
        moving: arguments that move along earlier mesh dims, which this dim's move is one pull with.
    """

    def impossible(why: str) -> Candidate:
        return Candidate(strategy, _IMPOSSIBLE, refusal=why)

    us, changes = 0.0, 0
    begin = collective_us(0, cost.typical(call.mesh.device_type))
    for i, (layout, wanted) in enumerate(zip(call.inputs, strategy.inputs, strict=True)):
        old = layout.placements[mesh_dim]
        if old == wanted:
            continue
        if plain[i] and (i in writes or layout.shape == ()):
            return impossible(f"argument {i} is a plain tensor that cannot be cut")
        if isinstance(wanted, Partial) and not isinstance(old, Replicate):
            return impossible(f"argument {i} is {show([old])} and cannot become a sum")
        if is_shard(wanted) and shard_dim(wanted) >= len(layout.shape):
            return impossible(f"argument {i} has no dim {shard_dim(wanted)}")
        moved = _moving_us(layout, mesh_dim, wanted)
        us += moved - (begin if moved and i in moving else 0.0)
        if i in writes:  # and back
            there = list(layout.placements)
            there[mesh_dim] = wanted
            us += _moving_us(layout.with_placements(there), mesh_dim, old)
        changes += 1
    if len(writes) == len(strategy.outputs) and any(
        strategy.inputs[i] != out for i, out in zip(writes, strategy.outputs, strict=True)
    ):
        # An in-place result keeps the placement of the tensor that is written.
        return impossible("what is written would be placed otherwise")
    if us and not writes:
        for meta, out in zip(call.outputs, strategy.outputs, strict=False):
            if isinstance(out, Partial) and meta.shape:
                along = tuple(out if d == mesh_dim else Replicate() for d in range(call.mesh.ndim))
                total = layout_of(call.mesh, along, meta.shape, meta.stride, meta.dtype)
                us += _moving_us(total, mesh_dim, Shard(0))
    if strategy.way is not None:
        if running:
            return impossible("another mesh dim has a fused op")
        price = strategy.way.price(call, mesh_dim)
        if isinstance(price, str):
            return impossible(price)
        us += price
    return Candidate(strategy, us, changes)


def _moving_us(layout: Layout, mesh_dim: int, wanted: Placement) -> float:
    old = layout.placements[mesh_dim]
    if isinstance(old, Replicate) and any(
        same_shard(wanted, p) for p in layout.placements[mesh_dim + 1 :]
    ):
        # A cut above another one gives ranks other parts, not parts of their own.
        there = layout.closed()
        placed = [*there.placements]
        placed[mesh_dim] = wanted
        elements = elements_received(there, there.with_placements(placed))
        nbytes = float(elements.max()) * layout.dtype.itemsize
    else:
        nbytes = present(transition_bytes(layout, mesh_dim, wanted))
    return collective_us(nbytes, cost.typical(layout.mesh.device_type)) if nbytes else 0.0


def _is_at_once(way: Way | None) -> bool:
    """Whether it is a fused op that runs now, not one that may reduce a sum later."""
    return way is not None and way.name != PENDING


def _with_weight_in_place(
    call: OpCall, offers: list[Candidate], stays: int, mesh_dim: int
) -> list[Candidate]:
    """Without those that move the weight, where a fused op leaves it where it is.

    They may be cheaper now, but its gradient would have to move back.
    """
    here = call.inputs[stays].placements[mesh_dim]
    in_place = [o.strategy.inputs[stays] == here for o in offers]
    if not any(
        kept and offer.strategy.way is not None and not offer.refusal
        for kept, offer in zip(in_place, offers, strict=True)
    ):
        return offers
    return [
        offer
        if kept or offer.refusal
        else Candidate(offer.strategy, _IMPOSSIBLE, refusal="moves the weight, which is placed")
        for kept, offer in zip(in_place, offers, strict=True)
    ]
