"""`plan`: its prices against what runs, its search against brute force, its plans on ranks."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import plan_models as models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.collectives.cost import Machine
from weft.dtensor import DeviceMesh, Plan, init_device_mesh, plan
from weft.dtensor.debug import CommDebugMode
from weft.dtensor.plans import planning
from weft.dtensor.plans.bills import DataParallel, Option
from weft.dtensor.plans.graph import Graph, recorded
from weft.dtensor.plans.options import NodeOptions
from weft.dtensor.plans.prices import MachinePrices, prices_of
from weft.dtensor.plans.propagation import pretended_mesh
from weft.dtensor.plans.search import State, remaining, search_layouts, search_steps

X = torch.randn(4, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TOKENS = models.tokens()
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (models.mlp, X),
    "llama": (models.llama, TOKENS),
    "mixtral": (lambda: models.mixtral(layers=1), TOKENS),
    "stacked": (lambda: models.mixtral(models.StackedExperts, layers=1), TOKENS),
}


def pretended(*shape: int, device_type: str = "cpu") -> DeviceMesh:
    """A mesh of ranks that are not there."""
    names = ("dp", "tp")[-len(shape) :]
    grid = torch.arange(math.prod(shape)).view(shape)
    return pretended_mesh(device_type, grid, names)


def named(found: Plan) -> dict[str, Plan]:
    """A plan and those beside it."""
    others = {name: each for name, each in found.beside.items() if isinstance(each, Plan)}
    return {"plan": found, **others}


# ---- what is chosen


def options_of(graph: Graph, ranks: int) -> NodeOptions:
    prices = prices_of("h100", pretended(ranks))
    return NodeOptions(graph, ranks, prices, "cpu", DataParallel(), gather_output=True)


def combinations(options: NodeOptions) -> Iterator[tuple[float, float]]:
    """Time and memory of every combination of options, none left out."""
    nodes = options.graph.nodes

    def rest(i: int, alive: tuple[int, ...], state: State, us: float, held: float) -> Any:
        if i == len(nodes):
            yield us, held
            return
        later = remaining(options.graph, alive, nodes[i])
        for option, end in search_steps(options, nodes[i], alive, state, later):
            yield from rest(i + 1, later, end, us + option.us, held + option.nbytes)

    return rest(0, (), (), 0.0, 0.0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_search_is_exact(ranks: int) -> None:
    """The quickest, and the quickest within any memory, of thousands of combinations."""
    graph = recorded(nn.Sequential(models.mlp(), models.mlp()), (X,))
    options = options_of(graph, ranks)
    every = list(combinations(options))
    found = search_layouts(options)
    assert len(every) > 1000 or ranks == 1
    for limit in sorted({held for _, held in every}):
        best = min(us for us, held in every if held <= limit)
        assert min(e.us for e in found if e.nbytes <= limit) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(4,), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_no_plan_by_hand_is_better(name: str, shape: tuple[int, ...]) -> None:
    make, x = MODELS[name]
    found = plan(make(), pretended(*shape), torch.cat([x, x]), hardware="h100")
    others = [each for each in found.beside.values() if isinstance(each, Plan)]
    assert len(others) >= (3 if name != "stacked" else 2)
    assert found.step_us <= min(each.step_us for each in others)


def test_plans_by_hand_are_those_of_the_field() -> None:
    """By Megatron, the demo's own; by torch, replicas between the linears."""
    found = plan(models.llama(4), pretended(4), TOKENS, hardware="h100")
    megatron, default = found.beside["Megatron"], found.beside["torch default"]
    assert isinstance(megatron, Plan) and isinstance(default, Plan)
    ways = {f"blocks.*.{name}" for name in ("attention.wqkv", "attention.wo", "ffn.w13", "ffn.w2")}
    for each in (megatron, default):
        assert ways | {"embedding", "head", ""} == each.styles.keys()
        assert each.placements["blocks.3.attention.wo.weight"].is_shard(1)
        assert each.placements["blocks.0.ffn.w13.weight"].is_shard(0)
    assert megatron.placements["blocks.1"].is_shard(1)
    assert default.placements["blocks.1"].is_replicate()


