"""The fused kernels themselves, interpreted on real processes, against float64."""

from __future__ import annotations

import inspect
import itertools
import random
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from needs import needs_interpreter
from torch.nn import functional

from weft.collectives import chunk_sizes, workspace
from weft.collectives.ranks.pad import KERNEL_SLOTS, MAX_PROGRAMS
from weft.errors import PeerTimeout
from weft.kernels.device import gathers, summed_tiles
from weft.kernels.device.gathered_tiles import GatherVariant
from weft.kernels.device.operands import described_rows
from weft.kernels.engine.chips import INTERPRETER, KNOWN, Chip, Tiling
from weft.kernels.engine.fp8 import Scaling
from weft.kernels.matmul import (
    all_gather_launch,
    contract_kernel,
    one_shot_kernel,
    reduce_scatter_kernel,
    two_shot_kernel,
)

pytestmark = needs_interpreter


def tolerance(dtype: torch.dtype, K: int) -> dict[str, float]:
    """The inputs' rounding is in the reference too: one rounding and fp32 sums are left."""
    eps = torch.finfo(dtype).eps
    return {"rtol": eps, "atol": eps + 4e-7 * max(K, 1) ** 0.5 * 4}


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int, layout: str = "rows"):
    """The same on every rank. `layout`: "rows" or "columns" contiguous, "strided", or "negated"."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "columns":
        return torch.randn(columns, rows, generator=generator).to(dtype).T
    if layout == "strided":
        return torch.randn(rows, 2 * columns, generator=generator).to(dtype)[:, ::2]
    if layout == "negated":  # a view whose numbers have the other sign in memory
        return torch._neg_view(torch.randn(rows, columns, generator=generator).to(dtype))
    return torch.randn(rows, columns, generator=generator).to(dtype)


def poisoned(ws) -> None:
    """Fill this rank's data with NaN while nobody else writes there."""
    dist.barrier()
    ws.tensor(ws.rank, 0, (ws.half_bytes,), torch.uint8).fill_(255)
    ws.tensor(ws.rank, 1, (ws.half_bytes,), torch.uint8).fill_(255)
    dist.barrier()


def cases(count: int, seed: int, limit: int = 70):
    rng = random.Random(seed)
    for index in range(count):
        sizes = [
            rng.choice([1, 2, 3, 7, 16, 17, 31, 32, 33, rng.randint(1, limit)]) for _ in range(3)
        ]
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        layouts = [rng.choice(["rows", "columns", "strided", "negated"]) for _ in range(3)]
        yield index, sizes, dtype, layouts


WAYS = ("fetched", "direct", "split", "copy engines")


