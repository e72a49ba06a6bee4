"""Programs of our kernels and collectives for virtual ranks: several calls in a row, checked.

Each takes the rank and the modules to use, so that copies with faults can be put in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from expert_tables import Routed
from mutants import mutant

import weft
from weft import collectives
from weft.collectives import movement, resolve, workspace
from weft.collectives.kernels import collective_launch, multimem, pull
from weft.collectives.kernels.pull_boxes import Box, table_of
from weft.collectives.ranks.chunks import chunk_sizes, offsets
from weft.kernels import to_zigzag, zigzag_sizes
from weft.kernels.attention.cache import Cache
from weft.kernels.attention.decode import flash_decode_reference
from weft.kernels.attention.ring import Saved, attention_reference
from weft.kernels.device import summed_tiles
from weft.kernels.device.partial_sums import wire_of
from weft.kernels.engine.chips import INTERPRETER, Tiling
from weft.kernels.engine.fp8 import magnitudes, quantized
from weft.kernels.expert_kernels import combine_launch, dispatch_launch, few_tokens_launch
from weft.kernels.flash import decode_kernel, ring_grad_kernel, ring_kernel
from weft.kernels.flash.geometry import Geometry, Visibility
from weft.kernels.heads import heads_grad_kernel, heads_kernel
from weft.kernels.matmul import (
    all_gather_launch,
    contract_kernel,
    one_shot_kernel,
    reduce_scatter_kernel,
    two_shot_kernel,
)
from weft.kernels.norm import rms_norm_launch

CALLS = 3  # the third uses the first one's half again


@dataclass(frozen=True)
class Modules:
    gather: Any = all_gather_launch
    contract: Any = contract_kernel
    one_shot: Any = one_shot_kernel
    scatter: Any = reduce_scatter_kernel
    reduce: Any = two_shot_kernel
    movement: Any = movement
    collective: Any = collective_launch
    pull: Any = pull
    switched: Any = multimem
    ring: Any = ring_kernel
    ring_backward: Any = ring_grad_kernel
    heads: Any = heads_kernel
    heads_backward: Any = heads_grad_kernel
    decode: Any = decode_kernel
    norm: Any = rms_norm_launch
    dispatching: Any = dispatch_launch
    combining: Any = combine_launch
    few: Any = few_tokens_launch


OURS = Modules()


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def gather_rows(rank: int, ours: Modules = OURS) -> None:
    ws = workspace(None, 1 << 14, channel="rows")
    W, K, N = ws.world_size, 40, 5  # by two parts of K
    sizes = [34, *(1 + 5 * r % 8 for r in range(1, W))]  # two programs of rank 0 publish
    whole, w = torch.cat([matrix(m, K, r) for r, m in enumerate(sizes)]), matrix(K, N, 99)
    shard = whole.split(sizes)[rank].clone()
    config = ours.gather.all_gather_config(
        sum(sizes), N, K, torch.float32, W, INTERPRETER, keep=True
    )
    config = replace(config, copy_programs=2, programs=4)
    for call in range(CALLS):
        made = ours.gather.launch_all_gather_matmul(
            shard * (call + 1), [w], ws, sizes, with_own=True, config=config
        )
        torch.testing.assert_close(made.matrix, whole * (call + 1))
        torch.testing.assert_close(made.ys[0], whole @ w * (call + 1))


def gather_direct(rank: int, ours: Modules = OURS) -> None:
    """Rows read where their owners show them; two programs a tile, and two sums."""
    ws = workspace(None, 1 << 12, channel="direct")
    W, K, N = ws.world_size, 40, 5
    sizes = [3 + r for r in range(W)]
    whole = torch.cat([matrix(m, K, r) for r, m in enumerate(sizes)])
    gate, up = matrix(K, N, 98), matrix(K, N, 99)
    shard = whole.split(sizes)[rank].clone()
    config = ours.gather.all_gather_config(
        sum(sizes), 2 * N, K, torch.float32, W, INTERPRETER, activation="swiglu"
    )
    config = replace(config, direct=True, copy_programs=0, split=2)
    config = replace(config, programs=2 * -(-sum(sizes) // config.tiling.block_m))
    for call in range(CALLS):
        made = ours.gather.launch_all_gather_matmul(
            shard * (call + 1), [gate, up], ws, sizes, activation="swiglu", config=config
        )
        rows = whole * (call + 1)
        want = torch.nn.functional.silu(rows @ gate) * (rows @ up)
        torch.testing.assert_close(made.ys[0], want, rtol=1e-4, atol=1e-4)


def gather_by_copy_engines(rank: int, ours: Modules = OURS) -> None:
    ws = workspace(None, 1 << 13, channel="copy engines")
    W, K, N = ws.world_size, 8, 20
    sizes = [46 + 3 * r for r in range(W)]
    whole, w = torch.cat([matrix(m, K, r) for r, m in enumerate(sizes)]), matrix(K, N, 99)
    shard = whole.split(sizes)[rank].clone()
    config = ours.gather.all_gather_config(
        sum(sizes), N, K, torch.float32, W, INTERPRETER, keep=True
    )
    config = ours.gather.by_copy_engines(config, sum(sizes), K, torch.float32, W, INTERPRETER)
    tiles = -(-sum(sizes) // config.tiling.block_m)
    assert config.halves and tiles % config.programs == 1  # one tile in halves
    for call in range(CALLS):
        made = ours.gather.launch_all_gather_matmul(
            shard * (call + 1), [w], ws, sizes, config=config
        )
        torch.testing.assert_close(made.ys[0], whole @ w * (call + 1))


def gather_contraction(rank: int, ours: Modules = OURS) -> None:
    ws = workspace(None, 1 << 13, channel="contraction")
    W, M, N = ws.world_size, 7, 5
    sizes = [3 + r % 3 for r in range(W)]
    whole, w = torch.cat([matrix(k, M, r) for r, k in enumerate(sizes)]), matrix(sum(sizes), N, 99)
    shard = whole.split(sizes)[rank].clone()
    for call in range(CALLS):
        _, y = ours.contract.launch_all_gather_contract(shard * (call + 1), w, ws, sizes)
        torch.testing.assert_close(y, whole.T @ w * (call + 1))


def in_turn(
    call: int, x: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Operands in fp32 and bf16 by turns, whose partial sums travel differently; and tolerances."""
    if call % 2:
        return x.bfloat16(), w.bfloat16(), {"rtol": 0.02, "atol": 0.2}
    return x, w, {"rtol": 1e-4, "atol": 1e-4}


