"""Rules of contractions: everything that is an einsum of two tensors, with or without a summand."""

from __future__ import annotations

import string

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from weft.dtensor.call import Call, Choices, Strategy, rule
from weft.dtensor.layout import Layout, is_shard, linear_sums, moved, shard_dim


def contraction(
    call: Call,
    first: str,
    second: str,
    out: str,
    *,
    offset: int = 0,
    bias: int | None = None,
) -> Choices:
    """Strategies of `out = einsum(first, second)`, plus a summand that is broadcast onto it.

    Args:
        first, second, out: one letter a dim.
        offset: position of `first` among the tensor arguments; `second` comes next.
        bias: position of the summand.
    """
    replicate = Replicate()
    count = len(call.inputs)

    def strategy(a: Placement, b: Placement, c: Placement) -> Strategy:
        inputs: list[Placement] = [replicate] * count
        inputs[offset], inputs[offset + 1] = a, b
        if bias is not None:
            inputs[bias] = _summand(call.inputs[bias], call.outputs[0].shape, c)
        return Strategy(tuple(inputs), (c,))

    def at(letters: str, letter: str, like: Placement) -> Placement:
        return moved(like, letters.index(letter)) if letter in letters else replicate

    strategies = [strategy(replicate, replicate, replicate)]
    present: list[tuple[str, Placement]] = []
    for position, letters in ((offset, first), (offset + 1, second)):
        for placement in call.inputs[position].placements:
            if is_shard(placement):
                present.append((letters[shard_dim(placement)], placement))
    if bias is not None:  # the factors can be cut as the summand is
        summand = call.inputs[bias]
        shift = len(out) - summand.ndim
        for placement in filter(is_shard, summand.placements):
            if (
                summand.shape[shard_dim(placement)]
                == call.outputs[0].shape[shard_dim(placement) + shift]
            ):
                present.append((out[shard_dim(placement) + shift], placement))
    for letter, like in present:
        a, b = at(first, letter, like), at(second, letter, like)
        if not _fit(call.inputs[offset], a, call.inputs[offset + 1], b):
            continue
        c: Placement = moved(like, out.index(letter)) if letter in out else Partial("sum")
        candidate = strategy(a, b, c)
        if candidate not in strategies:
            strategies.append(candidate)
    if call.outputs[0].dtype.is_floating_point or call.outputs[0].dtype.is_complex:
        for position in (offset, offset + 1):
            for placement in linear_sums(call.inputs[position].placements):
                pair: list[Placement] = [replicate, replicate]
                pair[position - offset] = placement
                strategies.append(strategy(pair[0], pair[1], placement))
    return Choices(strategies)


def _fit(first: Layout, a: Placement, second: Layout, b: Placement) -> bool:
    """Whether two shards cut dims of the same size: one of size 1 is broadcast, and not cut."""
    if not (is_shard(a) and is_shard(b)):
        return True
    return first.shape[shard_dim(a)] == second.shape[shard_dim(b)]


def _summand(summand: Layout, out: tuple[int, ...], placement: Placement) -> Placement:
    """How the summand is placed so that it can be added to each rank's part of the result."""
    if not is_shard(placement):
        return placement
    own = shard_dim(placement) - (len(out) - len(summand.shape))
    if own < 0 or summand.shape[own] == 1:
        return Replicate()
    return moved(placement, own)


_PRODUCTS = {
    "mm": ("mk", "kn", "mn"),
    "bmm": ("bmk", "bkn", "bmn"),
    "mv": ("mk", "k", "m"),
    "dot": ("k", "k", ""),
    "vdot": ("k", "k", ""),
}
_WITH_SUMMAND = {"addmm": "mm", "baddbmm": "bmm", "addmv": "mv"}


@rule(*_PRODUCTS)
def product(call: Call) -> Choices:
    """(first, second)."""
    return contraction(call, *_PRODUCTS[call.name])


@rule(*_WITH_SUMMAND)
def with_summand(call: Call) -> Choices:
    """(summand, first, second): where the product is Partial, one rank adds the summand."""
    letters = _PRODUCTS[_WITH_SUMMAND[call.name.removesuffix("_")]]
    return contraction(call, *letters, offset=1, bias=0)


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """(..., K) @ (N, K).T + (N,): `F.linear` as one op."""
    return torch.nn.functional.linear(x, w, bias)


def linear_input_grad(grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(..., N) @ (N, K): gradient of `linear` with respect to x."""
    return grad.matmul(w)


def linear_weight_grad(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(..., N), (..., K) -> (N, K): gradient of `linear` with respect to w."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


@rule("linear")
def _linear_rule(call: Call) -> Choices:
    batch = string.ascii_uppercase[: call.inputs[0].ndim - 1]
    bias = 2 if len(call.inputs) == 3 else None
    return contraction(call, batch + "k", "nk", batch + "n", bias=bias)


@rule("linear_input_grad")
def _linear_input_grad_rule(call: Call) -> Choices:
    batch = string.ascii_uppercase[: call.inputs[0].ndim - 1]
    return contraction(call, batch + "n", "nk", batch + "k")


@rule("linear_weight_grad")
def _linear_weight_grad_rule(call: Call) -> Choices:
    batch = string.ascii_uppercase[: call.inputs[0].ndim - 1]
    return contraction(call, batch + "n", batch + "k", "nk")
