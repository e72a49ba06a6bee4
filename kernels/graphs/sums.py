"""Matmuls whose results are added up over ranks: what they become.

    mm -> reduce_scatter           matmul_reduce_scatter
    mm + mm + .. -> reduce_scatter the gradient of all_gather_matmul: Q, K and V, gate and up
    mm -> all_reduce               matmul_all_reduce; or in `norms`
    mm + mm + .. -> all_reduce     as before a reduce_scatter; then all_gather

A bias that every rank adds divided by their number, as DTensor adds one that all of them have, is
added once; one of a rank's own, such as rank 0 alone adds, becomes a row of its weight, as the
other ranks cannot know of it. A factor is multiplied with the sum. Where the results are cast
before, they are added up as they were made and cast afterwards, so that each sum is rounded once
where the model rounds each rank's term; where they are cast to fewer bytes, these travel. Half
precision on a CPU is rounded by each rank, as the model does and its libraries do.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from weft.collectives.custom_ops import world_of
from weft.kernels.engine.fp8 import FP8
from weft.kernels.engine.local_matmul import partials_cost
from weft.kernels.graphs.building import Builder, erase
from weft.kernels.graphs.chains import (
    aten,
    forget_in_place,
    is_call,
    is_cast,
    is_reshape,
    is_row,
    keeps_columns,
    scattered_along,
    shape,
    waited,
)
from weft.kernels.graphs.norms import normalize_sum

_ops: Any = torch.ops.weft
# What a handler returns: the fused op, or nothing; why; whether a matmul stands beside.
Outcome = tuple[str, str, bool]
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default)


def counted(count: int, what: str) -> str:
    """ "3 matmuls", "1 matmul"."""
    return f"{count} {what}{'s' * (count > 1)}"


def fuse_scatter(graph: Graph, node: Node) -> Outcome:
    """A reduce_scatter and what it adds up."""
    source, op, parts, group = node.args
    assert isinstance(source, Node) and isinstance(parts, int) and isinstance(op, str)
    whole, dim = scattered_along(source, parts)
    whole, factors = _unscaled(whole)
    terms, refusal = terms_of(node, whole)
    arrived = waited(node)
    if refusal or arrived is None:
        return "", refusal or _NOT_WAITED, bool(terms)
    if dim == len(shape(whole)) - 1:
        return "", "it is scattered along the features", True
    at = Builder(graph, node)
    if len(terms) == 1:
        made = _op_on_product(
            at, node, terms[0], whole, _ops.matmul_reduce_scatter.default, group, dim, op
        )
        name, what = "matmul_reduce_scatter", "a matmul"
    else:
        made = _several(at, node, terms, whole, dim)
        name, what = "all_gather_matmul_backward", counted(len(terms), "matmul")
    at.replace(arrived, _scaled(at, made, factors))
    erase(graph, arrived)
    return name, what, True


def reduce(graph: Graph, node: Node) -> Outcome:
    """An all_reduce and what it adds up."""
    given, op, group = node.args
    assert isinstance(given, Node) and isinstance(op, str) and isinstance(group, str)
    arrived = waited(node)
    if arrived is not None:
        forget_in_place(arrived)
        if normalize_sum(graph, node, arrived):
            return "all_reduce_residual_rms_norm", "the norm of its sum", True
    whole, factors = _unscaled(given)
    terms, refusal = terms_of(node, whole)
    if not refusal and len(terms) > 1 and not are_cut(terms, node):
        refusal = f"the rows of {len(terms)} matmuls cannot be cut evenly"
    if refusal or arrived is None:
        return "", refusal or _NOT_WAITED, bool(terms)
    at = Builder(graph, node)
    if len(terms) == 1:
        made = _op_on_product(at, node, terms[0], whole, _ops.matmul_all_reduce.default, group, op)
        name, what = "matmul_all_reduce", "a matmul"
    else:
        parts = ranks_of(node)
        made = _several(at, node, terms, terms[0], 0)
        made = at.call(_ops.all_gather.default, made, group, 0, [at.size(made, 0)] * parts)
        made = at.call(aten.reshape.default, made, at.sizes(whole))
        name = "all_gather_matmul_backward, all_gather"
        what = counted(len(terms), "matmul")
    at.replace(arrived, _scaled(at, made, factors))
    erase(graph, arrived)
    return name, what, True


def ranks_of(collective: Node) -> int:
    """How many take part."""
    group: Any = collective.args[-1]
    return world_of(group)[1]


def are_cut(terms: list[Node], collective: Node) -> bool:
    """Whether every rank can sum as many of the rows, and gather the others'."""
    rows = shape(terms[0])[0]
    matrices = all(len(shape(term)) == 2 for term in terms)
    return matrices and isinstance(rows, int) and rows % ranks_of(collective) == 0


