"""Products of scaled fp8 beside collectives: in graphs of torch, and traced from calls of weft."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    reduce_scatter_tensor,
)

import weft
from tests.kernels.test_compile_pass import by_pass, world
from weft.kernels.engine.fp8 import FP8
from weft.kernels.graphs.receipts import Receipts


def scaled() -> list[Any]:
    """Of e4m3: x is gathered, or its columns are this rank's."""
    same = torch.Generator().manual_seed(3)

    def fp8(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=same).to(FP8)

    parts, rank = dist.get_world_size(), dist.get_rank()
    xs, ws = fp8(parts, 16, 32), fp8(parts, 48, 32)
    x, w, one = xs[rank], ws[rank].t(), torch.tensor(0.5)
    rows, columns = torch.rand(16, 1, generator=same), torch.rand(1, 48, generator=same)

    def product(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(x, w, a * (rank + 1), b, out_dtype=torch.bfloat16)

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return product(all_gather_tensor(x, 0, world()), one, one)

    def gathered_with_scales(x: torch.Tensor) -> torch.Tensor:
        scales = all_gather_tensor(rows * (rank + 1), 0, world())
        x = all_gather_tensor(x, 0, world())
        result: torch.Tensor = torch._scaled_mm(x, w, scales, columns, out_dtype=torch.bfloat16)
        return result

    def scattered(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = reduce_scatter_tensor(product(x, rows, columns), "sum", 0, world())
        return result

    def summed(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = all_reduce(product(x, rows, columns).view(2, 8, 48), "sum", world())
        return result

    def plain(i: int, j: int) -> torch.Tensor:
        return xs[i].float() @ ws[j].float().t() * (j + 1)

    total = torch.stack([plain(i, i) for i in range(parts)]).sum(0) * rows * columns
    wanted = [
        torch.cat([plain(i, rank) for i in range(parts)]) * one * one,
        torch.cat([plain(i, rank) * rows * (i + 1) / (rank + 1) for i in range(parts)]) * columns,
        total.chunk(parts)[rank],
        total.view(2, 8, 48),
    ]
    found = []
    calls = gathered, gathered_with_scales, scattered, summed
    for call, exact in zip(calls, wanted, strict=True):
        graphs: list[Receipts] = []
        torch._dynamo.reset()
        made = torch.compile(call, backend=by_pass(True, graphs), fullgraph=True)(x)
        torch.testing.assert_close(made.float(), exact, rtol=2e-2, atol=1e-1)
        found += [r.fused for receipts in graphs for r in receipts]

    def by_hand(x: torch.Tensor) -> list[torch.Tensor]:
        scales = {"scale_a": rows, "scale_b": columns, "out_dtype": torch.float32}
        made = [op(x, w, **scales) for op in (weft.matmul_reduce_scatter, weft.matmul_all_reduce)]
        return [*made, weft.all_gather_matmul(x, w, sizes=[16] * parts, **scales)]

    traced = torch.compile(by_hand, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(traced, by_hand(x), rtol=0, atol=0)
    return found


def test_scaled_products_of_fp8(ranks: Any) -> None:
    for found in ranks(2, scaled):
        gathers = ["all_gather_matmul"] * 3
        assert found == [*gathers, "matmul_reduce_scatter", "matmul_all_reduce"]
