"""The DTensor class: making, moving, printing and writing, and what is an error."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dtensors import world
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.optim import optimizer
from torch.utils import _foreach_utils

import weft
from weft import dtensor
from weft.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    random,
    redistribute_plan,
)
from weft.dtensor.layout.boxes import layout_of
from weft.dtensor.move.transfers import move_plan
from weft.dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@pytest.mark.ranks(2, 3)
def test_making() -> None:
    mesh, rank = world(), dist.get_rank()
    whole = torch.arange(15.0).view(5, 3)
    # The first rank's values count, unless nothing is communicated.
    spread = distribute_tensor(whole + rank, mesh, [Shard(0)])
    assert torch.equal(spread.full_tensor(), whole)
    own = distribute_tensor(whole + rank, mesh, [Replicate()], src_data_rank=None)
    assert torch.equal(own.to_local(), whole + rank)
    last = distribute_tensor(whole + rank, mesh, [Shard(1)], src_data_rank=mesh.size() - 1)
    assert torch.equal(last.full_tensor(), whole + mesh.size() - 1)
    planned = move_plan.cache_info().misses
    again = distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None).to_local()
    assert torch.equal(again, whole) and again.data_ptr() != whole.data_ptr()
    distribute_tensor(whole, mesh, [Shard(0)])
    assert (
        move_plan.cache_info().misses == planned
    )  # calls alike are planned once, and keep nothing
    assert distribute_tensor(spread, mesh, [Shard(0)]) is spread
    with pytest.raises(ValueError, match="different placements"):
        distribute_tensor(spread, mesh, [Shard(1)])
    with pytest.raises(ValueError, match="one placement per mesh dim"):
        distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    with pytest.raises(RuntimeError, match="Pass device_mesh="):
        distribute_tensor(whole)
    arrays = spread.numpy, lambda: np.asarray(spread), lambda: torch.from_dlpack(spread)
    arrays += (lambda: spread.apply_(abs), lambda: spread.map_(spread, max))
    for shared in (*arrays, spread.storage):  # safetensors asks for storages
        with pytest.raises(RuntimeError, match=r"full_tensor\(\)\.numpy\(\)"):
            shared()
    assert spread.share_memory_().to_local().is_shared()
    with pytest.raises(RuntimeError, match="distribute leaf tensors"):
        distribute_tensor(whole.requires_grad_() * 1, mesh, [Shard(0)])
    meta = distribute_tensor(torch.empty(5, 3, device="meta"), mesh, [Shard(0)])
    assert meta.is_meta and meta.shape == (5, 3)
    moved = meta.redistribute(placements=[Shard(1)])
    assert moved.to_local().is_meta and moved.to_local().shape == moved._layout.local_shape
    assert (meta.sum(0) + meta.max()).full_tensor().shape == (3,)
    summed = distribute_tensor(torch.tensor([3, 4]), mesh, [Partial()])
    assert summed.dtype == torch.int64 and summed.full_tensor().tolist() == [3, 4]

    for placement in (Shard(0), Partial(), Replicate()):
        where: Any = {"device_mesh": mesh, "placements": [placement]}
        row = dtensor.linspace(-1, torch.tensor(2.5), 7, requires_grad=True, **where)
        assert row.placements == (placement,) and row.requires_grad and row.is_leaf
        assert torch.equal(row.full_tensor(), torch.linspace(-1, 2.5, 7))
        end = distribute_tensor(torch.tensor(3.0), mesh, [Partial()])
        powers = dtensor.logspace(0, end, 5, base=2, dtype=torch.float64, **where)
        assert torch.equal(powers.full_tensor(), torch.logspace(0, 3, 5, 2, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="cannot record"):
        torch.func.linearize(lambda t: t * t, dtensor.ones(4, device_mesh=mesh))
    with pytest.raises((NotImplementedError, RuntimeError)):
        dtensor.linspace(0, 1, 3, layout=torch.sparse_coo, device_mesh=mesh)
    a = dtensor.ones(5, 3, device_mesh=mesh, placements=[Shard(0)])
    b = dtensor.full((5, 3), 2.0, device_mesh=mesh, placements=[Partial()])
    assert torch.equal((a + b).full_tensor(), torch.full((5, 3), 3.0))
    assert torch.equal(dtensor.zeros((2,), device_mesh=mesh).full_tensor(), torch.zeros(2))
    assert dtensor.empty(4, 2, device_mesh=mesh, placements=[Shard(1)]).shape == (4, 2)
    random._agreed.clear()  # as on a mesh that has drawn nothing yet
    torch.manual_seed(rank)
    for make in (dtensor.rand, dtensor.randn):
        r = make(64, device_mesh=mesh, placements=[Replicate()])
        everyones = DTensor.from_local(r.to_local(), mesh, [Shard(0)]).full_tensor()
        assert (everyones.view(mesh.size(), 64) == everyones[:64]).all()
        s = make(64 * mesh.size(), device_mesh=mesh, placements=[Shard(0)]).full_tensor()
        assert s.unique().numel() == 64 * mesh.size()


@pytest.mark.ranks(2, 3)
def test_as_frameworks_see_it() -> None:
    mesh = world()
    x = distribute_tensor(torch.arange(15.0).view(5, 3).t(), mesh, [Shard(-1)])
    spec, theirs = x._spec, dtensor.to_torch(x)._spec
    assert spec == theirs and hash(spec) == hash(theirs) and spec is not x._spec
    again = DTensor(local_tensor=x.to_local(), spec=spec, requires_grad=True)
    assert again._layout is x._layout and again.requires_grad and again.is_leaf
    spec.tensor_meta = None
    with pytest.raises(ValueError, match="tensor_meta"):
        DTensor(x.to_local(), spec)
    assert torch.empty(3, 5).is_same_size(x) and not x.is_same_size(torch.empty(5, 3))
    assert DTensor in optimizer._foreach_supported_types
    assert DTensor in _foreach_utils._foreach_supported_types


@pytest.mark.ranks(2, 3)
def test_without_data() -> None:
    """A step of training on fake tensors, as estimates of memory are made."""
    mesh = world()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    with FakeTensorMode():
        mlp = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
        parallelize_module(mlp, mesh, plan)
        out = mlp(torch.randn(4, 5))
        out.sum().backward()
        torch.optim.AdamW(mlp.parameters()).step()
        rows = distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)])
        later = rows.redistribute(placements=[Replicate()], async_op=True).to_local()
    assert isinstance(later, FakeTensor) and later.shape == (5, 3)
    first = mlp.get_parameter("0.weight")
    assert isinstance(first, DTensor) and isinstance(first.to_local(), FakeTensor)
    assert isinstance(out, FakeTensor) and out.shape == (4, 3)
    assert first.to_local().shape == first._layout.local_shape
    assert first.grad is not None and first.grad.placements == (Shard(0),)


@pytest.mark.ranks(2, 3)
def test_local_and_back() -> None:
    mesh, rank, n = world(), dist.get_rank(), dist.get_world_size()
    local = torch.full((2, 3), float(rank), requires_grad=True)
    x = DTensor.from_local(local, mesh, [Shard(0)])
    assert x.shape == (2 * n, 3) and x.stride() == (3, 1)
    (x * x).full_tensor().sum().backward()
    assert torch.equal(local.grad, 2 * local.detach())
    with torch.no_grad():
        assert x.to_local() is x._local_tensor
    assert DTensor.from_local(torch.ones(2, 3), mesh, [Shard(1)]).stride() == (3 * n, 1)

    uneven = torch.arange(5.0)[rank * 2 : rank * 2 + 2] if n == 3 else torch.ones(1)
    shape = (5,) if n == 3 else (n,)
    y = DTensor.from_local(uneven, mesh, [Shard(0)], shape=shape, stride=(1,))
    if n == 3:
        assert torch.equal(y.full_tensor(), torch.arange(5.0))
    with pytest.raises(RuntimeError, match="both shape and stride"):
        DTensor.from_local(local, mesh, [Shard(0)], shape=(5, 3))
    with pytest.raises(ValueError, match=r"shards\s+are those of torch.chunk"):
        DTensor.from_local(torch.ones(7), mesh, [Shard(0)], shape=(n,), stride=(1,))
    with pytest.raises(RuntimeError, match="got a DTensor"):
        DTensor.from_local(x, mesh, [Shard(0)])
    # Shards of different lengths, as torch.chunk makes them, need no shape; others are refused.
    whole = torch.arange(2.0 * n + 1).view(2 * n + 1, 1).expand(-1, 3)
    uneven = torch.chunk(whole, n)
    mine = uneven[rank] if rank < len(uneven) else whole[:0]
    z = DTensor.from_local(mine.contiguous().requires_grad_(), mesh, [Shard(0)])
    assert torch.equal(z.full_tensor(), whole) and z.mean().item() == n
    with pytest.raises(ValueError, match=r"must be those of torch\.chunk"):
        DTensor.from_local(torch.ones(rank + 1), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="different calls"):
        DTensor.from_local(torch.ones(2, rank + 1), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="different global tensors"):
        DTensor.from_local(torch.ones(rank + 1), mesh, [Replicate()], run_check=True)
    # Only some ranks would run its backward, and wait there for the others.
    some = torch.ones(2, requires_grad=rank > 0)
    with pytest.raises(ValueError, match="requires_grad"):
        DTensor.from_local(some, mesh, [Replicate()], run_check=True)
    checked = DTensor.from_local(torch.full((2,), rank), mesh, [Replicate()], run_check=True)
    assert checked.to_local().tolist() == [0, 0]

    # A replica that each rank uses for something else: its gradients add up.
    for placements, expected in ((None, rank + 1), ([Partial()], n * (n + 1) // 2)):
        leaf = torch.ones(2, requires_grad=True)
        z = DTensor.from_local(leaf, mesh, [Replicate()])
        (z.to_local(grad_placements=placements) * (rank + 1)).sum().backward()
        assert leaf.grad.tolist() == [expected] * 2
    leaf = torch.ones(2, requires_grad=True)
    DTensor.from_local(leaf, mesh, [Partial()]).full_tensor().sum().backward()
    assert leaf.grad.tolist() == [1, 1]


@pytest.mark.ranks(2, 3)
def test_moving() -> None:
    mesh = world()
    x = distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)]).requires_grad_()
    full = x.full_tensor().detach()
    for placement in (Replicate(), Shard(0), Shard(1)):
        y = x.redistribute(placements=[placement], async_op=True)
        assert y.placements == (placement,)
        (grad,) = torch.autograd.grad((y * y).sum().full_tensor(), x)
        assert grad.placements == (Shard(0),)
        torch.testing.assert_close(grad.full_tensor(), 2 * full)
    # Also what changes nothing gives back a gradient that is placed as the tensor is.
    everywhere = x.detach().redistribute(placements=[Replicate()]).requires_grad_()
    for local in (
        everywhere.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]),
        everywhere.full_tensor(grad_placements=[Partial()]),
    ):
        (grad,) = torch.autograd.grad(local.sum(), everywhere)
        assert grad.placements == (Replicate(),) and (grad.to_local() == mesh.size()).all()
    half = x.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.to_local().detach(), full.bfloat16())
    y = x.redistribute(placements=[Replicate()], backward_dtype=torch.bfloat16)
    (grad,) = torch.autograd.grad(y.full_tensor().sum(), x)
    assert grad.dtype == torch.float32
    with pytest.raises(RuntimeError, match="internal use only"):
        x.redistribute(placements=[Partial()])
    with pytest.raises(RuntimeError, match="placements is needed"):
        x.redistribute()
    double = x.redistribute(placements=[Replicate()])
    (g,) = torch.autograd.grad((double**3).sum().full_tensor(), x, create_graph=True)
    (gg,) = torch.autograd.grad(g.sum().full_tensor(), x)
    torch.testing.assert_close(gg.full_tensor(), 6 * full)
    plan = redistribute_plan(mesh, (5, 4), torch.float32, [Shard(0)], [Shard(1)])
    assert len(plan.steps) == 1 and max(plan.bytes_received) < 5 * 4 * 4


@pytest.mark.ranks(2, 3)
def test_reductions_of_partial() -> None:
    mesh, rank, n = world(), dist.get_rank(), dist.get_world_size()
    values = torch.arange(6).view(3, 2) + 5 * rank
    every = torch.stack([torch.arange(6).view(3, 2) + 5 * r for r in range(n)])
    bits = every[0]
    for r in range(1, n):
        bits = bits & every[r]
    expected = {
        "sum": every.sum(0),
        "avg": every.double().mean(0),
        "min": every[0],
        "max": every[-1],
        "product": every.prod(0),
        "band": bits,
    }
    for op, want in expected.items():
        local = values.double() if op == "avg" else values
        for placement in (Replicate(), Shard(0), Shard(1)):
            x = DTensor.from_local(local, mesh, [Partial(op)]).redistribute(placements=[placement])
            assert torch.equal(x.full_tensor(), want.to(local.dtype)), op
    total = DTensor.from_local(torch.ones(8), mesh, [Shard(0)]).sum()
    assert total.item() == 8 * n and float(total) == 8 * n and f"{total:.1f}" == f"{8 * n:.1f}"
    # Sums of half types are taken in fp32: 1 + many small terms.
    small = torch.full((4,), 1.0 if rank == 0 else 2**-9).bfloat16()
    got = DTensor.from_local(small, mesh, [Partial()]).full_tensor()
    assert torch.equal(got, torch.full((4,), 1 + (n - 1) * 2**-9).bfloat16())


@pytest.mark.ranks(4)
def test_other_mesh() -> None:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    whole = torch.randn(5, 6)
    x = distribute_tensor(whole, line, [Shard(0)]).requires_grad_()
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Shard(0)]):
        y = x.redistribute(square, placements)
        assert y.device_mesh == square
        assert torch.equal(y.full_tensor(), whole)
        (grad,) = torch.autograd.grad((y * y).sum().full_tensor(), x)
        assert grad.device_mesh == line
        torch.testing.assert_close(grad.full_tensor(), 2 * whole)
    with pytest.raises(NotImplementedError, match="different meshes"):
        _ = x + distribute_tensor(whole, square)


@pytest.mark.ranks(2, 3)
def test_copies() -> None:
    mesh = world()
    x = distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)])
    p = nn.Parameter(x)
    assert isinstance(p, DTensor) and isinstance(p, nn.Parameter)
    x.note, p.note = [1], [2]
    q, y = copy.deepcopy(p), copy.deepcopy(x)
    assert (y.note, q.note) == ([1], [2]) and y.note is not x.note
    assert isinstance(q, nn.Parameter) and q.requires_grad and torch.equal(q, p)
    assert q._local_tensor.data_ptr() != p._local_tensor.data_ptr()
    buffer = io.BytesIO()
    torch.save({"p": p, "x": x}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert loaded["x"].placements == x.placements and torch.equal(loaded["x"], x)
    assert isinstance(loaded["p"], nn.Parameter) and loaded["p"].note == [2]
    assert repr(x).startswith("DTensor(local_tensor=tensor(") and "placements=(Shard" in repr(x)
    names, context = x.__tensor_flatten__()
    inner = {name: getattr(x, name) for name in names}
    back = DTensor.__tensor_unflatten__(inner, context, x.shape, x.stride())
    assert torch.equal(back, x)
    assert not torch.equal(x, x + 1)


@pytest.mark.ranks(2, 3)
def test_writing() -> None:
    mesh = world()
    whole = torch.randn(4, 6)
    x = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    y = distribute_tensor(whole.clone(), mesh, [Shard(1)])
    same = x
    x.add_(y).mul_(2).clamp_(min=-1)
    assert x is same and x.placements == (Shard(0),)
    want = (whole * 4).clamp(min=-1)
    torch.testing.assert_close(x.full_tensor(), want)
    x[:, 1:3] = 7.0
    want[:, 1:3] = 7.0
    x.view(4, 2, 3).mul_(0.5)
    want.mul_(0.5)
    torch.testing.assert_close(x.full_tensor(), want)
    x.copy_(y)
    torch.testing.assert_close(x.full_tensor(), whole)
    out = distribute_tensor(torch.zeros(4, 6), mesh, [Replicate()])
    torch.add(x, y, out=out)
    torch.testing.assert_close(out.full_tensor(), 2 * whole)
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    partial.add_(1)
    assert partial.full_tensor().tolist() == [dist.get_world_size() + 1.0] * 4
    partial.sqrt_()
    assert partial.placements == (Partial(),)
    torch.testing.assert_close(
        partial.full_tensor(), torch.full((4,), dist.get_world_size() + 1.0).sqrt()
    )
    with pytest.raises(RuntimeError, match="got mixed"):
        _ = x + torch.ones(4, 6)
    assert torch.equal((x + torch.ones(1)).full_tensor(), x.full_tensor() + 1)
    p = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    p.data.mul_(2)
    torch.testing.assert_close(p.full_tensor().detach(), 2 * whole)
    p.data = distribute_tensor(whole, mesh, [Shard(1)])
    assert p.placements == (Shard(1),) and isinstance(p, nn.Parameter)
    torch.testing.assert_close(p.full_tensor().detach(), whole)
    with pytest.raises(RuntimeError, match="only be set to a DTensor"):
        p.data = whole
    linear = nn.Linear(2, 2)
    distribute_module(linear, mesh).double()
    assert linear.weight.dtype == linear.weight.to_local().dtype == torch.float64
    x.zero_()
    nn.init.normal_(x)
    assert x.full_tensor().unique().numel() == 24
    bounds = torch.nn.functional.dropout(dtensor.ones(999, device_mesh=mesh, placements=[Shard(0)]))
    assert 300 < (bounds.full_tensor() == 0).sum() < 700


@pytest.mark.ranks(2, 3)
def test_no_rule() -> None:
    mesh = world()
    whole = torch.randn(4, 4) + 4 * torch.eye(4)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    told = weft.explain(lambda: torch.linalg.inv(x))
    torch.testing.assert_close(told.result.full_tensor(), whole.inverse())
    assert any(d.engine == "replicated" for d in told)
    assert torch.equal(torch.nonzero(x > 0).full_tensor(), torch.nonzero(whole > 0))
    with pytest.raises(IndexError, match="embedding index out of range"):
        functional.embedding(distribute_tensor(torch.tensor([9]), mesh), x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


@pytest.mark.ranks(2, 3)
def test_modules() -> None:
    mesh = world()
    reference = Net()

    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        if name == "a":
            for key, param in list(module.named_parameters()):
                module.register_parameter(
                    key, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)]))
                )

    net = distribute_module(
        copy.deepcopy(reference),
        mesh,
        partition,
        input_fn=lambda mod, inputs, mesh: (DTensor.from_local(inputs[0], mesh),),
        output_fn=lambda mod, out, mesh: out.full_tensor(),
    )
    assert net.a.weight.placements == (Shard(0),)
    assert net.b.weight.placements == (Replicate(),)
    assert isinstance(net.b.running_mean, DTensor)
    x = torch.ones(3, 4)
    torch.testing.assert_close(net(x), reference(x))
    with pytest.raises(RuntimeError, match="only be called once"):
        distribute_module(net, mesh)


@pytest.mark.ranks(2, 3)
def test_pending() -> None:
    mesh, rank = world(), dist.get_rank()
    xw, ww, bw = torch.randn(2, 6, 5), torch.randn(3, 5), torch.randn(3)
    want = functional.linear(xw, ww, bw)

    def operands(grad: bool = True) -> list[DTensor]:
        tensors = ((xw, [Shard(2)]), (ww, [Shard(1)]), (bw, [Replicate()]))
        return [distribute_tensor(t, mesh, p).requires_grad_(grad) for t, p in tensors]

    def engines(op: str, function: Any) -> tuple[Any, bool]:
        told = weft.explain(function)
        return told.result, any(d.op == op for d in told)

    for target, op in (([Shard(1)], "matmul_reduce_scatter"), ([Replicate()], "matmul_all_reduce")):
        y = functional.linear(*operands())
        assert y.placements == (Partial(),) and y._local is None
        if rank == 0:
            str(y)  # one rank may look: all fuse still
        z, fused = engines(op, lambda y=y, t=target: y.redistribute(placements=t))
        assert fused and z.requires_grad
        torch.testing.assert_close(z.full_tensor().detach(), want)
        torch.testing.assert_close(y.full_tensor().detach(), want)
    # Columns gathered: no fused op gives that, but the value is the same.
    torch.testing.assert_close(
        functional.linear(*operands()).redistribute(placements=[Shard(2)]).full_tensor().detach(),
        want,
    )
    # Both the result and its redistribution used.
    ours, plain = operands(), [t.clone().requires_grad_() for t in (xw, ww, bw)]
    y = functional.linear(*ours)
    (
        (y * 2).full_tensor().sum()
        + (y.redistribute(placements=[Shard(0)]) ** 2).sum().full_tensor()
    ).backward()
    p = functional.linear(*plain)
    ((p * 2).sum() + (p**2).sum()).backward()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)
    # Written before it is computed: an operand, or the result.
    x, w, b = operands(False)
    y = functional.linear(x, w, b)
    w.add_(1)
    torch.testing.assert_close(y.redistribute(placements=[Shard(1)]).full_tensor(), want)
    x, w, b = operands(False)
    y = functional.linear(x, w, b)
    y.mul_(2)
    torch.testing.assert_close(y.redistribute(placements=[Shard(1)]).full_tensor(), 2 * want)
    x, w, b = operands(False)
    y = functional.linear(x, w, b)
    x.unsqueeze_(0)
    torch.testing.assert_close(y.redistribute(placements=[Shard(1)]).full_tensor(), want)
    for target in ([Replicate()], [Shard(1)]):
        x, w, b = operands(False)
        y = functional.linear(x, w, b)
        torch.utils.swap_tensors(x, distribute_tensor(3 * xw, mesh, [Shard(2)]))
        torch.testing.assert_close(y.redistribute(placements=target).full_tensor(), want)
    x, w, b = operands(False)
    y = functional.linear(x, w, b)
    x._local_tensor.zero_()
    with pytest.raises(RuntimeError, match="modified in place"):
        y.full_tensor()
    rows = distribute_tensor(ww.t().contiguous(), mesh, [Shard(0)])  # of which a view is multiplied
    y = x @ rows
    rows.to_local().zero_()
    with pytest.raises(RuntimeError, match="modified in place"):
        y.full_tensor()
    # A hook on the result sees its gradient: not fused.
    y, seen = functional.linear(*operands()), []
    y.register_hook(lambda g: seen.append(g.shape))
    _, fused = engines("matmul_reduce_scatter", lambda: y.redistribute(placements=[Shard(1)]))
    assert not fused
    y.redistribute(placements=[Shard(1)]).sum().backward()
    assert len(seen) == 1
    # Without gradients nothing of the kind appears afterwards.
    with torch.no_grad():
        y = functional.linear(*operands())
    assert not y.redistribute(placements=[Shard(1)]).requires_grad
    # Sequence shards are gathered by the matmul.
    x = distribute_tensor(xw, mesh, [Shard(1)])
    w = distribute_tensor(ww, mesh, [Shard(0)])
    b = distribute_tensor(bw, mesh, [Shard(0)])
    y, fused = engines("all_gather_matmul", lambda: functional.linear(x, w, b))
    assert fused and y.placements == (Shard(2),)
    torch.testing.assert_close(y.full_tensor(), want)


@pytest.mark.ranks(2, 3)
def test_strided() -> None:
    mesh = world()
    x = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [Shard(1)])
    flat = x.view(24)
    assert torch.equal(flat.full_tensor(), torch.arange(24.0))
    if mesh.size() in (2, 3):
        assert flat.to_local().numel() == 24 // mesh.size()
    layout = layout_of(mesh, flat.placements, (24,), (1,), torch.float32)
    assert layout is flat._layout


@pytest.mark.ranks(3)
def test_ranks_outside_the_mesh_do_nothing() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    inside = dist.get_rank() < 2
    x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    y = (x * 2).view(2, 3).sum(1)
    x.add_(1)
    assert y.shape == (2,)
    assert x.to_local().numel() == (3 if inside else 0)
    if inside:
        assert y.full_tensor().tolist() == [6.0, 24.0]
        assert x.equal(x) and x.sum().item() == 21
    else:
        for ask in (lambda: x.equal(x), lambda: x.sum().item(), x.nonzero):
            with pytest.raises(RuntimeError, match="only ranks"):
                ask()
    # What has no dims has none outside either, as in torch: a training loop runs on all ranks.
    number = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
    given = DTensor.from_local(torch.tensor(3.0), mesh, [Replicate()])
    loss = (x.detach().requires_grad_() * number).sum()
    for scalar in (number, given, number + 1, loss, loss.redistribute(mesh, [Replicate()])):
        assert scalar.to_local().shape == scalar.full_tensor().shape == ()
    loss.to_local().backward()
    # Results are placed as inside, so that they can be redistributed to other ranks.
    drawn = [dtensor.randn(4, 6, device_mesh=mesh, placements=[Shard(0)]) for _ in range(3)]
    rows, columns, norm = drawn[0], drawn[1].requires_grad_(), functional.layer_norm(drawn[2], (6,))
    heads = rows.view(2, 2, 2, 3)
    sequence = distribute_tensor(torch.randn(2, 2, 4, 3), mesh, [Shard(2)])
    gathered = functional.linear(rows, columns)
    results: list[Any] = [
        *(*drawn, norm, gathered, rows @ columns.t(), functional.linear(rows.t(), columns.t())),
        functional.scaled_dot_product_attention(heads, heads, heads),
        functional.scaled_dot_product_attention(sequence, sequence, sequence, is_causal=True),
    ]
    told: list[Any] = [None] * 3
    dist.all_gather_object(told, [(t.shape, t.dtype, t.placements) for t in results])
    assert told[0] == told[1] == told[2]
    for result in results:
        whole = result.redistribute(world(), [Replicate()]).to_local()
        assert whole.shape == result.shape and (not inside or result.full_tensor().equal(whole))
    gathered.sum().backward()
    assert columns.grad is not None and columns.grad.shape == (4, 6)


@pytest.mark.ranks(2, 3)
def test_by_name() -> None:
    mesh = world()
    torch.manual_seed(0)
    x, weight, indices = torch.randn(3, 6), torch.randn(4, 6), torch.tensor([0, 2, 1])
    for function, arguments in (
        (functional.linear, {"input": x, "weight": weight, "bias": weight[:, 0]}),
        (torch.matmul, {"input": x, "other": weight.t()}),
        (torch.mm, {"input": x, "mat2": weight.t()}),
        (torch.addmm, {"input": weight[:, 0], "mat1": x, "mat2": weight.t()}),
        (torch.rms_norm, {"input": x, "normalized_shape": (6,), "weight": weight[0]}),
        (functional.one_hot, {"input": indices, "num_classes": 3}),
        (torch.as_strided, {"input": x, "size": (2, 2), "stride": (1, 1)}),
    ):
        spread: dict[str, Any] = {
            name: distribute_tensor(a, mesh) if isinstance(a, torch.Tensor) else a
            for name, a in arguments.items()
        }
        torch.testing.assert_close(function(**spread).full_tensor(), function(**arguments))
    d, w = (distribute_tensor(t, mesh) for t in (x, weight))
    for product in (d.matmul(other=w.t()), d.mm(mat2=w.t())):
        torch.testing.assert_close(product.full_tensor(), x @ weight.t())
    first, second = torch.tensor_split(input=d, sections=2, dim=1)
    assert torch.equal(torch.cat([first, second], 1).full_tensor(), x)


@pytest.mark.ranks(2, 3)
def test_without_strides() -> None:
    mesh = world()
    whole = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0], [4.0, 0.0, 5.0]])
    x, parts = distribute_tensor(whole, mesh, [Shard(0)]), [whole[:1], whole[1:]]
    kinds = {
        "sparse_coo": whole.to_sparse(),
        "sparse_csr": whole.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(whole, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor(parts),
        "a nested": torch.nested.nested_tensor(parts, layout=torch.jagged),
    }
    for kind, given in kinds.items():
        calls: dict[str, Any] = {
            "distribute_tensor": lambda t=given: distribute_tensor(t, mesh, [Shard(0)]),
            "from_local": lambda t=given: DTensor.from_local(t, mesh, [Shard(0)]),
            "aten.add.Tensor": lambda t=given: x + t,
            "aten.cat.default": lambda t=given: torch.cat([x, t]),
        }
        for name, call in calls.items():
            with pytest.raises(NotImplementedError, match=rf"{name}: a DTensor is dense.*{kind}"):
                call()
    results: dict[str, Any] = {
        "_to_sparse": x.to_sparse,
        "to_mkldnn": x.to_mkldnn,
        "_nested_tensor_from_tensor_list": lambda: torch.nested.nested_tensor([x, x]),
    }
    for name, call in results.items():
        with pytest.raises(NotImplementedError, match=rf"result of {name}\(.*a DTensor is dense"):
            call()
    weight = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    rows = distribute_tensor(torch.tensor([2, 0, 2]), mesh, [Shard(0)])
    nn.functional.embedding(rows, weight, sparse=True).sum().backward()
    assert torch.equal(weight.grad.full_tensor()[:, 0], torch.tensor([1.0, 0.0, 2.0]))
