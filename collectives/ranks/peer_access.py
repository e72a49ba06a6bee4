"""Whether GPUs of ranks can address each other's memory as symmetric memory needs it.

Loads and stores go over NVLink and over PCIe alike. Triton before 3.9 spells the release store of a
signal as an atomic exchange, though, and PCIe carries no atomics between most GPUs: there such a
Triton leaves calls to the process group. The driver knows, of GPUs that this process sees; of
others NVML, which not every container has.

An NVLink domain may span machines, as in a GB200 NVL72: its GPUs reach each other's memory by
fabric handles, which torch's symmetric memory then exchanges (built with CUDA 12.4 or newer).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from weft import settings

_ATOMICS = 3  # NVML_P2P_CAPS_INDEX_ATOMICS; CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, too
_logger = logging.getLogger("weft")
_WHAT = "the GPUs of the ranks"


class Gathers(Protocol):
    """What is needed of a `Group` that is being made."""

    def gather_objects(self, mine: str, what: str) -> list[str]: ...


def why_gpus_do_not_reach(group: Gathers) -> str:
    """Why a rank's GPU cannot address another's memory, the same on every rank; empty if all can.

    For a GPU that neither this process nor NVML sees, torch finds out later.
    """
    numbers = {_uuid(i): i for i in range(torch.cuda.device_count())}
    own, why = torch.cuda.current_device(), ""
    for uuid in group.gather_objects(_uuid(own), _WHAT):
        peer = numbers.get(uuid, own)
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            why = f"GPU {own} has no peer access to GPU {peer}"
        elif uuid != _uuid(own) and not why and not _signals_arrive(own, peer, uuid):
            there = f"GPU {peer}" if peer != own else f"GPU {uuid}"
            why = (
                f"GPU {own} has no native atomics on {there}, as over PCIe, and signals of Triton "
                f"before 3.9 are atomics: install triton >= 3.9"
            )
    return next(filter(None, group.gather_objects(why, _WHAT)), "")


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def _signals_arrive(own: int, peer: int, uuid: str) -> bool:
    """Whether GPU `own` can signal to that of `uuid`: `peer` is its number, or `own` if unseen."""
    import triton.language as tl

    if hasattr(tl, "atomic_store"):
        return True
    seen = _driver_knows(own, peer) if peer != own else None
    found = native_atomics(_uuid(own), uuid) if seen is None else seen
    if found is None:
        _logger.warning(
            "nobody tells whether GPU %s has native atomics on %s. If not, as over PCIe, signals "
            "of Triton before 3.9 do not arrive, and calls time out",
            own, uuid,
        )  # fmt: skip
    return found is not False


def _driver_knows(own: int, peer: int) -> bool | None:
    """What CUDA's driver says of two GPUs that this process sees; None without such a driver."""
    if torch.version.hip:
        return None
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found, devices = ctypes.c_int(), []
    for number in (own, peer):
        device = ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(device), number):
            return None
        devices.append(device)
    if cuda.cuDeviceGetP2PAttribute(ctypes.byref(found), _ATOMICS, *devices):
        return None
    return bool(found.value)


def native_atomics(own: str, peer: str) -> bool | None:
    """Whether a GPU's atomics work in another's memory; None if it cannot be told.

    Args:
        own, peer: their uuids, with or without NVML's "GPU-" in front.
    """
    if torch.version.hip:
        return None
    with _nvml() as nvml:
        if nvml is None:
            return None
        handles = []
        for uuid in (own, peer):
            handle = ctypes.c_void_p()
            name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
            if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
                return None
            handles.append(handle)
        status = ctypes.c_int()
        if nvml.nvmlDeviceGetP2PStatus(*handles, _ATOMICS, ctypes.byref(status)):
            return None
        return status.value == 0


class _FabricInfo(ctypes.Structure):
    """NVML's nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


_REGISTERED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED


def nvlink_domain() -> str:
    """The domain in which this rank's GPU reaches others by fabric handles; empty without one.

    WEFT_NVLINK says it for those who know better.
    """
    if given := settings.given_nvlink_domain():
        return "" if given == "0" else given
    if not torch.cuda.is_available() or not _exchanges_fabric_handles(torch.version.cuda):
        return ""
    with _nvml() as nvml:
        handle = ctypes.c_void_p()
        name = f"GPU-{_uuid(torch.cuda.current_device()).removeprefix('GPU-')}".encode()
        if nvml is None or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
            return ""
        return _domain_of(nvml, handle)


def _exchanges_fabric_handles(cuda: str | None) -> bool:
    return cuda is not None and tuple(map(int, cuda.split(".")[:2])) >= (12, 4)


def _domain_of(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> str:
    info = _FabricInfo()
    if not hasattr(nvml, "nvmlDeviceGetGpuFabricInfo"):  # a driver before 525
        return ""
    if nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info)):
        return ""
    cluster = bytes(info.cluster)
    ready = info.state == _REGISTERED and info.status == 0 and any(cluster)
    return f"{cluster.hex()}.{info.clique}" if ready else ""


@contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    """The library of NVIDIA's driver, ready to be asked; None if there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2():
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()
