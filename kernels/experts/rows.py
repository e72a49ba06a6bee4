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

Quantized, tokens travel in fp8 with a scale each, and rows are in their dtype again.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch

from weft.collectives import Exchange, all_to_all
from weft.kernels.engine.fp8 import FP8, magnitudes, quantized
from weft.kernels.engine.local_matmul import sum_dtype
from weft.kernels.experts.routing import Routing


class Pull:
    """The tokens (T, K) of all ranks, and a number for each of their slots, if there are any; or
    the tokens in fp8, with a scale each.

    All ranks must have the same K, dtype, and numbers or none.
    """

    def __init__(
        self,
        ex: Exchange,
        routing: Routing,
        x: torch.Tensor,
        numbers: torch.Tensor | None = None,
        quantize: bool = False,
    ) -> None:
        self._ex, self._routing = ex, routing
        self._like, self._columns = x, x.shape[1]
        self._wire, self._quantized = FP8 if quantize else x.dtype, quantize
        self._numbers_at = _table_at(routing, x, self._wire)
        if quantize:
            x, numbers = quantized(x, magnitudes(x))
        ex.local(tuple(x.shape), x.dtype).copy_(x)
        if numbers is not None:
            self._numbers(ex.rank).copy_(numbers)
        ex.signal_all()

    @staticmethod
    def nbytes(
        routing: Routing, x: torch.Tensor, numbers: bool = False, quantize: bool = False
    ) -> int:
        """Symmetric memory for it on every rank."""
        T = max(routing.tokens)
        if quantize:
            return _table_at(routing, x, FP8) + T * torch.float32.itemsize
        return _table_at(routing, x, x.dtype) + T * routing.top_k * sum_dtype(x).itemsize * numbers

    def _shown(self, rank: int, columns: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """What a rank has published there, of each of its tokens."""
        shape = self._routing.tokens[rank], columns
        if rank == self._ex.rank:
            return self._ex.local(shape, dtype, offset)
        self._ex.wait(rank)
        return self._ex.peer(rank, shape, dtype, offset)

    def _numbers(self, rank: int) -> torch.Tensor:
        if self._quantized:
            return self._shown(rank, 1, torch.float32, self._numbers_at)
        return self._shown(rank, self._routing.top_k, sum_dtype(self._like), self._numbers_at)

    def _tokens(self, rank: int) -> torch.Tensor:
        if rank == self._ex.rank and not self._quantized:
            return self._like
        return self._shown(rank, self._columns, self._wire)

    def rows(self, expert: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The rows (n, K) of an expert."""
        blocks, indices = self._routing.blocks[expert], self._routing.long_rows
        start, stop = blocks[0].start, blocks[-1].stop
        out = self._like.new_empty(stop - start, self._columns) if out is None else out
        for rank, block in enumerate(blocks):
            if block.stop > block.start:
                into, tokens = out[block.start - start : block.stop - start], self._tokens(rank)
                if self._quantized:
                    bits = tokens.view(torch.uint8).index_select(0, indices[block])
                    scales = self._numbers(rank).index_select(0, indices[block])
                    torch.mul(bits.view(FP8).float(), scales, out=into)
                else:
                    torch.index_select(tokens, 0, indices[block], out=into)
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
        for rank, (block, first) in enumerate(
            zip(blocks, self._routing.firsts[expert], strict=True)
        ):
            if block.stop == block.start:
                continue
            mine, slots = results[block.start - start : block.stop - start], self._slots(rank)
            if first is None:
                slots.index_copy_(0, places[block], mine)
            else:  # rows that were sorted before they were sent; seven times as quick
                slots[first : first + len(mine)].copy_(mine)

    def collected(self) -> torch.Tensor:
        """All that this rank's slots have got, (T, parts, columns), once all ranks have sent it.

        Valid inside the exchange.
        """
        self._ex.signal_all()
        self._ex.wait_all()
        T = len(self._routing.topk_ids)
        return self._slots(self._ex.rank).view(T, self._routing.parts, self._columns)


def _table_at(routing: Routing, x: torch.Tensor, wire: torch.dtype) -> int:
    """Where numbers begin, in bytes: behind the tokens."""
    return -(-max(routing.tokens) * x.shape[1] * wire.itemsize // 16) * 16


def weighted_sum(
    parts: torch.Tensor, weights: torch.Tensor | None, tensor_parallel_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """y[t] = sum over j of weights[t, j] * parts[t, j] (T, parts, H), as `dtype`, rounded once.

    Differentiable. `tensor_parallel_size` consecutive parts belong to one weight.
    """
    if weights is None and parts.shape[1] == 1:  # nothing to add up
        return parts.squeeze(1).to(dtype, copy=True)
    wide = parts.to(sum_dtype(parts))
    if weights is None:
        return wide.sum(1).to(dtype)
    weights = weights.to(wide.dtype).repeat_interleave(tensor_parallel_size, 1)
    return torch.bmm(weights.unsqueeze(1), wide).squeeze(1).to(dtype)


def to_experts(x: torch.Tensor, routing: Routing, quantize: bool = False) -> torch.Tensor:
    """The rows (R, K) for this rank's experts of all ranks' tokens x (T, K)."""
    if quantize:
        rows: torch.Tensor = _QuantizedRows.apply(x, routing)
        return rows
    sent, sends, receives = _sending_order(routing)
    rows = x.index_select(0, sent // routing.top_k)
    received = all_to_all(rows, receives, sends, routing.group)
    arrived = _arrivals(routing, sum(receives))
    result = received.index_select(0, arrived.argsort())
    beyond = routing.count - len(result)
    return torch.nn.functional.pad(result, (0, 0, 0, beyond)) if beyond else result


def packed(x: torch.Tensor) -> torch.Tensor:
    """x (T, K) in fp8 and its scales, as bytes (T, K + 4)."""
    narrow, scales = quantized(x, magnitudes(x))
    of_scales = scales.reshape(-1).view(torch.uint8).view(len(x), 4)
    return torch.cat([narrow.view(torch.uint8), of_scales], 1)


def unpacked(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The reverse: what has come of rows."""
    parts = rows.split([rows.shape[1] - 4, 4], 1)
    bits, scales = (each.clone(memory_format=torch.contiguous_format) for each in parts)
    made: torch.Tensor = bits.view(FP8).float() * scales.view(torch.float32)
    return made.to(dtype)


class _QuantizedRows(torch.autograd.Function):
    """`to_experts` in fp8, whose gradient passes by the rounding."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        ctx.routing = routing
        return unpacked(to_experts(packed(x), routing), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        routing: Routing = ctx.routing
        routing.check_ids()
        parts = to_tokens(grad.to(routing.wire(grad)), routing)
        return weighted_sum(parts, None, routing.tensor_parallel_size, grad.dtype), None


def to_tokens(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The results of all ranks for this rank's slots: (T, parts, columns), 0 for padding."""
    sent, sends, receives = _sending_order(routing)
    arrived = _arrivals(routing, sum(receives))
    results = all_to_all(rows.index_select(0, arrived), sends, receives, routing.group)
    T, tp = len(routing.topk_ids), routing.tensor_parallel_size
    # What each slot gets from `tp` ranks comes from consecutive ones.
    part = torch.cat([torch.full((n,), i % tp, device=rows.device) for i, n in enumerate(sends)])
    slots = rows.new_zeros(T * routing.parts, rows.shape[1])
    return slots.index_copy(0, sent * tp + part, results).view(T, routing.parts, rows.shape[1])


def _sending_order(routing: Routing) -> tuple[torch.Tensor, list[int], list[int]]:
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