def gather_config(way: str, M: int, N: int, K: int, dtype, W: int, activation=None):
    """The launch of a gather whose shards come in by one of WAYS."""
    config = all_gather_launch.all_gather_config(
        M, N, K, dtype, W, INTERPRETER, activation=activation, keep=True
    )
    if way == "fetched":
        return config
    if way == "copy engines":
        return all_gather_launch.by_copy_engines(config, M, K, dtype, W, INTERPRETER)
    t, widths = config.tiling, N // 2 if activation == "swiglu" else N
    count = -(-M // t.block_m) * -(-widths // t.block_n)
    if way == "direct":  # tiles that fill no wave are made in halves
        config = replace(config, programs=max(1, 2 * count // 3), halves=t.block_n >= 32)
        return replace(config, direct=True, copy_programs=0)
    split = 3  # K may have fewer steps than that
    return replace(config, direct=True, copy_programs=0, split=split, programs=count * split)


def gather_rows(count: int, seed: int) -> None:
    ws = workspace(None, 1 << 16, channel="test")
    engines_ws = workspace(None, 1 << 16, channel="test of copy engines")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    poisoned(engines_ws)
    for index, (M, N, K), dtype, layouts in cases(count, seed):
        case = partial("case {}: {}".format, (index, M, N, K, dtype, layouts))
        sizes = chunk_sizes(M, W)
        if index % 3 == 2:  # any sizes will do, not only torch.chunk's
            random.Random(index).shuffle(sizes)
        full = matrix(M, K, dtype, index, layouts[0])
        x = full.split(sizes)[rank]
        weights = [
            matrix(K, n, dtype, 100 + rank + n, layouts[1]) for n in (N, 1, 33)[: 1 + index % 3]
        ]
        biases = [
            None if i == 1 else matrix(1, w.shape[1], dtype, i, layouts[2])[0]
            for i, w in enumerate(weights)
        ]
        if index % 4 == 3 and rank == index % W:
            time.sleep(0.02)
        way = WAYS[index % 4] if len(weights) == 1 or index % 4 != 2 else "direct"
        keep = "direct" not in way and way != "split" and index % 8 < 4
        made = all_gather_launch.launch_all_gather_matmul(
            x, weights, engines_ws if way == "copy engines" else ws, sizes, biases=biases,
            with_own=keep, config=gather_config(way, M, N, K, dtype, W),
        )  # fmt: skip
        ws.check("gather_rows")
        engines_ws.check("gather_rows")
        if keep:
            torch.testing.assert_close(made.matrix, full, rtol=0, atol=0)
        for y, w, bias in zip(made.ys, weights, biases, strict=True):
            want = full.double() @ w.double() + (0 if bias is None else bias.double())
            torch.testing.assert_close(y.double(), want, **tolerance(dtype, K), msg=case)


def gather_contraction(count: int, seed: int) -> None:
    ws = workspace(None, 1 << 16, channel="test")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    for index, (M, N, K), dtype, layouts in cases(count, seed):
        case = partial("case {}: {}".format, (index, M, N, K, dtype, layouts))
        sizes, full = chunk_sizes(K, W), matrix(K, M, dtype, index, layouts[0])
        x, w = full.split(sizes)[rank], matrix(K, N, dtype, 100 + rank, layouts[1])
        out = torch.empty(N, M, dtype=dtype).T if index % 4 == 2 else None
        gathered, y = contract_kernel.launch_all_gather_contract(
            x, w, ws, sizes, out=out, with_own=index % 3 == 1
        )
        ws.check("gather_contraction")
        if index % 3 == 1:
            torch.testing.assert_close(gathered, full, rtol=0, atol=0)
        want = full.double().T @ w.double()
        torch.testing.assert_close(y.double(), want, **tolerance(dtype, K), msg=case)


def one_shot_config(
    split: int, M: int, N: int, dtype: torch.dtype
) -> one_shot_kernel.OneShotConfig:
    config = one_shot_kernel.one_shot_config(M, N, dtype, INTERPRETER)
    count = summed_tiles.tile_count(M, N, config.tiling)
    programs = max(1, count * split) if split > 1 else min(count, 3)
    return replace(config, split=split, programs=programs)


def scatter_config(index: int, chunk: int, N: int, dtype: torch.dtype, W: int):
    """Chunks of their own tiles, tiles that straddle chunks, and those split along K, in turn."""
    if index % 4 < 2:
        tiling = Tiling(16 if chunk <= 16 else 32, 16 if N <= 16 else 32, 32, group_m=2)
        return reduce_scatter_kernel.ReduceScatterConfig(tiling, 3, 16, index % 2 == 0)
    config = one_shot_config(1 + index % 2, W * chunk, N, dtype)
    return replace(config, descriptors=index % 2 == 0)


def reduce_scatter(count: int, seed: int) -> None:
    ws = workspace(None, 1 << 19, channel="test")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    for index, (M, N, K), dtype, layouts in cases(count, seed):
        case = partial("case {}: {}".format, (index, M, N, K, dtype, layouts))
        terms, sizes = 1 + index % 2, chunk_sizes(M, W)
        if index % 3 == 2:
            random.Random(index).shuffle(sizes)
        depths = [[(K + r * i) % 70 for i in range(terms)] for r in range(W)]  # 0 among them
        if index % 4 < 2:
            depths = [[K, 32][:terms]] * W  # the second in whole steps
        xs = [
            [matrix(M, k, dtype, 10 * r + i, layouts[0]) for i, k in enumerate(ks)]
            for r, ks in enumerate(depths)
        ]
        weights = [
            [matrix(k, N, dtype, 500 + 10 * r + i, layouts[1]) for i, k in enumerate(ks)]
            for r, ks in enumerate(depths)
        ]
        bias = matrix(1, N, dtype, 7, layouts[2])[0] if index % 3 == 0 else None
        scale = 1.0 if index % 5 else 1 / W
        config = scatter_config(index, max(sizes), N, dtype, W)
        residual = matrix(sizes[rank], N, dtype, 70 + rank, layouts[2]) if index % 2 else None
        launch = partial(
            reduce_scatter_kernel.launch_matmul_reduce_scatter, xs[rank], weights[rank], ws, sizes,
            bias=bias, residual=residual, scale=scale,
        )  # fmt: skip
        y = launch(config=config)
        ws.check("reduce_scatter")
        if isinstance(config, reduce_scatter_kernel.ReduceScatterConfig) and terms == 1:
            assert torch.equal(y, launch(config=replace(config, flattened=True))), case
        want = sum(
            x.double() @ w.double()
            for a, b in zip(xs, weights, strict=True)
            for x, w in zip(a, b, strict=True)
        )
        want = want * scale + (0 if bias is None else bias.double())
        want = want.split(sizes)[rank] + (0 if residual is None else residual.double())
        torch.testing.assert_close(y.double(), want, **tolerance(dtype, W * terms * 70), msg=case)


def all_reduce(count: int, seed: int) -> None:
    ws = workspace(None, 1 << 19, channel="test")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    for index, (M, N, K), dtype, layouts in cases(count, seed):
        case = partial("case {}: {}".format, (index, M, N, K, dtype, layouts))
        depths = [K if index % 4 < 2 else (K + r) % 70 for r in range(W)]
        xs = [matrix(M, k, dtype, r, layouts[0]) for r, k in enumerate(depths)]
        weights = [matrix(k, N, dtype, 500 + r, layouts[1]) for r, k in enumerate(depths)]
        bias = matrix(1, N, dtype, 7, layouts[2])[0] if index % 3 == 0 else None
        scale = 1.0 if index % 5 else 1 / W
        residual = matrix(M, N, dtype, 70, layouts[2]) if index % 2 else None
        config = two_shot_kernel.two_shot_config(M, N, dtype, INTERPRETER)
        if index % 3 == 2:
            config = one_shot_config(1 + index % 2, M, N, dtype)
        elif index % 3 == 1 and dtype == torch.float32:  # every rank's memory stands for the switch
            config = replace(config, by_switch=True)
        config = replace(config, descriptors=index % 2 == 0)
        launch = partial(
            two_shot_kernel.launch_matmul_all_reduce, xs[rank], weights[rank], ws, bias=bias,
            residual=residual, scale=scale,
        )  # fmt: skip
        y = launch(config=config)
        ws.check("all_reduce")
        if isinstance(config, two_shot_kernel.TwoShotConfig):
            assert torch.equal(y, launch(config=replace(config, flattened=True))), case
        want = sum(x.double() @ w.double() for x, w in zip(xs, weights, strict=True))
        want = want * scale + (0 if bias is None else bias.double())
        want += 0 if residual is None else residual.double()
        torch.testing.assert_close(y.double(), want, **tolerance(dtype, W * 70), msg=case)
        first = y.float().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, y.float()), f"{index}: rank {rank} differs from rank 0"


BODIES = [gather_rows, gather_contraction, reduce_scatter, all_reduce]


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(W, marks=pytest.mark.slow) for W in (3, 4))]
)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_against_float64(ranks, virtual_ranks, body, world_size):
    run = virtual_ranks if world_size == 2 else ranks
    run(world_size, body, {2: 12, 3: 6, 4: 4}[world_size], world_size)


