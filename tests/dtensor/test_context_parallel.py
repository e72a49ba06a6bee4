"""Attention of DTensors and of plain models whose sequences are sharded, against one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from dtensors import world
from torch.nn import functional

import weft
from weft.demo.model import Llama, LlamaShape
from weft.dtensor import Shard, distribute_tensor, init_device_mesh
from weft.dtensor.experimental import context_parallel, context_parallel_unshard
from weft.kernels import to_zigzag


def tensors(*heads: int, length: int = 21) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, length, 8, generator=generator) for h in heads]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("causal", [False, True])
def test_dtensors(causal: bool) -> None:
    """q, k and v sharded by sequence: round the ring, nothing gathered, gradients as they lie."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    q, k, v, grad = tensors(4, 2, 2, 4)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = functional.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
    expected.backward(grad)
    ours = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in (q, k, v)]

    def attend() -> torch.Tensor:
        return functional.scaled_dot_product_attention(*ours, is_causal=causal, enable_gqa=True)

    told = weft.explain(attend)
    assert [d.op for d in told if not d.candidates] == ["ring_attention"], list(told)
    y = told.result
    assert y.placements == (Shard(2),)
    y.backward(distribute_tensor(grad, mesh, [Shard(2)]))
    torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-5, atol=1e-5)
    for x, theirs in zip(ours, whole, strict=True):
        assert x.grad.placements == (Shard(2),)
        torch.testing.assert_close(x.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(4)
def test_two_dims() -> None:
    """Batch along one mesh dim, sequence along the other."""
    mesh = init_device_mesh("cpu", (2, 2))
    q, k, v = tensors(2, 2, 2)
    parts = [distribute_tensor(x, mesh, [Shard(0), Shard(2)]) for x in (q, k, v)]
    y = functional.scaled_dot_product_attention(*parts, is_causal=True)
    assert y.placements == (Shard(0), Shard(2))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(2, 3)
def test_plain_model() -> None:
    """A plain Llama: the loss and the gradients of one process, summed over the ranks' tokens."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    plain = Llama(LlamaShape(d_model=32, layers=2, heads=4, kv_heads=2, ffn=48, seq_len=30))
    text = torch.randint(256, (2, 31), generator=torch.Generator().manual_seed(1))
    tokens, labels = text[:, :-1].clone(), text[:, 1:].clone()
    expected = plain(tokens)
    loss = functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()

    model = copy.deepcopy(plain)
    model.zero_grad()
    tables = [buffer for name, buffer in model.named_buffers() if name.endswith("turns")]
    buffers, dims = [tokens, labels, *tables], [1, 1, *[0] * len(tables)]
    wholes = [buffer.clone() for buffer in buffers]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims):
        assert tokens.shape[1] < 30
        logits = model(tokens)
        own = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        own.backward()
    for buffer, whole in zip(buffers, wholes, strict=True):
        assert torch.equal(buffer, whole)
    total = own.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, loss.detach())
    (all_logits,) = context_parallel_unshard(mesh, [logits], [1])
    torch.testing.assert_close(all_logits, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(2)
def test_compiled() -> None:
    """Plain attention inside the block, and that of DTensors: one graph, the eager results."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world_size,))
    attend = functional.scaled_dot_product_attention
    compiled = torch.compile(
        lambda q, k, v: attend(q, k, v, is_causal=True), fullgraph=True, backend="aot_eager"
    )
    wholes = tensors(2, 2, 2, length=4 * world_size)
    expected = attend(*wholes, is_causal=True)
    parts = [x.clone() for x in wholes]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]):
        told = weft.explain(compiled, *parts)
    assert [d.op for d in told if not d.candidates] == ["ring_attention"]
    mine = to_zigzag(expected, world_size, 2).chunk(world_size, 2)[rank]
    torch.testing.assert_close(told.result, mine, rtol=1e-5, atol=1e-5)
    told = weft.explain(compiled, *(distribute_tensor(x, mesh, [Shard(2)]) for x in wholes))
    assert [d.op for d in told if not d.candidates] == ["ring_attention"]
    torch.testing.assert_close(told.result.full_tensor(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(2)
def test_errors() -> None:
    mesh = world()
    q, k, _ = tensors(2, 1, 1)
    with (
        pytest.raises(ValueError, match="1 dims for 2 buffers"),
        context_parallel(mesh, buffers=[q, k], buffer_seq_dims=[2]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="not be a view"),
        context_parallel(mesh, buffers=[q[:1]], buffer_seq_dims=[2]),
    ):
        pass
    with pytest.raises(ValueError, match="0 dims for 1 buffers"):
        context_parallel_unshard(mesh, [q], [])
    with context_parallel(mesh):
        with pytest.raises(NotImplementedError, match="no attn_mask and no dropout"):
            functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
        with pytest.raises(ValueError, match="enable_gqa"):
            functional.scaled_dot_product_attention(q, k, k)
