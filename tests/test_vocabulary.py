"""A vocabulary cut over the ranks against nn.Embedding and torch.argmax of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.collectives.movement import chunk_sizes


def embedding_body(rows: int, sequence_dim: int | None) -> None:
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
    with pytest.raises(ValueError, match=rf"tokens must be 0 \.\. {rows - 1}, got 0 \.\. {rows}"):
        module(torch.tensor([0, rows]))
    with pytest.raises(ValueError, match="without max_norm"):
        weft.VocabParallelEmbedding.from_embedding(nn.Embedding(4, 4, max_norm=1.0))


@pytest.mark.parametrize(("rows", "sequence_dim"), [(7, None), (4, 1), (2, 0)])
def test_embedding(ranks: Any, rows: int, sequence_dim: int | None) -> None:
    ranks(3, embedding_body, rows, sequence_dim)


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
