"""Nodes made, moved, replaced and erased: what rewriting a torch.fx graph takes."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

from weft.kernels.graphs.chains import (
    COLLECTIVES,
    aten,
    c10d,
    dim_argument,
    is_call,
    is_reshape,
    shape,
)

# Linear in integers, or indexing by them.
_STEPS = {
    "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "clone", "alias", "detach",
    "unsqueeze", "squeeze", "expand", "select", "slice", "split", "split_with_sizes", "cat",
    "sum", "cumsum", "add", "sub", "neg", "index", "index_put", "repeat_interleave", "arange",
    "iota", "full", "zeros", "ones", "empty", "new_empty", "new_zeros", "_to_copy",
    "convert_element_type", "device_put", "_local_scalar_dense", "sym_size", "repeat", "copy",
}  # fmt: skip
_OF_NUMBERS = (operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv)
UNKNOWN = "its order is made of more than counts"


class RefusedError(Exception):
    """Why something stays as it is, in a word."""


class Builder:
    """Makes nodes before a given one, with fake values."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph, self._before = graph, before
        self._trace = before.meta.get("stack_trace")

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A node that calls `target`."""
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

    def part_size(self, node: Node, dim: int, parts: int) -> Any:
        """Of each of the equal parts of its value."""
        size = self.size(node, dim)
        return size // parts if isinstance(size, int) else self.call(operator.floordiv, size, parts)

    def sizes(self, node: Node) -> list[Any]:
        """Of all dims."""
        return [self.size(node, dim) for dim in range(len(shape(node)))]

    def like(self, of: Node, sizes: list[Any]) -> Node:
        """A tensor of one element that stands for one of these sizes, with the dtype of `of`."""
        value = of.meta["val"]
        empty = self.call(
            aten.empty.memory_format, [1] * len(sizes), dtype=value.dtype, device=value.device
        )
        return self.call(aten.expand.default, empty, sizes)

    def matrix(self, node: Any) -> Node:
        """(M, K), of what may be a batch of one matrix."""
        assert isinstance(node, Node)
        return self.call(aten.squeeze.dim, node, 0) if len(shape(node)) == 3 else node

    def as_batch(self, matrix: Node, whole: Node) -> Node:
        """A node of shape (*batch, K) whose rows `matrix` (M, K) are; `whole` is (*batch, N)."""
        batch = [*shape(whole)][:-1]
        source = matrix.args[0] if is_reshape(matrix) else None
        if isinstance(source, Node) and [*shape(source)] == [*batch, shape(matrix)[-1]]:
            return source
        if len(batch) == 1:
            return matrix
        sizes = [*self.sizes(whole)[:-1], self.size(matrix, 1)]
        return self.call(aten.reshape.default, matrix, sizes)

    def can_hoist(self, nodes: Sequence[Any]) -> bool:
        """Whether no collective would have to move."""
        return not any(is_call(node, *COLLECTIVES) for node in self._late(nodes))

    def hoisted(self, nodes: Sequence[Any]) -> list[Any]:
        """The same, moved before the place where they are needed, with all that they need."""
        for node in self._late(nodes):
            self._before.prepend(node)
        return list(nodes)

    def _late(self, nodes: Sequence[Any]) -> list[Node]:
        order = {node: i for i, node in enumerate(self._graph.nodes)}
        here = order[self._before]
        late = {n for n in ancestors([n for n in nodes if n is not None]) if order[n] > here}
        return sorted(late, key=order.__getitem__)

    def put(self, product: Node, made: Node) -> None:
        """`made` (*batch, N) in the place of `product`, which has the same rows."""
        for user in list(product.users):
            if is_reshape(user) and [*shape(user)] == [*shape(made)]:
                self.replace(user, made)
                self._graph.erase_node(user)
        if product.users:
            flat = made
            if [*shape(made)] != [*shape(product)]:
                sizes = [-1, self.size(made, len(shape(made)) - 1)]
                sizes = sizes if len(shape(product)) == 2 else [1, *sizes]
                flat = self.call(aten.reshape.default, made, sizes)
            self.replace(product, flat)

    def replace(self, old: Node, new: Node) -> None:
        """`new` in the place of `old`, with its dtype and strides: others have counted on them."""
        dtype = old.meta["val"].dtype
        if new.meta["val"].dtype != dtype:
            new = self.call(torch.ops.prims.convert_element_type.default, new, dtype)
        if _strides(old) != _strides(new):
            new = self.call(aten.clone.default, new, memory_format=torch.contiguous_format)
        old.replace_all_uses_with(new)

    def restride(self, old: Node, new: Node) -> None:
        """`replace`, where dims of `old` may lie in memory in any order."""
        given = old.meta["val"].stride()
        steps: list[int] = [s if isinstance(s, int) else s.node.hint or 0 for s in given]
        order = sorted(range(len(steps)), key=steps.__getitem__, reverse=True)
        if order != sorted(order) and _strides(old) != _strides(new):
            new = self.call(aten.permute.default, new, order)
            new = self.call(aten.clone.default, new, memory_format=torch.contiguous_format)
            back = [order.index(dim) for dim in range(len(order))]
            new = self.call(aten.permute.default, new, back)
        self.replace(old, new)


def tell_as(of: Node, *made: Node) -> None:
    """What torch has noted of `of`, such as which half it belongs to, for what replaces it."""
    for node in made:
        node.meta = {**of.meta, "val": node.meta["val"]}


def ancestors(nodes: Sequence[Node]) -> set[Node]:
    """These, and all that they need."""
    seen: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left.extend(node.all_input_nodes)
    return seen


def is_constant(needed: set[Node]) -> bool:
    """Whether something is made of no data, given all that it needs."""
    for node in needed:
        target: Any = node.target
        tags = getattr(target, "tags", [])
        plain = getattr(target, "namespace", "") in ("aten", "prims") or target is operator.getitem
        drawn = torch.Tag.nondeterministic_seeded in tags
        if node.op != "get_attr" and (node.op != "call_function" or not plain or drawn):
            return False
    return True


@contextmanager
def evaluated(node: Node) -> Iterator[torch.Tensor | None]:
    """The value of what is made of no data, on the CPU, to compute with; None of other nodes."""
    needed = ancestors([node])
    if not is_constant(needed):
        yield None
        return
    values: dict[Node, Any] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for each in node.graph.nodes:
            if each not in needed:
                continue
            if each.op == "get_attr":
                owner: Any = node.graph.owning_module
                values[each] = operator.attrgetter(each.target)(owner).cpu()
                continue
            args, kwargs = torch.fx.map_arg((each.args, each.kwargs), values.__getitem__)
            on_cpu = {"device": "cpu"} if "device" in kwargs else {}
            values[each] = each.target(*args, **kwargs | on_cpu)
        yield values[node]


def is_step(node: Node) -> bool:
    """Whether it is linear in integers, or indexes by them."""
    schema = getattr(node.target, "_schema", None)
    plain = node.target in (*_OF_NUMBERS, torch.sym_sum, c10d.wait_tensor.default)
    if is_call(node, aten.slice.Tensor) and _may_clamp(node):
        return False
    return node.op == "call_function" and (
        plain or (schema is not None and schema.name.partition("::")[2] in _STEPS)
    )


def _may_clamp(node: Node) -> bool:
    """Whether a slice takes a fixed number of rows of what has as many as counts say."""
    sliced: Any = node.args[0]
    is_fixed = any(isinstance(end, int) and 0 < abs(end) < 1 << 62 for end in node.args[2:4])
    return is_fixed and not isinstance(shape(sliced)[dim_argument(node, 1)], int)


def played(wanted: Any, values: dict[Node, Any]) -> list[Any]:
    """The values of nodes, made of those that are known.

    Args:
        values: those that are known; it gets all others that are made on the way.

    Raises:
        RefusedError: they are made of others, or by other than steps on integers.
    """

    def value(node: Node) -> Any:
        if node not in values:
            if not is_step(node):
                raise RefusedError(UNKNOWN)
            target: Any = node.target
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
            if target in (c10d.wait_tensor.default, torch.ops.prims.device_put.default):
                target, args, kwargs = operator.getitem, (args, 0), {}
            here = {"device": "cpu"} if "device" in kwargs else {}
            try:
                made = target(*args, **kwargs | here)
            except (RuntimeError, ValueError, IndexError, TypeError):
                raise RefusedError(UNKNOWN) from None  # it is not for all counts
            if target is operator.floordiv and made * args[1] != args[0]:
                raise RefusedError(UNKNOWN)  # a threshold
            if isinstance(made, torch.Tensor) and made.dtype not in (torch.int64, torch.int32):
                raise RefusedError(UNKNOWN)
            values[node] = made
        return values[node]

    found: list[Any] = torch.fx.map_arg(wanted, value)
    return found


class OfVLLM(NamedTuple):
    """A collective of vLLM's own, as torch's functional one.

    Attributes:
        collective: torch's.
        arrived: what it brings.
        target, rest: vLLM's op, and what it was given but for a tensor.
    """

    collective: Node
    arrived: Node
    target: Any
    rest: list[Any]

    def restore(self) -> None:
        """Put vLLM's back, unless torch's is gone."""
        if self.collective._erased:
            return
        x: Any = self.collective.args[0]
        scatters = is_call(self.collective, c10d.reduce_scatter_tensor.default)
        if scatters and self.rest[0] % len(shape(x)):  # behind `_cut_and_joined`
            x = x.args[0][0].args[0].args[0]
        made = Builder(self.collective.graph, self.collective).call(self.target, x, *self.rest)
        tell_as(self.collective, made)
        self.arrived.replace_all_uses_with(made)
        erase(made.graph, self.arrived)


def as_functional(graph: Graph) -> list[OfVLLM]:
    """Write vLLM's own collectives as torch's, by the groups that are behind its names."""
    state: Any = sys.modules.get("vllm.distributed.parallel_state")
    found = []
    for node in list(graph.nodes) if state else []:
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        if name not in ("vllm::all_reduce", "vllm::all_gather", "vllm::reduce_scatter"):
            continue
        x, *rest = arguments_of(node).values()
        at, group = Builder(graph, node), state._groups[rest[-1]]().device_group.group_name
        dim, parts = (rest[0] % len(shape(x)), rest[1]) if len(rest) > 1 else (0, 0)
        if name == "vllm::all_reduce":
            made = at.call(c10d.all_reduce.default, x, "sum", group)
        elif name == "vllm::all_gather":
            made = at.call(c10d.all_gather_into_tensor.default, x, parts, group)
        else:
            made = _cut_and_joined(at, x, at.part_size(x, dim, parts), (dim, 0), parts)
            made = at.call(c10d.reduce_scatter_tensor.default, made, "sum", parts, group)
        arrived = at.call(c10d.wait_tensor.default, made)
        if name == "vllm::all_gather":
            arrived = _cut_and_joined(at, arrived, at.size(x, 0), (0, dim), parts)
        tell_as(node, made, arrived)
        node.replace_all_uses_with(arrived)
        graph.erase_node(node)
        found.append(OfVLLM(made, arrived, node.target, rest))
    return found


def _cut_and_joined(at: Builder, whole: Node, size: Any, dims: tuple[int, int], parts: int) -> Node:
    """Cut in parts of `size` along one dim, and joined along the other."""
    if dims[0] == dims[1]:
        return whole
    cut = at.call(aten.split_with_sizes.default, whole, [size] * parts, dims[0])
    pieces = [at.call(operator.getitem, cut, i) for i in range(parts)]
    return at.call(aten.cat.default, pieces, dims[1])


def arguments_of(node: Node) -> dict[str, Any]:
    """Those of a call by name, defaults among them."""
    schema: Any = getattr(node.target, "_schema")  # noqa: B009
    found = {each.name: each.default_value for each in schema.arguments}
    found |= dict(zip(found, node.args, strict=False))
    return found | node.kwargs


def erase(graph: Graph, node: Node) -> None:
    """Erase what is not used any more, collectives too, which torch's own way would keep."""
    if node.users or node.op == "placeholder" or node._erased:
        return
    before = node.all_input_nodes
    graph.erase_node(node)
    for each in before:
        erase(graph, each)


def _strides(node: Node) -> list[Any]:
    """Those that matter; sizes that only data tells cannot be compared."""
    value = node.meta["val"]
    pairs = zip(value.stride(), value.shape, strict=True)
    return [step for step, size in pairs if str(size) != "1"]


def _mode_of(graph: Graph) -> Any:
    values = (node.meta.get("val") for node in graph.nodes)
    return next(value.fake_mode for value in values if hasattr(value, "fake_mode"))