@pytest.mark.parametrize(
    ("rates", "cut"),
    [
        ({}, True),
        ({"op_us": 2000.0}, False),  # of ops on DTensors there are many
        ({"meet_us": 5000.0}, False),  # and of ops in which ranks wait for each other
        ({"op_us": 200.0, "wire": 0.1}, True),  # FSDP and replicas move by the process group
    ],
)
def test_cpu_ranks_cut_layers_unless_the_host_takes_longer(
    rates: dict[str, float], cut: bool
) -> None:
    machine = Machine({"torch.float32": 1e2}, copy=1e4, sync_us=10.0, wire=1e3, wire_us=200.0)
    wire = {"wire": rates["wire"]} if "wire" in rates else {}
    host = {name: us for name, us in rates.items() if name != "wire"}
    prices = MachinePrices(dataclasses.replace(machine, **wire), "cpu", **host)
    model = models.llama(2, torch.float32)
    found = plan(model, pretended(2), TOKENS, hardware=prices)
    assert (max(found.model_dims, default=1) > 1) == cut, str(found)


def test_gloos_reduce_scatter_is_its_all_reduce() -> None:
    machine = Machine({"torch.float32": 1e2}, copy=1e4, sync_us=10.0, wire=1e3, wire_us=200.0)
    for sums in (0.0, 4e3):
        prices = MachinePrices(machine, "cpu", sum_rate=sums)
        gathered, reduced, scattered = (
            prices.group_us(op, 1 << 20, 4) for op in ("all_gather", "all_reduce", "reduce_scatter")
        )
        assert reduced == scattered != gathered


@pytest.mark.sweep
def test_less_memory_takes_more_time() -> None:
    model, mesh = models.llama(4), pretended(2, 2)
    free = plan(model, mesh, TOKENS, hardware="h100")
    with pytest.raises(ValueError, match=r"no layout .* fits 1 kB a rank: the least is") as error:
        plan(model, mesh, TOKENS, hardware="h100", memory=1000)
    least = int(str(error.value).split("memory=")[1].split(",")[0])
    times = []
    for memory in torch.linspace(least, free.memory_bytes, 9).ceil().tolist():
        found = plan(model, mesh, TOKENS, hardware="h100", memory=memory + 1)
        assert found.memory_bytes <= memory + 1
        times.append(found.step_us)
    assert times == sorted(times, reverse=True) and times[0] > times[-1] == free.step_us


def test_equal_layers_are_solved_once() -> None:
    few, many = (recorded(models.llama(n), (TOKENS,)) for n in (3, 5))
    kinds = [{segment.signature for segment in graph.segments} for graph in (few, many)]
    assert len(kinds[0]) == len(kinds[1]) and len(many.segments) == len(few.segments) + 2 * 2


def test_units_of_memory() -> None:
    for text, count in (("80GB", 80e9), ("1.5 GiB", 1.5 * 2**30), ("7", 7), ("2kb", 2000)):
        assert planning.bytes_of(text) == count
    assert planning.bytes_of(None) is None and planning.bytes_of(5.0) == 5
    with pytest.raises(ValueError, match=r'memory is in bytes, or as "80GB"'):
        planning.bytes_of("a lot")
    for none in ("0GB", "-1GB", "nan", 0.0):
        with pytest.raises(ValueError, match="memory must be above 0, got"):
            planning.bytes_of(none)


def test_misuse() -> None:
    mesh = pretended(2)
    with pytest.raises(ValueError, match=r"hardware must be one of .*'h100'"):
        plan(models.mlp(), mesh, X, hardware="z80")

    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(NotImplementedError, match=r"cannot record Branching on these arguments"):
        plan(Branching(8, 8), mesh, torch.ones(2, 8), hardware="h100")
    with pytest.raises(NotImplementedError, match=r"cannot record Linear .*[^.]\. Where shapes"):
        plan(nn.Linear(4, 8), mesh, torch.ones(2, 8), hardware="h100")

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.again(self.again(x))
            return y

    with pytest.raises(NotImplementedError, match=r"again is called twice"):
        plan(Twice(), mesh, torch.ones(2, 8), hardware="h100")
    found = plan(models.mlp(), mesh, X, hardware="h100")
    with pytest.raises(ValueError, match=r"needs a mesh whose ranks can communicate"):
        found.apply(models.mlp())


# ---- what is done


def several_plans(model: nn.Module, mesh: DeviceMesh, x: Tensor) -> dict[str, Plan]:
    """The plan, those by hand, and some that nobody would make, so that all options run."""
    found = named(plan(model, mesh, x, hardware="h100"))
    drawn = random.Random(0)
    for split in planning._splits(model, mesh, (x,), prices_of("h100", mesh), True):
        if split.options.ranks > 1:
            ways = drawn.sample(ways := split.ways(), min(2, len(ways)))
            found |= {f"way {i}": way.plan(mesh, None) for i, way in enumerate(ways)}
            found["odd"] = _drawn(split, drawn).plan(mesh, None)
    return found


