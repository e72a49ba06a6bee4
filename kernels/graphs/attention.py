"""Attention to keys and values that are gathered: ring_attention, which gathers none of them.

    all_gather -> [permute, reshape] -> SDPA                            ring_attention
    SDPA's gradient -> [permute, reshape] -> [cut] -> reduce_scatter    ring_attention_backward

Both stand in one graph until torch has cut it in two. There they become ring attention together, or
stay together: after the cut, the forward alone would have to gather what its backward keeps.

A mask is one of ring attention's where it is made of positions alone, by one comparison, and lets
each query see the keys up to its own position, as ranks hold them one after another or zigzag. It
is evaluated when torch compiles. `is_causal` of SDPA counts each rank's queries from 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from weft.collectives.custom_ops import world_of
from weft.kernels.flash.geometry import to_zigzag
from weft.kernels.graphs.building import (
    Builder,
    RefusedError,
    ancestors,
    arguments_of,
    erase,
    evaluated,
    is_constant,
    tell_as,
)
from weft.kernels.graphs.chains import (
    aten,
    c10d,
    gathered_along,
    is_call,
    is_cast,
    is_chain,
    is_reshape,
    scattered_along,
    shape,
    waited,
)
from weft.kernels.graphs.receipts import Receipt, receipt_of

_ops: Any = torch.ops.weft
_KINDS = "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"
_FORWARD = [f"aten::_scaled_dot_product_{kind}" for kind in _KINDS]
_BACKWARD = [f"{name}_backward" for name in _FORWARD]
_COMPARISONS = [
    overload
    for name in ("ge", "gt", "le", "lt")
    for overload in (getattr(aten, name).Tensor, getattr(aten, name).Scalar)
]
# More pairs than this are not evaluated: 1 GiB of them, while torch compiles.
_MOST_PAIRS = 1 << 28


class _Shards(NamedTuple):
    """Keys or values, gathered.

    Attributes:
        gather: the collective.
        steps: how what arrives becomes what attention takes, in order.
        dim: along which it is gathered, before these.
        whole: what arrives, joined along `dim`.
    """

    gather: Node
    steps: list[Node]
    dim: int
    whole: Node

    @property
    def shard(self) -> Node:
        """This rank's."""
        return self.gather.all_input_nodes[0]


def fuse_attention(graph: Graph) -> tuple[list[Receipt], dict[Node, str]]:
    """Make ring attention of attention to what is gathered.

    Returns:
        Receipts of the collectives that are gone; those that stay beside an attention, and why.
    """
    gone: list[Receipt] = []
    stay: dict[Node, str] = {}
    for node in [each for each in graph.nodes if _named(each) in _FORWARD]:
        given = arguments_of(node)
        keys, values = (_gathered_shards(given[name]) for name in ("key", "value"))
        gathers = [each.gather for each in (keys, values) if each is not None]
        try:
            if keys is not None and values is not None:
                gone += _replace_attention(graph, node, given, keys, values)
            else:
                stay |= dict.fromkeys(gathers, "keys and values are not both gathered")
        except RefusedError as refused:
            stay |= dict.fromkeys(gathers, str(refused))
    return gone, stay


def _replace_attention(
    graph: Graph, node: Node, given: dict[str, Any], keys: _Shards, values: _Shards
) -> list[Receipt]:
    """Replace one attention, and its gradient if there is one.

    Raises:
        RefusedError: it cannot be; nothing has changed.
    """
    parts: Any
    group: Any
    _, parts, group = keys.gather.args
    if values.gather.args[1:] != (parts, group):
        raise RefusedError("keys and values are gathered over other ranks")
    if _dim_after(keys) != 2 or _dim_after(values) != 2:
        raise RefusedError("keys are gathered along another dim than that of the sequence")
    options, gathers = _ring_options(given, world_of(group)), (keys.gather, values.gather)
    what = f"attention, {options[2]} causal" if options[0] else "attention"
    backward = _gradient_of(node, keys, values)
    sums = [] if backward is None else [_sum_of(backward, i, parts, group) for i in (1, 2)]
    told = [receipt_of(each, "ring_attention", what) for each in dict.fromkeys(gathers)]
    name = "ring_attention_backward"
    told += [receipt_of(found[0], name, what) for found in sums if found is not None]

    at = Builder(graph, node)
    q = given["query"]
    k, v = (_replayed(at, each.shard, each.steps, each.dim) for each in (keys, values))
    made = at.call(_ops.ring_attention.default, q, k, v, group, *options)
    out, lse = (at.call(operator.getitem, made, i) for i in (0, 1))
    tell_as(node, made, out, lse)
    for user in list(node.users):
        if _result_index(user) < 2:
            at.restride(user, lse if _result_index(user) else out)
    if backward is None:
        _erase(node)
        return told

    at = Builder(graph, backward)
    dy = next(v for name, v in arguments_of(backward).items() if name.startswith("grad_out"))
    grads = at.call(
        _ops.ring_attention_backward.default,
        q, k, v, out, lse, dy, None, group, *options, None, None,
    )  # fmt: skip
    pieces = [at.call(operator.getitem, grads, i) for i in range(3)]
    tell_as(backward, grads, *pieces)
    for user in list(backward.users):
        if _result_index(user) == 0:
            at.restride(user, pieces[0])
    for found, dx, of in zip(sums, pieces[1:], (keys, values), strict=True):
        if found is not None:
            collective, steps = found
            arrived = waited(collective)
            assert arrived is not None
            here = Builder(graph, arrived)
            here.restride(arrived, _replayed(here, dx, steps, 2, shape(of.shard)))
            erase(graph, arrived)
    _erase(backward)
    _erase(node)
    return told


