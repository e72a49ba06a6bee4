"""Words that carry their flag: few bytes for a peer, without a signal.

    writer                                        reader
    word = generation << 32 | 32 bits of data     load all words until the upper half of each is
    one store of 8 bytes           -- link -->    this generation: the lower halves are the data

The bytes double. What is spared is a release, which waits for the stores' acknowledgement, over the
link and back, and the signal behind it. So it is for few bytes.

Why a word is never torn. Both accesses are strong at system scope (st.relaxed.sys, ld.volatile),
aligned, and of 8 bytes: of such PTX promises that a load sees all of a store or nothing. An element
of v2.b64 is an access of its own, so 16 bytes travel in an instruction, and each half of them is
looked at by itself. AMD's chips move 8 aligned bytes at once, which LLVM says of atomics only.

Why a word of another call is never taken. Nothing but flagged words is ever stored in this memory:
a channel of its own, cleared when it is made, and the first generation is 1. The flag is compared
for equality with 32 bits of the generation, which come again after 2^32 calls. In the last call on
each half of every 2^31 (`is_cleaning`) kernels store all words of the half anew: those that peers
send in every call, those that they otherwise leave out, and what lies behind them (`clean`).

Why a word can be used again. Halves alternate by the generation. A word of call g is overwritten in
call g + 2, by a rank that has ended g + 1, and so has taken words, its own or others that waited
for them, of every rank's g + 1. Those were stored after that rank's call g had ended, with all its
loads. A word orders no more than this: of its writer, what came before the launch and what its
program had taken; for its reader, what comes in later launches. Other data need a signal.

Why all threads of a program take the same words. Threads that share an element of a tensor load it
each for itself, at its own time, and could see it before and after it came: values would differ,
and so would the branch behind them. So what is looked for has an element for each thread (THREADS);
rows of fewer words are asked for several times.

A peer that is late makes the reader look again, as `waits` do: bounded in time, given up once a
wait of this rank has failed or a process has ended, recorded in STATUS, and told.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.collectives.device.addresses import INTERPRETED, Constant
from weft.collectives.device.failures import record_timeout
from weft.collectives.device.polling import as_flagged
from weft.collectives.device.signals import half_ptr
from weft.collectives.device.waits import on_nvidia, patience, still_waits

THREADS = 1 if INTERPRETED else 256 if torch.version.hip else 128  # of a program: 4 warps

_INTERPRETED = Constant(INTERPRETED)
_THREADS = Constant(THREADS)
_CALLS_A_CLEANING = Constant(1 << 31)
_STORE = Constant(
    "{ .reg .pred p; setp.ne.s32 p, $4, 0; mov.u32 $0, 0; "
    "@p st.relaxed.sys.global.v2.b64 [$1], {$2, $3}; }"
)


@triton.jit
def is_cleaning(generation):
    """Whether this call stores every word of its half, so that no flag there grows too old."""
    return (generation & (_CALLS_A_CLEANING - 1)) >= _CALLS_A_CLEANING - 2


@triton.jit
def clean(link, rank, generation, begin):
    """Flag the words of the own half from `begin` on, which the call uses not. All programs do."""
    COUNT: tl.constexpr = 1024
    words = half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, tl.int64)
    count = link.half_bytes // 8
    for start in range(tl.program_id(0) * COUNT, count, tl.num_programs(0) * COUNT):
        at = tl.cast(start, tl.int64) + tl.arange(0, COUNT)
        inside = tl.where(at < count, at >= begin, False)
        tl.store(words + at, tl.zeros((COUNT,), tl.int64) + (generation << 32), mask=inside)


@triton.jit
def store_flagged(ptrs, values, generation, mask):
    """Store the rows of `values` (R, n), of fp32 or 16 bits, in words at each of `ptrs` (R,).

    A word holds one element of fp32 or two of 16 bits; a row has 4 words at least, pairs 0, 2, ..
    of them before 1, 3, ..: a thread that has loaded 16 bytes of 16 bits stores them as 2 x 16, and
    lanes side by side. `ptrs` are int64, aligned to 16 bytes; rows outside of `mask` (R,) stay.
    """
    R: tl.constexpr = values.shape[0]
    if values.dtype == tl.float32:
        data = values.to(tl.uint32, bitcast=True)
    else:
        halves = values.to(tl.uint16, bitcast=True)
        low, high = tl.split(tl.reshape(halves, (R, values.shape[1] // 2, 2)))
        data = low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    PAIRS: tl.constexpr = data.shape[1] // 4
    words = tl.reshape(data.to(tl.int64) | (generation << 32), (R, PAIRS, 2, 2))
    pairs = 2 * tl.arange(0, PAIRS)[None, :]
    first, second = tl.split(words)  # of each pair
    even_first, odd_first = tl.split(first)
    even_second, odd_second = tl.split(second)
    _store_pairs(ptrs[:, None] + pairs, even_first, even_second, generation, mask)
    _store_pairs(ptrs[:, None] + 2 * PAIRS + pairs, odd_first, odd_second, generation, mask)


@triton.jit
def _store_pairs(ptrs, first, second, generation, mask):
    mask = tl.broadcast_to(mask[:, None], first.shape)
    if _INTERPRETED:
        as_flagged(generation)
        ptrs = ptrs[:, :, None] + tl.arange(0, 2)[None, None, :]
        tl.store(ptrs, tl.join(first, second), mask=tl.broadcast_to(mask[:, :, None], ptrs.shape))
        as_flagged(0)
    elif on_nvidia():
        tl.inline_asm_elementwise(
            _STORE,
            "=r,l,l,l,r",
            [ptrs, first, second, mask.to(tl.int32)],
            dtype=tl.uint32,
            is_pure=False,
            pack=1,
        )
    else:
        ptrs = ptrs[:, :, None] + tl.arange(0, 2)[None, None, :]
        tl.store(ptrs, tl.join(first, second), mask=tl.broadcast_to(mask[:, :, None], ptrs.shape))


@triton.jit
def load_flagged(ptrs, generation, dtype: tl.constexpr, COUNT: tl.constexpr):
    """Rows of COUNT values (R, COUNT) as `store_flagged` leaves them at `ptrs` (R,), and (R, words
    / 2) whether they are missing: then they are anything. Load again, with `still_waits` between.

    R * words / 2 is no less than THREADS: rows may be the same ones.
    """
    R: tl.constexpr = ptrs.shape[0]
    N: tl.constexpr = COUNT * dtype.primitive_bitwidth // 32
    tl.static_assert(R * N // 2 >= _THREADS, "a thread would look at another one's words")
    at = ptrs[:, None] + tl.arange(0, N // 2)[None, :]
    if _INTERPRETED:
        as_flagged(generation)
    even = tl.load(at, volatile=True)
    odd = tl.load(at + N // 2, volatile=True)
    if _INTERPRETED:
        as_flagged(0)
    flags = (generation << 32) >> 32
    missing = ((even >> 32) != flags) | ((odd >> 32) != flags)
    even, odd = tl.reshape(even, (R, N // 4, 2)), tl.reshape(odd, (R, N // 4, 2))
    words = tl.reshape(tl.permute(tl.join(even, odd), (0, 1, 3, 2)), (R, N))
    if dtype == tl.float32:
        values = (words & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        low, high = (words & 0xFFFF).to(tl.uint16), ((words >> 16) & 0xFFFF).to(tl.uint16)
        values = tl.reshape(tl.join(low, high), (R, COUNT)).to(dtype, bitcast=True)
    return values, missing


@triton.jit
def greatest_of(x):
    """The largest element of a matrix of integers."""
    return tl.reduce(tl.reduce(x, 1, tl.standard._elementwise_max), 0, tl.standard._elementwise_max)


@triton.jit
def sum_flagged(own_pad, ptr, stride, generation, timeout_ns, rank, dtype: tl.constexpr,
                COUNT: tl.constexpr, WORLD_SIZE: tl.constexpr):  # fmt: skip
    """The sum in fp32, in rank order, of what ranks have stored at `ptr` + rank * stride words.

    All loads of a look are under way together. False with it if a rank did not come: recorded.
    """
    left = patience(timeout_ns, "sys")
    began, polls = left - left, 0
    WORDS: tl.constexpr = COUNT * dtype.primitive_bitwidth // 32
    ptrs = ptr + tl.arange(0, 1)
    total, late = tl.zeros((1, COUNT), tl.float32), tl.cast(0, tl.int32)
    while (late >= 0) & (left > 0):
        total = tl.zeros((1, COUNT), tl.float32)
        lates = tl.full((1, WORDS // 2), -1, tl.int32)
        for source in tl.static_range(WORLD_SIZE):
            values, missing = load_flagged(ptrs + source * stride, generation, dtype, COUNT)
            lates = tl.where(missing, source, lates)
            total += values.to(tl.float32)
        late = greatest_of(lates)
        if late >= 0:
            began, left, polls = still_waits(
                own_pad, ptr, generation, timeout_ns, began, left, polls, "sys"
            )
    if late >= 0:
        record_timeout(own_pad, rank, late, generation)
    return tl.reshape(total, (COUNT,)), late < 0


@triton.jit
def take_flagged(own_pad, ptrs, sources, generation, timeout_ns, rank, dtype: tl.constexpr,
                 COUNT: tl.constexpr):  # fmt: skip
    """Rows of COUNT values (R, COUNT) that ranks `sources` (R,), which wait for others' themselves,
    have stored at each of `ptrs`. False with them if a rank did not come: recorded.
    """
    R: tl.constexpr = ptrs.shape[0]
    HALF: tl.constexpr = COUNT * dtype.primitive_bitwidth // 64
    left = patience(timeout_ns, "gpu")
    began, polls = left - left, 0
    values, late = tl.zeros((R, COUNT), dtype), tl.cast(0, tl.int32)
    while (late >= 0) & (left > 0):
        values, missing = load_flagged(ptrs, generation, dtype, COUNT)
        late = greatest_of(tl.where(missing, tl.broadcast_to(sources[:, None], (R, HALF)), -1))
        if late >= 0:
            began, left, polls = still_waits(
                own_pad, ptrs, generation, timeout_ns, began, left, polls, "gpu"
            )
    if late >= 0:
        record_timeout(own_pad, rank, late, generation)
    return values, late < 0
