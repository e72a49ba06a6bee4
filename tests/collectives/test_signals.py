"""Device-side signals, interpreted: between programs of one process, and between processes."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from needs import needs_interpreter
from triton.runtime import interpreter

import weft
from weft.collectives.device import polling, signals, waits
from weft.collectives.interpreted.interpreter import hasten
from weft.collectives.memory.waiter import told_by
from weft.collectives.ranks import pad, reports
from weft.collectives.ranks.group import alone, virtual_rank
from weft.dtensor import Replicate, distribute_tensor
from weft.errors import PeerTimeout

pytestmark = needs_interpreter


def pads(world_size: int) -> SimpleNamespace:
    """Pads of some ranks in this process; the owner keeps the tensors alive."""
    words = [
        torch.zeros(pad.pad_bytes(world_size) // 8, dtype=torch.int64) for _ in range(world_size)
    ]
    return SimpleNamespace(words=words, table=torch.tensor([w.data_ptr() for w in words]))


@triton.jit
def _signal_kernel(table, owner, value, N: tl.constexpr) -> None:
    signals.signal(signals.slot_ptr(table, owner, 2, 1, 0, 7), value)
    signals.signal_add(signals.slot_ptr(table, owner, 2, 1, 1, 7), N)


@triton.jit
def _wait_kernel(table, out, generation, timeout_ns) -> None:
    slot = signals.slot_ptr(table, 1, 2, 1, 0, 7)
    own_pad = signals.peer_ptr(table, 1, tl.int64)
    tl.store(out, signals.wait(own_pad, slot, generation, timeout_ns).to(tl.int64))
    arrived = signals.wait_for(table, 1, 2, 1, 0, 7, generation, timeout_ns)
    tl.store(out + 1, arrived.to(tl.int64))


@triton.jit
def _ticket_kernel(table, out) -> None:
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.last_generation(table, 0) + 1
    last = signals.is_last_program(table, 0, programs)
    tl.store(out + program, last.to(tl.int64))
    if last:
        signals.set_generation(table, 0, generation)


def test_a_signal_reaches_its_slot_and_stays():
    ranks, out = pads(2), torch.zeros(2, dtype=torch.int64)
    _signal_kernel[(1,)](ranks.table, 1, 5, N=3)
    slot = pad.KERNEL_SLOTS + 2 * pad.MAX_PROGRAMS + 7  # phase 1, source 0, program 7
    assert ranks.words[1][slot] == 5
    assert ranks.words[1][slot + pad.MAX_PROGRAMS] == 3  # source 1
    assert ranks.words[0].count_nonzero() == 0
    for generation in (3, 5):  # a later signal serves an earlier wait
        _wait_kernel[(1,)](ranks.table, out, generation, 0)
        assert out.tolist() == [1, 1]
    assert ranks.words[1][pad.STATUS] == 0


def test_builtins_are_those_that_triton_finds():
    places = tl, tl.tensor, tl.math, tl.core.tensor_descriptor_base
    found = {
        (place, name)
        for place in places
        for name, value in inspect.getmembers(place)
        if tl.core.is_builtin(value)
    }
    assert interpreter._patch_builtin.__module__ == hasten.__module__
    scope = interpreter._patch_lang(lambda: tl)
    replaced = {(place, name) for place, name, was in scope._changes if tl.core.is_builtin(was)}
    scope.restore()
    assert replaced >= found and len(found) > 100


def test_a_wait_that_fails_is_recorded_once_and_ends_all_patience():
    ranks, out = pads(2), torch.zeros(2, dtype=torch.int64)
    _signal_kernel[(1,)](ranks.table, 1, 5, N=1)
    _wait_kernel[(1,)](ranks.table, out, 6, 20)
    assert out.tolist() == [0, 0]
    assert ranks.words[1][pad.STATUS] == pad.status_word(pad.TIMED_OUT, 1, 0, 6)
    polls = []
    before = polling.on_poll
    polling.on_poll = lambda address, value: polls.append((address, value)) or 1
    try:
        _wait_kernel[(1,)](ranks.table, out, 7, 10**9)
    finally:
        polling.on_poll = before
    slot = pad.KERNEL_SLOTS + 2 * pad.MAX_PROGRAMS + 7
    # Each of the two waits gives up when it first looks, long before its time is over.
    assert polls == [(ranks.words[1][slot:].data_ptr(), 7)] * 2 * waits.POLLS_A_LOOK.value
    assert ranks.words[1][pad.STATUS] == pad.status_word(pad.TIMED_OUT, 1, 0, 6)


class Gone:
    """A process that has ended, or not yet."""

    def __init__(self) -> None:
        self.here = True

    def alive(self) -> bool:
        return self.here


@pytest.fixture
def report(request):
    """The line of rank 1 of 2, and the process of rank 0."""
    process = Gone()
    line = reports.Report(1, {0: process}, False, told_by)
    line.op, line._page.pinned = "all_reduce", True  # as that of a GPU
    yield line, process
    line.close()
    line._page.pinned = False


def check_as_another_rank(virtual: bool) -> None:
    with virtual_rank(alone()) if virtual else nullcontext():
        reports.check_all()


def test_a_failed_wait_is_told_to_the_host_which_any_call_sees(report, caplog):
    line, _ = report
    ranks, out = pads(2), torch.zeros(2, dtype=torch.int64)
    ranks.words[1][pad.REPORT] = line.address
    reports.check_all()
    _wait_kernel[(1,)](ranks.table, out, 6, 20)
    with pytest.raises(PeerTimeout, match=r"all_reduce: rank 1 .* for rank 0 \(call 6\)"):
        line.check()
    with pytest.raises(PeerTimeout):
        reports.check_all()
    with pytest.raises(PeerTimeout):
        check_as_another_rank(False)
    check_as_another_rank(True)
    line.watch()
    line.look()
    line.look()
    assert [record.message.count("for rank 0") for record in caplog.records] == [1]
    line.close()
    reports.check_all()
    again = reports.Report(1, {}, False, told_by)
    assert again.error() is None
    again.close()


def test_a_wait_for_a_process_that_has_ended_is_given_up(report, monkeypatch):
    line, process = report
    monkeypatch.setattr(reports._Watch, "begin", lambda: None)
    ranks, out = pads(2), torch.zeros(2, dtype=torch.int64)
    ranks.words[1][pad.REPORT] = line.address
    polls = []

    def ends(address, value):
        polls.append(value)
        if len(polls) == 100:
            process.here = False
        line.look()
        return 1

    monkeypatch.setattr(polling, "on_poll", ends)
    line.look()
    line.watch()
    _wait_kernel[(1,)](ranks.table, out, 6, 10**9)
    assert out.tolist() == [0, 0] and 100 < len(polls) <= 100 + 3 * waits.POLLS_A_LOOK.value
    assert ranks.words[1][pad.STATUS] == pad.status_word(pad.GONE, 1, 0, 6)
    with pytest.raises(PeerTimeout, match="waited in vain for rank 0"):
        line.check()


def test_a_wait_that_was_cut_short_names_the_process_that_has_ended(report):
    """A kernel on a GPU records a time-out: the host knows why it came so early, and of whom."""
    line, _ = report
    words = (ctypes.c_int64 * 3).from_address(line.address)
    words[reports.REPORTED] = pad.status_word(pad.TIMED_OUT, 1, 2, 6)
    assert "waited 60 s for rank 2" in str(line.error())
    words[reports.GONE_WORD] = 1 << 32 | 0 + 1
    assert "waited in vain for rank 0 (call 6)" in str(line.error())


@pytest.mark.ranks(2)
def test_any_call_tells_of_a_failure_on_a_gpu() -> None:
    """One that reaches no peer may work on what a call that has failed has left."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    x, plain = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]), torch.ones(4, 4)
    line = reports.Report(dist.get_rank(), {}, False, told_by)
    line._page.pinned = True  # as that of a GPU
    try:
        word = ctypes.c_int64.from_address(line.address)
        alarm = ctypes.c_int64.from_address(line.address + 8 * reports.ALARM_WORD)
        first = ctypes.c_int64.from_address(alarm.value)
        calls = (
            lambda: x + x,
            lambda: x[0, 0].item(),
            lambda: x.tolist(),
            lambda: weft.matmul_all_reduce(plain, plain),
            lambda: weft.ring_attention(*[torch.ones(1, 1, 4, 4)] * 3),
            lambda: weft.collectives.all_reduce(plain),
        )
        for call in calls:
            call()
        word.value, first.value = pad.status_word(pad.TIMED_OUT, 1, 0, 9), 1  # as `tell_host` does
        for call in calls:
            with pytest.raises(PeerTimeout, match=r"\(call 9\)"):
                call()
    finally:
        line.close()
        line._page.pinned = False
    for call in calls:
        call()


