"""Collectives against plain torch, in float64, on 2 to 4 ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import weft
import weft.settings
from weft import collectives
from weft.collectives.ranks.chunks import chunk_sizes
from weft.collectives.ranks.group import alone

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
SHAPES = ((1,), (7,), (3, 5), (0, 4), (64, 33), (2, 3, 5))


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of this seed; small integers where the dtype is integral."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-5, 6, shape, generator=generator).to(dtype)


def reduced(terms: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction in float64 (integers: exactly), rounded once."""
    wide = torch.stack([t.double() if t.is_floating_point() else t for t in terms])
    out = {
        "sum": lambda: wide.sum(0),
        "avg": lambda: wide.mean(0),
        "max": lambda: wide.amax(0),
        "min": lambda: wide.amin(0),
        "product": lambda: wide.prod(0),
    }[op]()
    return out.to(terms[0].dtype)


def check(actual: torch.Tensor, expected: torch.Tensor, terms: int = 1) -> None:
    """Equal up to one rounding of the result, and of sums of `terms` in fp32, which may cancel."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if not expected.is_floating_point():
        assert torch.equal(actual, expected)
        return
    of_sums = 2 * terms * torch.finfo(torch.float32).eps
    rtol = torch.finfo(expected.dtype).eps + of_sums
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=4 * of_sums)


def gather_body() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        for dim in range(len(shape)):
            for uneven in (False, True):
                sizes = [shape[dim] + (r * 2 if uneven else 0) for r in range(world_size)]
                if uneven:
                    sizes[-1] = 0
                shards = [
                    values((*shape[:dim], size, *shape[dim + 1 :]), dtype, seed)
                    for seed, size in enumerate(sizes)
                ]
                for known in (None, sizes):
                    out = collectives.all_gather(shards[rank], dim=dim, sizes=known)
                    assert torch.equal(out, torch.cat(shards, dim))


def reduce_body() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for dtype, shape, op in itertools.product(
        DTYPES, SHAPES, ("sum", "avg", "max", "min", "product")
    ):
        if op == "avg" and not dtype.is_floating_point:
            continue
        terms = [values(shape, dtype, seed) for seed in range(world_size)]
        expected = reduced(terms, op)
        out = collectives.all_reduce(terms[rank], reduce_op=op)  # type: ignore[arg-type]
        check(out, expected, world_size)
        for dim in range(len(shape)):
            out = collectives.reduce_scatter(terms[rank], dim=dim, reduce_op=op)  # type: ignore[arg-type]
            sizes = chunk_sizes(shape[dim], world_size)
            check(out, expected.split(sizes, dim)[rank], world_size)
        lengths = [shape[0], *[0] * (world_size - 1)]
        out = collectives.reduce_scatter(terms[rank], reduce_op=op, sizes=lengths)  # type: ignore[arg-type]
        check(out, expected.split(lengths)[rank], world_size)
    for holder in range(world_size):  # NaN stays, whichever rank has it
        x = torch.full((2 * world_size,), torch.nan if rank == holder else float(rank))
        for op in ("sum", "max", "min", "product"):
            assert collectives.all_reduce(x, reduce_op=op).isnan().all()
            assert collectives.reduce_scatter(x, reduce_op=op).isnan().all()


def exchange_body() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for dtype, row in itertools.product(DTYPES, ((), (3,), (0,))):
        splits = [[(i * 3 + j) % 4 for j in range(world_size)] for i in range(world_size)]
        sent = [values((sum(splits[i]), *row), dtype, i) for i in range(world_size)]
        receives = [splits[i][rank] for i in range(world_size)]
        out = collectives.all_to_all(sent[rank], receives, splits[rank])
        expected = [sent[i].split(splits[i])[rank] for i in range(world_size)]
        assert torch.equal(out, torch.cat(expected))
        even = [values((2 * world_size, *row), dtype, r) for r in range(world_size)]
        out = collectives.all_to_all(even[rank])
        assert torch.equal(out, torch.cat([x.split(2)[rank] for x in even]))
        for src in range(world_size):
            x = values((5, *row), dtype, rank)
            out = collectives.broadcast(x, src)
            assert torch.equal(out, values((5, *row), dtype, src))
    collectives.barrier()


def strides_body() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = [values((6, 8, 4), torch.float32, seed) for seed in range(world_size)]
    views = [w.transpose(0, 2)[::2, 1:] for w in whole]
    assert torch.equal(collectives.all_gather(views[rank], dim=1), torch.cat(views, 1))
    check(collectives.all_reduce(views[rank]), reduced(views, "sum"), world_size)
    assert torch.equal(collectives.broadcast(views[rank], 0), views[0])
    # Conjugates and negatives that are yet to be made, and single elements of any stride.
    for size in (1, 6):
        drawn = [values((size, 2), torch.float64, seed) for seed in range(world_size)]
        lazy = [torch.view_as_complex(each).conj() for each in drawn]
        for terms in (lazy, [each.imag for each in lazy], [each.real for each in lazy]):
            x, settled = terms[rank], [each.resolve_conj().resolve_neg() for each in terms]
            total = sum(settled[1:], settled[0])
            assert torch.equal(collectives.all_gather(x), torch.cat(settled))
            assert torch.equal(collectives.broadcast(x, 0), settled[0])
            torch.testing.assert_close(collectives.all_reduce(x), total)
            out = torch.zeros_like(settled[0]).conj()
            torch.testing.assert_close(collectives.all_reduce(x, out=out), total)
            parts = [each.repeat(world_size) for each in terms]
            assert torch.equal(collectives.all_to_all(parts[rank]), torch.cat(settled))
    one = torch.arange(4.0)[rank::4]
    assert collectives.all_gather(one).tolist() == list(range(world_size))


def dtypes_body() -> None:
    """Bytes of any dtype move; what torch cannot add up raises before anybody is waited for."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.bool):
        x = torch.tensor([rank, 1, 0]).float().to(dtype)
        every = [torch.tensor([r, 1, 0]).float().to(dtype).float() for r in range(world_size)]
        assert torch.equal(collectives.all_gather(x).float(), torch.cat(every))
        assert torch.equal(collectives.broadcast(x, 0).float(), every[0])
        sent = collectives.all_to_all(x.repeat(world_size))
        assert torch.equal(sent.float(), torch.cat(every))
        if dtype in (torch.int16, torch.bool):
            total: Any = sum(every).clamp(max=1) if dtype == torch.bool else sum(every)
            assert torch.equal(collectives.all_reduce(x).float(), total)
        else:
            for call in (collectives.all_reduce, collectives.reduce_scatter):
                with pytest.raises(ValueError, match=f"{dtype} has no reduction by 'sum'"):
                    call(x)
    factors = [torch.tensor([r + 1j, 1 - r * 1j]) for r in range(world_size)]
    product = collectives.all_reduce(factors[rank], reduce_op="product")
    torch.testing.assert_close(product, torch.stack(factors).prod(0))
    with pytest.raises(ValueError, match="complex64 has no reduction by 'max'"):
        collectives.all_reduce(torch.ones(2, dtype=torch.complex64), reduce_op="max")


