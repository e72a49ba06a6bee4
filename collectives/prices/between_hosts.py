"""What collectives take over several hosts: flat, by the process group, and in two levels.

Times in us, by the rates that `cost` measures: straight lines over the bytes of the whole array
(the output of an all-gather, the input of a reduction).

    flat           the process group's ring of all ranks; Gloo's reduce-scatter is its all-reduce
    two levels     what a rank receives from other hosts, through the slowest links; an exchange and
                   a copy inside for every host's rows

Nothing is taken to hide anything: in large calls, and fused ones, the levels overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from weft import settings
from weft.collectives import cost
from weft.collectives.protocols import group_passes
from weft.collectives.ranks.caches import KeptDict
from weft.collectives.ranks.group import Group, kept_by_group
from weft.collectives.topology import hosts_in_words


class Line(NamedTuple):
    """us of a call of no bytes, and us a byte; `between` and `inside` are parts of that."""

    start: float
    per_byte: float
    between: float = 0.0
    inside: float = 0.0

    def us(self, nbytes: float) -> float:
        return self.start + self.per_byte * nbytes


_lines = KeptDict[tuple[Group, str, str], tuple[Line, Line]](4096, f"{__name__}._lines")
kept_by_group.append(_lines)
cost.kept_by_rates.append(_lines)


def lines(op: str, group: Group, device: torch.device) -> tuple[Line, Line]:
    """Of a collective in two levels, and flat. Collective until the rates are known."""
    key = group, op, device.type
    if (found := _lines.get(key)) is None:
        rates = cost.machine(group, device)
        on_gpus = group.on_gpus(device)
        found = _lines[key] = (
            _in_two_levels(op, group, rates),
            _in_one_level(op, group, rates, on_gpus),
        )
    return found


def choice(
    op: str, group: Group, device: torch.device, nbytes: int
) -> tuple[Literal["hosts", "generic"], str]:
    """The quicker way of a collective, and why. `nbytes` is the same on every rank."""
    ours, flat = (line.us(nbytes) for line in lines(op, group, device))
    told = ""
    if settings.tracing():
        told = f"{hosts_in_words(group)}: predicted {ours:.3g} us in two levels, {flat:.3g} us flat"
    return "hosts" if ours < flat else "generic", told


def slowest(rates: cost.Machine) -> float:
    """Bytes per us that a rank receives from the host of which it hears least."""
    return min((rate for row in rates.between for rate in row if rate > 0), default=1e-9)


def _in_one_level(op: str, group: Group, rates: cost.Machine, on_gpus: bool) -> Line:
    W = group.world_size
    passes = group_passes(op, on_gpus)
    return Line(passes * rates.wire_us, passes * (W - 1) / W / max(rates.wire, 1e-9))


def _in_two_levels(op: str, group: Group, rates: cost.Machine) -> Line:
    if op == "all_reduce":
        parts = [_in_two_levels(each, group, rates) for each in ("reduce_scatter", "all_gather")]
        return Line(*(sum(each) for each in zip(*parts, strict=True)))
    hosts, W, between = group.hosts, group.world_size, 0.0
    for target, here in enumerate(hosts):
        shares = {source: len(ranks) / W for source, ranks in enumerate(hosts) if source != target}
        if op == "reduce_scatter":  # each other host's sum of this one's rows
            shares = dict.fromkeys(shares, len(here) / W)
        elif op == "broadcast":  # all of it, from one of them
            shares = dict.fromkeys(shares, 1 / len(shares))
        through = sum(
            share / max(rates.between[source][target], 1e-9) for source, share in shares.items()
        )
        between = max(between, through / len(here))
    inside = 1 / max(rates.copy, 1e-9)
    start = rates.between_us + 2 * len(hosts) * rates.sync_us
    return Line(start, between + inside, between, inside)


def move_us(
    group: Group, device: torch.device, rounds: int, nbytes: int, inside_bytes: int
) -> float:
    """Of a redistribution host by host: in `rounds` between hosts a rank receives `nbytes`; twice,
    ranks of a host read from each other. Collective until the rates are known.
    """
    rates = cost.machine(group, device)
    crossing = rounds * rates.between_us + nbytes / slowest(rates)
    return crossing + 2 * rates.sync_us + 2 * inside_bytes / max(rates.copy, 1e-9)


def flat_move_us(group: Group, device: torch.device, received: Sequence[int]) -> float:
    """Of a redistribution by the process group, in whose steps a rank receives so many bytes."""
    return sum(map(cost.machine(group, device).wire_time_us, received))