@triton.jit
def _call_kernel(table, out, n, END: tl.constexpr) -> None:
    generation = signals.begin_call(table, 0)
    tl.store(out + tl.program_id(0), generation.to(out.dtype.element_ty))
    if END:  # noqa: SIM102  # `and` would evaluate both
        if signals.end_call(table, 0, generation):
            signals.spoil(out, n)


def test_calls_on_the_same_memory_must_not_overlap():
    ranks, out = pads(1), torch.zeros(3)
    status = ranks.words[0][pad.STATUS : pad.STATUS + 1]
    for generation in (1, 2):
        _call_kernel[(3,)](ranks.table, out, 3, END=True)
        assert out.tolist() == [generation] * 3 and status == 0
    _call_kernel[(1,)](ranks.table, out, 3, END=False)  # a launch that is still under way
    _call_kernel[(3,)](ranks.table, out, 3, END=True)
    assert status == pad.status_word(pad.OVERLAPPED, 0, 0, 3)
    assert out.isnan().all()
    error = told_by(int(status), 0, "matmul_all_reduce")
    assert "matmul_all_reduce: two calls on the same memory" in str(error)


@triton.jit
def _end_kernel(table, rank) -> None:
    signals.end_call(table, rank, 6)


def test_a_failure_is_told_to_peers_that_come_later():
    """They would take what this rank has announced of later calls for that of theirs."""
    ranks, out = pads(2), torch.zeros(3)
    for words in ranks.words:
        words[pad.PADS], words[pad.RANKS] = ranks.table.data_ptr(), 2
    waited = torch.zeros(2, dtype=torch.int64)
    _wait_kernel[(1,)](ranks.table, waited, 6, 20)  # rank 1 waits in vain
    _end_kernel[(1,)](ranks.table, 1)
    status = pad.status_word(pad.TIMED_OUT, 1, 0, 6)
    assert [int(words[pad.STATUS]) for words in ranks.words] == [status] * 2
    _call_kernel[(3,)](ranks.table, out, 3, END=True)  # rank 0
    assert out.isnan().all()
    error = told_by(status, 0, "all_reduce")
    assert "rank 1" in str(error) and "call 6" in str(error)


