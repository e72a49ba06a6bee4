"""Steps that ranks make again and again, each compared with float64."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import weft
from weft import collectives
from weft.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh

Step = Callable[[], None]


def _same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def _shards(*shape: int) -> list[torch.Tensor]:
    """A tensor for each rank, the same list on all of them."""
    return [torch.randn(*shape) for _ in range(dist.get_world_size())]


def _size(most: int) -> int:
    return int(torch.randint(1, most + 1, ()))


def _sum(shape: tuple[int, ...]) -> None:
    xs = _shards(*shape)
    _same(collectives.all_reduce(xs[dist.get_rank()]), torch.stack(xs).double().sum(0))


def _small_sum() -> None:
    _sum((_size(9), _size(9)))


def _large_sum() -> None:  # read straight from the peers' memory, where the system allows it
    _sum((1 << 18,))


def _barrier() -> None:
    collectives.barrier()


def _gather() -> None:
    n = _size(9)
    xs = [torch.randn(_size(5), n) for _ in range(dist.get_world_size())]
    _same(collectives.all_gather(xs[dist.get_rank()]), torch.cat(xs).double())


def _all_gather_matmul() -> None:
    xs = _shards(_size(9), _size(9))
    w = torch.randn(xs[0].shape[1], _size(9))
    _same(weft.all_gather_matmul(xs[dist.get_rank()], w), torch.cat(xs).double() @ w.double())


def _matmul_reduce_scatter() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    m, k, n = _size(4) * world_size, _size(9), _size(9)
    xs, ws = _shards(m, k), _shards(k, n)
    whole = sum(x.double() @ w.double() for x, w in zip(xs, ws, strict=True))
    got = weft.matmul_reduce_scatter(xs[rank], ws[rank])
    _same(got, torch.as_tensor(whole).chunk(world_size)[rank])


def _redistribute() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(_size(12), _size(12))
    rows = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    columns = (rows + rows).redistribute(mesh, [Shard(1)])
    _same(columns.redistribute(mesh, [Replicate()]).to_local(), 2 * whole.double())


def _ring_attention() -> None:
    rank, shape = dist.get_rank(), (1, 2, _size(9), 8)
    q, k, v = (_shards(*shape) for _ in range(3))
    whole = scaled_dot_product_attention(
        *(torch.cat(each, 2).double() for each in (q, k, v)), is_causal=True
    )
    got = weft.ring_attention(q[rank], k[rank], v[rank], causal=True)
    _same(got, whole.split(shape[2], 2)[rank])


def _mlp() -> None:
    """A step of training: the output, and the gradients of both weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    up, down = torch.nn.Linear(8, 6 * world_size), torch.nn.Linear(6 * world_size, 8)
    xs = _shards(_size(6), 8)
    layers = (
        weft.ColumnParallelLinear.from_linear(up, sequence_dim=0),
        weft.RowParallelLinear.from_linear(down, sequence_dim=0),
    )
    y = layers[1](layers[0](xs[rank]).relu())
    y.square().sum().backward()
    up, down = up.double(), down.double()
    whole = down(up(torch.cat(xs).double()).relu())
    whole.square().sum().backward()
    _same(y, whole.split(len(xs[0]))[rank])
    assert up.weight.grad is not None and down.weight.grad is not None
    _same(layers[0].weight.grad, up.weight.grad.chunk(world_size)[rank])
    _same(layers[1].weight.grad, down.weight.grad.chunk(world_size, 1)[rank])


WORK: dict[str, tuple[Step, weft.settings.Engine]] = {
    "all_reduce": (_small_sum, "auto"),
    "large all_reduce": (_large_sum, "auto"),
    "all_gather": (_gather, "auto"),
    "barrier": (_barrier, "auto"),
    "all_gather_matmul": (_all_gather_matmul, "host"),
    "all_gather_matmul of kernels": (_all_gather_matmul, "triton"),
    "matmul_reduce_scatter": (_matmul_reduce_scatter, "host"),
    "matmul_reduce_scatter of kernels": (_matmul_reduce_scatter, "triton"),
    "redistribute": (_redistribute, "auto"),
    "ring attention": (_ring_attention, "host"),
    "ring attention of kernels": (_ring_attention, "triton"),
    "a step of an MLP": (_mlp, "host"),
}
STEADY = ("a step of an MLP", "redistribute", "ring attention")


def make(name: str) -> None:
    """One step of that work."""
    step, engine = WORK[name]
    with weft.engine(engine):
        step()


Ended = tuple[str, tuple[int, ...], float, str]


def work_until_told(name: str, seed: int, bound_s: float, folder: str) -> Ended | int:
    """Make steps until the parent makes a file `stop`; how many.

    Or until an error of weft's: its class, the ranks that it names, when, its text.
    """
    os.environ["WEFT_TIMEOUT_S"] = str(bound_s)
    torch.manual_seed(seed)
    here, steps = Path(folder), 0
    try:
        while True:
            make(name)
            steps += 1
            if steps == 2:
                (here / f"ready {dist.get_rank()}").touch()
            flag = torch.tensor([float((here / "stop").exists())])
            if collectives.broadcast(flag, 0).item():
                return steps
    except weft.WeftError as error:
        named = error.absent if isinstance(error, weft.PeerTimeout) else ()
        return type(error).__name__, named, time.monotonic(), str(error)


def are_ready(folder: Path, world_size: int) -> bool:
    """Whether every rank is amid its steps."""
    return all((folder / f"ready {rank}").exists() for rank in range(world_size))