class Tagged(torch.Tensor):
    """A subclass with no rules of its own."""


def kinds_body() -> None:
    """Results may be changed in place; what stands for a tensor is told apart from one."""
    world_size = dist.get_world_size()
    x = torch.ones(2, 2 * world_size, requires_grad=True)
    for op in (collectives.all_gather, collectives.reduce_scatter):
        op(x, dim=1).mul_(2).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0 * world_size + 2))
    tagged = collectives.all_reduce(torch.ones(3).as_subclass(Tagged))
    assert tagged.tolist() == [world_size] * 3
    with pytest.raises(ValueError, match=r"a dense tensor is wanted, got layout torch\.sparse_coo"):
        collectives.all_reduce(torch.eye(3).to_sparse())
    with pytest.raises(NotImplementedError, match=r"not by torch\.func"):
        torch.func.vmap(collectives.all_reduce)(x.detach())
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        collectives.all_reduce(forward_ad.make_dual(x.detach(), x.detach()))


def out_body() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    terms = [values((4, 6), torch.float32, seed) for seed in range(world_size)]
    x, total = terms[rank], collectives.all_reduce(terms[rank])
    for order in ((0, 1), (1, 0)):  # contiguous, and not
        out = torch.empty(4 * world_size, 6).permute(order).contiguous().permute(order)
        assert collectives.all_gather(x, out=out) is out
        assert torch.equal(out, torch.cat(terms))
        out = torch.empty(4, 6 * world_size).permute(order).contiguous().permute(order)
        assert torch.equal(collectives.all_gather(x, dim=1, out=out), torch.cat(terms, 1))
        out = torch.empty(4, 6).permute(order).contiguous().permute(order)
        assert torch.equal(collectives.all_reduce(x, out=out), total)
        assert torch.equal(collectives.broadcast(x, 0, out=out), terms[0])
        # Rank r sends r + 1 rows to each.
        rows = [values((world_size * (r + 1), 6), torch.float32, r) for r in range(world_size)]
        want = torch.cat([sent.chunk(world_size)[rank] for sent in rows])
        out = torch.empty(want.shape).permute(order).contiguous().permute(order)
        receives, sends = [r + 1 for r in range(world_size)], [rank + 1] * world_size
        assert collectives.all_to_all(rows[rank], receives, sends, out=out) is out
        assert torch.equal(out, want)
        part = total.split(chunk_sizes(4, world_size))[rank]
        out = torch.empty(part.shape).permute(order).contiguous().permute(order)
        assert torch.equal(collectives.reduce_scatter(x, out=out), part)
    again = x.clone()
    assert collectives.all_reduce(again, out=again) is again and torch.equal(again, total)
    with pytest.raises(ValueError, match="out must be of shape"):
        collectives.all_reduce(x, out=torch.empty(6, 4))
    for wanted in (x.clone().requires_grad_(), x), (x, x.clone().requires_grad_()):
        with pytest.raises(ValueError, match="has no gradient"):
            collectives.all_reduce(wanted[0], out=wanted[1])
        with torch.no_grad():
            collectives.all_reduce(wanted[0], out=wanted[1])