def _erase(node: Node) -> None:
    """Erase it with its results, none of which is used any more."""
    for result in list(node.users):
        erase(node.graph, result)


def _result_index(result: Node) -> int:
    """Among the results of what it is of."""
    place: Any = result.args[1]
    assert isinstance(place, int)
    return place


def _named(node: Any) -> str:
    schema = getattr(node.target, "_schema", None) if isinstance(node, Node) else None
    return schema.name if schema is not None else ""


def _is_step(node: Any) -> bool:
    """Whether what it does to a whole tensor it does to its shards."""
    kinds = aten.permute.default, aten.clone.default, aten.alias.default, aten.transpose.int
    return is_call(node, *kinds) or is_reshape(node) or is_cast(node)


def _gathered_shards(node: Node) -> _Shards | None:
    """What gathers `node`, if it is gathered and has no use but here."""
    steps: list[Node] = []
    while _is_step(node):
        steps.insert(0, node)
        node = node.all_input_nodes[0]
    arrived = node
    for kind in (aten.cat.default, operator.getitem, aten.split.Tensor):
        arrived = arrived.all_input_nodes[0] if is_call(arrived, kind) else arrived
    gather = arrived.args[0] if is_call(arrived, c10d.wait_tensor.default) else None
    if not isinstance(gather, Node) or not is_call(gather, c10d.all_gather_into_tensor.default):
        return None
    parts: Any = gather.args[1]
    whole, dim = gathered_along(arrived, parts)
    return _Shards(gather, steps, dim, whole) if whole is node else None


def _dim_after(shards: _Shards) -> int:
    """Where the gathered dim is, as attention takes it; -1 if it is mixed with others."""
    dim = shards.dim
    for step in shards.steps:
        dim = _dim_through(step, dim)
    return dim


def _dim_through(step: Node, dim: int) -> int:
    """Where a step takes a dim; -1 if it does not keep it."""
    before = step.all_input_nodes[0]
    if dim < 0:
        return dim
    if is_call(step, aten.permute.default):
        order: Any = step.args[1]
        return [int(each) % len(order) for each in order].index(dim)
    if is_call(step, aten.transpose.int):
        swapped = [each % len(shape(step)) for each in list[Any](step.args[1:])]
        return swapped[1 - swapped.index(dim)] if dim in swapped else dim
    if is_reshape(step):  # of the dims behind
        same = [*map(str, shape(step)[: dim + 1])] == [*map(str, shape(before)[: dim + 1])]
        return dim if same else -1
    return dim


def _replayed(
    at: Builder, node: Node, steps: list[Node], dim: int, last: Iterable[Any] = ()
) -> Node:
    """What `steps` make of a shard, whose dim `dim` is cut; in the end of the sizes `last`."""
    for step in steps:
        sizes = [*shape(step)]
        moved = _dim_through(step, dim)
        if is_reshape(step) and not is_call(step, aten.permute.default):
            sizes[moved] = at.size(node, dim)
            node = at.call(aten.reshape.default, node, sizes)
        elif not is_call(step, aten.clone.default, aten.alias.default):
            target: Any = step.target
            node = at.call(target, node, *step.args[1:], **step.kwargs)
        dim = moved
    assert not last or [*map(str, shape(node))] == [*map(str, last)]
    return node


