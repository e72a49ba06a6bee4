"""What surrounds DTensor: exchange with torch's, experimental, debug, loss_parallel, async."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensors import as_if_on_two_hosts, world
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import distribute_tensor as distribute_torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

import weft
from weft.dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    from_torch,
    init_device_mesh,
    to_torch,
)
from weft.dtensor.debug import CommDebugMode, visualize_sharding
from weft.dtensor.dispatch import discovery
from weft.dtensor.dispatch.call import rules_of_overloads
from weft.dtensor.dispatch.dispatch import forget_plans
from weft.dtensor.experimental import (
    discover_sharding,
    implicit_replication,
    local_map,
    register_sharding,
)
from weft.dtensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

_counted = torch.ops.c10d_functional


@pytest.mark.ranks(2, 3)
def test_exchange_with_torch() -> None:
    mesh = world()
    strided: Any = _StridedShard(0, split_factor=2)
    for shape, placement in (((5, 3), Shard(0)), ((8, 3), strided), ((4, 4), Partial())):
        x = distribute_tensor(torch.randn(shape), mesh, [placement]).requires_grad_()
        theirs = to_torch(x)
        assert type(theirs) is TorchDTensor and theirs.placements == (placement,)
        assert theirs.to_local().data_ptr() == x.to_local().data_ptr()
        ours = from_torch(theirs)
        assert ours._layout is x._layout
        assert ours.to_local().data_ptr() == x.to_local().data_ptr()
        (ours * 2).full_tensor().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), torch.full(shape, 2.0))


@pytest.mark.ranks(2)
def test_terms_of_torch_that_are_no_plain_terms_are_refused() -> None:
    """Its own redistribution masks the rows of one and takes powers of the other."""
    weight = distribute_torch(torch.rand(4, 2), world(), [Shard(0)])
    rows = distribute_torch(torch.tensor([0, 3, 2]), world())
    for theirs in (torch.nn.functional.embedding(rows, weight), weight.norm()):
        with pytest.raises(ValueError, match="reduced in a way of its own"):
            from_torch(theirs)
        whole = theirs.redistribute(placements=[Replicate()])
        assert torch.equal(from_torch(whole).full_tensor(), whole.to_local())


@pytest.mark.ranks(4)
def test_orders_in_which_mesh_dims_cut_come_over_from_torch() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)

    def of_torch(whole: torch.Tensor) -> TorchDTensor:
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=order)
        half = whole.chunk(2)[mesh.get_local_rank(1)]
        return TorchDTensor(half.chunk(2)[mesh.get_local_rank(0)], spec, requires_grad=False)

    theirs = of_torch(torch.arange(24.0).view(8, 3))
    ours = from_torch(theirs)
    assert torch.equal(ours.full_tensor(), theirs.full_tensor())
    assert DTensor(theirs.to_local(), theirs._spec)._layout is ours._layout
    assert torch.equal(to_torch(ours * 2).full_tensor(), 2 * theirs.full_tensor())
    with pytest.raises(NotImplementedError, match=r"cut by mesh dims \(1, 0\) in this order"):
        from_torch(of_torch(torch.arange(5.0)))


@pytest.mark.ranks(2, 3)
def test_asynchronous() -> None:
    mesh, rank = world(), dist.get_rank()
    whole = torch.randn(7, 6)
    x = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    pending = [x.redistribute(placements=[Shard(1)], async_op=True) for _ in range(7)]
    assert pending[-1]._local is None
    x.zero_()  # the values of the time of the call count
    if rank == 0:  # no rank waits for one that does not look
        torch.testing.assert_close(pending[3].to_local(), whole.chunk(mesh.size(), 1)[0])
    for y in pending:
        torch.testing.assert_close(y.full_tensor(), whole)
    leaf = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    y = leaf.redistribute(placements=[Replicate()], async_op=True)
    (y * y).full_tensor().sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), 2 * whole)
    summed = DTensor.from_local(torch.ones(4) * (rank + 1), mesh, [Partial()])
    total = mesh.size() * (mesh.size() + 1) / 2
    late = summed.redistribute(placements=[Replicate()], async_op=True)
    late.add_(1)  # written before it was looked at
    assert late.to_local().tolist() == [total + 1] * 4
    # The same without symmetric memory.
    with as_if_on_two_hosts(mesh):
        x = distribute_tensor(whole.clone(), mesh, [Shard(0)])
        y = x.redistribute(placements=[Shard(1)], async_op=True)
        assert y._local is None
        x.zero_()
        torch.testing.assert_close(y.full_tensor(), whole)


@pytest.mark.ranks(2, 3)
def test_mapping_local_parts() -> None:
    mesh = world()
    xw, ww = torch.randn(4, 6), torch.randn(6, 5)

    @local_map(out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]))
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        assert not isinstance(x, DTensor)
        return x @ w

    x = distribute_tensor(xw, mesh, [Shard(1)]).requires_grad_()
    w = distribute_tensor(ww, mesh, [Shard(0)]).requires_grad_()
    y = product(x, w)
    assert y.placements == (Partial(),)
    torch.testing.assert_close(y.full_tensor(), xw @ ww)
    y.full_tensor().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.ones(4, 5) @ ww.t())
    torch.testing.assert_close(product(xw, ww), xw @ ww)  # no DTensor: the function itself
    with pytest.raises(ValueError, match="mismatched placements"):
        product(distribute_tensor(xw, mesh, [Shard(0)]), w)
    moved = local_map(
        lambda x, w, n: (x @ w * n, n),
        out_placements=([Partial()], None),
        in_placements=([Shard(1)], [Shard(0)], None),
        redistribute_inputs=True,
    )
    y, n = moved(distribute_tensor(xw, mesh, [Shard(0)]), w, 2)
    assert n == 2
    torch.testing.assert_close(y.full_tensor(), 2 * (xw @ ww))
    with pytest.raises(ValueError, match="one entry in in_placements"):
        moved(x, w)
    with pytest.raises(ValueError, match="result 0 is a Tensor with out_placements None"):
        local_map(torch.neg)(x)


@torch.library.custom_op("weft_tests::double_rows", mutates_args=())
def double_rows(x: torch.Tensor, times: int) -> torch.Tensor:
    return x * 2 * times


@double_rows.register_fake
def _(x: torch.Tensor, times: int) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.ranks(2, 3)
def test_sharding_of_ones_own() -> None:
    mesh = world()
    x = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    op = torch.ops.weft_tests.double_rows.default
    seen = []

    @register_sharding(op)
    def sharding(x: Any, times: int) -> Any:
        seen.append((x.shape, x.ndim, times))
        return [([Replicate()], [Replicate(), None]), ([Shard(0)], [Shard(0), None])]

    y = op(x, 3)
    assert y.placements == (Shard(0),) and seen == [((6, 4), 2, 3)]
    torch.testing.assert_close(y.full_tensor(), x.full_tensor() * 6)
    assert op(x.redistribute(placements=[Shard(1)]), 1).placements == (Shard(0),)

    # A rule of ours is replaced: negation may be sharded by rows only.
    neg = torch.ops.aten.neg.default
    columns = x.redistribute(placements=[Shard(1)])
    assert torch.neg(columns).placements == (Shard(1),)
    register_sharding(neg)(lambda x: [([Shard(0)], [Shard(0)])])
    try:
        assert torch.neg(columns).placements == (Shard(0),)
    finally:
        del rules_of_overloads[neg]
        forget_plans(neg)


@pytest.mark.ranks(2, 3)
def test_sharding_of_ones_own_is_found() -> None:
    x = distribute_tensor(torch.randn(6, 4), world(), [Shard(0)])
    op = torch.ops.weft_tests.double_rows.default
    rules_of_overloads.pop(op, None)
    forget_plans(op)
    assert op(x, 3).placements == (Replicate(),)
    discover_sharding(op)
    try:
        for dim in (0, 1):
            y = op(x.redistribute(placements=[Shard(dim)]), 3)
            assert y.placements == (Shard(dim),)
            torch.testing.assert_close(y.full_tensor(), x.full_tensor() * 6)
    finally:
        discovery.asked.discard(op)
        forget_plans(op)
    with pytest.raises(ValueError, match="takes overloads"):
        discover_sharding(torch.ops.weft_tests.double_rows)


@pytest.mark.ranks(2)
def test_stacks_of_matrices_stay_sharded_in_linalg() -> None:
    x = torch.randn(6, 3, 3, dtype=torch.float64) + 3 * torch.eye(3)
    cut = distribute_tensor(x, world(), [Shard(0)])
    det = torch.linalg.det(cut)
    assert det.placements == (Shard(0),)
    torch.testing.assert_close(det.full_tensor(), torch.linalg.det(x))


@pytest.mark.ranks(2)
def test_sharding_of_ones_own_is_checked() -> None:
    x = distribute_tensor(torch.randn(6, 4), world(), [Shard(0)])
    op = torch.ops.weft_tests.double_rows.default
    rows = [Shard(0), None]
    try:
        for outputs, inputs, text in [
            ([Partial("mean")], rows, "asks for an unknown reduction: Partial takes"),
            ([Shard(0)], [Shard(2), None], "shards dim 2, but the tensor has 2 dims"),
            ([Shard(0)], [0, None], "a placement is Shard"),
            ([Shard(0), Shard(0)], rows, "place each of its 1 results"),
            ([Shard(0)], [None, None], "place each of its 1 tensors"),
        ]:
            register_sharding(op)(lambda x, times, both=(outputs, inputs): [both])
            with pytest.raises(ValueError, match=text):
                op(x, 3)
        register_sharding(op)(lambda x, times: [([Shard(-2)], [Shard(-2), None])])
        assert op(x, 3).placements == (Shard(0),)
    finally:
        del rules_of_overloads[op]
        forget_plans(op)


@pytest.mark.ranks(2, 3)
def test_plain_tensors_replicated() -> None:
    mesh = world()
    whole, plain = torch.randn(6, 4), torch.randn(4)
    x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    plain.requires_grad_()
    with pytest.raises(RuntimeError, match="got mixed"):
        _ = x + plain
    with implicit_replication():
        y = functional.layer_norm(x + plain, (4,), plain)
    y.full_tensor().sum().backward()
    own, bias = whole.clone().requires_grad_(), plain.detach().clone().requires_grad_()
    functional.layer_norm(own + bias, (4,), bias).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), own.grad)
    assert not isinstance(plain.grad, DTensor)
    torch.testing.assert_close(plain.grad, bias.grad)
    with torch.no_grad(), implicit_replication():
        torch._foreach_mul_([plain, x], 2.0)
        plain.add_(distribute_tensor(torch.ones(4), mesh))
    torch.testing.assert_close(plain.detach(), bias.detach() * 2 + 1)


@pytest.mark.ranks(2, 3)
def test_losses_by_class() -> None:
    mesh = world()
    logits, target = torch.randn(6, 7), torch.tensor([0, 3, 6, -100, 2, 5])
    weight = torch.rand(7)
    for reduction in ("mean", "sum", "none"):
        x = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        plain = logits.clone().requires_grad_()
        with loss_parallel(), CommDebugMode() as comm:
            loss = functional.cross_entropy(x, target, weight, reduction=reduction)
            loss.sum().backward()
        want = functional.cross_entropy(plain, target, weight, reduction=reduction)
        want.sum().backward()
        torch.testing.assert_close(loss.full_tensor(), want)
        assert loss.placements == (Replicate(),) and x.grad.placements == (Shard(1),)
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
        assert comm.get_comm_counts()[_counted.all_gather_into_tensor] == 0
    # Other uses of log_softmax inside the block keep their gradients.
    x, plain = distribute_tensor(logits, mesh, [Shard(1)]), logits.clone()
    with loss_parallel():
        (x.requires_grad_().log_softmax(1) ** 2).sum().backward()
    (plain.requires_grad_().log_softmax(1) ** 2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(4)
def test_losses_by_class_and_row() -> None:
    """On a mesh of two dims, each rank with some rows of some classes: one exchange a loss."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    logits, target = 9 * torch.randn(5, 7, 3), torch.randint(7, (5, 3))
    target[3, 1] = -100
    options: list[dict[str, Any]] = [
        {},
        {"reduction": "sum", "label_smoothing": 0.1},
        {"reduction": "none"},
    ]
    for placements in ([Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(1), Shard(2)]):
        for given in options:
            x = distribute_tensor(logits, mesh, placements).requires_grad_()
            plain = logits.clone().requires_grad_()
            with loss_parallel(), CommDebugMode() as comm:
                loss = functional.cross_entropy(x, target, **given)
            assert comm.get_comm_counts()[_counted.all_gather_into_tensor] == 1
            expected = functional.cross_entropy(plain, target, **given)
            assert close_in_fp32(loss, expected), (placements, given)
            loss.sum().backward()
            expected.sum().backward()
            assert list(x.grad.placements) == placements
            assert close_in_fp32(x.grad, plain.grad), (placements, given)
    target[0, 0] = 7  # which ranks of the second row of the mesh do not see
    x = distribute_tensor(logits, mesh, [Shard(0), Shard(1)])
    with pytest.raises(IndexError, match=r"target class out of range: must be in \[0, 7\)"):
        functional.cross_entropy(x, distribute_tensor(target, mesh, [Shard(0), Replicate()]))


