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
    """x and w as a kernel takes them. If `described`: descriptors, of the transpose where said."""

    x: Any
    w: Any
    described: bool = False
    x_transposed: bool = False
    w_transposed: bool = False


def _describable(matrix: torch.Tensor) -> bool:
    """Whether hardware can copy blocks of `matrix`, or of its transpose."""
    inner, outer = sorted(matrix.stride())
    aligned = outer * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0
    return inner == 1 and aligned and matrix.numel() > 0


def _describe(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[Any, bool]:
    transposed = matrix.stride(1) != 1
    if transposed:
        matrix, block = matrix.T, (block[1], block[0])
    return TensorDescriptor.from_tensor(matrix, list(block)), transposed


def described(
    x: torch.Tensor, w: torch.Tensor, tiling: Tiling, wanted: bool, row_starts: Sequence[int] = ()
) -> Operands:
    """Descriptors of x (M, K) and w (K, N) if they are `wanted` and both allow it.

    Only for operands that nobody writes while the kernel runs: copies by descriptor are not
    ordered by the acquire of a signal.

    Args:
        row_starts: rows of x from which tiles are counted, if not from row 0 alone.
    """
    if not wanted or not (_describable(x) and _describable(w)):
        return Operands(x, w)
    if x.stride(1) != 1 and any(start * x.element_size() % 16 for start in row_starts):
        return Operands(x, w)  # along the contiguous dim, blocks start at multiples of 16 bytes
    x_descriptor, x_transposed = _describe(x, (tiling.block_m, tiling.block_k))
    w_descriptor, w_transposed = _describe(w, (tiling.block_k, tiling.block_n))
    return Operands(x_descriptor, w_descriptor, True, x_transposed, w_transposed)


def described_weight(w: torch.Tensor, tiling: Tiling, wanted: bool) -> tuple[Any, bool]:
    """Descriptor of w (K, N), or None, and whether it is of the transpose."""
    if not wanted or not _describable(w):
        return None, False
    return _describe(w, (tiling.block_k, tiling.block_n))
