"""Redistribution: from one layout to any other, as planned by `weft.dtensor.move.transfers`.

A step through symmetric memory is one pull:

    1. A rank that others pull from writes its local tensor into symmetric memory.
    2. It signals all.                                      (release)
    3. It waits for each rank that it pulls from, copies the pieces in place.    (acquire)

Pieces of a `Partial` source are added (max, ...) in rank order, half types in fp32, so that
replicas are bitwise equal. If no symmetric memory spans the ranks, the pieces of a step travel in
one all-to-all of a process group. Over several hosts, a step that is a collective along one mesh
dim, or alike along all of them, runs as that, in two levels; others go host by host where that has
less cross: see `host_moves`. An asynchronous redistribution does 1 and 2 at the call, and 3 when
the result is first read; until then no rank waits or is waited for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch.distributed.tensor import Replicate

from weft import settings
from weft.collectives import (
    exchange,
    hosts,
    movement,
    ranks_group,
    spanning_group,
    workspace,
)
from weft.collectives.memory.checks import check_call
from weft.collectives.prices import between_hosts
from weft.collectives.process_groups import REDUCIBLE, OnTheWay, ReduceOp
from weft.collectives.profiled import profiled
from weft.collectives.ranks.flight import GENERIC, call_of
from weft.collectives.ranks.group import Group, kept_by_group, resolve
from weft.collectives.ranks.reports import check_all
from weft.collectives.ranks.traced import is_traced
from weft.dtensor.layout.boxes import Layout, contiguous_layout
from weft.dtensor.layout.placements import (
    is_inexact,
    normalize,
    pieces_of,
    shard_dim,
)
from weft.dtensor.layout.runs import Shape, contiguous_stride
from weft.dtensor.move.collective_plans import collective_plan
from weft.dtensor.move.combining import Blocks, fill_neutral, put_together
from weft.dtensor.move.graph_names import layout_name
from weft.dtensor.move.host_moves import HostStep, host_step, move_by_hosts
from weft.dtensor.move.transfers import MovePlan, PulledPiece, Slices, Step, move_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from weft.collectives.kernels.pull_boxes import Box

# Yields once this rank has published what the others need; returns its local tensor.
Running = Generator[None, None, torch.Tensor]

# How many asynchronous redistributions of a group may be in flight: one more finishes the first.
_SLOTS = 4


def move(local: torch.Tensor, source: Layout, target: Layout) -> torch.Tensor:
    """This rank's part in `target` of what is placed as `source`. Collective; not differentiable.

    The result shares no memory with `local`, unless the layouts are the same.
    """
    if source.index is None and target.index is None:
        return local.new_zeros(target.local_shape, dtype=target.dtype)
    if local.is_meta:
        return local.new_empty(target.local_shape, dtype=target.dtype)
    if is_traced(local):
        names = layout_name(source), layout_name(target)
        moved: torch.Tensor = torch.ops.weft.redistribute(local, source.shape, *names)
        return moved
    return _move_now(local, source, target)


@profiled("redistribute")
def _move_now(local: torch.Tensor, source: Layout, target: Layout) -> torch.Tensor:
    check_all()  # a step that reaches no peer does not
    if settings.check_calls():
        check_call(spanning_group(target.mesh), lambda: f"redistribute of {source} -> {target}")
    for step in _steps(source, target, local.device):
        local = _finish(_start(step, local))
    return local


class Arriving:
    """The result of an asynchronous redistribution, fetched when it is first read."""

    def __init__(self, running: Running) -> None:
        next(running)
        self._running: Running | None = running
        self._result: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        """This rank's local tensor, after waiting for the ranks that it comes from."""
        if self._running is not None:
            self._result, self._running = _finish(self._running), None
        assert self._result is not None
        return self._result

    def redistribute(self, tensor: object, target: Layout) -> None:
        """None: it has to arrive first."""


class _Slots:
    """The asynchronous redistributions of a group, with the same numbers on every rank."""

    def __init__(self) -> None:
        self.count = 0
        self.taken: dict[int, Arriving] = {}


_slots: dict[Group, _Slots] = {}
kept_by_group.append(_slots)


