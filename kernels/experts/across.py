"""Dispatch and combine over several hosts: another engine inside each, twice.

A token crosses to each other host of which an expert is asked for, once, whatever k is: to its
rank's counterpart there (its rail), which shares it inside like a token of its own. What a host
makes of it is added up there, and crosses back once:

    host 0                          host 1
    rank 0: x_0 --------------------> rank 2 | held (n, K) = the x_0[t] of which host 1 has experts
            near: tokens of host 0           | far: what its ranks hold, on their experts
            on host 0's experts              v
    rank 0: y_0 <-------------------- rank 2   sums (n, H) of host 1's experts, weighted

Near rows are made while tokens cross, and what goes back crosses while near ones are made. The
rows of both stand in the order of `routing`. Results are added up in fp32 in the order of j inside
each host, rounded to the wire once a host, and then in the order of the hosts.

On CPUs the engine inside is `host`, on GPUs `launched`. How many tokens cross must be known on the
host: on a GPU that waits for the device, once for a routing. There rooms for tokens and rows are of
few sizes, as launches are kept by the size of what they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from weft.collectives import all_gather
from weft.collectives.hosts import naming
from weft.collectives.process_groups import OnTheWay
from weft.collectives.ranks.chunks import offsets
from weft.collectives.topology import here, inside_of
from weft.kernels.engine.epilogues import keeps_sums
from weft.kernels.engine.local_matmul import sum_dtype
from weft.kernels.experts.calls import CombineCall, DispatchCall, DispatchMade
from weft.kernels.experts.routing import Roster, Routing, routing_of, without_padding
from weft.kernels.experts.rows import packed, unpacked

Tensors = Sequence[torch.Tensor]
_Call = TypeVar("_Call", DispatchCall, CombineCall)


def set_refusal(routing: Roster | Routing) -> str:
    """Why tokens cannot go host by host; empty if they can."""
    tp, hosts = routing.tensor_parallel_size, routing.group.hosts
    sets = [{rank // tp for rank in ranks} for ranks in hosts]
    if sum(map(len, sets)) * tp > routing.group.world_size:
        return "ranks that share experts are on several hosts"
    return ""


def crossings(H: int, k: int) -> float:
    """To how many other hosts of H a token crosses on average, if k experts are drawn evenly."""
    return (H - 1) * (1 - (1 - 1 / H) ** k)


def _inside_engine(on_gpus: bool) -> ModuleType:
    """What carries out the ops inside a host: kernels, which need Triton, or the CPU's."""
    if on_gpus:
        from weft.kernels.experts import launched

        return launched
    from weft.kernels.experts import host

    return host


