"""Shards fetched by the chip's copy engines, in streams beside the kernel that multiplies them.

    consumer's stream   publish x | consumer: tiles, each waiting for its chunks ............. | end
    side stream 0       | wait for its peer | copy chunk 0 | announce it | copy chunk 3 | ...
    side stream 1       | wait for its peer | copy half of 1 | the other half | announce | ...
    side stream 2       | ...

The chunks of all shards, the next rank's first, are dealt to the side streams in turn: they arrive
in the order in which tiles want them, and some streams copy while another announces. The first copy
of each stream is cut into more and more parts, as otherwise all streams would announce at the same
time and leave the link idle.

The kernel's cores all make tiles: no program copies. The words are those of
`weft.kernels.device.gathers`, (1, peer, chunk), written by one-program kernels between the copies,
which then wait for the peer of the stream's next copy. They need a core of their own while the
consumer runs, so its grid leaves one free.

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
from weft.collectives.device.launches import launching
from weft.collectives.memory.exchange import exchange_on
from weft.collectives.memory.workspace import Workspace, link_of
from weft.collectives.ranks.chunks import offsets
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


def announce(ws: Workspace, peer: int, chunk: int, next_peer: int) -> None:
    """Enqueue `_announce_kernel`."""
    launching(_announce_kernel, 1)(
        link_of(ws), ws.rank, peer, chunk, next_peer, WORLD_SIZE=ws.world_size, num_warps=1
    )


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
    gathers.check_shard(ws, max(sizes), x.shape[1], x.dtype)
    K, starts = x.shape[1], offsets(list(sizes))
    own = slice(starts[ws.rank], starts[ws.rank] + sizes[ws.rank])
    beside = SideStreams(ws.group, x.device)
    with exchange_on(ws, "all_gather_matmul", x.device) as ex:
        ex.local(tuple(x.shape), x.dtype).copy_(x)
        if scale_a is not None:
            ex.local((len(x),), torch.float32, scales_at).copy_(scale_a.reshape(-1))
        ex.signal_all()
        order = [peer for peer in ex.peers() for _ in range(0, sizes[peer], chunk_rows)]
        turn = 0
        for peer in ex.peers():
            mine = slice(starts[peer], starts[peer] + sizes[peer])
            shard, into = ex.peer(peer, (sizes[peer], K), x.dtype), gathered[mine]
            if gathered_scales is not None:
                factors = ex.peer(peer, (sizes[peer],), torch.float32, scales_at)
                to_factors = gathered_scales[mine]
            for chunk, first in enumerate(range(0, sizes[peer], chunk_rows)):
                rows = slice(first, first + chunk_rows)
                with beside.stream(turn % STREAMS):
                    parts = 1
                    if turn < STREAMS:
                        parts += turn
                        announce(ws, ws.rank, 0, peer)
                    if gathered_scales is not None:
                        to_factors[rows].copy_(factors[rows])
                    for here, there in zip(
                        into[rows].chunk(parts), shard[rows].chunk(parts), strict=True
                    ):
                        here.copy_(there)
                    later = turn + STREAMS
                    following = order[later] if later < len(order) else peer
                    announce(ws, peer, chunk, ws.rank if following == peer else following)
                turn += 1
        if with_own:
            with beside.stream(0):
                gathered[own].copy_(x)
        yield
        beside.rejoin()
        ex.result(gathered)  # side streams may have copied after the consumer has spoilt it
        if gathered_scales is not None:
            ex.result(gathered_scales)
