"""Merging a part of an attention into the parts before it, in one pass over the output.

    lse_all = log(exp(lse) + exp(lse_part))
    out = out * exp(lse - lse_all) + out_part * exp(lse_part - lse_all)

torch's own ops for that are six launches, and pass over the output twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.collectives.device.device_math import cdiv
from weft.collectives.device.launches import launching
from weft.kernels.flash.attention_tiles import head_ptr, heads_of

_TILE = 4096  # elements of a program


@triton.jit
def _merge_kernel(
    out,  # Heads, as all of them; the log-sum-exps with rows of one element
    lse,
    part_out,
    part_lse,
    H,
    rows,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid: tiles of BLOCK rows of all heads."""
    tiles, program = cdiv(rows, BLOCK), tl.program_id(0)
    batch = tl.cast(program // tiles // H, tl.int64)
    head = tl.cast(program // tiles % H, tl.int64)
    row = (program % tiles) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    column, real = tl.arange(0, BLOCK_D)[None, :], row < rows
    inside = real[:, None] & (column < D)
    lse_ptr = head_ptr(lse, batch, head) + row * lse.stride_m
    part_ptr = head_ptr(part_lse, batch, head) + row * part_lse.stride_m
    before = tl.load(lse_ptr, mask=real, other=-float("inf"))
    here = tl.load(part_ptr, mask=real, other=-float("inf"))
    top = tl.maximum(before, here)
    top = tl.where(top == -float("inf"), 0.0, top)  # neither has seen anything
    kept, added = tl.exp(before - top), tl.exp(here - top)
    both = kept + added
    seen, both = both > 0, tl.where(both > 0, both, 1.0)
    out_ptr = head_ptr(out, batch, head) + row[:, None] * out.stride_m + column
    part_ptr = head_ptr(part_out, batch, head) + row[:, None] * part_out.stride_m + column
    total = tl.load(out_ptr, mask=inside, other=0.0) * (kept / both)[:, None]
    part = tl.load(part_ptr, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr, total + part * (added / both)[:, None], mask=inside)
    tl.store(lse_ptr, tl.where(seen, top + tl.log(both), -float("inf")), mask=real)


def launch_merge(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge a part's output (B, H, S, D) and log-sum-exp (B, H, S) into those so far, in fp32, in
    place. Rows of the outputs are contiguous.
    """
    B, H, rows, D = out.shape
    block_d = max(16, triton.next_power_of_2(D))
    block = _TILE // block_d
    launching(_merge_kernel, B * H * triton.cdiv(rows, block))(
        heads_of(out),
        heads_of(lse.unsqueeze(-1)),
        heads_of(part_out),
        heads_of(part_lse.unsqueeze(-1)),
        H,
        rows,
        D=D,
        BLOCK=block,
        BLOCK_D=block_d,
    )