def test_what_nobody_was_told_outlives_the_buffer(report):
    line, _ = report
    ranks, out = pads(2), torch.zeros(2, dtype=torch.int64)
    ranks.words[1][pad.REPORT] = line.address
    _wait_kernel[(1,)](ranks.table, out, 6, 20)
    line.close()
    with pytest.raises(PeerTimeout):
        reports.check_all()
    reports.forget()
    reports.check_all()


@pytest.mark.parametrize("code", [pad.TIMED_OUT, pad.GONE])
def test_a_status_is_one_word(code):
    status = code, 4095, 127, (1 << 31) - 1
    assert pad.status_in(pad.status_word(*status)) == status
    assert 0 < pad.status_word(*status) < 1 << 63


@triton.jit
def _spoil_kernel(ptr, count, SPOILS: tl.constexpr) -> None:
    signals.spoil(ptr, count, SPOILS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_was_not_computed_is_nan(dtype):
    x = torch.zeros(3001, dtype=dtype)
    _spoil_kernel[(1,)](x, 3000, SPOILS=True)
    assert x[:3000].isnan().all() and x[3000] == 0
    # Words of any type that has NaN; integers stay.
    x = torch.zeros(3000, dtype=dtype)
    words = x.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize])
    _spoil_kernel[(1,)](words, 3000, SPOILS=False)
    assert not x.any()
    _spoil_kernel[(1,)](words, 2999, SPOILS=True)
    assert x[:2999].isnan().all() and x[2999] == 0