def sums_in_one_loop() -> None:
    """All tiles of a program in one loop and nested, and from another one on: the same bits. Chunks
    end in a tile.
    """
    ws = workspace(None, 1 << 19, channel="one loop")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    # Steps of K that are not whole, one step, columns that end in a tile; tiles for each way.
    for index, (sizes, K, N) in enumerate(
        [((64, 41), 80, 72), ((20, 32), 16, 200), ((90,), 48, 8)]
    ):
        sizes = (sizes * W)[:W]
        M, dtype = sum(sizes), torch.float32 if index else torch.bfloat16
        xs = [matrix(M, K, dtype, r) for r in range(W)]
        weights = [matrix(K, N, dtype, 50 + r, ("rows", "columns")[index % 2]) for r in range(W)]
        want = sum(x.double() @ w.double() for x, w in zip(xs, weights, strict=True))
        columns = torch.linspace(0.5, 1.0, N)
        scaling = Scaling(torch.linspace(0.5, 1.0, M), [columns], dtype) if index == 2 else None
        if scaling:
            want *= scaling.rows.double()[:, None] * columns.double()
        tiling = Tiling(32, 32, 32, group_m=2)
        scatter = reduce_scatter_kernel.ReduceScatterConfig(tiling, 3, 16, True, senders=2)
        whole = two_shot_kernel.TwoShotConfig(tiling, 3, 32, True)
        found = []
        for flattened, spread in ((False, False), (True, False), (False, True)):
            y = reduce_scatter_kernel.launch_matmul_reduce_scatter(
                [xs[rank]], [weights[rank]], ws, sizes, scaling=scaling,
                config=replace(scatter, flattened=flattened, spread=spread),
            )  # fmt: skip
            both = two_shot_kernel.launch_matmul_all_reduce(
                xs[rank], weights[rank], ws, scaling=scaling,
                config=replace(whole, flattened=flattened),
            )  # fmt: skip
            found.append((y, both))
        assert all(torch.equal(each[0], y) for each in zip(*found, strict=True) for y in each), (
            index
        )
        close = tolerance(dtype, W * K)
        torch.testing.assert_close(y.double(), want.split(sizes)[rank], **close)
        torch.testing.assert_close(both.double(), want, **close)


def test_sums_in_one_loop(virtual_ranks, monkeypatch):
    made = []
    for module in (reduce_scatter_kernel, two_shot_kernel):
        kept = partial(lambda old, **new: made.append(replace(old, **new)) or made[-1])
        monkeypatch.setattr(module, "replace", kept)
    virtual_ranks(2, sums_in_one_loop)
    found = [each.flattened for each in made if isinstance(each, summed_tiles.SumVariant)]
    assert sum(found) >= 2 * 5 and len(found) == 2 * 18  # one shape has an odd number of tiles


