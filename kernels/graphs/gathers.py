"""Matmuls of what is gathered: what they become.

    all_gather -> mm, addmm, ..         all_gather_matmul, of all that take it as their rows
    all_gather -> x^T dy, ..            its gradient's contraction, of all that sum over its rows

Where the gathered tensor has other uses, `all_gather_matmul` returns it as well. Contractions are
fused only where there are none: the other matmuls of a gathered tensor bring it anyway.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from weft.kernels.graphs.building import Builder, ancestors, erase
from weft.kernels.graphs.chains import (
    aten,
    c10d,
    cast_before,
    forget_in_place,
    gathered_along,
    grown_from,
    is_call,
    is_reshape,
    is_row,
    is_transposed,
    keeps_columns,
    next_collective,
    shape,
    waited,
)
from weft.kernels.graphs.sums import PRODUCTS, Outcome, counted, is_taken, operands

_ops: Any = torch.ops.weft


def fuse_gather(graph: Graph, node: Node) -> Outcome:
    """An all_gather and what multiplies it."""
    x, parts, group = node.args
    assert isinstance(x, Node) and isinstance(parts, int)
    _ask_shard(node, x, parts)
    arrived = waited(node)
    if arrived is None:
        return "", "its result is used before it is waited for", False
    forget_in_place(arrived)
    cast_before(node)
    x = node.all_input_nodes[0]
    whole, dim = gathered_along(arrived, parts)
    rows = grown_from(whole, is_reshape)
    matrices = [each for each in rows if keeps_columns(each, whole)]
    products = [user for each in matrices for user in each.users if _takes(user, each, node)]
    products = [each for each in products if not _takes_more(each, rows)]
    if not products and (count := _contract(graph, node, rows, dim)):
        return "all_gather_matmul_backward", counted(count, "contraction"), True
    if not products:
        beside = any(is_call(user, *PRODUCTS) for each in matrices for user in each.users)
        return "", "no matmul takes it as its rows", beside
    if dim == len(shape(whole)) - 1:
        return "", "it is gathered along the contraction", True
    if not x.meta["val"].is_floating_point():
        return "", f"of {x.meta['val'].dtype}", True
    order = {each: i for i, each in enumerate(graph.nodes)}
    own = _own_scales(products[0], node)
    alike = [p for p in products if (_dtype(p), _own_scales(p, node)) == (_dtype(products[0]), own)]
    products = _made_together(alike, order)
    others = {user for each in rows for user in each.users} - {*products, *rows}
    early = [*others, *whole.users] if others else []
    at = Builder(graph, min([*products, *early], key=order.__getitem__))
    weights = [operands(product)[1] for product in products]
    scaled = [product for product in products if _is_scaled(product)]
    scales = [scale for product in scaled for scale in (own or product.args[2], product.args[3])]
    biases = [product.args[0] if _is_addmm(product) else None for product in products]
    if not at.can_hoist([*weights, *biases, *scales]):
        return "", "what multiplies it is gathered later", True
    weights = [at.matrix(each) for each in at.hoisted(weights)]
    biases = at.hoisted(biases)
    value, scaling = x.meta["val"], _scale_arguments(at, at.hoisted(scales), products[0], own)
    # The op takes an empty one in the place of none; packages of AOTInductor lose empty lists.
    none = at.call(aten.empty.memory_format, [0], dtype=value.dtype, device=value.device)
    given = [none if bias is None else bias for bias in biases]
    sizes = [at.size(x, dim)] * parts
    made = at.call(
        _ops.all_gather_matmul.default,
        x,
        weights,
        given,
        group,
        dim,
        sizes,
        bool(others),
        False,
        *scaling,
    )
    for i, product in enumerate(products):
        at.put(product, at.call(operator.getitem, made, i))
    if others:
        at.replace(whole, at.call(operator.getitem, made, len(products)))
    for product in products:
        erase(graph, product)
    erase(graph, whole)
    return "all_gather_matmul", counted(len(products), "matmul"), True


def _ask_shard(gather: Node, x: Node, parts: int) -> None:
    """Take sizes from the shard that were asked of what is on its way, as torch 2.11 does."""
    at = Builder(gather.graph, gather)
    for user in list(gather.users):
        if is_call(user, aten.sym_size.int):
            dim: Any = user.args[1]
            size = at.size(x, dim)
            size = at.call(operator.mul, size, parts) if dim == 0 else size
            user.replace_all_uses_with(size)
            gather.graph.erase_node(user)


def _contract(graph: Graph, gather: Node, rows: list[Node], dim: int) -> int:
    """Fuse the sums over its rows, if it has no other uses.

    Args:
        rows: the gathered tensor, and all that it is reshaped to.

    Returns:
        How many there are; 0 if it stays.
    """
    (x, parts, group), whole = gather.args, rows[0]
    assert isinstance(x, Node) and isinstance(parts, int)
    order = {each: i for i, each in enumerate(graph.nodes)}
    users = {user: each for each in rows for user in each.users if user not in rows}
    products: dict[Node, Any] = {}  # gathered^T @ this, or this @ gathered
    for user, matrix in users.items():
        if not keeps_columns(matrix, whole):
            return 0
        if is_call(user, aten.mm.default) and user.args[1] is matrix:
            products[user] = user.args[0]
        elif is_transposed(user):
            if not all(is_call(e, aten.mm.default) and e.args[0] is user for e in user.users):
                return 0
            products |= {each: each.args[1] for each in user.users}
        else:
            return 0
    others = [*products.values()]
    if {*rows} & ancestors(others):
        return 0
    if not products or dim == len(shape(whole)) - 1 or not x.meta["val"].is_floating_point():
        return 0
    at = Builder(graph, min(products, key=order.__getitem__))
    if len(_made_together([*products], order)) < len(products) or not at.can_hoist(others):
        return 0
    dys = []
    for product, other in zip(products, at.hoisted(others), strict=True):
        turned = product.args[0] is other
        rows_of = at.call(aten.permute.default, other, [1, 0]) if turned else other
        dys.append(at.as_batch(rows_of, whole))
    columns = shape(whole)[-1]
    weights = [at.like(x, [columns, at.size(dy, -1)]) for dy in dys]
    made = at.call(
        _ops.all_gather_matmul_backward.default,
        x,
        weights,
        dys,
        None,
        group,
        dim,
        [at.size(x, dim)] * parts,
        [False] + [True] * len(dys),
    )
    for i, (product, other) in enumerate(products.items()):
        grad = at.call(operator.getitem, made, i)
        if product.args[0] is other:
            grad = at.call(aten.permute.default, grad, [1, 0])
        at.replace(product, grad)
    for product in products:
        erase(graph, product)
    return len(products)


def _is_addmm(node: Node) -> bool:
    return is_call(node, aten.addmm.default)


def _own_scales(product: Node, gather: Node) -> Node | None:
    """This rank's scales of its rows, where they are gathered as the rows are by `gather`."""
    arrived: Any = product.args[2] if _is_scaled(product) else None
    if not is_call(arrived, c10d.wait_tensor.default):
        return None
    found, (x, *over) = arrived.args[0], gather.args
    if not is_call(found, gather.target) or [*found.args[1:]] != over:
        return None
    own: Node = found.args[0]
    rows = [*map(str, shape(x))][:-1]  # type: ignore[arg-type]
    return own if [*map(str, shape(own))] == [*rows, "1"] and len(rows) == 1 else None


