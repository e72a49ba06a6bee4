"""ColumnParallelLinear and RowParallelLinear against the nn.Linear that they replace."""

from __future__ import annotations

import copy
import io
import os
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import weft
from weft.collectives.ranks.chunks import chunk_sizes
from weft.dtensor import DTensor, Shard, checkpoint, init_device_mesh


def pair(hidden: int, ffn: int, bias: bool) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(hidden, ffn, bias), nn.GELU(), nn.Linear(ffn, hidden, bias))


def parallel(whole: nn.Sequential, sequence_dim: int | None) -> nn.Sequential:
    up, down = whole[0], whole[2]
    assert isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
    return nn.Sequential(
        weft.ColumnParallelLinear.from_linear(up, sequence_dim=sequence_dim),
        nn.GELU(),
        weft.RowParallelLinear.from_linear(down, sequence_dim=sequence_dim),
    )


def test_wrong_arguments_are_told_by_the_public_class() -> None:
    for layer in (weft.ColumnParallelLinear, weft.RowParallelLinear):
        made: Any = layer
        with pytest.raises(TypeError, match=rf"^{layer.__name__}\.__init__\(\) missing 2"):
            made()
        with pytest.raises(TypeError, match=rf"^{layer.__name__}\.from_linear\(\) missing 1"):
            made.from_linear()
        with pytest.raises(TypeError, match=rf"^{layer.__name__}\.from_linear\(\) got an unex"):
            made.from_linear(nn.Linear(2, 2), axis=0)


@pytest.mark.ranks(2)
def test_a_call_is_a_short_walk_through_few_rooms() -> None:
    """Who reads what a call of `kernels` runs through meets 30 functions, in three rooms."""
    kernels = Path(__file__).resolve().parents[2] / "kernels"
    layer, x = weft.ColumnParallelLinear(8, 6, sequence_dim=0), torch.randn(4, 8)
    met: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code, file = frame.f_code, Path(frame.f_code.co_filename).resolve()
        # Not what a function iterates over in place.
        if event == "call" and file.is_relative_to(kernels) and not code.co_name.startswith("<"):
            met[str(file.relative_to(kernels).parent), code.co_name] = None

    for engine in ("host", "generic"):
        with weft.engine(engine):
            layer(x)  # sets up, and measures
            met.clear()
            sys.setprofile(note)
            try:
                layer(x)
            finally:
                sys.setprofile(None)
        assert ("layers", "forward") in met and ("matmul", "_run_engine") in met
        assert {room for room, _ in met} == {"layers", "matmul", "engine"}, list(met)
        assert len(met) <= 30, list(met)


@pytest.mark.ranks(2)
def test_the_sequence_dim_is_chosen() -> None:
    """Neither choice is a default: each computes something plausible where the other is meant."""
    column, row = weft.ColumnParallelLinear, weft.RowParallelLinear
    for make in (
        lambda **dim: column(2, 2, **dim),
        lambda **dim: row.from_linear(nn.Linear(2, 2), **dim),
        lambda **dim: weft.VocabParallelEmbedding(4, 2, **dim),
        lambda **dim: weft.VocabParallelEmbedding.from_embedding(nn.Embedding(4, 2), **dim),
    ):
        with pytest.raises(TypeError, match=r"not given.*None: x is the same whole.*An int: the t"):
            make()
        with pytest.raises(TypeError, match="got True"):
            make(sequence_dim=True)
        assert make(sequence_dim=None).sequence_dim is None


