"""all_gather_matmul: cat(x over ranks) @ w, the gather hidden behind the arithmetic.

Legend: W ranks; rank r holds x_r, a (rows, columns) matrix, and its own w. `offsets[r]` is where
x_r begins in the gathered matrix (W + 1 numbers, the last one its length); shards may differ in
size and be empty. bf16, fp16 or fp32 in and out, fp32 accumulation.

    gather of rows      y_i (M, N_i) = [x_0; x_1; ...] (M, K) @ w_i (K, N_i)   one or several w_i
    contraction         y = sum over r of x_r @ w[offsets[r]:offsets[r+1]]     columns gathered
                        y = sum over r of x_r^T @ w[offsets[r]:offsets[r+1]]   rows: d(weight)

Data, for W = 3, on rank 1 (capital: symmetric memory, half of this generation g):

    rank 0           rank 1                                         rank 2
    x -> X_0         x -> X_1 (peers read it)                       x -> X_2
      |              gathered [ x_0 | (x_1) | x_2 ]                   |
      +---- copied once ---------^              ^---- copied once ----+
                     tiles of y: x_1's first, from x in place; then x_2's, x_0's, from `gathered`

Each remote byte crosses the link once, however many column tiles read it. Own rows of `gathered`
are written only if the caller wants it.

Protocol
  1. `_publish_kernel`, all programs: copy x into own half (parity of g). Each takes a ticket; the
     last one holds everybody's stores (acquire), sets GENERATION = g and signals the word
     (0, rank, 0) of every peer's pad: release at system scope.
  2. Consumer kernel, copy programs 0 .. C-1: for the peers rank+1, rank+2, ...: wait for the peer's
     word (acquire, system scope: its half may now be read), copy every C-th chunk of all rows
     that peers have to `gathered`, and signal the own word (1, peer, chunk): release at device
     scope.
  3. Consumer kernel, the other programs: tiles of y in the order own rows, rank+1, rank+2, ...;
     before a tile, outside the loop over K, wait for the words of the chunks that it reads
     (acquire).

Why it neither races nor deadlocks: copy programs wait for peers' publish kernels only, which wait
for nobody; the others wait for copy programs, which have smaller numbers. Every copy program waits
for every peer, so that no call ends before all peers have published (rule 2 of
`weft.collectives.signals`), and the publish kernel runs after this rank's previous consumer (rule
1: one stream orders a channel).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from weft.collectives import signals
from weft.collectives.pad import MAX_PROGRAMS
from weft.kernels import tiles
from weft.kernels.chips import INTERPRETER, Chip, Tiling, chip_of, tiling_for
from weft.kernels.operands import described_weight

if TYPE_CHECKING:
    from weft.collectives.workspace import Workspace

_PITCH = 16  # rows of a published shard start at multiples of this many elements


@dataclass(frozen=True)
class Config:
    """How the kernels of this file are launched.

    Attributes:
        tiling: tiles of the matmul.
        programs: grid of the consumer kernel, copy programs included.
        copy_programs: how many of them fetch shards.
        chunk_rows: rows of a shard that are announced together, where a tile reads some rows only.
        copy_m, copy_n: block that a copy moves at a time.
        descriptors: whether a weight that allows it is read by tensor descriptor. Gathered rows
            never are: copies by descriptor are not ordered by the acquire of a signal.
    """

    tiling: Tiling
    programs: int
    copy_programs: int
    chunk_rows: int
    copy_m: int
    copy_n: int
    descriptors: bool = False


def config_for(
    M: int, N: int, dtype: torch.dtype, world_size: int, chip: Chip, *, contract: bool = False
) -> Config:
    """The launch for an (M, N) output, of which each rank brings the input of 1/W of the rows.

    Args:
        contract: each rank brings its part of the contraction instead.
    """
    pieces = 1 if contract else world_size
    tiling = tiling_for(chip, -(-M // pieces), N, dtype, pieces)
    if chip is INTERPRETER:
        return Config(tiling, chip.programs, 1, 16, 32, 32)
    # A link of 450 GB/s and 2 us latency is full with 0.9 MB under way: 64 KiB (8 warps)
    # a program in one load, from an eighth of the cores. With one rank nothing is fetched.
    copy_programs = max(1, chip.cores // 8) if world_size > 1 else 1
    copy_n = 512 * tiling.num_warps // dtype.itemsize
    descriptors = chip.descriptors and dtype != torch.float32
    return Config(tiling, chip.programs, copy_programs, 32, 16, copy_n, descriptors)


@triton.jit(do_not_specialize=["rank"])
def _publish_kernel(
    x_ptr,  # (rows, columns)
    buffer_ptrs,
    signal_ptrs,
    rows,
    columns,
    pitch,
    stride_xm,
    stride_xn,
    half_bytes,
    rank,
    WORLD_SIZE: tl.constexpr,
    COPY_M: tl.constexpr,
    COPY_N: tl.constexpr,
) -> None:
    """Copy x into the own half of the next generation and tell every peer. Grid: any.

    Example: rank 1 of 3, generation 6 before: x lies in half 1 (rows `pitch` apart), GENERATION is
    7, and word (0, 1, 0) of the pads of ranks 2 and 0 is 7.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.last_generation(signal_ptrs, rank) + 1
    half = signals.half_ptr(buffer_ptrs, rank, generation, half_bytes, x_ptr.dtype.element_ty)
    share = tiles.cdiv(rows, programs)
    first = tl.minimum(program * share, rows).to(tl.int64)
    tiles.copy_block(
        half + first * pitch,
        x_ptr + first * stride_xm,
        tl.minimum(share, rows - first),
        columns,
        pitch,
        stride_xm,
        stride_xn,
        COPY_M,
        COPY_N,
    )
    if signals.is_last_program(signal_ptrs, rank, programs):
        signals.set_generation(signal_ptrs, rank, generation)
        signals.signal_peers(signal_ptrs, rank, WORLD_SIZE, 0, 0, generation)