def reduce_scatter(rank: int, ours: Modules = OURS) -> None:
    W = resolve(None).world_size
    K, N, sizes = 4, 33, [17 if r % 2 else 33 for r in range(2)] + [1 + r % 3 for r in range(2, W)]
    config = ours.scatter.reduce_scatter_config(max(sizes), N, torch.float32, W, INTERPRETER)
    nbytes = ours.scatter.workspace_bytes(max(sizes), N, torch.float32, W, config)
    ws = workspace(None, nbytes, channel="scatter")
    xs, w = [matrix(sum(sizes), K, r) for r in range(W)], matrix(K, N, 99)
    want = (sum(xs) @ w).split(sizes)[rank]
    for call in range(CALLS):
        x, weight, near = in_turn(call, xs[rank] * (call + 1), w)
        y = ours.scatter.launch_matmul_reduce_scatter([x], [weight], ws, sizes)
        torch.testing.assert_close(y.float(), want * (call + 1), **near)


def all_reduce(rank: int, ours: Modules, config: Any, M: int, N: int, K: int) -> None:
    W = resolve(None).world_size
    nbytes = ours.reduce.workspace_bytes(M, N, torch.float32, W, config)
    ws = workspace(None, nbytes, channel="reduce")
    xs, w = [matrix(M, K, r) for r in range(W)], matrix(K, N, 99)
    want, wire = sum(xs) @ w, torch.float32 if getattr(config, "by_switch", False) else None
    for call in range(CALLS):
        x, weight, near = in_turn(call, xs[rank] * (call + 1), w)
        y = ours.reduce.launch_matmul_all_reduce(x, weight, ws, wire_dtype=wire, config=config)
        torch.testing.assert_close(y.float(), want * (call + 1), **near)


def one_shot(rank: int, ours: Modules = OURS) -> None:
    config = ours.one_shot.one_shot_config(35, 33, torch.float32, INTERPRETER)
    all_reduce(rank, ours, config, 35, 33, 4)


def one_shot_split(rank: int, ours: Modules = OURS) -> None:
    config = ours.one_shot.one_shot_config(5, 33, torch.float32, INTERPRETER)
    all_reduce(rank, ours, replace(config, split=2, programs=4), 5, 33, 40)


def two_shot(rank: int, ours: Modules = OURS) -> None:
    config = ours.reduce.two_shot_config(35, 33, torch.float32, INTERPRETER)
    all_reduce(rank, ours, config, 35, 33, 4)


def scatter_in_one_loop(rank: int, ours: Modules = OURS) -> None:
    """All tiles of a program in one loop, as compiled kernels read them by descriptor."""
    W = resolve(None).world_size
    K, N, sizes = 24, 40, [17 + 3 * r for r in range(W)]  # of two tiles each
    config = ours.scatter.ReduceScatterConfig(
        Tiling(16, 16, 16, group_m=2), 4, 16, True, senders=2, flattened=True
    )
    nbytes = ours.scatter.workspace_bytes(max(sizes), N, torch.bfloat16, W, config)
    ws = workspace(None, nbytes, channel="scatter in one loop")
    xs, w = [matrix(sum(sizes), K, r).bfloat16() for r in range(W)], matrix(K, N, 99).bfloat16()
    want = sum(x.double() @ w.double() for x in xs).split(sizes)[rank]
    for call in range(CALLS):
        y = ours.scatter.launch_matmul_reduce_scatter(
            [xs[rank] * 2**call], [w], ws, sizes, config=config
        )
        torch.testing.assert_close(y.double(), want * 2**call, rtol=0.01, atol=0.02)


def two_shot_in_one_loop(rank: int, ours: Modules = OURS) -> None:
    """As `scatter_in_one_loop`, of tiles that are numbered through all owners."""
    config = ours.reduce.two_shot_config(35, 40, torch.float32, INTERPRETER)
    config = replace(config, descriptors=True, flattened=True)
    all_reduce(rank, ours, config, 35, 40, 8)


def two_shot_by_the_switch(rank: int, ours: Modules = OURS) -> None:
    """Every rank's memory stands for the switch."""
    config = ours.reduce.two_shot_config(35, 33, torch.float32, INTERPRETER)
    all_reduce(rank, ours, replace(config, by_switch=True), 35, 33, 4)