@pytest.mark.ranks(3)
def test_one_activation_passed_as_several_shards_is_told() -> None:
    """Rank 2 has a shard of its own, ranks 0 and 1 the same one; padding is no shard."""
    rank, layer = dist.get_rank(), weft.ColumnParallelLinear(4, 6, sequence_dim=1)
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(rank // 2))
    layer(x)
    with patch.dict(os.environ, WEFT_CHECK="1"):
        told = r"ranks 0, 1 pass bitwise the same.*sequence_dim=None"
        for same in (x, x.to(torch.bfloat16), x.mT.contiguous().mT):
            with pytest.raises(weft.MismatchError, match=told):
                layer.to(same.dtype)(same)
        layer.to(x.dtype)
        for right in (x + rank, torch.ones(2, 3, 4), x[:1, :1], x[:0]):
            layer(right)
        weft.ColumnParallelLinear(4, 6, sequence_dim=None)(x)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "sequence_dim"),
    [((7, 12), 0), ((2, 5, 12), 1), ((4, 2, 8), 0), ((2, 5, 12), None), ((1, 3), 0)],
)
def test_training_equals_one_process(
    bias: bool, shape: tuple[int, ...], sequence_dim: int | None
) -> None:
    """Three SGD steps beside one process; outputs, input gradients and weights stay equal."""
    rank, world_size, ffn = dist.get_rank(), dist.get_world_size(), 10
    whole = pair(shape[-1], ffn, bias).double()
    model = parallel(whole, sequence_dim)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, model)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x_whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        dy_whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        if sequence_dim is None:
            x, dy = x_whole.clone(), dy_whole
        else:
            sizes = chunk_sizes(shape[sequence_dim], world_size)
            x = x_whole.split(sizes, sequence_dim)[rank].clone()
            dy = dy_whole.split(sizes, sequence_dim)[rank]
        x_whole.requires_grad_()
        x.requires_grad_()
        y_whole, y = whole(x_whole), model(x)
        y_whole.backward(dy_whole)
        y.backward(dy)
        assert x_whole.grad is not None
        expected = [y_whole.detach(), x_whole.grad]
        if sequence_dim is not None:
            expected = [e.split(sizes, sequence_dim)[rank] for e in expected]
        torch.testing.assert_close(y, expected[0])
        torch.testing.assert_close(x.grad, expected[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value)
    # A one-process model takes the state, and the ranks take a one-process model's.
    pair(shape[-1], ffn, bias).double().load_state_dict(state)
    again = parallel(pair(shape[-1], ffn, bias).double(), sequence_dim)
    again.load_state_dict(whole.state_dict())
    for mine, other in zip(again.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["host", "generic"])
def test_selective_checkpoints_of_matmuls(engine: weft.settings.Engine) -> None:
    """What a policy keeps of the forward is as it was when the backward asks for it."""
    up = weft.ColumnParallelLinear(32, 256, sequence_dim=0)
    down = weft.RowParallelLinear(256, 32, sequence_dim=0)
    # Chunks long enough to be multiplied in place, and products too small for oneDNN.
    x = torch.randn(300, 32, requires_grad=True)
    leaves = x, *up.parameters(), *down.parameters()
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def block(x: torch.Tensor) -> Any:
        return down(up(x).relu())

    with weft.engine(engine):
        expected = torch.autograd.grad(block(x).square().sum(), leaves)
        contexts = partial(create_selective_checkpoint_contexts, kept)
        y = recompute(block, x, use_reentrant=False, context_fn=contexts)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), leaves), expected)