def _drawn(split: Any, drawn: random.Random) -> Any:
    """A plan of options that are drawn, not chosen."""
    from weft.dtensor.plans.search import Label, Trail

    options, nodes = split.options, split.options.graph.nodes
    while True:
        alive: tuple[int, ...] = ()
        state: State = ()
        taken: list[Option] = []
        for node in nodes:
            later = remaining(options.graph, alive, node)
            ways = list(search_steps(options, node, alive, state, later))
            if not ways:
                break
            option, state = drawn.choice(ways)
            taken.append(option)
            alive = later
        else:
            return planning._LaidOut(split, Label(1.0, 1.0, 1.0, Trail(None, tuple(taken))))


_AS_COLLECTIVE = {
    "all_gather_matmul": "all_gather", "matmul_reduce_scatter": "reduce_scatter",
    "matmul_all_reduce": "all_reduce", "ring_attention": "all_gather",
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}  # fmt: skip


def predicted(found: Plan) -> Counter[str]:
    """The collectives of forward."""
    ops = [op for row in found.rows for op in itertools.takewhile("|".__ne__, row.ops)]
    return in_halves(Counter(_AS_COLLECTIVE.get(op, op) for op in ops))


def counted(comm: CommDebugMode) -> Counter[str]:
    found = Counter[str]()
    for op, count in comm.get_comm_counts().items():
        name = str(op).split(".")[-1]
        found[_AS_COLLECTIVE.get(name, name)] += count
    return in_halves(found)


def in_halves(counts: Counter[str]) -> Counter[str]:
    """With an all-reduce as a reduce-scatter and an all-gather, which large sums are."""
    sums = counts.pop("all_reduce", 0)
    return +(counts + Counter(all_gather=sums, reduce_scatter=sums))


def check(found: Plan, model: nn.Module, x: Tensor, name: str) -> None:
    """Results, gradients and collectives of a plan on this rank against one process's."""
    rank, inner = dist.get_rank(), math.prod(found.model_dims)
    parts = math.prod(found.data_dims)
    expected = model(x)
    dy = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    grads = torch.autograd.grad(expected, list(model.parameters()), dy)
    own, own_dy, own_expected = (t.chunk(parts)[rank // inner] for t in (x, dy, expected))
    made = found.apply(copy.deepcopy(model))
    with CommDebugMode() as comm:
        y = made(own)
    assert type(y) is Tensor
    torch.testing.assert_close(y, own_expected, rtol=1e-10, atol=1e-11, msg=f"{name}: {found}")
    if found.styles and parts == 1 and not name.startswith(("mixtral", "stacked")):
        # Of an index that is cut, ranks agree on whether it was out of range; routing has several.
        agreed = x.dtype == torch.int64 and found.rows[0].placement.is_shard()
        ran, told = counted(comm), predicted(found) + in_halves(Counter(all_reduce=int(agreed)))
        assert ran == told, f"{name}: {ran} instead of {told} in {found}"
    y.backward(own_dy)
    for (key, parameter), wanted in zip(made.named_parameters(), grads, strict=True):
        grad: Any = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        # Data-parallel gradients are averages over the parts of the batch.
        where = f"{name}, {key}: {found}"
        torch.testing.assert_close(grad * parts, wanted, rtol=1e-9, atol=1e-10, msg=where)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "llama" else [pytest.mark.slow]) for n in MODELS],
)
def test_applied_plans_are_one_process(name: str) -> None:
    make, x = MODELS[name]
    model, mesh = make(), init_device_mesh("cpu", (dist.get_world_size(),))
    for kind, found in several_plans(model, mesh, x).items():
        check(found, model, x, f"{name}, {kind}")


@pytest.mark.sweep
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", MODELS)
def test_applied_plans_on_more_ranks_are_one_process(name: str) -> None:
    test_applied_plans_are_one_process(name)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["llama", pytest.param("stacked", marks=pytest.mark.sweep)])
def test_two_mesh_dims(name: str) -> None:
    make, x = MODELS[name]
    model, mesh = make(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for kind, found in several_plans(model, mesh, x).items():
        check(found, model, x, f"{name}, {kind}")


@pytest.mark.ranks(2)
def test_all_ranks_have_the_same_plan() -> None:
    """By rates that are measured, and in processes whose hashes differ."""
    mesh = init_device_mesh("cpu", (2,))
    found = plan(models.llama(), mesh, TOKENS)
    told: list[Any] = [None] * 2
    dist.all_gather_object(told, (str(found), found.rows, found.step_us))
    assert told[0] == told[1]
