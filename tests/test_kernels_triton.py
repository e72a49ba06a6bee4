"""The fused kernels themselves, interpreted on real processes, against float64."""

from __future__ import annotations

import random
import time

import pytest
import torch


def tolerance(dtype: torch.dtype, K: int) -> dict[str, float]:
    """Rounding of the inputs is in the reference too: what is left is one rounding and fp32 sums."""
    eps = torch.finfo(dtype).eps
    return {"rtol": eps, "atol": eps + 4e-7 * max(K, 1) ** 0.5 * 4}


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int, layout: str = "rows"):
    """The same on every rank. layout: "rows" or "columns" contiguous, or "strided" (neither)."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "columns":
        return torch.randn(columns, rows, generator=generator).to(dtype).T
    if layout == "strided":
        return torch.randn(rows, 2 * columns, generator=generator).to(dtype)[:, ::2]
    return torch.randn(rows, columns, generator=generator).to(dtype)


def chunk_sizes(length: int, world_size: int) -> list[int]:
    sizes = [len(part) for part in torch.arange(length).chunk(world_size)]
    return sizes + [0] * (world_size - len(sizes))


def poisoned(ws) -> None:
    """Fill this rank's data with NaN while nobody else writes there."""
    import torch.distributed as dist

    dist.barrier()
    ws.tensor(ws.rank, 0, (ws.half_bytes,), torch.uint8).fill_(255)
    ws.tensor(ws.rank, 1, (ws.half_bytes,), torch.uint8).fill_(255)
    dist.barrier()


def cases(count: int, seed: int, limit: int = 70):
    rng = random.Random(seed)
    for index in range(count):
        sizes = [rng.choice([1, 2, 3, 7, 16, 17, 31, 32, 33, rng.randint(1, limit)]) for _ in range(3)]
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        layouts = [rng.choice(["rows", "columns", "strided"]) for _ in range(3)]
        yield index, sizes, dtype, layouts


def gather_rows(count: int, seed: int) -> None:
    from weft.collectives import workspace
    from weft.kernels import all_gather_gemm as op

    ws = workspace(None, 1 << 16, channel="test")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    for index, (M, N, K), dtype, layouts in cases(count, seed):
        sizes = chunk_sizes(M, W)
        if index % 3 == 2:  # any sizes will do, not only torch.chunk's
            random.Random(index).shuffle(sizes)
        full = matrix(M, K, dtype, index, layouts[0])
        x = full.split(sizes)[rank]
        weights = [matrix(K, n, dtype, 100 + rank + n, layouts[1]) for n in (N, 1, 33)[: 1 + index % 3]]
        biases = [None if i == 1 else matrix(1, w.shape[1], dtype, i)[0] for i, w in enumerate(weights)]
        if index % 4 == 3 and rank == index % W:
            time.sleep(0.02)
        gathered, ys = op.launch_all_gather_matmul(
            x, weights, ws, sizes, biases=biases, with_own=index % 2 == 0
        )
        ws.check("gather_rows")
        if index % 2 == 0:
            torch.testing.assert_close(gathered, full, rtol=0, atol=0)
        for y, w, bias in zip(ys, weights, biases, strict=True):
            want = full.double() @ w.double() + (0 if bias is None else bias.double())
            torch.testing.assert_close(y.double(), want, **tolerance(dtype, K), msg=lambda m: f"{index}: {m}")


def gather_contraction(count: int, seed: int) -> None:
    from weft.collectives import workspace
    from weft.kernels import all_gather_gemm as op

    ws = workspace(None, 1 << 16, channel="test")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    for index, (M, N, K), dtype, layouts in cases(count, seed):
        sizes, transposed = chunk_sizes(K, W), index % 2 == 1
        full = matrix(K, M, dtype, index, layouts[0]) if transposed else matrix(M, K, dtype, index, layouts[0])
        x = full.split(sizes, dim=0 if transposed else 1)[rank]
        w = matrix(K, N, dtype, 100 + rank, layouts[1])
        bias = matrix(1, N, dtype, 7)[0] if index % 3 == 0 else None
        out = torch.empty(N, M, dtype=dtype).T if index % 4 == 2 else None
        gathered, y = op.launch_all_gather_contract(
            x, w, ws, sizes, transposed=transposed, bias=bias, out=out, with_own=index % 3 == 1
        )
        ws.check("gather_contraction")
        if index % 3 == 1:
            torch.testing.assert_close(gathered, full, rtol=0, atol=0)
        want = (full.T if transposed else full).double() @ w.double()
        want += 0 if bias is None else bias.double()
        torch.testing.assert_close(y.double(), want, **tolerance(dtype, K), msg=lambda m: f"{index}: {m}")


