"""Runs: the indices of a dim that a rank keeps, after cuts from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

Run = tuple[int, int]
Runs = tuple[Run, ...]
Box = tuple[Runs, ...]
Shape = tuple[int, ...]


def is_open(size: Any) -> bool:
    """Whether `size` is a symbol of a graph that is being traced."""
    return isinstance(size, torch.SymInt)


def chunk(length: int, parts: int, index: int) -> Run:
    """(start, length) of part `index` of `torch.chunk`; trailing parts may be empty."""
    if is_open(length) and length % parts == 0:  # adds no other condition to the graph
        return length // parts * index, length // parts
    full = -(-length // parts)
    start = min(length, full * index)
    return start, min(length, start + full) - start


def contiguous_stride(shape: Sequence[int]) -> Shape:
    """Strides of a contiguous tensor of `shape`."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _take(runs: Runs, start: int, length: int) -> list[Run]:
    """The part [start, start + length) of the indices that `runs` lists."""
    taken = []
    for first, size in runs:
        skip = min(start, size)
        use = min(size - skip, length)
        if use > 0:
            taken.append((first + skip, use))
        start -= skip
        length -= use
    return taken


@lru_cache(maxsize=1 << 14)
def runs_of(size: int, cuts: tuple[tuple[int, int, int], ...]) -> Runs:
    """What is left of a dim after cuts (pieces, parts, index), from left to right."""
    if cuts:
        return _cut(runs_of(size, cuts[:-1]), *cuts[-1])
    return ((0, size),) if size else ()


def even_runs(size: int, cuts: tuple[tuple[int, int, int], ...]) -> Runs:
    """`runs_of` for a size that a graph leaves open, which the cuts divide evenly."""
    start, length = 0, size
    for _, parts, index in cuts:
        offset, length = chunk(length, parts, index)
        start += offset
    return ((start, length),)


def _cut(runs: Runs, pieces: int, parts: int, index: int) -> Runs:
    """What rank `index` of `parts` keeps of `runs`: a part of each of `pieces` pieces."""
    total = sum(size for _, size in runs)
    kept: list[Run] = []
    for piece in range(pieces):
        offset, size = chunk(total, pieces, piece)
        start, length = chunk(size, parts, index)
        for run in _take(runs, offset + start, length):
            if kept and kept[-1][0] + kept[-1][1] == run[0]:
                kept[-1] = (kept[-1][0], kept[-1][1] + run[1])
            else:
                kept.append(run)
    return tuple(kept)