def _scale_arguments(at: Builder, scales: list[Node], product: Node, own: Node | None) -> list[Any]:
    """scale_a, scale_b and out_dtype. A scale of this rank's for the rows of all goes with w."""
    if not scales:
        return []
    if own is not None:
        return [own, scales[1::2], product.meta["val"].dtype]
    one = at.call(
        aten.full.default, [1], 1.0, dtype=torch.float32, device=scales[0].meta["val"].device
    )
    both = zip(scales[::2], scales[1::2], strict=True)
    columns = [at.call(aten.mul.Tensor, column, row) for row, column in both]
    return [one, columns, product.meta["val"].dtype]


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _is_scaled(node: Node) -> bool:
    return is_call(node, aten._scaled_mm.default)


def _takes(product: Node, rows: Node, gather: Node) -> bool:
    """Whether it multiplies `rows` from the right, with no more than a bias of its columns."""
    if is_call(product, aten.mm.default):
        return product.args[0] is rows and product.args[1] is not rows
    if _is_scaled(product):
        scale: Any = product.args[2]
        known = scale.meta["val"].numel() == 1 or _own_scales(product, gather) is not None
        is_product = product.args[0] is rows and product.args[1] is not rows
        return is_product and known and is_taken(product)
    if is_call(product, aten.bmm.default):  # of one matrix, as torch.einsum makes it
        return product.args[0] is rows and shape(rows)[0] == 1
    if not _is_addmm(product) or product.args[1] is not rows or product.kwargs:
        return False
    return is_row(product.args[0], product)


def _takes_more(product: Node, rows: list[Node]) -> bool:
    """Whether what multiplies the gathered tensor, or is added, is made of it."""
    given = [*product.args, *product.kwargs.values()]
    del given[1 if _is_addmm(product) else 0]
    return bool({*rows} & ancestors([each for each in given if isinstance(each, Node)]))


def _made_together(products: list[Node], order: dict[Node, int]) -> list[Node]:
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
