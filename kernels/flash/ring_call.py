"""One call of attention over sharded sequences, as its kernels know it: launch and geometry.

Forward and backward, by ring and by heads, are launched by `launch_ring` with `RingOptions`, are
compiled for a `Shape` and take `Keys` and `Tables`: who holds which tokens, and what sees what.
Legend as in `ring_keys`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.collectives import Workspace
from weft.collectives.device import signals
from weft.collectives.device.launches import launching, temporary
from weft.collectives.memory.workspace import link_of
from weft.kernels.engine.chips import INTERPRETER, Chip, LaunchOptions
from weft.kernels.flash.geometry import Geometry
from weft.kernels.flash.ring_tables import tables


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for.

    Attributes:
        world_size: W.
        spans: spans of a shard, 1 or 2.
        head_dim: D.
        pitch, fp32_pitch: elements from one row to the next, of published keys and of fp32 partial
            sums.
        block_d: D rounded up to a power of two, at least 16.
        config: its tiles, and how it is launched.
    """

    world_size: int
    spans: int
    head_dim: int
    pitch: int
    fp32_pitch: int
    block_d: int
    config: Any  # RingConfig, RingGradConfig


@dataclass(frozen=True, kw_only=True)
class RingOptions(LaunchOptions):
    """How a kernel is launched, apart from its tiles; the same on all ranks.

    Attributes:
        group_heads: heads whose tiles run together, the longest first.
        programs: grid, copy programs included.
        copy_programs, copy_m: programs that publish and fetch keys, and rows at a time.
    """

    group_heads: int
    programs: int
    copy_programs: int
    copy_m: int


class Keys(NamedTuple):
    """Keys and values of B * H_KV = `heads` heads.

    Fields: this rank's `k` and `v` (B, H_KV, m, D), with the same `strides` of batch, head and row;
    `gathered`, all ranks' keys and values of the `fetched` heads of each batch from `first` on.
    """

    k: Any
    v: Any
    strides: Any
    gathered: Any
    H_KV: Any
    heads: Any
    first: Any
    fetched: Any


class Ring(NamedTuple):
    """One call as its kernel knows it.

    Fields: the way to the peers, this rank, the number of the call, the keys (Keys), `Tables`, one
    by one, and the scale of the scores.
    """

    link: Any
    rank: Any
    generation: Any
    keys: Any
    table: Any
    sees: Any
    seen_by: Any
    scale: Any


class Head(NamedTuple):
    """A head of queries of one batch, and the head of keys that it uses; int64."""

    batch: Any
    q: Any
    kv: Any


