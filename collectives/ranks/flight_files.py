"""Rings of calls (see `flight`) in files of a folder, where $WEFT_FLIGHT_DIR names one.

    HOST-PID-NS.ring     the ring itself, mapped, and behind it a JSON object that tells whose it is
    HOST-PID-NS.stacks   where all threads of the process were, whenever it got SIGUSR1

Nothing has to be dumped: the file holds the last calls at any moment, also those of a process that
was killed, or hangs in a library. SIGUSR1 is handled below Python, so that it works there as well.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RING, STACKS = ".ring", ".stacks"
_MOST = 1 << 20  # bytes behind the ring that are read


@dataclass(frozen=True)
class KeptRing:
    """A ring that was kept, and whose it is.

    Attributes:
        file: where.
        entries: the ring, of the size that `read` was asked for.
        host, pid: the process.
        began_ns: when it began the ring, ns since 1970.
        clock_ns: what to add to its clock for ns since 1970.
        groups: by hash: the global ranks, and which of these it is, counted from 0.
    """

    file: Path
    entries: bytes
    host: str
    pid: int
    began_ns: int
    clock_ns: int
    groups: dict[int, tuple[list[int], int]]


def make(folder: Path, nbytes: int) -> int:
    """A file for the ring of this process, zeroed, with room on the disk; its descriptor.

    Raises:
        ValueError: it cannot be made there.
    """
    now = time.time_ns()
    path = folder / f"{socket.gethostname()}-{os.getpid()}-{now}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(path.with_name(path.name + RING), flags, 0o600)
        os.posix_fallocate(fd, 0, nbytes)  # a page that lacks room later would be a SIGBUS
        _on_signal(path.with_name(path.name + STACKS))
    except OSError as error:
        raise ValueError(
            f"WEFT_FLIGHT_DIR={folder}: the last calls cannot be kept there, {error.strerror}"
        ) from None
    tell(fd, nbytes, {})
    return fd


def tell(fd: int, nbytes: int, groups: dict[int, tuple[tuple[int, ...], int]]) -> None:
    """Write behind the ring whose it is."""
    told = {
        "ring": nbytes,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "began_ns": time.time_ns(),
        "clock_ns": time.time_ns() - time.monotonic_ns(),
        "groups": {str(hash): [list(ranks), rank] for hash, (ranks, rank) in groups.items()},
    }
    text = json.dumps(told).encode()
    os.pwrite(fd, text, nbytes)
    os.ftruncate(fd, nbytes + len(text))


def _on_signal(path: Path) -> None:
    """Have SIGUSR1 write the stacks of all threads to `path`, and then do what it did before."""
    before = signal.getsignal(signal.SIGUSR1)
    if before is signal.SIG_DFL and _is_caught(signal.SIGUSR1):  # say by a faulthandler before this
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    stacks = os.open(path, flags, 0o600)  # for good
    faulthandler.register(signal.SIGUSR1, stacks, chain=before is not signal.SIG_DFL)


def _is_caught(number: int) -> bool:
    """Whether this process has a handler of a signal, of Python's or another."""
    status = Path("/proc/self/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (number - 1) & 1)


def read(path: Path, nbytes: int) -> KeptRing:
    """The ring of `nbytes` in a file.

    Raises:
        ValueError: the file is none.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(nbytes + _MOST)
    try:
        told: dict[str, Any] = json.loads(data[nbytes:])
        if told["ring"] != nbytes:
            raise ValueError
        groups = {
            int(hash): ([int(each) for each in ranks], int(rank))
            for hash, (ranks, rank) in told["groups"].items()
        }
        began_ns, clock_ns = int(told["began_ns"]), int(told["clock_ns"])
        host, pid = str(told["host"]), int(told["pid"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError):
        raise ValueError("is no ring of calls of this version of weft") from None
    return KeptRing(path, data[:nbytes], host, pid, began_ns, clock_ns, groups)
