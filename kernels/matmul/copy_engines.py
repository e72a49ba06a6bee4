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


def _chunks(
    shard: torch.Tensor, into: torch.Tensor, count: int, rows: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What of a shard of `count` rows is copied where, `rows` at a time."""
    if count <= rows:
        return [(shard, into)] * (count > 0)
    return [*zip(shard.split(rows), into.split(rows), strict=True)]


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
        order = [peer for peer in ex.peers() for _ in range(0, sizes[peer], chunk_rows)]
        intos = gathered.split(list(sizes))
        turn = 0
        for peer in ex.peers():
            shard, size = ex.peer(peer, (sizes[peer], K), x.dtype), sizes[peer]
            chunks = _chunks(shard, intos[peer], size, chunk_rows)
            if gathered_scales is not None:
                factors = ex.peer(peer, (sizes[peer],), torch.float32, scales_at)
                to_factors = gathered_scales.split(list(sizes))[peer]
                scales = _chunks(factors, to_factors, size, chunk_rows)
            for chunk, (there, here) in enumerate(chunks):
                with beside.stream(turn % STREAMS):
                    if turn < STREAMS:
                        announce(ws, link, ws.rank, 0, peer)
                    if gathered_scales is not None:
                        scales[chunk][1].copy_(scales[chunk][0])
                    rows = min(chunk_rows, size - chunk * chunk_rows)
                    parts = 1 + turn if turn < STREAMS else 1
                    for source, into in _chunks(there, here, rows, -(-rows // parts)):
                        into.copy_(source)
                    later = turn + STREAMS
                    following = order[later] if later < len(order) else peer
                    next_peer = ws.rank if following == peer else following
                    announce(ws, link, peer, chunk, next_peer)
                turn += 1
        if with_own:
            with beside.stream(0):
                intos[ws.rank].copy_(x)
        yield
        beside.rejoin()
        ex.result(gathered)  # side streams may have copied after the consumer has spoilt it
        if gathered_scales is not None:
            ex.result(gathered_scales)
