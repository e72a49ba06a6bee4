"""The boxes of a pull: the blocks that a rank takes, and their table, as the kernel reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.collectives.memory.backends import persistent

HEAD = 5  # numel, target offset, source offset, first holder, holders; then three a dim


@dataclass(frozen=True)
class Box:
    """A block to take. Offsets and strides in elements.

    Attributes:
        holders: ranks of the group that have it, in the order in which they are reduced.
        extents: its size along each dim.
        source_at, source_strides: where it lies in the contiguous x of each holder.
        target_at, target_strides: where it goes in the contiguous output.
    """

    holders: tuple[int, ...]
    extents: tuple[int, ...]
    source_at: int
    source_strides: tuple[int, ...]
    target_at: int
    target_strides: tuple[int, ...]


@dataclass(frozen=True)
class BoxTable:
    """Boxes as the kernel reads them. Made by `table_of`.

    Attributes:
        rows: int64, one row for each box, those that lie in this rank's own x first.
        holders: int64, the ranks of all boxes.
        local: how many boxes need no peer.
        dims: dims of a box.
        word: bytes of an element; copies use wider elements than the tensor's.
        op: "copy", or the reduction.
        divisor: of the result.
    """

    rows: torch.Tensor
    holders: torch.Tensor
    local: int
    dims: int
    word: int
    op: str
    divisor: int


def _merged(box: Box, itemsize: int) -> list[list[int]]:
    """[extent, target stride, source stride] in bytes, outermost first, in as few dims as possible.

    The innermost one is of single bytes.
    """
    dims = [[itemsize, 1, 1]]
    steps = zip(box.extents, box.target_strides, box.source_strides, strict=True)
    for extent, target, source in reversed(list(steps)):
        size, inner_target, inner_source = dims[0]
        target, source = target * itemsize, source * itemsize
        if extent == 1:
            continue
        if target == size * inner_target and source == size * inner_source:
            dims[0][0] = size * extent
        else:
            dims.insert(0, [extent, target, source])
    return dims


def table_of(
    boxes: Sequence[Box],
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    op: str | None = None,
    divisor: int = 1,
    align: int = 16,
) -> BoxTable:
    """What `rank` is to take, made once for all calls with the same layouts.

    Args:
        op: reduction of boxes with several holders; None if there are none.
        divisor: by which every element is divided.
        align: bytes that divide the addresses of x and out.
    """
    size = dtype.itemsize
    copies = op is None or (divisor == 1 and all(len(box.holders) == 1 for box in boxes))
    dims = [_merged(box, size) for box in boxes]
    word = size
    common = math.gcd(
        *(at * size for box in boxes for at in (box.source_at, box.target_at)),
        *(merged[-1][0] for merged in dims),
        *(step for merged in dims for _, *steps in merged[:-1] for step in steps),
    )
    while copies and word < min(align, 8) and common % (2 * word) == 0:
        word *= 2
    count = max((len(merged) for merged in dims), default=1)
    rows: list[list[int]] = []
    holders: list[int] = []
    order = sorted(range(len(boxes)), key=lambda i: boxes[i].holders != (rank,))
    for i in order:
        box = boxes[i]
        *outer, (inner, _, _) = dims[i]
        places = (math.prod(box.extents), box.target_at, box.source_at)
        row = [place * size // word for place in places] + [len(holders), len(box.holders)]
        for extent, target, source in [[1, 0, 0]] * (count - 1 - len(outer)) + outer:
            row += [extent, target // word, source // word]
        rows.append([*row, inner // word, 1, 1])
        holders += box.holders
    return BoxTable(
        persistent(torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1), device),
        persistent(torch.tensor(holders, dtype=torch.int64, device="cpu"), device),
        sum(box.holders == (rank,) for box in boxes),
        count,
        word,
        "copy" if copies else str(op),
        divisor,
    )
