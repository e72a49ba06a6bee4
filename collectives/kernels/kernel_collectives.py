"""Collectives as kernels, for a GPU: one launch, one or two crossings of the links.

Legend: W ranks; a *piece* is what one rank has for one other, contiguous elements of its input.
Every rank stores its pieces in the memory of the ranks they are for, so that data crosses a link
once and nobody waits for an answer; for few bytes the crossing is all the time there is.

    all_gather, all_to_all       rank r: its piece for p --> slot r of p    p: slots --> output
    reduce_scatter, all_reduce   rank r: its piece for p --> slot r of p    p: slot 0 + slot 1 ...
      of few bytes (one shot)      (each piece is the whole input if all ranks reduce everything)
    all_reduce, two shots        as reduce_scatter, then: sum --> finished area of every rank

A half of the workspace is W slots of one piece; for two shots, W finished pieces follow. Elements
are added in rank order, half types in fp32, and rounded once.

Protocol, in each program p of P; it moves the blocks b of every piece with b % P == p, for all
peers at once: a tile has a row for each.
  1. Store blocks in slot `rank` of each peer; signal all their words (0, rank, p): release at
     system scope.
  2. Wait for the words (0, r, p) of all peers (acquire, system scope); copy or add up the slots.
     Two shots: store the sums among the finished pieces of all peers, signal their words
     (1, rank, p); wait for the words (1, r, p); copy the finished pieces.
  3. Take a ticket; the last program sets GENERATION.

Why it neither races nor deadlocks: a program signals all that it has before it waits, and p waits
for p alone. Calls alternate halves; rules 1 and 2 of `weft.collectives.device.signals` hold,
because each program signals every peer after this rank's last call has ended, and waits for every
peer. The output may be the input: a program overwrites only blocks that it has read, and no other
program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft import settings
from weft.collectives.device import signals
from weft.collectives.device.device_math import cdiv, divided, either_ptr, element, rounded
from weft.collectives.device.launches import launching, layouts_of
from weft.collectives.memory.workspace import Workspace, check_room, link_of
from weft.collectives.ranks.chunks import offsets

REDUCED = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
# By size in bytes: data that is only copied is copied in the widest words its addresses allow.
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_SLOT_ALIGN = 128


@dataclass(frozen=True)
class CollectiveConfig:
    """How a collective is launched; the same on all ranks.

    Attributes:
        block_bytes: what a program moves at a time, to or from each rank.
        programs: grid.
        num_warps: of a program.
        two_shot: whether each element of an all_reduce is added up by one rank only.
    """

    block_bytes: int
    programs: int
    num_warps: int = 8
    two_shot: bool = False


# One shot receives (W - 1) times the bytes, two shots about twice, but pay a second crossing of
# about 3 us: in virtual time they meet at some 230 KiB on 8 x H100.
_ONE_SHOT_BYTES = 224 << 10
# Beyond this, the process group's rings and trees are as fast and leave the cores free.
_MOST_BYTES = 4 << 20
# Each of 256 threads then has 16 bytes for each rank in flight, and 64 programs what a link of 450
# GB/s carries to 8 ranks in about 4 us.
_BLOCK_BYTES, _PROGRAMS = 4 << 10, 64


def within_budget(programs: int) -> int:
    """A grid of so many programs on a GPU, or what WEFT_SMS leaves of it."""
    return min(programs, settings.sms() or programs)


def collective_config(op: str, nbytes: int, world_size: int, on_gpus: bool) -> CollectiveConfig:
    """The launch of `op`, from what is the same on every rank.

    Args:
        nbytes: size of the largest piece in one shot: for all_reduce, of the input.
        on_gpus: `Group.on_gpus` of the tensors' device. Virtual ranks that stand for a chip are
            launched as on that chip, though their tensors are on a CPU.
    """
    interpreted = not on_gpus
    one_shot_bytes = 256 if interpreted else _ONE_SHOT_BYTES
    two_shot = op == "all_reduce" and world_size > 2 and nbytes > one_shot_bytes
    piece = -(-nbytes // world_size) if two_shot else nbytes
    block, most = _BLOCK_BYTES, within_budget(_PROGRAMS)
    if interpreted:
        # Up to eight blocks a program: an interpreted block takes equally long however wide it is.
        block, most = min(max(64, triton.next_power_of_2(-(-piece // 24))), 1 << 16), 3
    programs = max(1, min(most, -(-piece // block)))
    return CollectiveConfig(block, programs, 4 if interpreted else 8, two_shot)


def is_quicker(nbytes: int, world_size: int, config: CollectiveConfig) -> tuple[bool, str]:
    """Whether a kernel beats the process group's library on a GPU, and why."""
    received = nbytes * 2 if config.two_shot else nbytes * (world_size - 1)
    few = received <= _MOST_BYTES
    return few, f"{received} bytes to receive, {'up to' if few else 'more than'} {_MOST_BYTES}"


