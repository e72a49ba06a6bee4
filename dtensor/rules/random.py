"""Rules of random ops: shards draw with the whole (see `weft.dtensor.random`)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial

from weft.dtensor.dispatch.call import Choices, Chosen, Decomposed, Op, OpCall, rule
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.layout.placements import show
from weft.dtensor.random import drawn


@rule(
    "uniform normal random exponential log_normal cauchy geometric rand_like randn_like "
    "randint_like"
)
def random_numbers(call: OpCall) -> Choices | Chosen:
    """Numbers that depend on the tensor's shape and strides, not on its values."""
    if len(call.inputs) != 1 or "Tensor" in getattr(call.op, "_overloadname", ""):
        return given_by_tensors(call)
    source = call.inputs[0]
    placements = source.reduced().placements
    read = placements if call.name.endswith("_") else source.placements
    return Chosen([read], [placements], _draw_part)


def _draw_part(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Op:
    in_place, layout = call.name.endswith("_"), outputs[0]

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        def fill(whole: torch.Tensor) -> None:
            values = call.op(whole, *args, **kwargs)
            if not in_place:
                whole.copy_(values)

        local = (
            x if in_place else torch.empty(layout.local_shape, dtype=layout.dtype, device=x.device)
        )
        return drawn(fill, call.name, layout, local)

    return run


@rule("bernoulli")
def bernoulli(call: OpCall) -> Choices | Chosen | Decomposed:
    """Like `random_numbers` if the probability is a number, on replicas if it is a tensor."""
    if isinstance(call.bound.get("p"), (int, float)):
        return random_numbers(call)
    if call.name == "bernoulli_":
        return Decomposed(
            lambda x, p, generator=None: x.copy_(
                torch.bernoulli(p.expand(x.shape).to(x.dtype), generator=generator)
            )
        )
    return given_by_tensors(call)


@rule("poisson binomial multinomial _standard_gamma _sample_dirichlet")
def given_by_tensors(call: OpCall) -> Choices:
    """Run on replicas: how many numbers an element draws depends on the values."""
    return Choices([call.whole])


@rule("native_dropout")
def native_dropout(call: OpCall) -> Chosen:
    """x times the scaled mask that the op draws for a tensor of ones.

    Terms of a sum keep one mask, as scaling is linear.
    """
    placements, mask = call.inputs[0].placements, call.inputs[0].reduced().placements
    for p in placements:
        if isinstance(p, Partial) and p.reduce_op not in ("sum", "avg"):
            raise NotImplementedError(
                f"{call}: dropout scales, which {show([p])} does not allow. Redistribute first"
            )

    def localize(call: OpCall, inputs: list[Layout], outputs: list[Layout]) -> Op:
        kept = outputs[1]

        def run(x: torch.Tensor, p: float, train: bool | None) -> Any:
            def fill(whole: torch.Tensor) -> None:
                ones = torch.ones_like(whole, dtype=x.dtype)  # the op does not take bool
                whole.copy_(torch.ops.aten.native_dropout(ones, p, train)[1])

            if not train:
                return x.clone(), x.new_ones(x.shape, dtype=torch.bool)
            drawn_mask = drawn(fill, call.name, kept, x.new_empty(x.shape, dtype=torch.bool))
            scale = 0.0 if p == 1 else 1 / (1 - p)
            return x * drawn_mask * scale, drawn_mask

        return run

    return Chosen([placements], [placements, mask], localize)
