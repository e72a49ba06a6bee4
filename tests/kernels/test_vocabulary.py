"""A vocabulary cut over the ranks against torch's functions of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.functional import cross_entropy

import weft
from weft.collectives import resolve
from weft.collectives.ranks.chunks import chunk_sizes


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("rows", "sequence_dim"), [(7, None), (4, 1), (2, 0)])
def test_embedding(rows: int, sequence_dim: int | None) -> None:
    """As nn.Embedding: values, gradients, the rows that are drawn, saved and loaded."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    whole = nn.Embedding(rows, 6, padding_idx=1, dtype=torch.float64)
    torch.manual_seed(3)
    module = weft.VocabParallelEmbedding(rows, 6, 1, dtype=torch.float64, sequence_dim=sequence_dim)
    assert len(module.weight) == chunk_sizes(rows, world_size)[rank]
    torch.testing.assert_close(module.state_dict(), whole.state_dict())
    torch.manual_seed(3)
    later = weft.VocabParallelEmbedding(
        rows, 6, 1, device="meta", dtype=torch.float64, sequence_dim=sequence_dim
    )
    later.to_empty(device="cpu").reset_parameters()
    assert torch.equal(later.weight, module.weight)
    whole.load_state_dict({"weight": torch.randn(rows, 6)})
    module.load_state_dict(whole.state_dict())
    again = weft.VocabParallelEmbedding.from_embedding(whole, sequence_dim=sequence_dim)
    tokens = torch.randint(rows, (3, 5), generator=torch.Generator().manual_seed(0))

    def mine(x: torch.Tensor, dim: int | None = sequence_dim) -> torch.Tensor:
        return x if dim is None else x.split(chunk_sizes(x.shape[dim], world_size), dim)[rank]

    expected, dy = whole(tokens), torch.randn(3, 5, 6, dtype=torch.float64)
    expected.backward(dy)
    for each in (module, again):
        out = each(tokens)
        assert torch.equal(out, mine(expected))
        out.backward(mine(dy))
        assert whole.weight.grad is not None
        torch.testing.assert_close(each.weight.grad, mine(whole.weight.grad, 0))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert again(mode.from_tensor(tokens)).shape == mine(expected).shape
    with pytest.raises(ValueError, match=rf"tokens must be 0 \.\. {rows - 1}, got 0 \.\. {rows}"):
        module(torch.tensor([0, rows]))
    with pytest.raises(ValueError, match="without max_norm"):
        weft.VocabParallelEmbedding.from_embedding(nn.Embedding(4, 4, max_norm=1.0), sequence_dim=0)


def largest_body() -> list[int]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for width in (11, 4, 2, 1):  # of the last ones some ranks have none
            logits = torch.randn(4, 5, width, generator=generator).to(dtype)
            logits[1] = 2.0  # the first of equal ones
            logits[2] = -torch.inf
            mine = logits.split(chunk_sizes(width, world_size), -1)[rank]
            assert torch.equal(weft.vocab_parallel_argmax(mine), logits.argmax(-1)), width
    # Noise of every rank's own draws from the softmax of all.
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4])
    mine = shares.log().split(chunk_sizes(4, world_size))[rank].expand(4000, -1)
    own = torch.Generator().manual_seed(rank)
    noise = -torch.empty_like(mine).exponential_(generator=own).log()
    drawn = weft.vocab_parallel_argmax(mine + noise)
    torch.testing.assert_close(drawn.bincount(minlength=4) / 4000, shares, rtol=0, atol=0.03)
    return drawn.tolist()