@triton.jit
def _fetch_shards(
    gathered_ptr,
    buffer_ptrs,
    signal_ptrs,
    offsets,
    extent,  # the other dim of the gathered matrix: columns if rows are gathered, else rows
    pitch,
    stride_g,
    half_bytes,
    max_polls,
    chunk_rows,
    rank,
    generation,
    GATHERS_ROWS: tl.constexpr,
    WITH_OWN: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_M: tl.constexpr,
    COPY_N: tl.constexpr,
):
    """A copy program: bring its chunks of all peers' shards into `gathered`, announcing each."""
    program = tl.program_id(0)
    dtype: tl.constexpr = gathered_ptr.dtype.element_ty
    before = 0  # chunks of the peers that came before
    for step in range(1, WORLD_SIZE + WITH_OWN):
        # WITH_OWN: the own shard comes last, as nobody waits for it.
        peer = (rank + step) % WORLD_SIZE
        arrived = True
        if peer != rank:
            arrived = signals.wait_for(
                signal_ptrs, rank, WORLD_SIZE, 0, peer, 0, generation, max_polls
            )
        begin = tiles.element(offsets, peer, WORLD_SIZE)
        length = tiles.element(offsets, peer + 1, WORLD_SIZE + 1) - begin
        if GATHERS_ROWS:
            rows, columns, out_ptr = length, extent, gathered_ptr + begin.to(tl.int64) * stride_g
        else:
            rows, columns, out_ptr = extent, length, gathered_ptr + begin
        shard_ptr = signals.half_ptr(buffer_ptrs, peer, generation, half_bytes, dtype)
        # Each peer's chunks go to the programs after those that had the last one's: shards of few
        # chunks are fetched side by side.
        chunks = tiles.cdiv(rows, chunk_rows)
        mine = (program + COPY_PROGRAMS - before % COPY_PROGRAMS) % COPY_PROGRAMS
        before += chunks
        if arrived & (length > 0):
            for chunk in range(mine, chunks, COPY_PROGRAMS):
                first = (chunk * chunk_rows).to(tl.int64)
                tiles.copy_block(
                    out_ptr + first * stride_g,
                    shard_ptr + first * pitch,
                    tl.minimum(chunk_rows, rows - first),
                    columns,
                    stride_g,
                    pitch,
                    1,
                    COPY_M,
                    COPY_N,
                )
                signals.signal_local(
                    signals.slot_ptr(signal_ptrs, rank, WORLD_SIZE, 1, peer, chunk), generation
                )