def test_the_last_program_begins_the_generation_and_resets_the_ticket():
    ranks, out = pads(1), torch.zeros(3, dtype=torch.int64)
    for generation in (1, 2):
        _ticket_kernel[(3,)](ranks.table, out)
        assert out.tolist() == [0, 0, 1]
        assert ranks.words[0][: pad.STATUS].tolist() == [generation, 0]


@triton.jit
def _exchange_kernel(
    out, buffer_ptrs, signal_ptrs, half_bytes, timeout_ns, rank, generation, W: tl.constexpr
) -> None:
    """Each program sends rank + 10 generation to all, and collects what all sent."""
    program = tl.program_id(0)
    for step in range(W):
        peer = (rank + step) % W
        half = signals.half_ptr(buffer_ptrs, peer, generation, half_bytes, tl.int64)
        tl.store(half + program * W + rank, rank + 10 * generation)
    if signals.barrier(signal_ptrs, rank, W, 0, program, generation, timeout_ns):
        half = signals.half_ptr(buffer_ptrs, rank, generation, half_bytes, tl.int64)
        for peer in range(W):
            tl.store(out + program * W + peer, tl.load(half + program * W + peer))


@pytest.mark.ranks(2, 4)
def test_calls_in_a_row_between_processes() -> None:
    from weft.collectives import workspace

    ws = workspace(None, 4096, channel="signals")
    for generation in range(1, 13):
        if generation % ws.world_size == ws.rank:
            time.sleep(0.01)
        out = torch.empty(3, ws.world_size, dtype=torch.int64)
        _exchange_kernel[(3,)](
            out,
            ws.buffer_ptrs,
            ws.signal_ptrs,
            ws.half_bytes,
            ws.timeout_ns,
            ws.rank,
            generation,
            W=ws.world_size,
        )
        assert (out == torch.arange(ws.world_size) + 10 * generation).all(), (generation, out)


def test_the_bound_of_a_wait_is_about_the_seconds_asked_for(monkeypatch):
    """Also where others want the core, and a rank that sleeps comes back late."""
    ranks, out, clock = pads(2), torch.zeros(2, dtype=torch.int64), SimpleNamespace(now=1.0)

    def sleep(seconds: float) -> None:
        clock.now += 1e-3

    fake = SimpleNamespace(sleep=sleep, perf_counter=lambda: clock.now)
    monkeypatch.setattr(polling, "time", fake)
    _wait_kernel[(1,)](ranks.table, out, 1, signals.nanoseconds(0.25))
    assert clock.now - 1 == pytest.approx(2 * 0.25, rel=0.02)  # two waits


_COMPILED = """
import sys
import torch, triton, weft
from weft.kernels.compile import aot_cases
from weft.kernels.compile.machine_code import TARGETS, source
from weft.kernels.engine import chips

chip, wanted = chips.known(sys.argv[1]), {"_hold_kernel", "_wait_kernel"}  # one wait each
for _, launch in aot_cases.launches(chip, torch.bfloat16, wide=False):
    if launch.kernel.__name__ in wanted:  # of the waits, the first is for one word
        wanted.remove(launch.kernel.__name__)
        asm = triton.compile(source(launch), TARGETS[chip.name], launch.options).asm
        print(asm["amdgcn" if chip.is_amd else "ptx"])
assert not wanted
"""


def assembly(arch: str) -> str:
    """Of two kernels that wait for one word."""
    env = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", _COMPILED, arch]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_amds_clock_has_come_before_it_is_read():
    text = assembly("gfx942")
    clocks = re.findall(r"s_memrealtime.*\n\s*(.*)", text)
    assert clocks and set(clocks) == {"s_waitcnt lgkmcnt(0)"}


@pytest.mark.slow
def test_a_compiled_wait_polls_by_loads_and_is_bounded_by_the_clock():
    """A read-modify-write for each poll would keep the L2's atomic units busy."""
    ptx = assembly("sm_90")
    assert re.search(r"\b(ld\.[\w.]*|fence\.)acquire", ptx)  # of Triton 3.9 a load and a fence
    assert "%globaltimer" in ptx
    assert not re.search(r"\batom\.[\w.]*acquire", ptx)
