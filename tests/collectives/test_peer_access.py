"""Which GPUs symmetric memory joins, with torch.cuda and NVML played by objects."""
# ruff: noqa: N802  # NVML names its functions

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl

from weft.collectives.ranks import peer_access
from weft.collectives.ranks.peer_access import native_atomics, why_gpus_do_not_reach

NO_ATOMICS = (
    "GPU 0 has no native atomics on GPU 1, as over PCIe, and signals of Triton before 3.9 are "
    "atomics: install triton >= 3.9"
)


class Nvml:
    """Knows GPU-0 and GPU-1."""

    def __init__(self, status: int) -> None:
        self.status, self.open = status, 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = uuid[-1]
        return 0 if uuid in (b"GPU-0", b"GPU-1") else 6

    def nvmlDeviceGetP2PStatus(self, own: Any, peer: Any, capability: int, status: Any) -> int:
        assert (own.value, peer.value, capability) == (ord("0"), ord("1"), 3)
        status._obj.value = self.status
        return 0


class Driver:
    """Of two GPUs."""

    def __init__(self, atomics: bool) -> None:
        self.atomics = atomics

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number + 10
        return 0

    def cuDeviceGetP2PAttribute(self, found: Any, what: int, own: Any, peer: Any) -> int:
        assert (what, own.value, peer.value) == (3, 10, 11)
        found._obj.value = self.atomics
        return 0


def libraries(driver: Driver | None, nvml: Nvml | None) -> Any:
    """In place of ctypes.CDLL."""

    def library(name: str) -> Any:
        found = driver if "libcuda" in name else nvml
        if found is None:
            raise OSError(name)
        return found

    return library


@pytest.mark.parametrize(
    ("gpus", "reached", "status", "why"),
    [
        (["GPU-0", "GPU-1"], True, 0, ""),
        (["GPU-0", "GPU-1"], True, 1, NO_ATOMICS),
        (["GPU-0", "GPU-0"], False, 1, ""),  # they share one
        (["GPU-0", "hidden"], False, 1, ""),  # unknown to NVML, too
        (["GPU-0", "GPU-1"], False, 0, "GPU 0 has no peer access to GPU 1"),
        (["GPU-0", "GPU-1"], False, 1, "GPU 0 has no peer access to GPU 1"),
    ],
)
@pytest.mark.parametrize("driver", [False, True])
@pytest.mark.parametrize("stores", [False, True])
def test_gpus_that_do_not_reach_each_other_leave_it_to_the_process_group(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[str],
    reached: bool,
    status: int,
    why: str,
    stores: bool,
    driver: bool,
) -> None:
    """Triton 3.9 has release stores: it needs no atomics of peers. Else the driver is believed."""

    def properties(number: int) -> Any:
        return SimpleNamespace(uuid=f"GPU-{number}")

    def gathered(mine: str, what: str) -> list[str]:
        return gpus if mine.startswith("GPU-") else [mine, ""]

    nvml = Nvml(1 - status if driver and "hidden" not in gpus else status)
    known = Driver(status == 0) if driver else None
    monkeypatch.setattr(ctypes, "CDLL", libraries(known, nvml))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(tl, "atomic_store", None, raising=False)
    if not stores:
        monkeypatch.delattr(tl, "atomic_store")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: reached)
    group: Any = SimpleNamespace(gather_objects=gathered)
    assert why_gpus_do_not_reach(group) == ("" if stores and why == NO_ATOMICS else why)
    assert nvml.open == 0


def test_without_nvml_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_access.ctypes, "CDLL", libraries(None, None))
    assert native_atomics("0", "1") is None
    monkeypatch.setattr(peer_access.ctypes, "CDLL", libraries(None, Nvml(0)))
    assert native_atomics("0", "1") is True
    monkeypatch.setattr(peer_access.ctypes, "CDLL", libraries(None, Nvml(1)))
    assert native_atomics("GPU-0", "GPU-1") is False
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert native_atomics("GPU-0", "GPU-1") is None


def test_where_nobody_knows_it_is_said(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(peer_access.ctypes, "CDLL", libraries(None, None))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=n))
    monkeypatch.setattr(tl, "atomic_store", None, raising=False)
    monkeypatch.delattr(tl, "atomic_store")
    assert peer_access._signals_arrive(0, 1, "GPU-1")
    assert "native atomics on GPU-1" in caplog.text
