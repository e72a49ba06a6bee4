"""The same ops on GPUs: a rank a GPU, or several ranks on one. `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from test_flash_decode import cases as decode_cases
from test_kernel_collectives import gather_body, reduce_body, to_all_body
from test_matmul_ops import ENGINES, random_cases, run_cases
from test_ring_attention import random_cases as random_attention
from test_ring_attention import run_cases as run_attention

import weft
from weft import collectives

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module", params=[2, 4])
def gpu_ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param, device="cuda")
    yield pool
    pool.close()


def on_gpu(kind: str, cases: list[dict[str, Any]]) -> list[torch.Tensor]:
    with torch.device("cuda"):
        return run_cases(kind, cases)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_random_shapes(gpu_ranks: RankPool, kind: str, engine: str) -> None:
    cases = random_cases(kind, gpu_ranks.world_size, engine, 24)
    gpu_ranks.run(on_gpu, kind, cases, timeout_s=300)


def with_gpu(body: Callable[..., Any], *args: Any) -> Any:
    with torch.device("cuda"):
        return body(*args)


@pytest.mark.parametrize("engine", ENGINES)
def test_ring_attention(gpu_ranks: RankPool, engine: str) -> None:
    cases = random_attention(gpu_ranks.world_size, engine, 24)
    gpu_ranks.run(with_gpu, run_attention, cases, timeout_s=600)


@pytest.mark.parametrize("engine", ENGINES)
def test_flash_decode(gpu_ranks: RankPool, engine: str) -> None:
    found = gpu_ranks.run(with_gpu, decode_cases, engine, 3, 16, timeout_s=600)
    assert len(set(found)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("body", [gather_body, reduce_body, to_all_body])
def test_collective_kernels(
    gpu_ranks: RankPool, body: Callable[..., Any], dtype: torch.dtype
) -> None:
    if gpu_ranks.world_size > 3:
        pytest.skip("the cases are for up to 3 ranks")
    gpu_ranks.run(with_gpu, body, dtype, timeout_s=300)


def buffer_body() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffer = collectives.empty((4,), torch.float32, device="cuda")
    for call in range(3):
        buffer.local.fill_(rank + 10 * call)
        buffer.barrier()
        for peer in range(world_size):
            seen = buffer.get_buffer(peer, (4,), torch.float32)
            assert (seen == peer + 10 * call).all()
        buffer.barrier()


def test_symmetric_buffer(gpu_ranks: RankPool) -> None:
    gpu_ranks.run(buffer_body, timeout_s=60)


def graph_body(engine: weft.settings.Engine) -> None:
    """Capture a forward, replay it with new inputs."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(64, 128, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    with weft.engine(engine):
        weft.matmul_reduce_scatter(weft.all_gather_matmul(x, w, sizes=[64] * world_size), w.t())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = weft.matmul_reduce_scatter(
                weft.all_gather_matmul(x, w, sizes=[64] * world_size), w.t()
            )
        for seed in range(4):
            torch.manual_seed(10 * seed + rank)
            x.copy_(torch.randn_like(x))
            graph.replay()
            replayed = y.clone()
            again = weft.matmul_reduce_scatter(
                weft.all_gather_matmul(x, w, sizes=[64] * world_size), w.t()
            )
            assert torch.equal(replayed, again)


@pytest.mark.parametrize("engine", ["triton", "host"])
def test_cuda_graph(gpu_ranks: RankPool, engine: str) -> None:
    gpu_ranks.run(graph_body, engine, timeout_s=120)
