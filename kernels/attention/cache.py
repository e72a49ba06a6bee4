"""A rank's part of a key/value cache, and what is checked before it is queried or extended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from weft.collectives import Group
from weft.collectives.memory.exchange import agree
from weft.kernels.engine.fp8 import FP8

Shard: TypeAlias = Literal["sequence", "head"] | None


@dataclass(frozen=True)
class Cache:
    """This rank's part of a cache.

    Attributes:
        k, v: (B, H_kv, S, D); with a table (pages, H_kv, P, D).
        table: (B, blocks) int32: page of each local block of each sequence; None: not paged.
        block: P.
        rank, world_size: tell which blocks these are: global block g lies on rank g % world_size.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None
    block: int
    rank: int
    world_size: int

    @property
    def room(self) -> int:
        """Tokens of a sequence that this part can hold."""
        return self.k.shape[2] if self.table is None else self.table.shape[1] * self.block

    def seen(self, limit: int) -> int:
        """How many of this rank's tokens lie before position `limit`; they are always a prefix.

        Example: blocks of 4 on 2 ranks, limit 11: rank 0 has 0..3 and 8..10, 7 tokens.
        """
        rounds, rest = divmod(max(limit, 0), self.block * self.world_size)
        return rounds * self.block + min(max(rest - self.rank * self.block, 0), self.block)

    def keys(self, rows: slice, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values first .. end - 1 of some sequences, (rows, H_kv, end - first, D)."""
        if self.table is None:
            return self.k[rows, :, first:end], self.v[rows, :, first:end]
        skipped = first // self.block
        pages = self.table[rows, skipped : -(-end // self.block)].long()
        span = slice(first - skipped * self.block, end - skipped * self.block)
        k, v = (x[pages].transpose(1, 2).flatten(2, 3)[:, :, span] for x in (self.k, self.v))
        return k, v


def checked_cache(
    name: str,
    x: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    shard: Shard,
    block_size: int | None,
    table: torch.Tensor | None,
    group: Group,
) -> Cache:
    """This rank's part of the cache that x (B, .., T, D) queries or extends, after all checks.

    `name` is what x is called in errors.
    """
    shapes = f"got {name} {tuple(x.shape)}, caches {tuple(k.shape)} and {tuple(v.shape)}"
    if shard not in ("sequence", "head", None):
        raise ValueError(f'shard must be "sequence", "head" or None, got {shard!r}')
    if x.ndim != 4 or k.ndim != 4 or k.shape != v.shape or k.shape[3] != x.shape[3]:
        raise ValueError(
            f"{name} must be (B, heads, T, D), the caches (B or pages, H_kv, S or P, D), {shapes}"
        )
    if not x.shape[3] or k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError(f"D must be at least 1, and contiguous in the caches, {shapes}")
    narrow = (FP8,) if name == "q" and k.dtype == v.dtype else ()
    for of, other in (("k_cache", k), ("v_cache", v)):
        if other.dtype not in (x.dtype, *narrow) or other.device != x.device:
            either = f" (or {FP8} in both caches)" if name == "q" else ""
            raise ValueError(
                f"{of} must have {name}'s dtype and device, {x.dtype} on {x.device}{either}, got "
                f"{other.dtype} on {other.device}"
            )
    if not x.dtype.is_floating_point:
        raise ValueError(f"{name} and the caches must be of a floating-point dtype, got {x.dtype}")
    _check_lengths(name, x, lengths, table)
    if table is not None and block_size not in (None, k.shape[2]):
        raise ValueError(
            f"pages hold {k.shape[2]} tokens, dim 2 of the caches: leave out {block_size=}"
        )
    if table is None and k.shape[0] != x.shape[0]:
        raise ValueError(f"the caches must hold the {x.shape[0]} sequences of {name}, {shapes}")
    if table is None and block_size is not None and (block_size < 1 or k.shape[2] % block_size):
        raise ValueError(f"{block_size=} must divide the {k.shape[2]} tokens of the cache")
    ranks = group.world_size if shard == "head" else 1
    if not k.shape[1] or x.shape[1] % (k.shape[1] * ranks):
        raise ValueError(
            f"H_kv, here on each of {ranks} ranks, must be at least 1 and divide {name}'s heads, "
            f"{shapes}"
        )
    block = k.shape[2] if table is not None or block_size is None else block_size
    split = (0, 1) if shard == "head" else (group.rank, group.world_size)
    return Cache(k, v, table, max(block, 1), *split)


def _check_lengths(
    name: str, x: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor | None
) -> None:
    """Raise ValueError unless `lengths` and `table` are of the sequences of x."""
    B = x.shape[0]
    if not isinstance(lengths, torch.Tensor):
        raise ValueError(f"lengths must be a tensor, got {type(lengths).__name__}")
    if lengths.shape != (B,) or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"lengths must be ({B},) int32 or int64, got {tuple(lengths.shape)} {lengths.dtype}"
        )
    for of, where in (("lengths", lengths), ("block_table", table)):
        if where is not None and where.device != x.device:
            raise ValueError(f"{of} must be on {x.device}, as {name} is, got {where.device}")
    if table is None:
        return
    if table.ndim != 2 or table.shape[0] != B or table.dtype != torch.int32:
        raise ValueError(
            f"block_table must be ({B}, blocks) int32, got {tuple(table.shape)} {table.dtype}"
        )


def host_reads(lengths: torch.Tensor) -> bool:
    """Whether calls look at the lengths first: on a GPU the host would have to wait for them."""
    return not lengths.is_cuda


def check_capacity(
    cache: Cache, lengths: torch.Tensor, group: Group, op: str, oldest: int | None
) -> None:
    """Raise on every rank if the caches of one cannot hold the sequences, if the host reads these.

    Args:
        oldest: how many tokens at the end of each sequence are read; None: all.
    """
    if not host_reads(lengths) or not lengths.numel():
        return
    why = _no_room(cache, lengths, oldest)
    if not group.why:  # their caches may differ in size
        fits = agree(group, op, not why)
        if not (why or all(fits)):
            rank = fits.index(0)
            why = (
                f"lengths and block_table must fit the caches of every rank: not so on rank {rank}"
            )
    if why:
        raise ValueError(why)


def _no_room(cache: Cache, lengths: torch.Tensor, oldest: int | None) -> str:
    """Why this rank's cache cannot hold the sequences; empty if it can."""
    tokens = lengths.tolist()
    needed = cache.seen(max(tokens))
    if needed > cache.room or min(tokens) < 0:
        return (
            f"lengths must be >= 0 and fit the caches: of {max(tokens)} tokens rank "
            f"{cache.rank} would hold {needed}, and has room for {cache.room}"
        )
    if cache.table is not None and needed:
        pages = cache.k.shape[0]
        low, high = (int(end) for end in cache.table.aminmax())
        if low < 0 or high >= pages:  # entries of blocks that are not read may be anything
            read = []
            for row, length in zip(cache.table.tolist(), tokens, strict=True):
                first = 0 if oldest is None else cache.seen(length - oldest)
                read += row[first // cache.block : -(-cache.seen(length) // cache.block)]
            if any(page < 0 or page >= pages for page in read):
                return (
                    f"block_table must name pages 0..{pages - 1} for all blocks up to lengths, got "
                    f"{read[:8]}{' ...' if len(read) > 8 else ''}"
                )
    return ""