def reduce_scatter(count: int, seed: int) -> None:
    from dataclasses import replace

    from weft.collectives import workspace
    from weft.kernels import gemm_reduce_scatter as op
    from weft.kernels.chips import INTERPRETER

    ws = workspace(None, 1 << 18, channel="test")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    for index, (M, N, K), dtype, layouts in cases(count, seed):
        terms = 1 + index % 2
        depths = [[(K + r * i) % 70 for i in range(terms)] for r in range(W)]  # 0 among them
        if index % 4 < 2:
            depths = [[K] * terms] * W
        xs = [[matrix(M, k, dtype, 10 * r + i, layouts[0]) for i, k in enumerate(ks)] for r, ks in enumerate(depths)]
        weights = [[matrix(k, N, dtype, 500 + 10 * r + i, layouts[1]) for i, k in enumerate(ks)] for r, ks in enumerate(depths)]
        bias = matrix(1, N, dtype, 7)[0] if index % 3 == 0 else None
        scale = 1.0 if index % 5 else 1 / W
        config = op.config_for(M, N, dtype, W, INTERPRETER)
        config = replace(config, descriptors=index % 2 == 0)
        y = op.launch_matmul_reduce_scatter(xs[rank], weights[rank], ws, bias=bias, scale=scale, config=config)
        ws.check("reduce_scatter")
        want = sum(x.double() @ w.double() for a, b in zip(xs, weights, strict=True) for x, w in zip(a, b, strict=True))
        want = want * scale + (0 if bias is None else bias.double())
        want = want.split(chunk_sizes(M, W))[rank]
        torch.testing.assert_close(
            y.double(), want, **tolerance(dtype, W * terms * 70), msg=lambda m: f"{index}: {m}"
        )


def all_reduce(count: int, seed: int) -> None:
    from dataclasses import replace

    import torch.distributed as dist

    from weft.collectives import workspace
    from weft.kernels import gemm_all_reduce as op
    from weft.kernels.chips import INTERPRETER

    ws = workspace(None, 1 << 18, channel="test")
    rank, W = ws.rank, ws.world_size
    poisoned(ws)
    for index, (M, N, K), dtype, layouts in cases(count, seed):
        depths = [K if index % 4 < 2 else (K + r) % 70 for r in range(W)]
        xs = [matrix(M, k, dtype, r, layouts[0]) for r, k in enumerate(depths)]
        weights = [matrix(k, N, dtype, 500 + r, layouts[1]) for r, k in enumerate(depths)]
        bias = matrix(1, N, dtype, 7)[0] if index % 3 == 0 else None
        scale = 1.0 if index % 5 else 1 / W
        config = op.config_for(M, N, dtype, W, INTERPRETER)
        config = replace(config, descriptors=index % 2 == 0, two_shot=index % 3 != 2)
        y = op.launch_matmul_all_reduce(xs[rank], weights[rank], ws, bias=bias, scale=scale, config=config)
        ws.check("all_reduce")
        want = sum(x.double() @ w.double() for x, w in zip(xs, weights, strict=True))
        want = want * scale + (0 if bias is None else bias.double())
        torch.testing.assert_close(
            y.double(), want, **tolerance(dtype, W * 70), msg=lambda m: f"{index}: {m}"
        )
        first = y.float().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, y.float()), f"{index}: rank {rank} differs from rank 0"


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("body", [gather_rows, gather_contraction, reduce_scatter, all_reduce], ids=lambda body: body.__name__)
def test_against_float64(ranks, body, world_size):
    ranks(world_size, body, 12, world_size)
