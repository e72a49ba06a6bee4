"""Virtual time: the clock on traces worked out by hand, and whole runs against their bounds."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from matplotlib.figure import Figure
from needs import needs_interpreter

import weft
from weft import sim
from weft.collectives.prices.hardware import H100, H200, MI300X, PRESETS, Hardware, named
from weft.dtensor import DTensor, Shard, distribute_tensor, init_device_mesh
from weft.kernels import dispatch, grouped_matmul, route
from weft.kernels.engine.chips import chip_of, known
from weft.sim.hooks import timing_hooks
from weft.sim.time.clock import play
from weft.sim.time.rotation import Pads, _Turn
from weft.sim.time.timeline import Timeline
from weft.sim.time.trace import (
    Beside,
    HostOp,
    KernelLaunch,
    ProgramEvent,
    Rejoin,
    Signal,
    Store,
    Trace,
    Tracer,
    Update,
    Wait,
    Work,
)

# Round numbers: a core multiplies 1 Mflop/us and moves 1 kB/us, HBM and L2 4 kB/us, a link 2 kB/us.
TOY = Hardware(
    name="toy",
    chip="sm_90",
    cores=4,
    flops={"bfloat16": 4e12, "float32": 4e12},
    sustained=1.0,
    hbm_bandwidth=4e9,
    l2_bytes=1e6,
    l2_bandwidth=4e9,
    core_bandwidth=1e9,
    link_bandwidth=4e9,
    link_sustained=0.5,
    topology="switch",
    ranks=8,
    l2_latency_us=0.5,
    hbm_latency_us=1.0,
    link_latency_us=2.0,
    launch_us=10.0,
    ahead_us=0.0,
)


def work(address: int, nbytes: int, flops: int = 0, turns: int = 0, owner: int = 0) -> Work:
    return Work({(0, owner): [address, nbytes]}, flops, turns, "bfloat16")


def trace(*streams: list[Any]) -> Trace:
    return Trace(list(streams))


def launch(*programs: list[Any]) -> KernelLaunch:
    return KernelLaunch("kernel", 4, 3, list(programs))


def test_a_pipeline_takes_the_longer_of_its_loads_and_dots() -> None:
    # 4 kB at 1 kB/us, 1 us of latency; the first of 4 turns has loaded after 2 us, then 8 us of
    # dots: 10 + 2 + 8. With 2 us of dots, half a us of them comes after all loads: 10 + 5 + 0.5.
    compute = play(trace([launch([work(0, 4000, 8_000_000, 4)])]), TOY)
    assert compute.makespan == pytest.approx(20.0)
    memory = play(trace([launch([work(0, 4000, 2_000_000, 4)])]), TOY)
    assert memory.makespan == pytest.approx(15.5)


def test_a_pipeline_waits_for_what_its_stages_do_not_load_ahead() -> None:
    # As above, 2 us of dots in 4 turns; the three that follow wait for 6 us each by one step ahead.
    chip = dataclasses.replace(TOY, ahead_us=6.0)
    loop = [Work({(0, 0): [0, 4000]}, 2_000_000, 4, "bfloat16", steps=3)]
    for stages, us in ((2, 10 + 1 + 18 + 0.5), (3, 10 + 1 + 9 + 0.5), (9, 15.5)):
        made = play(trace([KernelLaunch("kernel", 4, stages, [loop])]), chip)
        assert made.makespan == pytest.approx(us)


def test_dots_wait_for_the_arithmetic_between_them() -> None:
    # As in the first case, 8 us of dots. A core makes 0.5 M fp32 results a us, an eighth of them
    # if exponentials: 1 M results take 2 us, of which 0.5 M exponentials would take 8 us.
    loop = Work({(0, 0): [0, 4000]}, 8_000_000, 4, "bfloat16", results=1_000_000)
    made = Timeline(trace([launch([loop])]), TOY)
    assert made.makespan_us == pytest.approx(20.0 + 2)
    assert made.arithmetic_us == pytest.approx(10.0) and made.bound_us == pytest.approx(2.0)
    loop.specials = 500_000
    assert play(trace([launch([loop])]), TOY).makespan == pytest.approx(20.0 + 8)
    slow = dataclasses.replace(TOY, specials=1 / 16)
    assert play(trace([launch([loop])]), slow).makespan == pytest.approx(20.0 + 16)


def test_arithmetic_alone_fills_what_long_tiles_leave_with_short_ones() -> None:
    # Three tiles of 4 us and six of 2 us, 6 us on each of four cores; 8 in the order of programs.
    half = [work(0, 0, 2_000_000, 1), Store(0, 0)]
    whole = [work(0, 0, 4_000_000, 1), Store(0, 0)]
    two = launch(half * 2 + whole, half * 2 + whole, half + whole, half)
    assert Timeline(trace([two]), TOY).arithmetic_us == pytest.approx(6.0)


def test_two_readers_of_one_link_take_twice_as_long() -> None:
    def read(rank: int, owner: int) -> list[Any]:
        return [launch(*([work(0, 4000, owner=owner)] for _ in range(4)))]

    # Four cores could read 4 kB/us; the owner's port gives 2: 8 us, and 5 us there and back.
    alone = play(trace([], read(1, 0)), TOY).makespan
    assert alone == pytest.approx(10 + 8 + 5)
    both = play(trace([], read(1, 0), read(2, 0)), TOY).makespan
    assert both == pytest.approx(10 + 16 + 5)
    apart = play(trace([], read(1, 0), read(2, 3), []), TOY).makespan
    assert apart == pytest.approx(alone)
    mesh = dataclasses.replace(TOY, topology="mesh")  # a link to each peer
    assert play(trace([], read(1, 0), read(2, 0)), mesh).makespan < both


def test_what_was_loaded_lately_comes_from_l2() -> None:
    again = play(trace([launch([work(0, 4000), Wait({1: 0}), work(0, 4000)])]), TOY)
    other = play(trace([launch([work(0, 4000), Wait({1: 0}), work(9, 4000)])]), TOY)
    assert again.hbm_bytes == 4000 and other.hbm_bytes == 8000
    assert other.makespan - again.makespan == pytest.approx(0.5)  # of latency


def test_two_ranks_by_hand() -> None:
    # Rank 0 loads 2 kB (1 + 2 us), stores it to rank 1: 2 us to issue, 2 us on the way out of a
    # core, then 5 us until the store is acknowledged; its signal takes 2 us. Rank 1 sees it with
    # its next poll, 0.5 us.
    sends = launch([work(0, 2000), Store(1, 2000), Signal(8, 1, 1)])
    waits = launch([Wait({8: 1}), work(0, 1000, owner=1)])
    played = play(trace([sends], [waits]), TOY)
    sent = 10 + (1 + 2) + (2 + 2 + 5)
    assert max(s.end for s in played.spans if s.rank == 0) == pytest.approx(sent)
    assert played.makespan == pytest.approx(sent + 2 + 0.5 + (1 + 1))


def test_the_last_of_many_goes_on_when_all_have_come() -> None:
    # Each takes a ticket; only the third does something after it.
    programs = [[work(0, 1000 * n), Update(8, n, 0)] for n in (1, 2)]
    programs.append([Update(8, 3, 0), work(9, 1000)])
    played = play(trace([launch(*programs)]), TOY)
    ticket = 10 + (1 + 2) + 0.5 + 0.002  # the second one's load and way to L2; the third is behind
    assert played.makespan == pytest.approx(ticket + 2)


def test_what_communication_makes_of_each_launch() -> None:
    # Rank 1 loads 4 kB from itself, then from rank 0: 4 us on its core, and 4 us there and back.
    near, far = launch([work(0, 4000, owner=1)]), launch([work(9, 4000, owner=0)])
    timeline = Timeline(trace([], [near, far]), TOY)
    exposed = timeline.exposed_launches
    assert [span.kernel for span in exposed] == ["kernel", "kernel"]
    assert list(exposed.values()) == pytest.approx([0, 4 + 4])
    assert sum(exposed.values()) == pytest.approx(timeline.exposed_us)


def test_programs_share_cores_in_turn() -> None:
    tile = [work(0, 10, 1_000_000, 1)]
    four, five = (play(trace([launch(*[tile] * n)]), TOY).makespan for n in (4, 5))
    assert five > four + 1
    moving = [work(0, 10)]  # no dot: several fit on a core
    assert play(trace([launch(*[moving] * 8)]), TOY).makespan < four


def test_streams_beside_each_other() -> None:
    copy = HostOp("copy", {1: 2000}, {0: 2000})  # 10 to launch, 1 of link, 5 there and back
    tile = launch([work(0, 10, 20_000_000, 1)])
    beside = play(trace([Beside([copy]), tile, Rejoin(), tile], []), TOY)
    after = play(trace([copy, tile, tile], []), TOY)
    alone = play(trace([tile, tile], []), TOY)
    assert beside.makespan == pytest.approx(alone.makespan, abs=0.1)
    assert after.makespan == pytest.approx(alone.makespan + 10 + 1 + 5)
    late = play(trace([Beside([copy] * 4), tile, Rejoin()], []), TOY)
    assert late.makespan == pytest.approx(4 * 16)


def test_only_a_release_waits_for_stores() -> None:
    def sends(release: bool) -> float:
        events = [Store(1, 4000), Signal(8, 1, 0, release), work(9, 10, 5_000_000, 1)]
        return play(trace([launch(events)], []), TOY).makespan

    assert sends(release=True) > sends(release=False) + 4  # the link's latency, both ways


def test_a_store_to_several_owners_goes_to_all_of_them_at_a_time() -> None:
    # Ports of 1/4 kB/us are slower than a core. One after the other, all ranks are at one owner;
    # by one instruction it does not matter in which order they are.
    chip = dataclasses.replace(TOY, link_bandwidth=0.25e9)

    def us(beside: bool, turned: bool) -> float:
        streams = []
        for rank in range(4):
            owners = [o for step in range(4) if (o := (rank * turned + step) % 4) != rank]
            stores = [Store(o, 4000, beside=beside and step > 0) for step, o in enumerate(owners)]
            streams.append([launch(stores)])
        return play(trace(*streams), chip).makespan

    assert us(beside=False, turned=False) > 1.2 * us(beside=False, turned=True)
    assert us(beside=True, turned=False) == pytest.approx(us(beside=True, turned=True), rel=0.1)
    assert us(beside=True, turned=False) <= us(beside=False, turned=True)


def test_circular_waits_are_an_error() -> None:
    stuck = trace(
        [launch([Wait({8: 1}), Signal(9, 1, 1)])], [launch([Wait({9: 1}), Signal(8, 1, 0)])]
    )
    with pytest.raises(RuntimeError, match="stands still"):
        play(stuck, TOY)


def test_a_matmul_of_the_host_takes_whole_waves() -> None:
    rate = H100.core_flops_per_us("bfloat16")

    def matmul(columns: int) -> float:
        op = HostOp("mm", {0: 1}, {0: 1}, ((128 * 11,), columns, 8192), "bfloat16")
        return play(trace([op]), H100).makespan

    tile = 2 * 128 * 256 * 8192 / rate
    assert matmul(256 * 12) == pytest.approx(tile, rel=0.05)  # 132 tiles on 132 cores
    assert matmul(256 * 13) > 1.3 * tile


def test_a_grouped_matmul_costs_the_tiles_of_its_groups() -> None:
    """Of rows, of columns and of the contraction: as many flop as the groups have, wherever they
    end; and a group of one row more than fills its tiles takes a row of tiles more."""
    K, N, rate = 4096, 256 * 132, H100.core_flops_per_us("bfloat16")
    tile = 2 * 128 * 256 * K / rate

    def us(ends: list[int], contracted: bool = False) -> float:
        def body(rank: int) -> None:
            x = torch.empty(512, K, dtype=torch.bfloat16)
            offs = torch.tensor(ends, dtype=torch.int32)
            if contracted:
                w = torch.empty(512, N, dtype=torch.bfloat16)
                made = torch._grouped_mm(x.t(), w, offs=offs)
                assert made.shape == (2, K, N)
            else:
                w = torch.empty(2, K, N, dtype=torch.bfloat16)
                made = torch._grouped_mm(x, w, offs=offs)
                assert made.shape == (512, N)

        return sim.run(1, body, hardware="h100", numerics=False).timeline.arithmetic_us

    assert us([256, 512]) == pytest.approx(4 * tile) == us([0, 512])
    assert us([128, 384]) == pytest.approx(3 * tile)  # 128 rows are nobody's
    assert us([129, 512]) > 4.4 * tile
    assert us([256, 512], contracted=True) == pytest.approx(us([0, 512], contracted=True))
    assert us([256, 512], contracted=True) == pytest.approx(4 * tile, rel=0.05)


@pytest.mark.parametrize(
    ("tokens", "K", "N"),
    [
        (512, 1024, 256),
        pytest.param(2048, 2048, 1024, marks=pytest.mark.slow),
        pytest.param(2048, 4096, 512, marks=pytest.mark.slow),
    ],
)
def test_dispatch_with_a_matmul_is_no_slower_than_the_matmul_after_it(
    tokens: int, K: int, N: int
) -> None:
    """Where every token goes to the other rank, and its way takes longer than its matmul."""

    def us(fused: bool) -> float:
        def body(rank: int) -> None:
            x, w = (torch.empty(*s, dtype=torch.bfloat16) for s in ((tokens, K), (1, K, N)))
            routing = route(torch.full((tokens, 1), 1 - rank), 2)
            if fused:
                weft.dispatch_grouped_matmul(x, routing, w)
            else:
                grouped_matmul(dispatch(x, routing), w, routing.ends)

        made = sim.run(2, body, hardware="h100", numerics=False, symmetric=True).timeline
        # Nobody tells rank 1 how many rows have come for its experts.
        one, other = (
            [op.matmul for op in made.trace.events(rank) if isinstance(op, HostOp)]
            for rank in range(2)
        )
        assert one == other == [((tokens,), N, K)]
        return made.makespan_us

    assert us(fused=True) <= 1.01 * us(fused=False)


def test_atomics_on_one_word_do_not_wait_for_each_others_way() -> None:
    # 64 programs take a ticket and signal: half a us each to the cache. The last one's ticket has
    # 63 before it there, and not 63 ways.
    programs = [[Update(8, n, 0), Signal(1000 + n, 1, 0)] for n in range(1, 65)]
    chip = dataclasses.replace(TOY, cores=64)
    made = play(trace([KernelLaunch("kernel", 4, 3, programs)]), chip)
    assert made.makespan == pytest.approx(10 + 0.5 + 63 * 0.002)


def test_what_no_dots_hide_is_moved_by_a_program_at_its_own_rate() -> None:
    # 4 kB: 1 kB/us by the core, 0.25 kB/us by a program that stores or loads, not by a main loop.
    slow = dataclasses.replace(TOY, program_bandwidth=0.25e9)

    def slower_us(event: ProgramEvent) -> float:
        us, slow_us = (play(trace([launch([event])], []), chip).makespan for chip in (TOY, slow))
        return slow_us - us

    assert slower_us(Store(1, 4000)) == slower_us(Store(0, 4000)) == pytest.approx(16 - 4)
    assert slower_us(work(1, 4000)) == slower_us(work(1, 4000, owner=1)) == pytest.approx(16 - 4)
    assert slower_us(work(1, 4000, flops=1000, turns=1)) == 0.0


def test_a_wait_takes_its_time_also_where_the_word_is_there() -> None:
    late = dataclasses.replace(TOY, wait_us=3.0)
    events = [Signal(8, 1, 0), Wait({8: 1}), Wait({8: 1})]
    us, late_us = (play(trace([launch(events)]), chip).makespan for chip in (TOY, late))
    assert late_us - us == pytest.approx(2 * 3)


def test_words_with_their_flags_take_a_look_and_no_wait() -> None:
    late = dataclasses.replace(TOY, wait_us=3.0, look_us=1.0)
    events = [Signal(8, 1, 0), Wait({8: 1}, flagged=True)]
    us, late_us = (play(trace([launch(events)]), chip).makespan for chip in (TOY, late))
    assert late_us - us == pytest.approx(1)
    turned = _Turn(Pads(), 1, 2).event(Wait({}, flagged=True))
    assert isinstance(turned, Wait) and turned.flagged


def test_presets_hold_together() -> None:
    for name, hardware in PRESETS.items():
        assert named(name.upper()) is hardware
        assert 0.5 < hardware.sustained < 1 and hardware.cores >= 78
        fp32, bf16, fp8 = (
            hardware.rates().flops_us(8192, 8192, 8192, dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
        )
        # Without fp8 in its matrix units a chip multiplies it in fp32.
        assert bf16 > 2 * 8192**3 / 2.3e9
        assert fp8 == pytest.approx(bf16 / 2 if known(hardware.chip).fp8 else fp32, rel=1e-3)
    assert H200.hbm_bandwidth > H100.hbm_bandwidth
    with pytest.raises(ValueError, match="h100"):
        named("h1000")
    older = dataclasses.replace(H100, chip="sm_75")
    with pytest.raises(ValueError, match="the chip must be one of sm_80"):
        sim.run(1, lambda _: chip_of(torch.device("cpu")), hardware=older)
    with pytest.raises(ValueError, match="no matmul rate"):
        H100.core_flops_per_us("int7")


def test_this_triton_fits() -> None:
    assert timing_hooks.requirements() == []


def gather(M: int, N: int, K: int, engine: Any = "triton") -> Any:
    def body(rank: int) -> torch.Tensor:
        W = weft.collectives.resolve(None).world_size
        x = torch.empty(M // W, K, dtype=torch.bfloat16)
        w = torch.empty(K, N, dtype=torch.bfloat16)
        with sim.untimed():
            x.fill_(rank + 1)
            w.fill_(0.5)
        with weft.engine(engine):
            return weft.all_gather_matmul(x, w, sizes=[M // W] * W)

    return body


@needs_interpreter
def test_without_numerics_the_timeline_is_the_same() -> None:
    full = sim.run(2, gather(160, 96, 320), hardware="h100")
    quick = sim.run(2, gather(160, 96, 320), hardware="h100", numerics=False)
    assert float(full[0][0, 0]) == 160 and quick[0].shape == full[0].shape
    assert full.timeline and quick.timeline
    assert quick.timeline.summary() == pytest.approx(full.timeline.summary(), rel=1e-9)
    assert full.timeline.makespan_us >= full.timeline.bound_us > 0
    again = sim.run(2, gather(160, 96, 320), hardware="h100", numerics=False).timeline
    assert again and again.makespan_us == quick.timeline.makespan_us


@needs_interpreter
@pytest.mark.parametrize("engine", ["triton", "host", "generic"])
def test_real_sizes_keep_to_their_bounds(engine: str) -> None:
    M, N, K, W = 512, 512, 4096, 2
    timeline = sim.run(
        W, gather(M, N, K, engine), hardware=H100, numerics=False, timeout=300
    ).timeline
    assert timeline is not None
    summary = timeline.summary()
    flops = 2 * M * N * K / (132 * H100.core_flops_per_us("bfloat16"))
    moved = M // W * K * 2 / (H100.link_bandwidth * H100.link_sustained / 1e6)
    assert summary["arithmetic_us"] >= flops and summary["bound_us"] >= moved * (1 - 1e-9)
    assert summary["makespan_us"] >= max(summary["bound_us"], summary["arithmetic_us"])
    assert 0 <= summary["exposed_us"] < summary["makespan_us"]
    if engine == "triton":
        cores = [v for k, v in summary.items() if k.startswith("cores_")]
        assert sum(cores) == pytest.approx(1, abs=1e-6)
        assert timeline.on("mi300x").makespan_us > timeline.makespan_us


@needs_interpreter
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_one_rank_stands_for_all_that_do_the_same(op: str) -> None:
    def body(rank: int) -> torch.Tensor:
        x, w = torch.empty(640, 512, dtype=torch.bfloat16), torch.empty(512, 512).bfloat16()
        with weft.engine("triton"):
            if op == "all_gather_matmul":
                return weft.all_gather_matmul(x[:320], w, sizes=[320, 320])
            return weft.matmul_reduce_scatter(x, w)

    every, one = (
        sim.run(2, body, hardware="h100", numerics=False, symmetric=symmetric).timeline
        for symmetric in (False, True)
    )
    assert every and one
    got, expected = one.summary(), every.summary()
    exposed = got.pop("exposed_us") - expected.pop("exposed_us")
    assert abs(exposed) < 0.02 * every.makespan_us  # of two makespans the difference
    assert got == pytest.approx(expected, rel=0.02, abs=0.02)


@needs_interpreter
def test_a_decoding_step_takes_its_time() -> None:
    """Tokens of which a rank keeps some: masks that are made of numbers."""

    def step(rank: int) -> torch.Tensor:
        new, cache = torch.ones(2, 1, 1, 12), torch.zeros(2, 2, 1, 8, 12)
        lengths = torch.tensor([3, 4], dtype=torch.int32)
        with weft.engine("triton"):
            weft.append_to_cache(new, new, *cache, lengths, block_size=1)
            weft.flash_decode(new, *cache, lengths, block_size=1)
        return cache

    results = sim.run(2, step, hardware="h100")
    assert [float(cache.sum()) for cache in results] == [24.0, 24.0]
    assert results.timeline is not None and results.timeline.makespan_us > 0


@pytest.mark.parametrize("step", ["adamw", "foreach", "batch_norm"])
def test_ops_that_write_and_are_not_computed(step: str) -> None:
    """The count of an optimizer's steps divides; the others return nothing, or new tensors too."""

    def body(rank: int) -> torch.Size:
        x, running = torch.ones(6, 8, requires_grad=True), [torch.zeros(8), torch.ones(8)]
        if step == "batch_norm":
            batch_norm = torch.ops.aten._native_batch_norm_legit.default
            return batch_norm(x, None, None, *running, True, 0.1, 1e-5)[0].shape
        if step == "foreach":
            torch._foreach_mul_(running, 0.5)
            return running[0].shape
        optimizer = torch.optim.AdamW([x])
        x.sum().backward()
        optimizer.step()
        return x.shape

    full, quick = (sim.run(1, body, hardware="h100", numerics=n) for n in (True, False))
    assert quick[0] == full[0] and full.timeline and quick.timeline
    assert quick.timeline.summary() == pytest.approx(full.timeline.summary(), rel=1e-9)


