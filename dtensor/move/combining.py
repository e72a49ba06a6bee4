"""What a rank has taken in a step, put together: blocks in their places, terms reduced."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.dtensor.layout.placements import REDUCE, divide_, is_inexact
from weft.dtensor.move.transfers import PulledPiece, Step

Blocks = list[list[torch.Tensor]]

_SUMMED_IN_FP32 = (torch.float16, torch.bfloat16)


def put_together(
    step: Step, local: torch.Tensor, pieces: tuple[PulledPiece, ...], blocks: Blocks
) -> torch.Tensor:
    """This rank's part of the target, of the blocks of each piece, one from each of its holders."""
    out = torch.empty(step.target.local_shape, dtype=local.dtype, device=local.device)
    if not pieces:
        return fill_neutral(step, out)
    for piece, terms in zip(pieces, blocks, strict=True):
        into = out[piece.target]
        if len(terms) == 1 and step.scale == 1:
            into.copy_(terms[0])
        elif (wide := summed_in(step, out.dtype)) != out.dtype:
            into.copy_(_reduced(step, terms, torch.empty_like(into, dtype=wide)))
        else:
            _reduced(step, terms, into)
    return out


def summed_in(step: Step, dtype: torch.dtype) -> torch.dtype:
    """In what terms of `dtype` are reduced: the sum of an average of integers may not fit them."""
    if dtype in _SUMMED_IN_FP32:
        return torch.float32
    return torch.int64 if step.scale != 1 and not is_inexact(dtype) else dtype


def fill_neutral(step: Step, out: torch.Tensor) -> torch.Tensor:
    """`out` of a rank that adds nothing: of a new Partial, another one holds the values."""
    product = any(getattr(p, "reduce_op", "") == "product" for p in step.target.placements)
    return out.fill_(1 if product else 0)


def reduce_terms(step: Step, terms: Sequence[torch.Tensor], acc: torch.Tensor) -> torch.Tensor:
    """The terms reduced in this order into `acc`, not yet divided."""
    acc.copy_(terms[0])
    for term in terms[1:]:
        REDUCE[step.reduce_op or "sum"](acc, term.to(acc.dtype))
    return acc


def _reduced(step: Step, terms: Sequence[torch.Tensor], acc: torch.Tensor) -> torch.Tensor:
    reduce_terms(step, terms, acc)
    return divide_(acc, step.scale) if step.scale != 1 else acc
