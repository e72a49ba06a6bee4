"""Kernels that multiply and nothing else, to which `weft aot --loop` compares ours.

As a library writes them in Triton: a persistent matmul with one loop over all tiles of a program,
all operands by TMA where a chip has it, and the forward of attention on one rank.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plain_matmul_kernel(
    a,  # (M, K) contiguous; or a_desc
    b,  # (N, K) contiguous; or b_desc
    c,  # (M, N)
    a_desc,
    b_desc,
    M,
    N,
    K,
    V: tl.constexpr,  # Tiling
) -> None:
    """c = a @ b.T. Grid: any."""
    BLOCK_M: tl.constexpr = V.block_m
    BLOCK_N: tl.constexpr = V.block_n
    BLOCK_K: tl.constexpr = V.block_k
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    for tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=a_desc is not None
    ):
        first_m, first_n = tile % tiles_m * BLOCK_M, tile // tiles_m * BLOCK_N
        a_ptrs = a + ((first_m + rows) % M)[:, None] * K + steps[None, :]
        b_ptrs = b + ((first_n + columns) % N)[:, None] * K + steps[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            if a_desc is not None:
                acc = tl.dot(a_desc.load([first_m, k]), b_desc.load([first_n, k]).T, acc)
            else:
                acc = tl.dot(tl.load(a_ptrs + k), tl.load(b_ptrs + k).T, acc)
        place = (first_m + rows)[:, None] * N + (first_n + columns)[None, :]
        inside = (first_m + rows < M)[:, None] & (first_n + columns < N)[None, :]
        tl.store(c + place, acc.to(c.dtype.element_ty), mask=inside)


@triton.jit
def plain_attention_kernel(
    q,  # (heads, rows, D) contiguous
    k,  # the same; or k_desc of (heads * rows, D)
    v,
    k_desc,
    v_desc,
    out,
    rows,
    scale,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """softmax(q @ k.T * scale) @ v without a mask. Grid: blocks of rows, for each head."""
    blocks = tl.cdiv(rows, BLOCK_M)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    numbers, wide = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    place = (head * rows + numbers)[:, None] * D + wide[None, :]
    q_block = tl.load(q + place, mask=numbers[:, None] < rows, other=0.0)
    keys = head * rows + tl.arange(0, BLOCK_N)
    best = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for first in range(0, rows, BLOCK_N):
        if k_desc is not None:
            k_block = k_desc.load([head * rows + first, 0])
        else:
            k_block = tl.load(k + (first + keys)[:, None] * D + wide[None, :])
        z = tl.dot(q_block, k_block.T)
        higher = tl.maximum(best, tl.max(z, 1) * scale)
        p = tl.exp2(z * scale - higher[:, None])
        shrunk = tl.exp2(best - higher)
        total = total * shrunk + tl.sum(p, 1)
        if v_desc is not None:
            v_block = v_desc.load([head * rows + first, 0])
        else:
            v_block = tl.load(v + (first + keys)[:, None] * D + wide[None, :])
        acc = tl.dot(p.to(v_block.dtype), v_block, acc * shrunk[:, None])
        best = higher
    acc = acc / total[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=numbers[:, None] < rows)
