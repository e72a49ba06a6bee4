"""What kernels that add up products over ranks share: making a tile, and summing up its slots.

    rank r     tile of sum_i x_i @ w_i  --`tile_product`-->  a slot for r, at the tile's owner
    owner      scale * (slot 0 + slot 1 + ...) + bias + residual  --`collect`-->  rows of out

Who owns which tile, and when it is sent, signalled and waited for, is each kernel's own protocol:
`reduce_scatter_kernel`, `one_shot_kernel` and `two_shot_kernel`. Here nobody signals or waits.
`partial_sums` says how a tile lies in a slot. `Products` is the host's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.collectives import Workspace
from weft.collectives.device import signals
from weft.kernels.device import outputs, partial_sums, splits, tiles
from weft.kernels.device.operands import contiguous, described, matrix, scales_of
from weft.kernels.device.partial_sums import Wire, wire_of
from weft.kernels.engine.chips import Tiling
from weft.kernels.engine.fp8 import Scaling


@dataclass(frozen=True)
class SumConfig:
    """How a kernel that adds up partial products is launched; the same on all ranks.

    Attributes:
        tiling: tiles of the matmul.
        programs: grid.
        reduce_m: rows of a tile that are added up at a time.
        descriptors: whether operands that allow it are read by tensor descriptor.
        ahead_bytes: shared memory for partial sums that are on their way to where they are added.
    """

    tiling: Tiling
    programs: int
    reduce_m: int
    descriptors: bool
    ahead_bytes: int = 0


@dataclass(frozen=True)
class SumVariant:
    """What is compiled into a kernel. `row_words`: of a tile's row on the `wire`. `by_switch`:
    whether the NVLink switch adds up. `senders`, `spread`: see `turns`. `flattened`: see there.
    """

    world_size: int
    tiles: Tiling
    terms: int
    even_k: bool
    x_transposed: bool
    w_transposed: bool
    wire: Wire
    row_words: int
    reduce_m: int
    split: int
    slot_stages: int
    by_switch: bool = False
    senders: int = 0
    spread: bool = False
    flattened: bool = False

    @property
    def plane(self) -> int:
        """Words of a row, one for each number, or for two or four of them."""
        return self.row_words // (3 if self.wire.bits == 24 else 1)

    @property
    def stripe(self) -> int:
        """Rows of a tile that are sent together; see `partial_sums`."""
        return 16 if self.reduce_m % 16 == 0 and self.plane % 8 == 0 else 1

    @property
    def parts(self) -> int:
        """Into how many parts K is cut."""
        return 1


class Terms(NamedTuple):
    """A sum of products x (M, K) @ w (K, N) as kernels take it.

    Fields: `xs`, `ws` and `Ks` hold a Matrix, a Matrix and a K for each term; `row_scales` and
    `column_scales` are those of fp8 operands (one term).
    """

    xs: Any
    ws: Any
    Ks: Any
    row_scales: Any
    column_scales: Any


class Finish(NamedTuple):
    """out = scale * sum + bias + residual; `bias` (N,) and `residual`, laid out as out, or None."""

    scale: Any
    bias: Any
    residual: Any


@triton.jit
def half_of(link, rank, generation):
    """Where the slots of this generation begin on `rank`."""
    return signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, tl.float32)


@triton.jit
def tile_place(tile, tiles_m, tiles_n, V: tl.constexpr):
    """The first row and the first column of tile number `tile`."""
    tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, V.tiles.group_m)
    return tile_m * V.tiles.block_m, tile_n * V.tiles.block_n


@triton.jit
def tile_product(
    terms,
    x_descs,  # of each term, or None
    w_descs,
    begin,  # row of x that row 0 of the tiles is
    start_m,
    start_n,
    M,  # rows from `begin` on
    N,
    part,
    V: tl.constexpr,
):
    """One tile of the sum of products, or part `part` of V.split: (block_m, block_n) fp32."""
    TILES: tl.constexpr = V.tiles  # what is passed on needs a name on Triton 3.6
    TERMS: tl.constexpr = V.terms
    rows = begin + tiles.wrapped(start_m, M, V.tiles.block_m)
    acc = tiles.zeros(V.tiles.block_m, V.tiles.block_n)
    for i in tl.static_range(TERMS):
        first_k, last_k = splits.part_of(terms.Ks[i], part, V.tiles.block_k, V.split)
        acc, _ = tiles.accumulate(
            acc, None, tiles.row_ptrs(terms.xs[i], rows), terms.xs[i].stride_n,
            x_descs[i], begin + start_m, terms.ws[i], None, w_descs[i], None, start_n, N, first_k,
            0, last_k, TILES, V.even_k, V.x_transposed, V.w_transposed,
        )  # fmt: skip
    return scaled(terms, acc, begin, start_m, start_n, M, N, V)


@triton.jit
def scaled(terms, acc, begin, start_m, start_n, M, N, V: tl.constexpr):
    """The sums of a tile times the scales of fp8 operands."""
    if terms.row_scales.ptr is not None:
        rows = begin + tiles.wrapped(start_m, M, V.tiles.block_m)
        scales = terms.row_scales.ptr + rows.to(tl.int64) * terms.row_scales.stride
        acc = outputs.times_rows(acc, scales, rows >= 0)
    return outputs.times_columns(acc, terms.column_scales, start_n, N)


@triton.jit
def collect(
    out_ptr,  # (rows, N)
    tile_ptr,  # of the tile in slot 0
    slot_stride,  # words
    finish,
    start_m,  # row of out that the tile begins with
    start_n,
    rows,
    N,
    V: tl.constexpr,
    show: tl.constexpr = None,  # a function: show(total, its first row in the tile, shown, V)
    shown=None,
    switched=None,  # link, multicast address, and bytes to where the tile lies on every rank
):
    """out = scale * (the tile's sum over slots in rank order) + bias + residual.

    Given `switched`, the sum is what the switch makes of the tiles that lie there, not of slots.
    V.reduce_m rows at a time, of which those inside of out are stored. In one loop over rows and
    slots: what V.slot_stages - 1 of its steps add is on its way from memory.
    """
    STAGES: tl.constexpr = V.slot_stages
    parts = tiles.cdiv(tl.minimum(rows - start_m, V.tiles.block_m), V.reduce_m)
    if switched is not None:
        for part in range(parts):
            at = switched[2] + part * (V.reduce_m * V.row_words * 4)
            total = partial_sums.sum_of_ranks(switched[0], switched[1], at, V)
            store_sums(
                out_ptr, total, part * V.reduce_m, finish, start_m, start_n, rows, N, V, show, shown
            )
    else:
        sums = partial_sums.empty_parts(V)
        for step in tl.range(parts * V.world_size, num_stages=STAGES):
            slot, part = step % V.world_size, step // V.world_size * V.reduce_m
            place = slot * slot_stride + part * V.row_words
            sums = partial_sums.added(sums, partial_sums.load_parts(tile_ptr + place, V))
            if slot == V.world_size - 1:
                total = partial_sums.joined(sums, V)
                store_sums(out_ptr, total, part, finish, start_m, start_n, rows, N, V, show, shown)
                sums = partial_sums.empty_parts(V)


@triton.jit
def store_sums(
    out_ptr, total, part, finish, start_m, start_n, rows, N, V: tl.constexpr,
    show: tl.constexpr = None, shown=None,
):  # fmt: skip
    """Store rows of a tile, from its row `part` on: those inside of out."""
    offs_m = start_m + part + tl.arange(0, V.reduce_m)
    inside_m = (offs_m < rows) & (offs_m >= 0)
    total = _finished(total, finish, offs_m, inside_m, start_n, N)
    tiles.store_rows(out_ptr, total, offs_m, inside_m, start_n, N, N, 1)
    if show is not None:
        show(total, part, shown, V)


@triton.jit
def _finished(total, finish, rows, inside_m, start_n, N):
    """scale * total + bias + residual, in fp32."""
    total = outputs.with_bias(total * finish.scale, finish.bias, start_n, N)
    if finish.residual is not None:
        offs_n = start_n + tl.arange(0, total.shape[1])
        inside = inside_m[:, None] & (offs_n[None, :] < N)
        ptrs = finish.residual + rows.to(tl.int64)[:, None] * N + offs_n[None, :]
        total += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    return total


def tile_count(M: int, N: int, tiling: Tiling) -> int:
    """Tiles of an (M, N) output."""
    return -(-M // tiling.block_m) * -(-N // tiling.block_n)


def slot_bytes(count: int, tiling: Tiling, wire: Wire) -> int:
    """Of a slot of `count` tiles."""
    return count * tiling.block_m * wire.row_words(tiling.block_n) * 4


@dataclass(frozen=True)
class Products:
    """scale * sum over ranks of (sum_i x_i @ w_i) + bias + residual, to be made.

    Attributes:
        xs: (M, K_i), any strides, one dtype.
        weights: (K_i, N), any strides, dtype of x. K_i may differ from rank to rank.
        bias: (N,), added once, after the scale.
        residual: likewise; laid out as the output.
        scale: 1 / W makes an average.
        scaling: of fp8 operands (one term).
        wire_dtype: in which partial sums travel; None: see `partial_sums`.
    """

    xs: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    scale: float
    scaling: Scaling | None
    wire_dtype: torch.dtype | None = None

    def output(self, rows: int) -> torch.Tensor:
        """(rows, N), not yet written."""
        x, N, scaling = self.xs[0], self.weights[0].shape[1], self.scaling
        return x.new_empty(rows, N, dtype=scaling.out_dtype if scaling else x.dtype)

    def arguments(
        self,
        ws: Workspace,
        config: SumConfig,
        out_dtype: torch.dtype,
        *,
        split: int = 1,
        row_starts: Sequence[int] = (),
    ) -> tuple[tuple[Any, ...], SumVariant]:
        """Terms, three pairs of descriptors and Finish, in this order; and the variant."""
        xs, weights, scaling, tiling = self.xs, self.weights, self.scaling, config.tiling
        operands = described(xs, weights, tiling, config.descriptors, row_starts)
        terms = Terms(
            tuple(matrix(x) for x in xs),
            tuple(matrix(w) for w in weights),
            tuple(x.shape[1] for x in xs),
            scales_of(scaling.rows if scaling else None),
            scales_of(scaling.columns[0] if scaling else None),
        )
        finish = Finish(self.scale, contiguous(self.bias), contiguous(self.residual))
        wire = wire_of(out_dtype, self.wire_dtype)
        row_words = wire.row_words(tiling.block_n)
        variant = SumVariant(
            ws.world_size,
            tiling,
            terms=len(xs),
            even_k=all(x.shape[1] % tiling.block_k == 0 for x in xs),
            x_transposed=operands.x_transposed,
            w_transposed=operands.w_transposed,
            wire=wire,
            row_words=row_words,
            reduce_m=config.reduce_m,
            split=split,
            slot_stages=max(1, min(5, config.ahead_bytes // (config.reduce_m * row_words * 4))),
        )
        return (terms, *operands.arguments, finish), variant
