"""torch.distributed, meshes and DTensor on virtual ranks: what torchrun runs, in one process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import weft
from weft import collectives, sim
from weft.collectives.ranks.group import alone
from weft.dtensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)
from weft.dtensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from weft.sim.run import distributed_hooks


def grid(world_size: int) -> tuple[int, int]:
    rows = next(r for r in (8, 2, 1) if world_size % r == 0 and r * r <= world_size)
    return rows, world_size // rows


class Block(nn.Module):
    """A normalized MLP with a residual, as a transformer has it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def train(hidden: int = 16) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The script: data parallel along one mesh dim, tensor and sequence parallel along the other.

    It knows nothing of where it runs. Returns the whole output and the whole gradients.
    """
    dist.init_process_group("gloo")
    assert dist.get_rank() == int(os.environ["RANK"])
    mesh = init_device_mesh("cpu", grid(dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Block(8, hidden)
    batch = torch.randn(2 * mesh.size(0), mesh.size(1), 8)
    parallelize_module(model, mesh["tp"], PLAN)
    mine = distribute_tensor(batch, mesh, [Shard(0), Shard(1)])
    local = DTensor.from_local(mine.to_local(), mesh["tp"], [Shard(1)])
    y = model(local)
    y.to_local().square().sum().backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor()
        dist.all_reduce(grad, group=mesh.get_group("dp"))
        grads[name] = grad
    whole = DTensor.from_local(y.to_local(), mesh, [Shard(0), Shard(1)]).full_tensor()
    dist.destroy_process_group()
    return whole.detach(), grads


def expected(world_size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    rows, columns = grid(world_size)
    torch.manual_seed(0)
    model = Block(8, 16)
    batch = torch.randn(2 * rows, columns, 8)
    y = model(batch)
    y.square().sum().backward()
    return y.detach(), {name: p.grad for name, p in model.named_parameters()}


def check(results: list[Any], world_size: int) -> None:
    want_y, want_grads = expected(world_size)
    assert len(results) == world_size
    for y, grads in results:
        torch.testing.assert_close(y, want_y, rtol=1e-4, atol=1e-5)
        assert grads.keys() == want_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, want_grads[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world_size, schedules", [(4, 4), (6, 1)])
def test_a_dtensor_script_is_right_under_any_schedule(world_size: int, schedules: int) -> None:
    torch.manual_seed(7)
    check(sim.run(world_size, lambda rank: train(), schedules=schedules), world_size)


@pytest.mark.parametrize("world_size", [16, pytest.param(64, marks=pytest.mark.sweep)])
@pytest.mark.slow
def test_a_dtensor_script_on_many_ranks(world_size: int) -> None:
    check(sim.run(world_size, lambda rank: train(), timeout=300), world_size)


def collect(rank: int) -> None:
    """Every call of torch.distributed, on a group of every second rank and on all."""
    W = dist.get_world_size()
    other = dist.new_group(list(range(1, W, 2)))
    for group, ranks in ((dist.group.WORLD, list(range(W))), (other, list(range(1, W, 2)))):
        if rank not in ranks:
            continue
        me, n = ranks.index(rank), len(ranks)
        assert (dist.get_rank(group), dist.get_world_size(group)) == (me, n)
        terms = [torch.arange(4.0) + 10 * r for r in ranks]
        for op, want in (
            (dist.ReduceOp.SUM, sum(terms)),
            (dist.ReduceOp.AVG, sum(terms) / n),
            (dist.ReduceOp.MAX, terms[-1]),
            (dist.ReduceOp.PRODUCT, torch.stack(terms).prod(0)),
        ):
            x = terms[me].clone()
            dist.all_reduce(x, op, group=group)
            torch.testing.assert_close(x, want)
        x = terms[me].clone()
        dist.reduce(x, ranks[-1], group=group)
        torch.testing.assert_close(x, sum(terms) if rank == ranks[-1] else terms[me])
        x = terms[me].clone()
        dist.broadcast(x, ranks[0], group=group)
        torch.testing.assert_close(x, terms[0])
        parts = [torch.empty(4) for _ in ranks]
        work = dist.all_gather(parts, terms[me], group=group, async_op=True)
        work.wait()
        assert work.is_completed()
        torch.testing.assert_close(torch.stack(parts), torch.stack(terms))
        whole = torch.empty(4 * n)
        dist.all_gather_into_tensor(whole, terms[me], group=group)
        torch.testing.assert_close(whole, torch.cat(terms))
        dist.gather(terms[me], parts if me == 0 else None, ranks[0], group=group)
        x = torch.empty(4)
        dist.scatter(x, [2 * t for t in terms] if me == 0 else None, ranks[0], group=group)
        torch.testing.assert_close(x, 2 * terms[me])
        pieces = [t + me for t in terms]
        dist.reduce_scatter(x, pieces, group=group)
        torch.testing.assert_close(x, n * terms[me] + n * (n - 1) / 2)
        dist.reduce_scatter_tensor(x, torch.cat(pieces), group=group)
        torch.testing.assert_close(x, n * terms[me] + n * (n - 1) / 2)
        dist.all_to_all(parts, pieces, group=group)
        torch.testing.assert_close(
            torch.stack(parts), torch.stack([terms[me] + i for i in range(n)])
        )
        sends = [1 + (me + i) % 2 for i in range(n)]
        x = torch.empty(sum(sends))
        dist.all_to_all_single(x, torch.full((sum(sends),), float(me)), sends, sends, group=group)
        assert x.tolist() == [i for i in range(n) for _ in range(sends[i])]
        found: list[Any] = [None] * n
        dist.all_gather_object(found, {"rank": rank}, group=group)
        assert found == [{"rank": r} for r in ranks]
        told = [rank if me == 0 else None]
        dist.broadcast_object_list(told, ranks[0], group=group)
        assert told == [ranks[0]]
        y = functional.all_reduce(terms[me], "sum", group)
        torch.testing.assert_close(y + 0, sum(terms))
        y = functional.all_gather_tensor(terms[me], 0, group)
        torch.testing.assert_close(y + 0, torch.cat(terms))
        # Weft's own calls take the same groups.
        torch.testing.assert_close(collectives.all_reduce(terms[me], group), sum(terms))
        with weft.engine("generic"):
            torch.testing.assert_close(collectives.all_gather(terms[me], group), torch.cat(terms))
        dist.barrier(group=group)
    left, right = (rank - 1) % W, (rank + 1) % W
    got = torch.empty(1)
    sent = dist.isend(torch.tensor([float(rank)]), right)
    dist.recv(got, left)
    sent.wait()
    assert got == left
    ops = [dist.P2POp(dist.irecv, got, right), dist.P2POp(dist.isend, torch.ones(1), left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has new names for some
@pytest.mark.parametrize("world_size", [2, 5])
def test_torch_distributed(world_size: int) -> None:
    def body(rank: int) -> None:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        collect(rank)
        dist.destroy_process_group()
        assert not dist.is_initialized()

    sim.run(world_size, body, schedules=3)
    assert not dist.is_initialized() and "RANK" not in os.environ


def polled(work: Any) -> None:
    while not work.is_completed():
        pass


@pytest.mark.parametrize("replay", [False, True])
def test_others_go_on_while_one_asks_whether_they_have_come(replay: bool) -> None:
    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        x, got = torch.full((2,), float(rank)), torch.empty(1)
        for _ in range(70):  # asked so often in vain, a rank alone would be stuck
            polled(dist.all_reduce(x, async_op=True))
            assert x.tolist() == [3.0, 3.0]
            x.fill_(float(rank))
        coming = dist.irecv(got, (rank - 1) % 3)
        dist.isend(torch.tensor([float(rank)]), (rank + 1) % 3)
        polled(coming)
        assert got == (rank - 1) % 3

    sim.run(3, body, schedules=10, replay=replay)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: dist.all_reduce(torch.ones(1), async_op=True), "all of ranks 0, 1 to come to a"),
        (lambda: dist.irecv(torch.ones(1), 0, tag=3), "rank 0 to send it something with tag 3"),
    ],
)
def test_who_asks_for_what_never_comes_is_stuck(call: Callable[[], Any], text: str) -> None:
    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank == 1:
            polled(call())

    with pytest.raises(sim.DeadlockError, match=f"rank 1, host: .*waits for {text}"):
        sim.run(2, body)


def test_what_a_rank_says_of_itself_must_be_true() -> None:
    with pytest.raises(ValueError, match=r"init_process_group\(rank=0\), but here it is 1"):
        sim.run(2, lambda rank: dist.init_process_group("gloo", rank=0, world_size=2))


def test_groups_without_init_process_group() -> None:
    def body(rank: int) -> torch.Tensor:
        with weft.engine("generic"):
            collectives.all_reduce(torch.ones(2))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert tuple(mesh.get_coordinate() or ()) == (rank // 2, rank % 2)
        x = torch.full((1, 3), float(rank))
        y = weft.all_gather_matmul(x, torch.eye(3), mesh["b"])
        return collectives.all_gather(y, mesh["a"])

    rows = [0.0, 1.0, 2.0, 3.0]
    for whole in sim.run(4, body, schedules=4):
        assert whole[:, 0].tolist() == rows


def test_a_group_is_pickled_by_its_name() -> None:
    def body(rank: int) -> None:
        with pytest.raises(NotImplementedError, match="call it first, or weft untraced"):
            pickle.dumps(collectives.resolve())
        dist.init_process_group("gloo")
        group = collectives.resolve()
        assert pickle.loads(pickle.dumps(group)) is group

    sim.run(2, body)
    with pytest.raises(NotImplementedError, match="a process by itself"):
        pickle.dumps(alone())


def test_a_rank_that_is_done_leaves_the_others_their_groups() -> None:
    def body(rank: int) -> list[float]:
        values: list[float] = []
        for _ in range(2):  # the names of groups can be used again
            dist.init_process_group("gloo")
            pair = DeviceMesh("cpu", [0, 1])
            if rank < 2:
                x = distribute_tensor(torch.arange(2.0), pair, [Shard(0)])
                values += (x + 1).full_tensor().tolist()
            dist.destroy_process_group()
        return values

    assert sim.run(3, body, schedules=3) == [[1.0, 2.0] * 2, [1.0, 2.0] * 2, []]


def test_tensors_on_a_mesh_of_some_ranks() -> None:
    def body(rank: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        x = torch.arange(12.0).view(4, 3) + rank // 4
        spread = distribute_tensor(x, mesh["b", "c"], [Shard(0), Shard(1)])
        return (spread @ spread.t()).full_tensor() - x @ x.t()

    for schedule in range(2):
        assert not torch.stack(sim.run(8, body, seed=schedule)).any()


def test_a_write_of_one_rank_leaves_the_matmuls_of_others_pending() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x, w = (DTensor.from_local(torch.ones(n, 2), mesh, [Shard(1)]) for n in (4, 3))
        written = distribute_tensor(torch.ones(2), mesh)
        with torch.no_grad():
            collectives.barrier()
            written.add_(1)
            y = nn.functional.linear(x, w)
            collectives.barrier()
            told = weft.explain(y.redistribute, placements=[Replicate()])
        assert told[0].op == "matmul_all_reduce"

    sim.run(2, body, schedules=2)


def test_data_parallel_modules_of_torch() -> None:
    xs = torch.arange(6.0).view(3, 2)

    def gradients(rank: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        if rank is not None:
            dist.init_process_group("gloo")
            model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-5)
        model(xs if rank is None else xs[rank : rank + 1]).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    want = [gradient / 3 for gradient in gradients(None)]
    for found in sim.run(3, gradients, schedules=2):
        torch.testing.assert_close(found, want)


def test_calls_that_differ_or_are_left_out() -> None:
    def other_op(rank: int) -> None:
        dist.init_process_group("gloo")
        x = torch.ones(2)
        dist.all_reduce(x, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)

    with pytest.raises(weft.errors.MismatchError, match=r"all_reduce\((SUM|MAX)\) \[2\] float32"):
        sim.run(2, other_op)

    def left_out(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank != 1:
            dist.barrier()

    with pytest.raises(sim.DeadlockError, match="waits for rank 1 to barrier"):
        sim.run(3, left_out)
    with pytest.raises(sim.DeadlockError, match="rank 1 to send it something with tag 0"):
        sim.run(2, lambda r: (dist.init_process_group(), r or dist.recv(torch.empty(1), 1)))


def test_equal_meshes_of_two_ranks_are_two() -> None:
    meshes: dict[int, Any] = {}

    def body(rank: int) -> None:
        meshes[rank] = init_device_mesh("cpu", (2,))
        collectives.barrier()

    sim.run(2, body)
    first = dict(meshes)
    sim.run(2, body)
    assert len({*first.values(), *meshes.values()}) == 4


def test_races_in_the_dispatch_of_dtensor_are_seen() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        buffer = collectives.empty((4,))
        buffer.local.fill_(rank)
        shared = buffer.get_buffer(0, (4,), torch.float32)
        DTensor.from_local(shared, mesh, [Shard(0)], run_check=False).add_(1)

    with pytest.raises(sim.RaceError, match="symmetric buffer 1 of rank 0"):
        sim.run(2, body, schedules=4)


def test_races_in_custom_ops_are_seen() -> None:
    def body(rank: int, early: bool) -> None:
        dist.init_process_group()
        buffer = collectives.empty((4,))
        buffer.local.fill_(rank)
        shared = buffer.get_buffer(0, (4,), torch.float32)
        name = dist.group.WORLD.group_name
        if not early:
            buffer.barrier()
        total = torch.ops.weft.all_reduce(shared, name)
        assert early or not total.any()

    sim.run(2, lambda rank: body(rank, False), schedules=3)
    with pytest.raises(sim.RaceError, match="symmetric buffer 1 of rank 0"):
        sim.run(2, lambda rank: body(rank, True), schedules=4)


def test_torch_has_all_that_is_hooked() -> None:
    missing = distributed_hooks.requirements()
    assert not missing, (
        f"adapt sim/run/distributed_hooks.py to torch {torch.__version__}: {missing}"
    )


def test_what_is_compiled_runs_as_it_is() -> None:
    compiled = torch.compile(lambda x: collectives.all_reduce(x), fullgraph=True)

    def body(rank: int) -> None:
        later = torch.compile(compiled, backend="no such backend")
        assert later(torch.ones(2)).tolist() == [2, 2]

    compiler = torch.compile
    sim.run(2, body)
    assert torch.compile is compiler