@triton.jit
def _wait_for_chunks(
    signal_ptrs, rank, peer, first, last, generation, max_polls, WORLD_SIZE: tl.constexpr
):
    """Wait until chunks first..last of `peer`'s shard lie in `gathered`. False on a time-out."""
    arrived = True
    own_pad = signals.peer_ptr(signal_ptrs, rank, tl.int64)
    for chunk in range(first, last + 1):
        slot = signals.slot_ptr(signal_ptrs, rank, WORLD_SIZE, 1, peer, chunk)
        arrived &= signals.wait_local(slot, generation, signals.patience(own_pad, max_polls))
    if not arrived:
        signals.record_timeout(own_pad, rank, peer, generation)
    return arrived


@triton.jit(do_not_specialize=["rank", "max_polls"])
def _ag_gemm_kernel(
    out_ptrs,  # one (M, N_i) a weight
    gathered_ptr,  # (M, K)
    x_ptr,  # (m_local, K)
    w_ptrs,  # (K, N_i)
    w_desc,  # descriptor of the only weight, or None
    bias_ptrs,  # (N_i,) or None
    buffer_ptrs,
    signal_ptrs,
    offsets,
    Ns,
    K,
    pitch,
    stride_xm,
    strides_wk,
    strides_wn,
    half_bytes,
    max_polls,
    chunk_rows,
    rank,
    WORLD_SIZE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    X_IN_PLACE: tl.constexpr,
    WITH_OWN: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_M: tl.constexpr,
    COPY_N: tl.constexpr,
) -> None:
    """y_i = gathered @ w_i + bias_i for all i. Grid: COPY_PROGRAMS and at least one more.

    Example: 2 ranks with 48 and 16 rows, BLOCK_M=32, one weight of 2 column tiles, 3 programs of
    which 1 copies. On rank 1, program 1 makes tiles (rows 48..63, column 0), (0..31, 0),
    (32..47, 0) and program 2 those of column 1; both wait for rank 0's chunks before the second.
    """
    program = tl.program_id(0)
    generation = signals.last_generation(signal_ptrs, rank)
    dtype: tl.constexpr = gathered_ptr.dtype.element_ty
    if program < COPY_PROGRAMS:
        _fetch_shards(
            gathered_ptr,
            buffer_ptrs,
            signal_ptrs,
            offsets,
            K,
            pitch,
            K,
            half_bytes,
            max_polls,
            chunk_rows,
            rank,
            generation,
            True,
            WITH_OWN,
            WORLD_SIZE,
            COPY_PROGRAMS,
            COPY_M,
            COPY_N,
        )
    else:
        programs = tl.num_programs(0) - COPY_PROGRAMS
        own = signals.half_ptr(buffer_ptrs, rank, generation, half_bytes, dtype)
        tiles_n = 0
        for i in tl.static_range(WEIGHTS):
            tiles_n += tiles.cdiv(Ns[i], BLOCK_N)
        before = 0  # tiles of the sources that came before
        for step in range(WORLD_SIZE):
            source = (rank + step) % WORLD_SIZE
            begin = tiles.element(offsets, source, WORLD_SIZE).to(tl.int64)
            rows = tiles.element(offsets, source + 1, WORLD_SIZE + 1) - begin
            tiles_m = tiles.cdiv(rows, BLOCK_M).to(tl.int32)
            if step > 0:
                a_ptr, stride_am = gathered_ptr + begin * K, K
            elif X_IN_PLACE:
                a_ptr, stride_am = x_ptr, stride_xm
            else:
                a_ptr, stride_am = own, pitch
            first = (program - COPY_PROGRAMS + programs - before % programs) % programs
            for tile in range(first, tiles_m * tiles_n, programs):
                tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
                start_m = tile_m * BLOCK_M
                arrived = True
                if step > 0:
                    arrived = _wait_for_chunks(
                        signal_ptrs,
                        rank,
                        source,
                        start_m // chunk_rows,
                        (tl.minimum(start_m + BLOCK_M, rows) - 1) // chunk_rows,
                        generation,
                        max_polls,
                        WORLD_SIZE,
                    )
                # Past the end the last row again, not the first ones: those may not be there yet.
                offs_m = tl.minimum(start_m + tl.arange(0, BLOCK_M), rows - 1)
                # One of these branches runs: the one of the weight whose columns the tile is among.
                for i in tl.static_range(WEIGHTS):
                    tiles_i = tiles.cdiv(Ns[i], BLOCK_N)
                    if arrived & (tile_n >= 0) & (tile_n < tiles_i):
                        start_n = tile_n * BLOCK_N
                        acc = tiles.zeros(BLOCK_M, BLOCK_N)
                        if w_desc is not None:
                            acc = tiles.accumulate_half_described(
                                acc,
                                a_ptr,
                                w_desc,
                                offs_m,
                                0,
                                start_n,
                                K,
                                stride_am,
                                1,
                                BLOCK_K,
                                EVEN_K,
                                W_TRANSPOSED,
                            )
                        else:
                            acc = tiles.accumulate(
                                acc,
                                a_ptr,
                                w_ptrs[i],
                                offs_m,
                                tiles.wrapped(start_n, Ns[i], BLOCK_N),
                                K,
                                stride_am,
                                1,
                                strides_wk[i],
                                strides_wn[i],
                                BLOCK_K,
                                EVEN_K,
                            )
                        if bias_ptrs[i] is not None:
                            acc = tiles.with_bias(acc, bias_ptrs[i], start_n, Ns[i])
                        out_ptr = out_ptrs[i] + begin * Ns[i]
                        tiles.store(out_ptr, acc, start_m, start_n, rows, Ns[i], Ns[i], 1)
                    tile_n -= tiles_i
            before += tiles_m * tiles_n


