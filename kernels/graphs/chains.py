"""What stands between a collective and its matmul: how torch moves dims, and cuts and joins them.

torch's collectives gather and scatter along dim 0. For another dim it cuts and joins:

    all_gather_into_tensor -> wait_tensor -> split along 0 -> cat along d       gathered along d
    split along d -> cat along 0 -> reduce_scatter_tensor -> wait_tensor        scattered along d

and matmuls take matrices: reshape of (*batch, K) to (M, K) before, of (M, N) to (*batch, N) after.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional

_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def is_call(node: Any, *targets: Any) -> bool:
    """Whether it is a call of one of `targets`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_reshape(node: Any) -> bool:
    """Whether it is a reshape that keeps the order of elements."""
    return is_call(node, *_RESHAPES)


def shape(node: Node) -> Sequence[Any]:
    """Of its value; sizes may be symbols."""
    found: Sequence[Any] = node.meta["val"].shape
    return found


def waited(collective: Node) -> Node | None:
    """What waits for it, if nothing else uses it."""
    users = list(collective.users)
    return users[0] if len(users) == 1 and is_call(users[0], c10d.wait_tensor.default) else None


def gathered_along(whole: Node, parts: int) -> tuple[Node, int]:
    """The gathered tensor and the dim along which it is: `whole` itself, or what it is joined to.

    Args:
        whole: along dim 0, as it arrives.
        parts: of how many ranks.
    """
    users = list(whole.users)
    if len(users) == 1 and is_call(users[0], *_SPLITS):
        pieces = _pieces(users[0], 0, parts)
        joined = _joined(pieces)
        if joined is not None:
            return joined, _dim_of(joined, 1)
    return whole, 0


def scattered_along(source: Node, parts: int) -> tuple[Node, int]:
    """What is scattered and along which dim, given what is scattered along dim 0."""
    if is_call(source, aten.cat.default) and _dim_of(source, 1) == 0 and len(source.users) == 1:
        pieces = source.args[0]
        assert isinstance(pieces, Sequence)
        first = pieces[0]
        split = (
            first.args[0] if isinstance(first, Node) and is_call(first, operator.getitem) else None
        )
        if is_call(split, *_SPLITS) and isinstance(split, Node):
            dim = _dim_of(split, 2)
            if _pieces(split, dim, parts) == list(pieces) and dim > 0:
                whole = split.args[0]
                assert isinstance(whole, Node)
                return whole, dim
    return source, 0


def _pieces(split: Node, dim: int, parts: int) -> list[Node]:
    """The equal pieces of a split along `dim`, in order; none if they are others."""
    if _dim_of(split, 2) != dim or len(split.users) != parts:
        return []
    if not all(is_call(user, operator.getitem) for user in split.users):
        return []
    by_number = {user.args[1]: user for user in split.users}
    if set(by_number) != set(range(parts)):
        return []
    pieces = [by_number[i] for i in range(parts)]
    return pieces if len({str(shape(piece)[dim]) for piece in pieces}) == 1 else []


def _joined(pieces: list[Node]) -> Node | None:
    """The one cat of all of them in order, if nothing else uses any."""
    users = {user for piece in pieces for user in piece.users}
    if len(users) != 1 or not is_call(cat := users.pop(), aten.cat.default):
        return None
    joined = cat.args[0]
    return cat if isinstance(joined, Sequence) and list(joined) == pieces else None


def _dim_of(node: Node, position: int) -> int:
    """The dim that a cat or split names, or leaves to be 0; counted from the front."""
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return dim % len(shape(node.args[0] if isinstance(node.args[0], Node) else node))


def as_batch(matrix: Node, batch: Sequence[Any]) -> Node | None:
    """A node of shape (*batch, K) whose rows `matrix` (M, K) are, if there is one."""
    if not is_reshape(matrix):
        return None
    source = matrix.args[0]
    if isinstance(source, Node) and [*shape(source)][:-1] == [*batch]:
        return source if shape(source)[-1] == shape(matrix)[-1] else None
    return None


def once(graph: Graph) -> list[Node]:
    """Gather once what is gathered several times, as torch does for layers that share an input.

    Returns:
        What is not used any more: gathers, and what follows them.
    """
    kinds = c10d.all_gather_into_tensor.default, c10d.wait_tensor.default
    chain = (*kinds, *_SPLITS, *_RESHAPES, operator.getitem, aten.cat.default)
    firsts: dict[str, Node] = {}
    from_gather: set[Node] = set()
    gone: list[Node] = []
    for node in list(graph.nodes):
        if not is_call(node, *chain):
            continue
        if node.target is not kinds[0] and not from_gather & set(node.all_input_nodes):
            continue
        from_gather.add(node)
        first = firsts.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if first is not node:
            node.replace_all_uses_with(first)
            gone.append(node)
    return gone
