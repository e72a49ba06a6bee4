"""Training as on one process: optimizers over steps, gradient clipping, a transformer block."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from dtensors import close, world
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import weft
from weft import collectives
from weft.dtensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from weft.dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# The others are in test_optimizer_step.py, without clipping.
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_clipping(name: str) -> None:
    mesh = world()
    layouts: list[Any] = [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0)]]
    whole = [torch.randn(*s, dtype=torch.float64) for s in [(5, 3), (4, 6), (7, 2), (2,)]]
    plain = [nn.Parameter(t.clone()) for t in whole]
    ours = [
        nn.Parameter(distribute_tensor(t, mesh, p)) for t, p in zip(whole, layouts, strict=True)
    ]
    optimizers = OPTIMIZERS[name](plain), OPTIMIZERS[name](ours)
    for step in range(4):
        for p, q, layout in zip(plain, ours, layouts, strict=True):
            grad = torch.randn_like(p) * (step + 1)
            p.grad = grad
            q.grad = distribute_tensor(grad, mesh, layout)
        norms = [torch.nn.utils.clip_grad_norm_(params, 1.5) for params in (plain, ours)]
        assert close(norms[1], norms[0])
        for optimizer in optimizers:
            optimizer.step()
        for p, q, layout in zip(plain, ours, layouts, strict=True):
            assert isinstance(q, DTensor)
            assert list(q.placements) == layout
            assert close(q.detach(), p.detach()), (name, step)


@pytest.mark.ranks(3)
def test_clipping_foreach() -> None:
    mesh = world()
    grads = [torch.randn(5, 3), torch.randn(4), torch.randn(2, 2)]
    ours = [
        distribute_tensor(g, mesh, p)
        for g, p in zip(grads, [[Shard(0)], [Replicate()], [Shard(1)]], strict=True)
    ]
    norms = torch._foreach_norm(ours)
    for norm, grad in zip(norms, grads, strict=True):
        assert torch.allclose(norm.full_tensor(), grad.norm())
    params = [nn.Parameter(torch.zeros_like(g)) for g in ours]
    plain = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip([*params, *plain], [*ours, *grads], strict=True):
        p.grad = g
    a = torch.nn.utils.clip_grad_norm_(params, 0.5, foreach=True)
    b = torch.nn.utils.clip_grad_norm_(plain, 0.5)
    assert torch.allclose(a.full_tensor(), b)
    for p, q in zip(params, plain, strict=True):
        assert torch.allclose(p.grad.full_tensor(), q.grad)


class Block(nn.Module):
    """Attention and MLP with norms, on (batch, sequence, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._end(self.out(y.transpose(1, 2).flatten(-2)), x)
        return x + self._end(self.down(functional.silu(self.up(self.norm2(x)))), x)

    def _end(self, y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return y.redistribute(placements=like.placements) if isinstance(y, DTensor) else y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.block = Block(12, 4)
        self.head = nn.Linear(12, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)))


def place(model: Model, mesh: Any, batch: list[Any]) -> Model:
    """Tensor parallel along the last mesh dim; `batch`: placements of the other mesh dims."""
    columns, rows = Shard(0), Shard(1)
    plan = {
        "embed.weight": rows,
        "q.weight": columns,
        "k.weight": columns,
        "v.weight": columns,
        "q.bias": columns,
        "k.bias": columns,
        "v.bias": columns,
        "out.weight": rows,
        "up.weight": columns,
        "down.weight": rows,
        "head.weight": columns,
    }

    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            found = [p for tail, p in plan.items() if f"{name}.{key}".endswith(tail)]
            last = found[0] if found else Replicate()
            placed = distribute_tensor(param.detach(), mesh, [*(Replicate() for _ in batch), last])
            module.register_parameter(key, nn.Parameter(placed))

    distribute_module(model, mesh, partition)
    return model


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=lambda m: "x".join(map(str, m)))
def test_transformer_trains_as_on_one_process(mesh: Any, sequence_parallel: bool) -> None:
    mesh = init_device_mesh("cpu", mesh)
    torch.manual_seed(1)
    reference = Model().double()
    batch: list[Any] = [Shard(0)] * (mesh.ndim - 1)
    ours = place(copy.deepcopy(reference), mesh, batch)
    stream = Shard(1) if sequence_parallel else Replicate()

    def forward(ids: DTensor) -> DTensor:
        x = ours.embed(ids).redistribute(placements=[*batch, stream])
        result = ours.head(ours.block(x))
        assert isinstance(result, DTensor)
        return result

    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.02, foreach=True) for m in (reference, ours)
    ]
    for step in range(3):
        ids = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(step))
        inputs, labels = ids[:, :-1], ids[:, 1:]
        loss = functional.cross_entropy(reference(inputs).flatten(0, 1), labels.flatten())
        logits = forward(distribute_tensor(inputs.contiguous(), mesh, [*batch, Replicate()]))
        targets = distribute_tensor(labels.contiguous(), mesh, [*batch, Replicate()])
        our_loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert close(our_loss.detach(), loss.detach()), step
        loss.backward()
        our_loss.backward()
        for (name, p), q in zip(reference.named_parameters(), ours.parameters(), strict=True):
            assert close(q.grad, p.grad), (name, step)
        for model in (reference, ours):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, p), q in zip(reference.named_parameters(), ours.parameters(), strict=True):
            assert close(q.detach(), p.detach()), (name, step)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["foreach", "loop", "fused"])
