"""What a workspace does about streams and graphs of a GPU, with torch.cuda played by an object."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from weft import collectives
from weft.collectives import workspace as asked
from weft.collectives.device import stream_signals
from weft.collectives.memory import symmetric, workspace
from weft.collectives.memory.backends import _allow_shared_gpus, persistent
from weft.collectives.memory.symmetric import SymmetricBuffer
from weft.collectives.memory.workspace import Workspace, close, give_back
from weft.collectives.ranks import pad, reports
from weft.collectives.ranks.group import alone
from weft.errors import PeerTimeout

GPU = torch.device("cuda", 1)


class Stream:
    cuda_stream = 7

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self._log.append(f"{self.name} waits for a call in {event.stream.name}")

    def synchronize(self) -> None:
        pass


class Event:
    stream: Stream

    def record(self, stream: Stream) -> None:
        self.stream = stream


class Gpu:
    """What is asked of torch.cuda, and what was done to its streams."""

    Event = Event

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current: Any = Stream("first", self.log)
        self.captured: set[str] = set()  # names of streams
        self.device = 1

    def current_stream(self, device: torch.device) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def is_current_stream_capturing(self) -> bool:
        return self.current.name in self.captured

    def current_device(self) -> int:
        return self.device

    def switch(self, name: str) -> None:
        self.current = Stream(name, self.log)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """A GPU whose memory is the CPU's."""
    fake, of_cpu, zeros = Gpu(), symmetric.LocalMemory, torch.zeros
    with (
        patch.object(torch, "cuda", fake),
        patch.object(workspace, "_handle", lambda on: id(torch.cuda.current_stream(on))),
        patch.object(symmetric, "LocalMemory", lambda n, _: of_cpu(n, torch.device("cpu"))),
        patch.object(symmetric, "persistent", lambda values, _: values),
        patch.object(torch, "zeros", lambda *a, pin_memory=False, **kw: zeros(*a, **kw)),
    ):
        yield fake
        close()


def on_gpu(nbytes: int) -> Workspace:
    return asked(alone(), nbytes, channel="test", device=GPU)


def test_a_call_in_another_stream_comes_after_the_last_one(gpu: Gpu) -> None:
    ws = on_gpu(1)
    ws.check("op")
    ws.check("op")
    assert gpu.log == []
    gpu.switch("second")
    ws.check("op")
    ws.check("op")
    assert gpu.log == ["second waits for first"]
    gpu.switch("captured")
    gpu.captured.add("captured")
    ws.check("op")  # a capture must not wait for what is outside of it
    gpu.switch("beside it")
    gpu.captured.add("beside it")
    ws.check("op")
    assert gpu.log[1:] == ["beside it waits for captured"]
    gpu.captured.clear()
    gpu.switch("another capture")
    gpu.captured.add("another capture")
    ws.check("op")
    assert gpu.log[2:] == []
    gpu.switch("third")
    ws.check("op")
    assert gpu.log[2:] == ["third waits for second"]


def test_calls_on_two_channels_run_in_the_order_of_the_host(gpu: Gpu) -> None:
    """Else ranks whose streams run them in opposite orders, each on all cores, wait for each other
    for ever.
    """
    gather, scatter = on_gpu(1), asked(alone(), 1, channel="another", device=GPU)
    gather.check("all_gather")
    gpu.switch("second")
    scatter.check("reduce_scatter")
    gpu.switch("first")
    gather.check("all_gather")
    assert gpu.log == ["second waits for first", "first waits for second"]


def test_where_streams_take_turns_they_wait_for_calls_only(gpu: Gpu) -> None:
    """Not for what the other stream was given behind its call, which may be a whole backward."""
    ws = on_gpu(1)
    with ws.call("op"):
        pass
    gpu.switch("second")
    with ws.call("op"):  # of the only call so far no event was recorded
        pass
    gpu.switch("first")
    with ws.call("op"):
        pass
    assert gpu.log == ["second waits for first", "first waits for a call in second"]
    gpu.switch("second")
    gpu.captured.add("first")  # since that call
    with ws.call("op"):
        pass
    assert gpu.log[2:] == ["second waits for a call in first"]