def straddling_scatter(rank: int, ours: Modules = OURS) -> None:
    """Tiles with rows of several owners, two programs each."""
    W = resolve(None).world_size
    K, N, sizes = 40, 5, [4 if r % 2 else 9 for r in range(W)]
    config = ours.one_shot.one_shot_config(sum(sizes), N, torch.float32, INTERPRETER)
    count = summed_tiles.tile_count(sum(sizes), N, config.tiling)
    config = replace(config, split=2, programs=2 * count)
    nbytes = ours.one_shot.workspace_bytes(9 * W, N, wire_of(torch.float32), W, config)
    ws = workspace(None, nbytes, channel="straddling")
    xs, w = [matrix(sum(sizes), K, r) for r in range(W)], matrix(K, N, 99)
    residual = matrix(sizes[rank], N, 50)
    want = (sum(xs) @ w).split(sizes)[rank]
    for call in range(CALLS):
        y = ours.scatter.launch_matmul_reduce_scatter(
            [xs[rank] * (call + 1)], [w], ws, sizes, residual=residual, config=config
        )
        torch.testing.assert_close(y, want * (call + 1) + residual, rtol=1e-4, atol=1e-4)


def exchanged(rank: int, ours: Modules = OURS) -> None:
    """All-gather and all-to-all by kernels, uneven, three programs."""
    W, op = resolve(None).world_size, ours.collective
    config = op.CollectiveConfig(block_bytes=16, programs=2, num_warps=4)
    ws = workspace(None, op.workspace_bytes(256, W, config), channel="exchanged")
    sizes = [9 + 2 * r for r in range(W)]
    table = [[1 + (r + p) % 3 * 4 for p in range(W)] for r in range(W)]
    for call in range(CALLS):
        whole = torch.arange(float(sum(sizes))) + call
        out = torch.full((sum(sizes),), -1.0)
        op.launch_all_gather(whole.split(sizes)[rank].clone(), out, ws, sizes, config)
        torch.testing.assert_close(out, whole)
        xs = [torch.arange(float(sum(table[r]))) + 100 * r + call for r in range(W)]
        receives = [table[r][rank] for r in range(W)]
        out = torch.full((sum(receives),), -1.0)
        starts = offsets(table[rank])
        op.launch_exchange(xs[rank], out, ws, starts, table[rank], receives, 9, config)
        torch.testing.assert_close(out, torch.cat([xs[r].split(table[r])[rank] for r in range(W)]))


