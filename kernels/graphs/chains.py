"""What stands between a collective and its matmul: how torch moves dims, and cuts and joins them.

torch's collectives gather and scatter along dim 0. For another dim it cuts and joins:

    all_gather_into_tensor -> wait_tensor -> split along 0 -> cat along d       gathered along d
    split along d -> cat along 0 -> reduce_scatter_tensor -> wait_tensor        scattered along d

and matmuls take matrices: reshape of (*batch, K) to (M, K) before, of (M, N) to (*batch, N) after.
Under autocast and mixed precision there are casts among these.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from weft.kernels.graphs.receipts import line_of

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional

COLLECTIVES = (
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_reduce.default,
    c10d.all_to_all_single.default,
)
_RESHAPES = (
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
_CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def is_call(node: Any, *targets: Any) -> bool:
    """Whether it is a call of one of `targets`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_reshape(node: Any) -> bool:
    """Whether it is a reshape that keeps the order of elements."""
    if is_call(node, aten.permute.default):  # of dims of size 1, as torch.einsum makes them
        moved = [dim for dim in _moved_dims(node) if shape(node.args[0])[dim] != 1]
        return moved == sorted(moved)
    if is_call(node, aten.slice.Tensor):  # of all that there is, by symbols
        return str(shape(node)) == str(shape(node.args[0]))
    return is_call(node, *_RESHAPES)


def _moved_dims(permuted: Node) -> list[int]:
    """Of a permute, counted from the front."""
    dims: Any = permuted.args[1]
    return [dim % len(dims) for dim in dims]


def is_transposed(node: Any) -> bool:
    """Whether it is the transpose of a matrix."""
    swapped = is_call(node, aten.permute.default) and _moved_dims(node) == [1, 0]
    return swapped or is_call(node, aten.t.default)


def is_cast(node: Any) -> bool:
    """Whether it changes the dtype alone, from one of floats to another."""
    if not is_call(node, *_CASTS) or set(node.kwargs) - {"dtype"}:
        return False
    return all(each.meta["val"].is_floating_point() for each in (node, node.all_input_nodes[0]))


def keeps_columns(reshaped: Node, whole: Node) -> bool:
    """Whether the last dim is the same."""
    return str(shape(reshaped)[-1:]) == str(shape(whole)[-1:])


def is_row(bias: Any, product: Node) -> bool:
    """Whether what `product` adds has a number for each of its columns."""
    return isinstance(bias, Node) and [*map(str, shape(bias))] == [str(shape(product)[-1])]


def shape(node: Node) -> Sequence[Any]:
    """Of its value; sizes may be symbols."""
    found: Sequence[Any] = node.meta["val"].shape
    return found


def grown_from(node: Node, passes: Callable[[Node], bool]) -> list[Node]:
    """The node, and all that is made of it by nodes of which `passes` holds."""
    found = [node]
    for each in found:  # it grows
        found += [user for user in each.users if passes(user) and user not in found]
    return found


def waited(collective: Node) -> Node | None:
    """What waits for it, if nothing else uses it."""
    users = list(collective.users)
    return users[0] if len(users) == 1 and is_call(users[0], c10d.wait_tensor.default) else None


def forget_in_place(arrived: Node) -> None:
    """A collective into a given tensor is traced as one that makes its own, and a copy to there.

    One into a list of tensors, as one that is split, and a copy of each part.
    """
    for user in list(arrived.users):
        if is_call(user, *SPLITS, operator.getitem, aten.slice.Tensor):
            forget_in_place(user)
        elif is_call(user, aten.copy.default) and user.args[1:] == (arrived,):
            before, after = (each.meta["val"] for each in (arrived, user))
            same = [(v.device, v.dtype, str(v.shape), str(v.stride())) for v in (before, after)]
            if same[0] == same[1]:
                user.replace_all_uses_with(arrived)
                user.graph.erase_node(user)


def gathered_along(whole: Node, parts: int) -> tuple[Node, int]:
    """The gathered tensor and the dim along which it is: `whole` itself, or what it is joined to.

    Args:
        whole: along dim 0, as it arrives.
        parts: of how many ranks.
    """
    users = list(whole.users)
    if len(users) == 1 and is_call(users[0], *SPLITS):
        pieces = _pieces(users[0], 0, parts)
    else:
        pieces = users if _are_even(users, whole, 0, parts) else []
    joined = _joined(pieces) if pieces else None
    return (whole, 0) if joined is None else (joined, dim_argument(joined, 1))


def scattered_along(source: Node, parts: int) -> tuple[Node, int]:
    """What is scattered and along which dim, given what is scattered along dim 0."""
    if not is_call(source, aten.cat.default) or dim_argument(source, 1) or len(source.users) > 1:
        return source, 0
    pieces: Any = source.args[0]
    cut = pieces[0].args[0] if is_call(pieces[0], operator.getitem, aten.slice.Tensor) else None
    if isinstance(cut, Node) and is_call(cut, *SPLITS):
        dim = dim_argument(cut, 2)
        if _pieces(cut, dim, parts) == list(pieces) and dim > 0:
            return cut.all_input_nodes[0], dim
    elif isinstance(cut, Node) and all(is_call(piece, aten.slice.Tensor) for piece in pieces):
        dim = dim_argument(pieces[0], 1)
        if _are_even(pieces, cut, dim, parts) and dim > 0:
            return cut, dim
    return source, 0


