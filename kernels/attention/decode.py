"""flash_decode: attention of a few new tokens to a key/value cache that is sharded across ranks.

W ranks; B sequences, of which the last T tokens query, H query heads and H_kv key heads. Sharded by
sequence, a cache holds every sequence in blocks of P tokens, dealt to the ranks in turn:

    positions   0 .. P-1 | P .. 2P-1 | 2P .. 3P-1 | ...        W = 2
    on rank         0    |     1     |     0      | ...

so that old and new tokens, and the work, are spread over all ranks. Rank r attends to the keys that
it holds and sends (out_r, lse_r), in fp32 or wider, to all; every rank merges them in rank order:

    out = sum over r of exp(lse_r - lse) * out_r,      lse = log(sum over r of exp(lse_r))

so that all ranks have the same bits. Each rank sends B * H * T * (D + 1) numbers, however long the
sequences are. Sharded by head, a rank holds all tokens of its key heads, and gets the results of
other heads from their ranks. With shard=None nothing is exchanged: tensor-parallel layers query
with their own heads alone, and go on with the results of those.

`append_to_cache` stores new tokens where they belong. The kernels are in `decode_kernel` and
`append_kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft import settings
from weft.collectives import Group, all_gather, resolve, workspace
from weft.collectives.device.launches import layouts_of, tell_written
from weft.collectives.memory.checks import check_call
from weft.collectives.memory.repeatable import repeatable
from weft.collectives.profiled import profiled
from weft.collectives.ranks.flight import call_of
from weft.collectives.ranks.group import GroupLike, alone, group_name
from weft.collectives.ranks.reports import check_all
from weft.collectives.ranks.traced import is_call_traced
from weft.kernels.attention.cache import Cache, Shard, check_capacity, checked_cache, host_reads
from weft.kernels.attention.decode_host import attend_locally, merge_ranks, with_lse
from weft.kernels.engine.chips import chip_of
from weft.kernels.engine.engines import Problem, RunnableEngine, choose, too_wide
from weft.kernels.engine.fp8 import FP8
from weft.kernels.engine.local_matmul import sum_dtype
from weft.kernels.engine.plans import Plans

# Of a query of one head: of wider ones not even the smallest tile, 16 queries, fits in a core.
WIDEST_BYTES = 2048


@repeatable
def flash_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    group: GroupLike = None,
    *,
    scale: float | None = None,
    shard: Shard = "sequence",
    block_size: int | None = None,
    block_table: torch.Tensor | None = None,
    window: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of the last T tokens of each sequence to the whole of it, for inference.

    Args:
        q: (B, H, T, D), the same on every rank unless shard is None; T is small, say 1 to 8. Query
            t of sequence b is at position lengths[b] - T + t, and sees the positions up to its own.
        k_cache, v_cache: (B, H_kv, S, D), this rank's part, new tokens included; with a
            `block_table` (pages, H_kv, P, D). Any strides with contiguous D. H_kv divides H. Dtype
            of q, or float8_e4m3fn: if you store k / k_scale and v / v_scale, pass
            `scale * k_scale`, and multiply out by v_scale.
        lengths: (B,) int32 or int64, tokens of each whole sequence, the same on every rank. On a
            GPU, fewer than 2^31 of them lie on each rank.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        scale: of the scores; None: 1 / sqrt(D).
        shard: "sequence": block g of P tokens of every sequence lies on rank g % W, as local block
            g // W. "head": the caches hold all tokens of this rank's share of the key heads, equal
            on all ranks; q still has all heads. None: the caches hold all that q needs, and the
            ranks do not communicate.
        block_size: P, if the cache is not paged; None: S, one block on each rank.
        block_table: (B, blocks) int32, for a paged cache: the page with local block j of b.
        window: the query at position i sees no keys before i - window, as in `ring_attention`. Keys
            before all queries' windows are not read, and their pages may be reused. None: all.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        out (B, H, T, D), dtype of q, bitwise the same on every rank; with `return_lse` the pair
        (out, lse), lse (B, H, T) in fp32, or in fp64 if q is. A query without keys
        (lengths[b] < T) gets 0 and -inf.

    Raises:
        ValueError: shapes or dtypes that do not fit, or sequences longer than the cache (checked
            on a CPU only: on a GPU the host would have to wait).
        NotImplementedError: a gradient is wanted, or an engine was forced that cannot run the call.
        PeerTimeout: a rank did not come.

    Example:
        2 ranks, P = 1, q = 0, lengths 3, values 1, 3 on rank 0 and 5 on rank 1 (positions 0, 2 and
        1) give out = 3 on both.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_cache, v_cache)):
        raise NotImplementedError(
            "flash_decode has no gradient: call it under torch.no_grad(), or ring_attention"
        )
    if is_call_traced(q):  # see `custom_ops`
        op: Any = torch.ops.weft.flash_decode
        out, lse = op(
            q, k_cache, v_cache, lengths, name_of(group, shard), scale, shard or "sequence",
            block_size, block_table, window,
        )  # fmt: skip
        return (out, lse) if return_lse else out
    group = alone() if shard is None else resolve(group)
    by_head = shard == "head"
    operands = q, k_cache, v_cache, lengths, block_table
    layouts = layouts_of(operands) if isinstance(lengths, torch.Tensor) else ()  # an error follows

    def planned() -> _Plan:
        cache = checked_cache(
            "q", q, k_cache, v_cache, lengths, shard, block_size, block_table, group
        )
        T, D = q.shape[2:]
        if window is not None and not (isinstance(window, int) and window >= 0):
            raise ValueError(
                f"window must be a number of tokens >= 0, or None for all, got {window!r}"
            )
        told = q.dtype, q.shape, ("blocks of", cache.block), ("by", shard), ("window", window)
        return _Plan(
            told,
            1 / math.sqrt(D) if scale is None else float(scale),
            (cache.block, cache.rank, cache.world_size),
            None if window is None else T + window,
        )

    asked = group, scale, shard, block_size, window, settings.current_engine()
    plan = _plans.of((*asked, layouts), planned)
    cache = Cache(k_cache, v_cache, block_table, *plan.split)
    check_call(group, lambda: call_of("flash_decode", plan.told).text.decode())
    engine = plan.engine
    if engine is None:
        check_capacity(cache, lengths, group, "flash_decode", plan.oldest)
        engine = choose(_problem(q, cache, lengths, group, plan.oldest), group, q.device)
        if not host_reads(lengths):
            plan.engine = engine
    if by_head:
        q = q.chunk(group.world_size, 1)[group.rank]
    if engine == "triton":
        out, lse = _by_kernel(q, cache, lengths, plan, alone() if by_head else group, window)
    else:
        out, lse = attend_locally(q, cache, lengths, plan.scale, window)
        if not by_head and group.world_size > 1:
            out, lse = merge_ranks(out, lse, group, engine == "generic", plan.told)
    if by_head and group.world_size > 1:
        sizes = [q.shape[1]] * group.world_size
        packed = all_gather(with_lse(out, lse), group, dim=1, sizes=sizes)
        out, lse = packed[..., :-1].contiguous(), packed[..., -1].contiguous()
    out = out.to(q.dtype).contiguous()
    return (out, lse.contiguous()) if return_lse else out


@dataclass(eq=False)
class _Plan:
    """What calls with operands of the same layouts come to.

    Attributes:
        told: what must be the same on every rank.
        split: block, rank and world_size of the cache.
        oldest: as in `check_room`.
        engine: None where it goes by lengths that the host reads.
        room: bytes of the workspace that the kernel needs, once that is known.
    """

    told: tuple[Hashable, ...]
    scale: float
    split: tuple[int, int, int]
    oldest: int | None
    engine: RunnableEngine | None = None
    room: int = -1


_plans = Plans[_Plan](f"{__name__}._plans")


@profiled("flash_decode")
def _by_kernel(
    q: torch.Tensor,
    cache: Cache,
    lengths: torch.Tensor,
    plan: _Plan,
    group: Group,
    window: int | None,
) -> Sequence[torch.Tensor]:
    """out (B, H, T, D) and lse (B, H, T)."""
    from weft.kernels.flash import decode_kernel as kernel

    if plan.room < 0:
        plan.room = kernel.room_for(q, cache, group.world_size)
    ws = workspace(group, plan.room, channel=kernel.CHANNEL, device=q.device)

    def launched() -> tuple[torch.Tensor, ...]:
        return kernel.launch_flash_decode(q, cache, lengths, plan.scale, ws, window=window)

    with ws.call("flash_decode", plan.told):
        return ws.repeat(plan, (q, cache.k, cache.v, cache.table, lengths), launched)


def _problem(
    q: torch.Tensor, cache: Cache, lengths: torch.Tensor, group: Group, oldest: int | None
) -> Problem:
    """What the choice of engine depends on; `oldest` as in `check_room`."""
    (B, H, T, D), refusal = q.shape, ""
    if host_reads(lengths):
        # Of rank 0, which holds the most: all ranks must choose alike, and their room may differ.
        most = replace(cache, rank=0).seen(max(lengths.tolist(), default=0))
        if most >= 1 << 31:
            refusal = f"the kernel counts the keys of a rank in 32 bits, not {most}"
    if group.on_gpus(q.device):
        refusal = too_wide(D, WIDEST_BYTES // q.element_size())
        if cache.k.dtype != q.dtype and not (chip := chip_of(q.device)).fp8:
            refusal = f"{chip.name} has no {FP8}"
    held = cache.k.shape[2] * (1 if cache.table is None else cache.k.shape[0])
    return Problem(
        "flash_decode",
        M=B * H * T,
        N=held if oldest is None else min(held, B * oldest),
        K=2 * D,
        dtype=q.dtype,
        moved_bytes=sum_dtype(q).itemsize * B * H * T * (D + 1) * (group.world_size - 1),
        kernel_refusal=refusal,
    )


@repeatable
def append_to_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    group: GroupLike = None,
    *,
    shard: Shard = "sequence",
    block_size: int | None = None,
    block_table: torch.Tensor | None = None,
) -> None:
    """Store keys and values of the last T tokens of each sequence, where flash_decode finds them.

    Args:
        k, v: (B, H_kv, T, D), of the caches' dtype. Token t of sequence b is at position
            lengths[b] - T + t; those before position 0 are not stored. With shard="sequence" or
            "head" they are the same on every rank and hold all key heads, with None this rank's.
        k_cache, v_cache, lengths, group, shard, block_size, block_table: as in `flash_decode`;
            `lengths` counts the new tokens.

    Nothing is exchanged: each rank stores what belongs to it. On a GPU this is one launch, and the
    host reads no tensor.

    Raises:
        ValueError: shapes or dtypes that do not fit, or sequences longer than the cache (checked
            on the CPU only).
        NotImplementedError: a gradient is wanted.

    Example:
        2 ranks, P = 1, lengths 3, T = 2: position 1 goes to rank 1, block 0, and position 2 to rank
        0, block 1.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, k_cache, v_cache)):
        raise NotImplementedError("append_to_cache has no gradient: call it under torch.no_grad()")
    if is_call_traced(k):
        torch.ops.weft.append_to_cache(
            k, v, k_cache, v_cache, lengths, name_of(group, shard), shard or "sequence",
            block_size, block_table,
        )  # fmt: skip
        return
    group = alone() if shard is None else resolve(group)
    ranks = group.world_size if shard == "head" else 1
    given = k, v, k_cache, v_cache, lengths, block_table

    def checked() -> tuple[int, int, int]:
        if k.shape != v.shape or (v.dtype, v.device) != (k.dtype, k.device):
            raise ValueError(
                f"k and v must match, got {tuple(k.shape)} {k.dtype} on {k.device} and "
                f"{tuple(v.shape)} {v.dtype} on {v.device}"
            )
        cache = checked_cache(
            "k", k, k_cache, v_cache, lengths, shard, block_size, block_table, group
        )
        if k.shape[1] != k_cache.shape[1] * ranks:
            raise ValueError(
                f"k and v must hold the {k_cache.shape[1]} key heads of the caches of {ranks} "
                f"ranks, got {tuple(k.shape)}"
            )
        check_all()
        return cache.block, cache.rank, cache.world_size

    layouts = layouts_of(given) if isinstance(lengths, torch.Tensor) else ()  # an error follows
    key = group, shard, block_size, layouts
    cache = Cache(k_cache, v_cache, block_table, *_appends.of(key, checked))
    check_capacity(cache, lengths, group, "append_to_cache", k.shape[2])
    if ranks > 1:
        k, v = (x.chunk(ranks, 1)[group.rank] for x in (k, v))
    if not (group.on_gpus(k.device) or settings.current_engine() == "triton"):
        _append(k, v, cache, lengths)
        return
    from weft.kernels.flash import append_kernel, decode_kernel

    def launched() -> tuple[()]:
        append_kernel.launch_append(k, v, cache, lengths)
        return ()

    # It has no use for the memory, but for what is kept there.
    ws = workspace(alone(), channel=decode_kernel.CHANNEL, device=k.device)
    ws.repeat(("append_to_cache", key), (k, v, *given[2:]), launched)
    tell_written(k_cache, v_cache)


