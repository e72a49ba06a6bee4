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

`append_to_cache` stores new tokens where they belong. The kernels are in `decode_kernel`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from weft import settings
from weft.collectives import Group, all_gather, exchange, resolve
from weft.collectives.memory.exchange import agree, check_call
from weft.collectives.profiled import profiled
from weft.collectives.ranks.group import GroupLike, alone, group_name, is_call_traced
from weft.collectives.ranks.reports import check_all
from weft.kernels.engine.chips import chip_of
from weft.kernels.engine.engines import Problem, choose, too_wide
from weft.kernels.engine.fp8 import FP8

# With fewer keys torch's CPU kernel does not propagate NaN.
_FEWEST_KEYS = 16

Shard: TypeAlias = Literal["sequence", "head"] | None

# Of a query of one head: of wider ones not even the smallest tile, 16 queries, fits in a core.
WIDEST_BYTES = 2048


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
    cache = _checked("q", q, k_cache, v_cache, lengths, shard, block_size, block_table, group)
    T, D = q.shape[2:]
    scale = 1 / math.sqrt(D) if scale is None else float(scale)
    if window is not None and not (isinstance(window, int) and window >= 0):
        raise ValueError(f"window must be a number of tokens >= 0, or None for all, got {window!r}")
    check_call(
        group,
        lambda: (
            f"flash_decode of q {list(q.shape)} {q.dtype}, blocks of {cache.block}, by {shard}, "
            f"{window=}"
        ),
    )
    oldest = None if window is None else T + window
    _check_room(cache, lengths, group, "flash_decode", oldest)
    engine = choose(_problem(q, cache, lengths, group, oldest), group, q.device)
    if by_head:
        q = q.chunk(group.world_size, 1)[group.rank]
    if engine == "triton":
        from weft.kernels.flash import decode_kernel as kernel

        ws = kernel.workspace_for(q, cache, alone() if by_head else group)
        with ws.call("flash_decode"):
            out, lse = kernel.launch_flash_decode(q, cache, lengths, scale, ws, window=window)
    else:
        out, lse = _attend(q, cache, lengths, scale, window)
        if not by_head and group.world_size > 1:
            out, lse = _merged(out, lse, group, engine == "generic")
    if by_head and group.world_size > 1:
        sizes = [q.shape[1]] * group.world_size
        packed = all_gather(_packed(out, lse), group, dim=1, sizes=sizes)
        out, lse = packed[..., :-1].contiguous(), packed[..., -1].contiguous()
    out = out.to(q.dtype).contiguous()
    return (out, lse.contiguous()) if return_lse else out


def _problem(
    q: torch.Tensor, cache: Cache, lengths: torch.Tensor, group: Group, oldest: int | None
) -> Problem:
    """What the choice of engine depends on; `oldest` as in `_check_room`."""
    (B, H, T, D), refusal = q.shape, ""
    if not lengths.is_cuda:
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
        moved_bytes=_wide(q).itemsize * B * H * T * (D + 1) * (group.world_size - 1),
        kernel_refusal=refusal,
    )


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
    check_all()
    group = alone() if shard is None else resolve(group)
    if k.shape != v.shape or (v.dtype, v.device) != (k.dtype, k.device):
        raise ValueError(
            f"k and v must match, got {tuple(k.shape)} {k.dtype} on {k.device} and "
            f"{tuple(v.shape)} {v.dtype} on {v.device}"
        )
    cache = _checked("k", k, k_cache, v_cache, lengths, shard, block_size, block_table, group)
    ranks = group.world_size if shard == "head" else 1
    if k.shape[1] != k_cache.shape[1] * ranks:
        raise ValueError(
            f"k and v must hold the {k_cache.shape[1]} key heads of the caches of {ranks} ranks, "
            f"got {tuple(k.shape)}"
        )
    _check_room(cache, lengths, group, "append_to_cache", k.shape[2])
    if ranks > 1:
        k, v = (x.chunk(ranks, 1)[group.rank] for x in (k, v))
    if group.on_gpus(k.device) or settings.current_engine() == "triton":
        from weft.kernels.flash import decode_kernel

        decode_kernel.launch_append(k, v, cache, lengths)
    else:
        _append(k, v, cache, lengths)


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


