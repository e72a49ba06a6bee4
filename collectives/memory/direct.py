"""Reading a peer's private memory: one copy instead of two.

Through shared memory a byte is copied twice, into it and out of it, and the second copy fetches
what another core has just written. Linux can copy from the memory of one process to that of another
directly (process_vm_readv, "cross-memory attach"), from 64 KiB on at about the rate of memcpy:

    each rank   tells its tensor's address  ->  reads pieces of the others'  ->  waits for readers

Processes may do so if they belong to one user and nothing (Yama, seccomp) forbids it. Whether it
works is tried once for each group; where it does not, symmetric memory is used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets

import torch

from weft import settings
from weft.collectives.memory.exchange import agree
from weft.collectives.memory.workspace import workspace
from weft.collectives.ranks import pad
from weft.collectives.ranks.flight import Call
from weft.collectives.ranks.group import Group, kept_by_group

_LONGEST_READ = 1 << 30  # the kernel reads a little less than 2 GiB at once


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


def _read_process(pid: int, address: int, into: int, nbytes: int) -> int:
    """Copy `nbytes` from `address` in process `pid`. Returns 0, or the error number."""
    if not hasattr(_libc, "process_vm_readv"):
        return errno.ENOSYS
    done = 0
    while done < nbytes:
        size = min(nbytes - done, _LONGEST_READ)
        here, there = _Range(into + done, size), _Range(address + done, size)
        count = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count < 0:
            return ctypes.get_errno()
        done += count
    return 0


_reaches: dict[Group, bool] = {}
kept_by_group.append(_reaches)


def reaches(group: Group) -> bool:
    """Whether every rank of `group` can read every other's memory. Collective the first time.

    WEFT_DIRECT=0 in the environment of any rank says no.
    """
    if group.unreached(torch.device("cpu")) or group.world_size == 1:
        return False
    if group.virtual is not None:
        return settings.direct_reads()
    known = _reaches.get(group)
    if known is None:
        # In containers a pid may belong to another process: the value read decides.
        nonce = torch.tensor([secrets.randbits(62)], device="cpu")
        told = group.gather_objects((nonce.data_ptr(), nonce.item()), "direct reads")
        seen = torch.zeros_like(nonce)
        works = settings.direct_reads() and all(
            _read_process(process.pid, address, seen.data_ptr(), 8) == 0 and seen.item() == value
            for process, (address, value) in zip(group.processes, told, strict=True)
        )
        known = _reaches[group] = all(group.gather_objects(works, "direct reads"))
    return known


class Readable:
    """`x` of every rank, readable by all until `done`. Making one is collective.

    Args:
        op: name of the call.
        call: the call of which this is a part, the same on every rank.
        x: contiguous, on the CPU.

    Raises:
        PeerTimeout: a rank did not come, or died.
        MismatchError: the ranks' calls differ.
    """

    def __init__(self, group: Group, op: str, call: Call, x: torch.Tensor) -> None:
        self._group, self._op, self._call = group, op, call
        self._x = x  # kept alive, as others read it
        if group.virtual is not None:
            group.virtual.share(x)
        self._addresses = agree(group, op, x.data_ptr(), call=call)

    def read(self, peer: int, start: int, out: torch.Tensor) -> None:
        """Fill the contiguous `out` from `peer`'s `x`, from its element number `start` on."""
        size = out.element_size()
        address = self._addresses[peer] + start * size
        if self._group.virtual is not None:
            self._group.virtual.read(address, out)
            return
        pid = self._group.processes[peer].pid
        failure = _read_process(pid, address, out.data_ptr(), out.numel() * size)
        if failure == errno.ESRCH:
            ws = workspace(self._group, channel="agree", device="cpu")
            ws.waiter.give_up(peer, ws.own[pad.GENERATION], self._op, 0.0)
        if failure:
            raise RuntimeError(
                f"{self._op}: could not read {out.numel() * size} bytes of rank {peer}: "
                f"{os.strerror(failure)}. WEFT_DIRECT=0 uses shared memory instead."
            )

    def done(self) -> None:
        """Collective: after it nobody reads this rank's `x` any more.

        Making another `Readable` of the group has the same effect.
        """
        agree(self._group, self._op, 0, call=self._call)
