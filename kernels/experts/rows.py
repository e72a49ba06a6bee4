"""How rows of experts move, without kernels: through symmetric memory on a CPU, and by collectives.

Host. Rows are pulled from their tokens' ranks, and results are pushed back:

    rank 0                          rank 1, which has the experts
    publish: x_0 -> own memory ---> pulled: x_0[rows] | x_1[rows] -> the rows of an expert
                                    multiply
    own memory (slots) <----------- push: each result to its slot
    collected: sum over a token's slots

Each byte crosses once, and nothing is sorted, packed or unpacked: rows are read where their rank
has them, and results are written where their rank wants them. A slot of padding is written by
nobody, so that its own rank clears it.

Generic. What every group and device has, and differentiable itself:

    to_experts: tokens, sorted by expert --all_to_all--> by rank --sorted--> by expert, then rank
    to_tokens:  the reverse, each result in its slot

The sizes of what goes to each rank are needed on the host, which on a GPU waits for the device.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from weft.collectives import Exchange, all_to_all
from weft.kernels.engine.local_matmul import sum_dtype
from weft.kernels.experts.routing import Routing


class Pull:
    """The tokens (T, K) of all ranks, and a number for each of their slots, if there are any.

    All ranks must have the same K, dtype, and numbers or none.
    """

    def __init__(
        self, ex: Exchange, routing: Routing, x: torch.Tensor, numbers: torch.Tensor | None = None
    ) -> None:
        self._ex, self._routing = ex, routing
        self._like, self._columns = x, x.shape[1]
        self._numbers_at = _table_at(routing, x) if numbers is not None else 0
        ex.local(tuple(x.shape), x.dtype).copy_(x)
        if numbers is not None:
            self._numbers(ex.rank).copy_(numbers)
        ex.signal_all()

    @staticmethod
    def nbytes(routing: Routing, x: torch.Tensor, numbers: bool = False) -> int:
        """Symmetric memory for it on every rank."""
        table = max(routing.tokens) * routing.top_k * sum_dtype(x).itemsize
        return _table_at(routing, x) + table * numbers

    def _numbers(self, rank: int) -> torch.Tensor:
        shape, dtype = (self._routing.tokens[rank], self._routing.top_k), sum_dtype(self._like)
        if rank == self._ex.rank:
            return self._ex.local(shape, dtype, self._numbers_at)
        self._ex.wait(rank)
        return self._ex.peer(rank, shape, dtype, self._numbers_at)

    def _tokens(self, rank: int) -> torch.Tensor:
        if rank == self._ex.rank:
            return self._like
        self._ex.wait(rank)
        shape = self._routing.tokens[rank], self._columns
        return self._ex.peer(rank, shape, self._like.dtype)

    def rows(self, expert: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The rows (n, K) of an expert."""
        blocks, indices = self._routing.blocks[expert], self._routing.long_rows
        start, stop = blocks[0].start, blocks[-1].stop
        out = self._like.new_empty(stop - start, self._columns) if out is None else out
        for rank, block in enumerate(blocks):
            if block.stop > block.start:
                into = out[block.start - start : block.stop - start]
                torch.index_select(self._tokens(rank), 0, indices[block], out=into)
        return out

    def numbers(self, expert: int) -> torch.Tensor:
        """Those (n, 1) of an expert's rows, in `sum_dtype` of the tokens."""
        slots = self._routing.long_slots
        found = [
            self._numbers(rank).view(-1).index_select(0, slots[block])
            for rank, block in enumerate(self._routing.blocks[expert])
        ]
        return torch.cat(found).unsqueeze(1)