def _gradient_of(node: Node, keys: _Shards, values: _Shards) -> Node | None:
    """The gradient of an attention.

    Raises:
        RefusedError: what is gathered, or what attention returns, has other uses.
    """
    found: set[Node] = set()

    def walk(each: Node, is_way: Callable[[Node], bool], refusal: str) -> None:
        for user in each.users:
            if _named(user) in _BACKWARD:
                found.add(user)
            elif is_way(user):
                walk(user, is_way, refusal)
            elif user is not node and refusal:
                raise RefusedError(_KEPT if user.op == "output" else refusal)

    for shards in (keys, values):
        walk(shards.gather, _is_way, "what is gathered has other uses")
    for user in node.users:
        # Only its gradient takes the log-sum-exp, states of dropout and the like.
        walk(user, _is_alias, "" if _result_index(user) == 0 else "its log-sum-exp has other uses")
    if not found:
        return None
    backward, *others = found
    given = arguments_of(node), arguments_of(backward)
    if others or any(given[0][name] is not given[1][name] for name in ("query", "key", "value")):
        raise RefusedError("its gradient is not that of what it takes")
    return backward


_KEPT = "its gradient is in another graph, and takes what is gathered"


def _is_alias(node: Node) -> bool:
    return is_call(node, aten.alias.default, aten.detach.default)


def _is_way(node: Node) -> bool:
    """Whether it may stand between a gather and attention."""
    return is_chain(node) or _is_step(node)


def _sum_of(backward: Node, place: int, parts: int, group: Any) -> tuple[Node, list[Node]] | None:
    """What sums a gradient over ranks, and the steps before; None if nobody asks for it.

    Raises:
        RefusedError: something else is done with it.
    """
    grads = [user for user in backward.users if _result_index(user) == place and user.users]
    if not grads:
        return None
    node, steps = grads[0], list[Node]()
    while len(node.users) == 1 and _is_step(user := next(iter(node.users))):
        steps.append(user)
        node = user
    below = node
    while below.users and not is_call(below, c10d.reduce_scatter_tensor.default):
        below = next(iter(below.users))
    dim = 2
    for step in steps:
        dim = _dim_through(step, dim)
    if is_call(below, c10d.reduce_scatter_tensor.default):
        source, *how = below.args
        assert isinstance(source, Node)
        is_cut = scattered_along(source, parts) == (node, dim) and waited(below) is not None
        if is_cut and how == ["sum", parts, group]:
            return below, steps
    raise RefusedError("gradients of keys are not summed and scattered as keys are gathered")


def _ring_options(given: dict[str, Any], place: tuple[int, int]) -> list[Any]:
    """causal, scale, layout, window and documents, as ring attention takes them.

    Raises:
        RefusedError: it does not take them.
    """
    if given["dropout_p"]:
        raise RefusedError("it drops out")
    if given["is_causal"]:
        raise RefusedError("is_causal counts each rank's queries from 0")
    mask = given.get("attn_mask", given.get("attn_bias"))
    layout = "contiguous" if mask is None else _layout_of(mask, *place)
    return [mask is not None, given["scale"], layout, None, None]


def _layout_of(mask: Node, rank: int, ranks: int) -> str:
    """How ranks hold a sequence whose queries see the keys up to their own position.

    Raises:
        RefusedError: the mask is another.
    """
    refused = RefusedError("its mask is not that of causal attention")
    needed = ancestors([mask])
    compared = [node for node in needed if is_call(node, *_COMPARISONS)]
    rows, columns = [*shape(mask)][-2:] if len(shape(mask)) > 1 else (0, 0)
    if not all(isinstance(size, int) for size in shape(mask)):
        raise RefusedError("its mask has sizes that are not known")
    if not is_constant(needed):
        raise RefusedError("its mask is made of more than positions")
    # Of one row, ranks could not tell from their own masks that it is causal.
    if len(compared) != 1 or rows < 2 or columns != rows * ranks:
        raise refused
    if mask.meta["val"].numel() > _MOST_PAIRS:
        raise RefusedError("its mask is too large to be evaluated")
    with evaluated(mask) as value:
        assert value is not None
        at = torch.arange(columns)
        ways = {"contiguous": at} | ({} if rows % 2 else {"zigzag": to_zigzag(at, ranks, 0)})
        for layout, place in ways.items():
            seen = place.chunk(ranks)[rank].unsqueeze(1) >= place
            added = torch.zeros(()).masked_fill(~seen, float("-inf"))
            if bool((value == (seen if value.dtype == torch.bool else added)).all()):
                return layout
    raise refused
