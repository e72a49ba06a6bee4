"""The last calls of all ranks out of a folder of `WEFT_FLIGHT_DIR`, for `weft doctor --flight`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from weft.collectives.ranks import flight, flight_files
from weft.collectives.ranks.flight import Noted
from weft.errors import printable

_SHOWN = 12  # calls of a group


@dataclass(frozen=True)
class _Group:
    """A group, and the rings of those of its ranks that have left one."""

    ranks: list[int]
    rings: dict[int, flight_files.KeptRing]
    calls: dict[int, dict[int, Noted]]

    def when(self, at: Noted, rank: int) -> str:
        """When a call began."""
        seconds, ns = divmod(at.began + self.rings[rank].clock_ns, 10**9)
        try:
            return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{ns // 10**6:03}"
        except (OverflowError, OSError, ValueError):
            return "?"


def ring_lines(folder: Path) -> Iterator[str]:
    """What the rings in `folder` tell, group by group, the last one to call at the end.

    Raises:
        ValueError: there is no such folder, or a ring in it cannot be read.
    """
    rings = _kept_rings(folder)
    groups = [_ring_group(hash, rings) for hash in {hash for ring in rings for hash in ring.groups}]
    seen = [group for group in groups if group.calls]
    yield f"{len(rings)} rings, {len(seen)} groups that have made calls"
    for group in sorted(seen, key=_last_began):
        yield ""
        yield from _group_lines(group)


def _kept_rings(folder: Path) -> list[flight_files.KeptRing]:
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(flight_files.RING))
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read, {error.strerror}") from None
    if not paths:
        raise ValueError(
            f"{folder}: holds no rings of calls: run with WEFT_FLIGHT_DIR={folder} on every rank"
        )
    rings = []
    for path in paths:
        try:
            rings.append(flight_files.read(path, flight.BYTES))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read, {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}; delete it") from None
    return rings


def _ring_group(hash: int, rings: Sequence[flight_files.KeptRing]) -> _Group:
    members = {ring.groups[hash][1]: ring for ring in rings if hash in ring.groups}
    ranks = next(iter(members.values())).groups[hash][0]
    readers = {rank: flight.Reader(ring.entries) for rank, ring in sorted(members.items())}
    return _Group(ranks, members, flight.by_position(readers, hash))


def _last_began(group: _Group) -> int:
    return max(
        entry.began + group.rings[rank].clock_ns
        for entries in group.calls.values()
        for rank, entry in entries.items()
    )


def _group_lines(group: _Group) -> Iterator[str]:
    yield f"group of {len(group.ranks)}, global ranks {_spans(group.ranks)}"
    for rank, ring in sorted(group.rings.items()):
        stacks = ring.file.with_suffix(flight_files.STACKS)
        told = f", stacks in {stacks.name}" if stacks.exists() and stacks.stat().st_size else ""
        yield printable(f"  rank {rank}: process {ring.pid} on {ring.host}{told}")
    if lost := sorted(set(range(len(group.ranks))) - set(group.rings)):
        yield f"  no ring of {flight.ranks_told(lost)}"
    parts = flight.parting(group.calls)
    shown = sorted(group.calls)[-_SHOWN:]
    if parts is not None and parts < shown[0]:
        shown = [parts, *shown[1:]]
    rows = [
        row for position in shown for row in _call_rows(group, position, "*" * (position == parts))
    ]
    head = "call", "what", "on", "done", "failed", "under way", "not begun"
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield printable(f"  {'  '.join(padded)}".rstrip())
    if parts is None:
        behind = {
            rank: max((at for at, entries in group.calls.items() if rank in entries), default=0)
            for rank in group.rings
        }
        least, most = min(behind.values()), max(behind.values())
        late = [rank for rank in sorted(behind) if behind[rank] == least]
        stopped = f"; {flight.ranks_told(late)} went no further than call {least}"
        yield "  all made the same calls" + stopped * (least < most)
    else:
        yield f"  * they part at call {parts}"


def _call_rows(group: _Group, position: int, mark: str) -> Iterator[tuple[str, ...]]:
    """A call: a row for each thing that ranks have called there."""
    entries = group.calls[position]
    last = max(group.calls)
    # What an old ring has lost is no call that a rank has missed.
    missing = [
        r for r in sorted(group.rings) if r not in entries and position + flight.CALLS > last
    ]
    for text, ranks in flight.by_text(entries).items():
        done = [rank for rank in ranks if entries[rank].ended > 0]
        failed = [rank for rank in ranks if entries[rank].ended < 0]
        waits = [rank for rank in ranks if not entries[rank].ended]
        since = f"{_spans(waits)}, since {group.when(entries[waits[0]], waits[0])}" if waits else ""
        runs = ", ".join(sorted({_run_words(entries[rank]) for rank in ranks} - {""}))
        yield f"{position}{mark}", text, runs, _spans(done), _spans(failed), since, _spans(missing)


def _run_words(entry: Noted) -> str:
    stream = f"stream {entry.stream:#x}" if entry.stream else ""
    return " ".join(filter(None, (entry.run, stream)))


def _spans(ranks: Iterable[int]) -> str:
    """Example: 0-2, 5."""
    runs = groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])
    ends = [[rank for _, rank in run] for _, run in runs]
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in ends)