class Levels:
    """A routing over several hosts: who crosses, and the routings inside this rank's host.

    Attributes:
        near, far: of the tokens of this host's ranks, and of those of other hosts that each of its
            ranks holds; of the experts of this host both.
        receives: how many tokens of each rank are held here.
        held: for how many there is room.
        sent: this rank's tokens that cross, by the rank that they go to.
        at_near, at_far: where the rows of both stand among those of the whole routing.
        engine: what runs inside.
    """

    def __init__(self, routing: Routing) -> None:
        self.group, tp = routing.group, routing.tensor_parallel_size
        group, hosts, ours = self.group, self.group.hosts, here(self.group)
        self._host, W = hosts.index(ours), group.world_size
        on_gpus = group.on_gpus(routing.topk_ids.device)
        self.engine = _inside_engine(on_gpus)
        everyones = routing.everyones
        if everyones is None:
            everyones = all_gather(routing.topk_ids, group, sizes=routing.tokens)
        tables = [_numbers(routing, ranks) for ranks in hosts]
        at = {rank: place for ranks in hosts for place, rank in enumerate(ranks)}
        rails = [ours[at[rank] % len(ours)] for rank in range(W)]  # here, of ranks elsewhere
        # Which tokens are held here, and how many of each rank's.
        inner = tables[self._host][everyones.long()]
        asked = (inner >= 0).any(1).split(routing.tokens)
        counts: list[int] = torch.stack([each.sum() for each in asked]).tolist()
        held = dict.fromkeys(ours, 0)
        self.receives, foreign = [0] * W, [inner[:0]]
        for source, of_source in enumerate(inner.split(routing.tokens)):
            if source not in ours:
                held[rails[source]] += counts[source]
                if rails[source] == group.rank:
                    self.receives[source] = counts[source]
                    foreign.append(of_source[asked[source]])
        self._sends, sent = [0] * W, [everyones.new_empty(0, dtype=torch.int64)] * W
        for number, theirs in enumerate(hosts):
            if number != self._host:
                to = theirs[at[group.rank] % len(theirs)]
                sent[to] = (tables[number][routing.topk_ids.long()] >= 0).any(1).nonzero()[:, 0]
                self._sends[to] = len(sent[to])
        self.sent = torch.cat(sent)
        inside, experts = inside_of(group), [routing.experts[rank] for rank in ours]
        if on_gpus:  # the same for all ranks, as launches go by the tokens of all
            held = dict.fromkeys(held, roomy(max(held.values())))
        self.held = held[group.rank]
        beyond = self.held - sum(self.receives)
        foreign.append(inner.new_full((beyond, routing.top_k), -1))  # nobody's
        own = tables[self._host][routing.topk_ids.long()]
        tokens = [routing.tokens[rank] for rank in ours]
        near = Roster(inside, tp, own, tokens, experts)
        far = Roster(inside, tp, torch.cat(foreign), [*held.values()], experts)
        # Of what all tokens of this host, and of others, ask for, that which is for its experts.
        share = routing.top_k * sum(experts[::tp]) / max(1, sum(routing.experts[::tp]))
        asks = [round(share * count) for count in (sum(tokens), sum(routing.tokens) - sum(tokens))]
        with self.naming("routing of tokens to experts"):
            self.near, self.far = (
                _with_less_room(routing_of(each, None), assigned)
                for each, assigned in zip((near, far), asks, strict=True)
            )
        self._count, ranks = routing.count, routing.ranks[: _coming(routing)].long()
        here_too = torch.zeros(W, dtype=torch.bool)
        here_too[[*ours]] = True
        is_near = here_too.to(ranks.device)[ranks]
        self.at_near, at_far = is_near.nonzero()[:, 0], (~is_near).nonzero()[:, 0]
        # Of one expert, rows that one rank holds are in the same order here and there.
        expert = torch.repeat_interleave(routing.counts.sum(0))
        order = expert[at_far] * W + torch.tensor(rails, device=ranks.device)[ranks[at_far]]
        self.at_far = at_far[order.argsort(stable=True)]

    def near_of(self, call: _Call) -> _Call:
        """The call inside this host, of its own tokens."""
        return call._replace(routing=self.near)

    def far_of(self, call: _Call) -> _Call:
        """The call inside this host, of those of other hosts, which are rounded already."""
        if isinstance(call, DispatchCall):
            call = call._replace(quantize=None)
        return call._replace(routing=self.far)

    def naming(self, op: str) -> AbstractContextManager[None]:
        """`hosts.naming` of the whole group."""
        return naming(self.group, op)

    def out(self, x: torch.Tensor, op: str) -> OnTheWay:
        """This rank's x (T, ..), to the ranks that hold its tokens: (held, ..) of those here, of
        which what is behind the last one is undefined.
        """
        rows = x.index_select(0, self.sent)
        held = rows.new_empty(self.held, *rows.shape[1:])
        return OnTheWay(rows, self.receives, self._sends, self.group, op, held)

    def back(self, sums: torch.Tensor, op: str) -> OnTheWay:
        """Of tokens held here, their sums (held, ..), to where they are from."""
        held = sums[: sum(self.receives)].contiguous()
        return OnTheWay(held, self._sends, self.receives, self.group, op)

    def added(self, own: torch.Tensor, way: OnTheWay, dtype: torch.dtype) -> torch.Tensor:
        """Of this rank's tokens, its own host's sums and those that have come `back`, host by host
        in their order, as `dtype`.
        """
        came, tokens = way.come().split(self._sends), self.sent.split(self._sends)
        total = torch.zeros(own.shape, dtype=sum_dtype(own), device=own.device)
        for number, theirs in enumerate(self.group.hosts):
            if number == self._host:
                total += own
            else:
                for rank in theirs:
                    total.index_add_(0, tokens[rank], came[rank].to(total.dtype))
        return total.to(dtype)

    def apart(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the whole routing, as those of `near` and of `far`."""
        parts = []
        for at, routing in (self.at_near, self.near), (self.at_far, self.far):
            rows = x.new_empty(routing.count, *x.shape[1:])
            torch.index_select(x, 0, at, out=rows[: len(at)])
            parts.append(rows)
        return parts[0], parts[1]

    def all_apart(self, xs: Tensors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """`apart` of several."""
        parts = [*map(self.apart, xs)]
        return [near for near, _ in parts], [far for _, far in parts]

    def together(self, near: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
        """The reverse; on a GPU rows that do not come are undefined, as of any routing."""
        whole = near.new_empty(self._count, *near.shape[1:])
        whole.index_copy_(0, self.at_near, near[: len(self.at_near)])
        return whole.index_copy_(0, self.at_far, far[: len(self.at_far)])


_levels: WeakKeyDictionary[Routing, Levels] = WeakKeyDictionary()


def _levels_of(routing: Routing) -> Levels:
    """Made once for a routing. Collective the first time."""
    if (found := _levels.get(routing)) is None:
        found = _levels[routing] = Levels(routing)
    return found


def roomy(count: int) -> int:
    """`count`, rounded up by an eighth at most, to one of eight sizes between it and its double."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


def _coming(routing: Routing) -> int:
    """How many rows come: on a GPU there is room for more."""
    return int(routing.ends[-1]) if len(routing.ends) else 0


def _with_less_room(routing: Routing, assigned: int) -> Routing:
    """On a GPU: one whose tables end not far behind the last row. See `Routing.assigned`."""
    count = min(routing.count, roomy(_coming(routing)))
    ranks, rows, slots = (each[:count] for each in (routing.ranks, routing.rows, routing.slots))
    return replace(routing, ranks=ranks, rows=rows, slots=slots, assigned=assigned)


def _numbers(routing: Routing, ranks: Sequence[int]) -> torch.Tensor:
    """Of each expert, and of -1 behind them, its number among those of a host's ranks, or -1."""
    tp, experts = routing.tensor_parallel_size, routing.experts
    firsts, own = offsets(experts[::tp]), 0
    table = torch.full((sum(experts[::tp]) + 1,), -1, dtype=torch.int32)
    for rank in ranks[::tp]:
        first, count = firsts[rank // tp], experts[rank]
        table[first : first + count] = torch.arange(own, own + count, dtype=torch.int32)
        own += count
    return table.to(routing.topk_ids.device)


def _tokens(levels: Levels, x: torch.Tensor, call: DispatchCall, op: str) -> OnTheWay:
    return levels.out(packed(x) if call.quantize else x, op)


def _rows_come(way: OnTheWay, x: torch.Tensor, call: DispatchCall) -> torch.Tensor:
    return unpacked(way.come(), x.dtype) if call.quantize else way.come()


def dispatch_forward(
    call: DispatchCall, x: torch.Tensor, weights: Tensors, keep: bool, grads: bool
) -> DispatchMade:
    levels, op = _levels_of(call.routing), "dispatch_grouped_matmul"
    way = _tokens(levels, x, call, op)
    with levels.naming(op):
        near = levels.engine.dispatch_forward(levels.near_of(call), x, weights, keep, grads)
    held = _rows_come(way, x, call)
    with levels.naming(op):
        far = levels.engine.dispatch_forward(levels.far_of(call), held, weights, keep, grads)
    hs = [*map(levels.together, near.hs, far.hs)]
    if near.rows is not None and far.rows is not None:
        rows, again = levels.together(near.rows, far.rows), []
    else:  # they are shared once more for the gradients of the weights
        rows, again = None, [held] if grads and weights else []
    if keeps_sums(call.activation):
        kept = [*map(levels.together, near.kept, far.kept)]
    else:
        kept = hs if near.kept else []
    return DispatchMade(hs, rows, [*kept, *again])


def dispatch_backward(
    call: DispatchCall,
    x: torch.Tensor,
    weights: Tensors,
    rows: torch.Tensor | None,
    dhs: Tensors,
    kept: Tensors,
    needs_x: bool,
    needs_w: Sequence[bool],
) -> list[torch.Tensor | None]:
    levels, op = _levels_of(call.routing), "dispatch_grouped_matmul backward"
    count = len(weights) if keeps_sums(call.activation) else len(dhs) if call.activation else 0
    kept, again = kept[:count], kept[count:]
    held = x.new_empty(levels.held, x.shape[1])
    if again:
        (held,) = again
    elif any(needs_w) and rows is None:  # in a graph
        held = _rows_come(_tokens(levels, x, call, op), x, call)
    near_rows, far_rows = (None, None) if rows is None else levels.apart(rows)
    near_dhs, far_dhs = levels.all_apart(dhs)
    near_kept, far_kept = levels.all_apart(kept)
    needs, wide, way = (needs_x, needs_w), sum_dtype(x), None
    with levels.naming(op):
        dheld, *far = levels.engine.dispatch_backward(
            levels.far_of(call), held, weights, far_rows, far_dhs, far_kept, *needs, sum_as=wide
        )
    if dheld is not None:
        way = levels.back(dheld.to(call.routing.wire(x)), op)
    with levels.naming(op):
        dx, *near = levels.engine.dispatch_backward(
            levels.near_of(call), x, weights, near_rows, near_dhs, near_kept, *needs, sum_as=wide
        )
    if dx is not None and way is not None:
        dx = levels.added(dx, way, x.dtype)
    return [dx, *map(_both, near, far)]


def combine_forward(
    call: CombineCall, h: torch.Tensor, w: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    levels, op, wide = _levels_of(call.routing), "grouped_matmul_combine", sum_dtype(h)
    near_h, far_h = levels.apart(h)
    held = None if weights is None else levels.out(weights, op).come()
    with levels.naming(op):
        held = without_padding(held, levels.far)
        sums = levels.engine.combine_forward(levels.far_of(call), far_h, w, held, sum_as=wide)
    way = levels.back(sums.to(call.wire), op)
    with levels.naming(op):
        own = without_padding(weights, levels.near)
        y = levels.engine.combine_forward(levels.near_of(call), near_h, w, own, sum_as=wide)
    return levels.added(y, way, h.dtype)


def combine_backward(
    call: CombineCall,
    h: torch.Tensor,
    w: torch.Tensor | None,
    weights: torch.Tensor | None,
    dy: torch.Tensor,
    needs: Sequence[bool],
) -> list[torch.Tensor | None]:
    levels, op = _levels_of(call.routing), "grouped_matmul_combine backward"
    way = levels.out(dy, op)
    of_weights = None if weights is None else levels.out(weights, op)
    near_h, far_h = levels.apart(h)
    with levels.naming(op):
        near = levels.engine.combine_backward(levels.near_of(call), near_h, w, weights, dy, needs)
    dheld = way.come()
    held = None if of_weights is None else of_weights.come()
    with levels.naming(op):
        far = levels.engine.combine_backward(levels.far_of(call), far_h, w, held, dheld, needs)
    dh = levels.together(near[0], far[0]) if near[0] is not None and far[0] is not None else None
    dweights = near[2]
    if dweights is not None and far[2] is not None:
        # Of each slot, one host's term is not 0.
        dweights = levels.added(dweights, levels.back(far[2], op), dweights.dtype)
    return [dh, _both(near[1], far[1]), dweights]


def _both(near: torch.Tensor | None, far: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of a weight, by the rows of both."""
    return None if near is None or far is None else near.add_(far)
