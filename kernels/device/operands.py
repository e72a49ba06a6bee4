"""Arguments of the kernels: matrices with their strides, tensor descriptors.

Triton passes named tuples to a kernel field by field, so that its argument list shows what belongs
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.engine.chips import Tiling


class Matrix(NamedTuple):
    """A matrix in memory: pointer to its first element, strides of its rows and columns."""

    ptr: Any
    stride_m: Any
    stride_n: Any


class Scales(NamedTuple):
    """fp32 scales, one for each row of x or column of w, `stride` apart (0: one for all).

    `ptr` is None if there are none.
    """

    ptr: Any
    stride: Any


NO_SCALES = Scales(None, 0)


class Rows(NamedTuple):
    """The gathered matrix, contiguous, and (rows,) fp32 scales of it; None if there is none."""

    ptr: Any
    scales: Any


def matrix(tensor: torch.Tensor) -> Matrix:
    """A 2-D tensor as a kernel takes it."""
    tensor = tensor.resolve_neg()
    return Matrix(tensor, tensor.stride(0), tensor.stride(1))


def in_place(x: torch.Tensor) -> bool:
    """Whether a kernel can read the rank's own shard x in place."""
    return x.stride(1) == 1 or x.shape[1] == 1


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """A bias or residual as kernels take it: contiguous."""
    return None if x is None else x.contiguous().resolve_neg()


def scales_of(scale: torch.Tensor | None) -> Scales:
    """A scalar, or one scale for each row or column, as kernels take it."""
    if scale is None:
        return NO_SCALES
    flat = scale.reshape(-1)
    return Scales(flat, 0 if flat.numel() == 1 else flat.stride(0))


# Terms that may be read by descriptor: q, k and v. Triton's launcher takes none in a tuple.
_TERMS = 3


@dataclass(frozen=True)
class Described:
    """Descriptors of x and w of each term, or of their transposes; all or none.

    Attributes:
        arguments: x and w of the first term, of the second, of the third.
    """

    arguments: tuple[Any, ...] = (None, None) * _TERMS
    x_transposed: bool = False
    w_transposed: bool = False


def _describable(matrix: torch.Tensor) -> bool:
    """Whether the hardware can copy blocks of `matrix`, or of its transpose."""
    inner, outer = sorted(matrix.stride())
    aligned = outer * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0
    return inner == 1 and aligned and matrix.numel() > 0 and not matrix.is_neg()


def _tma_descriptor(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[Any, bool]:
    transposed = matrix.stride(1) != 1
    if transposed:
        matrix, block = matrix.T, (block[1], block[0])
    return TensorDescriptor.from_tensor(matrix, list(block)), transposed


def described(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    tiling: Tiling,
    wanted: bool,
    row_starts: Sequence[int] = (),
) -> Described:
    """Descriptors of every x (M, K) and w (K, N), if they are `wanted` and all allow it.

    Only for operands that nobody writes while the kernel runs: copies by descriptor are not ordered
    by the acquire of a signal (`flattened.order_descriptors` orders those of gathered rows).

    Args:
        row_starts: rows of x at which tiles may start, besides row 0.
    """
    x, w = xs[0], weights[0]
    alike = all(len({each.stride(1) == 1 for each in operands}) == 1 for operands in (xs, weights))
    if not wanted or len(xs) > _TERMS or not alike:
        return Described()
    if not all(_describable(each) for each in (*xs, *weights)):
        return Described()
    if x.stride(1) != 1 and any(start * x.element_size() % 16 for start in row_starts):
        return Described()  # along the contiguous dim, blocks must start at multiples of 16 bytes
    found: list[Any] = []
    for x, w in zip(xs, weights, strict=True):
        x_descriptor, x_transposed = _tma_descriptor(x, (tiling.block_m, tiling.block_k))
        w_descriptor, w_transposed = _tma_descriptor(w, (tiling.block_k, tiling.block_n))
        found += [x_descriptor, w_descriptor]
    none = (None, None) * (_TERMS - len(xs))
    return Described((*found, *none), x_transposed, w_transposed)


def described_weights(
    weights: Sequence[torch.Tensor], tiling: Tiling, wanted: bool
) -> tuple[list[Any], bool]:
    """Descriptors of one or two weights (K, N), or None for each, and whether of the transpose."""
    count = len(weights)
    alike = count in (1, 2) and len({w.stride(1) == 1 for w in weights}) == 1
    if not wanted or not alike or not all(_describable(w) for w in weights):
        return [None, None], False
    made = [_tma_descriptor(w, (tiling.block_k, tiling.block_n)) for w in weights]
    return [desc for desc, _ in made] + [None] * (2 - count), made[0][1]


def described_rows(
    x: torch.Tensor, gathered: torch.Tensor, tiling: Tiling, wanted: bool
) -> list[Any]:
    """Descriptors of x (m, K), and of `gathered` (M, K), or Nones.

    Hardware takes no empty matrix: where x is one, of which no tile reads, `gathered` stands there.
    """
    x = x if x.numel() else gathered
    rows = [x, gathered]
    if not (
        wanted and gathered.numel() and all(r.stride(1) == 1 and _describable(r) for r in rows)
    ):
        return [None, None]
    shape = [tiling.block_m, tiling.block_k]
    return [TensorDescriptor.from_tensor(each, shape) for each in rows]