def reduced(rank: int, ours: Modules, two_shot: bool, by_words: bool = False) -> None:
    W, op, count = resolve(None).world_size, ours.collective, 37
    config = op.CollectiveConfig(16, 2, 4, two_shot, by_words=by_words)
    ws = workspace(None, op.workspace_bytes(4 * count, W, config), channel="reduced")
    whole = torch.arange(float(count))
    for call in range(CALLS):
        x = whole * (rank + 1) + call
        total = whole * (W * (W + 1) // 2) + W * call
        op.launch_reduce(x, x, ws, None, "sum", config)
        torch.testing.assert_close(x, total)
        if not two_shot and not by_words:
            sizes = [count - 3 * (W - 1), *[3] * (W - 1)]
            out = torch.full((sizes[rank],), -1.0)
            op.launch_reduce(whole + rank, out, ws, sizes, "max", config)
            torch.testing.assert_close(out, (whole + W - 1).split(sizes)[rank])


def reduced_in_one_shot(rank: int, ours: Modules = OURS) -> None:
    reduced(rank, ours, False)


def reduced_in_two_shots(rank: int, ours: Modules = OURS) -> None:
    reduced(rank, ours, True)


def reduced_by_words_in_one_shot(rank: int, ours: Modules = OURS) -> None:
    reduced(rank, ours, False, by_words=True)


def reduced_by_words(rank: int, ours: Modules = OURS) -> None:
    reduced(rank, ours, True, by_words=True)


def switched(rank: int, ours: Modules = OURS) -> None:
    """By three programs, uneven; every rank's memory stands for the switch."""
    W, op = resolve(None).world_size, ours.switched
    sizes = [21 + 3 * r for r in range(W)]
    widest, count = 4 * max(sizes), sum(sizes)
    ws = workspace(None, op.workspace_bytes("all_reduce", widest, W), channel="switched")
    whole = torch.arange(float(count))
    for call in range(CALLS):
        total = whole * (W * (W + 1) // 2) + W * call
        out = torch.full((count,), -1.0)
        shard = (whole + call).split(sizes)[rank].clone()
        op.launch_switched("all_gather", shard, out, ws, sizes, 32)
        torch.testing.assert_close(out, whole + call)
        x = whole * (rank + 1) + call
        out = torch.full((sizes[rank],), -1.0)
        op.launch_switched("reduce_scatter", x, out, ws, sizes, 32)
        torch.testing.assert_close(out, total.split(sizes)[rank])
        op.launch_switched("all_reduce", x, x, ws, op.vector_shares(count, 4, W), 32)
        torch.testing.assert_close(x, total)


def pulled(rank: int, ours: Modules = OURS) -> None:
    """Rows to columns, then columns of a sum: tables of boxes."""
    W, op = resolve(None).world_size, ours.pull
    ws = workspace(None, 1 << 12, channel="pulled")
    rows, width = [1 + r for r in range(W)], 3 * W
    first, wide = 3 * rank, (width, 1)
    of_one = [
        Box((r,), (rows[r], 3), first, wide, 3 * start, (3, 1))
        for r, start in enumerate(offsets(rows))
    ]
    of_all = [Box(tuple(range(W)), (2, 3), first, wide, 0, (3, 1))]
    device = torch.device("cpu")
    copies = table_of(of_one, rank, torch.float32, device, align=4)
    sums = table_of(of_all, rank, torch.float32, device, op="sum")
    for call in range(CALLS):
        whole = matrix(sum(rows), width, call)
        out = torch.full((sum(rows), 3), -1.0)
        op.launch_pull(whole.split(rows)[rank].clone(), out, ws, copies, publish=True)
        torch.testing.assert_close(out, whole[:, first : first + 3])
        terms = [matrix(2, width, 10 * call + r) for r in range(W)]
        out = torch.full((2, 3), -1.0)
        op.launch_pull(terms[rank], out, ws, sums, publish=True)
        torch.testing.assert_close(out, sum(terms)[:, first : first + 3])


def causal(
    rank: int, W: int, heads: int = 1, kv_heads: int = 1
) -> tuple[Geometry, list[torch.Tensor], list[torch.Tensor]]:
    """A causal attention over uneven shards: its geometry, and q, k, v whole and of this rank."""
    sizes = (17, *(1 + r % 3 for r in range(1, W)))
    geometry = Geometry(sizes, sizes, "contiguous", Visibility(sum(sizes), after=0))
    whole = [
        matrix(count * sum(sizes), 4, seed).view(1, count, -1, 4)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    ]
    return geometry, whole, [x.split(sizes, 2)[rank].clone() for x in whole]


def ring(rank: int, ours: Modules = OURS) -> None:
    W = resolve(None).world_size
    geometry, whole, (q, k, v) = causal(rank, W)
    ws = ours.ring.workspace_for(k, resolve(None), geometry)
    forward(rank, geometry, whole, (q, k, v), ws, ours.ring.launch_ring_attention)


def heads(rank: int, ours: Modules = OURS) -> None:
    """Every rank has a head, the last one none."""
    W = resolve(None).world_size
    geometry, whole, (q, k, v) = causal(rank, W, W - 1)
    ws = ours.heads.workspace_for(q, k, resolve(None), geometry)
    forward(rank, geometry, whole, (q, k, v), ws, ours.heads.launch_head_attention)


def forward(
    rank: int,
    geometry: Geometry,
    whole: list[torch.Tensor],
    shards: tuple[torch.Tensor, ...],
    ws: Any,
    launch: Callable[..., Any],
    calls: int = CALLS,
) -> None:
    want, want_lse = attention_reference(*whole, causal=True)
    q, k, v = shards
    for call in range(calls):
        out, lse = launch(q, k, v * (call + 1), ws, geometry, 0.5)
        mine = want.split(geometry.q_sizes, 2)[rank] * (call + 1)
        torch.testing.assert_close(out, mine, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse, want_lse.split(geometry.q_sizes, 2)[rank])


def ring_backward(rank: int, ours: Modules = OURS) -> None:
    W = resolve(None).world_size
    geometry, whole, (q, k, v) = causal(rank, W)
    ws = ours.ring_backward.workspace_for(k, resolve(None), geometry)
    launch = ours.ring_backward.launch_ring_attention_backward
    backward(rank, geometry, whole, (q, k, v), ws, launch)


def heads_backward(rank: int, ours: Modules = OURS) -> None:
    """One head of keys for all: as many slots as ranks that have heads."""
    W = resolve(None).world_size
    geometry, whole, (q, k, v) = causal(rank, W, W)
    ws = ours.heads_backward.workspace_for(q, k, resolve(None), geometry)
    launch = ours.heads_backward.launch_head_attention_backward
    backward(rank, geometry, whole, (q, k, v), ws, launch)


def heads_copied_by_several(rank: int) -> None:
    """Forward and backward with heads of keys for every rank, and several copy programs, as GPUs
    have: here there is one of them otherwise."""
    W = resolve(None).world_size
    geometry, whole, (q, k, v) = causal(rank, W, W, W)
    sizes = W, W, 17, 4, q.dtype, W, INTERPRETER
    several = {"copy_programs": 2, "programs": 3, "copy_m": 4}
    for op, config_of, run, launch in (
        (heads_kernel, heads_kernel.head_config, forward, heads_kernel.launch_head_attention),
        (
            heads_grad_kernel,
            heads_grad_kernel.head_grad_config,
            backward,
            heads_grad_kernel.launch_head_attention_backward,
        ),
    ):
        ws = op.workspace_for(q, k, resolve(None), geometry)
        config = replace(config_of(*sizes), **several)
        run(rank, geometry, whole, (q, k, v), ws, partial(launch, config=config), 1)


def backward(
    rank: int,
    geometry: Geometry,
    whole: list[torch.Tensor],
    shards: tuple[torch.Tensor, ...],
    ws: Any,
    launch: Callable[..., Any],
    calls: int = CALLS,
) -> None:
    leaves = [x.clone().requires_grad_() for x in whole]
    out, lse = attention_reference(*leaves, causal=True)
    grad_out = matrix(out.shape[1] * geometry.sees.keys, 4, 9).view(out.shape)
    out.backward(grad_out)

    def mine(x: torch.Tensor) -> torch.Tensor:
        return x.detach().split(geometry.q_sizes, 2)[rank].clone()

    q, k, v = shards
    for call in range(calls):
        saved = Saved(q, k, v, mine(out), mine(lse), mine(grad_out) * (call + 1), None)
        grads = launch(saved, ws, geometry, 0.5)
        for grad, leaf in zip(grads, leaves, strict=True):
            assert leaf.grad is not None
            wanted = mine(leaf.grad) * (call + 1)
            torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4)


def decoding(rank: int, ours: Modules = OURS) -> None:
    """Few items, so that the keys of each are split among programs; then more, that are not."""
    W, D = resolve(None).world_size, 4
    for items, calls, window in ((1, CALLS, None), (4, 1, None), (1, 1, 9)):
        q = matrix(items, D, 0).view(items, 1, 1, D)
        k, v = (matrix(items * 16 * W, D, seed).view(items, 1, -1, D) for seed in (1, 2))
        lengths = torch.full((items,), 16 * W - 1)
        want, want_lse = flash_decode_reference(q, k, v, lengths, 0.5, window)
        mine = [x.unflatten(2, (4, W, 4))[:, :, :, rank].flatten(2, 3) for x in (k, v)]
        cache = Cache(*(x.contiguous() for x in mine), None, 4, rank, W)
        ws = workspace(None, ours.decode.room_for(q, cache, W), channel=ours.decode.CHANNEL)
        for _ in range(calls):
            out, lse = ours.decode.launch_flash_decode(q, cache, lengths, 0.5, ws, window=window)
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)


