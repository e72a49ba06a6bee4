"""Rows for experts: all_to_all, their order and the matmuls, which become weft's fused ops.

    rows -> all_to_all -> [order] -> grouped mm, ..     dispatch_grouped_matmul
    grouped mm -> [order] -> all_to_all                 grouped_matmul_combine
    all_to_all of other rows of matmuls                 all_to_all, on CPUs

Rows are sent sorted by expert, arrive by rank, and are put in order of experts: by an index that is
data, or cut and joined again, as Megatron does. But either is made of counts alone, which ranks
exchange first, and the graph has all steps:

    counts (E,) --> all_to_all --> theirs (W, E / W) --> receives, order, offs
        '------------------------------------------------> sends

Where each expert has a matmul of its own, rows arrive in order, and the matmuls stay.

So these steps are run, when torch compiles, on tables of counts of all ranks, the same tables on
all of them: drawn ones, and those in which one expert of each rank gets all. Only steps that are
linear in counts, or index by them, are taken, as no threshold may hide between two tables. What
they make must be what the fused ops do. With counts as ids, an expert a row, these do just that: no
row is rounded or added to another, and gradients are the same two chains. Forward and backward are
rewritten before torch cuts them apart, as the backward alone has not the steps. If rows at run time
are not as counted, `route` raises.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from weft import settings
from weft.collectives.custom_ops import world_of
from weft.collectives.ranks.group import process_group
from weft.kernels.engine.local_matmul import on_cpu
from weft.kernels.graphs.building import (
    UNKNOWN,
    Builder,
    RefusedError,
    erase,
    is_step,
    played,
    tell_as,
)
from weft.kernels.graphs.chains import (
    COLLECTIVES,
    SPLITS,
    aten,
    c10d,
    dim_argument,
    forget_in_place,
    grown_from,
    is_call,
    is_cast,
    is_reshape,
    shape,
)
from weft.kernels.graphs.receipts import Receipt, receipt_of
from weft.kernels.graphs.sums import PRODUCTS, Outcome, counted

_ops: Any = torch.ops.weft
_CAST: Any = torch.ops.prims.convert_element_type.default
_EXCHANGE = c10d.all_to_all_single.default
_TAKERS = (
    *PRODUCTS,
    aten._grouped_mm.default,
    aten._scaled_grouped_mm.default,
    _ops.dispatch_grouped_matmul.default,
    _ops.grouped_matmul_combine.default,
)
# Tables of counts: those that are drawn, and the rows of those in which one expert a rank gets all.
_DRAWN, _ALIKE = 8, 40


class _Tried(NamedTuple):
    """What the fused ops do with one table of counts, (W, E).

    Attributes:
        sent, came: (W,): rows that this rank sends to each, and that come from each.
        order: for each row in the order of experts, its place among those that came.
        ends: (E / W,): one after the last row of each expert.
        known: the values of nodes, of the counts first.
    """

    sent: list[int]
    came: list[int]
    order: torch.Tensor
    ends: list[int]
    known: dict[Node, Any]


@dataclass(eq=False)
class _Counts:
    """Counts that ranks exchange.

    Attributes:
        mine: how many rows this rank sends to each expert of all ranks.
        exchange: the collective that brings those of others.
        routing: that of the rows, in the graph; None before the first of them are sent.
    """

    mine: Node
    exchange: Node
    routing: list[Node] | None = None

    @property
    def experts(self) -> int:
        """Of all ranks."""
        number: int = self.mine.meta["val"].numel()
        return number

    @cached_property
    def tried(self) -> list[_Tried]:
        """Tables of counts, the same on all ranks, as all of them must find the same."""
        rank, W = world_of(str(self.exchange.args[-1]))
        E, generator = self.experts, torch.Generator().manual_seed(0)
        own, tables, found = E // W, list[torch.Tensor](), list[_Tried]()
        for _ in range(_DRAWN):
            sizes = torch.randint(1, 4 * E + 16, (W,), generator=generator).tolist()
            drawn = [torch.randint(E, (size,), generator=generator) for size in sizes]
            tables.append(torch.stack([each.bincount(minlength=E) for each in drawn]))
        for expert in range(own):
            tables.append(torch.zeros(W, E, dtype=torch.int64))
            tables[-1][:, expert::own] = _ALIKE
        for M in tables:
            mine = M[:, rank * own : (rank + 1) * own].contiguous()
            whose = torch.arange(own).repeat(W).repeat_interleave(mine.reshape(-1))
            gathers = is_call(self.exchange, c10d.all_gather_into_tensor.default)
            pairs = (self.mine, M[rank]), (self.exchange, M if gathers else mine)
            known = {n: v.reshape(shape(n)).to(n.meta["val"].dtype) for n, v in pairs}
            sent, came = M[rank].view(W, own).sum(1).tolist(), mine.sum(1).tolist()
            ends = mine.sum(0).cumsum(0).tolist()
            found.append(_Tried(sent, came, whose.argsort(stable=True), ends, known))
        return found


class _Move(NamedTuple):
    """Rows that go to experts, or back.

    Attributes:
        collective: the all_to_all.
        arrived: what it brings.
        is_out: whether they go to experts.
        rows: in the order of experts: of those that go out, made of `arrived`; else what is sent is
            made of them.
        by: the index, or the rows as they are joined again; None if they are left as they are.
        scatters: whether it tells where each row goes, rather than where it comes from.
    """

    collective: Node
    arrived: Node
    is_out: bool
    rows: Node
    by: Node | None
    scatters: bool


def fuse_experts(graph: Graph) -> tuple[list[Receipt], dict[Node, str]]:
    """Fuse what moves rows of experts with the order of rows and matmuls.

    Returns:
        Receipts of the collectives that are gone; those that stay, and why.
    """
    gone: list[Receipt] = []
    stay: dict[Node, str] = {}
    known: dict[Node, _Counts] = {}
    for node in [each for each in graph.nodes if _moves_counted_rows(each)]:
        try:
            gone.append(_fuse(node, known))
        except RefusedError as refused:
            if _is_beside_matmuls(node):
                stay[node] = str(refused)
    return gone, stay


def _moves_counted_rows(node: Node) -> bool:
    """Whether it moves matrices of floats, unequal shares that numbers of the graph tell."""
    if not is_call(node, _EXCHANGE):
        return False
    (_, receives, sends, _), value = node.args, node.meta["val"]
    told = [*receives, *sends]  # type: ignore[misc]
    is_matrix = value.ndim == 2 and value.is_floating_point() and value.itemsize > 1
    return is_matrix and len({*told}) > 1 and any(isinstance(each, Node) for each in told)


def _fuse(node: Node, known: dict[Node, _Counts]) -> Receipt:
    """Fuse one.

    Args:
        known: the counts of those before, by their exchange.

    Raises:
        RefusedError: it cannot be; the graph does what it did.
    """
    waits = [user for user in node.users if is_call(user, c10d.wait_tensor.default)]
    if len(waits) != 1 or not all(_asks_rows(user) for user in node.users if user not in waits):
        raise RefusedError("its result is used before it is waited for")
    forget_in_place(waits[0])
    found = _exchanged_counts(node)
    counts = known.setdefault(found.exchange, found)
    if _is_out(node, counts):
        return _send(_ordered_out(node, waits[0]), counts)
    if counts.routing is None:
        raise RefusedError("its rows were not sent here by the same counts")
    return _return(_ordered_back(node, waits[0]), counts, counts.routing)


def _send(move: _Move, counts: _Counts) -> Receipt:
    node, rows = move.collective, move.rows
    x, receives, _, group = node.args
    taken = _narrowing_casts(rows) or [rows]
    users = dict.fromkeys(user for each in taken for user in each.users)
    products = [user for user in users if _multiplies(user) and user.args[0] in taken]
    if not products and move.by is None:
        raise RefusedError("no grouped matmul takes its rows in that order")
    _check_order(move, counts, products)
    at, before = Builder(node.graph, rows), Builder(node.graph, node)
    weights = [product.args[1] for product in products]
    if not at.can_hoist(weights):
        raise RefusedError("what multiplies its rows is gathered later")
    what = counted(len(products), "matmul") if products else "rows alone"
    told = receipt_of(node, "dispatch_grouped_matmul", what)
    received = _size_total(before, receives)
    counts.routing = counts.routing or _row_routing(node, counts, received)
    for each in (node, move.arrived, *{rows, *taken}):
        _tell_rows(each, received)
    if taken[0] is not rows:
        x = before.call(_CAST, x, taken[0].meta["val"].dtype)
        tell_as(node, x)
    keep = any(user not in products for each in taken for user in each.users)
    made = at.call(
        _ops.dispatch_grouped_matmul.default,
        x, at.hoisted(weights), counts.routing, group, 1, keep and bool(products), None,
    )  # fmt: skip
    results = [at.call(operator.getitem, made, i) for i in range(len(products) + keep)]
    tell_as(rows, made, *results)
    for product, result in zip(products, results, strict=False):
        at.replace(product, result)
        node.graph.erase_node(product)
    for each in taken:
        if each.users:
            at.replace(each, results[-1])
        erase(node.graph, each)
    return told


def _return(move: _Move, counts: _Counts, routing: list[Node]) -> Receipt:
    node, made = move.collective, move.rows
    _, receives, _, group = node.args
    if is_cast(made) and len(made.users) == 1 and _is_wider(made, made.all_input_nodes[0]):
        made = made.all_input_nodes[0]  # it is cast after it was sent
    products = [made] if _multiplies(made) and len(made.users) == 1 else []
    _check_order(move, counts, products)
    at = Builder(node.graph, node)
    told = receipt_of(node, "grouped_matmul_combine", "a matmul" if products else "rows alone")
    for each in (node, move.arrived):
        _tell_rows(each, _size_total(at, receives))
    h, w = made.args[:2] if products else (made, None)
    made = at.call(_ops.grouped_matmul_combine.default, h, w, None, routing, group, 1, None)
    tell_as(node, made)
    at.replace(move.arrived, made)
    erase(node.graph, move.arrived)
    return told


def _narrowing_casts(rows: Node) -> list[Node]:
    """What casts them to the same fewer bytes, if nothing else is done with them."""
    users = [user for user in rows.users if not _asks_rows(user)]
    dtypes = {user.meta["val"].dtype for user in users if is_cast(user) and _is_wider(rows, user)}
    return users if len(dtypes) == 1 and all(map(is_cast, users)) else []


def _is_wider(node: Node, other: Node) -> bool:
    wider, narrower = (each.meta["val"].dtype.itemsize for each in (node, other))
    return bool(wider > narrower > 1)


def _row_routing(node: Node, counts: _Counts, received: Any) -> list[Node]:
    """That of rows which each have one expert, sorted by these, before `node` sends them."""
    at, group = Builder(node.graph, node), node.args[3]
    mine = at.call(aten.reshape.default, counts.mine, [counts.experts])
    rows = at.size(node.all_input_nodes[0], 0)
    ids = at.call(aten.repeat_interleave.Tensor, mine, output_size=rows)
    ids = at.call(_CAST, ids, torch.int32)
    ids = at.call(aten.unsqueeze.default, ids, 1)
    made = at.call(_ops.route.default, ids, 0, group, 1, None, None, counts.experts, received)
    parts = [at.call(operator.getitem, made, i) for i in range(len(made.meta["val"]))]
    tell_as(node, mine, ids, made, *parts)
    return [ids, *parts]


def _multiplies(node: Node) -> bool:
    """Whether it multiplies rows of experts by matrices of theirs."""
    is_plain = is_call(node, aten._grouped_mm.default) and len(node.args) == 3 and not node.kwargs
    dims = [len(shape(each)) for each in node.args[:2]] if is_plain else []  # type: ignore[arg-type]
    return dims == [2, 3]


def _asks_rows(node: Node) -> bool:
    """Whether it asks how many rows there are."""
    return is_call(node, aten.sym_size.int) and bool(node.args[1] == 0)


def _tell_rows(of: Node, rows: Any) -> None:
    """The number of rows, to all that ask for it."""
    for user in list(of.users):
        if _asks_rows(user):
            user.replace_all_uses_with(rows)
            of.graph.erase_node(user)


def _size_total(at: Builder, sizes: Any) -> Any:
    def added(a: Any, b: Any) -> Any:
        is_told = isinstance(a, Node) or isinstance(b, Node)
        return at.call(operator.add, a, b) if is_told else a + b

    return reduce(added, sizes)


def _ordered_out(node: Node, arrived: Node) -> _Move:
    """What puts in order the rows that have come."""
    user, *others = [user for user in arrived.users if not _asks_rows(user)] or [arrived]
    if not others and is_call(user, aten.index.Tensor) and user.args[0] is arrived:
        return _Move(node, arrived, True, user, _only(user.args[1]), False)
    if not others and _puts(user, arrived):
        return _Move(node, arrived, True, user, _only(user.args[1]), True)
    if joined := _joined_again(arrived):
        return _Move(node, arrived, True, joined, joined, False)
    return _Move(node, arrived, True, arrived, None, False)


def _ordered_back(node: Node, arrived: Node) -> _Move:
    """What rows are put in order to be sent back."""
    sent = node.all_input_nodes[0]
    if is_call(sent, aten.index.Tensor):
        index, rows, scatters = sent.args[1], sent.args[0], False
    elif _puts(sent):
        (_, index, rows, *_), scatters = sent.args, True
    elif rows := _cut_before(sent):
        return _Move(node, arrived, False, rows, sent, False)
    else:
        return _Move(node, arrived, False, sent, None, False)
    assert isinstance(rows, Node)
    return _Move(node, arrived, False, rows, _only(index), scatters)


def _is_cut(node: Any) -> bool:
    """Whether it is a part of rows, or their parts."""
    if is_call(node, operator.getitem):
        return _is_cut(node.args[0])
    if is_call(node, *SPLITS):
        return dim_argument(node, 2) == 0
    return is_call(node, aten.slice.Tensor) and dim_argument(node, 1) == 0


def _joined_again(rows: Node) -> Node | None:
    """The one cat of the parts that rows are cut into, if nothing else is done with these."""
    parts, joined = [rows], set[Node]()
    for each in parts:  # it grows
        for user in each.users:
            if _is_cut(user):
                parts.append(user)
            elif is_call(user, aten.cat.default) and dim_argument(user, 1) == 0:
                joined.add(user)
            elif each is not rows or not _asks_rows(user):
                return None
    return joined.pop() if len(joined) == 1 and len(parts) > 1 else None


def _cut_before(sent: Node) -> Node | None:
    """The rows of whose parts `sent` is joined."""
    if not is_call(sent, aten.cat.default) or dim_argument(sent, 1):
        return None
    found = set[Node]()
    for part in sent.all_input_nodes:
        while _is_cut(part):
            part = part.all_input_nodes[0]
        found.add(part)
    rows = found.pop()
    if found or rows in sent.all_input_nodes:
        return None
    # What splits cut is whole again, and slices that are as many rows as there are.
    sliced = any(is_call(each, aten.slice.Tensor) for each in sent.all_input_nodes)
    is_whole = statically_known_true(shape(rows)[0] == shape(sent)[0])
    return rows if is_whole or not sliced else None


def _puts(node: Node, rows: Node | None = None) -> bool:
    """Whether it puts rows, each of its own once, with nothing left of what was there."""
    if not is_call(node, aten.index_put.default) or rows not in (None, node.args[2]):
        return False
    into: Any
    into, _, given, *adds = node.args
    empty = is_call(into, aten.full.default) and into.args[1] == 0
    same = str(shape(into)) == str(shape(given))  # type: ignore[arg-type]
    return same and bool(empty or adds in ([], [False]))


def _only(index: Any) -> Node:
    if len(index) == 1 and isinstance(index[0], Node):
        return index[0]
    raise RefusedError(UNKNOWN)


def _exchanged_counts(node: Node) -> _Counts:
    """The one exchange of counts over the same ranks that tells how many rows move."""
    _, receives, sends, group = node.args
    found, seen = set[Node](), set[Node]()
    left = [each for each in (*receives, *sends) if isinstance(each, Node)]  # type: ignore[misc]
    while left:
        each = left.pop()
        seen.add(each)
        if is_call(each, *COLLECTIVES):
            found.add(each)
        elif is_step(each):
            left += [n for n in each.all_input_nodes if n not in seen]
    if len(found) != 1:
        raise RefusedError("its numbers of rows are not made of one exchange of counts")
    exchange = found.pop()
    mine = exchange.all_input_nodes[0]
    while is_reshape(mine) or is_call(mine, aten.clone.default):
        mine = mine.all_input_nodes[0]
    sizes = [*shape(mine), *shape(exchange)]
    is_known = all(isinstance(size, int) for size in sizes)
    is_of_counts = not mine.meta["val"].is_floating_point() and _are_alike(exchange, node)
    if mine.meta["val"].device != node.meta["val"].device:
        raise RefusedError("its counts are exchanged on another device than its rows")
    if not is_known or not is_of_counts or not _brings_all(exchange):
        raise RefusedError("its numbers of rows are not made of one exchange of counts")
    counts = _Counts(mine, exchange)
    if counts.experts % world_of(str(group))[1]:
        raise RefusedError("ranks have unequal numbers of experts")
    return counts


def _are_alike(*collectives: Node) -> bool:
    """Whether they are over the same ranks, be it by groups of several names."""
    groups = [process_group(str(each.args[-1])) for each in collectives]
    return len({tuple(dist.get_process_group_ranks(each)) for each in groups}) == 1


def _brings_all(exchange: Node) -> bool:
    """Whether it is an all_gather, or an all_to_all of equal parts."""
    if is_call(exchange, _EXCHANGE):
        return len({*exchange.args[1], *exchange.args[2]}) == 1  # type: ignore[misc]
    return is_call(exchange, c10d.all_gather_into_tensor.default)


def _is_out(node: Node, counts: _Counts) -> bool:
    """Whether rows go to experts, rather than back.

    Raises:
        RefusedError: they go as others than the counts tell.
    """
    _, receives, sends, _ = node.args
    ways = {True, False}
    with unset_fake_temporarily(), torch.no_grad():
        for tried in counts.tried:
            found = played([receives, sends], tried.known)
            given = tried.came, tried.sent
            ways -= {True} if found != [*given] else set()
            ways -= {False} if found != [*reversed(given)] else set()
    if len(ways) != 1:
        raise RefusedError("its numbers of rows are not those of the counts")
    return ways.pop()


def _check_order(move: _Move, counts: _Counts, products: list[Node]) -> None:
    """Raise RefusedError unless rows are in the order of experts, and multiplied so."""
    offs = [*dict.fromkeys(each.args[2] for each in products)]
    with unset_fake_temporarily(), torch.no_grad():
        for tried in counts.tried:
            here, away = (sum(rows) for rows in (tried.came, tried.sent))
            given = move.arrived if move.is_out else move.rows
            tried.known[move.collective] = torch.empty(here if move.is_out else away, 0)
            tried.known[move.arrived] = tried.known[move.collective]
            # Rows that are cut and joined are known by their places, in one column.
            tried.known[given] = torch.arange(here).unsqueeze(1)
            *ends, index = played([*offs, move.by], tried.known)
            order = tried.order
            if move.scatters == move.is_out and move.by is not None:
                order = order.argsort()
            index = torch.arange(here) if index is None else index.reshape(-1)
            if not torch.equal(index.long(), order):
                raise RefusedError("its order is not that of experts")
            if any(each.tolist() != tried.ends for each in ends):
                raise RefusedError("its experts end elsewhere than the counts tell")


def fuse_exchange(graph: Graph, node: Node) -> Outcome:
    """An all_to_all whose rows experts multiply, or have multiplied."""
    x, receives, sends, group = node.args
    assert isinstance(x, Node)
    if not _is_beside_matmuls(node):
        return "", "no matmul makes or takes what it moves", False
    if not on_cpu(x.meta["val"]) and settings.current_engine() == "auto":
        return "", "on GPUs the process group moves rows", False
    made = Builder(graph, node).call(_ops.all_to_all.default, x, receives, sends, group)
    for each in reversed(grown_from(node, lambda n: is_call(n, c10d.wait_tensor.default))):
        each.replace_all_uses_with(made)
        graph.erase_node(each)
    return "all_to_all", "rows of matmuls, through shared memory", True


def _is_beside_matmuls(node: Node) -> bool:
    takes = _reaches(node, lambda n: n.users)
    return takes or _reaches(node.all_input_nodes[0], lambda n: n.all_input_nodes)


def _reaches(node: Node, further: Callable[[Node], Iterable[Node]]) -> bool:
    """Whether there is a matmul on the way, before the next collectives."""
    seen, left = {node}, [node]
    while left:
        each = left.pop()
        if is_call(each, *_TAKERS):
            return True
        if each is node or not is_call(each, *COLLECTIVES):
            new = [n for n in further(each) if n not in seen]
            left += new
            seen.update(new)
    return False
