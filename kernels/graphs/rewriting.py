"""The pass: collectives beside matmuls become fused ops, all others stay as they are.

    all_gather -> [split, cat] -> [reshape] -> mm, addmm, ..    all_gather_matmul, of all of them
    mm, + mm, .. -> [reshape] -> [split, cat] -> reduce_scatter in `sums`
    mm -> [reshape] -> all_reduce                               in `sums`

It works on graphs of aten ops after autograd, forward and backward alike: the gradient of a matmul
whose result was scattered is a matmul of what is gathered, and stands in the graph as one. What the
forward keeps for the backward has been chosen before, and does not change: where the gathered
tensor has other uses, the fused op returns it as well.

The engine of a fused op is chosen when it runs, as in eager calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from weft.errors import WeftError
from weft.kernels.graphs.building import Builder, ancestors, erase
from weft.kernels.graphs.chains import (
    aten,
    c10d,
    cast_before,
    gathered_along,
    is_call,
    is_reshape,
    keeps_columns,
    next_collective,
    once,
    shape,
    waited,
)
from weft.kernels.graphs.receipts import Receipt, Receipts, line_of, shape_of
from weft.kernels.graphs.sums import PRODUCTS, Outcome, reduce, scatter

_ops: Any = torch.ops.weft


class MissedFusionError(WeftError):
    """A collective beside a matmul was not fused, and `strict` was asked for."""


def rewrite(graph: Graph, *, strict: bool = False) -> Receipts:
    """Put fused ops in the place of collectives and matmuls, in place.

    Args:
        graph: of aten ops, whose nodes have fake tensors as `meta["val"]`.
        strict: whether a collective that stays, though a matmul makes or takes what it moves, is an
            error.

    Raises:
        MissedFusionError: `strict`, and there is one; all others have been rewritten.
    """
    found: list[Receipt] = []
    missed: list[Receipt] = []
    doubles = once(graph)
    for node in list(graph.nodes):
        name = next((name for name, (target, _) in _HANDLERS.items() if is_call(node, target)), "")
        if not name:
            continue
        told, size = line_of(node), shape_of(node.all_input_nodes[0])
        fused, why, beside = _HANDLERS[name][1](graph, node)
        receipt = Receipt(name, size, fused, why, told)
        found.append(receipt)
        for double in doubles.get(node, ()):
            instead = fused or "all_gather"
            found.append(Receipt(name, size, instead, "the same is gathered once", double))
        if beside and not fused:
            missed.append(receipt)
    if any(each.fused for each in found):
        graph.lint()
    if strict and missed:
        raise MissedFusionError(
            "collectives beside matmuls were not fused, which strict=True asks for:\n"
            + "\n".join(map(str, missed))
        )
    return Receipts(found)


def _gather(graph: Graph, node: Node) -> Outcome:
    x, parts, group = node.args
    assert isinstance(x, Node) and isinstance(parts, int)
    arrived = waited(node)
    if arrived is None:
        return "", "its result is used before it is waited for", False
    cast_before(node)
    x = node.all_input_nodes[0]
    whole, dim = gathered_along(arrived, parts)
    rows = [whole]
    for each in rows:  # it grows
        rows += [user for user in each.users if is_reshape(user)]
    matrices = [each for each in rows if keeps_columns(each, whole)]
    products = [user for each in matrices for user in each.users if _takes(user, each)]
    if not products:
        beside = any(is_call(user, *PRODUCTS) for each in matrices for user in each.users)
        return "", "no matmul takes it as its rows", beside
    if dim == len(shape(whole)) - 1:
        return "", "it is gathered along the contraction", True
    if not x.meta["val"].is_floating_point():
        return "", f"of {x.meta['val'].dtype}", True
    order = {each: i for i, each in enumerate(graph.nodes)}
    products = _together(products, order)
    others = {user for each in rows for user in each.users} - {*products, *rows}
    early = [*others, *whole.users] if others else []
    at = Builder(graph, min([*products, *early], key=order.__getitem__))
    weights = [product.args[-1] for product in products]
    biases = [product.args[0] if _is_addmm(product) else None for product in products]
    if not at.can_hoist([*weights, *biases]):
        return "", "what multiplies it is gathered later", True
    weights = [at.matrix(each) for each in at.hoisted(weights)]
    biases = at.hoisted(biases)
    given: list[Any] = []
    if any(bias is not None for bias in biases):
        none, value = None, x.meta["val"]
        if None in biases:  # the op takes an empty one in its place
            none = at.call(aten.empty.memory_format, [0], dtype=value.dtype, device=value.device)
        given = [none if bias is None else bias for bias in biases]
    sizes = [at.size(x, dim)] * parts
    made = at.call(
        _ops.all_gather_matmul.default, x, weights, given, group, dim, sizes, bool(others), False,
    )  # fmt: skip
    for i, product in enumerate(products):
        at.put(product, at.call(operator.getitem, made, i))
    if others:
        at.replace(whole, at.call(operator.getitem, made, len(products)))
    for product in products:
        erase(graph, product)
    erase(graph, whole)
    count = len(products)
    return "all_gather_matmul", f"{count} matmul{'s' * (count > 1)}", True


def _is_addmm(node: Node) -> bool:
    return is_call(node, aten.addmm.default)


def _takes(product: Node, rows: Node) -> bool:
    """Whether it multiplies `rows` from the right, with no more than a bias of its columns."""
    if is_call(product, aten.mm.default):
        return product.args[0] is rows and product.args[1] is not rows
    if is_call(product, aten.bmm.default):  # of one matrix, as torch.einsum makes it
        return product.args[0] is rows and shape(rows)[0] == 1
    if not _is_addmm(product) or product.args[1] is not rows or product.kwargs:
        return False
    bias = product.args[0]
    return isinstance(bias, Node) and len(shape(bias)) == 1


def _together(products: list[Node], order: dict[Node, int]) -> list[Node]:
    """Those that one op can make, and that are made at about one time.

    None of them needs another, and no other collective stands between: results that are far apart
    would take memory together.
    """
    products = sorted(dict.fromkeys(products), key=order.__getitem__)
    end = order[next_collective(products[0])]
    kept: list[Node] = []
    for product in products:
        before = ancestors([arg for arg in product.all_input_nodes if arg not in kept])
        if order[product] < end and not before & set(kept):
            kept.append(product)
    return kept


_HANDLERS: dict[str, tuple[Any, Callable[[Graph, Node], Outcome]]] = {
    "all_gather": (c10d.all_gather_into_tensor.default, _gather),
    "reduce_scatter": (c10d.reduce_scatter_tensor.default, scatter),
    "all_reduce": (c10d.all_reduce.default, reduce),
}