@pytest.mark.sweep
@pytest.mark.ranks(2, 3, 4, timeout_s=900)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_many_shapes_against_float64(body, world_size):
    body(60, 1000 + world_size)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_gpu_like_tiles() -> None:
    """Tiles wider than 128, several reductions a tile, descriptors in every orientation."""
    ws = workspace(None, 1 << 21, channel="wide")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    tiling, (M, N, K) = Tiling(32, 256, 16, group_m=1), (40, 264, 48)
    for index, layouts in enumerate(
        [("rows", "rows"), ("columns", "rows"), ("rows", "columns"), ("columns", "columns")]
    ):
        dtype = torch.bfloat16 if index % 2 else torch.float32
        xs = [matrix(M, K, dtype, r, layouts[0]) for r in range(W)]
        weights = [matrix(K, N, dtype, 50 + r, layouts[1]) for r in range(W)]
        want = sum(x.double() @ w.double() for x, w in zip(xs, weights, strict=True))
        close = tolerance(dtype, W * K)
        scatter = reduce_scatter_kernel.ReduceScatterConfig(tiling, 3, 16, True)
        one_shot = one_shot_kernel.OneShotConfig(tiling, 12, 16, True, split=2)
        columns = torch.linspace(0.5, 1.0, N)
        scaling = Scaling(torch.ones(1), [columns], dtype)  # as fp8 has it
        chunk = want.split(chunk_sizes(M, W))[rank] * columns.double()
        y = reduce_scatter_kernel.launch_matmul_reduce_scatter(
            [xs[rank]], [weights[rank]], ws, chunk_sizes(M, W), scaling=scaling, config=scatter
        )
        torch.testing.assert_close(y.double(), chunk, **close)
        # The same as a sum of two terms, or of three.
        terms = [slice(*ends) for ends in pairwise((0, 16, *[32] * (index % 2), K))]
        y = reduce_scatter_kernel.launch_matmul_reduce_scatter(
            [xs[rank][:, part] for part in terms], [weights[rank][part] for part in terms],
            ws, chunk_sizes(M, W),
            config=scatter if index % 2 else one_shot,
        )  # fmt: skip
        torch.testing.assert_close(y.double() * columns.double(), chunk, **close)
        for reduce in (two_shot_kernel.TwoShotConfig(tiling, 2, 16, True), one_shot):
            y = two_shot_kernel.launch_matmul_all_reduce(xs[rank], weights[rank], ws, config=reduce)
            torch.testing.assert_close(y.double(), want, **close)
        gather = all_gather_launch.AllGatherConfig(tiling, 4, 2, 8, 4, 32, descriptors=True)
        whole = torch.cat(xs).double()
        (y,) = all_gather_launch.launch_all_gather_matmul(
            xs[rank], [weights[rank]], ws, [M] * W, config=gather
        ).ys
        torch.testing.assert_close(y.double(), whole @ weights[rank].double(), **close)
        if layouts[0] == layouts[1]:  # two weights by descriptor, or by descriptor of the transpose
            pair = [weights[rank] / 8, weights[1 - rank] / 8]
            (y,) = all_gather_launch.launch_all_gather_matmul(
                xs[rank], pair, ws, [M] * W, activation="swiglu",
                config=replace(gather, tiling=replace(tiling, block_n=128)),
            ).ys  # fmt: skip
            gate, up = (whole @ w.double() for w in pair)
            torch.testing.assert_close(y.double(), functional.silu(gate) * up, **close)
        contract = contract_kernel.ContractConfig(tiling, 4, 2, 4, 32, descriptors=True)
        for rows in (M, 32):  # w by descriptor only where shards are whole steps of the contraction
            dy, whole = matrix(rows * W, N, dtype, 9, layouts[1]), torch.cat([x[:rows] for x in xs])
            _, y = contract_kernel.launch_all_gather_contract(
                xs[rank][:rows], dy, ws, [rows] * W, config=contract
            )
            want = whole.T.double() @ dy.double()
            torch.testing.assert_close(y.double(), want, **tolerance(dtype, W * rows))


def scaled_ways() -> None:
    """Factors of the rows come with them by every way, several chunks a shard; one for all, too."""
    ws = workspace(None, 1 << 14, channel="scaled")
    engines_ws = workspace(None, 1 << 14, channel="scaled, by copy engines")
    rank, W, K, N, fp8 = ws.rank, ws.world_size, 40, 20, torch.float8_e4m3fn
    sizes = [35, 19]
    assert gathers.workspace_bytes(35, K, fp8) == 35 * 48 + 35 * 4
    whole, w = matrix(sum(sizes), K, fp8, 1), matrix(K, N, fp8, 2 + rank)
    columns = torch.linspace(0.5, 2.0, N)
    for rows in (torch.linspace(0.5, 2.0, sum(sizes)), torch.full((1,), 0.7)):
        mine = rows.split(sizes)[rank] if len(rows) > 1 else rows.expand(sizes[rank])
        want = rows.double()[:, None] * (whole.double() @ w.double()) * columns.double()
        for way in WAYS:
            made = all_gather_launch.launch_all_gather_matmul(
                whole.split(sizes)[rank], [w], engines_ws if way == "copy engines" else ws, sizes,
                scaling=Scaling(mine, [columns], torch.float32),
                config=gather_config(way, sum(sizes), N, K, fp8, W),
            )  # fmt: skip
            torch.testing.assert_close(made.ys[0].double(), want, rtol=1e-5, atol=1e-4)


def test_factors_by_every_way(virtual_ranks):
    virtual_ranks(2, scaled_ways)