_appends = Plans[tuple[int, int, int]](f"{__name__}._appends")


def name_of(group: GroupLike, shard: Shard) -> str:
    """The name of a group as custom ops take it; "" is this process by itself."""
    return "" if shard is None else group_name(group)


def _append(k: torch.Tensor, v: torch.Tensor, cache: Cache, lengths: torch.Tensor) -> None:
    T = k.shape[2]
    positions = lengths.long().unsqueeze(1) + torch.arange(-T, 0, device=lengths.device)
    turn = positions // cache.block
    rows, steps = ((positions >= 0) & (turn % cache.world_size == cache.rank)).nonzero().unbind(1)
    positions, turn = positions[rows, steps], turn[rows, steps] // cache.world_size
    at = positions % cache.block
    if cache.table is None:
        into, at = rows, at + turn * cache.block
    else:
        into = cache.table[rows, turn].long()
    cache.k[into, :, at] = k[rows, :, steps]
    cache.v[into, :, at] = v[rows, :, steps]


def flash_decode_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of whole caches (B, H_kv, S, D), in any dtype: the oracle of the tests."""
    T, S = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    limits = lengths.view(-1, 1) - T + torch.arange(T)
    before = torch.arange(S) - limits.unsqueeze(-1)
    hidden = ((before > 0) | (before < -(S if window is None else window))).unsqueeze(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)