@pytest.mark.parametrize("numerics", [True, False])
def test_an_op_on_a_dtensor_is_one_on_its_parts(numerics: bool) -> None:
    def body(rank: int) -> tuple[int, ...]:
        mesh = init_device_mesh("cpu", (2,))
        y = distribute_tensor(torch.ones(64, 32), mesh, [Shard(0)]).relu()
        assert isinstance(y, DTensor)
        return tuple(y.to_local().shape)

    results = sim.run(2, body, hardware="h100", numerics=numerics)
    assert results == [(32, 32)] * 2 and results.timeline is not None
    for rank in range(2):
        events = results.timeline.trace.events(rank)
        reads = [e.reads for e in events if isinstance(e, HostOp) and e.name == "relu"]
        assert reads == [{rank: 32 * 32 * 4}]


def test_a_message_is_one_copy_by_its_receiver() -> None:
    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        with sim.untimed():
            x = torch.ones(1024)
        if rank:
            dist.recv(x, 0)
        else:
            dist.send(x, 1)

    timeline = sim.run(2, body, hardware="h100").timeline
    assert timeline is not None
    events = [list(timeline.trace.events(rank)) for rank in range(2)]
    ops = [[(e.name, e.reads) for e in of if isinstance(e, HostOp)] for of in events]
    assert ops == [[], [("copy_", {0: 4096})]]