def rows_by_descriptor() -> None:
    """Shards of any size, whole and in halves, in one loop and nested: the same bits."""
    ws = workspace(None, 1 << 15, channel="described")
    engines_ws = workspace(None, 1 << 15, channel="described, by copy engines")
    rank, W, fp8 = ws.rank, ws.world_size, torch.float8_e4m3fn
    poisoned(ws)
    poisoned(engines_ws)
    rng = random.Random(W)
    # Empty shards, tiles cut off in every piece, one step of K and a last one that is not whole.
    shapes = [
        ([33, 0, 70, 16][:W], 80, 40, torch.bfloat16, None),
        ([65, 0, 1, 32][:W], 16, 40, torch.float16, "gelu"),
        ([64, 32, 96, 32][:W], 96, 24, torch.bfloat16, "swiglu"),
        ([50, 31, 0, 7][:W], 160, 80, fp8, None),
        ([64, 9, 33, 40][:W], 112, 72, torch.float32, "relu"),
    ]  # fmt: skip
    for index, (sizes, K, N, dtype, activation) in list(enumerate(shapes))[W % 2 :: 2]:
        rng.shuffle(sizes)
        M, pair = sum(sizes), activation == "swiglu"
        whole = matrix(M, K, dtype, index)
        layout = ("rows", "columns")[index % 2]
        weights = [matrix(K, N, dtype, 9 + rank + i, layout) for i in range(1 + pair)]
        scaling, rows, columns = None, torch.ones(M), torch.ones(N)
        if dtype == fp8:
            rows, columns = torch.linspace(0.5, 2.0, M), torch.linspace(0.5, 2.0, N)
            scaling = Scaling(rows.split(sizes)[rank], [columns], torch.float32)
        factors = rows.double()[:, None] * columns.double()
        sums = [whole.double() @ w.double() * factors for w in weights]
        want = sums[0]
        if activation == "swiglu":
            want = functional.silu(sums[0]) * sums[1]
        elif activation:
            want = getattr(functional, activation)(sums[0])
        for way, parts in (("fetched", 1), ("fetched", 2), ("copy engines", 1)):
            config = gather_config(way, M, N * len(weights), K, dtype, W, activation)
            # Five programs: several tiles for one, and for some of the copy engines' two halves.
            config = replace(config, descriptors=True, parts=parts, programs=5)
            case = f"{index}: {sizes}, {K=}, {N=}, {dtype}, {activation}, {way}, {parts=}"
            keep, found = way == "fetched" and index % 2 == 0, []
            for flattened in (False, True):
                made = all_gather_launch.launch_all_gather_matmul(
                    whole.split(sizes)[rank], weights,
                    engines_ws if way == "copy engines" else ws, sizes, scaling=scaling,
                    activation=activation, with_own=keep,
                    config=replace(config, flattened=flattened),
                )  # fmt: skip
                if keep:
                    assert torch.equal(made.matrix, whole), case
                found.append(made.ys[0])
            close = tolerance(found[0].dtype, K)
            torch.testing.assert_close(found[1].double(), want, **close, msg=case)
            assert torch.equal(*found), case


@pytest.mark.parametrize(
    "world_size",
    [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.sweep)],
)
def test_rows_by_descriptor(virtual_ranks, monkeypatch, world_size):
    made: list[GatherVariant] = []

    def variant(**fields):
        made.append(GatherVariant(**fields))
        return made[-1]

    monkeypatch.setattr(all_gather_launch, "GatherVariant", variant)
    virtual_ranks(world_size, rows_by_descriptor)
    assert all(each.described for each in made)
    single = [each for each in made if not each.pair]
    assert sum(each.flattened for each in made) == len(single) / 2 == 2 * 3 * world_size
    assert any(each.halved for each in made) or world_size != 2


def test_rows_of_tiles_apart():
    assert all_gather_launch.tiles_apart([16] * 8, 3, 64) == 3  # of 16, 64 and 48 rows
    assert all_gather_launch.tiles_apart([130, 0, 64], 0, 64) == 4
    assert all_gather_launch.tiles_apart([130, 0, 64], 1, 64) == 4


def test_rows_that_hardware_cannot_copy_go_by_pointers():
    t, w = Tiling(32, 32, 32), torch.zeros(64, 64)
    x, gathered = w[:32], torch.zeros(96, 64)
    own, others = described_rows(x, gathered, t, True)
    assert own.base is x and others.base is gathered
    # Of an empty shard there is none: another stands there.
    assert described_rows(x[:0], gathered, t, True)[0].base is gathered
    nothing = [None, None]
    assert described_rows(x, gathered, t, False) == nothing
    assert described_rows(x[:0], gathered[:0], t, True) == nothing
    assert described_rows(w.T[:32], gathered, t, True) == nothing  # along K strided
    assert described_rows(w[:32, 1:], torch.zeros(96, 63), t, True) == nothing  # 252 bytes
    narrow = torch.zeros(96, 66)  # its rows are 264 bytes apart
    assert described_rows(narrow[:32], narrow, t, True) == nothing