class Push:
    """Results for slots of all ranks: `columns` numbers of `dtype` for each."""

    def __init__(self, ex: Exchange, routing: Routing, columns: int, dtype: torch.dtype) -> None:
        self._ex, self._routing, self._columns, self._dtype = ex, routing, columns, dtype
        if len(routing.unused):
            self._slots(ex.rank).index_fill_(0, routing.unused, 0)

    @staticmethod
    def nbytes(routing: Routing, columns: int, dtype: torch.dtype) -> int:
        """Symmetric memory for it on every rank."""
        return max(routing.tokens) * routing.parts * columns * dtype.itemsize

    def _slots(self, rank: int) -> torch.Tensor:
        shape = self._routing.tokens[rank] * self._routing.parts, self._columns
        if rank == self._ex.rank:
            return self._ex.local(shape, self._dtype)
        return self._ex.peer(rank, shape, self._dtype)

    def rows(self, expert: int, results: torch.Tensor) -> None:
        """Send the results (n, columns) of an expert's rows."""
        blocks, places = self._routing.blocks[expert], self._routing.places
        start = blocks[0].start
        for rank, block in enumerate(blocks):
            if block.stop > block.start:
                mine = results[block.start - start : block.stop - start]
                self._slots(rank).index_copy_(0, places[block], mine)

    def collected(self) -> torch.Tensor:
        """All that this rank's slots have got, (T, parts, columns), once all ranks have sent it.

        Valid inside the exchange.
        """
        self._ex.signal_all()
        self._ex.wait_all()
        T = len(self._routing.topk_ids)
        return self._slots(self._ex.rank).view(T, self._routing.parts, self._columns)


def _table_at(routing: Routing, x: torch.Tensor) -> int:
    """Where numbers begin, in bytes: behind the tokens."""
    return -(-max(routing.tokens) * x.shape[1] * x.element_size() // 16) * 16


def weighted_sum(
    parts: torch.Tensor, weights: torch.Tensor | None, tensor_parallel_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """y[t] = sum over j of weights[t, j] * parts[t, j] (T, parts, H), as `dtype`, rounded once.

    Differentiable. `tensor_parallel_size` consecutive parts belong to one weight.
    """
    wide = parts.to(sum_dtype(parts))
    if weights is None:
        return wide.sum(1).to(dtype)
    weights = weights.to(wide.dtype).repeat_interleave(tensor_parallel_size, 1)
    return torch.bmm(weights.unsqueeze(1), wide).squeeze(1).to(dtype)


def to_experts(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The rows (R, K) for this rank's experts of all ranks' tokens x (T, K)."""
    sent, sends, receives = _plan(routing)
    rows = x.index_select(0, sent // routing.top_k)
    received = all_to_all(rows, receives, sends, routing.group)
    arrived = _arrivals(routing, sum(receives))
    result = received.index_select(0, arrived.argsort())
    beyond = routing.count - len(result)
    return torch.nn.functional.pad(result, (0, 0, 0, beyond)) if beyond else result


def to_tokens(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The results of all ranks for this rank's slots: (T, parts, columns), 0 for padding."""
    sent, sends, receives = _plan(routing)
    arrived = _arrivals(routing, sum(receives))
    results = all_to_all(rows.index_select(0, arrived), sends, receives, routing.group)
    T, tp = len(routing.topk_ids), routing.tensor_parallel_size
    # What each slot gets from `tp` ranks comes from consecutive ones.
    part = torch.cat([torch.full((n,), i % tp, device=rows.device) for i, n in enumerate(sends)])
    slots = rows.new_zeros(T * routing.parts, rows.shape[1])
    return slots.index_copy(0, sent * tp + part, results).view(T, routing.parts, rows.shape[1])


def _plan(routing: Routing) -> tuple[torch.Tensor, list[int], list[int]]:
    """The slots whose tokens are sent, in that order; how many to each rank, and from each."""
    tp, ids = routing.tensor_parallel_size, routing.topk_ids.reshape(-1)
    order = ids.argsort(stable=True)
    firsts = torch.tensor([0, *accumulate(routing.experts[::tp])], device=ids.device)
    cuts = torch.searchsorted(ids[order].contiguous(), firsts.int()).tolist()
    to = [order[start:stop] for start, stop in pairwise(cuts)]
    sent = [slots for slots in to for _ in range(tp)]
    return torch.cat(sent), [*map(len, sent)], routing.counts.sum(1).tolist()


def _arrivals(routing: Routing, count: int) -> torch.Tensor:
    """For each row that arrives, rank by rank, its place among the rows sorted by expert."""
    return routing.ranks[:count].argsort(stable=True)
