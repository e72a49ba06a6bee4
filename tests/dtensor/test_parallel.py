"""The parallel styles against the same module in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dtensors import full_of, world
from torch import Tensor, nn

from weft.collectives import chunk_sizes
from weft.dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from weft.dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def close(actual: Tensor, expected: Tensor, name: str = "") -> None:
    """Equal but for the order of summation, over at most some dozens of terms in float64."""
    torch.testing.assert_close(
        actual, expected, rtol=1e-11, atol=1e-12, msg=lambda text: f"{name}: {text}"
    )


class MLP(nn.Module):
    """Norm, then a column-parallel linear, then a row-parallel one."""

    def __init__(self, features: int = 12, hidden: int = 20, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(features)
        self.up = nn.Linear(features, hidden, bias=bias)
        self.down = nn.Linear(hidden, features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.nn.functional.silu(self.up(self.norm(x))))
        return out


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(2))
        self.other = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.other(x)
        return out


def placements(tensor: Any) -> Any:
    return tensor.placements


def seeded(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A module in float64 with parameters that no symmetry hides, and a copy of it."""
    torch.manual_seed(7)
    module = build().double()
    with torch.no_grad():
        for param in module.parameters():
            param.normal_()
    return module, copy.deepcopy(module)


def compare(plain: nn.Module, parallel: nn.Module, inputs: Tensor, x: Tensor) -> None:
    """Both modules' outputs, input gradients and parameter gradients agree.

    `inputs` is the plain module's input, `x` the parallel one's: a DTensor, or the same tensor.
    """
    reference = plain(inputs)
    weight = torch.linspace(-1, 1, reference.numel(), dtype=reference.dtype).view_as(reference)
    (reference * weight).sum().backward()

    out = parallel(x)
    if isinstance(out, DTensor):
        weight = distribute_tensor(weight, out.device_mesh, out.placements, src_data_rank=None)
        close(out.full_tensor(), reference)
    else:
        close(out, reference)
    full_of((out * weight).sum()).backward()

    if inputs.is_floating_point():
        close(full_of(x.grad), full_of(inputs.grad))
    for (name, ours), theirs in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        close(full_of(ours.grad), full_of(theirs.grad), f"gradient of {name}")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "seq_len", "bias", "as_dtensor"),
    [
        *((2, 8, bias, as_dtensor) for bias in (False, True) for as_dtensor in (False, True)),
        *((W, uneven, True, True) for W, uneven in ((2, 7), (3, 8), (3, 2), (4, 5))),
    ],
)
def test_sequence_parallel_mlp_is_the_plain_one(
    world_size: int, seq_len: int, bias: bool, as_dtensor: bool
) -> None:
    mesh = world()
    plain, parallel = seeded(lambda: MLP(bias=bias))
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=not as_dtensor),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(parallel, mesh, plan)
    inputs = torch.randn(2, seq_len, 12, dtype=torch.float64, requires_grad=True)
    x = distribute_tensor(inputs.detach(), mesh, [Shard(1)]).requires_grad_()
    compare(plain, parallel, inputs, x)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size, seq_len", [(2, 7), (3, 4)])