# Programs, columns of each weight, activation and dtype; then how many tiles are made in halves.
# There are four rows of tiles, of which the first is all the rank's own.
IN_HALVES = {
    "one for some programs": (6, (37,), None, torch.float32, 2),
    "two for some programs": (5, (37,), None, torch.float32, 3),
    "no whole tiles": (16, (37,), None, torch.float32, 8),
    "several weights": (6, (1, 37, 33), None, torch.float16, 2),
    "a weight without columns": (6, (0, 37), None, torch.float32, 2),
    "gelu": (6, (37,), "gelu", torch.float32, 2),
    "swiglu": (6, (37, 37), "swiglu", torch.bfloat16, 2),
    "fp8": (6, (37,), None, torch.float8_e4m3fn, 2),
}


def tiles_in_halves(programs, widths, activation, dtype) -> None:
    ws = workspace(None, 1 << 15, channel="halves")
    rank, W, K, sizes = ws.rank, ws.world_size, 40, [52, 63]
    poisoned(ws)
    config = gather_config("copy engines", 115, sum(widths), K, dtype, W, activation)
    for call in range(2):
        whole = matrix(115, K, dtype, call)
        weights = [matrix(K, n, dtype, 5 + rank + i) for i, n in enumerate(widths)]
        sums = [whole.double() @ w.double() for w in weights]
        scaling = None
        if dtype.itemsize == 1:
            rows, columns = torch.linspace(0.5, 2.0, 115), torch.linspace(0.5, 2.0, widths[0])
            scaling = Scaling(rows.split(sizes)[rank], [columns], torch.float32)
            sums = [z * rows.double()[:, None] * columns.double() for z in sums]
        made = all_gather_launch.launch_all_gather_matmul(
            whole.split(sizes)[rank], weights, ws, sizes, activation=activation,
            keep_sums=activation is not None, scaling=scaling,
            config=replace(config, programs=programs),
        )  # fmt: skip
        want = sums
        if activation == "swiglu":
            want = [functional.silu(sums[0]) * sums[1]]
        elif activation:
            want = [functional.gelu(z) for z in sums]
        close = tolerance(made.ys[0].dtype, K)
        for ours, theirs in zip(made.ys, want, strict=True):
            torch.testing.assert_close(ours.double(), theirs, **close)
        for ours, theirs in zip(made.sums, sums if activation else [], strict=True):
            torch.testing.assert_close(ours.double(), theirs, **close)


@pytest.mark.parametrize("case", IN_HALVES)
@pytest.mark.slow_where(case=list(IN_HALVES)[4:])
def test_tiles_in_halves(virtual_ranks, monkeypatch, case):
    *launch, wanted = IN_HALVES[case]
    counted, halved = [], all_gather_launch.halved_tiles
    monkeypatch.setattr(
        all_gather_launch,
        "halved_tiles",
        lambda *args: counted.append(halved(*args)) or counted[-1],
    )
    virtual_ranks(2, tiles_in_halves, *launch)
    assert counted == [wanted] * 4  # of two ranks in two calls


def test_which_tiles_are_made_in_halves():
    config = gather_config("copy engines", 4096, 3584, 8192, torch.bfloat16, 8)
    config = replace(config, programs=131)
    for count, own, wanted in (
        (131, 0, 0), (196, 0, 65), (197, 0, 0),
        (224, 27, 0), (224, 28, 93), (224, 65, 93), (224, 66, 0),
        (5, 0, 5),
    ):  # fmt: skip
        assert all_gather_launch.halved_tiles(count, own, config) == wanted, (count, own)
    assert all_gather_launch.halved_tiles(196, 0, replace(config, halves=False)) == 0


def test_workspaces_hold_what_is_sent():
    """A slot a rank, of whole tiles; 24 bits of each sum for a result in half precision."""
    t, bf16, fp32 = Tiling(32, 64, 32), torch.bfloat16, torch.float32
    scatter = reduce_scatter_kernel.ReduceScatterConfig(t, 3, 16, False)
    one_shot = one_shot_kernel.OneShotConfig(t, 3, 8, False)
    two_shot = two_shot_kernel.TwoShotConfig(t, 3, 16, False)
    tile = 32 * 64
    for dtype, sent in ((fp32, 4 * tile), (bf16, 3 * tile)):
        # 33 x 65: 2 x 2 tiles. Of 3 chunks, or in one: 99 x 65 is 4 x 2.
        assert reduce_scatter_kernel.workspace_bytes(33, 65, dtype, 3, scatter) == 3 * 4 * sent
        assert reduce_scatter_kernel.workspace_bytes(33, 65, dtype, 3, one_shot) == 3 * 8 * sent
        assert two_shot_kernel.workspace_bytes(33, 65, dtype, 3, one_shot) == 3 * 4 * sent
        # Of 4 tiles an owner has two at most; then the finished ones.
        finished = 4 * tile * dtype.itemsize
        assert two_shot_kernel.workspace_bytes(33, 65, dtype, 3, two_shot) == 6 * sent + finished