@triton.jit(do_not_specialize=["rank", "max_polls"])
def _ag_gemm_contract_kernel(
    out_ptr,  # (M, N)
    gathered_ptr,  # (M, K), or (K, M) if TRANSPOSED
    x_ptr,  # (M, k_local), or (k_local, M)
    w_ptr,  # (K, N)
    w_desc,  # its descriptor, or None
    bias_ptr,  # (N,) or None
    buffer_ptrs,
    signal_ptrs,
    offsets,
    M,
    N,
    pitch,
    stride_g,
    stride_x,
    stride_wk,
    stride_wn,
    stride_om,
    stride_on,
    half_bytes,
    max_polls,
    chunk_rows,
    rank,
    WORLD_SIZE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    X_IN_PLACE: tl.constexpr,
    WITH_OWN: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_M: tl.constexpr,
    COPY_N: tl.constexpr,
) -> None:
    """y = sum over ranks, in rank order, of x_r (or x_r^T) @ (its rows of w). Grid: as above.

    Example: offsets (0, 3, 5), TRANSPOSED: y = x_0^T @ w[0:3] + x_1^T @ w[3:5].
    """
    program = tl.program_id(0)
    generation = signals.last_generation(signal_ptrs, rank)
    dtype: tl.constexpr = gathered_ptr.dtype.element_ty
    if program < COPY_PROGRAMS:
        _fetch_shards(
            gathered_ptr,
            buffer_ptrs,
            signal_ptrs,
            offsets,
            M,
            pitch,
            stride_g,
            half_bytes,
            max_polls,
            chunk_rows,
            rank,
            generation,
            TRANSPOSED,
            WITH_OWN,
            WORLD_SIZE,
            COPY_PROGRAMS,
            COPY_M,
            COPY_N,
        )
    else:
        programs = tl.num_programs(0) - COPY_PROGRAMS
        own = signals.half_ptr(buffer_ptrs, rank, generation, half_bytes, dtype)
        tiles_m, tiles_n = tiles.cdiv(M, BLOCK_M), tiles.cdiv(N, BLOCK_N)
        first = program - COPY_PROGRAMS
        arrived = True
        for tile in range(first, tiles_m * tiles_n, programs):
            tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            start_m, start_n = tile_m * BLOCK_M, tile_n * BLOCK_N
            offs_m = tiles.wrapped(start_m, M, BLOCK_M)
            offs_n = tiles.wrapped(start_n, N, BLOCK_N)
            acc = tiles.zeros(BLOCK_M, BLOCK_N)
            # Rank order, not arrival order: replicated inputs give bitwise equal sums on all ranks.
            for source in range(WORLD_SIZE):
                begin = tiles.element(offsets, source, WORLD_SIZE).to(tl.int64)
                length = tiles.element(offsets, source + 1, WORLD_SIZE + 1) - begin
                if source != rank:
                    a_ptr = gathered_ptr + begin * (stride_g if TRANSPOSED else 1)
                    stride_a = stride_g
                elif X_IN_PLACE:
                    a_ptr, stride_a = x_ptr, stride_x
                else:
                    a_ptr, stride_a = own, pitch
                if (tile == first) & (source != rank) & (length > 0):
                    rows = length if TRANSPOSED else M
                    arrived &= _wait_for_chunks(
                        signal_ptrs,
                        rank,
                        source,
                        0,
                        (rows - 1) // chunk_rows,
                        generation,
                        max_polls,
                        WORLD_SIZE,
                    )
                if w_desc is not None:
                    acc = tiles.accumulate_half_described(
                        acc,
                        a_ptr,
                        w_desc,
                        offs_m,
                        begin,
                        start_n,
                        length,
                        1 if TRANSPOSED else stride_a,
                        stride_a if TRANSPOSED else 1,
                        BLOCK_K,
                        EVEN_K,
                        W_TRANSPOSED,
                    )
                else:
                    acc = tiles.accumulate(
                        acc,
                        a_ptr,
                        w_ptr + begin * stride_wk,
                        offs_m,
                        offs_n,
                        length,
                        1 if TRANSPOSED else stride_a,
                        stride_a if TRANSPOSED else 1,
                        stride_wk,
                        stride_wn,
                        BLOCK_K,
                        EVEN_K,
                    )
            if bias_ptr is not None:
                acc = tiles.with_bias(acc, bias_ptr, start_n, N)
            if arrived:
                tiles.store(out_ptr, acc, start_m, start_n, M, N, stride_om, stride_on)


