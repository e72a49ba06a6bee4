"""What the NVLink switch does for a kernel: it adds up what all ranks hold at one place of their
symmetric memory, and stores to all of them, by the multicast address of that memory.

    rank r ---- 16 bytes at `at` ----> switch ---- sum, in the switch's order ----> rank that asks
    rank that stores ---- 16 bytes ----> switch ----> the same place of every rank

Either way a rank's link carries the bytes once. They are accesses like loads and stores of peers'
memory: signals order them. Sums are made in fp32, and rounded to the dtype.

Only GPUs with multicast have this. In the interpreter every rank's memory is read, in rank order,
or written, one after another: so kernels that use it can be tried, and their races looked for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device.addresses import INTERPRETED, Constant
from weft.collectives.device.device_math import rounded

_INTERPRETED = Constant(INTERPRETED)
_LOAD_F32 = Constant(
    "{ .reg .pred p; setp.ne.s32 p, $5, 0; "
    "@p multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {$0, $1, $2, $3}, [$4]; }"
)
_LOAD_BF16 = Constant(
    "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p "
    "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4]; }"
)
_LOAD_F16 = Constant(
    "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p "
    "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {$0, $1, $2, $3}, [$4]; }"
)
_STORE = Constant(
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.u32 $0, 0; "
    "@p multimem.st.relaxed.sys.global.v4.f32 [$1], {$3, $4, $5, $6}; }"
)


@triton.jit
def load_words(source, mask, dtype: tl.constexpr):
    """Sums over the ranks of the 16 bytes at each multicast address, as four words of 32 bits."""
    load: tl.constexpr = (
        _LOAD_F32 if dtype == tl.float32 else _LOAD_BF16 if dtype == tl.bfloat16 else _LOAD_F16
    )
    return tl.inline_asm_elementwise(
        load,
        "=r,=r,=r,=r,l,r",
        [source, mask.to(tl.int32)],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_words(target, mask, a, b, c, d):
    """Store four words of 32 bits at each multicast address, on all ranks."""
    tl.inline_asm_elementwise(
        _STORE,
        "=r,l,r,r,r,r,r",
        [target, mask.to(tl.int32), a, b, c, d],
        dtype=tl.uint32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _vector_ptrs(link, rank, at, LANES: tl.constexpr, dtype: tl.constexpr):
    """Pointers (n, LANES) to the elements of vectors, `at` bytes into the data of `rank`."""
    begins = (tl.load(link.buffer_ptrs + rank) + at).to(tl.pointer_type(dtype))
    return begins[:, None] + tl.arange(0, LANES)[None, :]


@triton.jit
def load_sums(link, multicast_ptr, at, mask, dtype: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Sums over the ranks of vectors of 16 bytes, in fp32 (n, elements of a vector).

    Args:
        at: (n,) int64, bytes into every rank's data, multiples of 16.
        mask: (n,), which of them to load; the others are anything.
    """
    LANES: tl.constexpr = 128 // dtype.primitive_bitwidth
    if _INTERPRETED:
        total = tl.zeros((at.shape[0], LANES), tl.float32)
        for rank in tl.static_range(WORLD_SIZE):
            places = _vector_ptrs(link, rank, at, LANES, dtype)
            total += tl.load(places, mask=mask[:, None], other=0.0).to(tl.float32)
        sums = rounded(total, dtype).to(tl.float32)
    else:
        a, b, c, d = load_words(multicast_ptr + at, mask, dtype)
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (at.shape[0], 4))
        if dtype == tl.float32:
            sums = words.to(tl.float32, bitcast=True)
        else:
            low, high = (words & 0xFFFF).to(tl.uint16), (words >> 16).to(tl.uint16)
            halves = tl.reshape(tl.join(low, high), (at.shape[0], LANES))
            sums = halves.to(dtype, bitcast=True).to(tl.float32)
    return sums


@triton.jit
def store_everywhere(link, multicast_ptr, at, values, mask, WORLD_SIZE: tl.constexpr):
    """Store vectors of 16 bytes, the rows of `values`, on all ranks; `at` and `mask` as above."""
    dtype: tl.constexpr = values.dtype
    LANES: tl.constexpr = 128 // dtype.primitive_bitwidth
    if _INTERPRETED:
        for rank in tl.static_range(WORLD_SIZE):
            tl.store(_vector_ptrs(link, rank, at, LANES, dtype), values, mask=mask[:, None])
    else:
        if dtype == tl.float32:
            words = values.to(tl.uint32, bitcast=True)
        else:
            halves = tl.reshape(values.to(tl.uint16, bitcast=True), (at.shape[0], 4, 2))
            low, high = tl.split(halves)
            words = low.to(tl.uint32) | (high.to(tl.uint32) << 16)
        first, second = tl.split(tl.reshape(words, (at.shape[0], 2, 2)))
        a, c = tl.split(first)
        b, d = tl.split(second)
        store_words(multicast_ptr + at, mask, a, b, c, d)
