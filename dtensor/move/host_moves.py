"""A step over several hosts, by its plan of shares: see `host_plans`.

    1. Where values are added up: inside each host, through symmetric memory; then hosts' sums go to
       the givers, by the process group.
    2. Givers send their shares to the keepers, by the process group, into symmetric memory.
    3. A keeper signals inside its host that they have come. Each rank waits for those that it reads
       from, and copies what it takes.                          (release, acquire)

An asynchronous move of CPU tensors returns when 2 has begun. What comes is signalled by the thread
that receives it, so that no rank waits for another to read its own result. On a GPU any move only
enqueues, and nothing is left to do later (`redistribute.move_async`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from weft import settings
from weft.collectives import Exchange, exchange, hosts
from weft.collectives.prices import between_hosts
from weft.collectives.process_groups import OnTheWay
from weft.collectives.ranks.caches import KeptDict
from weft.collectives.ranks.flight import GENERIC, call_of
from weft.collectives.ranks.group import Group, kept_by_group
from weft.collectives.topology import here, inside_of
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import divide_
from weft.dtensor.move.combining import fill_neutral, reduce_terms, summed_in
from weft.dtensor.move.host_plans import HostPlan, Share, block_shape, crossing, host_plan
from weft.dtensor.move.transfers import Step
from weft.errors import WeftError

_ALIGN = 64
# Plans list ranks and shares: at most 0.5 s on 64 ranks, 4 s on 256, once for each pair of layouts.
_MOST_RANKS = 128


@dataclass(frozen=True)
class HostStep(Step):
    """A pull of every rank that goes host by host."""

    group: Group

    @cached_property
    def plan(self) -> HostPlan:
        """Its shares."""
        return host_plan(self, self.group)


def host_step(
    source: Layout, target: Layout, flat: Sequence[Step], group: Group, device: torch.device
) -> HostStep | None:
    """The move as one step host by host, if less crosses than by `flat` steps, in less time. The
    same on every rank; collective until the rates of the hosts are known.
    """
    if group.world_size > _MOST_RANKS:
        return None
    key = group, source, target
    if (found := _steps.get(key)) is None:
        step = HostStep(source, target, group)
        least = sum(map(sum, step.plan.entering))
        found = _steps[key] = step, least < crossing(flat, group)
    step, saves = found
    if not saves:
        return None
    wide, size = summed_in(step, source.dtype).itemsize, source.dtype.itemsize
    most = max(wide * sums + size * results for sums, results in step.plan.entering)
    rounds = step.plan.sums_cross + step.plan.results_cross
    ours = between_hosts.move_us(group, device, rounds, most, step.room)
    received = [max(each.bytes_received) for each in flat]
    return step if ours < between_hosts.flat_move_us(group, device, received) else None


_steps = KeptDict[tuple[Group, Layout, Layout], tuple[HostStep, bool]](1024, f"{__name__}._steps")
kept_by_group.append(_steps)


def move_by_hosts(
    step: HostStep, local: torch.Tensor, channel: str = ""
) -> Generator[None, None, torch.Tensor]:
    """Yields once the shares are on their way; returns this rank's part. Collective."""
    calls = step.group.calls
    with calls.noting(call_of("redistribute", step.told, "hosts")):
        calls.runs(GENERIC)
        return (yield from _moved_by_hosts(step, local, channel))