def parts_of_two_sums() -> None:
    """Several tiles, each of two sums, which three programs make a part of each."""
    ws = workspace(None, 1 << 14, channel="two sums")
    M, N, K = 10, 40, 70
    xs = [matrix(M, K, torch.float32, r) for r in range(ws.world_size)]
    pair = [matrix(K, N, torch.float32, 5 + i) / 8 for i in range(2)]
    config = gather_config(
        "split", M * len(xs), 2 * N, K, torch.float32, len(xs), activation="swiglu"
    )
    made = all_gather_launch.launch_all_gather_matmul(
        xs[ws.rank], pair, ws, [M] * len(xs), activation="swiglu", config=config
    )
    gate, up = (torch.cat(xs) @ w for w in pair)
    torch.testing.assert_close(made.ys[0], functional.silu(gate) * up, rtol=1e-5, atol=1e-5)


def test_parts_of_two_sums(virtual_ranks):
    virtual_ranks(2, parts_of_two_sums)


def many_chunks() -> None:
    """More chunks are asked for than a peer has words: they are made larger."""
    ws = workspace(None, 1 << 15, channel="chunks")
    rank, W, rows = ws.rank, ws.world_size, MAX_PROGRAMS + 40
    whole, w = matrix(rows * W, 4, torch.float32, 1), torch.eye(4)
    config = replace(gather_config("fetched", rows * W, 4, 4, torch.float32, W), chunk_rows=1)
    shard = whole.split(rows)[rank]
    made = all_gather_launch.launch_all_gather_matmul(shard, [w], ws, [rows] * W, config=config)
    assert torch.equal(made.ys[0], whole)
    # Behind the words of a peer are those of the next rank: on rank 1, which is the last one, its
    # own, and nobody announces those.
    words = KERNEL_SLOTS + (W + 1) * MAX_PROGRAMS
    assert rank == 0 or not any(ws.own[words + chunk] for chunk in range(MAX_PROGRAMS))


@pytest.mark.slow
def test_as_many_chunks_as_there_are_words(virtual_ranks):
    virtual_ranks(2, many_chunks)


def weights_without_columns() -> None:
    """The rows are gathered all the same, and every program waits for every peer."""
    ws = workspace(None, 1 << 14, channel="no columns")
    rank, W, K = ws.rank, ws.world_size, 40
    for sizes in ([3, 0, 34], [0, 0, 0]):
        whole, w = matrix(sum(sizes), K, torch.float32, 1), matrix(K, 5 * rank, torch.float32, 2)
        for _ in range(2):
            made = all_gather_launch.launch_all_gather_matmul(
                whole.split(sizes)[rank], [w], ws, sizes, with_own=True
            )
            ws.check("weights_without_columns")
            assert torch.equal(made.matrix, whole)
            torch.testing.assert_close(made.ys[0], whole @ w)
    own = ws.own[KERNEL_SLOTS : KERNEL_SLOTS + W * MAX_PROGRAMS : MAX_PROGRAMS]
    assert all(word == 4 for peer, word in enumerate(own) if peer != rank)  # phase 0


def test_weights_without_columns(virtual_ranks):
    virtual_ranks(3, weights_without_columns)


def calls_in_a_row() -> list[torch.Tensor]:
    """Different kernels in turn on one channel, every rank the slowest once: same bits again."""
    ws = workspace(None, 1 << 18, channel="row")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    x, w = matrix(20, 24, torch.float32, rank), matrix(24, 40, torch.float32, 5 + rank)
    same = matrix(20 * W, 40, torch.float32, 4)  # on all ranks, which add up in the same order
    rounds = []
    for call in range(W + 1):
        if call % W == rank:
            time.sleep(0.05)
        rounds.append(
            [
                all_gather_launch.launch_all_gather_matmul(x, [w], ws, [20] * W).ys[0],
                reduce_scatter_kernel.launch_matmul_reduce_scatter(
                    [x], [w], ws, chunk_sizes(len(x), ws.world_size)
                ),
                two_shot_kernel.launch_matmul_all_reduce(x, w, ws),
                contract_kernel.launch_all_gather_contract(x, same, ws, [20] * W)[1],
            ]
        )
    ws.check("calls_in_a_row")
    for later in rounds[1:]:
        assert all(torch.equal(a, b) for a, b in zip(rounds[0], later, strict=True))
    return rounds[0][1:]


def test_calls_in_a_row_on_one_workspace(ranks):
    results = ranks(3, calls_in_a_row)
    scattered, whole = torch.cat([r[0] for r in results]), [r[1] for r in results]
    assert all(torch.equal(whole[0], other) for other in whole[1:])
    assert all(torch.equal(results[0][2], other[2]) for other in results[1:])
    torch.testing.assert_close(scattered, whole[0])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("which", ["rows", "contraction", "scatter", "reduce"])