def move_async(local: torch.Tensor, source: Layout, target: Layout) -> torch.Tensor | Arriving:
    """`move` that returns once `local` is published; the result itself if nothing is left to do.

    On a GPU `move` itself only enqueues; on virtual ranks it finishes. Of two steps, only the last
    is deferred.
    """
    outside = source.index is None or target.index is None
    if outside or local.device.type != "cpu" or is_traced(local):
        return move(local, source, target)
    steps = _steps(source, target, local.device, later=True)
    for step in steps[:-1]:
        local = _finish(_start(step, local))
    if not steps:
        return local
    group = _group_of(steps[-1])
    if steps[-1].is_local or group.virtual is not None:
        return _finish(_start(steps[-1], local))
    slots = _slots.setdefault(group, _Slots())
    number = slots.count % _SLOTS
    slots.count += 1
    if (previous := slots.taken.pop(number, None)) is not None:
        previous.value()
    arriving = Arriving(_start(steps[-1], local, f"redistribute {number}"))
    slots.taken[number] = arriving
    return arriving


def _steps(
    source: Layout, target: Layout, device: torch.device, later: bool = False
) -> tuple[Step, ...]:
    steps = move_plan(source, target).steps
    if target.has_own_boxes or source.has_own_boxes:
        return steps  # no collective can move overlapping boxes
    if all(step.is_local for step in steps) or not _group_of(steps[0]).unreached(device):
        return steps
    flat = collective_plan(source, target).steps
    at_once = Step(source, target)
    group = _group_of(at_once)
    if not hosts.offered("redistribute", group):
        return flat
    whole = at_once.mesh_dim is None or len(source.place.sizes) == 1
    if whole and not later and _collective_of(at_once, group, device) is not None:
        return (at_once,)  # as that, parts of it overlap
    by_hosts = host_step(source, target, flat, group, device)
    return flat if by_hosts is None else (by_hosts,)


def redistribute_plan(
    mesh: DeviceMesh,
    shape: Sequence[int],
    dtype: torch.dtype,
    src_placements: Sequence[Placement],
    dst_placements: Sequence[Placement],
    *,
    dst_mesh: DeviceMesh | None = None,
    by_groups: bool = False,
) -> MovePlan:
    """How a redistribution would run, without running it.

    Args:
        mesh: where the tensor is; `dst_mesh` (default: the same) is where it goes.
        shape, dtype: of the global tensor.
        by_groups: plan as if no symmetric memory spanned the ranks.

    Example:
        >>> plan = redistribute_plan(mesh, (8, 8), torch.float32, [Shard(0)], [Shard(1)])
        >>> plan.bytes_received, len(plan.steps)     # 2 ranks: a quarter of the tensor each
        ([64, 64], 1)
    """
    ends = (mesh, src_placements), (dst_mesh or mesh, dst_placements)
    source, target = (
        contiguous_layout(on, normalize(placements, len(shape), on.ndim), tuple(shape), dtype)
        for on, placements in ends
    )
    return (collective_plan if by_groups else move_plan)(source, target)


def _group_of(step: Step) -> Group:
    for layout in (step.target, step.source):
        if len(layout.place.ranks) == len(step.ranks):
            return spanning_group(layout.mesh)
    return ranks_group(step.ranks)


def _start(step: Step, local: torch.Tensor, channel: str = "") -> Running:
    """Begin a step for `_finish` to end, after other steps if it has its own `channel`."""
    if isinstance(step, HostStep):
        if settings.tracing():
            settings.record("redistribute", "hosts", str(step), collective=step.collective)
        return move_by_hosts(step, local, channel)
    receiver = step.target.index
    pieces = step.pieces_of(receiver) if receiver is not None else ()
    group = None if step.is_local else _group_of(step)
    if group is not None and group.unreached(local.device) and step.mesh_dim is not None:
        group = resolve(step.source.mesh.get_group(step.mesh_dim))
    in_two_levels = None if group is None or channel else _as_collective(step, local, group)
    if settings.tracing():
        apart = "hosts" if in_two_levels else "generic"
        reached = group is not None and not group.unreached(local.device)
        way = "local" if group is None else "pull" if reached else apart
        settings.record("redistribute", way, str(step), collective=step.collective)
    if group is None:
        return _keep_own(step, local, pieces)
    if in_two_levels is not None:
        return in_two_levels
    if group.unreached(local.device):
        return _all_to_all(step, local, pieces, group, bool(channel))
    if not channel and _has_kernel(step, local, group):
        return _pull_by_kernel(step, local, pieces, group)
    return _pull(step, local, pieces, group, channel)


