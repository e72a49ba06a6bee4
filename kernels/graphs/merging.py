"""Sums over ranks that are only added up: one sum of all their matmuls, which moves once.

    mm -> all_reduce -> +          mm + mm + .. -> all_reduce
    mm -> all_reduce -> +

is the gradient of what Q, K and V, or gate and up share, where each layer sums its own. So it is
for reduce_scatter.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

from weft.kernels.graphs.building import Builder, erase
from weft.kernels.graphs.chains import (
    COLLECTIVES,
    aten,
    c10d,
    is_call,
    is_reshape,
    scattered_along,
    shape,
    waited,
)
from weft.kernels.graphs.receipts import line_of
from weft.kernels.graphs.sums import are_cut, is_sum, terms_of

_KINDS = (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default)


def merge_sums(graph: Graph) -> dict[Node, list[str]]:
    """Make one of those with no other collective in between.

    Returns:
        For each that is new, the lines of the model from which the others came.
    """
    lines: dict[Node, list[str]] = {}
    for node in list(graph.nodes):
        arrived = waited(node) if is_call(node, *_KINDS) and not node._erased else None
        if arrived is None:
            continue
        total = _total_of(arrived)
        addends = _addends(total, total)
        merged = [each for each in addends if _is_like(each, node)]
        if len(set(merged)) < max(2, len(merged)) or not _is_close(node, total, merged):
            continue
        collectives = [each.all_input_nodes[0] for each in merged]
        made = _merged_sum(Builder(graph, total), collectives)
        lines[made.all_input_nodes[0]] = [line_of(each) for each in collectives[1:]]
        at = Builder(graph, total)
        for each in addends:
            if each not in merged:
                made = at.call(aten.add.Tensor, made, each)
        at.replace(total, made)
        erase(graph, total)
    return lines


def _total_of(node: Node) -> Node:
    """The last of what only adds to `node`."""
    total = node
    while len(node.users) == 1:
        node = next(iter(node.users))
        if is_sum(node):
            total = node
        elif not _keeps_shape(node):
            break
    return total


def _addends(node: Node, total: Node) -> list[Node]:
    """What is added up to make `node`, in order."""
    if node is total or len(node.users) == 1:
        if is_sum(node):
            return [each for arg in _summands(node) for each in _addends(arg, total)]
        if _keeps_shape(node):
            found = _addends(node.all_input_nodes[0], total)
            return (
                found if len(found) > 1 or is_call(found[0], c10d.wait_tensor.default) else [node]
            )
    return [node]


def _summands(sum_: Node) -> list[Node]:
    return [arg for arg in sum_.args if isinstance(arg, Node)]


def _keeps_shape(node: Node) -> bool:
    return is_reshape(node) and str(shape(node)) == str(shape(node.all_input_nodes[0]))


def _is_like(wait: Node, collective: Node) -> bool:
    """Whether it waits for a sum of matmuls over the same ranks, cut along the same dim."""
    node = wait.args[0] if is_call(wait, c10d.wait_tensor.default) else None
    if not isinstance(node, Node) or len(wait.users) != 1 or waited(node) is not wait:
        return False
    if (node.target, node.args[1:]) != (collective.target, collective.args[1:]):
        return False
    whole, dim = _sum_and_cut(node)
    if dim != _sum_and_cut(collective)[1] or (dim == len(shape(whole)) - 1 and dim > 0):
        return False
    terms, refusal = terms_of(node, whole)
    dtype = whole.meta["val"].dtype
    same = all(term.meta["val"].dtype == dtype for term in terms)
    return bool(terms) and not refusal and same and (_scatters(node) or are_cut(terms, node))


def _scatters(collective: Node) -> bool:
    return is_call(collective, c10d.reduce_scatter_tensor.default)


def _sum_and_cut(collective: Node) -> tuple[Node, int]:
    """What is summed, and along which dim it is cut; 0 if it is not."""
    source, *_ = collective.args
    assert isinstance(source, Node)
    parts: Any = collective.args[-2]
    return scattered_along(source, parts) if _scatters(collective) else (source, 0)


def _is_close(first: Node, total: Node, merged: list[Node]) -> bool:
    """Whether no other collective stands between: results that are far apart would take memory
    together.
    """
    own, node = {each.args[0] for each in merged}, first
    while node is not total:
        if is_call(node, *COLLECTIVES) and node not in own:
            return False
        node = node.next
    return True


def _merged_sum(at: Builder, collectives: list[Any]) -> Node:
    """What arrives of the sum of what these move."""
    first = collectives[0]
    total, dim = _sum_and_cut(first)
    for each in collectives[1:]:
        total = at.call(aten.add.Tensor, total, _sum_and_cut(each)[0])
    if dim > 0:
        pieces = first.args[0].args[0]
        split = pieces[0].args[0]
        if is_call(pieces[0], operator.getitem):
            parts = at.call(split.target, total, *split.args[1:], **split.kwargs)
            cut = [at.call(operator.getitem, parts, i) for i in range(len(pieces))]
        else:
            cut = [at.call(piece.target, total, *piece.args[1:]) for piece in pieces]
        total = at.call(aten.cat.default, cut)
    made = at.call(first.target, total, *first.args[1:])
    made.meta["stack_trace"] = first.meta.get("stack_trace")
    return at.call(c10d.wait_tensor.default, made)