def windows_body(nbytes: int) -> torch.Tensor:
    """More than a window, an odd number of elements, bitwise the same on all ranks and again."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    numel = nbytes // 4 + 3
    terms = [values((numel,), torch.float32, seed) for seed in range(world_size)]
    first = collectives.all_reduce(terms[rank])
    assert torch.equal(first, collectives.all_reduce(terms[rank]))
    check(first, reduced(terms, "sum"), world_size)
    assert torch.equal(collectives.all_gather(terms[rank]), torch.cat(terms))
    part = collectives.reduce_scatter(terms[rank])
    check(part, reduced(terms, "sum").split(chunk_sizes(numel, world_size))[rank], world_size)
    assert torch.equal(collectives.broadcast(terms[rank], world_size - 1), terms[-1])
    even = [term[: numel // 12 * 12] for term in terms]
    parts = [x.chunk(world_size)[rank] for x in even]
    assert torch.equal(collectives.all_to_all(even[rank]), torch.cat(parts))
    return first[:1000]


def gradient_body() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = chunk_sizes(7, world_size)
    whole = values((7, 3), torch.float64, 0).requires_grad_()
    weights = [values((7, 3), torch.float64, 10 + r) for r in range(world_size)]
    sum(((whole * w).sum() for w in weights), torch.zeros(())).backward()
    expected = whole.grad
    assert expected is not None

    shard = whole.detach().split(sizes)[rank].requires_grad_()
    (collectives.all_gather(shard) * weights[rank]).sum().backward()
    torch.testing.assert_close(shard.grad, expected.split(sizes)[rank])

    x = weights[rank].clone().requires_grad_()
    chunk = collectives.reduce_scatter(x, reduce_op="avg")
    (chunk * whole.detach().split(sizes)[rank]).sum().backward()
    torch.testing.assert_close(x.grad, whole.detach() / world_size)

    x = weights[rank].clone().requires_grad_()
    (collectives.all_reduce(x) * weights[rank]).sum().backward()
    torch.testing.assert_close(x.grad, sum(weights, torch.zeros(7, 3, dtype=torch.float64)))

    x = weights[rank].clone().requires_grad_()
    (collectives.broadcast(x, world_size - 1) * weights[rank]).sum().backward()
    torch.testing.assert_close(
        x.grad, expected if rank == world_size - 1 else torch.zeros_like(expected)
    )

    x = values((world_size,), torch.float64, rank).requires_grad_()
    received = collectives.all_to_all(x)
    (received * torch.arange(world_size)).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, float(rank)))


def shared_memory_body() -> None:
    """`out` may overlap `x` in any way; sizes may be integers of numpy or of a tensor."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for n in (10, 100_000):  # through windows, and read directly
        whole = torch.arange(float(world_size * n))
        total, mine = world_size * whole, slice(n * rank, n * rank + n)
        for start in (0, n * rank, (world_size - 1) * n // 3):  # elsewhere, in place, between
            z = torch.zeros_like(whole)
            x = z[start : start + n].copy_(whole[mine])
            assert torch.equal(collectives.all_gather(x, out=z), whole)
            z = whole.clone()
            out = collectives.reduce_scatter(z, out=z[start : start + n])
            assert torch.equal(out, total[mine])
            z = whole.repeat(2)
            out = collectives.all_reduce(z[: len(whole)], out=z[start : start + len(whole)])
            assert torch.equal(out, total)
            z = whole.repeat(2) + rank
            out = collectives.broadcast(z[: len(whole)], out=z[start : start + len(whole)])
            assert torch.equal(out, whole)
        z, sizes = whole + rank, torch.tensor([n] * world_size)
        expected = torch.cat([whole[mine] + source for source in range(world_size)])
        assert torch.equal(collectives.all_to_all(z, sizes, sizes, out=z), expected)
    gathered = collectives.all_gather(expected[:n], sizes=sizes.numpy())  # type: ignore[arg-type]
    assert torch.equal(gathered[mine], expected[:n])
    part = collectives.reduce_scatter(whole, sizes=sizes)  # type: ignore[arg-type]
    assert torch.equal(part, total[mine])


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("engine", ["auto", "generic"])
@pytest.mark.parametrize(
    "body",
    [
        gather_body, reduce_body, exchange_body, strides_body, dtypes_body, kinds_body, out_body,
        gradient_body, shared_memory_body,
    ],
)  # fmt: skip
def test_collective(engine: weft.settings.Engine, body: Callable[[], None]) -> None:
    with weft.engine(engine):
        body()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 16, 5 << 20])
