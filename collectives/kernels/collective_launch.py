"""How the kernels of `kernel_collectives`, and `flagged_reduce`, are launched, when, and the memory
that they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import torch
import triton

from weft import settings
from weft.collectives.device.launches import launching, layouts_of
from weft.collectives.kernels.flagged_reduce import flagged_reduce_kernel
from weft.collectives.kernels.kernel_collectives import exchange_kernel, reduce_kernel
from weft.collectives.kernels.pieces import Pieces
from weft.collectives.memory.workspace import Workspace, check_room, link_of
from weft.collectives.protocols import KERNEL_US, Collective, Fabric, kernel_us, nccl_us, switch_us
from weft.collectives.ranks.chunks import offsets

REDUCED = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
IN_WORDS = torch.float32, torch.bfloat16, torch.float16  # sums that words with flags may carry
# By size in bytes: data that is only copied is copied in the widest words its addresses allow.
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_SLOT_ALIGN = 128
Kind = Literal["triton", "switch", "generic"]


@dataclass(frozen=True)
class CollectiveConfig:
    """How a collective is launched; the same on all ranks.

    Attributes:
        block_bytes: what a program moves at a time, to or from each rank.
        programs: grid.
        num_warps: of a program.
        two_shot: whether each element of an all_reduce is added up by one rank only.
        all_registers: of NVIDIA's chips, for sums: otherwise 32 bytes spill on sm_100, so that a
            core could hold a second program.
        by_words: of an all_reduce, whether words carry their flags, by `flagged_reduce`.
    """

    block_bytes: int
    programs: int
    num_warps: int = 8
    two_shot: bool = False
    all_registers: bool = False
    by_words: bool = False

    @property
    def channel(self) -> str:
        """Of the workspace: words have one of their own, in which nothing else may be stored."""
        return "flagged kernels" if self.by_words else "kernels"


# One shot receives (W - 1) times the bytes, two shots about twice, but pay a second crossing: in
# virtual time they meet at some 230 KiB on 8 H100, and above that on MI300X.
_ONE_SHOT_BYTES = 224 << 10
# Of a half of the workspace: what the quicker kernel is worth, beside the model's own memory.
_MOST_ROOM = 128 << 20
# Each of 256 threads then has 16 bytes for each rank in flight, and 64 programs what a link of 450
# GB/s carries to 8 ranks in about 4 us.
_BLOCK_BYTES, _PROGRAMS = 4 << 10, 64
# By words that carry their flags: the least of which each of 128 threads has words of its own.
_WORDS_BLOCK_BYTES = 1 << 10
# Then twice the bytes take longer than two acknowledgements, on NVLink of an H100.
_MOST_WORDS_BYTES = 384 << 10
WORDS_ROOM = 2 << 20  # of a half of the workspace: the most that any of these needs


def within_budget(programs: int) -> int:
    """A grid of so many programs on a GPU, or what WEFT_SMS leaves of it."""
    return min(programs, settings.sms() or programs)


def collective_config(
    op: str,
    nbytes: int,
    world_size: int,
    on_gpus: bool,
    *,
    links: Fabric | None = None,
    words: bool = False,
) -> CollectiveConfig:
    """The launch of `op`, from what is the same on every rank.

    Args:
        nbytes: size of the largest piece in one shot: for all_reduce, of the input.
        on_gpus: `Group.on_gpus` of the tensors' device. Virtual ranks that stand for a chip are
            launched as on that chip, though their tensors are on a CPU.
        links: of GPUs, by which the shots of an all_reduce are chosen; None: by its size.
        words: whether words may carry their flags where that is predicted to be quicker: in an
            all_reduce of sums of IN_WORDS, on chips of NVIDIA.
    """
    interpreted, by_words = not on_gpus, False
    one_shot_bytes = 256 if interpreted else _ONE_SHOT_BYTES
    two_shot = op == "all_reduce" and world_size > 2 and nbytes > one_shot_bytes
    if op == "all_reduce" and links and on_gpus and world_size > 1:
        # A program holds a block for all ranks at once: few enough registers for 8.
        words = words and world_size <= 8 and 0 < nbytes <= _MOST_WORDS_BYTES
        two_shot, by_words = _quickest_shots(nbytes, links, words)
    if by_words:
        return words_config(nbytes, world_size, two_shot)
    piece = -(-nbytes // world_size) if two_shot else nbytes
    block, most = _BLOCK_BYTES, within_budget(_PROGRAMS)
    if interpreted:
        # Up to eight blocks a program: an interpreted block takes equally long however wide it is.
        block, most = min(max(64, triton.next_power_of_2(-(-piece // 24))), 1 << 16), 3
    programs = max(1, min(most, -(-piece // block)))
    nvidia = not interpreted and torch.version.hip is None
    return CollectiveConfig(block, programs, 4 if interpreted else 8, two_shot, nvidia)


@lru_cache(maxsize=4096)
def _quickest_shots(nbytes: int, fabric: Fabric, words: bool) -> tuple[bool, bool]:
    """Whether an all_reduce is predicted to be the quickest in two shots, and by words."""
    ways = [(False, False)]
    if fabric.ranks > 2:
        ways.append((True, False))
    if words and 2 * fabric.ranks * nbytes <= WORDS_ROOM:
        ways.append((False, True))
    if words and fabric.ranks > 2:
        ways.append((True, True))

    def us(way: tuple[bool, bool]) -> float:
        return kernel_us("all_reduce", nbytes, fabric, two_shot=way[0], by_words=way[1])

    return min(ways, key=us)


def words_config(nbytes: int, world_size: int, two_shot: bool) -> CollectiveConfig:
    """The launch of an all_reduce on GPUs whose words carry their flags."""
    blocks = -(-nbytes // _WORDS_BLOCK_BYTES)
    programs = within_budget(min(_PROGRAMS, -(-blocks // world_size) if two_shot else blocks))
    return CollectiveConfig(_WORDS_BLOCK_BYTES, programs, 4, two_shot, True, by_words=True)


@lru_cache(maxsize=4096)
def quickest_way(
    op: Collective, nbytes: int, fabric: Fabric, config: CollectiveConfig, *, switch: bool
) -> tuple[Kind, float, str]:
    """Which way is predicted to take the least on GPUs: "triton", a kernel of `kernel_collectives`,
    "switch", one of `multimem`, or "generic", the process group's library; its us, and why.

    Args:
        nbytes: as for `collective_config`.
        fabric: the same on all ranks.
        switch: whether the NVLink switch may add up or copy, where there is one.
    """
    W = fabric.ranks
    whole = nbytes if op == "all_reduce" else nbytes * W
    us: dict[Kind, float] = {}
    launches = max(1, len(windows(nbytes, 1, W, config)))
    us["triton"] = kernel_us(op, whole, fabric, two_shot=config.two_shot, by_words=config.by_words)
    us["triton"] += (launches - 1) * KERNEL_US
    parts = len(switch_windows(whole, 1))
    if switch and fabric.multicast and (op == "all_reduce" or parts <= 1) and op != "all_to_all":
        us["switch"] = switch_us(op, whole, fabric, in_graph=True) + max(parts - 1, 0) * KERNEL_US
    if W > 1:
        us["generic"] = nccl_us(op, whole, fabric)
    best = min(us, key=lambda kind: us[kind])
    names = {"triton": "by a kernel", "switch": "by the switch", "generic": "by NCCL"}
    told = ", ".join(f"{us[kind]:.3g} us {names[kind]}" for kind in us)
    if launches > 1:
        told += f"; a kernel is launched {launches} times, for {_MOST_ROOM} bytes of workspace"
    return best, us[best], f"predicted {told}"


def windows(
    widest: int, itemsize: int, world_size: int, config: CollectiveConfig
) -> list[tuple[int, int]]:
    """Equal parts of each rank's piece, that one launch after another moves: as few as fit into
    what a half of the workspace has at most. Of no elements none.

    Args:
        widest: elements of the largest piece in one shot.
    """
    slots = 2 if config.two_shot else world_size
    room = (_MOST_ROOM // slots - 2 * world_size * _SLOT_ALIGN) // itemsize
    return _parts_of_most(widest, room)


def switch_windows(count: int, itemsize: int) -> list[tuple[int, int]]:
    """The same of an all_reduce of `count` elements by the switch: of each a half of the workspace
    holds the terms and the sums.
    """
    return _parts_of_most(count, _MOST_ROOM // 2 // itemsize)


def _parts_of_most(count: int, most: int) -> list[tuple[int, int]]:
    """As few as have at most `most` elements; they begin at multiples of _SLOT_ALIGN."""
    most = max(1, most // _SLOT_ALIGN) * _SLOT_ALIGN
    part = -(-count // max(1, -(-count // most)))
    step = -(-part // _SLOT_ALIGN) * _SLOT_ALIGN
    return list(pairwise([*range(0, count, max(1, step)), count]))


def piece_room(nbytes: int) -> int:
    """Of a half of the workspace, what a piece of `nbytes` takes."""
    return -(-nbytes // _SLOT_ALIGN) * _SLOT_ALIGN


def workspace_bytes(nbytes: int, world_size: int, config: CollectiveConfig) -> int:
    """Symmetric memory that a call needs on each rank; `nbytes` as for `collective_config`."""
    if config.by_words:
        blocks = -(-nbytes // config.block_bytes)
        share = -(-blocks // world_size) if config.two_shot else blocks
        return 2 * config.block_bytes * (world_size * share + blocks * config.two_shot)
    if config.two_shot:
        return 2 * world_size * piece_room(-(-nbytes // world_size) + 16)
    return world_size * piece_room(nbytes)


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
    window: tuple[int, int] | None = None,
) -> None:
    """Enqueue: piece p of `x` goes to rank p, the pieces received lie in `out` in rank order.

    Args:
        x, out: contiguous, of any dtype, the same on all ranks.
        send_at, sends: where each rank's piece begins in x, and its size, in elements.
        receives: size of each rank's piece for this one.
        widest: size of the largest piece of all ranks.
        config: the same on all ranks.
        window: of every piece only these elements; the same on all ranks.
    """
    window = window or (0, widest)
    widest = window[1] - window[0]
    leave, sends = _cut_to(window, send_at, sends)
    arrive, receives = _cut_to(window, offsets(receives), receives)

    def launched() -> tuple[torch.Tensor, ...]:
        size = x.element_size()
        needed = workspace_bytes(widest * size, ws.world_size, config)
        check_room(ws, needed, "workspace_bytes(bytes of the largest piece, world_size, config)")
        # Bytes are copied in the widest words that divide every piece, to 16 bytes at a time.
        counts = [*leave, *sends, *arrive, *receives]
        counts += [int(x.storage_offset()), int(out.storage_offset())]  # for the views as words
        align = alignment(size, [x.data_ptr(), out.data_ptr()], counts)
        word = min(align, 8)

        def words(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(value * size // word for value in values)

        launching(exchange_kernel, config.programs)(
            as_words(out, word),
            as_words(x, word),
            Pieces(words(leave), words(sends)),
            Pieces(words(arrive), words(receives)),
            link_of(ws),
            piece_room(widest * size) // word,
            ws.rank,
            WORLD_SIZE=ws.world_size,
            BLOCK=config.block_bytes // word,
            ALIGN=align,
            SPOILS=has_nan(out.dtype),
            num_warps=config.num_warps,
        )
        return ()

    operands = _apart(x, out)
    sizes = *leave, *sends, *arrive, *receives, widest
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
    window: tuple[int, int] | None = None,
) -> None:
    """Enqueue: out = every rank's x, of sizes[rank] elements, in rank order; of each only those in
    `window`, if given, which is the same on all ranks.
    """
    W, own = ws.world_size, sizes[ws.rank]
    launch_exchange(x, out, ws, [0] * W, [own] * W, sizes, max(sizes), config, window)


def _cut_to(
    window: tuple[int, int], starts: Sequence[int], sizes: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Where the elements of a window begin that lie in pieces of these starts and sizes, and how
    many there are in each.

    Example:
        (4, 8) of pieces of 10, 5 and 2, one behind the other: 4, 1 and 0 elements from 4, 14, 17.
    """
    start, stop = window
    firsts = [min(start, size) for size in sizes]
    counts = [min(stop, size) - first for size, first in zip(sizes, firsts, strict=True)]
    return [*map(sum, zip(starts, firsts, strict=True))], counts