def _checked(
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


def _check_room(
    cache: Cache, lengths: torch.Tensor, group: Group, op: str, oldest: int | None
) -> None:
    """Raise on every rank if the caches of one cannot hold the sequences. On a CPU only.

    Args:
        oldest: how many tokens at the end of each sequence are read; None: all.
    """
    if lengths.is_cuda or not lengths.numel():
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


@profiled("flash_decode, own keys")
def _attend(
    q: torch.Tensor, cache: Cache, lengths: torch.Tensor, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to this rank's part of the cache: out (B, H, T, D) and lse (B, H, T)."""
    B, T = q.shape[0], q.shape[2]
    if not q.numel():
        return _nothing(q)
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return _attend_captured(q, cache, lengths, scale, window)
    tokens = lengths.tolist()
    reach = max(tokens) if window is None else window
    spans = [
        [(cache.seen(at - reach), cache.seen(at + 1)) for at in range(length - T, length)]
        for length in tokens
    ]
    # Neighbouring sequences of equal length share a call.
    parts = []
    for visible, run in itertools.groupby(range(B), spans.__getitem__):
        same = list(run)
        rows, first, end = slice(same[0], same[-1] + 1), visible[0][0], visible[-1][1]
        if first < end:
            k, v = (x.to(q.dtype) for x in cache.keys(rows, first, end))
            parts.append(_attend_run(q[rows], k, v, visible, scale))
        else:
            parts.append(_nothing(q[rows]))
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _wide(x: torch.Tensor) -> torch.dtype:
    """The dtype in which partial results are merged."""
    return torch.promote_types(x.dtype, torch.float32)


def _nothing(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of queries that see no key."""
    lse = torch.full(q.shape[:3], -torch.inf, dtype=_wide(q), device=q.device)
    return torch.zeros_like(q), lse


def _attend_run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: list[tuple[int, int]], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (n, H, T, D) to k, v (n, H_kv, S, D); query t sees visible[t]: (first, end).

    The keys begin with the first that query 0 sees and end with the last that query T - 1 sees.
    """
    n, H, T, D = q.shape
    mask = None
    whole = visible[0][0], visible[-1][1]
    if any(span != whole for span in visible):
        firsts, ends = torch.tensor(visible, device=q.device).t().unsqueeze(-1)
        at = torch.arange(*whole, device=q.device)
        hidden = (at < firsts) | (at >= ends)
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
        mask = mask.masked_fill_(hidden, -torch.inf).repeat(H // k.shape[1], 1)
    # Query heads that share a key head become rows of one matmul, so that keys are read once.
    rows = q.reshape(n, k.shape[1], -1, D)
    out, lse = _softmax(rows, k, v, mask, scale)
    out, lse = out.reshape(q.shape), lse.reshape(n, H, T).to(_wide(q))
    blind = [t for t, (first, end) in enumerate(visible) if first >= end]
    if blind:
        out[:, :, blind], lse[:, :, blind] = 0, -torch.inf
    return out, lse


def _softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q @ k^T + mask) @ v and the log-sum-exp, in q's dtype or wider."""
    if q.device.type == "cpu" and k.shape[2] >= _FEWEST_KEYS:
        if q.stride(3) != 1:
            q = q.contiguous()
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scale
        )
        return out, lse
    wide = _wide(q)
    scores = (q.to(wide) * scale) @ k.to(wide).mT
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return _weights(scores, lse.unsqueeze(-1)) @ v.to(wide), lse


def _attend_captured(
    q: torch.Tensor, cache: Cache, lengths: torch.Tensor, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_attend` inside a CUDA graph, whose replays find other values in lengths and table.

    The host therefore reads neither, and all that there is room for is read.
    """
    T, room = q.shape[2], cache.room
    limits = lengths.long().unsqueeze(1) + torch.arange(1 - T, 1, device=q.device)
    cycle = cache.block * cache.world_size

    def seen(limits: torch.Tensor) -> torch.Tensor:
        limits = limits.clamp(min=0)
        rest = (limits % cycle - cache.rank * cache.block).clamp(0, cache.block)
        return (limits // cycle * cache.block + rest).unsqueeze(-1)

    at = torch.arange(room, device=q.device)
    hidden = at >= seen(limits)  # (B, T, room)
    if window is not None:
        hidden = hidden | (at < seen(limits - 1 - window))
    table = None if cache.table is None else cache.table.clamp(0, cache.k.shape[0] - 1)
    held = replace(cache, table=table)
    parts = []
    for row in range(len(q)):
        # Keys that nobody sees may be anything, and 0 * NaN is NaN.
        unseen = hidden[row].all(0).unsqueeze(-1)
        k, v = (
            x.to(q.dtype).masked_fill(unseen, 0) for x in held.keys(slice(row, row + 1), 0, room)
        )
        mask = torch.zeros_like(hidden[row], dtype=torch.float32)
        mask = mask.masked_fill(hidden[row], -torch.inf).repeat(q.shape[1] // k.shape[1], 1)
        rows = q[row].reshape(1, k.shape[1], -1, q.shape[3])
        parts.append(_softmax(rows, k, v, mask, scale))
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse), and 0 for a query that sees nothing, whose lse is -inf."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp()


def _packed(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """out and lse in one tensor (B, H, T, D + 1), of the dtype of lse."""
    return torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1)


@profiled("flash_decode, merge")
def _merged(
    out: torch.Tensor, lse: torch.Tensor, group: Group, by_process_group: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' partial results, merged in rank order."""
    packed = _packed(out, lse)
    if by_process_group:
        every = all_gather(packed.unsqueeze(0), group, sizes=[1] * group.world_size)
    else:
        nbytes = packed.numel() * packed.element_size()
        with exchange(group, nbytes, "flash_decode", packed.device, channel="decode") as ex:
            ex.local(tuple(packed.shape), packed.dtype).copy_(packed)
            ex.signal_all()
            ex.wait_all()
            parts = [ex.peer(r, tuple(packed.shape), packed.dtype) for r in range(group.world_size)]
            every = ex.result(torch.stack(parts))
    lses = every[..., -1]
    lse = lses.logsumexp(0)
    weights = _weights(lses, lse)
    total = torch.zeros(out.shape, dtype=packed.dtype, device=out.device)
    for weight, part in zip(weights, every, strict=True):
        total += weight.unsqueeze(-1) * part[..., :-1]
    return total, lse


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