@needs_interpreter
def test_pictures_and_traces(tmp_path: Path) -> None:
    timeline = sim.run(2, gather(64, 64, 64), hardware="h100", numerics=False).timeline
    assert timeline is not None
    with patch.object(Figure, "savefig", autospec=True, side_effect=Figure.savefig) as saved:
        timeline.save_plot(tmp_path / "out.png", ranks=[1])
    figure = saved.call_args.args[0]
    (axis,) = figure.axes
    assert any(text.get_text() == "all_gather_matmul_kernel" for text in axis.texts)
    assert re.search(r"rank 1 waits for signals: \d+% for rank 0", axis.get_title(loc="left"))
    about = figure.get_suptitle()
    assert about.endswith("; shown: rank 1 of 2") and "alone 0 us" not in about
    assert any("white" in text.get_text() for text in figure.legends[0].texts)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    timeline.save_trace(tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1}
    waits = {(e["pid"], e["args"]["waits for"]) for e in spans if "args" in e}
    assert {(0, "rank 1"), (1, "rank 0")} <= waits
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.makespan_us, abs=0.1)
    assert timeline.table().row_count > 8
    # Two launches of one kernel are one row.
    twice = sim.run(
        2, lambda rank: [gather(64, 64, 64)(rank) for _ in "12"], hardware="h100"
    ).timeline
    assert twice is not None
    assert twice.table().row_count == timeline.table().row_count