def test_the_end_of_a_call_enqueues_nothing(gpu: Gpu) -> None:
    """Neither a copy of its status nor a synchronization: kernels tell of failures themselves."""
    ws = on_gpu(1)
    ws.check("op")
    pads = ws.signal_ptrs.clone()
    with patch.object(torch.Tensor, "copy_") as copies, patch.object(torch, "empty") as made:
        ws.launched("op")
    assert not copies.called and not made.called and gpu.log == []
    assert torch.equal(ws.signal_ptrs, pads)


def test_an_interrupted_call_is_told_to_peers(gpu: Gpu) -> None:
    ws = on_gpu(1)
    with pytest.raises(KeyboardInterrupt), ws.call("op"):
        raise KeyboardInterrupt
    assert pad.status_in(int(ws.buffer.status_of(0))) == (pad.FAILED, 0, 0, 0)


@pytest.mark.parametrize("capturing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_memory_lives_on_where_a_graph_was_captured(gpu: Gpu, capturing: bool) -> None:
    ws = on_gpu(1)
    gpu.captured = {"first"} if capturing else set()
    ws.check("op")
    gpu.captured.clear()
    before, size = weakref.ref(ws), ws.half_bytes
    ws = on_gpu(size + 1)
    ws.check("op")
    gc.collect()
    assert ws.half_bytes == 2 * size
    assert (before() is not None) == capturing
    close()
    gc.collect()
    assert before() is None


def test_growing_is_refused_in_a_capture(gpu: Gpu) -> None:
    gpu.captured.add("first")
    with pytest.raises(RuntimeError, match="CUDA-graph capture"):
        on_gpu(1)


def test_tensors_on_another_gpu_than_the_current_one_are_refused(gpu: Gpu) -> None:
    gpu.device = 0
    with pytest.raises(ValueError, match=r"torch.cuda.set_device\(1\)"):
        on_gpu(1)


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_channel_can_be_given_back(gpu: Gpu, name: str) -> None:
    ws = weakref.ref(on_gpu(1))
    give_back(alone(), "test", torch.device(name))
    gc.collect()
    assert ws() is None


def test_a_barrier_tells_that_one_before_it_has_timed_out(gpu: Gpu) -> None:
    buffer = collectives.empty((4,), group=alone(), device=GPU)

    def times_out(buffer: SymmetricBuffer, channel: int, timeout: float | None) -> None:
        assert (channel, timeout) == (3, 0.5)
        assert buffer.report is not None
        address = int(buffer.pad_of(0)[pad.REPORT])
        assert address == buffer.report.address
        ctypes.c_int64.from_address(address).value = pad.status_word(
            pad.TIMED_OUT, 0, 0, 7
        )  # as `tell_host` does
        alarm = ctypes.c_int64.from_address(address + 8 * reports.ALARM_WORD).value
        ctypes.c_int64.from_address(alarm).value = 1

    with patch.object(stream_signals, "barrier_in_stream", times_out):
        buffer.barrier(channel=3, timeout=0.5)
        with pytest.raises(PeerTimeout, match="barrier"):
            buffer.barrier()


def test_a_closed_buffer_keeps_no_memory(gpu: Gpu) -> None:
    buffer = collectives.empty((4,), group=alone(), device=GPU)
    memory = weakref.ref(buffer._segments[0].untyped_storage())
    assert memory() is not None
    buffer.close()
    gc.collect()
    assert memory() is None


def test_what_lasts_is_allocated_by_another_thread() -> None:
    from threading import get_ident

    values = Mock()
    values.to = lambda device: SimpleNamespace(device=device, thread=get_ident())
    kept: Any = persistent(values, GPU)
    assert kept.device == GPU and kept.thread != get_ident()
    assert persistent(values, torch.device("cpu")).thread == get_ident()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("gpus", "seen", "allowed", "multicast"),
    [
        (["a", "b"], 2, False, True),
        (["a", "b"], 1, True, True),  # CUDA_VISIBLE_DEVICES names one for each rank
        (["a", "a"], 1, True, False),
        (["a", "a"], 2, False, True),  # torch refuses it: somebody has forgotten set_device
    ],
)
def test_ranks_may_share_a_gpu_where_there_are_too_few(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], seen: int, allowed: bool, multicast: bool
) -> None:
    ours, off = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    for name in (ours, off):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a"))
    group: Any = SimpleNamespace(world_size=2, gather_objects=lambda mine, what: gpus)
    _allow_shared_gpus(group, GPU)
    assert (os.environ.get(ours) == "1", os.environ.get(off) != "1") == (allowed, multicast)