def _unscaled(whole: Node) -> tuple[Node, list[Node]]:
    """What numbers multiply or divide to make `whole`, if nothing else uses it; and where."""
    factors: list[Node] = []
    while is_call(whole, aten.mul.Tensor, aten.div.Tensor) and len(whole.users) == 1:
        below, factor = whole.args
        if not isinstance(below, Node) or not isinstance(factor, (int, float)):
            break
        if whole.meta["val"].dtype == torch.float16:  # a sum may overflow that is divided before
            break
        factors.append(whole)
        whole = below
    return whole, factors


def _scaled(at: Builder, made: Node, factors: list[Node]) -> Node:
    """`made`, multiplied and divided as the terms of each rank have been."""
    for each in reversed(factors):
        op: Any = each.target
        made = at.call(op, made, each.args[1])
    return made


def _op_on_product(
    at: Builder, collective: Node, product: Node, whole: Node, target: Any, *rest: Any
) -> Node:
    """The op on what `product` multiplies."""
    x, w, bias = _multiplied(at, collective, product)
    sent, dtype = whole.meta["val"].dtype, product.meta["val"].dtype
    wire = sent if sent.itemsize < dtype.itemsize else None
    if sent == dtype == x.meta["val"].dtype and partials_cost(x.meta["val"]):
        wire = dtype  # as the model rounds: products that are not rounded take 2 or 3 times as long
    scales = {}
    if is_call(product, aten._scaled_mm.default):
        rows, columns = product.args[2:4]
        assert isinstance(rows, Node)
        rows = rows if rows.meta["val"].numel() == 1 else at.as_batch(rows, whole)
        scales = {"scale_a": rows, "scale_b": columns, "out_dtype": dtype}
    x = at.as_batch(x, whole)
    return at.call(target, x, w, bias, *rest, wire_dtype=wire, **scales)


def operands(product: Node) -> Any:
    """x and w."""
    return product.args[1:3] if is_call(product, aten.addmm.default) else product.args[:2]


def is_taken(scaled: Node) -> bool:
    """Whether a scaled product is one that the ops take: of e4m3, with no more than scales."""
    both = {each.meta["val"].dtype for each in scaled.all_input_nodes[:2]}
    named = zip(scaled.target._schema.arguments, scaled.args, strict=False)  # type: ignore[union-attr]
    given = {argument.name: value for argument, value in named} | scaled.kwargs
    return both == {FP8} and given.get("bias") is None and given.get("scale_result") is None


def _multiplied(at: Builder, collective: Node, product: Node) -> tuple[Node, Node, Any]:
    """x and w as matrices, and the bias that every rank has and adds its share of."""
    x, w = map(at.matrix, operands(product))
    bias: Any = product.args[0] if is_call(product, aten.addmm.default) else None
    if bias is None or _adds_share(product, collective):
        return x, w, bias and bias.args[0]
    # As many columns more as keep rows aligned.
    value = x.meta["val"]
    columns, like = 16 // value.element_size(), {"dtype": value.dtype, "device": value.device}
    first = at.call(aten.full.default, [at.size(x, 0), 1], 1, **like)
    ones = at.call(aten.constant_pad_nd.default, first, [0, columns - 1])
    row = at.call(aten.unsqueeze.default, bias, 0)
    rows = at.call(aten.constant_pad_nd.default, row, [0, 0, 0, columns - 1])
    wide = at.call(aten.cat.default, [x, ones], 1)
    return wide, at.call(aten.cat.default, [w, rows], 0), None


def _adds_share(product: Node, collective: Node) -> bool:
    """Whether it adds a bias divided by the number of ranks, to be summed."""
    share = product.args[0]
    return bool(
        collective.args[1] == "sum"
        and is_call(share, aten.div.Tensor)
        and isinstance(share, Node)
        and share.args[1] == ranks_of(collective)
    )


