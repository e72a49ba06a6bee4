"""Writes through views are in the tensor that is viewed, also where its elements lie elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dtensors import close, world
from torch.nn import functional

from weft.dtensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

# Each changes its tensor of shape (8, 4) in place, through views.
WRITES: dict[str, Callable[[Any], Any]] = {
    "x[:2].zero_()": lambda x: x[:2].zero_(),
    "x[3].mul_(5)": lambda x: x[3].mul_(5),
    "x.view(32)[0:3].add_(1)": lambda x: x.view(32)[0:3].add_(1),
    "x[1] = 5": lambda x: x.__setitem__(1, 5.0),
    "x[0] += 1": lambda x: x.__setitem__(0, x[0].add_(1)),
    "x[:, 1] = x[:, 0]": lambda x: x.__setitem__((slice(None), 1), x[:, 0]),
    "x[2:6] = x[0:4]": lambda x: x.__setitem__(slice(2, 6), x[0:4].clone()),
    "x[::3, 1::2] = 7": lambda x: x.__setitem__((slice(None, None, 3), slice(1, None, 2)), 7.0),
    "x[mask] = 0": lambda x: x.__setitem__(x > 0, 0.0),
    "x[list] = 0": lambda x: x.__setitem__([0, 5, 5], 0.0),
    "x.t()[1:3].exp_()": lambda x: x.t()[1:3].exp_(),
    "x.diagonal().fill_(1)": lambda x: x.diagonal().fill_(1),
    "a, b = x.split(3)": lambda x: [p.neg_() for p in x.split([3, 5])],
    "x.chunk(3, 1)": lambda x: [p.mul_(i) for i, p in enumerate(x.chunk(3, 1))],
    "x.unbind()": lambda x: x.unbind()[7].fill_(3),
    "view of a view": lambda x: x[1:7][2:4][0].sub_(1),
    "view, write, write": lambda x: [x[2:5].add_(1).mul_(2), x[4:6].add_(1)],
    "x.data[:2]": lambda x: x.data[:2].fill_(2),
    "x.detach()[2]": lambda x: x.detach()[2].fill_(2),
    "x.flatten()[5:9]": lambda x: x.flatten()[5:9].zero_(),
    "x.T.reshape": lambda x: x.view(2, 4, 4).transpose(1, 2)[1, 1:].fill_(4),
    "x.view(int64)[5]": lambda x: x.view(torch.int64)[5].zero_(),
    "x.view(int32)[:, 3]": lambda x: x.view(torch.int32)[:, 3].zero_(),
    "relu_ of a part": lambda x: torch.nn.functional.relu(x[1:5], inplace=True),
    "out=": lambda x: torch.mul(x[:3], 2, out=x[:3]),
    "copy_": lambda x: x[4:].copy_(x[:4]),
    "fill_ tensor": lambda x: x[0].fill_(x[1, 1].clone()),
    "masked_fill_": lambda x: x[2:].masked_fill_(x[2:] < 0, 9.0),
    "index_fill_": lambda x: x[1:].index_fill_(0, (x[0, :2] * 0).long(), -1.0),
}


@pytest.mark.ranks(2, 3)
def test_writes_through_views_are_seen() -> None:
    mesh, wrong = world(), []
    whole = torch.randn(8, 4, dtype=torch.float64)
    for name, write in WRITES.items():
        for placement in (Replicate(), Shard(0), Shard(1), Partial()):
            want = whole.clone()
            write(want)
            x = distribute_tensor(whole.clone(), mesh, [placement])
            try:
                write(x)
            except Exception as error:
                error.add_note(f"{name} {placement}")
                raise
            if x.placements[0] != placement or not torch.allclose(x.full_tensor(), want):
                wrong.append(f"{name} {placement}")
    assert wrong == []


@pytest.mark.ranks(2)
def test_conjugates_are_computed_and_written() -> None:
    mesh = world()
    whole = torch.randn(5, 2, dtype=torch.complex128)
    for placement in (Replicate(), Shard(0), Partial()):
        want, x = whole.clone(), distribute_tensor(whole.clone(), mesh, [placement])
        torch.testing.assert_close((x.conj() * x).full_tensor(), want.conj() * want)
        for t in (want, x):
            t.conj()[1].mul_(1j)
            t.imag[3:].neg_()
        torch.testing.assert_close(x.full_tensor(), want)


@pytest.mark.ranks(2)
def test_views_are_read_after_their_base_was_written() -> None:
    mesh = world()
    whole = torch.arange(12.0).view(6, 2)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            want, x = whole.clone(), distribute_tensor(whole.clone(), mesh, [Shard(0)])
            theirs, ours = want[1:4], x[1:4]
            deeper_theirs, deeper = theirs[1], ours[1]
            for t in (want, x):
                t.add_(1)  # a view shows what its base holds now
            assert torch.equal(ours.full_tensor(), theirs)
            theirs.mul_(3), ours.mul_(3)
            assert torch.equal(deeper.full_tensor(), deeper_theirs)
            deeper_theirs.zero_(), deeper.zero_()
            assert torch.equal(ours.full_tensor(), theirs)
            assert torch.equal(x.full_tensor(), want)


@pytest.mark.ranks(2)
def test_views_in_inference_mode_of_what_was_made_outside() -> None:
    """In inference mode: views of what was made outside, and what torch takes apart elsewhere."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.randn(6, 4)
    for placement in (Replicate(), Shard(0), Shard(1), Partial()):
        x = distribute_tensor(whole, mesh, [placement])
        for function in (
            lambda t: t[1:4],
            lambda t: t.view(3, 2, 4)[:, 0],
            lambda t: t.mT @ t,
            lambda t: t.T.unsqueeze(0) @ t,
            lambda t: t.std(False),
            lambda t: torch.var(t, 0, False),
            lambda t: torch.std_mean(t, (0, 1), True)[1],
        ):
            with torch.inference_mode():
                got, want = function(x), function(whole)
                torch.testing.assert_close(got.full_tensor(), want)
            assert got.is_inference() == want.is_inference()
        want = whole.clone()
        with torch.inference_mode():
            x[2:5].zero_(), want[2:5].zero_()
        torch.testing.assert_close(x.full_tensor(), want)