def _slot_bytes(nbytes: int) -> int:
    return -(-nbytes // _SLOT_ALIGN) * _SLOT_ALIGN


def workspace_bytes(nbytes: int, world_size: int, config: CollectiveConfig) -> int:
    """Symmetric memory that a call needs on each rank; `nbytes` as for `collective_config`."""
    if config.two_shot:
        return 2 * world_size * _slot_bytes(-(-nbytes // world_size) + 16)
    return world_size * _slot_bytes(nbytes)


class Pieces(NamedTuple):
    """One piece of a tensor for each rank: start and size, (W,) each, in elements."""

    starts: Any
    sizes: Any


@triton.jit
def _slot_ptr(link, owner, slot, slot_size, generation, dtype: tl.constexpr):
    """Where a slot of `owner` begins or, from slot W on, a finished piece."""
    half = signals.half_ptr(link.buffer_ptrs, owner, generation, link.half_bytes, dtype)
    return tl.multiple_of(half + slot * tl.cast(slot_size, tl.int64), 16)


@triton.jit
def _piece_ptr(ptr, pieces, rank, WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr):
    """Where the piece of `rank` begins."""
    return tl.multiple_of(ptr + element(pieces.starts, rank, WORLD_SIZE), ALIGN)


@triton.jit
def _vectors(size, ALIGN: tl.constexpr, ITEM_BYTES: tl.constexpr):
    """How many of `size` elements fill whole accesses of ALIGN bytes."""
    return size // (ALIGN // ITEM_BYTES) * (ALIGN // ITEM_BYTES)


@triton.jit
def _copy_pieces(dst, src, sizes, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """dst[i][:sizes[i]] = src[i][:sizes[i]] for all i, the blocks of this program.

    All begin at multiples of ALIGN bytes.
    """
    blocks = cdiv(signals.greatest(sizes), BLOCK)
    whole = _vectors(sizes, ALIGN, src.dtype.element_ty.primitive_bitwidth // 8)[:, None]
    dst, src, sizes = dst[:, None], src[:, None], sizes[:, None]
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        # The rest of a piece, less than a vector, belongs to the block it lies in, as ranks may
        # differ in ALIGN.
        rest = tl.cast(whole, tl.int64) + tl.arange(0, 16)[None, :]
        is_rest = (rest < sizes) & (whole // BLOCK == block)
        values = tl.load(src + offs, mask=offs < whole)
        last = tl.load(src + rest, mask=is_rest)
        tl.store(dst + offs, values, mask=offs < whole)
        tl.store(dst + rest, last, mask=is_rest)


@triton.jit
def _send_pieces(
    x_ptr,
    pieces,
    link,
    slot_size,
    rank,
    generation,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Step 1: store each peer's piece of x in its slot `rank`, and signal all."""
    lanes, peers = signals.peer_lanes(rank + 1, WORLD_SIZE)
    slots = _slot_ptr(link, peers, rank, slot_size, generation, x_ptr.dtype.element_ty)
    sizes = tl.where(lanes < WORLD_SIZE - 1, element(pieces.sizes, peers, WORLD_SIZE), 0)
    _copy_pieces(slots, _piece_ptr(x_ptr, pieces, peers, WORLD_SIZE, ALIGN), sizes, BLOCK, ALIGN)
    signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 0, tl.program_id(0), generation)


@triton.jit
def _receive_pieces(
    out_ptr,
    pieces,
    link,
    slot_size,
    rank,
    generation,
    PHASE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Copy the peers' pieces to out once announced: slots in phase 0, finished pieces in 1."""
    if signals.wait_for_peers(
        link.signal_ptrs, rank, WORLD_SIZE, PHASE, tl.program_id(0), generation, link.timeout_ns
    ):
        lanes, peers = signals.peer_lanes(rank + 1, WORLD_SIZE)
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        slots = _slot_ptr(link, rank, PHASE * WORLD_SIZE + peers, slot_size, generation, dtype)
        sizes = tl.where(lanes < WORLD_SIZE - 1, element(pieces.sizes, peers, WORLD_SIZE), 0)
        into = _piece_ptr(out_ptr, pieces, peers, WORLD_SIZE, ALIGN)
        _copy_pieces(into, slots, sizes, BLOCK, ALIGN)


@triton.jit(do_not_specialize=["rank"])
def _exchange_kernel(
    out_ptr,
    x_ptr,
    sent,  # Pieces of x, one for each rank
    received,  # Pieces of out, one from each rank
    link,
    slot_size,
    rank,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    SPOILS: tl.constexpr,  # whether words are parts of floating-point numbers
) -> None:
    """Every piece to its rank: all_gather, all_to_all. Sizes in elements. Grid: `config.programs`.

    Example: rank 0 of 2, x = [1 2 3], sent ((0, 2), (2, 1)), received sizes (2, 4): [1 2] goes to
    where received starts for rank 0, [3] to rank 1, and 4 elements come from there.
    """
    generation = signals.begin_call(link.signal_ptrs, rank)
    _send_pieces(x_ptr, sent, link, slot_size, rank, generation, WORLD_SIZE, BLOCK, ALIGN)
    own = rank + tl.arange(0, 1)
    _copy_pieces(
        _piece_ptr(out_ptr, received, own, WORLD_SIZE, ALIGN),
        _piece_ptr(x_ptr, sent, own, WORLD_SIZE, ALIGN),
        element(sent.sizes, own, WORLD_SIZE),
        BLOCK,
        ALIGN,
    )
    _receive_pieces(
        out_ptr, received, link, slot_size, rank, generation, 0, WORLD_SIZE, BLOCK, ALIGN
    )
    if signals.end_call(link.signal_ptrs, rank, generation):
        for r in tl.static_range(WORLD_SIZE):
            signals.spoil(out_ptr + received.starts[r], received.sizes[r], SPOILS)


@triton.jit
def combined(a, b, OP: tl.constexpr):
    """a op b, NaN where either is."""
    if OP == "max":
        result = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "min":
        result = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "product":
        result = a * b
    else:
        result = a + b
    return result


@triton.jit
def _term(own_ptr, slots, slot_size, offs, mask, rank, r, ALIGN: tl.constexpr):
    """Elements `offs` of rank r's piece for this rank."""
    slot = slots + r * tl.cast(slot_size, tl.int64)
    pointer = either_ptr(rank == r, own_ptr, slot)
    return tl.load(tl.multiple_of(pointer, ALIGN) + offs, mask=mask)


@triton.jit
def _reduce_elements(
    out_ptr,  # where this rank's reduced piece begins
    own_ptr,  # where its own piece for itself begins
    offs,
    mask,
    link,
    slot_size,
    rank,
    generation,
    WORLD_SIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    OP: tl.constexpr,
    TWO_SHOT: tl.constexpr,
):
    """Reduce elements `offs` of all ranks' pieces for this one, in rank order, and store them."""
    dtype: tl.constexpr = own_ptr.dtype.element_ty
    slots = _slot_ptr(link, rank, 0, slot_size, generation, dtype)
    half: tl.constexpr = dtype == tl.float16 or dtype == tl.bfloat16
    wide: tl.constexpr = tl.float32 if half else dtype
    total = _term(own_ptr, slots, slot_size, offs, mask, rank, 0, ALIGN).to(wide)
    for r in tl.static_range(1, WORLD_SIZE):
        term = _term(own_ptr, slots, slot_size, offs, mask, rank, r, ALIGN).to(wide)
        total = combined(total, term, OP)
    if OP == "avg":
        total = divided(total, WORLD_SIZE)
    if half:
        total = rounded(total, dtype)
    tl.store(out_ptr + offs, total, mask=mask)
    if TWO_SHOT:
        for step in range(1, WORLD_SIZE):
            peer = (rank + step) % WORLD_SIZE
            finished = _slot_ptr(link, peer, WORLD_SIZE + rank, slot_size, generation, dtype)
            tl.store(finished + offs, total, mask=mask)


@triton.jit(do_not_specialize=["rank"])
def _reduce_kernel(
    out_ptr,
    x_ptr,
    pieces,  # Pieces of x, one for each rank
    link,
    slot_size,
    rank,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    OP: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    SPOILS: tl.constexpr,
) -> None:
    """out = the pieces for this rank, reduced; if TWO_SHOT, all pieces, each reduced by its rank.

    Sizes in elements. Grid: `config.programs`.

    Example: 2 ranks, x = [1 2 3] on both, pieces ((0, 2), (2, 1)): out = [2 4] on rank 0 and [6] on
    rank 1; if TWO_SHOT, [2 4 6] on both.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.begin_call(link.signal_ptrs, rank)
    _send_pieces(x_ptr, pieces, link, slot_size, rank, generation, WORLD_SIZE, BLOCK, ALIGN)
    arrived = signals.wait_for_peers(
        link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation, link.timeout_ns
    )
    if arrived:
        into = _piece_ptr(out_ptr, pieces, rank, WORLD_SIZE, ALIGN) if TWO_SHOT else out_ptr
        into = tl.multiple_of(into, ALIGN)
        own_ptr = _piece_ptr(x_ptr, pieces, rank, WORLD_SIZE, ALIGN)
        size = element(pieces.sizes, rank, WORLD_SIZE)
        whole = _vectors(size, ALIGN, x_ptr.dtype.element_ty.primitive_bitwidth // 8)
        for block in range(program, cdiv(whole, BLOCK), programs):
            offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            _reduce_elements(
                into, own_ptr, offs, offs < whole, link, slot_size, rank, generation,
                WORLD_SIZE, ALIGN, OP, TWO_SHOT,
            )  # fmt: skip
        if program == whole // BLOCK % programs:
            offs = tl.cast(whole, tl.int64) + tl.arange(0, 16)
            _reduce_elements(
                into, own_ptr, offs, offs < size, link, slot_size, rank, generation,
                WORLD_SIZE, ALIGN, OP, TWO_SHOT,
            )  # fmt: skip
        if TWO_SHOT:
            signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 1, program, generation)
            _receive_pieces(
                out_ptr, pieces, link, slot_size, rank, generation, 1, WORLD_SIZE, BLOCK, ALIGN
            )
    if signals.end_call(link.signal_ptrs, rank, generation):
        if TWO_SHOT:
            for r in tl.static_range(WORLD_SIZE):
                signals.spoil(out_ptr + pieces.starts[r], pieces.sizes[r], SPOILS)
        else:
            signals.spoil(out_ptr, element(pieces.sizes, rank, WORLD_SIZE), SPOILS)


def alignment(itemsize: int, addresses: Sequence[int], counts: Sequence[int]) -> int:
    """Bytes, 16 at most, that divide all addresses, and all counts of elements."""
    values = [*addresses, *(count * itemsize for count in counts)]
    return next(align for align in (16, 8, 4, 2, 1) if all(v % align == 0 for v in values))


def has_nan(dtype: torch.dtype) -> bool:
    """Whether a tensor of that dtype can tell of what was not computed."""
    return dtype.is_floating_point or dtype.is_complex


def as_words(x: torch.Tensor, word: int) -> torch.Tensor:
    """The memory of a contiguous x in words of so many bytes; any stride where it is of one."""
    return x.view(-1).unsqueeze(-1).view(torch.uint8).view(-1).view(_WORDS[word])


def launch_exchange(
    x: torch.Tensor,
    out: torch.Tensor,
    ws: Workspace,
    send_at: Sequence[int],
    sends: Sequence[int],
    receives: Sequence[int],
    widest: int,
    config: CollectiveConfig,
) -> None:
    """Enqueue: piece p of `x` goes to rank p, the pieces received lie in `out` in rank order.

    Args:
        x, out: contiguous, of any dtype, the same on all ranks.
        send_at, sends: where each rank's piece begins in x, and its size, in elements.
        receives: size of each rank's piece for this one.
        widest: size of the largest piece of all ranks.
        config: the same on all ranks.
    """

    def launched() -> tuple[torch.Tensor, ...]:
        size = x.element_size()
        needed = workspace_bytes(widest * size, ws.world_size, config)
        check_room(ws, needed, "workspace_bytes(bytes of the largest piece, world_size, config)")
        receive_at = offsets(receives)
        # Bytes are copied in the widest words that divide every piece, to 16 bytes at a time.
        counts = [*send_at, *sends, *receive_at, *receives]
        counts += [int(x.storage_offset()), int(out.storage_offset())]  # for the views as words
        align = alignment(size, [x.data_ptr(), out.data_ptr()], counts)
        word = min(align, 8)

        def words(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(value * size // word for value in values)

        launching(_exchange_kernel, config.programs)(
            as_words(out, word),
            as_words(x, word),
            Pieces(words(send_at), words(sends)),
            Pieces(words(receive_at), words(receives)),
            link_of(ws),
            _slot_bytes(widest * size) // word,
            ws.rank,
            WORLD_SIZE=ws.world_size,
            BLOCK=config.block_bytes // word,
            ALIGN=align,
            SPOILS=has_nan(out.dtype),
            num_warps=config.num_warps,
        )
        return ()

    operands = _apart(x, out)
    sizes = *send_at, *sends, *receives, widest
    ws.repeat(("exchange", sizes, config, layouts_of(operands)), operands, launched)


def _apart(x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Both, or what they both are."""
    return (x,) if x.data_ptr() == out.data_ptr() else (x, out)


def launch_all_gather(
    x: torch.Tensor,
    out: torch.Tensor,
    ws: Workspace,
    sizes: Sequence[int],
    config: CollectiveConfig,
) -> None:
    """Enqueue: out = every rank's x, of sizes[rank] elements, in rank order."""
    W, own = ws.world_size, sizes[ws.rank]
    launch_exchange(x, out, ws, [0] * W, [own] * W, sizes, max(sizes), config)


def launch_reduce(
    x: torch.Tensor,
    out: torch.Tensor,
    ws: Workspace,
    sizes: Sequence[int] | None,
    op: str,
    config: CollectiveConfig,
) -> None:
    """Enqueue out = x reduced over the ranks by `op`: this rank's piece, or all without `sizes`.

    Args:
        x: contiguous, of a dtype in REDUCED; the same size and dtype on all ranks.
        out: contiguous; without `sizes` it may be x.
        sizes: elements of x that each rank gets, in rank order.
        config: the same on all ranks; `two_shot` needs `sizes` to be None.
    """

    def launched() -> tuple[torch.Tensor, ...]:
        W, itemsize = ws.world_size, x.element_size()
        count = x.numel()
        if sizes is not None:
            shares, starts, widest = tuple(sizes), tuple(offsets(sizes)), max(sizes)
        elif config.two_shot:
            vector = max(1, 16 // itemsize)
            share = -(-count // (W * vector)) * vector
            starts = tuple(min(rank * share, count) for rank in range(W))
            shares = tuple(min(start + share, count) - start for start in starts)
            widest = share
        else:
            shares, starts, widest = (count,) * W, (0,) * W, count
        nbytes = (count if sizes is None else widest) * itemsize
        needed = workspace_bytes(nbytes, W, config)
        how = "workspace_bytes(bytes, world_size, config), as collective_config counts them"
        check_room(ws, needed, how)
        launching(_reduce_kernel, config.programs)(
            out,
            x,
            Pieces(starts, shares),
            link_of(ws),
            _slot_bytes(widest * itemsize) // itemsize,
            ws.rank,
            WORLD_SIZE=W,
            BLOCK=config.block_bytes // itemsize,
            ALIGN=alignment(itemsize, [x.data_ptr(), out.data_ptr()], starts),
            OP=op,
            TWO_SHOT=config.two_shot,
            SPOILS=has_nan(out.dtype),
            num_warps=config.num_warps,
        )
        return ()

    operands = _apart(x, out)
    cut = None if sizes is None else (*sizes,)
    ws.repeat((op, cut, config, layouts_of(operands)), operands, launched)