def close_in_fp32(ours: Any, theirs: Any) -> bool:
    """Equal but for sums of 7 terms of at most 40."""
    return torch.allclose(ours.full_tensor(), theirs, rtol=1e-5, atol=40 * 7 * 2**-23)


@pytest.mark.ranks(2, 3)
def test_counting() -> None:
    mesh = world()
    with CommDebugMode() as comm:
        x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
        distribute_tensor(torch.randn(2), mesh, [Replicate()])
    assert comm.get_comm_counts() == {torch.ops.c10d.scatter_: 1, torch.ops.c10d.broadcast_: 1}
    with CommDebugMode() as comm:
        x.redistribute(placements=[Replicate()])
        x.redistribute(placements=[Shard(1)])
        x.sum().redistribute(placements=[Replicate()])
        x.sum(0).redistribute(placements=[Shard(0)])
        plain = torch.ones(2)
        dist.all_reduce(plain)
    assert comm.get_comm_counts() == {
        _counted.all_gather_into_tensor: 1,
        _counted.all_to_all_single: 1,
        _counted.all_reduce: 1,
        _counted.reduce_scatter_tensor: 1,
        torch.ops.c10d.allreduce_: 1,
    }
    # A loss of terms is not added up to begin a backward pass, which asks for ones of its shape.
    with CommDebugMode() as comm:
        x.requires_grad_().sum().backward()
    assert comm.get_total_counts() == 0 and torch.full_like(x.sum(), 3).full_tensor() == 3
    mlp = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(mlp, mesh, plan)
    with weft.engine("host"), CommDebugMode() as comm:
        mlp(x.to_local().detach().requires_grad_()).sum().backward()
    counts = comm.get_comm_counts()
    # Forward: one gather, one reduce-scatter, both fused; backward the duals of them.
    assert counts[_counted.all_gather_into_tensor] == 2, counts
    assert counts[_counted.reduce_scatter_tensor] == 2, counts
    assert comm.get_sharding_info()["Sequential.0.weight"] == (Shard(0),)
    assert "all_gather_into_tensor" in comm.generate_comm_debug_tracing_table(noise_level=1)
    assert comm.get_total_counts() == sum(counts.values())


