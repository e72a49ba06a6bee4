"""torch.compile of DTensor code: no graph break where none must be, the numbers of eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensors import full_of, world
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from weft.demo.model import Llama, LlamaShape, parallelize
from weft.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallel,
)
from weft.dtensor.layout.boxes import layout_of
from weft.dtensor.plans.propagation import pretended_mesh


class Graphs:
    """A backend that runs the traced graphs as they are, and keeps what they call."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.forwards = 0
        self.backend = aot_autograd(fw_compiler=self._forward, bw_compiler=self._keep)

    def _forward(self, graph: Any, inputs: Any) -> Any:
        self.forwards += 1
        return self._keep(graph, inputs)

    def _keep(self, graph: Any, inputs: Any) -> Any:
        # An op that communicates is an argument of the one that keeps such ops in order.
        for node in graph.graph.nodes:
            self.called += map(str, (node.target, *node.args[1:2]))
        return graph


def _equal(f: Callable[..., Any], *args: Any, backend: Any = "aot_eager") -> None:
    torch._dynamo.reset()
    expected = f(*args)
    for _ in range(2):
        result = torch.compile(f, fullgraph=True, backend=backend)(*args)
        torch.testing.assert_close(full_of(result), full_of(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2, timeout_s=300)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)]
)
def test_functions(backend: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(7, 6), mesh, [Shard(0)])  # uneven
    w = distribute_tensor(torch.randn(6, 8), mesh, [Shard(1)])
    _equal(lambda x: (x * 2 + 1).relu(), x, backend=backend)
    _equal(lambda x: x.redistribute(placements=[Shard(1)]).softmax(-1), x, backend=backend)
    _equal(lambda x: x.full_tensor() + 1, x, backend=backend)
    _equal(lambda x, w: functional.layer_norm(x @ w, (8,)).sum(0), x, w, backend=backend)
    rows = distribute_tensor(torch.tensor([5, 0, 3]), mesh, [Shard(0)])
    _equal(
        lambda t, j: t[j] + functional.embedding(j, t) + j[:, None] // (j[:, None] + 1),
        *(distribute_tensor(torch.randn(6, 2), mesh, [Replicate()]), rows),
        backend=backend,
    )
    local = torch.full((3, 2), float(rank))
    for placement in (Shard(1), Replicate(), Partial()):
        _equal(
            lambda t, p=placement: DTensor.from_local(t, mesh, [p]).sum(1).full_tensor(),
            local,
            backend=backend,
        )

    def broken_off(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum() + distribute_tensor(local, mesh, [Shard(0)]).sum()

    # What is traced anew looks at all layouts that are kept, those of a planned mesh too.
    kept = layout_of(pretended_mesh("cpu", torch.arange(4)), (Shard(0),), (8,), (1,), torch.float32)
    torch._dynamo.reset()
    result = torch.compile(broken_off, backend=backend)(x)
    assert kept.mesh.size() == 4
    torch.testing.assert_close(full_of(result), full_of(broken_off(x)))


@pytest.mark.ranks(2)
def test_an_equal_mesh_that_is_made_anew_is_not_traced_again() -> None:
    def joined(t: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return DTensor.from_local(t, mesh, [Shard(0)]).full_tensor()

    graphs, local = Graphs(), torch.tensor([float(dist.get_rank())])
    compiled = torch.compile(joined, fullgraph=True, backend=graphs.backend)
    for _ in range(3):
        assert compiled(local, DeviceMesh("cpu", [0, 1])).tolist() == [0, 1]
    assert graphs.forwards == 1
    assert compiled(local, DeviceMesh("cpu", [1, 0])).tolist() == [1, 0]


@pytest.mark.ranks(2)
def test_from_local_of_uneven_parts() -> None:
    rank, mesh = dist.get_rank(), world()
    whole = torch.arange(10.0).view(5, 2)
    local = whole.chunk(mesh.size())[rank].clone().requires_grad_()

    def told(t: torch.Tensor) -> torch.Tensor:
        part = DTensor.from_local(t, mesh, [Shard(0)], shape=(5, 2), stride=(2, 1))
        return (part * part).sum().full_tensor()

    compiled = torch.compile(told, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert compiled(local).item() == whole.square().sum()
    compiled(local).backward()
    torch.testing.assert_close(local.grad, 2 * local.detach())

    def scaled(t: torch.Tensor) -> torch.Tensor:
        shape = (t.shape[0] * mesh.size(), t.shape[1])
        part = DTensor.from_local(t, mesh, [Shard(0)], shape=shape, stride=t.stride())
        return (part * part).sum().full_tensor()

    compiled = torch.compile(scaled, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (4, 6):
        mine = torch.full((rows, 2), 3.0, requires_grad=True)
        loss = compiled(mine)
        loss.backward()
        assert loss.item() == 9 * rows * 2 * mesh.size() and (mine.grad == 6).all()

    def untold(t: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(t, mesh, [Shard(0)]).sum().full_tensor()

    compiled = torch.compile(untold, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"lengths \[\[3, 2\]\] along dims \[0\]. Pass"):
            compiled(local)
        assert compiled(torch.ones(3, 2)).item() == 12


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["graphs", pytest.param("inductor", marks=pytest.mark.slow)])
def test_column_then_row(backend: str) -> None:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    model = parallel.parallelize_module(
        copy.deepcopy(plain),
        mesh,
        {
            "0": parallel.ColwiseParallel(input_layouts=Shard(0)),
            "2": parallel.RowwiseParallel(output_layouts=Shard(0)),
        },
    )
    graphs = Graphs()
    traced = backend == "graphs"
    # A C++ compiler takes seconds a graph: one for all batches, not one for the first and one more.
    compiled = torch.compile(
        model,
        fullgraph=True,
        backend=graphs.backend if traced else backend,
        dynamic=None if traced else True,
    )
    rank = dist.get_rank()
    for rows in (4, 4, 10, 6):  # then with other batches, of which the first leaves the size open
        shards = torch.randn(world_size, rows, 6, generator=torch.Generator().manual_seed(rows))
        whole = shards.flatten(0, 1).requires_grad_()
        local = shards[rank].clone().requires_grad_()
        expected = plain(whole)
        expected.square().sum().backward()
        out = compiled(local)
        torch.testing.assert_close(out, expected.chunk(world_size)[rank])
        out.square().sum().backward()
        torch.testing.assert_close(local.grad, whole.grad.chunk(world_size)[rank])
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
            ours.grad = theirs.grad = None
    if traced:
        assert graphs.forwards == 2
        for name in ("all_gather_matmul", "matmul_reduce_scatter"):
            assert any(f"weft.{name}" in target for target in graphs.called), graphs.called
            assert any(f"weft.{name}_backward" in target for target in graphs.called)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("backend", "selective"),
    [
        ("aot_eager", True),
        pytest.param("inductor", False, marks=pytest.mark.slow),
    ],
)
def test_checkpointed(backend: str, selective: bool) -> None:
    """Activation checkpointing around a compiled block: what the fused ops return is kept."""
    mesh = world()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.Tanh())
    plan = {
        "0": parallel.ColwiseParallel(input_layouts=Shard(0)),
        "2": parallel.RowwiseParallel(output_layouts=Shard(0)),
    }
    model = parallel.parallelize_module(copy.deepcopy(plain), mesh, plan)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    kwargs = {"context_fn": contexts} if selective else {}
    torch._dynamo.reset()

    @partial(torch.compile, fullgraph=True, backend=backend)
    def block(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=False, **kwargs).square()

    whole = torch.randn(4 * mesh.size(), 6, requires_grad=True)
    local = whole.detach().chunk(mesh.size())[mesh.get_rank()].clone().requires_grad_()
    plain(whole).square().square().sum().backward()
    block(local).square().sum().backward()
    torch.testing.assert_close(local.grad, whole.grad.chunk(mesh.size())[mesh.get_rank()])
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("placement", "sizes", "graphs_after"),
    [
        pytest.param(Replicate(), (4, 10, 7), (1, 1, 1), id="replicated"),
        # Shards that are uneven are cut by numbers: these sizes have graphs of their own.
        pytest.param(Shard(0), (4, 10, 7, 6), (1, 1, 2, 2), id="sharded", marks=pytest.mark.slow),
    ],
)
def test_one_graph_for_all_batches(
    placement: Placement, sizes: tuple[int, ...], graphs_after: tuple[int, ...]
) -> None:
    """A plain batch into fused linears, and one that is a DTensor, beside one process."""
    mesh = world()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    model = parallel.parallelize_module(
        copy.deepcopy(plain),
        mesh,
        {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()},
    )

    def loss(model: Any, x: Any, whole: Any) -> Any:
        rows = (whole * 2 + 1).reshape(-1, 6).softmax(-1)
        return model(x).square().mean() + full_of(rows.var(-1).mean())

    graphs = Graphs()
    step = torch.compile(loss, fullgraph=True, backend=graphs.backend, dynamic=True)
    for batch, expected_graphs in zip(sizes, graphs_after, strict=True):
        x, whole = torch.randn(2, batch, 3, 6, generator=torch.Generator().manual_seed(batch))
        mine = distribute_tensor(whole, mesh, [placement]).requires_grad_()
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        whole.requires_grad_()
        value, expected = step(model, ours, mine), loss(plain, theirs, whole)
        torch.testing.assert_close(value, expected)
        value.backward()
        expected.backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
        torch.testing.assert_close(mine.grad.full_tensor(), whole.grad)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
            p.grad = q.grad = None
        assert graphs.forwards == expected_graphs, (placement, batch)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_llama() -> None:
    mesh = world()
    shape = LlamaShape(d_model=32, layers=1, heads=4, kv_heads=2, ffn=48, seq_len=16)
    torch.manual_seed(0)
    plain = Llama(shape)
    model = copy.deepcopy(plain)
    parallelize(model, mesh)
    graphs = Graphs()

    def loss_of(each: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = each(inputs).flatten(0, 1)
        with parallel.loss_parallel():
            return functional.cross_entropy(logits, labels.flatten())

    compiled = torch.compile(loss_of, fullgraph=True, backend=graphs.backend)
    for batch in (2, 3):
        tokens = torch.randint(256, (batch, 17), generator=torch.Generator().manual_seed(1))
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        labels[0, :3] = -100  # ignored
        for part in (inputs, labels):
            torch._dynamo.mark_dynamic(part, 0)
        losses = []
        for call, each in ((loss_of, plain), (compiled, model)):
            loss = call(each, inputs, labels)
            loss.backward()
            losses.append(full_of(loss.detach()))
        torch.testing.assert_close(losses[1], losses[0])
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full_of(ours.grad), theirs.grad, rtol=1e-4, atol=1e-5)
            ours.grad = theirs.grad = None
    assert graphs.forwards == 1
    labels[0, 3] = 256
    with pytest.raises(RuntimeError, match=r"target class out of range: must be in \[0, 256\)"):
        compiled(model, inputs, labels)
    inputs[0, 0] = -1
    with pytest.raises(RuntimeError, match="embedding index out of range"):
        compiled(model, inputs, labels)