def _pitch(columns: int) -> int:
    return -(-columns // _PITCH) * _PITCH


def workspace_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Symmetric memory a rank needs, given the largest shard's rows and columns."""
    return rows * _pitch(columns) * dtype.itemsize


def _in_place(x: torch.Tensor) -> bool:
    return x.stride(1) == 1 or x.shape[1] == 1


def _publish(x: torch.Tensor, ws: Workspace, pitch: int, config: Config) -> None:
    if (needed := workspace_bytes(x.shape[0], pitch, x.dtype)) > ws.half_bytes:
        raise ValueError(
            f"the workspace must hold {needed} bytes a call, got {ws.half_bytes=}; "
            f"ask for workspace_bytes(largest rows, largest columns, dtype)"
        )
    blocks = -(-max(x.shape[0], 1) // config.copy_m)
    _publish_kernel[(min(config.programs, blocks),)](
        x,
        ws.buffer_ptrs,
        ws.signal_ptrs,
        x.shape[0],
        x.shape[1],
        pitch,
        x.stride(0),
        x.stride(1),
        ws.half_bytes,
        ws.rank,
        WORLD_SIZE=ws.world_size,
        COPY_M=config.copy_m,
        COPY_N=config.copy_n,
        num_warps=8,
    )


def launch_all_gather_matmul(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ws: Workspace,
    sizes: Sequence[int],
    *,
    biases: Sequence[torch.Tensor | None] | None = None,
    with_own: bool = False,
    config: Config | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Enqueue y_i = cat(x over ranks) @ w_i + bias_i.

    Args:
        x: (m_r, K), this rank's rows, any strides.
        weights: (K, N_i), any strides, dtype of x.
        ws: room for `workspace_bytes(max(sizes), K, x.dtype)`.
        sizes: m_r of every rank, the same list on all ranks.
        biases: (N_i,) or None, one a weight.
        with_own: also put this rank's rows into the gathered matrix; without it they are undefined.
        config: the same on all ranks; default `config_for`.

    Returns:
        the gathered matrix (sum of sizes, K), contiguous, and the list of y_i (sum of sizes, N_i).
    """
    K, M, W = x.shape[1], sum(sizes), ws.world_size
    N = sum(w.shape[1] for w in weights)
    config = config or config_for(M, N, x.dtype, W, chip_of(x.device))
    tiling, pitch = config.tiling, _pitch(K)
    gathered = x.new_empty(M, K)
    outs = [x.new_empty(M, w.shape[1]) for w in weights]
    # Triton's launcher takes no descriptors in a tuple.
    wanted = config.descriptors and len(weights) == 1
    w_desc, w_transposed = described_weight(weights[0], tiling, wanted)
    _publish(x, ws, pitch, config)
    _ag_gemm_kernel[(config.programs,)](
        tuple(outs),
        gathered,
        x,
        tuple(weights),
        w_desc,
        tuple(biases) if biases else (None,) * len(outs),
        ws.buffer_ptrs,
        ws.signal_ptrs,
        (0, *accumulate(sizes)),
        tuple(w.shape[1] for w in weights),
        K,
        pitch,
        x.stride(0),
        tuple(w.stride(0) for w in weights),
        tuple(w.stride(1) for w in weights),
        ws.half_bytes,
        ws.timeout_polls,
        # Every chunk of a shard has a word of the pad.
        max(config.chunk_rows, -(-max(sizes) // MAX_PROGRAMS)),
        ws.rank,
        WORLD_SIZE=W,
        WEIGHTS=len(outs),
        W_TRANSPOSED=w_transposed,
        X_IN_PLACE=_in_place(x),
        WITH_OWN=with_own,
        EVEN_K=K % tiling.block_k == 0,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        GROUP_M=tiling.group_m,
        COPY_PROGRAMS=config.copy_programs,
        COPY_M=config.copy_m,
        COPY_N=config.copy_n,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return gathered, outs


def launch_all_gather_contract(
    x: torch.Tensor,
    w: torch.Tensor,
    ws: Workspace,
    sizes: Sequence[int],
    *,
    transposed: bool = False,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    with_own: bool = False,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Enqueue y = cat(x over ranks, dim=1) @ w + bias, or cat(x over ranks, dim=0)^T @ w.

    Args:
        x: (M, k_r), or (k_r, M) if `transposed`; any strides.
        w: (sum of sizes, N), any strides, dtype of x.
        ws: room for `workspace_bytes` of the largest x.
        sizes: k_r of every rank, the same list on all ranks.
        out: (M, N), any strides, to be written; default new and contiguous.
        with_own, config: as in `launch_all_gather_matmul`.

    Returns:
        the gathered matrix, contiguous, and y (M, N). A weight gradient x^T @ cat(dy) is the
        transpose of cat(dy)^T @ x: gather dy, pass x as w and the transposed gradient as `out`.
    """
    K, W, N = sum(sizes), ws.world_size, w.shape[1]
    M = x.shape[1] if transposed else x.shape[0]
    config = config or config_for(M, N, x.dtype, W, chip_of(x.device), contract=True)
    tiling, pitch = config.tiling, _pitch(M if transposed else max(sizes))
    gathered = x.new_empty((K, M) if transposed else (M, K))
    out = x.new_empty(M, N) if out is None else out
    even_k = all(size % tiling.block_k == 0 for size in sizes)
    # By descriptor, the last step of a shard would read the next one's rows of w, not zeros.
    w_desc, w_transposed = described_weight(w, tiling, config.descriptors and even_k)
    _publish(x, ws, pitch, config)
    _ag_gemm_contract_kernel[(config.programs,)](
        out,
        gathered,
        x,
        w,
        w_desc,
        bias,
        ws.buffer_ptrs,
        ws.signal_ptrs,
        (0, *accumulate(sizes)),
        M,
        N,
        pitch,
        gathered.stride(0),
        x.stride(0),
        w.stride(0),
        w.stride(1),
        out.stride(0),
        out.stride(1),
        ws.half_bytes,
        ws.timeout_polls,
        # A tile reads whole shards: large chunks, one a copy program.
        max(1, -(-(max(sizes) if transposed else M) // config.copy_programs)),
        ws.rank,
        WORLD_SIZE=W,
        TRANSPOSED=transposed,
        W_TRANSPOSED=w_transposed,
        X_IN_PLACE=_in_place(x),
        WITH_OWN=with_own,
        EVEN_K=even_k,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        GROUP_M=tiling.group_m,
        COPY_PROGRAMS=config.copy_programs,
        COPY_M=config.copy_m,
        COPY_N=config.copy_n,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return gathered, out
