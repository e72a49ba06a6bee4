"""Operands of a matmul as a kernel takes them: pointers with strides, or tensor descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.chips import Tiling


@dataclass(frozen=True)
class Operands:
    """Terms x_i @ w_i. If `described`, `xs` and `ws` are descriptors, of the transpose where said."""

    xs: tuple[Any, ...]
    ws: tuple[Any, ...]
    described: bool
    x_transposed: tuple[bool, ...]
    w_transposed: tuple[bool, ...]


def _describable(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can read `matrix`, or its transpose."""
    inner, outer = sorted(matrix.stride())
    aligned = outer * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0
    return inner == 1 and aligned and matrix.numel() > 0


def _describe(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[Any, bool]:
    transposed = matrix.stride(1) != 1
    if transposed:
        matrix, block = matrix.T, (block[1], block[0])
    return TensorDescriptor.from_tensor(matrix, list(block)), transposed


def described(
    xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], tiling: Tiling, wanted: bool
) -> Operands:
    """Descriptors if they are `wanted` and every operand allows it, pointers otherwise.

    Only for operands that nobody writes while the kernel runs: the copy engine is not ordered by the
    acquire of a signal.
    """
    none = (False,) * len(xs)
    if not wanted or not all(map(_describable, (*xs, *weights))):
        return Operands(tuple(xs), tuple(weights), False, none, none)
    x_descriptors = [_describe(x, (tiling.block_m, tiling.block_k)) for x in xs]
    w_descriptors = [_describe(w, (tiling.block_k, tiling.block_n)) for w in weights]
    return Operands(
        tuple(d for d, _ in x_descriptors),
        tuple(d for d, _ in w_descriptors),
        True,
        tuple(t for _, t in x_descriptors),
        tuple(t for _, t in w_descriptors),
    )
