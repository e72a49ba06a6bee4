"""The pass: collectives beside matmuls become fused ops, all others stay as they are.

    all_gather -> [split, cat] -> [reshape] -> mm, addmm, ..    all_gather_matmul, of all of them
    mm -> [reshape] -> [split, cat] -> reduce_scatter           matmul_reduce_scatter
    mm -> [reshape] -> all_reduce                               matmul_all_reduce

It works on graphs of aten ops after autograd, forward and backward alike: the gradient of a matmul
whose result was scattered is a matmul of what is gathered, and stands in the graph as one. What the
forward keeps for the backward has been chosen before, and does not change: where the gathered
tensor has other uses, the fused op returns it as well.

The engine of a fused op is chosen when it runs, as in eager calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from weft.errors import WeftError
from weft.kernels.graphs.chains import (
    as_batch,
    aten,
    c10d,
    gathered_along,
    is_call,
    is_reshape,
    once,
    scattered_along,
    shape,
    waited,
)
from weft.kernels.graphs.receipts import Receipt, Receipts, line_of, shape_of

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
    for same in reversed(once(graph)):
        if is_call(same, _HANDLERS["all_gather"][0]):
            size, why = shape_of(same.all_input_nodes[0]), "the same is gathered once"
            found.append(Receipt("all_gather", size, "all_gather_matmul", why, line_of(same)))
        graph.erase_node(same)
    missed: list[Receipt] = []
    for node in list(graph.nodes):
        name = next((name for name, (target, _) in _HANDLERS.items() if is_call(node, target)), "")
        if not name:
            continue
        told, size = line_of(node), shape_of(node.all_input_nodes[0])
        fused, why, beside = _HANDLERS[name][1](graph, node)
        receipt = Receipt(name, size, fused, why, told)
        found.append(receipt)
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


# What a handler returns: the fused op, or nothing; why; whether a matmul stands beside.
_Outcome = tuple[str, str, bool]


def _gather(graph: Graph, node: Node) -> _Outcome:
    x, parts, group = node.args
    assert isinstance(x, Node) and isinstance(parts, int)
    arrived = waited(node)
    if arrived is None:
        return "", "its result is used before it is waited for", False
    whole, dim = gathered_along(arrived, parts)
    rows = [whole]
    for each in rows:  # it grows
        rows += [user for user in each.users if is_reshape(user) and _keeps_columns(user, whole)]
    matrices = [each for each in rows if len(shape(each)) == 2]
    products = [user for m in matrices for user in m.users if _takes(user, m)]
    if not products:
        beside = any(is_call(user, *_PRODUCTS) for m in matrices for user in m.users)
        return "", "no matmul takes it as its rows", beside
    if dim == len(shape(whole)) - 1:
        return "", "it is gathered along the contraction", True
    if not x.meta["val"].is_floating_point():
        return "", f"of {x.meta['val'].dtype}", True
    products = _independent(products)
    others = {user for each in rows for user in each.users} - {*products, *rows}
    weights = [product.args[-1] for product in products]
    biases = [product.args[0] if _is_addmm(product) else None for product in products]
    order = {each: i for i, each in enumerate(graph.nodes)}
    at = _Builder(graph, min([*products, *others, *whole.users], key=order.__getitem__))
    weights, biases = at.hoisted(weights), at.hoisted(biases)
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
        _erase(graph, product)
    _erase(graph, whole)
    count = len(products)
    return "all_gather_matmul", f"{count} matmul{'s' * (count > 1)}", True


def _scatter(graph: Graph, node: Node) -> _Outcome:
    source, op, parts, group = node.args
    assert isinstance(source, Node) and isinstance(parts, int)
    whole, dim = scattered_along(source, parts)
    outcome, product = _producer(node, whole, op)
    if product is None:
        return "", outcome, outcome != _NO_PRODUCT
    if dim == len(shape(whole)) - 1:
        return "", "it is scattered along the features", True
    return _summed(graph, node, product, whole, "matmul_reduce_scatter", (group, dim, op))


def _reduce(graph: Graph, node: Node) -> _Outcome:
    whole, op, group = node.args
    assert isinstance(whole, Node)
    outcome, product = _producer(node, whole, op)
    if product is None:
        return "", outcome, outcome != _NO_PRODUCT
    return _summed(graph, node, product, whole, "matmul_all_reduce", (group, op))


def _summed(
    graph: Graph, node: Node, product: Node, whole: Node, name: str, rest: Sequence[Any]
) -> _Outcome:
    arrived = waited(node)
    if arrived is None:
        return "", "its result is used before it is waited for", True
    x, w = product.args
    assert isinstance(x, Node)
    at = _Builder(graph, node)
    batch = shape(whole)[:-1]
    if len(batch) > 1:
        sizes = whole.args[1] if is_reshape(whole) else None
        assert isinstance(sizes, Sequence)  # of a matrix, features last
        x = as_batch(x, batch) or at.call(aten.reshape.default, x, [*sizes[:-1], at.size(x, 1)])
    made = at.call(getattr(_ops, name).default, x, w, None, *rest)
    at.replace(arrived, made)
    _erase(graph, arrived)
    return name, "a matmul", True


_NO_PRODUCT = "no matmul makes what it adds up"
_PRODUCTS = (aten.mm.default, aten.addmm.default)


def _producer(collective: Node, whole: Node, op: Any) -> tuple[str, Node | None]:
    """The mm whose result alone is added up over ranks, or why there is none."""
    _forget_in_place(collective, whole)
    made = whole.args[0] if is_reshape(whole) else whole
    if not is_call(made, *_PRODUCTS) or not isinstance(made, Node):
        return _NO_PRODUCT, None
    if op not in ("sum", "avg"):
        return f"a matmul cannot be fused with {op!r}", None
    if _is_addmm(made):
        return "each rank adds a bias of its own", None
    if len(whole.users) > 1 or len(made.users) > 1:
        return "this rank's partial result has other uses", None
    if len(shape(whole)) < 2 or str(shape(whole)[-1]) != str(shape(made)[-1]):
        return "features and tokens are mixed in between", None
    if not made.meta["val"].is_floating_point():
        return f"of {made.meta['val'].dtype}", None
    return "", made


def _forget_in_place(collective: Node, whole: Node) -> None:
    """A collective in place is traced as one that is not, and a copy to where its operand was."""
    arrived = waited(collective)
    for user in list(whole.users):
        if arrived and is_call(user, aten.copy.default) and user.args[:2] == (whole, arrived):
            user.replace_all_uses_with(arrived)
            user.graph.erase_node(user)


def _is_addmm(node: Node) -> bool:
    return is_call(node, aten.addmm.default)


def _takes(product: Node, rows: Node) -> bool:
    """Whether it multiplies `rows` from the right, with no more than a bias of its columns."""
    if is_call(product, aten.mm.default):
        return product.args[0] is rows
    if not _is_addmm(product) or product.args[1] is not rows or product.kwargs:
        return False
    bias = product.args[0]
    return isinstance(bias, Node) and len(shape(bias)) == 1


def _keeps_columns(reshaped: Node, whole: Node) -> bool:
    return str(shape(reshaped)[-1]) == str(shape(whole)[-1])


def _independent(products: list[Node]) -> list[Node]:
    """Those none of whose weights depends on another of them: one op can make them all."""
    kept: list[Node] = []
    for product in dict.fromkeys(products):
        before = _ancestors([arg for arg in product.all_input_nodes if arg not in kept])
        if not before & set(kept):
            kept.append(product)
    return kept


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    seen: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left.extend(node.all_input_nodes)
    return seen


def _erase(graph: Graph, node: Node) -> None:
    """Erase what is not used any more, collectives too, which torch's own way would keep."""
    if node.users or node.op == "placeholder" or node._erased:
        return
    before = node.all_input_nodes
    graph.erase_node(node)
    for each in before:
        _erase(graph, each)


