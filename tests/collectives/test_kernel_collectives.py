"""Collectives as kernels, interpreted on real processes, against plain torch."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from flag_words import calls_across_flags, fill_with_nan
from needs import needs_interpreter

import weft
from weft import collectives, settings, sim
from weft.collectives import movement, protocols, resolve, workspace
from weft.collectives.kernels import collective_launch, multimem, pull
from weft.collectives.kernels.pull_boxes import Box, BoxTable, table_of
from weft.collectives.prices.hardware import named
from weft.collectives.ranks.chunks import chunk_sizes, offsets

OPS = ("sum", "avg", "max", "min", "product")


def values(rank: int, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        drawn = torch.randn(count, generator=generator, device="cpu")
    else:
        drawn = torch.randint(0, 7, (count,), generator=generator, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def reduced(terms: list[torch.Tensor], op: str) -> torch.Tensor:
    """In rank order, half types in fp32, rounded once."""
    half = terms[0].dtype in (torch.bfloat16, torch.float16)
    wide = [term.float() if half else term for term in terms]
    acc = wide[0]
    for term in wide[1:]:
        if op in ("max", "min"):
            acc = (torch.maximum if op == "max" else torch.minimum)(acc, term)
        else:
            acc = acc * term if op == "product" else acc + term
    if op == "avg":
        acc = acc / len(terms)
    return acc.to(terms[0].dtype)


def explained(call: Any) -> torch.Tensor:
    explanation = weft.explain(call)
    assert [decision.engine for decision in explanation] == ["triton"], str(explanation)
    return explanation.result


def gather_body(dtype: torch.dtype) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    with weft.engine("triton"):
        for seed, sizes in enumerate(([5, 0, 70, 1][:W], [32] * W, [0, 33, 7, 40][:W])):
            every = [values(r, n, dtype, seed) for r, n in enumerate(sizes)]
            whole = torch.cat(every)
            mine = every[rank]
            x = torch.cat([mine.new_zeros(rank), mine])[rank:]  # alignments differ
            assert torch.equal(explained(partial(collectives.all_gather, x)), whole)
            out = torch.full((sum(sizes) + 1,), 77).to(dtype)
            collectives.all_gather(x, out=out[1:])  # not aligned to 16 bytes
            assert torch.equal(out[1:], whole)
            assert out[0] == 77
        one = torch.arange(2 * W).to(dtype)[2 * rank :: 2 * W]  # of stride 2 W
        assert collectives.all_gather(one).tolist() == list(range(0, 2 * W, 2))
        every = [torch.complex(torch.zeros(5), -values(r, 5, torch.float32, 8)) for r in range(W)]
        negatives = [each.conj().imag for each in every]  # yet to be negated
        whole = torch.cat([each.resolve_neg() for each in negatives])
        assert torch.equal(collectives.all_gather(negatives[rank][:1]), whole[::5])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.int64])
def test_all_gather(dtype: torch.dtype) -> None:
    gather_body(dtype)


def reduce_body(dtype: torch.dtype) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    ops = OPS if dtype.is_floating_point else [op for op in OPS if op != "avg"]
    with weft.engine("triton"):
        for seed, count in enumerate((0, 67)):
            every = [values(r, count, dtype, seed) for r in range(W)]
            for op in ops if count else ops[:1]:
                want = reduced(every, op)
                x0 = every[rank]
                x = torch.cat([x0.new_zeros(rank), x0])[rank:]  # alignments differ
                got = explained(partial(collectives.all_reduce, x, reduce_op=op))
                assert torch.equal(got, want), (count, op)
                assert torch.equal(x, x0)
                collectives.all_reduce(x, reduce_op=op, out=x)
                assert torch.equal(x, want), (count, op, "in place")
                sizes = chunk_sizes(count, W) if op != "max" else [count, *[0] * (W - 1)]
                start = offsets(sizes)[rank]
                part = collectives.reduce_scatter(x0, reduce_op=op, sizes=sizes)
                assert torch.equal(part, want[start : start + sizes[rank]]), (count, op, sizes)


# The order shows from three ranks on, and most where values are rounded.
@pytest.mark.ranks
@pytest.mark.parametrize(
    "world_size, dtype",
    [(3, torch.bfloat16), (2, torch.float32), (2, torch.float64), (2, torch.int64)],
)
def test_reductions_are_exact_in_rank_order(world_size: int, dtype: torch.dtype) -> None:
    reduce_body(dtype)


@pytest.mark.ranks(3)
def test_nan_wins() -> None:
    rank = dist.get_rank()
    x = torch.tensor([float("nan") if rank == 1 else 1.0, 2.0 + rank, float("inf")])
    with weft.engine("triton"):
        for op in ("max", "min", "sum"):
            y = collectives.all_reduce(x, reduce_op=op)
            assert y[0].isnan()
            assert not y[1:].isnan().any()


def to_all_body(dtype: torch.dtype) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    with weft.engine("triton"):
        tables = (
            [[2, 0, 5, 1], [3, 40, 1, 0], [0, 0, 0, 0], [33, 0, 2, 4]],
            [[16] * 4] * 4,
            [[1, 2, 3, 4], [4, 5, 6, 7], [70, 8, 9, 1], [0, 1, 0, 50]],
        )
        for seed, table in enumerate(tables):
            sends = [row[:W] for row in table[:W]]
            every = [values(r, 3 * sum(sends[r]), dtype, seed).view(-1, 3) for r in range(W)]
            want = torch.cat([every[r].split(sends[r])[rank] for r in range(W)])
            receives = [sends[r][rank] for r in range(W)]
            call = partial(collectives.all_to_all, every[rank], receives, sends[rank])
            assert torch.equal(explained(call), want)
        x = values(rank, 4 * W, dtype, 9)
        want = torch.cat([values(r, 4 * W, dtype, 9).chunk(W)[rank] for r in range(W)])
        assert torch.equal(collectives.all_to_all(x), want)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_all_to_all(dtype: torch.dtype) -> None:
    to_all_body(dtype)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("two_shot", [False, True])
def test_one_and_two_shots(two_shot: bool) -> None:
    """Either way, and more programs than blocks."""
    rank, W = dist.get_rank(), dist.get_world_size()
    for count in (1, 45, 100):
        nbytes = 4 * count
        config = collective_launch.collective_config("all_reduce", nbytes, W, on_gpus=False)
        config = replace(config, two_shot=two_shot, programs=4)
        room = collective_launch.workspace_bytes(nbytes, W, config)
        ws = workspace(None, room, channel="shots")
        every = [values(r, count, torch.float32, count) for r in range(W)]
        for _ in range(3):
            out = torch.full((count,), math.nan)
            collective_launch.launch_reduce(every[rank], out, ws, None, "sum", config)
            ws.launched("all_reduce")
            assert torch.equal(out, reduced(every, "sum"))


def by_words(count: int, dtype: torch.dtype, two_shot: bool, op: str = "sum") -> Any:
    """Memory and an all_reduce whose words carry their flags, into a tensor of its own or x."""
    config = collective_launch.CollectiveConfig(64, 2, 4, two_shot, by_words=True)
    room = collective_launch.workspace_bytes(count * dtype.itemsize, dist.get_world_size(), config)
    ws = workspace(None, room, channel=config.channel)

    def run(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.full_like(x, math.nan) if out is None else out
        collective_launch.launch_reduce(x, out, ws, None, op, config)
        return out

    return ws, run


@needs_interpreter
@pytest.mark.ranks(
    2, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.sweep)
)
def test_words_have_the_bits_of_signalled_sums() -> None:
    """In one shot and in two, blocks that some ranks lack, memory of NaN, a late rank, in place."""
    rank, W = dist.get_rank(), dist.get_world_size()
    for dtype, count, op in (
        (torch.float32, 67, "avg"), (torch.bfloat16, 200, "sum"), (torch.float16, 1, "avg")
    ):  # fmt: skip
        every = [values(r, count, dtype, count) for r in range(W)]
        want = reduced(every, op)
        for two_shot in (False, True):
            ws, run = by_words(count, dtype, two_shot, op)
            fill_with_nan(ws)
            for call in range(2):  # of two each
                if rank and call == 1:
                    time.sleep(0.05)
                x = torch.cat([every[rank].new_zeros(rank), every[rank]])[rank:]
                assert torch.equal(run(x), want), (dtype, two_shot, call)
                assert torch.equal(run(x, x), want), (dtype, two_shot, call, "in place")


@needs_interpreter
@pytest.mark.ranks(2)
@pytest.mark.parametrize("two_shot", [False, True])
def test_flags_of_summed_words_come_again(two_shot: bool) -> None:
    """Across the 2^32th call; and in the last calls of every 2^31 all words are stored anew."""
    rank, count = dist.get_rank(), 37
    ws, run = by_words(count, torch.float32, two_shot)
    for call in calls_across_flags(ws):
        assert (run(torch.full((count,), float(call + rank))) == 2 * call + 1).all()


@needs_interpreter
@pytest.mark.ranks(2)
@pytest.mark.parametrize("two_shot", [False, True])
def test_summed_words_of_an_absent_rank(two_shot: bool) -> None:
    """Results are NaN, and the next call tells who was waited for."""
    rank, absent = dist.get_rank(), int(two_shot)
    ws, run = by_words(40, torch.float32, two_shot)
    dist.barrier()
    if rank != absent:
        with mock.patch.dict("os.environ", WEFT_TIMEOUT_S="0.2"):
            assert bool(run(torch.ones(40)).isnan().all())
        with pytest.raises(weft.PeerTimeout, match=f"rank {rank} waited .* for rank {absent}"):
            ws.check("all_reduce")
    dist.barrier()
    weft.collectives.close()


@needs_interpreter
@pytest.mark.ranks(2)
def test_sums_by_words_by_the_op() -> None:
    """Where they are chosen the op takes them: eager and compiled, forward and backward, empty."""

    def chosen(op: Any, group: Any, x: Any, nbytes: int, reduce_op: Any) -> Any:
        if reduce_op == "sum" and nbytes:
            return collective_launch.CollectiveConfig(
                64, 2, 4, two_shot=nbytes > 100, by_words=True
            )
        return config_for(op, group, x, nbytes, reduce_op)

    config_for, launching = movement._launch_config, collective_launch.launching
    rank, kernels = dist.get_rank(), list[Any]()

    def noted(kernel: Any, *args: Any) -> Any:
        kernels.append(kernel)
        return launching(kernel, *args)

    with (
        mock.patch.object(movement, "_launch_config", chosen),
        mock.patch.object(collective_launch, "launching", noted),
        weft.engine("triton"),
    ):
        for count, f in (
            (0, collectives.all_reduce),
            (5, collectives.all_reduce),
            (70, torch.compile(collectives.all_reduce, backend="eager")),
        ):
            every = [values(r, count, torch.float32, count) for r in range(2)]
            x = every[rank].clone().requires_grad_()
            y = f(x)
            assert torch.equal(y, reduced(every, "sum"))
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert (grad == 2).all()
            assert kernels and all(
                (each is collective_launch.flagged_reduce_kernel) == (count > 0) for each in kernels
            )
            kernels.clear()
            largest = collectives.all_reduce(every[rank], reduce_op="max")
            assert torch.equal(largest, reduced(every, "max"))
            assert collective_launch.flagged_reduce_kernel not in kernels
            kernels.clear()
    halves = {name: workspace(channel=name).half_bytes for name in ("flagged kernels", "kernels")}
    assert halves["flagged kernels"] >= collective_launch.WORDS_ROOM and halves["kernels"]


@pytest.mark.ranks(3)
def test_gradients() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    with weft.engine("triton"):
        x = torch.full((rank + 1, 2), float(rank), requires_grad=True)
        y = collectives.all_gather(x)
        (y * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert (x.grad == W * (W + 1) / 2).all()


def test_few_bytes_of_sums_take_words() -> None:
    """While they are predicted to be quicker, up to 384 KiB between 2 to 8 ranks, in one shot
    while few.
    """
    fabric = named("h100").fabric(8)

    def chosen(nbytes: int, W: int = 8, words: bool = True, chip: str = "h100") -> Any:
        links = replace(named(chip).fabric(8), ranks=W) if words else None
        return collective_launch.collective_config(
            "all_reduce", nbytes, W, True, links=links, words=words
        )

    assert [chosen(n << 10).by_words for n in (0, 1, 384, 385)] == [False, True, True, False]
    assert [chosen(n << 10).two_shot for n in (1, 64, 96)] == [False, False, True]
    assert [chosen(n << 10, 4, chip="b200").two_shot for n in (128, 129)] == [False, True]
    assert not chosen(100 << 10, 2).two_shot
    assert not chosen(1 << 10, 1).by_words and not chosen(1 << 10, 9).by_words
    assert not chosen(1 << 10, words=False).by_words
    assert [chosen(n << 10, 2, chip="h800").by_words for n in (8, 384)] == [True, False]
    for W in range(2, 9):
        for n in range(1, 385):
            config = chosen(n << 10, W)
            room = collective_launch.workspace_bytes(n << 10, W, config)
            assert not config.by_words or room <= collective_launch.WORDS_ROOM
    for nbytes in (16 << 10, 128 << 10):
        by = [
            collective_launch.quickest_way("all_reduce", nbytes, fabric, config, switch=False)
            for config in (chosen(nbytes), chosen(nbytes, words=False))
        ]
        assert by[0][0] == "triton" and by[0][1] < by[1][1]


@pytest.mark.parametrize(("chip", "words"), [("h100", True), ("mi300x", False)])
def test_words_are_for_sums_on_chips_of_nvidia(chip: str, words: bool) -> None:
    def body(rank: int) -> list[bool]:
        group, x = resolve(None), torch.ones(8)
        return [
            movement._launch_config(op, group, y, 32, reduce_op).by_words
            for op, y, reduce_op in (
                ("all_reduce", x, "sum"), ("all_reduce", x.int(), "sum"),
                ("all_reduce", x, "max"), ("reduce_scatter", x, "sum"), ("all_gather", x, None),
            )
        ]  # fmt: skip

    assert sim.run(2, body, hardware=chip) == [[words, False, False, False, False]] * 2


def test_the_choice_is_one_for_all_and_by_size() -> None:
    small = collective_launch.collective_config("all_reduce", 8 << 10, 8, on_gpus=True)
    large = collective_launch.collective_config("all_reduce", 1 << 20, 8, on_gpus=True)
    assert not small.two_shot
    assert large.two_shot
    assert small.programs < large.programs <= 64


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize(("chip", "W"), [("h100", 2), ("h100", 8), ("b200", 8), ("mi300x", 4)])
def test_kernels_are_chosen_by_price(op: protocols.Collective, chip: str, W: int) -> None:
    fabric = named(chip).fabric(W)
    taken = []
    for shift in range(10, 32):
        nbytes = 1 << shift
        config = collective_launch.collective_config(op, nbytes, W, on_gpus=True)
        way, took, _ = collective_launch.quickest_way(op, nbytes, fabric, config, switch=False)
        taken.append(way == "triton")
        whole = nbytes if op == "all_reduce" else nbytes * W
        us = protocols.one_shot_us(nbytes, fabric, in_graph=True)
        if config.two_shot:
            us = protocols.kernel_us(op, whole, fabric, two_shot=True)
        parts = collective_launch.windows(nbytes, 1, W, config)
        most = max(stop - start for start, stop in parts)
        assert collective_launch.workspace_bytes(most, W, config) <= 128 << 20
        assert parts[0][0] == 0 and parts[-1][1] == nbytes
        us += (len(parts) - 1) * protocols.KERNEL_US
        library = protocols.nccl_us(op, whole, fabric)
        assert taken[-1] == (us <= library) and took == min(us, library)
    assert taken == sorted(taken, reverse=True)
    assert taken[0]


@pytest.mark.parametrize("W", [2, 3, 8])
@pytest.mark.parametrize("op", ["all_gather", "all_reduce"])
@pytest.mark.parametrize("itemsize", [1, 8, 16])
def test_no_window_needs_more_than_the_room(
    op: protocols.Collective, W: int, itemsize: int
) -> None:
    config = collective_launch.collective_config(op, 1 << 30, W, on_gpus=True)
    room = (128 << 20) // (2 if config.two_shot else W) // itemsize
    for widest in (0, 1, 17, *range(3 * room - 3000, 3 * room)):
        parts = collective_launch.windows(widest, itemsize, W, config)
        assert [0, *(stop for _, stop in parts)] == [*(start for start, _ in parts), widest]
        for start, stop in parts:
            nbytes = (stop - start) * itemsize
            assert 0 < collective_launch.workspace_bytes(nbytes, W, config) <= 128 << 20


@pytest.mark.ranks(2, pytest.param(3, marks=pytest.mark.slow))
def test_large_ones_go_in_windows() -> None:
    """Which need no more workspace; pieces end inside of windows, or before they begin."""
    rank, W = dist.get_rank(), dist.get_world_size()
    sizes = [700, 130, 0][:W]
    every = [values(r, sum(sizes), torch.float32, r) for r in range(W)]
    sends = [[(150 * r + 430 * p) % 700 for p in range(W)] for r in range(W)]
    parts = [values(r, sum(sends[r]), torch.float32, r) for r in range(W)]
    with mock.patch.object(collective_launch, "_MOST_ROOM", 6 << 10), weft.engine("triton"):
        config = collective_launch.collective_config("all_gather", 2800, W, on_gpus=False)
        assert len(collective_launch.windows(700, 4, W, config)) == W
        for _ in range(2):
            got = collectives.all_gather(every[rank][: sizes[rank]], sizes=sizes)
            assert torch.equal(got, torch.cat([x[:n] for x, n in zip(every, sizes, strict=True)]))
            assert torch.equal(collectives.all_reduce(every[rank]), reduced(every, "sum"))
            got = collectives.reduce_scatter(every[rank], sizes=sizes)
            assert torch.equal(got, reduced(every, "sum").split(sizes)[rank])
            receives = [sends[r][rank] for r in range(W)]
            got = collectives.all_to_all(parts[rank], receives, sends[rank])
            want = [x.split(n)[rank] for x, n in zip(parts, sends, strict=True)]
            assert torch.equal(got, torch.cat(want))


def test_the_switch_is_offered_where_it_may_add_up() -> None:
    """Halves of 16 MiB on 8 H100, whose switch is the quickest way; none on MI300X."""
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        nbytes = 16 << 20 if op == "all_reduce" else 2 << 20
        config = collective_launch.collective_config(op, nbytes, 8, on_gpus=True)
        for chip, switch, want in (
            ("h100", True, True),
            ("h100", False, False),
            ("mi300x", True, 0),
        ):
            fabric = named(chip).fabric(8)
            way, us, why = collective_launch.quickest_way(op, nbytes, fabric, config, switch=switch)
            assert (way == "switch") == want
            assert ("by the switch" in why) == want
            if want:
                assert us == protocols.switch_us(op, 16 << 20, fabric, in_graph=True)
    x = torch.empty(4)
    assert not movement._switch_may("all_gather", x, None)  # on a CPU
    with mock.patch.object(torch.Tensor, "is_cuda", True):
        assert movement._switch_may("all_gather", x, None)
        assert not movement._switch_may("reduce_scatter", x, "sum")
        with mock.patch.dict("os.environ", {"WEFT_MULTIMEM": "1"}):
            assert movement._switch_may("reduce_scatter", x, "sum")
            assert not movement._switch_may("reduce_scatter", x, "max")
        assert not movement._switch_may("all_gather", x.int(), None)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", multimem.DTYPES)
@pytest.mark.slow_where(dtype=[torch.float32, torch.float16])
def test_collectives_by_the_switch(dtype: torch.dtype) -> None:
    """Every rank's memory stands for it; uneven and empty pieces, addresses that differ."""
    rank, W = dist.get_rank(), dist.get_world_size()
    for sizes in ([5, 0, 70], [0, 0, 1], [32, 32, 32], [33, 31, 2]):
        nbytes = max(max(sizes), -(-sum(sizes) // W) + 8) * dtype.itemsize
        ws = workspace(None, multimem.workspace_bytes("all_reduce", nbytes, W), channel="switched")
        every = [torch.arange(sum(sizes) + 2 * r).remainder(7).to(dtype)[2 * r :] for r in range(W)]
        total = sum(every[1:], every[0])
        for _ in range(3):
            shards = [x[:size] for x, size in zip(every, sizes, strict=True)]
            out = torch.full((sum(sizes) + 1,), 77).to(dtype)
            multimem.launch_switched("all_gather", shards[rank], out[1:], ws, sizes, 32)
            ws.launched("all_gather")
            assert torch.equal(out[1:], torch.cat(shards)) and out[0] == 77
            out = torch.full((sizes[rank] + 1,), 77).to(dtype)
            multimem.launch_switched("reduce_scatter", every[rank], out[1:], ws, sizes, 32)
            ws.launched("reduce_scatter")
            assert torch.equal(out[1:], total.split(sizes)[rank]) and out[0] == 77
            x, shares = every[rank].clone(), multimem.vector_shares(sum(sizes), dtype.itemsize, W)
            multimem.launch_switched("all_reduce", x, x, ws, shares, 32)
            ws.launched("all_reduce")
            assert torch.equal(x, total)


@pytest.mark.ranks(3)
def test_large_sums_by_the_switch_go_in_parts() -> None:
    """Into a workspace that holds no more than one of them."""
    rank, W, count = dist.get_rank(), dist.get_world_size(), 1000
    every = [torch.arange(count).remainder(5 + r).float() for r in range(W)]
    with (
        mock.patch.object(collective_launch, "_MOST_ROOM", 3 << 10),
        mock.patch.object(movement, "_way", lambda *_: "switch"),
        mock.patch.object(multimem, "launch_switched", side_effect=multimem.launch_switched) as to,
    ):
        parts = collective_launch.switch_windows(count, 4)
        assert len(parts) == 3 and all(stop - start <= 384 for start, stop in parts)
        for _ in range(2):
            assert torch.equal(collectives.all_reduce(every[rank]), sum(every[1:], every[0]))
        assert to.call_count == 2 * len(parts)
        assert collectives.all_reduce(every[rank][:0]).numel() == 0


def test_the_switch_adds_up_large_sums_in_parts() -> None:
    """Of 256 MiB, 4 of 64, each by a kernel; a gather of as many bytes goes another way."""
    fabric = named("h100").fabric(8)
    config = collective_launch.collective_config("all_reduce", 256 << 20, 8, on_gpus=True)
    way, us, _ = collective_launch.quickest_way(
        "all_reduce", 256 << 20, fabric, config, switch=True
    )
    alone = protocols.switch_us("all_reduce", 256 << 20, fabric, in_graph=True)
    assert way == "switch" and us == alone + 3 * protocols.KERNEL_US
    way, _, why = collective_launch.quickest_way(
        "all_gather", 32 << 20, fabric, config, switch=True
    )
    assert way != "switch" and "by the switch" not in why


@pytest.mark.parametrize(
    ("count", "way"),
    [pytest.param(1 << 20, "triton", marks=pytest.mark.slow), (1 << 26, "generic")],
)
def test_ranks_that_stand_for_chips_choose_by_the_price(count: int, way: str) -> None:
    """Sums of 8 MiB, which NCCL would take longer for, and of 512 MiB."""

    def body(rank: int) -> str:
        with settings.explaining() as decisions:
            collectives.all_reduce(torch.empty(count * 4, dtype=torch.bfloat16))
        return decisions[0].engine

    told = sim.run(2, body, hardware="h100", numerics=False)
    assert told == [way] * 2


def test_interpreted_programs_have_several_blocks_but_few() -> None:
    """A block takes them about 0.4 ms, whether of 64 bytes or of 64 KiB."""
    for nbytes in (200, 3000, 9 << 10, 1 << 20):
        config = collective_launch.collective_config("all_gather", nbytes, 8, on_gpus=False)
        assert 1 <= nbytes / config.block_bytes / config.programs <= 8, (nbytes, config)


@pytest.mark.ranks(2)
def test_a_small_workspace_is_refused() -> None:
    where = resolve(None)
    config = collective_launch.collective_config("all_gather", 1 << 20, 2, on_gpus=False)
    ws = workspace(where, channel="small")
    x = torch.zeros(1 << 20)
    with pytest.raises(ValueError, match="workspace must hold"):
        collective_launch.launch_all_gather(x, torch.zeros(1 << 21), ws, [1 << 20] * 2, config)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("dtype", "op"),
    [(torch.float32, None), (torch.uint8, None), (torch.bfloat16, "sum"), (torch.int32, "max")],
    ids=str,
)
def test_boxes(dtype: torch.dtype, op: str | None) -> None:
    """Rows to columns: of one rank each, or of the sum over all."""
    rank, W = dist.get_rank(), dist.get_world_size()
    where = resolve(None)
    rows, columns = (2, 3, 1)[:W], (5, 8, 3)[:W]
    height = rows[rank] if op is None else sum(rows)
    xs = [
        values(r, (rows[r] if op is None else sum(rows)) * sum(columns), dtype, 3).view(
            -1, sum(columns)
        )
        for r in range(W)
    ]
    whole = torch.cat(xs) if op is None else reduced(xs, op)
    first = offsets(columns)[rank]
    wide, narrow = (sum(columns), 1), (columns[rank], 1)
    boxes = [
        Box((r,), (rows[r], columns[rank]), first, wide, start * columns[rank], narrow)
        for r, start in enumerate(offsets(rows))
    ]
    if op is not None:
        everyone = tuple(range(W))
        boxes = [Box(everyone, (height, columns[rank]), first, wide, 0, narrow)]
    table = table_of(boxes, rank, dtype, torch.device("cpu"), op=op, divisor=1)
    assert table.local == (op is None)
    ws = workspace(where, xs[rank].numel() * dtype.itemsize + 64, channel="boxes")
    for _ in range(3):
        out = torch.full((sum(rows), columns[rank]), 99).to(dtype)
        pull.launch_pull(xs[rank], out, ws, table, publish=True)
        ws.launched("pull")
        assert torch.equal(out, whole[:, first : first + columns[rank]])


def test_boxes_are_copied_in_wide_words_of_few_dims() -> None:
    def table(*boxes: Box, **kwargs: Any) -> BoxTable:
        return table_of(boxes, 0, torch.bfloat16, torch.device("cpu"), **kwargs)

    whole = Box((1,), (4, 2, 8), 0, (16, 8, 1), 64, (16, 8, 1))
    assert table(whole).dims == 1
    assert table(whole).word == 8
    assert table(whole).rows.tolist() == [16, 16, 0, 0, 1, 16, 1, 1]
    assert table(whole, align=4).word == 4
    columns = Box((1,), (4, 6), 2, (16, 1), 0, (6, 1))
    assert table(columns).word == 4
    assert table(columns).dims == 2
    summed = Box((1, 0), (4, 8), 0, (8, 1), 0, (8, 1))
    assert (table(summed, op="sum").word, table(summed, op="sum").op) == (2, "sum")
    assert (table(whole, op="sum").word, table(whole, op="sum").op) == (8, "copy")


def test_what_no_kernel_pulls() -> None:
    assert not pull.refusal(torch.bfloat16, "sum", 4, 100)
    assert "complex" in pull.refusal(torch.complex64, None, 1, 100)
    assert "band" in pull.refusal(torch.int32, "band", 1, 100)
    assert "average" in pull.refusal(torch.int32, "sum", 4, 100)
    assert "elements" in pull.refusal(torch.float32, None, 1, 2**31)