@triton.jit
def _reciprocal_kernel(x_ptr) -> None:
    offs = tl.arange(0, 16)
    tl.store(x_ptr + offs, tl.rsqrt(tl.load(x_ptr + offs)))


@triton.jit
def _softmaxed_kernel(x_ptr, steps) -> None:
    offs = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    acc = tl.full((16, 16), 0.0, dtype=tl.float32)
    for _ in range(steps):
        x = tl.load(x_ptr + offs)
        scores = tl.dot(x, x)
        weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
        acc = tl.dot(weights, x, acc)
    tl.store(x_ptr + offs, tl.exp2(acc) * 2.0)


@needs_interpreter
@pytest.mark.parametrize("numerics", [False, True])
def test_what_a_softmax_computes_is_counted(numerics: bool) -> None:
    """Each step's maximum, difference and exponentials; not what comes after the last dot."""
    steps = 7
    made = sim.run(
        1,
        lambda rank: _softmaxed_kernel[(1,)](torch.ones(16, 16), steps),
        hardware="h100",
        numerics=numerics,
    ).timeline
    (kernel,) = (e for e in made.trace.events(0) if isinstance(e, KernelLaunch))
    (work,) = (e for e in kernel.programs[0] if isinstance(e, Work))
    assert (work.results, work.specials) == (3 * 256 * steps, 256 * steps)