@pytest.mark.ranks(2, 3)
def test_counting_of_attention_and_of_one_rank() -> None:
    mesh, n = world(), dist.get_world_size()
    alone = init_device_mesh("cpu", (n, 1), mesh_dim_names=("dp", "tp"))["tp"]
    gathered, scattered = _counted.all_gather_into_tensor, _counted.reduce_scatter_tensor

    def counts(call: Any, *args: Any) -> dict[Any, int]:
        with weft.engine("host"), CommDebugMode() as comm:
            call(*args).sum().backward()
        return dict(comm.get_comm_counts())

    qkv = torch.randn(3, 1, 2 * n, 4 * n, 8)
    spread = [distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in qkv]
    # Keys and values are gathered, in backward once more, and their gradients scattered.
    rings = counts(functional.scaled_dot_product_attention, *spread)
    assert rings == {gathered: 2, scattered: 1}
    local = [t[:, :, :4].clone().requires_grad_() for t in qkv]
    assert counts(weft.ulysses_attention, *local) == {_counted.all_to_all_single: 8}
    linear = parallelize_module(
        torch.nn.Linear(6, 8), alone, ColwiseParallel(input_layouts=Shard(0))
    )
    assert counts(linear, torch.randn(4, 6, requires_grad=True)) == {}