@pytest.mark.slow_where(which=["contraction", "reduce"])
def test_an_absent_peer_is_named_and_nothing_hangs(which: str) -> None:
    ws = workspace(None, 1 << 18, channel=f"absent {which}")
    rank, W = ws.rank, ws.world_size
    absent = W - 1
    x, w = matrix(40, 40, torch.float32, rank), matrix(40, 40, torch.float32, rank)

    def launch(ws: Any) -> None:
        if which == "rows":
            all_gather_launch.launch_all_gather_matmul(x, [w], ws, [40] * W)
        elif which == "contraction":
            contract_kernel.launch_all_gather_contract(x, w.repeat(W, 1), ws, [40] * W)
        elif which == "scatter":
            reduce_scatter_kernel.launch_matmul_reduce_scatter([x], [w], ws, [20, 20, 0])
        else:
            two_shot_kernel.launch_matmul_all_reduce(x, w, ws)

    # A first launch takes long, and those who are there must not be taken for absent.
    launch(ws)
    dist.barrier()
    if rank != absent:
        names = ("rank", "world_size", "device", "buffer_ptrs", "signal_ptrs", "half_bytes")
        told = {name: getattr(ws, name) for name in names}
        impatient = SimpleNamespace(timeout_ns=200_000_000, **told)
        launch(impatient)
        with pytest.raises(PeerTimeout, match=f"rank {rank} waited .* for rank {absent}"):
            ws.check(which)
    dist.barrier()


def test_configurations_do_not_depend_on_the_rank_or_on_k():
    for choose in (reduce_scatter_kernel.reduce_scatter_config, two_shot_kernel.all_reduce_config):
        assert "K" not in inspect.signature(choose).parameters
    for chip in (*KNOWN, Chip("sm_120", 170, 99 << 10, descriptors=True)):
        for M, N in itertools.product((1, 16, 100, 8192), (1, 64, 8192)):
            for dtype in (torch.bfloat16, torch.float32):
                config = reduce_scatter_kernel.reduce_scatter_config(M, N, dtype, 8, chip)
                assert 1 <= config.programs <= min(chip.cores, MAX_PROGRAMS)
                assert config.tiling.block_m % config.reduce_m == 0
                t = config.tiling
                stage_bytes = (t.block_m + t.block_n) * t.block_k * dtype.itemsize
                assert stage_bytes * (t.num_stages - 1) <= chip.shared_bytes
                for K in (64, 8192):
                    gather = all_gather_launch.all_gather_config(M, N, K, dtype, 8, chip)
                    assert gather.copy_programs < gather.programs <= min(chip.cores, MAX_PROGRAMS)
                    assert gather.split == 1 or gather.direct


@pytest.mark.ranks(3)
def test_sizes_of_zero() -> None:
    """Sizes of zero: every rank must still signal, or the next call hangs."""
    ws = workspace(None, 1 << 16, channel="zero")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    for M, N, K in ((0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0), (1, 5, 3)):
        sizes = chunk_sizes(M, W)
        x, w = matrix(M, K, torch.float32, rank), matrix(K, N, torch.float32, rank)
        want = sum(
            matrix(M, K, torch.float32, r) @ matrix(K, N, torch.float32, r) for r in range(W)
        )
        y = two_shot_kernel.launch_matmul_all_reduce(x, w, ws)
        torch.testing.assert_close(y, want)
        y = reduce_scatter_kernel.launch_matmul_reduce_scatter([x], [w], ws, sizes)
        torch.testing.assert_close(y, want.split(sizes)[rank])
        full = matrix(M, K, torch.float32, 9)
        shard = full.split(sizes)[rank]
        made = all_gather_launch.launch_all_gather_matmul(shard, [w], ws, sizes, with_own=True)
        torch.testing.assert_close(made.matrix, full)
        torch.testing.assert_close(made.ys[0], full @ w)
        made = all_gather_launch.launch_all_gather_matmul(shard, [w], ws, sizes)
        torch.testing.assert_close(made.ys[0], full @ w)
        dy = matrix(M, N, torch.float32, rank)
        _, y = contract_kernel.launch_all_gather_contract(shard, dy, ws, sizes)
        torch.testing.assert_close(y, full.T @ dy)
    ws.check("nothing_to_do")


@pytest.mark.ranks(2)
def test_example_of_the_contraction() -> None:
    """The numbers of the kernel's docstring: y = x_0^T @ w[0:3] + x_1^T @ w[3:5]."""
    ws = workspace(None, 1 << 12, channel="example")
    shards = torch.arange(1.0, 11.0).view(5, 2).split([3, 2])
    w = torch.eye(5)
    gathered, y = contract_kernel.launch_all_gather_contract(
        shards[ws.rank], w, ws, [3, 2], with_own=True
    )
    assert torch.equal(gathered, torch.cat(shards))
    assert torch.equal(y, torch.cat(shards).T)


@pytest.mark.ranks(2)
def test_a_workspace_that_is_too_small_is_refused_before_any_signal() -> None:
    ws = workspace(None, 1, channel="small")
    x, w = torch.zeros(1 << 9, 1 << 9), torch.zeros(1 << 9, 1 << 9)
    with pytest.raises(ValueError, match="must hold 2097152 bytes"):
        two_shot_kernel.launch_matmul_all_reduce(x, w, ws)
    with pytest.raises(ValueError, match="must hold"):
        reduce_scatter_kernel.launch_matmul_reduce_scatter(
            [x], [w], ws, chunk_sizes(len(x), ws.world_size)
        )
    with pytest.raises(ValueError, match="must hold"):
        all_gather_launch.launch_all_gather_matmul(x, [w], ws, [1 << 9] * 2)
