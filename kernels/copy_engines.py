"""Shards fetched by the chip's copy engines, in streams beside the kernel that multiplies them.

    consumer's stream   show x | consumer kernel: tiles, each waiting for its chunks ......... | end
    side streams               | wait for peer, copy a chunk, announce it, copy the next, ...  |

Three side streams take peers in turn: some copy while another announces.

The kernels keep all cores for tiles: no program copies. The words are those of
`weft.kernels.gathers`, (1, peer, chunk), written by kernels of one program between the copies.
These need a core of their own while the consumer runs, so its grid leaves one free.

Calls are exchanges (`weft.collectives.exchange`): on a GPU they end with a barrier, so that the
half of memory that the host hands to the copy engines is the same in every replay of a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import triton

from weft.collectives import signals
from weft.collectives.exchange import exchange_on
from weft.collectives.movement import offsets
from weft.collectives.workspace import link_of
from weft.kernels import gathers
from weft.kernels.host import SideStreams

if TYPE_CHECKING:
    from weft.collectives.workspace import Workspace


_STREAMS = 3


@triton.jit(do_not_specialize=["rank", "peer", "chunk"])
def _announce_kernel(link, rank, peer, chunk, world_size) -> None:
    """Tell the consumer that `chunk` of `peer`'s shard has been gathered. Grid: 1."""
    generation = signals.last_generation(link.signal_ptrs, rank)
    slot = signals.slot_ptr(link.signal_ptrs, rank, world_size, 1, peer, chunk)
    signals.signal_local(slot, generation)


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
    """Show x (and its factors) and have the peers' fetched; enqueue the consumer in the block.

    Args:
        gathered, gathered_scales: (M, K) and (M,) to be filled, own rows only if `with_own`.
        chunk_rows: rows that are copied and announced together.
        scales_at: see `weft.kernels.gathers`.
    """
    gathers.check_room(ws, max(sizes), x.shape[1], x.dtype)
    K, starts = x.shape[1], offsets(list(sizes))
    own = slice(starts[ws.rank], starts[ws.rank] + sizes[ws.rank])
    beside = SideStreams(ws.group, x.device)
    with exchange_on(ws, "all_gather_matmul", x.device) as ex:
        ex.local(tuple(x.shape), x.dtype).copy_(x)
        if scale_a is not None:
            ex.local((len(x),), torch.float32, scales_at).copy_(scale_a.reshape(-1))
        ex.signal_all()
        for turn, peer in enumerate(ex.peers()):
            with beside.stream(turn % _STREAMS):
                ex.wait(peer)
                if gathered_scales is not None:
                    into = gathered_scales[starts[peer] :][: sizes[peer]]
                    into.copy_(ex.peer(peer, tuple(into.shape), torch.float32, scales_at))
                shard = ex.peer(peer, (sizes[peer], K), x.dtype)
                into = gathered[starts[peer] :][: sizes[peer]]
                for chunk, first in enumerate(range(0, sizes[peer], chunk_rows)):
                    into[first : first + chunk_rows].copy_(shard[first : first + chunk_rows])
                    _announce_kernel[(1,)](link_of(ws), ws.rank, peer, chunk, ws.world_size)
        if with_own:
            with beside.stream(0):
                gathered[own].copy_(x)
        yield
        beside.rejoin()
