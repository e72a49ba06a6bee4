"""A kernel of nobody's, to see what Triton takes to launch one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_kernel(a, b, out, M, N, BLOCK: tl.constexpr) -> None:
    """out = a + b, of (M, N) elements each."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < M * N
    tl.store(out + offs, tl.load(a + offs, inside) + tl.load(b + offs, inside), inside)
