"""An all_reduce and the norm behind it, as models write them: one op, and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from needs import needs_interpreter
from torch.distributed._functional_collectives import all_reduce
from torch.nn import functional

import weft
from tests.kernels import compiled_models as models
from tests.kernels.test_compile_models import by_pass
from weft.kernels.graphs.receipts import Receipts

pytestmark = needs_interpreter
NORM, SUM = "all_reduce_residual_rms_norm", "matmul_all_reduce"
H = 32


def summed(x: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = all_reduce(x, "sum", dist.group.WORLD)
    return total


def of_torch(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, g: torch.Tensor) -> Any:
    h = r + summed(x @ w).view(len(x), H)
    return functional.rms_norm(h, (H,), g, 1e-3), h


def of_transformers(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, g: torch.Tensor) -> Any:
    h = r + summed(x @ w)
    wide = h.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)
    return g * wide.to(h.dtype), h


def of_vllm(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, g: torch.Tensor) -> Any:
    wide = summed(x @ w).float() + r.float()
    normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-3)
    return normed.to(x.dtype) * (1 + g), wide.to(x.dtype)


def bare(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, g: torch.Tensor) -> Any:
    """Of experts: no matmul just before, no residual, no weight."""
    return functional.rms_norm(summed((x @ w).relu()), (H,), None, 1e-3), r


def twice(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, g: torch.Tensor) -> Any:
    total = summed(x @ w)
    return functional.rms_norm(r + total, (H,), g, 1e-3), total


def wide_residual(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, g: torch.Tensor) -> Any:
    """A residual that stays in fp32 would lose by the op, in half precision."""
    wide = summed(x @ w).float() + r.float()
    return functional.rms_norm(wide, (H,), g.float(), 1e-3).to(x.dtype), wide


def other_dims(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, g: torch.Tensor) -> Any:
    h = r + summed(x @ w)
    return h * torch.rsqrt(h.pow(2).mean(0, keepdim=True) + 1e-3) * g, h


MODELS: list[tuple[Callable[..., Any], str, str]] = [  # what is fused, in fp32 and in bf16
    (of_torch, NORM, NORM),
    (of_transformers, NORM, NORM),
    (of_vllm, NORM, NORM),
    (bare, NORM, NORM),
    (twice, SUM, SUM),
    (wide_residual, NORM, SUM),
    (other_dims, SUM, SUM),
]


def compiled(model: Callable[..., Any], given: list[torch.Tensor], dynamic: bool = False) -> Any:
    """Results as they are, and rewritten; and what has been fused."""
    torch._dynamo.reset()
    graphs: list[Receipts] = []
    run = torch.compile(model, backend=by_pass(graphs), fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        return model(*given), run(*given), [r.fused for g in graphs for r in g]


def norms() -> list[tuple[str, str]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, w = torch.randn(5, 8, generator=generator), torch.randn(8, H, generator=generator)
    same = torch.Generator().manual_seed(9)
    r, g = torch.randn(5, H, generator=same), torch.rand(H, generator=same)
    found = []
    with weft.engine("triton"):
        for model, *_ in MODELS:
            told = []
            for dtype, close in (torch.float32, 1e-5), (torch.bfloat16, 4e-2):
                given = [each.to(dtype) for each in (x, w, r, g)]
                plain, made, fused = compiled(model, given, dynamic=model is of_torch)
                torch.testing.assert_close(made, plain, rtol=close, atol=close)
                told += fused
            found.append(tuple(told))
    return found


def test_one_op_where_only_the_norm_takes_the_sum(ranks: Any) -> None:
    for found in ranks(2, norms):
        assert found == [(single, half) for _, single, half in MODELS]


def served(engine: Any) -> list[str]:
    layer = models.ServedLayer(models.Size(), dist.get_world_size()).bfloat16()
    x, residual = (torch.randn(3, 16).bfloat16() for _ in range(2))
    for each in x, residual:
        dist.broadcast(each, 0)
    with weft.engine(engine):
        plain, made, fused = compiled(layer, [x, residual])
    torch.testing.assert_close(made, plain, rtol=2e-2, atol=2e-2)
    return fused


@pytest.mark.slow
def test_on_a_cpu_the_norm_stays_with_inductor(ranks: Any) -> None:
    for engine, first in ("auto", SUM), ("triton", NORM):
        for found in ranks(2, served, engine):
            assert found == [first, SUM]