@needs_interpreter
def test_a_row_alone_is_all_that_one_shot_sends() -> None:
    """Its tile has 16 rows. Partial sums travel in 24 bits."""
    N, W = 96, 3

    def body(rank: int) -> None:
        x, w = torch.zeros(1, 64).bfloat16(), torch.zeros(64, N).bfloat16()
        with weft.engine("triton"):
            weft.matmul_all_reduce(x, w)

    made = sim.run(W, body, hardware="h100", numerics=False).timeline
    tile = 64  # whose columns are sent whole
    assert made.played.link_bytes == -(-N // tile) * tile * 3 * (W - 1)


@needs_interpreter
def test_what_is_skipped_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.run(
            2,
            lambda rank: _reciprocal_kernel[(1,)](torch.ones(16)),
            hardware="h100",
            numerics=False,
        )


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="needs hardware"):
        sim.run(2, lambda rank: None, numerics=False)
    with pytest.raises(ValueError, match="domain of 8 ranks"):
        sim.run(9, lambda rank: None, hardware=MI300X)


def test_a_tile_for_several_ranks_goes_to_them_in_its_order() -> None:
    """Not in that of their memory, where all ranks would store to the first one at once."""
    tracer = Tracer(3)
    for rank in range(3):
        tracer.memory(100 * rank, 100 * rank + 100, rank)
    addresses = np.array([250, 254, 50, 150], np.uint64)
    assert tracer.owners(addresses, 1) == [(2, 250, 2), (0, 50, 1), (1, 150, 1)]