class _Builder:
    """Makes nodes before a given one, with fake values."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph, self._before = graph, before
        self._trace = before.meta.get("stack_trace")

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)

        def value(node: Node) -> Any:
            return node.meta["val"]

        given, named = torch.fx.map_arg((args, kwargs), value)
        fakes = [fake for fake in map(value, node.all_input_nodes) if hasattr(fake, "fake_mode")]
        mode = fakes[0].fake_mode if fakes else _mode_of(self._graph)
        with mode:
            node.meta["val"] = target(*given, **named)
        if self._trace:
            node.meta["stack_trace"] = self._trace
        return node

    def size(self, node: Node, dim: int) -> Any:
        """Of its value: a number, or the node that has what is a symbol."""
        size = shape(node)[dim]
        return size if isinstance(size, int) else self.call(aten.sym_size.int, node, dim)

    def hoisted(self, nodes: Sequence[Any]) -> list[Any]:
        """The same, moved before the place where they are needed, with all that they need."""
        order = {node: i for i, node in enumerate(self._graph.nodes)}
        here = order[self._before]
        late = {n for n in _ancestors([n for n in nodes if n is not None]) if order[n] > here}
        for node in sorted(late, key=order.__getitem__):
            self._before.prepend(node)
        return list(nodes)

    def put(self, product: Node, made: Node) -> None:
        """`made` (*batch, N) in the place of `product` (M, N)."""
        for user in list(product.users):
            if is_reshape(user) and [*shape(user)] == [*shape(made)]:
                self.replace(user, made)
                self._graph.erase_node(user)
        if product.users:
            flat = made
            if len(shape(made)) != 2:
                flat = self.call(
                    aten.reshape.default, made, [-1, self.size(made, len(shape(made)) - 1)]
                )
            self.replace(product, flat)

    def replace(self, old: Node, new: Node) -> None:
        """`new` in the place of `old`, with its strides: others have counted on them."""
        if old.meta["val"].stride() != new.meta["val"].stride():
            new = self.call(aten.clone.default, new, memory_format=torch.contiguous_format)
        old.replace_all_uses_with(new)


def _mode_of(graph: Graph) -> Any:
    values = (node.meta.get("val") for node in graph.nodes)
    return next(value.fake_mode for value in values if hasattr(value, "fake_mode"))


_HANDLERS: dict[str, tuple[Any, Callable[[Graph, Node], _Outcome]]] = {
    "all_gather": (c10d.all_gather_into_tensor.default, _gather),
    "reduce_scatter": (c10d.reduce_scatter_tensor.default, _scatter),
    "all_reduce": (c10d.all_reduce.default, _reduce),
}