def test_largest_of_all_shards(ranks: Any) -> None:
    first, *others = ranks(3, largest_body)
    assert all(other == first for other in others)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss(dtype: torch.dtype) -> None:
    """As F.cross_entropy of the whole in float64, and its gradient."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    options: list[dict[str, Any]] = [
        {},
        {"reduction": "sum", "label_smoothing": 0.1},
        {"reduction": "none", "ignore_index": 1},
        {"ignore_index": 1, "label_smoothing": 1.0},
    ]
    for width in (11, 4, 2):  # of the last one a rank has none
        sizes = chunk_sizes(width, world_size)
        for shape in [(5,), (2, 3), (0,), ()]:
            for given in options:
                logits = (20 * torch.randn(*shape, width, generator=generator)).to(dtype)
                target = torch.randint(width, shape, generator=generator)
                if target.numel() > 3:
                    target.view(-1)[1] = given.get("ignore_index", 0)
                mine = logits.split(sizes, -1)[rank].clone().requires_grad_()
                loss = weft.vocab_parallel_cross_entropy(
                    mine, target, sizes=sizes if width == 4 else None, **given
                )
                whole = logits.double().requires_grad_()
                expected = cross_entropy(whole.view(-1, width), target.view(-1), **given)
                if given.get("reduction") == "none":
                    expected = expected.view(shape)
                assert loss.dtype == dtype
                # Sums of the width's terms of at most 80 in fp32, rounded once to dtype.
                bound = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 80 * 2**-22}
                torch.testing.assert_close(loss.double(), expected, equal_nan=True, **bound)
                seed = torch.randn(loss.shape, generator=generator).to(dtype)
                loss.backward(seed)
                expected.backward(seed.double())
                assert whole.grad is not None
                assert mine.grad is not None
                torch.testing.assert_close(
                    mine.grad.double(), whole.grad.split(sizes, -1)[rank], equal_nan=True, **bound
                )


@pytest.mark.ranks(2)
def test_second_derivatives() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = chunk_sizes(5, world_size)
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([4, -100, 1])
    second = []
    for shard, loss_of in [
        (logits.split(sizes, -1)[rank].clone(), weft.vocab_parallel_cross_entropy),
        (logits.clone(), cross_entropy),
    ]:
        x = shard.requires_grad_()
        (dx,) = torch.autograd.grad(loss_of(x, target, label_smoothing=0.1), x, create_graph=True)
        (ddx,) = torch.autograd.grad((dx**2).sum(), x)
        second.append(ddx)
    torch.testing.assert_close(second[0], second[1].split(sizes, -1)[rank])


@pytest.mark.ranks(2)
def test_loss_in_a_graph() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    head = nn.Linear(8, 7, bias=False)  # uneven: each rank learns in the graph where it begins
    target = torch.tensor([0, 6, 3, -100, 2, 5])
    weight = head.weight.detach().split(chunk_sizes(7, world_size))[rank].requires_grad_()

    def loss_of(x: torch.Tensor, weight: torch.Tensor, group: Any = None) -> torch.Tensor:
        logits = x @ weight.t()
        return weft.vocab_parallel_cross_entropy(logits, target, group, label_smoothing=0.1)

    expected = cross_entropy(head(x), target, label_smoothing=0.1)
    expected.backward()
    assert head.weight.grad is not None
    grad = head.weight.grad.split(chunk_sizes(7, world_size))[rank]
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    for group in (None, dist.group.WORLD, resolve()):
        loss = compiled(x, weight, group)
        torch.testing.assert_close(loss, expected)
        weight.grad = None
        loss.backward()
        torch.testing.assert_close(weight.grad, grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert loss_of(x, weight).dtype == torch.float32


@pytest.mark.ranks(2)
def test_wrong_losses() -> None:
    logits, target = torch.randn(2, 3), torch.tensor([0, 6])
    loss = weft.vocab_parallel_cross_entropy
    with pytest.raises(IndexError, match=r"target 6 is out of bounds: classes are 0 \.\. 5"):
        loss(logits, target)
    with pytest.raises(ValueError, match="target must be int64"):
        loss(logits, target[:1])
    with pytest.raises(ValueError, match='reduction must be "none"'):
        loss(logits, target, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="label_smoothing must be between 0 and 1"):
        loss(logits, target, label_smoothing=2.0)
    assert loss(logits, target, ignore_index=6).isfinite()
