"""Host time of DTensor operations: weft's against torch's, in one process, interleaved.

The world is a fake process group of two ranks, as the cost of dispatch, not of communication, is
measured: a row is the median over rounds of microseconds a call, one thread. Redistributions that
communicate are left to the collectives' benchmark.

    python -m weft.bench.bench_dispatch [--rounds 15] [--calls 200] [--only linear]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft import dtensor as weft_tensor

Row = tuple[str, bool, Callable[[], Any]]


def rows(api: Any) -> Iterator[Row]:
    """(name, whether autograd records, the call) with DTensors made by `api`."""
    mesh = init_device_mesh("cpu", (2,))
    replicate, shard, columns = [api.Replicate()], [api.Shard(0)], [api.Shard(1)]

    def make(*shape: int, placements: Any, grad: bool = False) -> Any:
        local = torch.zeros(shape)
        return api.distribute_tensor(local, mesh, placements, src_data_rank=None).requires_grad_(
            grad
        )

    x, y = make(8, 8, placements=shard), make(8, 8, placements=shard)
    x_grad = make(8, 8, placements=shard, grad=True)
    x3 = make(2, 4, 8, placements=replicate)
    w, b = make(8, 8, placements=shard), make(8, placements=shard)
    scale = make(8, placements=replicate)
    local = torch.zeros(4, 8)
    x3_2d, w_columns = make(4, 8, placements=replicate), make(8, 8, placements=columns)
    yield "add", False, lambda: torch.add(x, y)
    yield "x + y", False, lambda: x + y
    yield "add, requires grad", True, lambda: x_grad + y
    yield "add in place", False, lambda: x.add_(y)
    yield "mul by scalar", False, lambda: x * 2.0
    yield "relu", False, lambda: torch.relu(x)
    yield "softmax", False, lambda: torch.softmax(x, -1)
    yield "sum", False, lambda: x.sum()
    yield "matmul R @ S(1)", False, lambda: torch.mm(x3_2d, w_columns)
    yield "linear 2-d", False, lambda: functional.linear(x3_2d, w, b)
    yield "linear 3-d", False, lambda: functional.linear(x3, w, b)
    yield "layer_norm", False, lambda: functional.layer_norm(x, (8,), scale, scale)
    yield "t", False, lambda: x.t()
    yield "view", False, lambda: x.view(2, 4, 8)
    yield "detach", False, lambda: x.detach()
    yield "split", False, lambda: x.split(4, 1)
    yield "from_local", False, lambda: api.DTensor.from_local(local, mesh, shard)
    yield "to_local", True, lambda: x_grad.to_local()
    yield "redistribute, no change", False, lambda: x.redistribute(mesh, shard)
    yield "redistribute R -> S(0)", False, lambda: x3.redistribute(mesh, shard)
    yield "redistribute S(0) -> R", False, lambda: x.redistribute(mesh, replicate)

    w1 = make(16, 8, placements=shard, grad=True)
    w2 = make(8, 16, placements=columns, grad=True)

    def mlp() -> Any:
        y: Any = functional.linear(functional.relu(functional.linear(x3, w1)), w2)
        return y.redistribute(mesh, replicate)

    def step() -> None:
        mlp().sum().to_local().backward()

    yield "MLP forward", False, mlp
    yield "MLP forward + backward", True, step

    sizes = [torch.nn.Parameter(make(8, 8, placements=shard)) for _ in range(20)]
    for p in sizes:
        p.grad = make(8, 8, placements=shard)
    optimizer = torch.optim.AdamW(sizes, foreach=True)
    yield "AdamW, 20 parameters", True, optimizer.step
    norm = torch.nn.utils.clip_grad_norm_
    yield "clip_grad_norm_, 20 parameters", True, lambda: norm(sizes, 1.0, foreach=True)

    shapes = iter(range(10, 10**9))

    def miss() -> Any:
        n = next(shapes)
        t = api.DTensor.from_local(torch.empty(1, n), mesh, shard)
        return torch.add(t, t)

    yield "add, new shape each call", False, miss


def microseconds(call: Callable[[], Any], calls: int) -> float:
    """Mean time of `calls` calls."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def compare(rounds: int, calls: int, only: str) -> list[tuple[str, float, float]]:
    """(name, weft, torch) in microseconds a call."""
    found = []
    for ours, theirs in zip(rows(weft_tensor), rows(torch_tensor), strict=True):
        name, records, _ = ours
        if only not in name:
            continue
        times: list[list[float]] = [[], []]
        with nullcontext() if records else torch.no_grad():
            for _, _, call in (ours, theirs):
                microseconds(call, max(calls // 4, 5))
            for _ in range(rounds):
                for column, (_, _, call) in enumerate((ours, theirs)):
                    times[column].append(microseconds(call, calls))
        found.append((name, statistics.median(times[0]), statistics.median(times[1])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    print(f"{'us a call':32} {'weft':>8} {'torch':>8} {'ratio':>6}")
    for name, ours, theirs in compare(options.rounds, options.calls, options.only):
        print(f"{name:32} {ours:8.1f} {theirs:8.1f} {ours / theirs:6.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