@pytest.mark.parametrize("rows", [64, 70])
def test_the_generic_reduce_scatter_moves_a_chunk_from_each_peer(rows: int) -> None:
    """Of fp32 sums, the longest chunk: an all-reduce and a slice would move twice as much."""
    W, N = 4, 48

    def body(rank: int) -> None:
        with weft.engine("generic"):
            x = torch.zeros(rows, 32, dtype=torch.bfloat16)
            y = weft.matmul_reduce_scatter(x, torch.zeros(32, N, dtype=torch.bfloat16))
            assert y.dtype == torch.bfloat16

    made = sim.run(W, body, hardware="h100", numerics=False).timeline
    for rank in range(W):
        (op,) = (e for e in made.trace.events(rank) if isinstance(e, HostOp) and e.collective)
        assert op.name == "reduce_scatter"
        from_peers = {owner: nbytes for owner, nbytes in op.reads.items() if owner != rank}
        assert from_peers == {p: -(-rows // W) * N * 4 for p in range(W) if p != rank}


@needs_interpreter
def test_virtual_gpus_launch_collectives_as_gpus_do() -> None:
    """Their tensors are on a CPU, but the grid is that of the chip: a program for each KiB."""

    def body(rank: int) -> None:
        weft.collectives.all_reduce(torch.zeros(32, 2048, dtype=torch.bfloat16))

    made = sim.run(4, body, hardware="h100", numerics=False).timeline
    (reduce,) = (e for e in made.trace.events(0) if isinstance(e, KernelLaunch))
    assert len(reduce.programs) == 64
