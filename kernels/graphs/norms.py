"""An all_reduce, the residual and the RMS norm behind it: all_reduce_residual_rms_norm.

    all_reduce -> [cast] -> add -> [cast] -> pow, mean, + eps, rsqrt, mul -> [mul] -> [cast]

is what torch decomposes an RMS norm to, and what serving engines write out. It is one launch for
the few rows of decoding; of more, or on a CPU, Inductor's kernel behind a fused matmul is quicker.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from weft import settings
from weft.kernels.engine.local_matmul import on_cpu
from weft.kernels.graphs.building import Builder, erase
from weft.kernels.graphs.chains import aten, grown_from, is_call, is_cast, is_reshape, shape
from weft.kernels.norm.rms_norm import MOST_BYTES, WIDEST


@dataclass(frozen=True)
class Norm:
    """What follows a sum over ranks.

    Attributes:
        h: the sum, with the residual if there is one.
        y: the norm of it.
        residual: like the sum.
        weight: (H,).
    """

    h: Node
    y: Node
    residual: Node | None
    weight: Node | None
    eps: float


def normalize_sum(graph: Graph, collective: Node, arrived: Node) -> bool:
    """Whether an all_reduce, a sum that is waited for as `arrived`, is now one op with its norm."""
    given, op, group = collective.args
    assert isinstance(given, Node)
    found = _norm_of(arrived) if op == "sum" and _is_quicker(given.meta["val"]) else None
    at = Builder(graph, collective)
    if found is None or not at.can_hoist([found.residual, found.weight]):
        return False
    residual, weight = at.hoisted([found.residual, found.weight])
    made = at.call(
        torch.ops.weft.all_reduce_residual_rms_norm.default,
        given,
        residual,
        weight,
        group,
        found.eps,
    )
    for place, old in enumerate((found.y, found.h)):
        at.replace(old, at.call(operator.getitem, made, place))
    erase(graph, found.y)
    erase(graph, found.h)
    return True


def _is_quicker(sum_: torch.Tensor) -> bool:
    """Whether the one launch takes it, at the size that torch has compiled for."""
    engine, numel = settings.current_engine(), sum_.numel()
    numel = numel if isinstance(numel, int) else numel.node.hint or 0
    if sum_.dtype not in (torch.float32, torch.bfloat16, torch.float16) or sum_.ndim < 1:
        return False
    few = not on_cpu(sum_) and 2 * numel * sum_.element_size() <= MOST_BYTES
    return sum_.shape[-1] <= WIDEST and (engine == "triton" or (engine == "auto" and few))


def _norm_of(arrived: Node) -> Norm | None:
    """The norm, and what is added before; None where something else takes the sum alone."""
    dtype, alone = arrived.meta["val"].dtype, _alike(arrived)
    users = _other_users(alone)
    adds = [user for user in users if is_call(user, aten.add.Tensor) and not user.kwargs]
    h, residual = arrived, None
    if adds:
        h = adds[0]
        terms = [term for term in h.args if term not in alone]
        if len(users) > 1 or len(terms) != 1 or not isinstance(terms[0], Node):
            return None
        residual = terms[0]
        if residual.meta["val"].dtype != dtype and is_cast(residual):
            residual = residual.all_input_nodes[0]
        value = residual.meta["val"]
        if value.dtype != dtype or str(value.shape) != str(arrived.meta["val"].shape):
            return None
    alike = _alike(h)
    for square in _other_users(alike):
        scale = _find_inverse_rms(square, alike)
        for product in scale[0].users if scale else ():
            if scale and is_call(product, aten.mul.Tensor) and alike & {*product.args}:
                y, weight = _find_weight(product, dtype)
                # What is rounded only after the norm must have no other use as it is.
                exact = h.meta["val"].dtype == dtype
                if y is not None and (exact or not _other_users(alike, dtype) - {square, product}):
                    return Norm(h, y, residual, weight, scale[1])
    return None


def _alike(node: Node) -> set[Node]:
    """The node, and what has the same values and shape in the same or more bytes."""

    def keeps_values(user: Node) -> bool:
        given: torch.Tensor = user.all_input_nodes[0].meta["val"]
        if is_cast(user):
            return bool(user.meta["val"].dtype.itemsize > given.dtype.itemsize)
        return is_reshape(user) and str(shape(user)) == str(given.shape)

    return set(grown_from(node, keeps_values))


def _other_users(alike: Iterable[Node], but_casts_to: torch.dtype | None = None) -> set[Node]:
    """All users of these, but these themselves, and casts."""
    users = {user for each in alike for user in each.users} - {*alike}
    return {
        user for user in users if not (is_cast(user) and user.meta["val"].dtype == but_casts_to)
    }


def _find_inverse_rms(square: Node, of: set[Node]) -> tuple[Node, float] | None:
    """1 / sqrt(mean of a square of `of` + eps), and eps."""
    if is_call(square, aten.mul.Tensor):
        squared = square.args[0] is square.args[1]
    else:
        squared = is_call(square, aten.pow.Tensor_Scalar) and square.args[1:] == (2,)
    mean = _only_user(square) if squared and square.args[0] in of else None
    if mean is None or not is_call(mean, aten.mean.dim):
        return None
    dims: Any = mean.args[1]
    if [dim % len(shape(square)) for dim in dims] != [len(shape(square)) - 1]:
        return None
    plus = _only_user(mean) if mean.args[2:] == (True,) and not mean.kwargs else None
    root = _only_user(plus) if is_call(plus, aten.add.Tensor, aten.add.Scalar) and plus else None
    if plus is None or root is None or not is_call(root, aten.rsqrt.default):
        return None
    eps = plus.args[1]
    return (root, float(eps)) if isinstance(eps, (int, float)) else None


def _find_weight(product: Node, dtype: torch.dtype) -> tuple[Node | None, Node | None]:
    """The last of what only casts and a weight make of `product` in `dtype`, and the weight."""
    node, y, weight, last = product, None, None, None
    while True:
        if node.meta["val"].dtype == dtype:
            y, weight = node, last
        user = _only_user(node)
        if user is None:
            break
        if is_call(user, aten.mul.Tensor) and last is None:
            other = user.args[1] if user.args[0] is node else user.args[0]
            if not isinstance(other, Node) or [*shape(other)] != [*shape(node)][-1:]:
                break
            last = other
        elif not is_cast(user):
            break
        node = user
    return y, weight


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
