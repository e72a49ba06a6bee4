"""Rows of experts through collectives: what every group and device has, and differentiable itself.

    to_experts: tokens, sorted by expert --all_to_all--> by rank --sorted--> by expert, then rank
    to_tokens:  the reverse, each result in its slot

The sizes of what goes to each rank are needed on the host, which on a GPU waits for the device.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from weft.collectives import all_to_all
from weft.kernels.experts.routing import Routing


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
