"""Lower bounds for all variants, as calls that are timed beside them.

arithmetic    the rank's matmuls, on local inputs (each suite has its own)
memory        a copy that reads and writes as many bytes as the problem at least must
link          reading from the peers' memory as many bytes as must come from there
signal        a signal to every peer and back
"""

from __future__ import annotations

import torch

from weft.bench.problem import Call
from weft.collectives import Group, agree, exchange

_WINDOW_BYTES = 1 << 20
_CHANNEL = "bench bounds"  # of its own, to leave the workspaces of the ops as they are


def copy_of(nbytes: int, device: torch.device) -> Call:
    """Copy `nbytes` of this rank's memory: it reads as many, and writes as many."""
    source = torch.ones(max(nbytes, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda _: target.copy_(source)


def touching(nbytes: int, device: torch.device) -> Call:
    """A copy that touches `nbytes` in all."""
    return copy_of(nbytes // 2, device)


def read_from_peers(nbytes: int, group: Group, device: torch.device) -> Call:
    """Read `nbytes` from the peers, an equal part of each, while they read what they need.

    On a CPU in windows that stay in the cache, as a reader that is in step with the writer does.
    """
    part = -(-nbytes // (group.world_size - 1))
    window = min(part, _WINDOW_BYTES) if device.type == "cpu" else part
    target = torch.empty(max(window, 1), dtype=torch.uint8, device=device)
    room = max(agree(group, "bench", window))  # ranks with smaller shards read more

    def read(_: int) -> None:
        with exchange(group, room, "bench", device, channel=_CHANNEL) as ex:
            ex.signal_all()
            for peer in ex.peers():
                ex.wait(peer)
                theirs = ex.peer(peer, (window,), torch.uint8)
                for start in range(0, part, max(window, 1)):
                    size = min(window, part - start)
                    target[:size].copy_(theirs[:size])

    return read


def round_trip(group: Group, device: torch.device) -> Call:
    """Signal every peer, wait for the signals of all."""

    def signal(_: int) -> None:
        with exchange(group, 0, "bench", device, channel=_CHANNEL) as ex:
            ex.signal_all()

    return signal