def counted_passes() -> tuple[Any, ...]:
    """What two passes of nested modules count, in all and in one of the modules."""
    mesh = init_device_mesh("cpu", (3,))
    inner = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU())
    mlp = torch.nn.Sequential(inner, torch.nn.Linear(8, 6))
    plan = {"0.0": ColwiseParallel(input_layouts=Shard(0)), "1": RowwiseParallel()}
    parallelize_module(mlp, mesh, plan)
    with weft.engine("host"), CommDebugMode() as comm:
        for _ in range(2):
            mlp(torch.randn(2, 6, requires_grad=True)).sum().backward()
    forward = comm.comm_module_counts["Sequential.1"]["forward"]
    return dict(comm.get_comm_counts()), dict(forward)


def test_counting_by_modules_on_virtual_ranks() -> None:
    for counts, forward in weft.sim.run(3, lambda rank: counted_passes(), races=False):
        assert forward == {_counted.all_reduce: 2}
        assert counts[_counted.all_reduce] == 2 and counts[_counted.all_gather_into_tensor] == 2


def drawing() -> list[str]:
    import contextlib
    import io

    mesh = init_device_mesh("cpu", (2, 2))
    drawn = []
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)]):
        x = distribute_tensor(torch.ones(8, 6), mesh, placements)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            visualize_sharding(x, header="x")
        drawn.append(out.getvalue())
    with pytest.raises(ValueError, match="1-D and 2-D"):
        visualize_sharding(distribute_tensor(torch.ones(2, 2, 2), mesh))
    return drawn


def test_visualize_sharding(ranks: Any) -> None:
    first, *others = ranks(4, drawing)
    assert others == [["", ""]] * 3
    assert first[0].splitlines() == [
        "x",
        "         Col 0-2  Col 3-5",
        "Row 0-3  cpu:0    cpu:1",
        "Row 4-7  cpu:2    cpu:3",
    ]
    assert first[1].splitlines() == [
        "x",
        "         Col 0-5",
        "Row 0-3  cpu:0,2",
        "Row 4-7  cpu:1,3",
    ]
