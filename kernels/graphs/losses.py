"""The cross-entropy of sharded logits: one exchange of all ranks' numbers in the place of three.

    M = all_reduce(max) of x's largest              every rank's largest logit, its sum of
    S = all_reduce(sum) of sum of exp(x - M)        exp(x - largest), what it has at the target,
    all_reduce(sum) of x - M [- log S]              and whether it has that:
        at the target, else 0                       one all_gather; M, S and the third of these

The left is what torch's loss_parallel and Megatron-like code come to. As weft's own loss does,
each rank sums by its own largest logit, so that all numbers can travel together. The softmax
is scaled by the difference instead of being exponentiated again; the gradient moves nothing.

Logits in half precision are exchanged, and summed, in fp32: each of these is rounded once.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from weft.collectives.custom_ops import world_of
from weft.kernels.engine.local_matmul import sum_dtype
from weft.kernels.graphs.building import Builder, ancestors, erase, evaluated
from weft.kernels.graphs.chains import (
    aten,
    c10d,
    forget_in_place,
    grown_from,
    is_call,
    is_cast,
    is_reshape,
    shape,
    waited,
)
from weft.kernels.graphs.receipts import Receipt, receipt_of

_ops: Any = torch.ops.weft
_WHY = "the numbers of a cross-entropy at once"


class _Pick(NamedTuple):
    """The logit at the target, summed over ranks.

    Attributes:
        total: its all_reduce.
        source: x - M [- log S].
        steps: from there to what is summed.
        lowered: whether log S has been subtracted.
        mask: where this rank adds 0, or where it does not.
        hides: which of the two.
    """

    total: Node
    source: Node
    steps: list[Node]
    lowered: bool
    mask: Node
    hides: bool


def fuse_loss(graph: Graph) -> list[Receipt]:
    """Make one exchange of the collectives of each cross-entropy; returns their receipts."""
    told: list[Receipt] = []
    for node in list(graph.nodes):
        if not node._erased and _reduces(node, "max"):
            told += _exchange(graph, node)
    return told


def _exchange(graph: Graph, largest: Node) -> list[Receipt]:
    """One whose largest logits these are; nothing if it is something else."""
    x, group = _maximized(largest.all_input_nodes[0]), largest.args[2]
    if x is None or not x.meta["val"].is_floating_point():
        return []
    for node in graph.nodes:
        if _reduces(node, "sum") and node.args[2] == group:
            forget_in_place(_result_of(node))
    forget_in_place(_result_of(largest))
    shifted = [user for user in _users_of_values(_result_of(largest)) if _subtracts(user, x)]
    found = [
        (e, total)
        for each in shifted
        for e in each.users
        if is_call(e, aten.exp.default)
        for rows in e.users
        if _sums_rows(rows)
        for total in _users_of_values(rows)
        if _reduces(total, "sum") and total.args[2] == group
    ]
    if len(found) != 1:
        return []
    ((raised, total),) = found
    picks = [pick for node in graph.nodes if (pick := _find_pick(node, shifted, total))]
    at = Builder(graph, largest)
    needed = [pick.mask for pick in picks]
    needed += [n for pick in picks for step in pick.steps for n in step.all_input_nodes]
    inside = {n for pick in picks for n in (pick.source, *pick.steps)}
    needed = [n for n in needed if n not in inside]
    if largest in ancestors(needed) or not at.can_hoist(needed):
        picks, needed = [], []
    at.hoisted(needed)
    collectives = [largest, total, *(pick.total for pick in picks)]
    told = [receipt_of(each, "all_gather", _WHY) for each in collectives]
    *values, exponent = _made(at, x, largest, picks)
    for collective, value in zip(collectives, values, strict=True):
        arrived, given = _result_of(collective), collective.all_input_nodes[0]
        here = Builder(graph, arrived)
        here.replace(arrived, here.call(aten.reshape.default, value, here.sizes(given)))
    at.replace(raised, exponent)
    for old in (raised, *map(_result_of, collectives)):
        erase(graph, old)
    return told


def _made(at: Builder, x: Node, largest: Node, picks: list[_Pick]) -> list[Node]:
    """M, S, and what is at the targets, each (*rows, 1), and exp(x - M)."""
    dtype, group = sum_dtype(x.meta["val"]), largest.args[2]
    column = [*at.sizes(x)[:-1], 1]
    own = at.call(aten.reshape.default, largest.all_input_nodes[0], column)
    if x.meta["val"].dtype != dtype:
        x, own = (at.call(torch.ops.prims.convert_element_type.default, n, dtype) for n in (x, own))
    # A rank all of whose logits are -inf adds nothing.
    least, device = torch.finfo(dtype).min, x.meta["val"].device
    bottom = at.call(aten.full.default, [], least, dtype=dtype, device=device)
    safe = at.call(aten.maximum.default, own, bottom)
    e = at.call(aten.exp.default, at.call(aten.sub.Tensor, x, safe))
    told = [safe, at.call(aten.sum.dim_IntList, e, [-1], True)]
    for pick in picks:
        seen = at.call(aten.logical_not.default, pick.mask) if pick.hides else pick.mask
        count = at.call(torch.ops.prims.convert_element_type.default, seen, dtype)
        both = _selected(at, pick, x), count
        told += [at.call(aten.reshape.default, each, column) for each in both]
    packed = at.call(aten.unsqueeze.default, at.call(aten.cat.default, told, -1), 0)
    ones = [1] * world_of(group)[1]  # type: ignore[arg-type]
    every = at.call(_ops.all_gather.default, packed, group, 0, ones)
    parts = [at.call(aten.slice.Tensor, every, -1, i, i + 1) for i in range(len(told))]

    def summed(terms: Node) -> Node:
        return at.call(aten.sum.dim_IntList, terms, [0])

    M = at.call(aten.amax.default, parts[0], [0])
    scales = at.call(aten.exp.default, at.call(aten.sub.Tensor, parts[0], M))
    S = summed(at.call(aten.mul.Tensor, parts[1], scales))
    lse = at.call(aten.add.Tensor, M, at.call(aten.log.default, S))
    values = [M, S]
    for i, pick in enumerate(picks):
        logit, count = summed(parts[2 * i + 2]), summed(parts[2 * i + 3])
        below = at.call(aten.mul.Tensor, count, lse if pick.lowered else M)
        values.append(at.call(aten.sub.Tensor, logit, below))
    factor = at.call(aten.exp.default, at.call(aten.sub.Tensor, safe, M))
    return [*values, at.call(aten.mul.Tensor, e, factor)]


def _reduces(node: Any, op: str) -> bool:
    return is_call(node, c10d.all_reduce.default) and node.args[1] == op and bool(waited(node))


def _result_of(collective: Node) -> Node:
    found = waited(collective)
    assert found is not None
    return found


def _users_of_values(node: Node) -> list[Node]:
    """Its users, and those of what it is reshaped to."""
    return [user for each in grown_from(node, is_reshape) for user in each.users]


def _is_last(dims: Any, of: Node) -> bool:
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    return [dim % len(shape(of)) for dim in dims] == [len(shape(of)) - 1]


def _maximized(node: Node) -> Node | None:
    """x (*rows, V), where `node` has the largest of each row."""
    while is_reshape(node):
        node = node.all_input_nodes[0]
    if is_call(node, operator.getitem) and node.args[1] == 0:
        node = node.all_input_nodes[0]
    if not is_call(node, aten.amax.default, aten.max.dim):
        return None
    x = _named_first(node.all_input_nodes[0])
    return x if len(shape(x)) > 1 and _is_last(node.args[1], x) else None


def _named_first(node: Any) -> Any:
    """What a node is another name of, as torch 2.11 leaves what is detached."""
    while is_call(node, aten.alias.default, aten.detach.default):
        node = node.args[0]
    return node


def _subtracts(node: Node, x: Node) -> bool:
    """Whether it is x minus a number of each row."""
    if not is_call(node, aten.sub.Tensor) or _named_first(node.args[0]) is not x or node.kwargs:
        return False
    rows = node.args[1]
    column = [*map(str, shape(x)[:-1]), "1"]
    return isinstance(rows, Node) and [*map(str, shape(rows))] == column


def _sums_rows(node: Node) -> bool:
    is_sum = is_call(node, aten.sum.dim_IntList) and not node.kwargs
    return is_sum and _is_last(node.args[1], node.all_input_nodes[0])


def _find_pick(total: Node, shifted: list[Node], sums: Node) -> _Pick | None:
    """What is at the target, if `total` sums that over ranks."""
    if not _reduces(total, "sum") or total.args[2] != sums.args[2] or total is sums:
        return None
    node, steps, masks = total.all_input_nodes[0], list[Node](), list[tuple[Node, bool]]()
    while node not in shifted and not _is_lowered(node, shifted, sums):
        below: Any = node.args[0] if node.args else None
        if is_call(node, aten.where.self):
            mask, *sides = node.args
            zeros = [_is_zero(side) for side in sides]
            if sum(zeros) != 1:
                return None
            below = sides[zeros.index(False)]
            masks.append((mask, zeros[0]))  # type: ignore[arg-type]
        elif is_call(node, aten.index_put.default):
            indices: Any = node.args[1]
            if len(indices) != 1 or len(node.args) > 3 or not _is_zero(node.args[2]):
                return None
            masks.append((indices[0], True))
        elif not is_reshape(node) and not is_cast(node) and not is_call(node, *_SELECTIONS):
            return None
        if not isinstance(below, Node):
            return None
        steps.insert(0, node)
        node = below
    rows = shape(shifted[0])[:-1]
    if len(masks) != 1 or masks[0][0].meta["val"].dtype != torch.bool:
        return None
    mask, hides = masks[0]
    sizes = {str(each.meta["val"].numel()) for each in (mask, total)}
    expected = 1
    for size in rows:
        expected = expected * size
    if sizes != {str(expected)}:
        return None
    return _Pick(total, node, steps, node not in shifted, mask, hides)


_SELECTIONS = aten.gather.default, aten.index.Tensor, aten.clone.default


def _is_lowered(node: Node, shifted: list[Node], sums: Node) -> bool:
    """Whether it is one of `shifted` - log S."""
    if not is_call(node, aten.sub.Tensor) or node.args[0] not in shifted or node.kwargs:
        return False
    log: Any = node.args[1]
    while is_reshape(log):
        log = log.args[0]
    S: Any = log.args[0] if is_call(log, aten.log.default) else None
    while is_reshape(S):
        S = S.args[0]
    return S is _result_of(sums)


def _is_zero(node: Any) -> bool:
    """Whether it is the number 0."""
    if not isinstance(node, Node):
        return bool(node == 0)
    if node.meta["val"].numel() != 1:
        return False
    with evaluated(node) as value:
        return value is not None and not value.any()


def _selected(at: Builder, pick: _Pick, x: Node) -> Node:
    """The same selection of `x` itself, in its dtype."""
    made = {pick.source: x}
    for step in pick.steps:
        if is_cast(step):
            made[step] = made[step.all_input_nodes[0]]
            continue
        args, kwargs = torch.fx.map_arg((step.args, step.kwargs), lambda n: made.get(n, n))
        if is_call(step, aten.index_put.default):
            zero = at.call(
                torch.ops.prims.convert_element_type.default, args[2], sum_dtype(x.meta["val"])
            )
            args = (*args[:2], zero)
        target: Any = step.target
        made[step] = at.call(target, *args, **kwargs)
    return made[pick.steps[-1]]