def test_windows(ranks: Any, world_size: int, nbytes: int) -> None:
    first, *others = ranks(world_size, windows_body, nbytes)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.ranks(4)
def test_subgroups_of_a_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    x = torch.tensor([float(rank)])
    outer, inner = mesh["outer"], mesh["inner"]
    row, column = rank // 2, rank % 2
    assert collectives.all_gather(x, inner).tolist() == [2.0 * row, 2.0 * row + 1]
    assert collectives.all_gather(x, outer).tolist() == [column, column + 2.0]
    assert collectives.all_gather(x, outer.get_group()).tolist() == [column, column + 2.0]
    whole = collectives.spanning_group(mesh)
    assert whole.ranks == (0, 1, 2, 3)
    assert collectives.all_gather(x, whole).tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="a group is 1-D"):
        collectives.all_gather(x, mesh)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["host", "generic", "triton"])
def test_a_gradient_that_needs_what_a_call_has_overwritten(engine: weft.settings.Engine) -> None:
    rank, x = dist.get_rank(), torch.ones(4, requires_grad=True)
    for overwrite in (
        lambda y: collectives.all_reduce(y, out=y),
        lambda y: collectives.broadcast(y, out=y),
        lambda y: collectives.all_to_all(y, out=y),
        lambda y: collectives.all_gather(y.chunk(2)[rank], out=y),
        lambda y: collectives.reduce_scatter(y, out=y[:2]),
    ):
        y = x.exp()  # whose gradient is y
        with torch.no_grad(), weft.engine(engine):
            overwrite(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.ranks(2, 3)
def test_misuse_is_an_error_on_every_rank() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(4)
    with pytest.raises(ValueError, match="reduce_op must be one of"):
        collectives.all_reduce(x, reduce_op="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="average needs a floating dtype"):
        collectives.all_reduce(x.long(), reduce_op="avg")
    for given, kind in (([1.0, 2.0], "list"), (None, "NoneType")):
        with pytest.raises(ValueError, match=f"a tensor is wanted, got {kind}"):
            collectives.all_reduce(given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dim must be a dim of x"):
        collectives.all_gather(x, dim=1)
    with pytest.raises(ValueError, match="sizes holds the length"):
        collectives.all_gather(x, sizes=[4] * (world_size + 1))
    with pytest.raises(ValueError, match="do not divide into"):
        collectives.all_to_all(torch.ones(world_size + 1))
    ones = [1] * world_size
    for call, message in (
        (lambda: collectives.reduce_scatter(x, sizes=[4] * world_size), "lengths that add up to"),
        (lambda: collectives.reduce_scatter(x, sizes=[4]), "lengths that add up to"),
        (lambda: collectives.reduce_scatter(x, sizes=[5, -1, *ones[2:]]), "that add up to the 4"),
        (lambda: collectives.all_to_all(torch.tensor(1.0)), "at least one dim"),
        (lambda: collectives.all_to_all(x, [4], ones), "output_split_sizes must be"),
        (lambda: collectives.all_to_all(x, ones, [5, -1, *ones[2:]]), "input_split_sizes must"),
        (lambda: collectives.all_to_all(x, ones, [4] * world_size), "add up to the 4 rows"),
        (lambda: collectives.broadcast(x, world_size), "src must be a rank"),
        (lambda: collectives.broadcast(x, -1), "src must be a rank"),
        (lambda: collectives.all_reduce(x, 7), "group must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for op in (collectives.all_reduce, collectives.reduce_scatter):
        largest = op(x.clone().requires_grad_(), reduce_op="max").sum()
        with pytest.raises(NotImplementedError, match="not for 'max'"):
            largest.backward()
    with pytest.raises(weft.MismatchError, match="different calls"):
        collectives.all_gather(x if rank else x.double())
    odd, m = rank == 1, torch.ones(4, 4)
    for call in (
        lambda: collectives.all_reduce(x.double() if odd else x),
        lambda: collectives.all_reduce(x, reduce_op="max" if odd else "sum"),
        lambda: collectives.broadcast(x[: 3 if odd else 4], 0),
        lambda: collectives.broadcast(x, rank if odd else 0),
        lambda: collectives.barrier() if odd else collectives.all_reduce(x),
        lambda: (weft.matmul_all_reduce if odd else weft.matmul_reduce_scatter)(m, m),
        lambda: weft.matmul_reduce_scatter(m[: 3 if odd else 4], m),
    ):
        with pytest.raises(weft.MismatchError, match="different calls"):
            call()
    with pytest.raises(weft.MismatchError, match="rows to rank"):
        collectives.all_to_all(torch.ones(world_size), [2] * world_size)
    with pytest.raises(weft.MismatchError, match=r"4 rows are sent, but \[3\] expected"):
        collectives.all_to_all(x, [3], group=alone())
    # The group is in step and usable after every one of these.
    assert collectives.all_reduce(x).tolist() == [world_size] * 4


def test_chunk_sizes_are_those_of_torch() -> None:
    for length, world_size in itertools.product(range(20), range(1, 6)):
        cut = [len(c) for c in torch.arange(length).chunk(world_size)] if length else []
        assert chunk_sizes(length, world_size) == cut + [0] * (world_size - len(cut))
        assert math.ceil(length / world_size) == chunk_sizes(length, world_size)[0]
