"""Shards fetched by the chip's copy engines, in streams beside the kernel that multiplies them.

    consumer's stream   publish x | consumer: tiles, each waiting for its chunks ............. | end
    side stream 0       | wait for its peer | copy chunk 0 | announce it | copy chunk 3 | ...
    side stream 1       | wait for its peer | copy half of 1 | the other half | announce | ...
    side stream 2       | ...

The chunks of all shards, the next rank's first, are dealt to the side streams in turn: they arrive
in the order in which tiles want them, and some streams copy while another announces. The first copy
of each stream is cut into more and more parts, as otherwise all streams would announce at the same
time and leave the link idle.

All is enqueued before the consumer. If that came first, it would wait for what the host has yet to
enqueue: whatever holds up the host until the device is idle, such as a module that is loaded or
memory that another thread frees, would hold it up for good.

The kernel's cores all make tiles: no program copies. The words are those of
`weft.kernels.device.gathers`, (1, peer, chunk), written by one-program kernels between the copies,
which then wait for the peer of the stream's next copy. They need a core of their own while the
consumer runs, so its grid leaves one free. Memory operations of the stream would not: but they
write what the host knows, and the number of a call that a graph replays is known to the device.

Why it neither races nor deadlocks: side streams wait only for peers' publishing, which waits for
nobody; the consumer waits for the side streams, all of whose work is enqueued before it; and the
call's end, a barrier, keeps the half from being written while peers still copy from it.

Calls are exchanges (`weft.collectives.memory.exchange`): on a GPU they end with a barrier, so that
the half of memory that the host passes to the copy engines is the same in every replay of a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.collectives.device import signals, stream_signals
from weft.collectives.device.launches import launch_kept
from weft.collectives.memory.exchange import exchange_on
from weft.collectives.memory.workspace import Link, Workspace, check_room, link_of
from weft.kernels.device import gathers
from weft.kernels.engine.shards import SideStreams

STREAMS = 3
_DATA_WORD = signals.Constant(stream_signals.DATA_WORD)


@triton.jit(do_not_specialize=["rank", "peer", "chunk", "next_peer"])
def _announce_kernel(link, rank, peer, chunk, next_peer, WORLD_SIZE: tl.constexpr) -> None:
    """Tell the consumer that `chunk` of `peer`'s shard is here, then hold the stream until
    `next_peer` has published its own. Pass `rank` to skip either step. Grid: 1.
    """
    generation = signals.last_generation(link.signal_ptrs, rank)
    own_pad = signals.peer_ptr(link.signal_ptrs, rank, tl.int64)
    # What was copied in spite of a wait that failed may be anything: its readers wait in vain.
    if (peer != rank) & (not signals.failed(own_pad)):
        slot = signals.slot_ptr(link.signal_ptrs, rank, WORLD_SIZE, 1, peer, chunk)
        signals.signal_local(slot, generation)
    if next_peer != rank:
        stream_signals.hold(
            link.signal_ptrs, rank, next_peer, generation, link.timeout_ns, _DATA_WORD
        )


def announce(ws: Workspace, link: Link, peer: int, chunk: int, next_peer: int) -> None:
    """Enqueue `_announce_kernel`; `link`: that of `ws`."""
    args = link, ws.rank, peer, chunk, next_peer
    launch_kept(ws.kept_launches(), _announce_kernel, args, WORLD_SIZE=ws.world_size)


class _Copy(NamedTuple):
    """A chunk of a peer's shard.

    Attributes:
        at: where the shard begins in the gathered matrix.
        rows: of the shard, that are copied one after another: pairs of first and last + 1.
        first: whether it is the first in its stream, which must wait for `peer`.
        next_peer: whose chunk comes next in the stream; the rank itself: no other's.
    """

    stream: int
    peer: int
    chunk: int
    at: int
    rows: tuple[tuple[int, int], ...]
    first: bool
    next_peer: int


@lru_cache(maxsize=256)
def _copies(
    rank: int, peers: tuple[int, ...], sizes: tuple[int, ...], chunk_rows: int
) -> list[_Copy]:
    """All copies, in the order in which they are enqueued.

    Example:
        of shards of 4 rows, 2 a chunk, one peer: rows (0, 2), then (2, 3) and (3, 4), of it.
    """
    chunks = [(peer, row) for peer in peers for row in range(0, sizes[peer], chunk_rows)]
    found = []
    for turn, (peer, row) in enumerate(chunks):
        parts = 1 + turn if turn < STREAMS else 1
        end = min(row + chunk_rows, sizes[peer])
        step = -(-(end - row) // parts)
        rows = tuple((start, min(start + step, end)) for start in range(row, end, step))
        following = chunks[turn + STREAMS][0] if turn + STREAMS < len(chunks) else peer
        next_peer = rank if following == peer else following
        at, chunk, first = sum(sizes[:peer]), row // chunk_rows, turn < STREAMS
        found.append(_Copy(turn % STREAMS, peer, chunk, at, rows, first, next_peer))
    return found


@contextmanager
def fetching(
    x: torch.Tensor,
    scale_a: torch.Tensor | None,
    gathered: torch.Tensor,
    gathered_scales: torch.Tensor | None,
    ws: Workspace,
    sizes: Sequence[int],
    chunk_rows: int,
    scales_at: int,
    with_own: bool,
) -> Iterator[None]:
    """Publish x (and its scales) and fetch the peers'; the consumer is enqueued inside the block.

    Args:
        gathered, gathered_scales: (M, K) and (M,), filled; this rank's rows only if `with_own`.
        chunk_rows: rows that are copied and announced together.
        scales_at: see `weft.kernels.device.gathers`.
    """
    needed = gathers.workspace_bytes(max(sizes), x.shape[1], x.dtype)
    check_room(ws, needed, "workspace_bytes of the largest shard")
    K = x.shape[1]
    beside, link = SideStreams(ws.group, x.device), link_of(ws)
    with exchange_on(ws, "all_gather_matmul", x.device) as ex:
        ex.local(tuple(x.shape), x.dtype).copy_(x)
        if scale_a is not None:
            ex.local((len(x),), torch.float32, scales_at).copy_(scale_a.reshape(-1))
        ex.signal_all()
        for copy in _copies(ws.rank, (*ws.peers,), (*sizes,), chunk_rows):
            peer, at = copy.peer, copy.at
            shard = ex.peer(peer, (sizes[peer], K), x.dtype)
            with beside.stream(copy.stream):
                if copy.first:
                    announce(ws, link, ws.rank, 0, peer)
                if gathered_scales is not None:
                    start, end = copy.rows[0][0], copy.rows[-1][1]
                    scales = ex.peer(peer, (sizes[peer],), torch.float32, scales_at)
                    gathered_scales[at + start : at + end].copy_(scales[start:end])
                for start, end in copy.rows:
                    gathered[at + start : at + end].copy_(shard[start:end])
                announce(ws, link, peer, copy.chunk, copy.next_peer)
        if with_own:
            own = sum(sizes[: ws.rank])
            with beside.stream(0):
                gathered[own : own + len(x)].copy_(x)
        yield
        beside.rejoin()
        ex.result(gathered)  # side streams may have copied after the consumer has spoilt it
        if gathered_scales is not None:
            ex.result(gathered_scales)
