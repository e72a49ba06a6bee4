"""The tiles of the fused kernels as a plain matmul, beside torch.mm: one rank, nothing to gather.

    x (M, K)  @  w (K, N), laid out as nn.Linear's weight  ->  (M, N)

A fused kernel cannot hide what its matmul loses against the library. For GPUs: `tools.gpu`
runs it.
"""

from __future__ import annotations

from typing import Literal

import torch

import weft
from weft.bench import bounds
from weft.bench.problem import INPUTS, Options, Prepared, Spec
from weft.bench.shapes import sized
from weft.bench.suites.ops import TOLERANCE
from weft.collectives.ranks.group import alone

NAME = "matmul"
WORLD: Literal["ranks", "one"] = "one"
SIZES = ("M", "N", "K")

_SHAPES = (
    *((4096,) * 3, (8192,) * 3, (4096, 14336, 4096), (8192, 3584, 8192), (2048, 7168, 8192)),
    *((rows, 8192, 8192) for rows in (1024, 512, 256, 128, 64, 16)),
)
_QUICK = ((48, 32, 64),)


def cases(options: Options) -> list[Spec]:
    """Squares, a feed-forward layer whole and an 8th of it, and few rows."""
    shapes = options.shapes or (_QUICK if options.quick else _SHAPES)
    return [
        Spec(
            f"matmul {M}x{N}x{K}",
            {"M": M, "N": N, "K": K, "dtype": options.dtype_name, "flop": 2 * M * N * K},
        )
        for M, N, K in (sized(shape, SIZES, NAME) for shape in shapes)
    ]


def prepare(spec: Spec, options: Options) -> Prepared:
    """The kernel and torch.mm on the same operands."""
    M, N, K = (spec.params[name] for name in SIZES)
    device = torch.device(options.device)

    def drawn(rows: int) -> torch.Tensor:
        return torch.randn(rows, K, device=device, dtype=options.dtype)

    xs, ws = ([drawn(rows) for _ in range(INPUTS)] for rows in (M, N))

    def ours(i: int) -> torch.Tensor:
        with weft.engine("triton"):
            y: torch.Tensor = weft.all_gather_matmul(xs[i], ws[i].t(), alone(), sizes=[M])
        return y

    touched = (M * K + K * N + M * N) * options.dtype.itemsize
    return Prepared(
        {"weft": ours, "torch.mm": lambda i: xs[i] @ ws[i].t()},
        {"memory": bounds.touching(touched, device)},
        expected=lambda: [xs[0].double() @ ws[0].double().t()],
        tolerance=TOLERANCE[options.dtype],
        main="weft",
        peer="torch.mm",
    )