def test_optimizer_and_clipping_over_two_meshes(name: str) -> None:
    """Parameters on a line and on a square of the same ranks: clipped and updated as one."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    whole = [torch.randn(5, 3), torch.randn(4, 6), torch.randn(7)]
    places: list[Any] = [(line, [Shard(0)]), (square, [Shard(0), Shard(1)]), (line, [Replicate()])]
    ours = [
        nn.Parameter(distribute_tensor(t, *place)) for t, place in zip(whole, places, strict=True)
    ]
    theirs = [nn.Parameter(t.clone()) for t in whole]
    foreach = name != "loop"
    options = {"fused": True} if name == "fused" else {"foreach": foreach}
    optimizers = [torch.optim.AdamW(p, lr=0.1, **options) for p in (ours, theirs)]
    for norm_type in (2.0, float("inf"), 1.0):
        for p, q, place in zip(ours, theirs, places, strict=True):
            q.grad = 3 * torch.randn_like(q)
            p.grad = distribute_tensor(q.grad, *place)
        norms = [
            nn.utils.clip_grad_norm_(p, 1.0, norm_type, foreach=foreach) for p in (ours, theirs)
        ]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        for optimizer in optimizers:
            optimizer.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
            torch.testing.assert_close(p.full_tensor(), q)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="lie on different meshes"):
        torch._foreach_add_([ours[0]], [distribute_tensor(whole[0], square)])
    with pytest.raises(NotImplementedError, match="lie on different meshes"):
        _ = ours[0] + distribute_tensor(whole[0], square)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_are_computed_again(reentrant: bool) -> None:
    mesh = world()
    plain = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
    model = distribute_module(copy.deepcopy(plain), mesh)
    whole = torch.randn(5, 3, 6, dtype=torch.float64)
    x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    whole.requires_grad_()
    plain(plain(whole)).sin().sum().backward()
    hidden = x
    for _ in range(2):
        hidden = checkpoint(model, hidden, use_reentrant=reentrant)
    hidden.sin().sum().backward()
    assert close(x.grad, whole.grad)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert close(p.grad, q.grad)


@pytest.mark.ranks(2)
def test_all_but_matmuls_is_computed_again() -> None:
    """Selective checkpoints expect the same ops in the recomputation: no plans, no workspaces."""
    mesh = world()
    collectives.close()
    linears = nn.Linear(10, 14).double(), nn.Linear(14, 10).double()
    plain = nn.Sequential(nn.LayerNorm(10).double(), linears[0], nn.GELU(), linears[1])
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    up = weft.ColumnParallelLinear.from_linear(linears[0], sequence_dim=1)
    down = weft.RowParallelLinear.from_linear(linears[1], sequence_dim=1)
    models = [
        parallelize_module(copy.deepcopy(plain), mesh, plan),
        nn.Sequential(plain[0], up, nn.GELU(), down),
    ]
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    whole = torch.randn(3, 6, 10, dtype=torch.float64, requires_grad=True)
    expected = plain(whole)
    expected.sin().sum().backward()
    rank, W = mesh.get_local_rank(), mesh.size()
    for model, parts in zip(models, (1, W), strict=True):
        x = whole.detach().chunk(parts, 1)[rank % parts].clone().requires_grad_()
        contexts = partial(create_selective_checkpoint_contexts, saved)
        y = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        torch.testing.assert_close(y, expected.chunk(parts, 1)[rank % parts])
        y.sin().sum().backward()
        torch.testing.assert_close(x.grad, whole.grad.chunk(parts, 1)[rank % parts])


@pytest.mark.ranks(2)
def test_functions_that_run_backward() -> None:
    mesh = world()
    whole = torch.randn(5, 3)
    x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    unused = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
    seen = []
    x.register_hook(lambda grad: seen.append((grad * 2).placements))
    given = distribute_tensor(torch.ones(5, 3), mesh, [Replicate()])
    first, none = torch.autograd.grad(x**3, [x, unused], given, allow_unused=True)
    assert none is None and close(first, 3 * whole**2)
    grads = torch.autograd.grad((x**3).sum(), [x, unused], materialize_grads=True)
    assert isinstance(grads[1], DTensor) and not grads[1].full_tensor().any()
    (once,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    torch.autograd.backward([once.sum(), x.sum()], inputs=[x])
    assert close(x.grad, 6 * whole + 1)
    assert seen == [(Shard(0),)] * 4
    # Transforms wrap a DTensor, and give what they do not transform plain zeros for a tangent.
    weight = torch.randn(3, 4, dtype=torch.float64)
    w = distribute_tensor(weight, mesh, [Shard(1)])
    _, slope = torch.func.jvp(lambda a: a @ w, (x.double(),), (given.double(),))
    assert close(slope, torch.ones(5, 3, dtype=torch.float64) @ weight)
    hessian = torch.func.hessian(lambda a: ((a @ w) ** 2).sum())(x.detach().double())
    assert close(hessian, torch.func.hessian(lambda a: ((a @ weight) ** 2).sum())(whole.double()))
    slopes = []
    for _ in range(3):  # the short way of calls, once they are known, has no tangents
        with torch.no_grad(), forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach(), given)
            slopes.append(forward_ad.unpack_dual(torch.sin(dual)).tangent)
            for ends in (
                dual.to_local,
                dual.full_tensor,
                partial(functional.layer_norm, dual, (3,)),
            ):
                with pytest.raises(NotImplementedError, match="a tangent"):
                    ends()
            with pytest.raises(NotImplementedError, match="a tangent"):
                DTensor.from_local(forward_ad.make_dual(weight, weight), mesh)
        with torch.no_grad():
            torch.sin(x)
    assert all(close(slope, whole.cos()) for slope in slopes)
    with pytest.raises(RuntimeError, match="got mixed"):
        torch.func.grad(lambda a: (a @ w).sum())(whole.double())
    for function in (lambda y: y.backward(torch.ones(5, 3)), torch.autograd.grad):
        args = () if function is not torch.autograd.grad else (x, torch.ones(5, 3))
        with pytest.raises(RuntimeError, match=r"torch.autograd.* got mixed torch.Tensor and DT"):
            function(x * 2, *args)


@pytest.mark.ranks(2)
def test_transforms_stop_where_dtensors_begin_or_end() -> None:
    mesh, x = world(), torch.ones(2, 4)
    plan: dict[str, Any] = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), mesh, plan)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: Any) -> Any:
        return torch.func.functional_call(model, weights, x).sum()

    whole = distribute_tensor(x, mesh, [Shard(0)])
    for transformed in (
        lambda: torch.func.grad(loss)(weights),
        lambda: torch.vmap(model)(x[None]),
        lambda: torch.vmap(lambda row: DTensor.from_local(row, mesh, [Shard(0)]))(whole),
    ):
        with pytest.raises(NotImplementedError, match=r"torch\.func \(grad.* ones that convert"):
            transformed()


@pytest.mark.ranks(2)
def test_recurrent_layers_begin_with_plain_zeros() -> None:
    mesh = world()
    whole = torch.randn(5, 4, 3, dtype=torch.float64)
    for kind, cell in ((nn.LSTM, nn.LSTMCell), (nn.GRU, nn.GRUCell), (nn.RNN, nn.RNNCell)):
        for plain, data in ((kind(3, 2).double(), whole), (cell(3, 2).double(), whole[0])):
            layer = distribute_module(copy.deepcopy(plain), mesh)
            x = distribute_tensor(data, mesh, [Shard(data.ndim - 2)]).requires_grad_()
            ours, theirs = layer(x), plain(data)
            if isinstance(theirs, tuple):
                ours, theirs = ours[0], theirs[0]
            assert close(ours, theirs)
            (ours**2).sum().backward()
            (theirs**2).sum().backward()
            grads = zip(layer.parameters(), plain.parameters(), strict=True)
            assert all(close(p.grad, q.grad) for p, q in grads)
    with pytest.raises(RuntimeError, match="got mixed"):
        layer(x, torch.ones(4, 2, dtype=torch.float64))
    sequences = distribute_tensor(whole, mesh, [Shard(0)])
    for lengths in ([5, 4, 3, 1], distribute_tensor(torch.tensor([5, 4, 3, 1]), mesh)):
        with pytest.raises(NotImplementedError, match="cannot be packed or unpacked: pass padded"):
            nn.utils.rnn.pack_padded_sequence(sequences, lengths)


@pytest.mark.ranks(2)
def test_inference_mode_comes_first() -> None:
    mesh = world()
    collectives.close()  # so that all memory is made in inference mode
    plain = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6))
    model = distribute_module(copy.deepcopy(plain), mesh)
    whole = torch.randn(5, 6)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            torch.manual_seed(1)
            expected = plain(whole)
            torch.manual_seed(1)
            y = model(x)
            assert y.placements == (Shard(0),)
            torch.testing.assert_close(y.full_tensor(), expected)
    y.sum().backward()
