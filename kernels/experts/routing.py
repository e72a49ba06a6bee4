"""Who computes what: which rows each rank receives for its experts, from whom, and in what order.

W ranks; rank r holds T_r tokens, each of which goes to k experts. Experts are numbered through the
ranks that hold them, in rank order. With tensor parallelism inside experts, `tp` consecutive ranks
hold parts of the same experts, and each of them receives all rows of these:

    W = 4, tp = 2, 6 experts      ranks 0, 1: experts 0 1 2       ranks 2, 3: experts 3 4 5

Assignment j of token t is *slot* t * k + j of its rank. A rank's rows are sorted by expert, then by
the rank that they come from, then by slot there. This is the order in which `torch._grouped_mm`
wants them, and it does not depend on when rows arrive:

    rows     | expert 0: from rank 0, from rank 1, .. | expert 1: from rank 0, ..  | ..
    ends                                              ^                            ^

All ranks gather all ids, a few bytes a token, and each finds its own rows by itself. All of it is
on the device of the ids; on a GPU the host reads none of it, and ids that are no expert's are
nobody's, as -1 is: only with WEFT_CHECK=1 it looks at them.

In a graph of torch.compile, `routed` is the op that `custom_ops` has of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch

from weft import settings
from weft.collectives import Group, agree, all_gather, chunk_sizes, resolve
from weft.collectives.ranks.chunks import offsets
from weft.collectives.ranks.group import GroupLike, group_name
from weft.collectives.ranks.traced import is_call_traced
from weft.errors import MismatchError
from weft.kernels.engine.local_matmul import on_cpu, sum_dtype
from weft.kernels.engine.shards import is_eager
from weft.kernels.experts.grouped import slices


@dataclass(eq=False)
class Routing:
    """Where this rank's rows come from, and its tokens' results.

    Made by `route`. R rows: on a CPU, as many as come; on a GPU a bound, of which the first
    `ends[-1]` are used. In a graph of torch.compile `group` is the name of one, and `tokens` and
    `experts` are tensors (W,); what a graph returns may be used outside of it.

    int32 ids are not copied, which would be a launch: what reads them later raises ValueError if
    they were written to since. Those made under torch.inference_mode() do not tell.

    Attributes:
        group: of W ranks.
        tensor_parallel_size: on how many consecutive ranks each expert is.
        topk_ids: (T, k) int32, of this rank's tokens; -1: nobody.
        tokens: T of every rank.
        experts: how many experts each rank has.
        counts: (W, E_r) int32: rows that come from each rank for each of this rank's experts.
        ends: (E_r,) int32: one after the last row of each expert.
        ranks, rows, slots: (R,) int32: for each row, the rank that it comes from, the token there,
            and the slot there.
        load: (E,) int64: how many assignments of all ranks go to each expert, for balance losses.
        everyones: over several hosts, `topk_ids` of all ranks; None elsewhere, and in a graph.
        assigned: how many of all ranks' assignments are about for these experts; None: all are.
    """

    group: Group
    tensor_parallel_size: int
    topk_ids: torch.Tensor
    tokens: list[int]
    experts: list[int]
    counts: torch.Tensor
    ends: torch.Tensor
    ranks: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    load: torch.Tensor = field(repr=False)
    everyones: torch.Tensor | None = field(default=None, repr=False)
    assigned: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # No fields: a call that goes straight to its launches makes them anew, too.
        ids = self.topk_ids
        told = not isinstance(self.group, str) and not ids.is_inference()
        self._version, self._captured = ids._version if told else None, told and _is_captured(ids)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies have ids of their own."""
        vars(self).update(state)
        self.__post_init__()

    def check_ids(self) -> None:
        """Raise ValueError if ids were written to since, unless a CUDA graph reads them anew."""
        if self._version is None or self._version == self.topk_ids._version:
            return
        if not self._captured or _is_captured(self.topk_ids):
            raise ValueError(
                f"topk_ids {tuple(self.topk_ids.shape)} were written to after they were routed, "
                f"and a routing shares int32 ones: write to other memory, or route a clone"
            )

    @property
    def top_k(self) -> int:
        """k, the experts of a token."""
        return self.topk_ids.shape[1]

    @property
    def parts(self) -> int:
        """How many results a token gets: one of each rank that computes for it."""
        return self.top_k * self.tensor_parallel_size

    @property
    def part(self) -> int:
        """Which part of its experts this rank has."""
        return self.group.rank % self.tensor_parallel_size

    def wire(self, x: torch.Tensor) -> torch.dtype:
        """In which results like x travel: wider where they are partial sums."""
        return sum_dtype(x) if self.tensor_parallel_size > 1 else x.dtype

    def check_experts(self, w: torch.Tensor) -> None:
        """Raise ValueError unless w (E_r, ..) are this rank's experts."""
        own = self.experts[self.group.rank]
        if len(w) != own:
            raise ValueError(f"the routing is of {own} experts on this rank, but w has {len(w)}")

    @property
    def count(self) -> int:
        """R."""
        return len(self.rows)

    @property
    def rows_each(self) -> int:
        """About how many rows an expert gets, if tokens choose all alike."""
        assigned = sum(self.tokens) * self.top_k if self.assigned is None else self.assigned
        return max(1, assigned // max(1, sum(self.experts[:: self.tensor_parallel_size])))

    @property
    def name(self) -> str:
        """That of the group, as ops of a graph take it."""
        return group_name(self.group)

    def taken_apart(self) -> tuple[Any, ...]:
        """What calls of kernels go by, but for the group: see `repeatable`."""
        self.check_ids()
        numbers = self.tensor_parallel_size, self.tokens, self.experts, self.assigned
        return *numbers, self.topk_ids, self.ends, self.ranks, self.rows, self.slots

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What such ops take in place of a routing: `of_tensors` makes it again."""
        told: list[Any] = [self.tokens, self.experts]
        if not isinstance(self.group, str):
            told = [torch.tensor(each) for each in told]
        arrays = self.counts, self.ends, self.ranks, self.rows, self.slots, self.load
        return [self.topk_ids, *told, *arrays]

    @classmethod
    def of_tensors(cls, tensors: Sequence[torch.Tensor], group: str, tp: int) -> Routing:
        """That of a graph."""
        ids, *told = cast("Sequence[Any]", tensors)  # tensors in place of numbers
        return cls(cast(Any, group), tp, ids, *told)

    def outside_graphs(self) -> Routing:
        """The same with a group and with numbers, if it comes from a graph."""
        if not isinstance(self.group, str):
            return self
        tokens, experts = (each.tolist() for each in cast(Any, (self.tokens, self.experts)))
        return replace(self, group=resolve(self.group), tokens=tokens, experts=experts)

    # What the host engines loop over: on a CPU only.

    @cached_property
    def blocks(self) -> list[list[slice]]:
        """By expert, then by rank: the rows that come from there."""
        sizes = self.counts.t().reshape(-1).tolist()
        ends = [*accumulate(sizes)]
        cuts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        W = self.group.world_size
        return [cuts[first : first + W] for first in range(0, len(cuts), W)]

    @cached_property
    def rows_of_expert(self) -> list[slice]:
        """The rows of each expert."""
        return slices(self.ends)

    @cached_property
    def long_rows(self) -> torch.Tensor:
        """`rows` as torch's indexing takes them."""
        return self.rows.long()

    @cached_property
    def long_slots(self) -> torch.Tensor:
        """`slots` likewise."""
        return self.slots.long()

    @cached_property
    def places(self) -> torch.Tensor:
        """(R,) int64: where results go among the parts of all slots of the rank they are for."""
        return self.long_slots * self.tensor_parallel_size + self.part

    @cached_property
    def firsts(self) -> list[list[int | None]]:
        """Of the rows of each of `blocks`, the first one's place, if the others' follow it."""
        filled = [block for of in self.blocks for block in of if block.stop > block.start]
        ends = torch.tensor([[block.start, block.stop - 1] for block in filled], dtype=torch.int64)
        places = iter(self.places[ends.view(-1)].view(-1, 2).tolist())

        def first_of(block: slice) -> int | None:
            if block.stop == block.start:
                return None
            first, last = next(places)  # slots of one rank rise
            return first if last - first == block.stop - block.start - 1 else None

        return [[first_of(block) for block in of] for of in self.blocks]

    @cached_property
    def unused(self) -> torch.Tensor:
        """Slots of this rank that nobody computes, as int64 indices among `parts`."""
        padding = (self.topk_ids < 0).reshape(-1)
        return padding.repeat_interleave(self.tensor_parallel_size).nonzero().squeeze(1)


def _is_captured(ids: torch.Tensor) -> bool:
    return not on_cpu(ids) and not is_eager(ids.device)


class Roster(NamedTuple):
    """What all ranks know of each other before they know their ids; fields as of `Routing`."""

    group: Group
    tensor_parallel_size: int
    topk_ids: torch.Tensor
    tokens: list[int]
    experts: list[int]

    @property
    def top_k(self) -> int:
        """k, the experts of a token."""
        return self.topk_ids.shape[1]


def route(
    topk_ids: torch.Tensor,
    num_experts: int,
    group: GroupLike = None,
    *,
    tensor_parallel_size: int = 1,
    capacity: int | None = None,
    sizes: Sequence[int] | None = None,
) -> Routing:
    """Have all ranks know where the tokens go. Collective.

    Args:
        topk_ids: (T, k) of any integer dtype: the experts of each of this rank's tokens, numbered
            through all ranks; -1 for padding. T may differ between ranks and be 0. An expert that
            is named twice computes the token twice. Leave int32 ones as they are until backward.
        num_experts: of all ranks, up to 32,767; those that hold them have torch.chunk's share each.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        tensor_parallel_size: on how many consecutive ranks each expert is, a part of its hidden
            features on each.
        capacity: how many rows a rank may receive at most. None: all that can come, which on a GPU
            is what buffers are made for: W * T * k rows.
        sizes: T of every rank, if known.

    Raises:
        ValueError: on every rank, if an id of any rank is out of range, or a rank receives more
            rows than `capacity` (on a GPU: an assertion on the device); ranks that
            `tensor_parallel_size` does not divide; too many experts.
        MismatchError: on every rank, if they differ in k, or in the number of experts.

    Example:
        ids [[0, 2]] on rank 0 and [[1, 1]] on rank 1, 4 experts on 2 ranks. Rank 0 has experts 0
        and 1, and rows [x_0; x_1; x_1], ends [1, 3]. Rank 1 has rows [x_0], ends [1, 1].
    """
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    return routed(topk_ids, 0, group, tensor_parallel_size, capacity, sizes, num_experts)


def share(num_experts: int, rank: int, world_size: int, tp: int) -> int:
    """How many of all experts a rank holds, that of torch.chunk."""
    return chunk_sizes(num_experts, world_size // tp)[rank // tp]


def routed(
    topk_ids: torch.Tensor,
    own_experts: int,
    group: GroupLike,
    tp: int,
    capacity: int | None = None,
    sizes: Sequence[int] | None = None,
    num_experts: int | None = None,
) -> Routing:
    """`route` for ranks that tell each other how many experts they have.

    Given `num_experts`, of all ranks, they have a share of these, whatever `own_experts` is.
    """
    check_tokens(topk_ids)
    if is_call_traced(topk_ids):  # see `custom_ops`
        # A copy, or what the graph writes to topk_ids later would be seen.
        ids = topk_ids.detach().to(torch.int32, copy=True).contiguous()
        name, op = group_name(group), torch.ops.weft.route
        made = op(ids, own_experts, name, tp, capacity, sizes, num_experts)
        return Routing.of_tensors([ids, *made], name, tp)
    return routing_of(
        rostered(topk_ids, own_experts, group, tp, capacity, sizes, num_experts), capacity
    )


def rostered(
    topk_ids: torch.Tensor,
    own_experts: int,
    group: GroupLike,
    tp: int,
    capacity: int | None = None,
    sizes: Sequence[int] | None = None,
    num_experts: int | None = None,
) -> Roster:
    """The first half of `routed`, which no device takes part in."""
    ids = topk_ids.detach().to(torch.int32).contiguous()
    group = resolve(group)
    check_sets(group, tp)
    own = (
        own_experts if num_experts is None else share(num_experts, group.rank, group.world_size, tp)
    )
    T, k = ids.shape
    low, high = -1, -1
    if _are_read(topk_ids) and topk_ids.numel():
        low, high = (int(end) for end in topk_ids.aminmax())
    asked = {"k": k, "tensor_parallel_size": tp, "capacity": capacity, "num_experts": num_experts}
    told = _told(group, (T, own, high if low >= -1 else low), tuple(asked.items()))
    tokens, experts, extremes = map(list, zip(*told, strict=True))
    if sizes is not None and list(sizes) != tokens:
        raise ValueError(f"sizes must be the tokens of every rank, {tokens}, got {list(sizes)}")
    _check_experts(tp, experts, extremes, sum(experts[::tp]))
    return Roster(group, tp, ids, tokens, experts)


def _are_read(ids: torch.Tensor) -> bool:
    """Whether the host looks at ids. On a GPU, for which it would wait, only with WEFT_CHECK=1."""
    return on_cpu(ids) or (settings.check_calls() and is_eager(ids.device))


def routing_of(roster: Roster, capacity: int | None, received: int | None = None) -> Routing:
    """The second half: all ranks gather all ids.

    Args:
        capacity: as in `route`.
        received: as many rows as come to this rank, where the host knows them.
    """
    group, tp, ids, tokens, experts = roster
    k, own = roster.top_k, experts[group.rank]
    firsts = [0, *accumulate(experts[::tp])]  # of each set of ranks with the same experts
    gathered = all_gather(ids, group, sizes=tokens)
    everyones = gathered.reshape(-1)
    load = _counted(everyones, firsts[-1])
    counted = [load[low:high].sum() for low, high in pairwise(firsts)]
    if received is None:
        room = _rows_of_room(counted, len(everyones), capacity, group.rank // tp)
    else:
        room = _checked_room(roster, counted, received)
    first = firsts[group.rank // tp]
    # Sorting keeps the order of those alike, which is that of ranks and slots.
    expert = everyones - first
    expert = expert.masked_fill((expert < 0) | (expert >= own), own)
    slot = expert.argsort(stable=True)[:room]
    starts = _filled(offsets(tokens), ids)
    ranks = torch.searchsorted(starts, slot // k, right=True) - 1
    whose = torch.repeat_interleave(
        torch.arange(len(tokens), device=ids.device),
        _filled(tokens, ids) * k,
        output_size=len(everyones),
    )
    counts = _counted(whose * (own + 1) + expert, len(tokens) * (own + 1))
    counts = counts.view(len(tokens), own + 1)[:, :own].int()
    slots = slot - starts[ranks] * k
    return Routing(
        group, tp, ids, tokens, experts, counts, counts.sum(0).cumsum(0).int(), ranks.int(),
        (slots // k).int(), slots.int(), load, gathered if group.hosts else None,
    )  # fmt: skip


def check_sets(group: Group, tp: int) -> None:
    """Raise ValueError unless the ranks are sets of `tp`."""
    if tp < 1 or group.world_size % tp:
        raise ValueError(
            f"tensor_parallel_size must divide the {group.world_size} ranks of the group, got {tp}"
        )


_MOST_EXPERTS = (1 << 15) - 1  # see `_told`
_INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8


def check_tokens(topk_ids: torch.Tensor, x: torch.Tensor | None = None) -> None:
    """Raise ValueError unless topk_ids are experts of tokens, those of x."""
    if topk_ids.ndim != 2 or topk_ids.shape[1] < 1 or topk_ids.dtype not in _INTEGERS:
        raise ValueError(
            f"topk_ids must be integers (T, k) with k >= 1, got {tuple(topk_ids.shape)} "
            f"{topk_ids.dtype}; of unsigned ones torch computes with uint8 alone"
        )
    if x is not None and (len(x), x.device) != (len(topk_ids), topk_ids.device):
        raise ValueError(
            f"x has {len(x)} tokens on {x.device}, but topk_ids {tuple(topk_ids.shape)} are of "
            f"{len(topk_ids)} on {topk_ids.device}"
        )


def check_weights(topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Raise ValueError unless there is a float for each of topk_ids."""
    given, wanted = ((t.shape, t.device) for t in (topk_weights, topk_ids))
    wide = topk_weights.is_floating_point() and topk_weights.element_size() > 1
    if given != wanted or not wide:
        raise ValueError(
            f"topk_weights must be floats of 16 bits or more {tuple(topk_ids.shape)} on "
            f"{topk_ids.device}, one for each of topk_ids, got {tuple(topk_weights.shape)} "
            f"{topk_weights.dtype} on {topk_weights.device}"
        )


def without_padding(weights: torch.Tensor | None, routing: Routing) -> torch.Tensor | None:
    """0 where nobody is: a softmax over no expert is NaN, of which 0 times is NaN."""
    return None if weights is None else weights.masked_fill(routing.topk_ids < 0, 0)


def _told(
    group: Group, mine: tuple[int, int, int], same: tuple[tuple[str, int | None], ...]
) -> list[tuple[int, int, int]]:
    """Every rank's tokens, experts, and largest id, or smallest if that is below -1."""
    tokens, experts, extreme = mine
    op = "routing of tokens to experts"
    # In one word: 16 bits for experts, of which there may be fewer, 16 signed ones for the id.
    extreme = max(-(1 << 15), min(extreme, (1 << 15) - 1)) + (1 << 15)
    words = agree(group, op, tokens << 32 | min(experts, 0xFFFF) << 16 | extreme, same)
    return [(w >> 32, w >> 16 & 0xFFFF, (w & 0xFFFF) - (1 << 15)) for w in words]


def _check_experts(tp: int, experts: list[int], extremes: list[int], E: int) -> None:
    """The same on every rank."""
    if any(experts[rank] != experts[rank // tp * tp] for rank in range(len(experts))):
        raise MismatchError(
            f"each {tp} consecutive ranks hold parts of the same experts, as "
            f"tensor_parallel_size={tp}, but ranks have {experts} of them"
        )
    if E > _MOST_EXPERTS:
        raise ValueError(f"ranks may have up to {_MOST_EXPERTS} experts in all, got {E} or more")
    if wrong := {rank: id for rank, id in enumerate(extremes) if not -1 <= id < E}:
        raise ValueError(
            f"topk_ids must be between 0 and {E - 1}, as the ranks have {E} experts, or -1 for "
            f"padding, got " + ", ".join(f"{id} on rank {rank}" for rank, id in wrong.items())
        )


def _counted(values: torch.Tensor, size: int) -> torch.Tensor:
    """How often each of 0 .. size-1 occurs, as int64: `torch.bincount` would wait for a GPU."""
    counts = torch.zeros(size + 1, dtype=torch.int64, device=values.device)
    places = values.long().masked_fill((values < 0) | (values >= size), size)
    return counts.scatter_add_(0, places, torch.ones_like(places))[:size]


def _filled(numbers: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
    """`numbers` where ids are. A GPU fills them in: a copy from the host would wait for all that is
    enqueued, and a CUDA graph takes none.
    """
    if on_cpu(ids):
        return torch.tensor(numbers)
    return torch.stack([torch.full((), n, dtype=torch.int64, device=ids.device) for n in numbers])


def _checked_room(roster: Roster, counted: list[torch.Tensor], received: int) -> int:
    """`received`; an error on every rank, on GPUs of the device, if other than so many rows come to
    any of them.
    """
    told = agree(roster.group, "rows that come to experts", received)
    come = [counted[rank // roster.tensor_parallel_size] for rank in range(len(told))]
    error = (
        f"graphs were told that {told} rows come to the ranks, but {{}} come by their ids: both "
        f"must be made of the same counts"
    )
    if not on_cpu(roster.topk_ids):
        right = torch.stack(come) == _filled(told, roster.topk_ids)
        torch._assert_async(right.all(), error.format("others"))
    elif told != (found := [int(count) for count in come]):
        raise ValueError(error.format(found))
    return received


def _rows_of_room(counted: list[torch.Tensor], bound: int, capacity: int | None, mine: int) -> int:
    """How many rows this rank has room for; `counted` are those that come, `bound` is the most."""
    if not on_cpu(counted[0]):
        if capacity is None or capacity >= bound:
            return bound
        fits = torch.stack(counted).max() <= capacity
        torch._assert_async(fits, f"a rank receives more than {capacity=} rows: raise it")
        return capacity
    received = [int(count) for count in counted]
    if capacity is not None and max(received) > capacity:
        raise ValueError(
            f"ranks receive up to {max(received)} rows, more than {capacity=}: raise it, or leave "
            f"it out"
        )
    return received[mine]