def test_plain_shards_of_different_lengths(world_size: int, seq_len: int) -> None:
    """Plain local tensors of different lengths are taken for what they are, or refused."""
    mesh = world()
    rank = mesh.get_local_rank()
    plain, parallel = seeded(MLP)
    parallelize_module(
        parallel,
        mesh,
        {
            "norm": SequenceParallel(use_local_output=True),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )
    inputs = torch.randn(2, seq_len, 12, dtype=torch.float64)
    sizes = chunk_sizes(seq_len, world_size)
    out = parallel(inputs.split(sizes, 1)[rank])
    close(out, plain(inputs).split(sizes, 1)[rank])
    with pytest.raises(ValueError, match=r"lengths .* must be those of torch\.chunk"):
        parallel(torch.ones(2, 1 + rank, 12, dtype=torch.float64))


@pytest.mark.ranks(2)
def test_default_layouts_take_and_return_plain_replicas() -> None:
    mesh = world()
    plain, parallel = seeded(MLP)
    parallelize_module(parallel, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    inputs = torch.randn(3, 5, 12, dtype=torch.float64, requires_grad=True)
    compare(plain, parallel, inputs, inputs.detach().clone().requires_grad_())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("vocabulary", [10, 11])
@pytest.mark.parametrize(
    "style",
    [
        RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        ColwiseParallel(use_local_output=False),
        ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
    ],
    ids=["row", "row to sequence", "column", "column to replicas"],
)
def test_embedding(style: ParallelStyle, vocabulary: int) -> None:
    mesh = world()
    plain, parallel = seeded(lambda: nn.Embedding(vocabulary, 6))
    parallelize_module(parallel, mesh, style)
    tokens = torch.randint(vocabulary, (2, 9))
    compare(plain, parallel, tokens, tokens)


# Each style's local shape of outputs, and their placements if they are DTensors.
OUTPUTS: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "column": (ColwiseParallel(), (2, 8, 3), None),
    "column from sequence": (ColwiseParallel(input_layouts=Shard(1)), (2, 8, 3), None),
    "column from sequence, dtensor": (
        ColwiseParallel(input_layouts=Shard(1), use_local_output=False), (2, 8, 3), (Shard(2),)
    ),
    "column from features": (ColwiseParallel(input_layouts=Shard(-1)), (2, 8, 3), None),
    "column to replicas": (ColwiseParallel(output_layouts=Replicate()), (2, 8, 6), None),
    "row": (RowwiseParallel(), (2, 8, 6), None),
    "row from replicas": (RowwiseParallel(input_layouts=Replicate()), (2, 8, 6), None),
    "row to sequence": (RowwiseParallel(output_layouts=Shard(1)), (2, 4, 6), None),
    "row to sequence, dtensor": (
        RowwiseParallel(output_layouts=Shard(1), use_local_output=False), (2, 4, 6), (Shard(1),)
    ),
}  # fmt: skip


@pytest.mark.ranks(2)
def test_each_style_reads_and_returns_the_layouts_it_says() -> None:
    mesh = world()
    for name, (style, shape, wanted) in OUTPUTS.items():
        plain, parallel = seeded(lambda: nn.Linear(4, 6))
        parallelize_module(parallel, mesh, style)
        x = torch.arange(2 * 8 * 4.0, dtype=torch.float64).view(2, 8, 4)
        out = parallel(distribute_tensor(x, mesh, style.input_layouts).to_local())
        assert (out.placements if isinstance(out, DTensor) else None) == wanted, name
        expected = distribute_tensor(plain(x).detach(), mesh, style.output_layouts).to_local()
        local = out.to_local() if isinstance(out, DTensor) else out
        assert local.shape == shape, name
        close(local, expected)


@pytest.mark.ranks(2)
def test_wildcards_nested_plans_and_the_module_itself() -> None:
    mesh = world()
    plain, parallel = seeded(Stack)
    plan = {
        "layers.*.norm": SequenceParallel(),
        "layers.*.u?": ColwiseParallel(input_layouts=Shard(1)),
        "layers.[01]": {"down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)},
        "other": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        parallelize_module(parallel, mesh, plan)
    inputs = torch.randn(2, 6, 12, dtype=torch.float64, requires_grad=True)
    compare(plain, parallel, inputs, inputs.detach().clone().requires_grad_())
    found = {name: placements(param) for name, param in parallel.named_parameters()}
    for layer in (0, 1):
        assert found[f"layers.{layer}.norm.weight"] == (Replicate(),)
        assert found[f"layers.{layer}.up.weight"] == (Shard(0),)
        assert found[f"layers.{layer}.up.bias"] == (Shard(0),)
        assert found[f"layers.{layer}.down.weight"] == (Shard(1),)
        assert found[f"layers.{layer}.down.bias"] == (Replicate(),)
    assert found["other.weight"] == (Shard(0),)


class TwoInputs(nn.Module):
    def forward(self, x: Any, scale: float, *, y: Any = None) -> Any:
        self.seen = (x, y)
        return x * scale, y


@pytest.mark.ranks(2)
def test_prepared_inputs_and_outputs() -> None:
    mesh = world()
    rank = mesh.get_local_rank()
    x, y = torch.arange(8.0).view(2, 4), torch.arange(6.0).view(2, 3)

    module = TwoInputs()
    style = PrepareModuleInputOutput(
        input_layouts=(Replicate(), None),
        desired_input_layouts=(Shard(1), None),
        input_kwarg_layouts={"y": Shard(0)},
        desired_input_kwarg_layouts={"y": Replicate()},
        use_local_input=True,
        output_layouts=(Shard(1), None),
        desired_output_layouts=(Replicate(), None),
    )
    parallelize_module(module, mesh, style)
    out, untouched = module(x, 2.0, y=y[rank : rank + 1])
    assert not isinstance(module.seen[0], DTensor)
    torch.testing.assert_close(module.seen[0], x[:, 2 * rank : 2 * rank + 2])
    torch.testing.assert_close(untouched, y)
    torch.testing.assert_close(out, 2 * x)

    module = TwoInputs()
    parallelize_module(
        module,
        mesh,
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Shard(1), None)),
    )
    out, _ = module(x[rank : rank + 1], 2.0)
    assert isinstance(out, DTensor)
    assert out.placements == (Shard(1),)
    torch.testing.assert_close(out.full_tensor(), 2 * x)

    identity = nn.Identity()
    style_out = PrepareModuleOutput(
        output_layouts=Partial(), desired_output_layouts=Shard(0), use_local_output=False
    )
    parallelize_module(identity, mesh, style_out)
    out = identity(x)
    assert out.placements == (Shard(0),)
    torch.testing.assert_close(out.full_tensor(), mesh.size() * x)


@pytest.mark.ranks(2)
def test_src_data_rank_none_keeps_each_ranks_own_numbers() -> None:
    mesh = world()
    rank = mesh.get_local_rank()
    linear: Any = nn.Linear(2, 4, bias=False).requires_grad_(False)
    nn.init.constant_(linear.weight, rank)
    parallelize_module(linear, mesh, ColwiseParallel(), src_data_rank=None)
    assert (linear.weight.to_local() == rank).all() and not linear.weight.requires_grad


@pytest.mark.ranks(2)
def test_optimizer_steps_are_the_plain_ones() -> None:
    """Three steps of AdamW with clipping move both modules alike."""
    mesh = world()
    plain, parallel = seeded(MLP)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(parallel, mesh, plan)
    inputs = torch.randn(2, 6, 12, dtype=torch.float64)
    x = distribute_tensor(inputs, mesh, [Shard(1)])
    for module, given in ((plain, inputs), (parallel, x)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            full_of(module(given).square().mean()).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
    for (name, ours), theirs in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        close(full_of(ours.detach()), theirs.detach(), name)


class Tied(nn.Module):
    """Tokens in and out by one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 12, dtype=torch.float64)
        self.out = nn.Linear(12, 7, bias=False, dtype=torch.float64)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.embed(tokens).sin())
        return out


@pytest.mark.ranks(2)
def test_tied_parameters_stay_tied() -> None:
    mesh, plain = world(), Tied()
    tokens = torch.tensor([0, 3, 6, 3])
    plain(tokens).square().sum().backward()
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "out": ColwiseParallel()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = parallelize_module(copy.deepcopy(plain), mesh, plan)
    assert model.out.weight is model.embed.weight
    model.zero_grad()
    model(tokens).square().sum().backward()
    close(full_of(model.embed.weight.grad), plain.embed.weight.grad)
    assert distribute_module(copy.deepcopy(plain), mesh).out.weight.placements == (Replicate(),)
    with pytest.raises(ValueError, match=r"shares this parameter has it as \[S\(1\)\]"):
        parallelize_module(
            copy.deepcopy(plain), mesh, {"embed": ColwiseParallel(), "out": ColwiseParallel()}
        )
    with pytest.warns(UserWarning, match=r"out.weight of Tied is still plain, and no longer tied"):
        parallelize_module(copy.deepcopy(plain), mesh, {"embed": RowwiseParallel()})


@pytest.mark.ranks(2)
def test_misuse_is_told_before_any_communication() -> None:
    mesh = world()
    whole = nn.Linear(4, 4).state_dict()
    with pytest.raises(RuntimeError, match=r"set_model_state_dict\(model, state, options="):
        parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel()).load_state_dict(whole)
    two_d = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"1-D mesh, got 2 dims .*mesh\['tp'\]"):
        parallelize_module(linear, two_d, ColwiseParallel())
    with pytest.raises(TypeError, match=r"ParallelStyle or a mapping .* got list"):
        parallelize_module(linear, mesh, [ColwiseParallel()])  # type: ignore[arg-type] # the misuse
    with pytest.warns(UserWarning, match="no plan, and does nothing"):
        parallelize_module(linear, mesh)
    with pytest.warns(
        UserWarning, match=r"no sub-module of MLP matches the plan's 'layers\.\*\.up'"
    ):
        parallelize_module(MLP(), mesh, {"layers.*.up": ColwiseParallel()})
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(
            NotImplementedError, match=r"shards nn\.Linear and nn\.Embedding, got Conv1d"
        ):
            parallelize_module(nn.Conv1d(2, 2, 1), mesh, style)
    with pytest.raises(ValueError, match=r"input_layouts and desired_input_layouts .* same length"):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Shard(0))
    with pytest.raises(ValueError, match=r"must name the same inputs, got \['a'\] and \['b'\]"):
        PrepareModuleInput(
            input_kwarg_layouts={"a": Shard(0)}, desired_input_kwarg_layouts={"b": Shard(0)}
        )
    with pytest.raises(ValueError, match="output_layouts and desired_output_layouts"):
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=(Shard(0), None))

    module = TwoInputs()
    prepare = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    parallelize_module(module, mesh, prepare)
    with pytest.raises(ValueError, match="has 1 input_layouts, TwoInputs was called with 2"):
        module(torch.ones(2, 2), 1.0)
    identity = parallelize_module(nn.Identity(), mesh, prepare)
    with pytest.raises(
        ValueError, match="input 0 of Identity must be a tensor or a DTensor, got str"
    ):
        identity("text")
    parallelize_module(linear, mesh, ColwiseParallel())
    with pytest.raises(ValueError, match="prepares the first positional argument, and Linear"):
        linear(input=torch.ones(2, 4))
    elsewhere = DTensor.from_local(torch.ones(2, 4), two_d["dp"], [Replicate()])
    with pytest.raises(ValueError, match="the input of a ColwiseParallel Linear is on the mesh"):
        linear(elsewhere)


def test_a_style_of_torchs_kind_is_one() -> None:
    # Other packages derive theirs from torch's class: a plan may name them beside ours.
    assert ParallelStyle is torch.distributed.tensor.parallel.ParallelStyle


def test_styles_print_as_they_are_written() -> None:
    assert repr(ColwiseParallel()) == (
        "ColwiseParallel(input_layouts=(Replicate(),), output_layouts=(Shard(dim=-1),), "
        "use_local_output=True, keep_gathered=True)"
    )
    assert repr(SequenceParallel(sequence_dim=0)) == (
        "SequenceParallel(sequence_dim=0, use_local_output=False)"
    )
