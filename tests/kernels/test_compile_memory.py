"""What rewritten graphs hold: no more for the backward than torch's, and at once no more than that
and one result, as a fused op needs together what torch's graph may make and drop in turn.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

import weft
from tests.kernels.test_compile_pass import dtensor_model, held

# What stands for sizes and for absent biases has an element or none.
FEW = 64


def tensors(node: Node) -> list[torch.Tensor]:
    leaves = tree_leaves(node.meta.get("val"))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def storages(node: Node) -> dict[int, int]:
    """Bytes of all that its values lie in; waiting for something makes nothing."""
    while node.target is torch.ops._c10d_functional.wait_tensor.default:
        node = node.all_input_nodes[0]
    found = [value.untyped_storage() for value in tensors(node)]
    return {each._cdata: each.nbytes() for each in found}


def is_kernel(node: Node) -> bool:
    """Whether it is no part of a kernel that Inductor generates, but a call of its own."""
    schema = getattr(node.target, "_schema", None)
    name = schema.name if schema is not None else ""
    own = name.startswith(("weft::", "_c10d_functional::")) and not name.endswith("wait_tensor")
    return own or name.endswith(("mm", "addmm")) or "attention" in name


def most_held(graph: Graph) -> tuple[int, int, int]:
    """Bytes alive at once, where all is freed behind its last use; of what is returned; and of the
    largest result of a kernel.

    What only generated kernels make and take does not reach memory: it is made where it is needed.
    """
    nodes = list(graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    makes = {node for node in nodes if node.op == "placeholder" or is_kernel(node)}
    for node in [*makes, nodes[-1]]:
        makes.update(n for n in node.all_input_nodes if n.target != operator.getitem)
    until: dict[Node, int] = {}
    last: dict[int, int] = {}
    for node in reversed(nodes):
        uses = [order[u] if u in makes or u.op == "output" else until[u] for u in node.users]
        until[node] = max([order[node], *uses])
        for each in storages(node):
            last[each] = max(last.get(each, 0), until[node])
    returned: dict[int, int] = {}
    for node in nodes[-1].all_input_nodes:
        returned |= storages(node)
    alive: dict[int, int] = {}
    most = 0
    for i, node in enumerate(nodes):
        if node in makes:
            alive |= storages(node)
        most = max(most, sum(alive.values()))
        alive = {key: size for key, size in alive.items() if last[key] > i}
    largest = max(size for node in nodes if is_kernel(node) for size in storages(node).values())
    return most, sum(returned.values()), largest


def by_pass(counts: list[list[tuple[int, int, int]]]) -> Any:
    """A backend that counts before and after the pass."""

    def compiled(module: Any, _: Any) -> Any:
        before = most_held(module.graph)
        assert weft.compile_pass(module).fused
        counts.append([before, most_held(module.graph)])
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compiled)


def counted(kind: str) -> list[list[tuple[int, int, int]]]:
    counts: list[list[tuple[int, int, int]]] = []
    model, x = dtensor_model(kind)
    held(model, x, by_pass(counts))
    return counts


@pytest.mark.slow
def test_no_more_is_held_than_by_torch(ranks: Any) -> None:
    for kind in "mlp whole", "mlp sequence", "prepared", "attention whole", "attention sequence":
        for counts in ranks(2, counted, kind):
            assert len(counts) == 2
            for before, after in counts:
                assert after[0] <= before[0] + before[2] + FEW, (kind, counts)
                assert after[1] <= before[1], (kind, counts)


def gathers_again() -> list[tuple[int, int, int]]:
    """A graph that gathers, and drops what is gathered: the pass may not keep it."""
    graph = Graph()
    with torch._subclasses.FakeTensorMode():
        x, w = torch.empty(4, 64), torch.empty(64, 8)
        given = [graph.placeholder(name) for name in "xw"]
        for node, value in zip(given, (x, w), strict=True):
            node.meta["val"] = value
        name, c10d = dist.group.WORLD.group_name, torch.ops._c10d_functional
        values: list[Any] = [x]
        node = given[0]
        for target, args in (
            (c10d.all_gather_into_tensor.default, (dist.get_world_size(), name)),
            (c10d.wait_tensor.default, ()),
            (torch.ops.aten.mm.default, (w,)),
        ):
            values.append(target(values[-1], *args))
            args = (given[1],) if target is torch.ops.aten.mm.default else args
            node = graph.call_function(target, (node, *args))
            node.meta["val"] = values[-1]
        graph.output((node,))
    before = most_held(graph)
    weft.compile_pass(graph)
    return [before, most_held(graph)]


def test_what_is_gathered_is_not_held(ranks: Any) -> None:
    for before, after in ranks(2, gathers_again):
        # x, w and both ranks' x; then x, w and the product.
        assert before[0] == 4 * (256 + 512 + 512) and after[0] == 4 * (256 + 512 + 64)