def of_norms(
    ours: Modules, one_shot: bool, channel: str, by_switch: bool = False, flagged: bool = False
) -> tuple[Any, ...]:
    """Terms, weight, residual, share, memory and launch of norms: two parts, two teams."""
    (T, H), W = (7, 20), resolve(None).world_size
    share = -(-T // W)
    xs, weight, kept = [matrix(T, H, r) for r in range(W)], matrix(1, H, 50)[0], matrix(T, H, 60)
    config = ours.norm.RMSNormConfig(2, 16, one_shot, by_switch, flagged)
    nbytes = ours.norm.workspace_bytes(T, share, H, torch.float32, W, config)
    ws = workspace(None, nbytes, channel=channel)
    return xs, weight, kept, share, ws, config


def normed(rank: int, ours: Modules, one_shot: bool, flagged: bool = False) -> None:
    """Uneven rows in two parts, two teams; every row has a residual."""
    xs, weight, kept, share, ws, config = of_norms(ours, one_shot, "norm", flagged=flagged)
    W, H = len(xs), len(weight)
    for call in range(CALLS):
        y, h = ours.norm.launch_sum_rms_norm(
            xs[rank] + call, ws, share, weight=weight,
            residual=kept[rank * share :][:share].clone(), eps=1e-3, config=config,
        )  # fmt: skip
        total = sum(xs) + W * call + kept
        torch.testing.assert_close(h, total[rank * share :][:share])
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(total, (H,), weight, 1e-3))


def normed_whole(
    rank: int, ours: Modules, one_shot: bool, by_switch: bool = False, flagged: bool = False
) -> None:
    """As `normed`, where every rank has all of the residual and makes all of h; fp8 at last."""
    xs, weight, kept, share, ws, config = of_norms(ours, one_shot, "whole norm", by_switch, flagged)
    W, H = len(xs), len(weight)
    for call in range(CALLS):
        y, h, *scales = ours.norm.launch_sum_rms_norm(
            xs[rank] + call, ws, share, weight=weight, residual=kept, eps=1e-3, whole=True,
            quantizes=call == CALLS - 1, config=config,
        )  # fmt: skip
        total = sum(xs) + W * call + kept
        torch.testing.assert_close(h, total)
        wanted = torch.nn.functional.rms_norm(total, (H,), weight, 1e-3)
        for scale in scales:
            y = y.float() * scale
        near = 0.07 if scales else 1e-5
        torch.testing.assert_close(y, wanted, rtol=near, atol=near / 10)


def normed_whole_in_one_shot(rank: int, ours: Modules = OURS) -> None:
    normed_whole(rank, ours, True)


def normed_whole_in_two_shots(rank: int, ours: Modules = OURS) -> None:
    normed_whole(rank, ours, False)


def normed_whole_by_the_switch(rank: int, ours: Modules = OURS) -> None:
    """Every rank's memory stands for the switch."""
    normed_whole(rank, ours, False, by_switch=True)


def normed_whole_by_words_in_one_shot(rank: int, ours: Modules = OURS) -> None:
    normed_whole(rank, ours, True, flagged=True)


def normed_whole_by_words(rank: int, ours: Modules = OURS) -> None:
    normed_whole(rank, ours, False, flagged=True)


def normed_by_words(rank: int, ours: Modules = OURS) -> None:
    normed(rank, ours, False, flagged=True)


def decode_step(rank: int, ours: Modules = OURS) -> None:
    """Norms, sums by words and matmuls in turn: ranks are in calls of two ops at the same time."""
    xs, weight, kept, share, ws, config = of_norms(ours, True, "step's norm", flagged=True)
    (W, (T, H)), w = (len(xs), kept.shape), matrix(5, 20, 99)
    for_sums = ours.collective.CollectiveConfig(32, 2, 4, False, by_words=True)
    nbytes = ours.collective.workspace_bytes(4 * T * H, W, for_sums)
    sums = workspace(None, nbytes, channel="step's sums")
    tiles = ours.one_shot.one_shot_config(T, H, torch.float32, INTERPRETER)
    nbytes = ours.one_shot.workspace_bytes(T, H, wire_of(torch.float32), W, tiles)
    products = workspace(None, nbytes, channel="step's products")
    for call in range(CALLS):
        _, h = ours.norm.launch_sum_rms_norm(
            xs[rank] + call, ws, share, weight=weight, residual=kept, eps=1e-3, whole=True,
            config=config,
        )  # fmt: skip
        total = sum(xs) + W * call + kept
        torch.testing.assert_close(h, total)
        ours.collective.launch_reduce(h, h, sums, None, "avg", for_sums)
        torch.testing.assert_close(h, total)
        y = ours.reduce.launch_matmul_all_reduce(h[:, :5] * (rank + 1), w, products, config=tiles)
        torch.testing.assert_close(y, total[:, :5] @ w * (W * (W + 1) / 2), rtol=1e-4, atol=1e-3)