def _are_even(pieces: Sequence[Node], of: Node, dim: int, parts: int) -> bool:
    """Whether they are slices of equal length that make up `of`, in order."""
    if not all(is_call(piece, aten.slice.Tensor) for piece in pieces):
        return False
    length = shape(of)[dim]
    ends = [length // parts * i for i in range(parts)] + [length]
    even = [(of, dim, *map(str, ends[i : i + 2])) for i in range(parts)]
    return [_sliced(piece) for piece in pieces] == even and bool(length % parts == 0)


def _sliced(piece: Node) -> tuple[Any, ...]:
    """Of what, along which dim, from where to where; sizes as text, as they may be symbols."""
    of, _, *ends = piece.args[:4]
    dim = dim_argument(piece, 1)
    length = shape(piece.all_input_nodes[0])[dim]
    values = [each.meta["val"] if isinstance(each, Node) else each for each in ends]
    if len(values) == 2 and isinstance(values[1], int) and isinstance(length, int):
        values[1] = min(values[1], length)
    told = map(str, values if piece.args[4:] in ((), (1,)) else [])
    return of, dim, *told


def _pieces(split: Node, dim: int, parts: int) -> list[Node]:
    """The equal pieces of a split along `dim`, in order; none if they are others."""
    if dim_argument(split, 2) != dim or len(split.users) != parts:
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


def dim_argument(node: Node, position: int) -> int:
    """The dim that a cat, split or slice names, or leaves to be 0; counted from the front."""
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return dim % len(shape(node.args[0] if isinstance(node.args[0], Node) else node))


def cast_before(gather: Node) -> None:
    """Gather what its users cast the gathered tensor to, if they all do, to the same fewer bytes.

    The same values arrive, and no more bytes travel.
    """
    chain, casts = [gather], []
    for each in chain:  # it grows
        for user in each.users:
            if is_cast(user):
                casts.append(user)
            elif not is_chain(user):
                return
            elif user not in chain:
                chain.append(user)
    joins = [each for each in chain if is_call(each, aten.cat.default)]
    if any({*each.all_input_nodes} - {*chain} for each in joins):
        return  # what it is joined to stays wide
    dtypes = {each.meta["val"].dtype for each in casts}
    x = gather.args[0]
    assert isinstance(x, Node)
    if len(dtypes) != 1 or (dtype := dtypes.pop()).itemsize > x.meta["val"].dtype.itemsize:
        return
    with gather.graph.inserting_before(gather):
        narrow = gather.graph.call_function(_CASTS[0], (x, dtype))
    gather.replace_input_with(x, narrow)

    def narrowed(value: Any) -> Any:
        return [v.to(dtype) for v in value] if isinstance(value, (list, tuple)) else value.to(dtype)

    with x.meta["val"].fake_mode:
        narrow.meta = {**gather.meta, "val": narrowed(x.meta["val"])}
        for each in chain:
            each.meta["val"] = narrowed(each.meta["val"])
    for cast in dict.fromkeys(casts):
        cast.replace_all_uses_with(cast.all_input_nodes[0])
        gather.graph.erase_node(cast)


def once(graph: Graph) -> dict[Node, list[str]]:
    """Gather once what is gathered several times, as torch does for layers that share an input.

    Memory is held no longer than by the model: a gather that comes later is left out only if there
    is no other collective in between, or if what was gathered first is still to be used then.

    Returns:
        For each gather that stays, the lines of the model from which the others came.
    """
    kinds = c10d.all_gather_into_tensor.default, c10d.wait_tensor.default
    order = {node: i for i, node in enumerate(graph.nodes)}
    firsts: dict[str, Node] = {}
    until: dict[Node, int] = {}
    lines: dict[Node, list[str]] = {}
    from_gather: set[Node] = set()
    gone: list[Node] = []
    for node in list(graph.nodes):
        key = f"{node.target} {node.args} {node.kwargs}"
        if is_call(node, kinds[0]):
            first = firsts.get(key, node)
            if order[node] > until.get(first, len(order)):
                first = node
            firsts[key] = first
            until[first] = max(until.get(first, 0), _kept_until(node, order))
            if first is not node:
                lines.setdefault(first, []).append(line_of(node))
        elif from_gather & set(node.all_input_nodes) and is_chain(node):
            first = firsts.setdefault(key, node)
        else:
            continue
        from_gather.add(node)
        if first is not node:
            node.replace_all_uses_with(first)
            gone.append(node)
    for node in reversed(gone):
        graph.erase_node(node)
    return lines


def next_collective(node: Node, *same: Any) -> Node:
    """The first behind `node` but those of the same target and arguments; or the graph's end."""
    node = node.next
    while node.op != "output":
        if is_call(node, *COLLECTIVES) and (node.target, node.args) != same:
            break
        node = node.next
    return node


def is_chain(node: Node) -> bool:
    """Whether it may stand between a gather and a matmul."""
    kinds = c10d.wait_tensor.default, *SPLITS, operator.getitem, aten.cat.default
    return is_call(node, *kinds) or is_reshape(node) or is_cast(node)


def _kept_until(gather: Node, order: dict[Node, int]) -> int:
    """The place of the last use of what is gathered, or of the next other collective."""
    users = [user for each in grown_from(gather, is_chain) for user in each.users]
    users.append(next_collective(gather, gather.target, gather.args))
    return max(map(order.__getitem__, users))