def _moved_by_hosts(
    step: HostStep, local: torch.Tensor, channel: str
) -> Generator[None, None, torch.Tensor]:
    plan, group = step.plan, step.group
    me, ours = group.rank, here(group)
    given = [share for share in plan.shares if share.giver == me]
    if step.reduce_op:
        values = _sums_to_give(step, local, given)
        offset = 0
    else:
        values = {share.number: local[share.source] for share in given}
        offset = -(-step.room // _ALIGN) * _ALIGN
    room = offset + plan.room * local.element_size()
    op, inside = "redistribute", inside_of(group)
    with (
        hosts.naming(group, op),
        exchange(
            inside, room, op, local.device, channel=channel or "exchange", told=step.told
        ) as ex,
    ):
        if offset and me in plan.read_by_others:
            ex.local(tuple(local.shape), local.dtype).copy_(local)
        kept = ex.local((sum(share.numel for share in plan.kept[me]),), local.dtype, offset)
        way: OnTheWay | None = None
        if plan.results_cross:
            sent = [[(keeper, values[share.number]) for keeper in share.keepers] for share in given]
            receives = [(share.giver, share.numel) for share in plan.kept[me]]
            way = _begun(group, kept, itertools.chain(*sent), receives)
        else:
            for share in plan.kept[me]:
                start = plan.places[me][share.number]
                kept[start : start + share.numel] = values[share.number].reshape(-1)
        # A deferred result must not see what is written to `local` in the meantime.
        local = local.clone() if channel and offset else local
        told = threading.Event()
        if way is None:
            ex.signal_all()
        elif channel:
            way.work.get_future().then(lambda done: _arrived(done, ex, told))
        yield
        if way is not None:
            way.come()
            if not channel:
                ex.signal_all()
            # This call's signals must not come after those of the next.
            elif not told.wait(settings.timeout_s()):
                raise WeftError(
                    f"{op}: what comes from other hosts is here, but the process group's thread "
                    f"has not told this host's ranks within WEFT_TIMEOUT_S"
                )
        return _assembled(step, local, ex, offset, ours)


def _arrived(done: Any, ex: Exchange, told: threading.Event) -> None:
    try:
        done.value()  # raises where the process group has failed: peers must not read that
        ex.signal_all()
    finally:
        told.set()


def _sums_to_give(
    step: HostStep, local: torch.Tensor, given: list[Share]
) -> dict[int, torch.Tensor]:
    """The shares that this rank gives, of the sums of all hosts."""
    plan, group, me = step.plan, step.group, step.group.rank
    wide, ours = summed_in(step, local.dtype), here(group)
    sums: dict[int, torch.Tensor] = {}
    with (
        hosts.naming(group, "redistribute"),
        exchange(inside_of(group), step.room, "redistribute", local.device, told=step.told) as ex,
    ):
        if me in plan.read_by_others:
            ex.local(tuple(local.shape), local.dtype).copy_(local)
        ex.signal_all()
        for share in plan.shares:
            for rank, holders in share.terms:
                if rank == me:
                    terms = [_local_of(step, local, ex, n, ours)[share.source] for n in holders]
                    acc = terms[0].new_empty(terms[0].shape, dtype=wide)
                    sums[share.number] = reduce_terms(step, terms, acc)
    came: dict[int, dict[int, torch.Tensor]] = {}
    if plan.sums_cross:
        sent = [
            (share.giver, sums[share.number])
            for share in plan.shares
            if share.giver != me and any(rank == me for rank, _ in share.terms)
        ]
        coming = sorted((rank, share) for share in given for rank, _ in share.terms if rank != me)
        receives = [(rank, share.numel) for rank, share in coming]
        parts = local.new_empty(sum(n for _, n in receives), dtype=wide)
        _begun(group, parts, sent, receives).come()
        for (rank, share), part in zip(coming, parts.split([n for _, n in receives]), strict=True):
            came.setdefault(share.number, {})[rank] = part.view(block_shape(share.source))
    values = {}
    for share in given:
        terms = [
            sums[share.number] if rank == me else came[share.number][rank]
            for rank, _ in share.terms
        ]
        total = (
            reduce_terms(step, terms, terms[0].new_empty(terms[0].shape)) if terms[1:] else terms[0]
        )
        total = divide_(total, step.scale) if step.scale != 1 else total
        values[share.number] = total.to(local.dtype)
    return values


def _begun(group: Group, out: torch.Tensor, sent: Any, receives: list[tuple[int, int]]) -> OnTheWay:
    """Begin to send (to whom, what), each rank's in their order; `receives`: (from whom, elements)
    in the order of ranks.
    """
    leaving: list[list[torch.Tensor]] = [[] for _ in range(group.world_size)]
    for to, value in sent:
        leaving[to].append(value.reshape(-1))
    coming = [0] * group.world_size
    for of, numel in receives:
        coming[of] += numel
    packed = [each for parts in leaving for each in parts]
    x = torch.cat(packed) if packed else out.new_empty(0)
    sends = [sum(map(torch.Tensor.numel, parts)) for parts in leaving]
    return OnTheWay(x, coming, sends, group, "redistribute", out)


def _local_of(
    step: HostStep, local: torch.Tensor, ex: Exchange, rank: int, ours: Sequence[int]
) -> torch.Tensor:
    """The local tensor of a rank of this host, after waiting for it."""
    position = ours.index(rank)
    if position == ours.index(step.group.rank):
        return local
    ex.wait(position)
    index = step.source.place.ranks.index(step.group.ranks[rank])
    return ex.peer(position, step.source.shape_at(index), local.dtype)


def _assembled(
    step: HostStep, local: torch.Tensor, ex: Exchange, offset: int, ours: Sequence[int]
) -> torch.Tensor:
    """This rank's part, of what the ranks of its host hold and keep."""
    plan, me = step.plan, step.group.rank
    out = local.new_empty(step.target.local_shape)
    if not plan.reads[me]:
        fill_neutral(step, out)
    for read in plan.reads[me]:
        if (share := read.share) is None:
            block = _local_of(step, local, ex, read.of, ours)[read.source]
        else:
            position = ours.index(read.of)
            if read.of != me:
                ex.wait(position)
            at = offset + plan.places[read.of][share.number] * local.element_size()
            block = ex.peer(position, block_shape(share.source), local.dtype, at)
        out[read.target] = block
    return ex.result(out)