def _adds_row(product: Node) -> bool:
    """Whether it adds no more than a bias of its columns."""
    return is_row(product.args[0], product) and not product.kwargs


def _several(at: Builder, collective: Node, products: list[Node], whole: Node, dim: int) -> Node:
    """This rank's part, along `dim`, of the sum of the products of all ranks."""
    op, group, parts = collective.args[1], collective.args[-1], ranks_of(collective)
    dys, weights, biases = [], [], []
    for product in products:
        x, w, bias = _multiplied(at, collective, product)
        biases.append(bias)
        dys.append(at.as_batch(x, whole))
        weights.append(at.call(aten.permute.default, w, [1, 0]))
    sizes = at.sizes(whole)
    sizes[dim] = at.part_size(whole, dim, parts)
    # The op asks for what it is the gradient of, but only for its shape and dtype.
    like = at.like(products[0], sizes)
    needs = [True] + [False] * len(products)
    made = at.call(
        _ops.all_gather_matmul_backward.default,
        like, weights, dys, None, group, dim, [sizes[dim]] * parts, needs,
    )  # fmt: skip
    made = at.call(operator.getitem, made, 0)
    made = at.call(aten.div.Scalar, made, parts) if op == "avg" else made
    for bias in filter(None, biases):
        made = at.call(aten.add.Tensor, made, bias)
    return made


_NO_PRODUCT = "no matmul makes what it adds up"
_NOT_WAITED = "its result is used before it is waited for"


def terms_of(collective: Node, whole: Node) -> tuple[list[Node], str]:
    """The matmuls whose sum `whole` is, and why they cannot be fused, if so."""
    op: Any = collective.args[1]
    terms: list[Node] = []
    refusals: list[str] = []

    def walk(node: Node) -> None:
        below: Any = node.all_input_nodes[:1]  # sizes come behind
        if is_sum(node):
            below = node.args[:2]
        elif is_call(node, *PRODUCTS) and (len(shape(node)) == 2 or shape(node)[0] == 1):
            terms.append(node)
            below = []
        elif not is_reshape(node) and not is_cast(node):
            others.append(node)
            return
        if len(node.users) > 1 and not (node is whole and set(node.users) <= pieces):
            refusals.append("this rank's partial result has other uses")
        for each in below:
            walk(each)

    others: list[Node] = []
    joined = collective.all_input_nodes[0]
    pieces = {*(joined.all_input_nodes if joined is not whole else [])}  # in which it is cut
    walk(whole)
    if any(len(piece.users) > 1 for piece in pieces):
        refusals.append("this rank's partial result has other uses")
    if not terms:
        return [], _NO_PRODUCT
    dtypes = {term.meta["val"].dtype for term in terms}
    dtype: torch.dtype = terms[0].meta["val"].dtype
    sent = whole.meta["val"].dtype
    scaled = [term for term in terms if is_call(term, aten._scaled_mm.default)]
    if op not in ("sum", "avg"):
        refusals.insert(0, f"a matmul cannot be fused with {op!r}")
    elif any(is_call(t, aten.addmm.default) and not _adds_row(t) for t in terms):
        refusals.insert(0, "each rank adds a matrix of its own")
    elif scaled and (len(terms) > 1 or not all(map(is_taken, scaled))):
        refusals.insert(0, "of scaled products, one of e4m3 without a bias is fused")
    elif others:
        refusals.insert(0, "each rank adds what no matmul makes")
    elif not all(keeps_columns(term, whole) for term in terms) or len(shape(whole)) < 2:
        refusals.append("features and tokens are mixed in between")
    elif len(dtypes) > 1 or not dtype.is_floating_point:
        refusals.append(f"matmuls of {' and '.join(map(str, sorted(dtypes, key=str)))}")
    elif sent.itemsize < dtype.itemsize and (len(terms) > 1 or dtype != torch.float32):
        refusals.append(f"{dtype} is cast to {sent} before it is sent")
    return terms, refusals[0] if refusals else ""


def is_sum(node: Any) -> bool:
    """Whether it adds two tensors of one shape and dtype."""
    if not is_call(node, aten.add.Tensor) or node.kwargs:
        return False
    values = [each.meta["val"] for each in (node, *node.args[:2]) if isinstance(each, Node)]
    same = {(str(value.shape), value.dtype) for value in values if hasattr(value, "dtype")}
    return len(values) == 3 and len(same) == 1