@pytest.mark.ranks(3)
def test_merged_layers_are_cut_one_by_one() -> None:
    """Q, K and V in one column-parallel layer; values and gates side by side into a row-parallel
    one: every rank has its part of each, and saves and loads the whole."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    qkv, mix = nn.Linear(6, 15).double(), nn.Linear(9, 6).double()
    shapes = [7, 4, 4], [4, 5]
    column = weft.ColumnParallelLinear.from_linear(qkv, sequence_dim=None, merged_sizes=shapes[0])
    row = weft.RowParallelLinear.from_linear(mix, sequence_dim=None, merged_sizes=shapes[1])
    assert "merged_sizes=(7, 4, 4)" in repr(column)

    def mine(whole: torch.Tensor, layers: list[int]) -> torch.Tensor:
        parts = whole.split(layers, -1)
        return torch.cat(
            [p.split(chunk_sizes(p.shape[-1], world_size), -1)[rank] for p in parts], -1
        )

    x, z = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 9, dtype=torch.float64)
    torch.testing.assert_close(column(x), mine(qkv(x), shapes[0]))
    # Gathered, for a loss that all ranks have: its gradients are not added up over them.
    head = weft.ColumnParallelLinear.from_linear(
        qkv, sequence_dim=None, merged_sizes=shapes[0], gather_output=True
    )
    x_mine = x.clone().requires_grad_()
    x.requires_grad_()
    for layer, given in ((head, x_mine), (qkv, x)):
        loss = layer(given).sin().square().sum()
        (dx,) = torch.autograd.grad(loss, given, create_graph=True)
        (loss + dx.square().sum()).backward()
    torch.testing.assert_close(x_mine.grad, x.grad)
    assert qkv.weight.grad is not None
    torch.testing.assert_close(head.weight.grad, mine(qkv.weight.grad.mT, shapes[0]).mT)
    y = row(mine(z, shapes[1]))
    torch.testing.assert_close(y, mix(z))
    y.square().sum().backward()
    mix(z).square().sum().backward()
    torch.testing.assert_close(row.weight.grad, mine(mix.weight.grad, shapes[1]))
    torch.testing.assert_close(row.bias.grad, mix.bias.grad)
    for whole, part in ((qkv, column), (mix, row)):
        state = part.state_dict()
        torch.testing.assert_close(state, whole.state_dict())
        wholes = {name: torch.randn_like(value) for name, value in state.items()}
        part.load_state_dict(wholes)
        torch.testing.assert_close(part.state_dict(), wholes)
    with pytest.raises(TypeError, match=r"RowParallelLinear.*'gather_output'"):
        weft.RowParallelLinear(6, 15, gather_output=True, sequence_dim=0)
    for layers in ([7, 4], [-1, 16], []):
        with pytest.raises(ValueError, match="merged_sizes must add up to the 15 features"):
            weft.ColumnParallelLinear(6, 15, merged_sizes=layers, sequence_dim=0)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_rows_of_an_input_that_every_rank_has_whole(sequence_dim: int | None) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    whole = nn.Linear(10, 6).double()
    cut: dict[str, Any] = {"merged_sizes": (7, 3), "sequence_dim": sequence_dim}
    layer = weft.RowParallelLinear.from_linear(whole, input_is_parallel=False, **cut)
    x = torch.randn(5, 10, dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = layer(ours), whole(theirs)
    mine = (lambda t: t) if sequence_dim is None else (lambda t: t.chunk(world_size)[rank])
    torch.testing.assert_close(y, mine(expected))
    y.sin().sum().backward()
    expected.sin().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    with pytest.raises(ValueError, match="takes all 10 features"):
        layer(layer.split.own(x, -1, rank))
    with pytest.raises(TypeError, match=r"ColumnParallelLinear.*'input_is_parallel'"):
        weft.ColumnParallelLinear(6, 15, input_is_parallel=False, sequence_dim=0)


@pytest.mark.ranks(3)
def test_layers_are_saved_in_shards(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shards(layer: Any) -> dict[str, Any]:
        placements = {name: [Shard(dim)] for name, dim in layer.cut.items()}
        return {
            name: DTensor.from_local(value.detach(), mesh, placements.get(name))
            for name, value in layer.named_parameters()
        }

    for kind in (weft.ColumnParallelLinear, weft.RowParallelLinear):
        layer, other = (kind(10, 7, sequence_dim=0) for _ in range(2))
        whole = nn.Linear(10, 7)
        checkpoint.save(shards(layer), tmp_path)
        checkpoint.load(shards(other), tmp_path)
        torch.testing.assert_close(other.state_dict(), layer.state_dict())
        state = whole.state_dict()
        checkpoint.load(state, tmp_path)
        torch.testing.assert_close(state, layer.state_dict())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_fewer_key_heads_than_ranks(sequence_dim: int | None) -> None:
    """4 query heads on 2 key heads of 3 features, over 4 ranks: two have each key head."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    qkv = nn.Linear(6, 24).double()
    layers, copies = (12, 6, 6), (1, 2, 2)
    cut: dict[str, Any] = {"merged_sizes": layers, "copies": copies, "sequence_dim": sequence_dim}
    module = weft.ColumnParallelLinear.from_linear(qkv, **cut)
    gathered = weft.ColumnParallelLinear.from_linear(qkv, gather_output=True, **cut)
    assert "copies=(1, 2, 2)" in repr(module) and module.weight.shape == (9, 6)
    torch.testing.assert_close(module.state_dict(), qkv.state_dict())
    wholes = {name: torch.randn_like(value) for name, value in qkv.state_dict().items()}
    for layer in (qkv, module, gathered):
        layer.load_state_dict(wholes)
    torch.testing.assert_close(module.state_dict(), wholes)

    def mine(whole: torch.Tensor) -> torch.Tensor:
        q, k, v = whole.split(layers, -1)
        return torch.cat([q.chunk(4, -1)[rank], *(x.chunk(2, -1)[rank // 2] for x in (k, v))], -1)

    x = torch.randn(8, 6, dtype=torch.float64)
    shard = (x if sequence_dim is None else x.chunk(world_size)[rank]).clone().requires_grad_()
    x.requires_grad_()
    whole = qkv(x)
    torch.testing.assert_close(module(shard), mine(whole))
    # A loss that every rank has a part of: what its own query heads, and its copies, give.
    factors = torch.randn(4, 8, 9, dtype=torch.float64)
    q, k, v = whole.split(layers, -1)
    total = torch.zeros((), dtype=torch.float64)
    for r in range(world_size):
        parts = q.chunk(4, -1)[r], k.chunk(2, -1)[r // 2], v.chunk(2, -1)[r // 2]
        total = total + (factors[r] * torch.cat(parts, -1).sin()).sum()
    total.backward()
    (factors[rank] * module(shard).sin()).sum().backward()
    expected = x.grad if sequence_dim is None else x.grad.chunk(world_size)[rank]
    torch.testing.assert_close(shard.grad, expected)
    torch.testing.assert_close(module.weight.grad, mine(qkv.weight.grad.mT).mT)
    torch.testing.assert_close(module.bias.grad, mine(qkv.bias.grad))
    # Gathered, it is one value with one gradient, and so may be differentiated again.
    qkv.zero_grad()
    x_all, grads = x.detach().clone().requires_grad_(), []
    for layer, at in ((qkv, x_all), (gathered, shard.detach().clone().requires_grad_())):
        y = layer(at)
        torch.testing.assert_close(y, whole)
        loss = y.sin().square().sum()
        if sequence_dim is None:
            (dx,) = torch.autograd.grad(loss, at, create_graph=True)
            loss = loss + dx.square().sum()
        loss.backward()
        grads.append(at.grad)
    torch.testing.assert_close(gathered.weight.grad, mine(qkv.weight.grad.mT).mT)
    torch.testing.assert_close(gathered.bias.grad, mine(qkv.bias.grad))
    ours = grads[0] if sequence_dim is None else grads[0].chunk(world_size)[rank]
    torch.testing.assert_close(grads[1], ours)
    for wrong in ((1, 2), (1, 3, 1), (1, 0, 1)):
        with pytest.raises(ValueError, match="copies must hold, for each of 3 merged layers"):
            weft.ColumnParallelLinear(
                6, 24, merged_sizes=layers, copies=wrong, sequence_dim=sequence_dim
            )
    with pytest.raises(TypeError, match=r"RowParallelLinear.*'copies'"):
        weft.RowParallelLinear(24, 6, copies=(2,), sequence_dim=sequence_dim)


@pytest.mark.ranks(2)
def test_merged_layers_compiled() -> None:
    """Compiled before they have run: outputs that are gathered, and parts on several ranks."""
    x = torch.randn(3, 6)
    for options in ({"gather_output": True}, {"copies": (1, dist.get_world_size())}):
        layer = weft.ColumnParallelLinear(6, 8, sequence_dim=None, merged_sizes=(6, 2), **options)
        found = []
        for run in (torch.compile(layer, backend="aot_eager", fullgraph=True), layer):
            y = run(x)
            found.append([y, *torch.autograd.grad(y.square().sum(), [layer.weight, layer.bias])])
        torch.testing.assert_close(*found)


def fp8_body(sequence_dim: int | None) -> None:
    """fp8 weights, scaled by feature, are near the layers of origin; saved and loaded whole."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = pair(32, 48, bias=True)
    model = parallel(whole, sequence_dim)
    for layer in (model[0], model[2]):
        assert layer.quantize() is layer and "fp8" in repr(layer)
        with pytest.raises(RuntimeError, match="already quantized"):
            layer.quantize()
    state = model.state_dict()
    for name in ("0.", "2."):
        weight, scale = state[f"{name}weight"], state[f"{name}weight_scale"]
        assert weight.dtype == torch.float8_e4m3fn and scale.shape == (len(weight), 1)
        given = whole.state_dict()[f"{name}weight"]
        assert (weight.float().abs().amax(1) == 448).all()
        torch.testing.assert_close(weight.float() * scale, given, rtol=2**-4, atol=1e-3)
    x = torch.randn(12, 32, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    x = x.to(torch.get_default_device())
    shard = x if sequence_dim is None else x.chunk(world_size)[rank]
    expected = whole(x) if sequence_dim is None else whole(x).chunk(world_size)[rank]
    with torch.no_grad():
        y = model(shard)
        assert (y - expected).norm() < 0.05 * expected.norm()
        # A checkpoint of whole layers, with a factor for each feature or for all.
        again = parallel(pair(32, 48, bias=True), sequence_dim)
        for layer in (again[0], again[2]):
            layer.quantize()
        again.load_state_dict(state)
        assert torch.equal(again(shard), y)
        for shape in ((), (1,)):
            state["2.weight_scale"] = torch.full(shape, 0.5)
            again.load_state_dict(state)
            assert (again[2].weight_scale == 0.5).all()
    with pytest.raises(NotImplementedError, match="has no gradient"):
        model(shard.clone().requires_grad_())
    with pytest.raises(RuntimeError, match=r"weight_scale: call quantize\(\) first"):
        parallel(whole, sequence_dim).load_state_dict(state, strict=False)
    merged = weft.ColumnParallelLinear(32, 12, False, sequence_dim=None, merged_sizes=(8, 4))
    weight = torch.zeros(12, 32, dtype=torch.float8_e4m3fn)
    merged.quantize().load_state_dict({"weight": weight, "weight_scale": torch.tensor([2.0, 3.0])})
    counts = torch.tensor(merged.output_sizes)
    wanted = torch.tensor([2.0, 3.0]).repeat_interleave(counts).unsqueeze(1)
    assert torch.equal(merged.weight_scale, wanted)
    # As many features as layers: their own factors.
    merged = weft.ColumnParallelLinear(32, 3, sequence_dim=None, merged_sizes=(3, 0, 0))
    state = merged.quantize().state_dict() | {"weight_scale": torch.tensor([[2.0], [3.0], [4.0]])}
    merged.load_state_dict(state)
    assert torch.equal(merged.state_dict()["weight_scale"], state["weight_scale"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_quantized_layers(sequence_dim: int | None) -> None:
    fp8_body(sequence_dim)


@pytest.mark.ranks(2)
def test_loading() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for kind in (weft.ColumnParallelLinear, weft.RowParallelLinear):
        whole = nn.Linear(12, 8)
        layer = kind(12, 8, device="meta", sequence_dim=None)
        layer.load_state_dict(whole.state_dict(), assign=True)
        assert layer.weight.is_contiguous()
        assert layer.weight.untyped_storage().nbytes() == layer.weight.nbytes  # not of the whole
        assert torch.equal(layer.weight, layer.part("weight", whole.weight))
        own = tuple(layer.weight.shape)
        wrong = (
            rf"weight must be whole, \(8, 12\), or the part of rank {rank}, \({own[0]}, {own[1]}\)"
        )
        with pytest.raises(RuntimeError, match=wrong):
            layer.load_state_dict({"weight": torch.zeros(7, 12), "bias": whole.bias})
    part = 12 // world_size
    with pytest.raises(ValueError, match=rf"this rank's {part} of the 12 features.* got \(3, 12\)"):
        layer(torch.zeros(3, 12))


class _Packed(nn.Linear):
    """As libraries of quantized weights leave an nn.Linear."""

    def __init__(self) -> None:
        super().__init__(6, 8)
        self.weight = nn.Parameter(torch.zeros(24, 1, dtype=torch.uint8), requires_grad=False)


def test_what_is_no_plain_linear_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes an nn\.Linear, got Embedding"):
        weft.ColumnParallelLinear.from_linear(nn.Embedding(4, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a plain weight \(8, 6\) .* \(24, 1\) of torch.uint8"):
        weft.RowParallelLinear.from_linear(_Packed())


@pytest.mark.ranks(2)
def test_a_part_that_torch_has_replaced_is_not_saved_as_the_whole() -> None:
    model = parallel(pair(4, 6, bias=True), None)
    model[0].register_buffer("seen", torch.ones(2))
    whole = model.state_dict()
    assert list(whole) == ["0.weight", "0.bias", "0.seen", "2.weight", "2.bias"]
    prune.l1_unstructured(model[0], "weight", 2)
    with pytest.raises(RuntimeError, match=r"0\.weight is no parameter any more"):
        model.state_dict()
    prune.remove(model[0], "weight")
    parametrizations.weight_norm(model[2])
    with pytest.raises(RuntimeError, match=r"2\.weight is no parameter any more"):
        model.state_dict()
    parametrize.remove_parametrizations(model[2], "weight")
    assert model.state_dict()["2.weight"].shape == (4, 6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_dim", [0, None])
def test_transforms_of_torch_func_are_refused(sequence_dim: int | None) -> None:
    model, x = parallel(pair(4, 6, bias=True), sequence_dim), torch.ones(2, 4)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    for layer, given in ((model[0], x), (model[2], model[0](x).detach())):
        with pytest.raises(NotImplementedError, match=r"not by torch\.func"):
            torch.func.vjp(layer, given)
    with pytest.raises(NotImplementedError, match=r"not by torch\.func"):
        torch.func.grad(lambda w: torch.func.functional_call(model, w, x).sum())(weights)


@pytest.mark.ranks(2)
def test_constructor_draws_what_nn_linear_draws() -> None:
    rank = dist.get_rank()
    torch.manual_seed(3)
    whole = nn.Linear(6, 9)
    torch.manual_seed(3)
    module = weft.ColumnParallelLinear(6, 9, sequence_dim=0)
    sizes = chunk_sizes(9, dist.get_world_size())
    assert torch.equal(module.weight, whole.weight.split(sizes)[rank])
    torch.manual_seed(3)
    with torch.device("meta"):
        later = weft.ColumnParallelLinear(6, 9, sequence_dim=0)
    shapes = {name: value.shape for name, value in whole.state_dict().items()}
    assert {name: value.shape for name, value in later.state_dict().items()} == shapes
    later.to_empty(device="cpu").reset_parameters()
    assert torch.equal(later.weight, module.weight) and torch.equal(later.bias, module.bias)
    again = copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    x = torch.ones(1, 6)
    for other in (again, torch.load(file, weights_only=False)):
        assert other.group is module.group and other.weight is not module.weight
        assert torch.equal(other(x), module(x))
    assert "sequence_dim=0" in repr(module) and f"rank {rank} of" in repr(module)
    torch.manual_seed(3)
    row = weft.RowParallelLinear(6, 9, bias=False, dtype=torch.bfloat16, sequence_dim=0)
    assert row.bias is None and row.weight.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({"weight": torch.zeros(4, 4), "bias": torch.zeros(9)})
    with pytest.raises(ValueError, match=r"w must be \(K, N\) with K = 5"):
        module(torch.ones(2, 5))