def pitch_of(D: int, dtype: torch.dtype) -> int:
    """Elements from one row of a published shard to the next."""
    unit = 16 // dtype.itemsize
    return -(-D // unit) * unit


def shard_bytes(heads: int, rows: int, D: int, dtype: torch.dtype) -> int:
    """Size of a published shard of `heads` heads (B * H_kv) and `rows` rows."""
    return 2 * heads * rows * pitch_of(D, dtype) * dtype.itemsize


# Heads of keys that programs go through at the same time. The more, the more evenly programs are
# loaded; of 64, two programs of a chip read each, which takes half of the memory's rate where heads
# of queries have keys of their own.
_KV_HEADS = 64


# Bytes that a program copies in a second, of a chip's own memory, and operations of a chip that
# attends. A copy by itself reaches 47e9 on an H200, beside a matmul 29e9; by what the ring took
# there, 9 to 14 programs reach 10e9 to 12e9 beside others that poll for what they copy.
_COPIED, _ATTENDED = 12e9, 400e12


def _copy_programs(
    chip: Chip, heads: int, kv_heads: int, rows: int, dtype: torch.dtype, W: int, tile_m: int | None
) -> int:
    """How many programs copy: just enough to fetch a shard before the next one is asked for.

    That is after all queries have attended to a shard, to half of it if attention is causal; or
    after the first tile of `tile_m` queries in every program has, if each tile goes through all
    shards. All other tiles find everything here, so that more than sqrt(cores * enough for all
    queries) would cost them more time than the first ones gain. An eighth of the cores is the most.
    """
    if W == 1 or chip is INTERPRETER:
        return 1
    queries = max(heads * rows, 1)
    at_once = _ATTENDED / _COPIED * dtype.itemsize * kv_heads  # if there were one query
    wanted = at_once / queries
    if tile_m is not None:
        first = min(queries, chip.programs * tile_m)
        wanted = min(at_once / first, math.sqrt(chip.cores * wanted))
    return max(2, min(chip.cores // 8, math.ceil(wanted)))


def ring_options(
    heads: int,
    kv_heads: int,
    rows: int,
    D: int,
    dtype: torch.dtype,
    world_size: int,
    chip: Chip,
    tile_m: int | None,
    num_warps: int,
    num_stages: int,
) -> dict[str, Any]:
    """RingOptions of shards of at most `rows` queries, by name; heads count over batches.

    `tile_m`: queries of a tile, if each goes through all shards before the next begins.
    """
    copies = _copy_programs(chip, heads, kv_heads, rows, dtype, world_size, tile_m)
    interpreted = chip is INTERPRETER
    return {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "all_registers": not (chip.is_amd or interpreted),
        "group_heads": 2 if interpreted else _KV_HEADS * max(1, heads // max(kv_heads, 1)),
        "programs": chip.programs,
        "copy_programs": copies,
        "copy_m": 16 if interpreted else _copy_rows(num_warps, D, dtype),
    }


def _copy_rows(num_warps: int, D: int, dtype: torch.dtype) -> int:
    """Rows that a copy program moves at a time: 256 bytes a thread, 128 where more would spill.

    At most 256, as what nobody sees is left out by so many.
    """
    row_bytes: int = max(16, triton.next_power_of_2(D)) * dtype.itemsize
    return min(256, 32 * num_warps * (256 if D <= 128 else 128) // row_bytes)


def shape_for(k: torch.Tensor, geometry: Geometry, config: RingOptions) -> Shape:
    """The Shape of keys `k` (B, H_kv, m, D)."""
    D = k.shape[3]
    return Shape(
        world_size=len(geometry.k_sizes),
        spans=len(geometry.k_spans[0]),
        head_dim=D,
        pitch=pitch_of(D, k.dtype),
        fp32_pitch=pitch_of(D, torch.float32),
        block_d=max(16, triton.next_power_of_2(D)),
        config=config,
    )


def keys_of(
    k: torch.Tensor, v: torch.Tensor, geometry: Geometry, heads: range | None = None
) -> Keys:
    """The rank's own shard (B, H_kv, m, D) as kernels take it, and room for others' `heads`."""
    B, H_kv, _, D = k.shape
    heads = range(H_kv) if heads is None else heads
    remote = geometry.sees.keys if len(geometry.k_sizes) > 1 else 0
    gathered = temporary(k.new_empty(2 * B * len(heads) * remote * pitch_of(D, k.dtype)))
    return Keys(k, v, k.stride()[:3], gathered, H_kv, B * H_kv, heads.start, len(heads))


def launch_ring(
    kernel: Any,
    config: RingOptions,
    given: Sequence[Any],
    k: torch.Tensor,
    v: torch.Tensor,
    ws: Workspace,
    geometry: Geometry,
    scale: float,
    heads: range | None = None,
) -> None:
    """Enqueue a kernel: what is `given` to it alone, then what all of them take.

    Args:
        k, v: (B, H_kv, m, D), see `attention_tiles.contiguous_rows`.
        heads: of keys, which are fetched to attend for the queries of all ranks; None: all heads,
            for the own queries.
    """
    launching(kernel, config.programs)(
        *given,
        keys_of(k, v, geometry, heads),
        tables(geometry, ws.rank, k.device, heads is not None),
        link_of(ws),
        k.shape[0],
        scale,
        ws.rank,
        SHAPE=shape_for(k, geometry, config),
        **config.options,
    )


@triton.jit
def area_ptr(ring, owner, offset, dtype: tl.constexpr):
    """Where the half of `owner` has what begins `offset` bytes into it."""
    link = ring.link
    half = signals.half_ptr(link.buffer_ptrs, owner, ring.generation, link.half_bytes, dtype)
    return half + offset // (dtype.primitive_bitwidth // 8)


@triton.jit
def copies_came(ring, source, COUNT: tl.constexpr, SHAPE: tl.constexpr):
    """Whether the first COUNT copy programs of this launch announce the keys of `source` in time.

    One is polled by loads, several by read-modify-writes: to wait for all, ask for one first, or
    all other programs together hold up what they wait for.
    """
    return signals.wait_for_own(
        ring.link.signal_ptrs, ring.rank, SHAPE.world_size, 1, source, 0, COUNT - 1,
        ring.generation, ring.link.timeout_ns, triton.next_power_of_2(COUNT),
    )  # fmt: skip


@triton.jit
def head_of(batch, head, H, ring):
    """A Head, of int32 numbers."""
    kv_head = tl.cast(head // (H // ring.keys.H_KV), tl.int64)
    return Head(tl.cast(batch, tl.int64), tl.cast(head, tl.int64), kv_head)


@triton.jit
def compute_program(SHAPE: tl.constexpr):
    """This program's number among those that compute, and how many there are."""
    return tl.program_id(0) - SHAPE.config.copy_programs, tl.num_programs(
        0
    ) - SHAPE.config.copy_programs
