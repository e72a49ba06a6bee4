"""What the host engines share: shards published and read in place, sums of peers' rows.

An op's `_host_forward` and `_host_backward` are exchanges (`weft.collectives.memory.exchange`) made
of:

    publish(ex, x, rows)               for chunk in row_chunks(ex, x, ...): multiply the chunk
    publish_product(ex, x, w, ...)     reduce_rows(ex, own, ...): add up the peers' rows in place

A rank's memory has room for the whole gathered matrix, in which its shard is already in place:
gathering copies the peers' shards beside it, and nothing is copied twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

from weft.collectives import Exchange, Group
from weft.collectives.ranks.chunks import offsets
from weft.collectives.ranks.group import here
from weft.kernels.engine.fp8 import Scaling, scaled_partial
from weft.kernels.engine.local_matmul import (
    allocates,
    finished,
    mm,
    on_cpu,
    partial_mm,
    partials_cost,
    sum_dtype,
)

# With fewer rows, a chunk's matmul loses more against its share of one large matmul than the copy
# costs: 3 % at 128 rows of (256, 2048) @ (2048, 2048) in fp32, 10 % at 32.
_CHUNK_ROWS = 256


def publish(ex: Exchange, x: torch.Tensor, rows: list[int]) -> None:
    """Publish this rank's x (rows[rank], K) to all peers."""
    ex.local(tuple(x.shape), x.dtype, _offset(x, rows, ex.rank)).copy_(x)
    ex.signal_all()


def _offset(x: torch.Tensor, rows: list[int], rank: int) -> int:
    return offsets(rows)[rank] * x.shape[1] * x.element_size()


def _peers_shard(ex: Exchange, x: torch.Tensor, rows: list[int], peer: int) -> torch.Tensor:
    return ex.peer(peer, (rows[peer], x.shape[1]), x.dtype, _offset(x, rows, peer))