def _finish(running: Running) -> torch.Tensor:
    try:
        while True:
            next(running)
    except StopIteration as done:
        result: torch.Tensor = done.value
        return result


def _keep_own(step: Step, local: torch.Tensor, pieces: tuple[PulledPiece, ...]) -> Running:
    yield
    return put_together(step, local, pieces, [[local[p.source] for _ in p.holders] for p in pieces])


def _pull(
    step: Step, local: torch.Tensor, pieces: tuple[PulledPiece, ...], group: Group, channel: str
) -> Running:
    ranks = step.source.place.ranks
    with exchange(
        group,
        step.room,
        "redistribute",
        local.device,
        channel=channel or "exchange",
        told=step.told,
    ) as ex:
        if channel or group.ranks[group.rank] in step.senders:
            published = ex.local(tuple(local.shape), local.dtype).copy_(local)
            # A deferred result must not see what is written to `local` in the meantime.
            local = published if channel else local
        ex.signal_all()
        yield
        of_holder = {step.source.index: local}
        for holder in {holder: None for piece in pieces for holder in piece.holders}:
            if holder not in of_holder:
                peer = group.ranks.index(ranks[holder])
                ex.wait(peer)
                of_holder[holder] = ex.peer(peer, step.source.shape_at(holder), local.dtype)
        blocks = [[of_holder[h][p.source] for h in p.holders] for p in pieces]
        return ex.result(put_together(step, local, pieces, blocks))


class _Collective(NamedTuple):
    """What a step amounts to: how it reduces, the tensor dim that is cut, or -1, and its shards."""

    op: Any
    cut: int
    shapes: list[Shape]


def _collective_of(step: Step, group: Group, device: torch.device) -> _Collective | None:
    """What the step runs as in two levels over several hosts; None if it does not."""
    dim, source, target = step.mesh_dim, step.source, step.target
    if source.mesh != target.mesh:
        return None
    place, dims = source.place, range(len(source.place.sizes)) if dim is None else (dim,)
    ends = {(source.placements[d], target.placements[d]) for d in dims}
    # Those of all mesh dims are in the order of a group of all ranks.
    ordered = list(place.ranks) == sorted(place.ranks) if dim is None else place.ascends[dim]
    if len(ends) > 1 or not ordered or not hosts.offered(step.collective, group):
        return None
    ((old, new),) = ends
    op: Any = getattr(old, "reduce_op", None)
    cut = max(shard_dim(old), shard_dim(new))
    adds = op in get_args(ReduceOp) and source.dtype in REDUCIBLE
    adds &= op != "avg" or is_inexact(source.dtype)
    moves = adds if op else isinstance(new, Replicate)  # from one cut to another by an all-to-all
    if not moves or pieces_of(old) * pieces_of(new) > 1:
        return None
    layout, here = target if op else source, source.coordinate
    every: Sequence[int] = range(group.world_size)
    if dim is not None:
        every = [place.index_at((*here[:dim], i, *here[dim + 1 :])) for i in every]
    shapes = [layout.shape_at(index) for index in every]
    nbytes = max(map(math.prod, shapes)) * source.dtype.itemsize
    nbytes *= group.world_size if cut >= 0 else 1
    if between_hosts.choice(step.collective, group, device, nbytes)[0] != "hosts":
        return None
    return _Collective(op, cut, shapes)


def _as_collective(step: Step, local: torch.Tensor, group: Group) -> Running | None:
    """The step in two levels over several hosts; None if it is not one of their collectives."""
    if (found := _collective_of(step, group, local.device)) is None:
        return None
    op, cut, shapes = found

    def running() -> Running:
        yield
        if cut < 0:
            return movement.all_reduce(local, group, op)
        front, sizes = local.movedim(cut, 0), [shape[cut] for shape in shapes]
        if op:
            moved = movement.scatter(front, group, sizes, op, dim=cut)
        else:
            moved = movement.gather(front, group, sizes, dim=cut)
        return moved.movedim(0, cut).contiguous()

    return running()


