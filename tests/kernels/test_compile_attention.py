"""Attention to gathered keys under the pass: ring attention, against the model as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import weft
from weft.kernels import from_zigzag, to_zigzag
from weft.kernels.graphs.backend import CompilePass
from weft.kernels.graphs.receipts import Receipts, receipts_of

B, H, S, D = 2, 4, 6, 8
Attention = Callable[..., torch.Tensor]


def by_pass(graphs: list[Receipts]) -> Any:
    """A backend that runs what the pass has made of the joint graph, and of its halves."""
    rewritten = CompilePass(told=graphs.append)

    def compiled(module: Any, _: Any) -> Any:
        rewritten(module)
        return make_boxed_func(module.forward)

    def cut(joint: Any, *args: Any, **named: Any) -> Any:
        rewritten.joint(joint)
        partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
        return partition(joint, *args, **named)

    decompositions = select_decomp_table()
    return aot_autograd(fw_compiler=compiled, partition_fn=cut, decompositions=decompositions)


def gathered(x: torch.Tensor, dim: int = 2) -> torch.Tensor:
    """all_gather_tensor, but torch 2.11 breaks graphs where that joins what it has gathered."""
    whole: torch.Tensor = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    return torch.cat(whole.chunk(dist.get_world_size()), dim)


def bidirectional(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, gathered(k), gathered(v), scale=0.3)


def seen(layout: str, keys: int) -> torch.Tensor:
    """Which keys this rank's queries see."""
    at, W = torch.arange(keys), dist.get_world_size()
    if layout == "zigzag":
        at = torch.cat([at.chunk(2 * W)[i] for r in range(W) for i in (r, 2 * W - 1 - r)])
    return at.chunk(W)[dist.get_rank()].unsqueeze(1) >= at


def causal(layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = seen(layout, q.shape[2] * dist.get_world_size())
    return functional.scaled_dot_product_attention(q, gathered(k), gathered(v), attn_mask=mask)


def tokens_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(B, S, features) is gathered, then made heads of; fewer of keys than of queries."""
    k, v = (x[:, :2].transpose(1, 2).flatten(2) for x in (k, v))
    k, v = (gathered(x, 1).unflatten(-1, (2, D)).transpose(1, 2) for x in (k, v))
    y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


def checkpointed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = checkpoint(bidirectional, q.tanh(), k, v, use_reentrant=False)
    return y


def from_zero(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = gathered(k), gathered(v)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def in_a_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    far = torch.arange(S).unsqueeze(1) + dist.get_rank() * S - torch.arange(S * 2)
    mask = (far >= 0) & (far < 5)
    return functional.scaled_dot_product_attention(q, gathered(k), gathered(v), attn_mask=mask)


def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    bias = q.detach().mean() + torch.zeros(S, S * dist.get_world_size())
    return functional.scaled_dot_product_attention(q, gathered(k), gathered(v), attn_mask=bias)


def used_again(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = gathered(k), gathered(v)
    return functional.scaled_dot_product_attention(q, k, v) + k.mean()


def keys_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    v = torch.cat([v] * dist.get_world_size(), 2)
    return functional.scaled_dot_product_attention(q, gathered(k), v)


def held(call: Attention, length: int = S, grads: bool = True) -> list[tuple[str, str]]:
    """What became of the collectives, whose results and gradients must stay what they are."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = [torch.randn(B, H, length, D, generator=generator) for _ in range(3)]
    graphs: list[Receipts] = []
    results = []
    for run in call, torch.compile(call, backend=by_pass(graphs), fullgraph=True):
        for _ in range(2):
            inputs = [x.clone().requires_grad_(grads) for x in given]
            y = run(*inputs)
            made = torch.autograd.grad(y.square().sum(), inputs) if grads else ()
            results.append([y.detach(), *made])
    for mine in results[2:]:
        torch.testing.assert_close(mine, results[0], rtol=2e-5, atol=2e-5)
        assert [x.stride() for x in mine] == [x.stride() for x in results[0]]
    return [(r.fused, r.why) for receipts in graphs for r in receipts]


def fused(why: str) -> list[tuple[str, str]]:
    return [("ring_attention", why)] * 2 + [("ring_attention_backward", why)] * 2


def rings() -> list[Any]:
    contiguous = functools.partial(causal, "contiguous")
    return [held(bidirectional), held(contiguous), held(bidirectional, grads=False)]


def test_attention_to_gathered_keys_is_a_ring(ranks: Any) -> None:
    for plain, contiguous, inference in ranks(2, rings):
        assert plain == fused("attention")
        assert contiguous == fused("attention, contiguous causal")
        assert inference == [("ring_attention", "attention")] * 2


def more_rings() -> list[Any]:
    calls = bidirectional, tokens_first, checkpointed, functools.partial(causal, "zigzag")
    return [held(call) for call in calls]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 3])