def shards(ex: Exchange, x: torch.Tensor, rows: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """First row, in the gathered matrix, and shard of each rank, once published; own rank first."""
    starts = offsets(rows)
    fetched = _fetch(ex, x, rows) if x.is_cuda and ex.world_size > 1 else None
    yield starts[ex.rank], x
    for peer in ex.peers():
        if fetched is None:
            ex.wait(peer)
            yield starts[peer], _peers_shard(ex, x, rows, peer)
        else:
            shard, arrived = fetched[peer]
            torch.cuda.current_stream(x.device).wait_event(arrived)
            yield starts[peer], shard


def _fetch(
    ex: Exchange, x: torch.Tensor, rows: list[int]
) -> dict[int, tuple[torch.Tensor, torch.cuda.Event]]:
    """Have the copy engines fetch all peers' shards, in a stream beside the one that multiplies."""
    main, side = torch.cuda.current_stream(x.device), copy_stream(x.device)
    side.wait_stream(main)
    fetched = {}
    with torch.cuda.stream(side):
        for peer in ex.peers():
            ex.wait(peer)
            shard = _peers_shard(ex, x, rows, peer).clone()
            shard.record_stream(main)
            arrived = torch.cuda.Event()
            arrived.record(side)
            fetched[peer] = shard, arrived
    return fetched


def copy_stream(device: torch.device, number: int = 0) -> torch.cuda.Stream:
    """Stream `number` of those in which copy engines fetch this rank's shards."""
    return _copy_stream(device, number, here.world.rank if here.world else 0)


@lru_cache(maxsize=64)
def _copy_stream(device: torch.device, number: int, rank: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def is_eager(device: torch.device) -> bool:
    """Whether the host enqueues a call each time that it runs: not in a graph, nor in virtual time,
    which counts the host's for nothing."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


class SideStreams:
    """Streams beside the current one, from now on until `rejoin`.

    Virtual ranks that stand for GPUs have them in virtual time; on a CPU, work is done at once.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._virtual, self._device = group.virtual, device
        self._main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._begun: dict[int, torch.cuda.Stream] = {}

    def stream(self, number: int) -> AbstractContextManager[object]:
        """What is enqueued in the block goes to stream `number`."""
        if self._main is not None:
            if number not in self._begun:
                self._begun[number] = copy_stream(self._device, number)
                self._begun[number].wait_stream(self._main)
            return torch.cuda.stream(self._begun[number])
        return nullcontext() if self._virtual is None else self._virtual.beside(number)

    def rejoin(self) -> None:
        """What is enqueued next waits for all of them."""
        if self._main is not None:
            for stream in self._begun.values():
                self._main.wait_stream(stream)
        elif self._virtual is not None:
            self._virtual.rejoin()


def gather_shards(
    ex: Exchange, x: torch.Tensor, rows: list[int], *, private: bool = False
) -> torch.Tensor:
    """The published shards as one matrix (M, K). Valid inside the exchange, if not `private`."""
    shape = sum(rows), x.shape[1]
    whole = x.new_empty(shape) if private else ex.local(shape, x.dtype)
    for start, shard in shards(ex, x, rows):
        if private or shard is not x:
            whole[start : start + len(shard)].copy_(shard)
    return whole


def rows_in_place(x: torch.Tensor, weights: list[torch.Tensor], rows: list[int]) -> bool:
    """Whether to compute shard @ w shard by shard, in place, rather than gather first."""
    return max(rows) >= _CHUNK_ROWS and not any(allocates(x, w) for w in weights)


def sums_in_place(weights: list[torch.Tensor], rows: list[int]) -> bool:
    """Whether to add up shard^T @ dy shard by shard, in place, rather than gather first.

    Each addition passes over the sum (K, N); gathering passes over the shards (M, K).
    """
    columns = sum(w.shape[1] for w in weights)
    short = columns * (len(rows) - 1) <= sum(rows)
    return max(rows) >= _CHUNK_ROWS and short and not partials_cost(weights[0])


def row_chunks(
    ex: Exchange, x: torch.Tensor, rows: list[int], *, in_place: bool
) -> Iterator[tuple[int, torch.Tensor]]:
    """The published shards as (first row, rows), to be multiplied one by one or gathered."""
    if in_place:
        yield from shards(ex, x, rows)
    else:
        yield 0, gather_shards(ex, x, rows)


def gather_bytes(x: torch.Tensor, rows: list[int]) -> int:
    """Symmetric memory that a gather of x needs on every rank."""
    return sum(rows) * x.shape[1] * x.element_size()


def publish_product(
    ex: Exchange,
    x: torch.Tensor,
    w: torch.Tensor,
    rows: list[int],
    plus: torch.Tensor | None = None,
    scaling: Scaling | None = None,
    wire: torch.dtype | None = None,
) -> tuple[torch.Tensor, bool]:
    """Publish to each peer its rows of x @ w (+ plus) in `wire`, by default `sum_dtype`.

    Returns this rank's own rows, and whether they may be overwritten. There is no `plus` for scaled
    fp8.
    """
    wire = wire or sum_dtype(x)
    shown = ex.local((x.shape[0], w.shape[1]), wire)
    starts = offsets(rows)
    start, stop = starts[ex.rank], starts[ex.rank] + rows[ex.rank]
    if on_cpu(x) and max(rows) >= _CHUNK_ROWS and x.dtype == wire and not allocates(x, w):
        # Own rows last, as nobody waits for them, and in private memory, which is faster.
        for peer in (*ex.peers(), ex.rank):
            part = slice(starts[peer], starts[peer] + rows[peer])
            out = None if peer == ex.rank else shown[part]
            product = mm(x[part], w, plus=None if plus is None else plus[part], out=out)
            if peer != ex.rank:
                ex.signal(peer)
        # A mode that keeps results, as a selective checkpoint does, must find them as they were.
        return product, torch._C._len_torch_dispatch_stack() == 0
    if scaling is None and allocates(x, w) and x.dtype == wire == sum_dtype(x):
        product = mm(x, w, plus=plus)
        shown[:start].copy_(product[:start])
        shown[stop:].copy_(product[stop:])
    else:
        product = product_into(shown, x, w, plus, scaling)
    ex.signal_all()
    return product[start:stop], False


def product_into(
    shown: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    plus: torch.Tensor | None = None,
    scaling: Scaling | None = None,
) -> torch.Tensor:
    """x @ w (+ plus) in `shown`, added up in `sum_dtype` and rounded once to the dtype of that."""
    if scaling is not None:
        return shown.copy_(scaled_partial(x, w, scaling))
    if shown.dtype == sum_dtype(x):
        return partial_mm(x, w, plus=plus, out=shown)
    if shown.dtype == x.dtype and plus is None:
        return mm(x, w, out=shown)
    return shown.copy_(partial_mm(x, w, plus=plus))


def reduce_rows(
    ex: Exchange,
    own: torch.Tensor,
    start: int,
    dtype: torch.dtype,
    *,
    average: bool = False,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    overwrite: bool = False,
) -> torch.Tensor:
    """The sum (or average) of every rank's rows from `start` on (+ bias + residual), as `dtype`.

    Added in rank order, half precision in fp32, and rounded once. `own` are this rank's rows, of
    the dtype of the peers'; `overwrite` allows them to be used for the sum.
    """
    ex.wait_all()
    shape, wire, wide = tuple(own.shape), own.dtype, sum_dtype(own)
    offset = start * own.shape[1] * wire.itemsize
    terms = [own if r == ex.rank else ex.peer(r, shape, wire, offset) for r in range(ex.world_size)]
    # Later terms are still needed.
    into = own if overwrite and ex.rank < 2 and wire == wide else None
    first = terms[0].to(wide)
    total = torch.add(first, terms[1], out=into) if len(terms) > 1 else first.clone()
    for term in terms[2:]:
        total.add_(term)
    if average:
        total.div_(ex.world_size)
    return finished(total, bias, residual, dtype)