def _has_kernel(step: Step, local: torch.Tensor, group: Group) -> bool:
    """Whether a kernel does the pull; the same on every rank."""
    engine = settings.current_engine()
    if engine != "triton" and not (group.on_gpus(local.device) and engine == "auto"):
        return False
    from weft.collectives.device import signals
    from weft.collectives.kernels import pull

    largest = step.room // local.element_size()
    if pull.refusal(local.dtype, step.reduce_op, step.scale, largest):
        return False
    return local.is_cuda or signals.interpreter_ready()[0]


def _pull_by_kernel(
    step: Step, local: torch.Tensor, pieces: tuple[PulledPiece, ...], group: Group
) -> Running:
    from weft.collectives.kernels import pull, pull_boxes

    local = local.contiguous()
    out = local.new_empty(step.target.local_shape)
    if not pieces:
        fill_neutral(step, out)
    align = pull.word_bytes(local, out)
    key = (local.device, align)
    if (table := step.tables.get(key)) is None:
        boxes = [_box(step, piece, group) for piece in pieces]
        table = step.tables[key] = pull_boxes.table_of(
            boxes,
            group.rank,
            local.dtype,
            local.device,
            op=step.reduce_op,
            divisor=step.scale,
            align=align,
        )
    ws = workspace(group, step.room, channel="pull", device=local.device)
    publish = group.ranks[group.rank] in step.senders
    with ws.call("redistribute", step.told):
        pull.launch_pull(local, out, ws, table, publish=publish)
    yield
    return out


def _box(step: Step, piece: PulledPiece, group: Group) -> Box:
    """`piece` as the kernel takes it."""
    from weft.collectives.kernels.pull_boxes import Box

    source = contiguous_stride(step.source.shape_at(piece.holders[0]))
    target = contiguous_stride(step.target.local_shape)

    def start(slices: Slices, strides: Shape) -> int:
        return sum(cut.start * stride for cut, stride in zip(slices, strides, strict=True))

    return Box(
        tuple(group.ranks.index(step.source.place.ranks[holder]) for holder in piece.holders),
        tuple(cut.stop - cut.start for cut in piece.source),
        start(piece.source, source),
        source,
        start(piece.target, target),
        target,
    )


def _all_to_all(
    step: Step, local: torch.Tensor, pieces: tuple[PulledPiece, ...], group: Group, later: bool
) -> Running:
    source_ranks, target_ranks = step.source.place.ranks, step.target.place.ranks
    me = group.ranks[group.rank]
    sends: dict[int, list[torch.Tensor]] = {rank: [] for rank in group.ranks}
    if (holder := step.source.index) is not None:
        for receiver, rank in enumerate(target_ranks):
            if rank in sends and rank != me:
                theirs = step.taken_from(holder, receiver)
                sends[rank] = [local[piece.source].reshape(-1) for piece in theirs]
    receives = dict.fromkeys(group.ranks, 0)
    for piece in pieces:
        for holder in piece.holders:
            if source_ranks[holder] != me:
                receives[source_ranks[holder]] += piece.numel
    packed = [block for rank in group.ranks for block in sends[rank]]
    outgoing = torch.cat(packed) if packed else local.new_empty(0)
    with group.calls.noting(call_of("redistribute", step.told, "generic")):
        group.calls.runs(GENERIC)
        leaving = [sum(map(torch.Tensor.numel, sends[rank])) for rank in group.ranks]
        way = OnTheWay(outgoing, [*receives.values()], leaving, group, "redistribute")
        local = local.clone() if later else local
        yield
        incoming = way.come()
    starts = dict(
        zip(group.ranks, itertools.accumulate([0, *list(receives.values())[:-1]]), strict=True)
    )
    blocks: Blocks = []
    for piece in pieces:
        terms = []
        for holder in piece.holders:
            rank = source_ranks[holder]
            block = local[piece.source]
            if rank != me:
                shape = tuple(part.stop - part.start for part in piece.source)
                block = incoming[starts[rank] : starts[rank] + piece.numel].view(shape)
                starts[rank] += piece.numel
            terms.append(block)
        blocks.append(terms)
    return put_together(step, local, pieces, blocks)
