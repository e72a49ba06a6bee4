"""A slow and lossy network between the namespaces of `hosts.sh`, as not every kernel has `netem`.

    tests/switch.py DELAY_MS LOSS_PERCENT NAMESPACE ...

Every namespace gets a device `net` whose frames this process switches: each comes DELAY_MS later,
and LOSS_PERCENT of them never. Prints a line once the devices are there; runs until it is ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import sys
import time

_NEW_NET, _TUNSETIFF, _TAP = 0x40000000, 0x400454CA, 0x0002 | 0x1000  # a frame a read, no header


def tap(namespace: str) -> int:
    """A new device `net` in a namespace, as a file of frames."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as entry:
        if libc.setns(entry.fileno(), _NEW_NET):
            raise OSError(ctypes.get_errno(), f"namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"net", _TAP))
    return device


def main() -> None:
    delay_s, loss = float(sys.argv[1]) / 1e3, float(sys.argv[2]) / 100
    ports = list(map(tap, sys.argv[3:]))
    print("switching", flush=True)
    rng, order = random.Random(0), itertools.count()
    behind: dict[bytes, int] = {}  # who has an address
    late: list[tuple[float, int, int, bytes]] = []
    while True:
        wait = max(late[0][0] - time.monotonic(), 0) if late else None
        for port in select.select(ports, [], [], wait)[0]:
            frame = os.read(port, 1 << 16)
            behind[frame[6:12]] = port
            known = behind.get(frame[:6])
            for to in [known] if known is not None else [p for p in ports if p != port]:
                if rng.random() >= loss:
                    heapq.heappush(late, (time.monotonic() + delay_s, next(order), to, frame))
        while late and late[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(late)
            try:
                os.write(to, frame)
            except OSError:  # it is not up yet, or no more
                continue


if __name__ == "__main__":
    main()