def launch_reduce(
    x: torch.Tensor,
    out: torch.Tensor,
    ws: Workspace,
    sizes: Sequence[int] | None,
    op: str,
    config: CollectiveConfig,
    window: tuple[int, int] | None = None,
) -> None:
    """Enqueue out = x reduced over the ranks by `op`: this rank's piece, or all without `sizes`.

    Args:
        x: contiguous, of a dtype in REDUCED; the same size and dtype on all ranks.
        out: contiguous; without `sizes` it may be x.
        sizes: elements of x that each rank gets, in rank order.
        config: the same on all ranks; `two_shot` and `by_words` need `sizes` to be None, and
            `by_words` an op and a dtype that words may carry, and one element at least.
        window: of every piece only these elements, which are all of `out`; the same on all ranks.
    """

    def launched() -> tuple[torch.Tensor, ...]:
        W, itemsize = ws.world_size, x.element_size()
        count = x.numel()
        options = {"maxnreg": 255} if config.all_registers else {}
        how = "workspace_bytes(bytes, world_size, config), as collective_config counts them"
        if config.by_words:
            check_room(ws, workspace_bytes(count * itemsize, W, config), how)
            launching(flagged_reduce_kernel, config.programs)(
                out, x, link_of(ws), count, ws.rank, WORLD_SIZE=W,
                BLOCK=config.block_bytes // itemsize, OP=op, TWO_SHOT=config.two_shot,
                num_warps=config.num_warps, **options,
            )  # fmt: skip
            return ()
        if sizes is not None:
            at, parts = _cut_to(window or (0, max(sizes)), offsets(sizes), sizes)
            shares, starts, widest = tuple(parts), tuple(at), max(parts)
        elif config.two_shot:
            vector = max(1, 16 // itemsize)
            share = -(-count // (W * vector)) * vector
            starts = tuple(min(rank * share, count) for rank in range(W))
            shares = tuple(min(start + share, count) - start for start in starts)
            widest = share
        else:
            shares, starts, widest = (count,) * W, (0,) * W, count
        nbytes = (count if sizes is None else widest) * itemsize
        check_room(ws, workspace_bytes(nbytes, W, config), how)
        launching(reduce_kernel, config.programs)(
            out,
            x,
            Pieces(starts, shares),
            link_of(ws),
            piece_room(widest * itemsize) // itemsize,
            ws.rank,
            WORLD_SIZE=W,
            BLOCK=config.block_bytes // itemsize,
            ALIGN=alignment(itemsize, [x.data_ptr(), out.data_ptr()], starts),
            OP=op,
            TWO_SHOT=config.two_shot,
            SPOILS=has_nan(out.dtype),
            num_warps=config.num_warps,
            **options,
        )
        return ()

    operands = _apart(x, out)
    cut = None if sizes is None else (*sizes,)
    ws.repeat((op, cut, window, config, layouts_of(operands)), operands, launched)