@pytest.mark.ranks(2)
def test_gradients_of_writes_through_views() -> None:
    mesh = world()
    whole = torch.randn(6, 4, dtype=torch.float64)

    def loss(x: Any) -> Any:
        y = x * 2
        y[:2].mul_(3)
        y[4] = y[0] + y[1]
        y[:, 1].zero_()
        return (y * y).sum()

    leaf = whole.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    for placement in (Replicate(), Shard(0), Shard(1)):
        x = distribute_tensor(whole, mesh, [placement]).requires_grad_()
        (grad,) = torch.autograd.grad(loss(x), x)
        torch.testing.assert_close(grad.full_tensor(), want)
        views_of_a_reshaped_base(distribute_tensor(whole[:4], mesh, [placement]))


def views_of_a_reshaped_base(x: Any) -> None:
    # Square: what autograd repeats on the new shape fits, and is the wrong row.
    for write in (False, True):
        y = x.clone().requires_grad_() * 1
        old = y[1]
        y.t_()
        new = y[1]
        with pytest.raises(RuntimeError, match="taken before the shape of its base changed"):
            old.mul_(2) if write else old * 2
        new.mul_(3)
        (grad,) = torch.autograd.grad((new * new).sum(), new)
        torch.testing.assert_close(grad.full_tensor(), 6 * x.full_tensor()[:, 1])
    plain = x.clone()
    row = plain[1]
    plain.t_()
    row.mul_(2)  # nobody wants a gradient
    torch.testing.assert_close(plain.full_tensor()[:, 1], 2 * x.full_tensor()[1])


@pytest.mark.ranks(2)
def test_results_lie_in_memory_as_those_of_torch() -> None:
    """Of transposed rows torch gives contiguous results, which may be viewed as one dim."""
    mesh, whole = world(), torch.randn(4, 6, dtype=torch.float64)
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(whole, mesh, [placement]).t()
        for function in (
            lambda t: functional.layer_norm(t, (4,)),
            lambda t: functional.softmax(t, 0),
            lambda t: functional.softmax(t, 1),
        ):
            expected, result = function(whole.t()), function(x)
            assert result.stride() == expected.stride()
            assert close(result.view(-1), expected.view(-1))


@pytest.mark.ranks(2, 3)
def test_as_strided_with_the_strides_that_a_tensor_has_moves_nothing(world_size: int) -> None:
    mesh = world()
    whole = torch.randn(4, 5, 3)
    for placements in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()]):
        for order in ((0, 1, 2), (2, 0, 1)):
            x = distribute_tensor(whole.permute(order), mesh, placements).requires_grad_()
            y = x.as_strided(x.size(), x.stride(), x.storage_offset())
            assert y.placements == x.placements and y.stride() == x.stride()
            assert y.to_local().data_ptr() == x.to_local().data_ptr()
            (y * 2).sum().backward()
            assert close(x.grad, torch.full(x.shape, 2.0))