def test_rings_of_other_layouts(ranks: Any, parts: int) -> None:
    for *alike, zigzag in ranks(parts, more_rings):
        assert alike == [fused("attention")] * 3
        assert zigzag == fused("attention, zigzag causal")


def of_any_length() -> list[Any]:
    """One graph for all lengths; a mask of them cannot be evaluated."""
    found = []
    for call in bidirectional, functools.partial(causal, "contiguous"):
        torch._dynamo.reset()
        graphs: list[Receipts] = []
        run = torch.compile(call, backend=by_pass(graphs), fullgraph=True, dynamic=True)
        for shape in (2, 4, 6, D), (3, 4, 5, D):
            given = [torch.randn(shape, requires_grad=True) for _ in range(3)]
            pairs = []
            for y in run(*given), call(*given):
                pairs.append([y, *torch.autograd.grad(y.square().sum(), given)])
            torch.testing.assert_close(*pairs, rtol=2e-5, atol=2e-5)
        found.append([(r.fused, r.why) for receipts in graphs for r in receipts])
    return found


@pytest.mark.slow
def test_sequences_of_any_length(ranks: Any) -> None:
    for plain, masked in ranks(2, of_any_length):
        assert plain == fused("attention")
        assert masked[:2] == [("", "its mask has sizes that are not known")] * 2


def others() -> list[Any]:
    calls = from_zero, in_a_window, biased, used_again, keys_alone
    found = [{why for _, why in held(call)} for call in calls]
    one_row = {why for _, why in held(functools.partial(causal, "contiguous"), length=1)}
    return [each - {"no matmul makes what it adds up"} for each in (*found, one_row)]


def test_other_masks_stay(ranks: Any) -> None:
    not_causal = {"its mask is not that of causal attention"}
    for found in ranks(2, others):
        assert found == [
            {"is_causal counts each rank's queries from 0"},
            not_causal,
            {"its mask is made of more than positions"},
            {"what is gathered has other uses"},
            {"keys and values are not both gathered"},
            not_causal,
        ]


def whole_sequence() -> float:
    """Zigzag shards against plain attention of the whole sequence in float64."""
    W, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(B, H, 2 * S * W, D, generator=generator).double() for _ in range(3)]
    mine = [to_zigzag(x, W, 2).chunk(W, 2)[rank].float() for x in whole]
    torch._dynamo.reset()
    run = torch.compile(functools.partial(causal, "zigzag"), backend=by_pass([]), fullgraph=True)
    parts = [torch.empty(B, H, 2 * S, D) for _ in range(W)]
    with torch.no_grad():
        dist.all_gather(parts, run(*mine).contiguous())
    expected = functional.scaled_dot_product_attention(*whole, is_causal=True)
    made = from_zigzag(torch.cat(parts, 2), W, 2)
    return float((made - expected).abs().max())


def test_zigzag_shards_of_a_whole_sequence(ranks: Any) -> None:
    assert max(ranks(2, whole_sequence)) < 1e-5


def by_inductor() -> tuple[str, list[str]]:
    torch._dynamo.reset()
    run = torch.compile(bidirectional, backend=weft.compile_backend, fullgraph=True)
    given = [torch.randn(B, H, S, D, requires_grad=True) for _ in range(3)]
    results = []
    for call in run, bidirectional:
        y = call(*given)
        results.append([y, *torch.autograd.grad(y.square().sum(), given)])
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)
    return str(weft.explain(run)), [each.line for each in receipts_of(run)]


@pytest.mark.slow
def test_inductor_runs_rings(ranks: Any) -> None:
    for text, lines in ranks(2, by_inductor):
        assert text.endswith("4 of 4 collectives fused")
        assert all("test_compile_attention.py" in line for line in lines)
