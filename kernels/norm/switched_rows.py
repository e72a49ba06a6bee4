"""The rows of `rms_norm_kernel` that the NVLink switch adds up: shown, and added up for all ranks.

As in `team_rows`, nobody signals or waits here, and V is the kernel's `NormVariant`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device import signals, switch
from weft.collectives.device.device_math import mask_if, rounded
from weft.kernels.norm import team_rows


@triton.jit
def show_terms(call, x_ptr, V: tl.constexpr):
    """Store this rank's terms of all rows in its own half, where the switch reads them."""
    for i in range(call.team, call.sent, call.teams):
        for step in range(V.world_size):
            row = (call.rank + step) % V.world_size * call.share + i
            there = mask_if(row < call.T, call.inside)
            term = tl.load(team_rows.at(x_ptr, row, call.H) + call.columns, mask=there)
            own = team_rows.row_ptr(call, call.rank, row, term.dtype)
            tl.store(own + call.columns, term, mask=there)


@triton.jit
def add_up_by_switch(
    call, partial, x_ptr, weight_ptr, residual_ptr, multicast_ptr, partial_at, V: tl.constexpr
):
    """Have the switch add up this rank's rows; store h and its `Partial` on all ranks."""
    W: tl.constexpr = V.world_size
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    LANES: tl.constexpr = 128 // dtype.primitive_bitwidth
    SIZE: tl.constexpr = 16 // LANES
    VECTORS: tl.constexpr = V.part // LANES
    H, part = call.H, tl.program_id(0) % V.team
    vectors = part * VECTORS + tl.arange(0, VECTORS)
    columns = vectors[:, None] * LANES + tl.arange(0, LANES)[None, :]
    inside = vectors * LANES < H
    half = (call.generation & 1) * call.link.half_bytes
    for i in range(call.team, call.made, call.teams):
        row = tl.cast(call.first + i, tl.int64)
        at = half + (row * H + vectors * LANES) * SIZE
        h = switch.load_sums(call.link, multicast_ptr, at, inside, dtype, W)
        h = tl.where(inside[:, None], h, 0.0)
        if residual_ptr is not None:
            kept = team_rows.at(residual_ptr, row, H) + columns
            h += tl.load(kept, mask=inside[:, None], other=0.0).to(tl.float32)
        total = rounded(h, dtype)
        shown_at = at + tl.cast(call.rest, tl.int64) * H * SIZE
        switch.store_everywhere(call.link, multicast_ptr, shown_at, total, inside, W)
        h = total.to(tl.float32)
        weighted = h
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + columns, mask=inside[:, None], other=0.0)
            weighted = h * weight.to(tl.float32)
        squares = tl.reduce(tl.reshape(h * h, (V.part,)), 0, tl.standard._sum_combine)
        largest = signals.greatest(tl.reshape(tl.abs(weighted), (V.part,)))
        for step in range(1, W + 1):
            peer = (call.rank + step) % W
            shown = team_rows.shown_ptr(call, peer, partial_at) + row * V.team + part
            tl.store(shown, squares)
            if partial.largest is not None:
                tl.store(shown + call.T * V.team, largest)
