"""Cross-entropies of sharded logits under the pass, against whole logits in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

import weft
from tests.kernels.test_compile_attention import by_pass
from weft.kernels.graphs.receipts import Receipts

R, V = 6, 8  # rows, and classes of a rank
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def of_dtensors() -> Loss:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def call(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
        loss: Any = functional.cross_entropy(logits, target)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    return call


class VocabParallel(torch.autograd.Function):
    """As Megatron-like code writes it: sums in place, and the softmax kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        largest = x.max(-1)[0]
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        x = x - largest.unsqueeze(-1)
        first = dist.get_rank() * x.shape[-1]
        elsewhere = (target < first) | (target >= first + x.shape[-1])
        own = target.clone() - first
        own[elsewhere] = 0
        rows = torch.arange(target.numel())
        found = x.flatten(0, -2)[rows, own.flatten()].clone().view_as(target)
        found[elsewhere] = 0.0
        dist.all_reduce(found)
        raised = x.exp()
        total = raised.sum(-1)
        dist.all_reduce(total)
        ctx.save_for_backward(raised / total.unsqueeze(-1), elsewhere, own)
        return total.log() - found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        softmax, elsewhere, own = ctx.saved_tensors
        right = torch.zeros_like(softmax).scatter(-1, own.unsqueeze(-1), 1.0)
        dx = softmax - right.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return dx * grad.unsqueeze(-1), None


def in_place(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = VocabParallel.apply(x.unflatten(0, (2, -1)), target.view(2, -1))
    return losses.mean()


def of_any_length() -> list[str]:
    torch._dynamo.reset()
    graphs: list[Receipts] = []
    run = torch.compile(in_place, backend=by_pass(graphs), fullgraph=True, dynamic=True)
    for rows in R, 2 * R:
        x, target = torch.randn(rows, V, requires_grad=True), torch.arange(rows)
        made, plain = run(x, target), in_place(x, target)
        torch.testing.assert_close(made, plain, rtol=1e-5, atol=1e-5)
        grads = [torch.autograd.grad(y, x)[0] for y in (made, plain)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
    return [r.fused for receipts in graphs for r in receipts]


@pytest.mark.slow
def test_any_number_of_rows(ranks: Any) -> None:
    for found in ranks(2, of_any_length):
        assert found == ["all_gather"] * 3


def held(kind: str, blank: bool, dtype: torch.dtype = torch.float32) -> list[tuple[str, str]]:
    """What became of the collectives of a loss, which is that of whole logits in float64."""
    torch._dynamo.reset()
    call = of_dtensors() if kind == "loss_parallel" else in_place
    rank, W = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole = (30 * torch.randn(R, V * W, generator=generator)).to(dtype).float()
    target = torch.randint(V * W, (R,), generator=generator)
    if blank:  # all logits of the last rank, in one row
        whole[1, -V:], target[1] = float("-inf"), 0
    if kind == "loss_parallel":
        target[2] = -100
    expected = whole.double().requires_grad_()
    loss = functional.cross_entropy(expected, target)
    loss.backward()
    graphs: list[Receipts] = []
    off = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    with loss_parallel():
        run = torch.compile(call, backend=by_pass(graphs), fullgraph=True)
        for _ in range(2):
            x = whole[:, rank * V :][:, :V].to(dtype, copy=True).requires_grad_()
            made = run(x, target)
            made.backward()
            torch.testing.assert_close(made.double(), loss, rtol=off, atol=off)
            dx = expected.grad[:, rank * V :][:, :V]
            torch.testing.assert_close(x.grad.double(), dx, rtol=off, atol=0.1 * off)
    return [(r.fused, r.why) for receipts in graphs for r in receipts]


def log_softmax(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Without a target; the largest logits are returned as well."""
    largest = all_reduce(x.detach().amax(-1, keepdim=True), "max", dist.group.WORLD)
    e = (x - largest).exp()
    total = all_reduce(e.sum(-1, keepdim=True), "sum", dist.group.WORLD)
    return torch.cat([x - largest - total.log(), largest + 0 * total], -1)


def halves(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return log_softmax(x.bfloat16(), _)


def others() -> list[Any]:
    found = []
    for call in log_softmax, halves:
        torch._dynamo.reset()
        graphs: list[Receipts] = []
        x = torch.randn(R, V)
        made = torch.compile(call, backend=by_pass(graphs), fullgraph=True)(x, x)
        off = 1e-5 if call is log_softmax else 2e-2
        torch.testing.assert_close(made, call(x, x), rtol=off, atol=off)
        found.append([(r.fused, r.why) for receipts in graphs for r in receipts])
    return found


ONCE = ("all_gather", "the numbers of a cross-entropy at once")


@pytest.mark.parametrize("kind", ["loss_parallel", "in place"])
@pytest.mark.parametrize("parts", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sharded_logits_exchange_once(ranks: Any, kind: str, parts: int) -> None:
    for found in ranks(parts, held, kind, True):
        assert found == [ONCE] * 3


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_logits_in_half_precision(ranks: Any, dtype: torch.dtype) -> None:
    for kind in "loss_parallel", "in place":
        for found in ranks(2, held, kind, False, dtype):
            assert found == [ONCE] * 3, (kind, found)


def test_softmax_without_a_target(ranks: Any) -> None:
    for alone, half in ranks(2, others):
        assert alone == half == [ONCE] * 2


def by_inductor() -> tuple[str, float]:
    torch._dynamo.reset()
    plainly = of_dtensors()
    run = torch.compile(plainly, backend=weft.compile_backend, fullgraph=True)
    x, target = torch.randn(R, V, requires_grad=True), torch.arange(R)
    with loss_parallel():
        made, plain = run(x, target), plainly(x, target)
        grads = [torch.autograd.grad(y, x)[0] for y in (made, plain)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
    return str(weft.explain(run)), float((made - plain).abs())


@pytest.mark.slow
def test_inductor_runs_the_exchange(ranks: Any) -> None:
    for text, off in ranks(2, by_inductor):
        assert text.endswith("3 of 3 collectives fused") and off < 1e-5