def normed_in_one_shot(rank: int, ours: Modules = OURS) -> None:
    normed(rank, ours, True)


def normed_in_two_shots(rank: int, ours: Modules = OURS) -> None:
    normed(rank, ours, False)


def routed(W: int, tp: int) -> Routed:
    """Two experts a rank, three tokens or more for two of them each, one assignment of padding."""
    E = 2 * (W // tp)
    ids = [torch.arange(6 + 2 * r).add(r).mul(5).remainder(E).view(-1, 2) for r in range(W)]
    ids[0][0, 1] = -1
    return Routed([each.int() for each in ids], E, tp)


def narrowed(x: torch.Tensor) -> torch.Tensor:
    """x as it arrives in fp8."""
    rows, scales = quantized(x, magnitudes(x))
    return rows.float() * scales


def dispatched(
    rank: int, ours: Modules = OURS, direct: bool = False, quantize: bool = False, tp: int = 1
) -> None:
    """Rows and numbers of all ranks, in chunks of two by two copy programs."""
    W, K, N = resolve(None).world_size, 20, 5
    told = routed(W, tp)
    ws = workspace(None, 1 << 12, channel="dispatched")
    table, own = told.table(rank), told.own(rank)
    xs = [matrix(t, K, r) for r, t in enumerate(told.tokens)]
    w = torch.stack([matrix(K, N, 50 + e) for e in own])
    config = ours.dispatching.dispatch_config(16, N, torch.float32, W, INTERPRETER)
    config = replace(config, copy_programs=2, programs=4, chunk_rows=2, copy_m=2)
    if direct:
        config = replace(config, copy_programs=0)
    ranks, slots = table.ranks.tolist(), table.slots.tolist()
    whole = [narrowed(x) for x in xs] if quantize else xs
    rows = torch.stack([whole[r][s // 2] for r, s in zip(ranks, slots, strict=True)])
    counts = table.ends.diff(prepend=table.ends.new_zeros(1))
    factors = w.repeat_interleave(counts, 0)
    for call in range(CALLS):
        numbers = [
            torch.arange(2.0 * t).view(t, 2) + 100 * r + call for r, t in enumerate(told.tokens)
        ]
        made = ours.dispatching.launch_dispatch(
            xs[rank] * 2**call,
            [w],
            ws,
            table,
            told.tokens,
            numbers=None if quantize else numbers[rank],
            quantize=quantize,
            config=config,
        )
        if not direct:
            torch.testing.assert_close(made.rows, rows * 2**call)
        if made.numbers is not None:
            want = [numbers[r].flatten()[s] for r, s in zip(ranks, slots, strict=True)]
            torch.testing.assert_close(made.numbers, torch.stack(want))
        torch.testing.assert_close(
            made.ys[0], torch.bmm(rows.unsqueeze(1), factors).squeeze(1) * 2**call
        )


def dispatched_in_fp8(rank: int, ours: Modules = OURS) -> None:
    dispatched(rank, ours, quantize=True)


def few_dispatched(rank: int, ours: Modules = OURS, quantize: bool = False, tp: int = 1) -> None:
    """Two senders, two clerks, two programs that multiply; the tables that are made, too."""
    W, K, N = resolve(None).world_size, 20, 5
    told = routed(W, tp)
    ws = workspace(None, 1 << 14, channel="few")
    table, own = told.table(rank), told.own(rank)
    xs = [matrix(t, K, r) for r, t in enumerate(told.tokens)]
    w = torch.stack([matrix(K, N, 50 + e) for e in own])
    config = ours.few.few_config(4, N, torch.float32, 3, 2, W, INTERPRETER)
    config = replace(config, programs=6, roles=replace(config.roles, senders=2, clerks=2))
    pairs = [*zip(table.ranks.tolist(), table.slots.tolist(), strict=True)]
    counts = table.ends.diff(prepend=table.ends.new_zeros(1))
    of = torch.arange(2).repeat_interleave(counts)
    whole = [narrowed(x) for x in xs] if quantize else xs
    want = torch.stack([whole[r][s // 2] @ w[e] for (r, s), e in zip(pairs, of, strict=True)])
    ids = torch.cat(told.ids).flatten()
    for call in range(CALLS):
        made = ours.few.launch_few_tokens(
            xs[rank] * 2**call,
            told.ids[rank],
            [w],
            ws,
            told.tokens,
            [2] * W,
            tensor_parallel_size=tp,
            quantize=quantize,
            config=config,
        )
        torch.testing.assert_close(made.ys[0][: len(want)], want * 2**call)
        if made.ys[0].isnan().any():  # a wait has failed, and an error tells of the integers
            continue
        for got, column in zip(made.table, table, strict=True):
            assert torch.equal(got[: len(column)], column)
        assert torch.equal(made.load, ids[ids >= 0].bincount(minlength=told.E))
        assert torch.equal(made.counts.sum(0), counts)


def few_dispatched_in_fp8(rank: int, ours: Modules = OURS) -> None:
    few_dispatched(rank, ours, quantize=True)


def combined(rank: int, ours: Modules = OURS, few: bool = False, tp: int = 1) -> None:
    """By the two launches of many tokens, or of few by one, in which two programs add up."""
    W, N, H = resolve(None).world_size, 4, 40
    told = routed(W, tp)
    ws = workspace(None, 1 << 13, channel="combined")
    tables = [told.table(r) for r in range(W)]
    hs = [matrix(len(table.ranks), N, r) for r, table in enumerate(tables)]
    w = torch.stack([matrix(N, H, 50 + e) for e in range(2 * W)])
    gates = matrix(told.tokens[rank], 2, 9)
    config = ours.combining.combine_config(4, H, torch.float32, INTERPRETER)
    if few:
        config = replace(config, programs=4, weighers=2)
    want = torch.zeros(told.tokens[rank], H)
    for r, table in enumerate(tables):
        of = torch.bucketize(torch.arange(len(hs[r])), table.ends, right=True)
        for p in (table.ranks == rank).nonzero().flatten().tolist():
            slot = int(table.slots[p])
            want[slot // 2] += gates.flatten()[slot] * (hs[r][p] @ w[2 * r + of[p]])
    for call in range(CALLS):
        y = ours.combining.launch_combine(
            [hs[rank] * (call + 1)],
            [w[2 * rank : 2 * rank + 2]],
            ws,
            tables[rank],
            told.tokens,
            told.ids[rank],
            told.E,
            topk_weights=gates,
            tensor_parallel_size=tp,
            config=config,
        )
        torch.testing.assert_close(y, want * (call + 1), rtol=1e-4, atol=1e-4)


def few_combined(rank: int, ours: Modules = OURS) -> None:
    combined(rank, ours, few=True)


def _parts() -> int:
    """On how many ranks an expert is, of sets of two if there are."""
    W = resolve(None).world_size
    return 2 if W % 2 == 0 else W


def cut_experts(rank: int, ours: Modules = OURS) -> None:
    dispatched(rank, ours, tp=_parts())
    combined(rank, ours, tp=_parts())


def few_of_cut_experts(rank: int, ours: Modules = OURS) -> None:
    few_dispatched(rank, ours, tp=_parts())
    combined(rank, ours, few=True, tp=_parts())


KERNELS: dict[str, Callable[..., None]] = {
    "gather of rows": gather_rows,
    "gather of the contraction": gather_contraction,
    "reduce-scatter": reduce_scatter,
    "one-shot all-reduce": one_shot,
    "two-shot all-reduce": two_shot,
    "all-reduce by the switch": two_shot_by_the_switch,
    "reduce-scatter in one loop": scatter_in_one_loop,
    "two-shot all-reduce in one loop": two_shot_in_one_loop,
    "gather of rows, direct": gather_direct,
    "gather of rows by copy engines": gather_by_copy_engines,
    "one-shot all-reduce, split": one_shot_split,
    "straddling reduce-scatter": straddling_scatter,
    "ring attention": ring,
    "ring attention, backward": ring_backward,
    "attention by heads": heads,
    "attention by heads, backward": heads_backward,
    "decoding": decoding,
    "norm of sums, one shot": normed_in_one_shot,
    "norm of sums, two shots": normed_in_two_shots,
    "norm of whole sums, one shot": normed_whole_in_one_shot,
    "norm of whole sums, two shots": normed_whole_in_two_shots,
    "norm of whole sums, by the switch": normed_whole_by_the_switch,
    "dispatch to experts": dispatched,
    "dispatch to experts in fp8": dispatched_in_fp8,
    "combine of experts": combined,
    "dispatch of few tokens": few_dispatched,
    "combine of few tokens": few_combined,
    "dispatch of few tokens in fp8": few_dispatched_in_fp8,
}

# Of experts that several ranks share.
CUT: dict[str, Callable[..., None]] = {
    "dispatch and combine of cut experts": cut_experts,
    "few tokens of cut experts": few_of_cut_experts,
}

# Without signals: words carry their flags.
FLAGGED: dict[str, Callable[..., None]] = {
    "norm of whole sums by words, one shot": normed_whole_by_words_in_one_shot,
    "norm of whole sums by words, two shots": normed_whole_by_words,
    "norm of sums by words, two shots": normed_by_words,
    "all-reduce by words, one shot": reduced_by_words_in_one_shot,
    "all-reduce by words, two shots": reduced_by_words,
    "calls of a decode step in turn": decode_step,
}

COLLECTIVES: dict[str, Callable[..., None]] = {
    "pulls of boxes": pulled,
    "collectives that exchange": exchanged,
    "collectives that reduce, one shot": reduced_in_one_shot,
    "collectives that reduce, two shots": reduced_in_two_shots,
    "collectives by the switch": switched,
}


def moved(rank: int, ours: Modules = OURS) -> None:
    """Every collective on symmetric memory, uneven shards, one after another."""
    group, move = resolve(None), ours.movement
    W = group.world_size
    sizes = [1 + r for r in range(W)]
    starts = offsets(sizes)
    for call in range(2):
        every = [torch.arange(6.0) + 10 * r + call for r in range(W)]
        whole = torch.arange(float(sum(sizes))) + call
        torch.testing.assert_close(move.gather(whole.split(sizes)[rank], group, sizes), whole)
        scattered = move.scatter(whole * (rank + 1), group, sizes, "sum")
        total = whole * (W * (W + 1) // 2)
        torch.testing.assert_close(scattered, total[starts[rank] :][: sizes[rank]])
        torch.testing.assert_close(move.all_reduce(every[rank], group, "max"), every[-1])
        torch.testing.assert_close(move.broadcast(every[rank], group, 1), every[1])
        table = [[1 + (source + target) % 2 for target in range(W)] for source in range(W)]
        sent = [torch.arange(float(sum(row))) + 100 * r + call for r, row in enumerate(table)]
        torch.testing.assert_close(
            move.all_to_all(sent[rank], group, table[rank], table[rank], True),
            torch.cat([x.split(row)[rank] for x, row in zip(sent, table, strict=True)]),
        )
    # Above 32 KiB and two ranks: two steps.
    large = torch.full((9000,), float(rank))
    torch.testing.assert_close(
        move.all_reduce(large, group, "sum"), torch.full((9000,), W * (W - 1) / 2)
    )


# Every copy counts as a large one, read from the peer's own tensor.
DIRECT = {"_DIRECT_BYTES": 8}
DIRECTLY = Modules(movement=mutant(movement, **DIRECT))


def moved_directly(rank: int, ours: Modules = DIRECTLY) -> None:
    """`moved`, and results that are used as inputs and overwritten at once."""
    moved(rank, ours)
    group, move = resolve(None), ours.movement
    W = group.world_size
    x = torch.arange(5.0) + 5 * rank
    for call in range(2):
        whole = move.gather(x, group, [5] * W)
        x.add_(1)
        copy = move.broadcast(whole, group, 1)
        whole.zero_()
        parts = move.all_to_all(copy, group, [5] * W, [5] * W, False)
        copy.zero_()
        torch.testing.assert_close(parts, (torch.arange(5.0) + 5 * rank + call).repeat(W))
        parts.zero_()


def public_collectives(rank: int) -> None:
    W = resolve(None).world_size
    x = torch.full((rank + 1, 2), float(rank), requires_grad=True)
    y = collectives.all_gather(x)
    y.sum().backward()
    assert x.grad is not None and bool((x.grad == W).all())
    collectives.barrier()
    buffer = collectives.empty((4,))
    buffer.local.fill_(rank)
    buffer.barrier()
    peer = (rank + 1) % W
    assert buffer.get_buffer(peer, (4,), torch.float32).sum() == 4 * peer
    buffer.barrier()
    buffer.local.zero_()


def training(rank: int, engine: Any) -> None:
    """Forward and backward of a column- and a row-parallel layer, twice, against one process."""
    W = resolve(None).world_size
    rows, K, N = 3, 6, 4
    with weft.engine(engine):
        for call in range(2):
            x = torch.cat([matrix(rows, K, r + call) for r in range(W)])
            up, down = (
                [matrix(K, N, 50 + r) for r in range(W)],
                [matrix(N, K, 70 + r) for r in range(W)],
            )
            ours = [t.clone().requires_grad_() for t in (x.split(rows)[rank], up[rank], down[rank])]
            y = weft.matmul_reduce_scatter(weft.all_gather_matmul(ours[0], ours[1]), ours[2])
            (y * y).sum().backward()
            theirs = [t.clone().requires_grad_() for t in (x, torch.cat(up, 1), torch.cat(down))]
            want = theirs[0] @ theirs[1] @ theirs[2]
            (want * want).sum().backward()
            wanted = [t.grad for t in theirs]
            close = {"rtol": 1e-4, "atol": 1e-2}
            torch.testing.assert_close(y, want.split(rows)[rank], **close)
            torch.testing.assert_close(ours[0].grad, wanted[0].split(rows)[rank], **close)
            torch.testing.assert_close(ours[1].grad, wanted[1].split(N, 1)[rank], **close)
            torch.testing.assert_close(ours[2].grad, wanted[2].split(N)[rank], **close)
            z = weft.matmul_all_reduce(matrix(2, N, rank), down[rank])
            total = sum(matrix(2, N, r) @ down[r] for r in range(W))
            torch.testing.assert_close(z, total, rtol=1e-4, atol=1e-4)


def host_training(rank: int) -> None:
    training(rank, "host")


def triton_training(rank: int) -> None:
    training(rank, "triton")


def attention(rank: int, engine: Any, length: int) -> None:
    """Forward and backward of causal attention, in both layouts by turns, against one process."""
    W, D = resolve(None).world_size, 4
    for call in range(CALLS):
        layout = ("zigzag", "contiguous")[call % 2]
        sizes = zigzag_sizes(length, W) if layout == "zigzag" else chunk_sizes(length, W)
        q, k, v, grad = (matrix(length, D, s + call).view(1, 1, length, D) for s in range(4))

        def mine(x: torch.Tensor, layout: str = layout, sizes: Any = sizes) -> torch.Tensor:
            whole = to_zigzag(x, W, 2) if layout == "zigzag" else x
            return whole.split(sizes, 2)[rank].clone()

        ours = [mine(x).requires_grad_() for x in (q, k, v)]
        with weft.engine(engine):
            out = weft.ring_attention(*ours, causal=True, layout=layout)
            out.backward(mine(grad))
        theirs = [x.clone().requires_grad_() for x in (q, k, v)]
        want, _ = attention_reference(*theirs, causal=True)
        want.backward(grad)
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(out, mine(want.detach()), **close)
        for x, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x.grad, mine(wanted.grad), **close)


def host_attention(rank: int) -> None:
    attention(rank, "host", 14)


def triton_attention(rank: int) -> None:
    attention(rank, "triton", 18 * resolve(None).world_size)  # two tiles a rank


HOST: dict[str, Callable[..., None]] = {
    "movement of bytes": moved,
    "direct reads": moved_directly,
    "public collectives": public_collectives,
    "training on the host engine": host_training,
    "attention on the host engine": host_attention,
}
