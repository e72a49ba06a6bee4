"""Host time of DTensor operations: weft's against torch's, in one process, interleaved.

The world is a fake process group of two ranks, as the cost of dispatch, not of communication, is
measured: a row is the median over rounds of the time of a call, on one thread.
"""

from __future__ import annotations

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
from weft.bench.harness import Case, spread

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


def _microseconds(call: Callable[[], Any], calls: int) -> float:
    """Mean time of `calls` calls."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def run(rounds: int, calls: int = 200) -> list[Case]:
    """All rows, in a process that has no process group yet."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        pairs = zip(rows(weft_tensor), rows(torch_tensor), strict=True)
        return [_compare(ours, theirs, rounds, calls) for ours, theirs in pairs]
    finally:
        dist.destroy_process_group()


def _compare(ours: Row, theirs: Row, rounds: int, calls: int) -> Case:
    name, records, _ = ours
    variants = {"weft": ours[2], "torch": theirs[2]}
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    with nullcontext() if records else torch.no_grad():
        for call in variants.values():
            _microseconds(call, max(calls // 4, 5))
        for _ in range(rounds):
            for variant, call in variants.items():
                times[variant].append(_microseconds(call, calls))
    return Case(
        name,
        {variant: statistics.median(us) for variant, us in times.items()},
        {variant: spread(us) for variant, us in times.items()},
        {"weft/torch": statistics.median(a / b for a, b in zip(*times.values(), strict=True))},
    )
