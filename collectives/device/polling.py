"""What an interpreted kernel does while it waits: it lets other ranks run between two polls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import triton.language as tl

from weft.collectives.ranks import reports

_last_poll = (0, 0, 0.0)  # address, value, time


def _sleep(address: int, value: int) -> int:
    global _last_poll
    reports.watch_all()
    time.sleep(50e-6)
    now, last = time.perf_counter(), _last_poll
    _last_poll = (address, value, now)
    return max(1, round((now - last[2]) * 1e9)) if last[:2] == (address, value) else 1


# What an interpreted rank does between two polls of a signal, given the signal's address and the
# awaited value; returns how many nanoseconds it counts for. A scheduler of virtual ranks replaces
# it to switch to another rank.
on_poll: Callable[[int, int], int] = _sleep

# Called before the first poll of every wait, with the signals' addresses and the awaited value.
on_wait: Callable[[list[int], int], None] | None = None

# Called with the generation before loads and stores of flagged words (`flagged`), and with 0 after.
on_flagged: Callable[[int], None] | None = None


def _addresses(ptr: Any, mask: Any) -> list[int]:
    places = ptr.handle.data
    if isinstance(mask, tl.tensor):
        places = places[mask.handle.data]
    found: list[int] = places.reshape(-1).tolist()
    return found


def begin_polls(ptr: Any, value: Any, mask: Any = True, _semantic: Any = None) -> None:
    """Report the start of a wait. Only interpreted kernels call this."""
    addresses = _addresses(ptr, mask)
    if on_wait is not None and addresses:
        on_wait(addresses, int(value))


def pause(ptr: Any, value: Any, mask: Any = True, _semantic: Any = None) -> int:
    """Let others run before the next poll. Only interpreted kernels call this."""
    return on_poll(_addresses(ptr, mask)[0], int(value))


def as_flagged(generation: Any, _semantic: Any = None) -> None:
    """Report that loads and stores are of words of this generation, or no more (0). Only
    interpreted kernels call this."""
    if on_flagged is not None:
        on_flagged(int(generation))


# Triton's code generator rejects plain functions, even in branches that it drops.
for _function in (begin_polls, pause, as_flagged):
    setattr(_function, tl.core.TRITON_BUILTIN, True)
