"""What plans of styles and products of two layouts move, forward and backward, and what is fused.

A letter is one collective: G gather, S reduce-scatter, R all-reduce. A capital one is done by a
fused op, a small one on its own, where no fused op has it: no matmul is next to it, or a stack of
several; features are gathered, not rows; several gradients are added up before. What is
expected, "forward | backward", is the least that is possible: one collective for each change of
layout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from dtensors import full_of
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from weft.dtensor.debug import CommDebugMode
from weft.dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

R, S0, S1, S2, S3 = Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)
_LETTERS = {"all_gather": "g", "all_to_all": "a", "reduce_scatter": "s", "all_reduce": "r"}
_FUSED = {
    "all_gather_matmul": "G",
    "matmul_reduce_scatter": "S",
    "matmul_all_reduce": "R",
    "ring_attention": "G",
}


def grid() -> DeviceMesh:
    """(2,), (3,), or (2, 2) on four ranks."""
    shape = {2: (2,), 3: (3,), 4: (2, 2)}[dist.get_world_size()]
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def moved(function: Callable[[], Any]) -> tuple[str, Any]:
    """The letters of what runs, in order, and the value."""
    with weft.engine("host"):
        told = weft.explain(function)
    letters = []
    for decision in told:
        if decision.collective:
            letter = _LETTERS[decision.collective]
            letters.append(letter.upper() if "backward" in decision.op else letter)
        elif decision.op in _FUSED:
            letters.append(_FUSED[decision.op])
        elif decision.op in _LETTERS:
            letters.append(_LETTERS[decision.op])
    return "".join(letters), told.result


def counted(function: Callable[[], Any]) -> int:
    with weft.engine("host"), CommDebugMode() as comm:
        function()
    return int(comm.get_total_counts())


def close(ours: Any, theirs: Any, name: str) -> None:
    """Equal but for the order of some dozens of additions in float64."""
    torch.testing.assert_close(
        full_of(ours), theirs, rtol=1e-11, atol=1e-11, msg=lambda text: f"{name}: {text}"
    )


def check(wrong: list[str], name: str, got: Any, wanted: Any) -> list[str]:
    return wrong if got == wanted else [*wrong, f"{name}: {got} instead of {wanted}"]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return out


class Reversed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)


class Pair(nn.Module):
    """Two linears with one input, as gate and up are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Any:
        y = torch.sigmoid(self.a(x)) * self.b(x)
        return y.to_local() if isinstance(y, DTensor) else y


class Plan(NamedTuple):
    name: str
    module: Callable[[], nn.Module]
    plan: Any
    given: Any  # the layout of the input, whose part is passed as a plain tensor
    result: Any  # the layout of what comes out
    moves: str


def linear() -> nn.Module:
    return nn.Linear(6, 12)


SEQUENCE = {"norm": SequenceParallel(), "down": RowwiseParallel(output_layouts=S1)}
PLANS = [
    Plan("torch's default", MLP, {"up": ColwiseParallel(), "down": RowwiseParallel()}, R, R,
         "R | R"),
    Plan("row, then column", Reversed, {"up": RowwiseParallel(output_layouts=S1),
         "down": ColwiseParallel(input_layouts=S1)}, S2, S2, "SG | SG"),
    Plan("sequence parallel", MLP, {**SEQUENCE, "up": ColwiseParallel(input_layouts=S1)}, S1, S1,
         "GS | GS"),
    Plan("the same, gathering again", MLP,
         {**SEQUENCE, "up": ColwiseParallel(input_layouts=S1, keep_gathered=False)}, S1, S1,
         "GS | GSG"),
    Plan("colwise", linear, ColwiseParallel(), R, S2, " | R"),
    Plan("colwise, output whole", linear, ColwiseParallel(output_layouts=R), R, R, "g | R"),
    Plan("colwise of a sequence", linear, ColwiseParallel(input_layouts=S1), S1, S2, "G | S"),
    Plan("colwise of features", linear, ColwiseParallel(input_layouts=S2), S2, S2, "g | s"),
    Plan("rowwise", linear, RowwiseParallel(), S2, R, "R | "),
    Plan("rowwise to a sequence", linear, RowwiseParallel(output_layouts=S1), S2, S1, "S | G"),
    Plan("rowwise, input whole", linear, RowwiseParallel(input_layouts=R), R, R, "R | g"),
    Plan("two linears behind one gather", Pair,
         {"": PrepareModuleInput(input_layouts=S1, desired_input_layouts=R),
          "a": ColwiseParallel(use_local_output=False),
          "b": ColwiseParallel(use_local_output=False)}, S1, S2, "g | s"),
    Plan("norm of a sequence", lambda: nn.LayerNorm(6), SequenceParallel(use_local_output=True),
         S1, S1, " | "),
    Plan("input gathered", lambda: nn.Identity(),
         PrepareModuleInput(input_layouts=S1, desired_input_layouts=R, use_local_output=True),
         S1, R, "g | "),
    Plan("output gathered", lambda: nn.Identity(),
         PrepareModuleOutput(output_layouts=S1, desired_output_layouts=R), S1, R, "g | "),
]  # fmt: skip


@pytest.mark.ranks(2, 3, 4)
def test_plans_of_styles() -> None:
    mesh = grid()["tp"]
    rank, W = mesh.get_local_rank(), mesh.size()
    wrong: list[str] = []
    for name, module, plan, given, result, moves in PLANS:
        torch.manual_seed(1)
        plain = module().double()
        parallel = parallelize_module(copy.deepcopy(plain), mesh, plan)
        whole = torch.randn(3, 2 * W, 6, dtype=torch.float64, requires_grad=True)
        x = own(whole, given, rank, W).requires_grad_()
        expected = plain(whole)
        weight = torch.randn_like(expected)
        (expected * weight).sum().backward()

        forward, y = moved(lambda f=parallel, x=x: f(x))
        seed = own(weight, result, rank, W)
        backward, _ = moved(lambda y=y, seed=seed: y.backward(seed))
        wrong = check(wrong, name, f"{forward} | {backward}", moves)
        close(y, own(expected, result, rank, W), name)
        close(x.grad, own(whole.grad, given, rank, W), name)
        for ours, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
            close(ours.grad, theirs.grad, name)
        # Counted from outside, where the hooks of modules come between.
        count = counted(lambda f=parallel, x=x, s=seed: f(x).backward(s))
        wrong = check(wrong, f"{name}, counted", count, sum(map(str.isalpha, moves)))
    assert not wrong, wrong


def own(whole: Tensor, placement: Any, rank: int, world_size: int) -> Tensor:
    """This rank's part."""
    shard = isinstance(placement, Shard)
    part = whole.chunk(world_size, placement.dim)[rank] if shard else whole
    return part.detach().clone()


class Product(NamedTuple):
    """x and w as placed along tp, the layout wanted, and what moves."""

    x: Any
    w: Any
    out: Any
    moves: str


# x (rows, K) @ w (K, N). Along dp, if there is that, rows are sharded.
ROWS = "rows"  # the dim of x that is sharded: 0 of a matrix, 1 of a batch of them
LAST = "last"
PRODUCTS = [
    Product(R, S1, LAST, " | R"),  # column-parallel, tokens replicated
    Product(ROWS, S1, LAST, "G | S"),  # column-parallel, tokens sharded
    Product(LAST, S0, R, "R | "),  # row-parallel
    Product(LAST, S0, ROWS, "S | G"),
    Product(ROWS, R, ROWS, " | "),
    Product(R, R, R, " | "),
    Product(R, S1, R, "g | R"),  # the columns of the result gathered
]
OPS: dict[str, tuple[int, bool, Callable[..., Any]]] = {  # dims of x, whether w is transposed
    "x @ w": (2, False, lambda x, w, b: x @ w),
    "mm": (2, False, lambda x, w, b: torch.mm(x, w)),
    "addmm": (2, False, lambda x, w, b: torch.addmm(b, x, w)),
    "batched x @ w": (3, False, lambda x, w, b: x @ w),
    "matmul": (3, False, lambda x, w, b: torch.matmul(x, w)),
    "linear": (3, True, lambda x, w, b: functional.linear(x, w)),
    "linear 2-d": (2, True, lambda x, w, b: functional.linear(x, w)),
    "linear, bias": (3, True, lambda x, w, b: functional.linear(x, w, b)),
    "einsum": (3, False, lambda x, w, b: torch.einsum("bsk,kn->bsn", x, w)),
    "einsum 2-d": (2, True, lambda x, w, b: torch.einsum("sk,nk->sn", x, w)),
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("op", OPS)
def test_products(op: str) -> None:
    mesh = grid()
    ndim, transposed, function = OPS[op]
    has_bias = op in ("addmm", "linear, bias")
    rows = (12,) if ndim == 2 else (4, 6)
    wrong: list[str] = []
    for case in PRODUCTS:
        torch.manual_seed(2)
        tensors = torch.randn(*rows, 12), torch.randn(12, 24), torch.randn(24)
        plain = [t.double().requires_grad_() for t in tensors]

        def placed(of: Any, dp: Any, ndim: int = ndim) -> list[Any]:
            along = {ROWS: Shard(ndim - 2), LAST: Shard(ndim - 1)}.get(of, of)
            return [dp, along][-mesh.ndim :]

        of_w = Shard(1 - case.w.dim) if transposed and isinstance(case.w, Shard) else case.w
        of_b = S0 if case.w == S1 else R
        x, w, b = (
            distribute_tensor(t.detach(), mesh, p).requires_grad_()
            for t, p in zip(
                (plain[0], plain[1].t() if transposed else plain[1], plain[2]),
                (placed(case.x, S0), placed(of_w, R), placed(of_b, R)),
                strict=True,
            )
        )
        expected = plain[0] @ plain[1] + (plain[2] if has_bias else 0)
        weight = torch.randn_like(expected)
        (expected * weight).sum().backward()

        local, out = x.to_local().detach().requires_grad_(), placed(case.out, S0)

        def call(x: Tensor = local, w: Any = w, b: Any = b, out: Any = out, like: Any = x) -> Any:
            given = DTensor.from_local(
                x, mesh, like.placements, shape=like.shape, stride=like.stride()
            )
            return function(given, w, b).redistribute(mesh, out)

        forward, y = moved(call)
        seed = distribute_tensor(weight, mesh, out)
        backward, _ = moved(lambda y=y, seed=seed: y.backward(seed))
        name = f"{op}: {case}"
        wrong = check(wrong, name, f"{forward} | {backward}", case.moves)
        close(y, expected, name)
        grad = DTensor.from_local(local.grad, mesh, x.placements)
        close(grad, plain[0].grad, name)
        close(w.grad, plain[1].grad.t() if transposed else plain[1].grad, name)
        if has_bias:
            close(b.grad, plain[2].grad, name)
        count = counted(lambda f=call, s=seed: f().backward(s))
        wrong = check(wrong, f"{name}, counted", count, sum(map(str.isalpha, case.moves)))
    assert not wrong, wrong


BATCHED = [  # (batch, rows, K) @ (batch, K, N): six fused ops are dearer than one collective
    (S0, S0, S0, " | "),
    (S1, R, S1, " | r"),  # of the weights
    (R, S2, S2, " | r"),
    (S2, S1, R, "r | "),
    (S2, S1, S1, "s | g"),
]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", ["bmm", "matmul", "einsum"])
def test_stacks_of_products(op: str) -> None:
    mesh = grid()
    run: Callable[..., Any] = {
        "bmm": torch.bmm,
        "matmul": torch.matmul,
        "einsum": lambda x, w: torch.einsum("bmk,bkn->bmn", x, w),
    }[op]
    wrong: list[str] = []
    for of_x, of_w, of_out, moves in BATCHED:
        torch.manual_seed(3)
        plain = [torch.randn(6, 6, 6, dtype=torch.float64).requires_grad_() for _ in range(2)]
        ours = [
            distribute_tensor(t.detach(), mesh, [p])
            for t, p in zip(plain, (of_x, of_w), strict=True)
        ]
        x, w = (t.to_local().detach().requires_grad_() for t in ours)
        expected = run(*plain)
        weight = torch.randn_like(expected)
        (expected * weight).sum().backward()
        given = [
            DTensor.from_local(t, mesh, like.placements, shape=like.shape, stride=like.stride())
            for t, like in zip((x, w), ours, strict=True)
        ]
        forward, y = moved(lambda g=given, out=of_out: run(*g).redistribute(mesh, [out]))
        seed = distribute_tensor(weight, mesh, [of_out])
        backward, _ = moved(lambda y=y, seed=seed: y.backward(seed))
        name = f"{op} of {of_x}, {of_w} to {of_out}"
        wrong = check(wrong, name, f"{forward} | {backward}", moves)
        close(y, expected, name)
        for mine, like, theirs in zip((x, w), ours, plain, strict=True):
            close(DTensor.from_local(mine.grad, mesh, like.placements), theirs.grad, name)
    assert not wrong, wrong


ATTENTION = [  # q, k, v (batch, heads, tokens, width)
    (S0, " | "),
    (S1, " | "),
    (S2, "G | GS"),  # a ring: keys and values together, and again in backward
]


@pytest.mark.ranks(2, 3, 4)
def test_attention() -> None:
    mesh, W = grid(), dist.get_world_size()
    wrong: list[str] = []
    for along, moves in ATTENTION:
        torch.manual_seed(4)
        qkv = torch.randn(3, 6 if W == 3 else 4, 6 if W == 3 else 4, 12, 8)
        plain = [t.requires_grad_() for t in qkv.clone().unbind()]
        placed = [S1 if along == S0 else S0, along][-mesh.ndim :]
        ours = [distribute_tensor(t, mesh, placed).requires_grad_() for t in qkv.unbind()]
        expected = functional.scaled_dot_product_attention(*plain, is_causal=True)
        expected.square().sum().backward()

        def call(qkv: Any = ours) -> Any:
            return functional.scaled_dot_product_attention(*qkv, is_causal=True)

        forward, y = moved(call)
        seed = (2 * y).detach()
        backward, _ = moved(lambda y=y, seed=seed: y.backward(seed))
        wrong = check(wrong, f"attention, {placed}", f"{forward} | {backward}", moves)
        torch.testing.assert_close(full_of(y), expected, rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(full_of(mine.grad), theirs.grad, rtol=1e-4, atol=1e-4)
        count = counted(lambda f=call, s=seed: f().backward(s))
        wrong = check(wrong, f"attention, {placed}", count, sum(map(str.isalpha, moves)))
    assert not wrong, wrong


@pytest.mark.ranks(2, 3)
def test_embeddings() -> None:
    mesh = grid()
    rank, W = mesh.get_local_rank(), mesh.size()
    plans = [  # (style, result, moves); tokens are whole
        (ColwiseParallel(), S2, " | "),
        (ColwiseParallel(output_layouts=R), R, "g | "),
        (RowwiseParallel(input_layouts=R), R, "r | "),
        (RowwiseParallel(input_layouts=R, output_layouts=S1), S1, "s | g"),
    ]
    wrong: list[str] = []
    for style, result, moves in plans:
        torch.manual_seed(5)
        plain = nn.Embedding(12, 6).double()
        parallel = parallelize_module(copy.deepcopy(plain), mesh, style)
        tokens = torch.randint(12, (3, 2 * W))
        expected = plain(tokens)
        weight = torch.randn_like(expected)
        (expected * weight).sum().backward()
        forward, y = moved(lambda f=parallel, t=tokens: f(t))
        seed = own(weight, result, rank, W)
        backward, _ = moved(lambda y=y, seed=seed: y.backward(seed))
        wrong = check(wrong, str(style), f"{forward} | {backward}", moves)
        close(y, own(expected, result, rank, W), str(style))
        close(parallel.weight.grad, plain.weight.grad, str(style))
    assert not wrong, wrong


@pytest.mark.ranks(2, 3)
def test_the_gradient_of_a_whole_input_is_fused_whatever_is_written_meanwhile() -> None:
    """Gradients that are accumulated in place, and a Partial gradient that is wanted as it is."""
    mesh = grid()
    torch.manual_seed(6)
    w = distribute_tensor(torch.randn(12, 6), mesh, [S0]).requires_grad_()
    xs = [torch.randn(4, 6, requires_grad=True) for _ in range(2)]
    for x in xs:
        y = functional.linear(DTensor.from_local(x, mesh, [R]), w)
        seed = torch.ones_like(y).detach()
        assert moved(lambda y=y, seed=seed: y.backward(seed))[0] == "R"
    whole = w.full_tensor().detach()
    for x in xs:
        torch.testing.assert_close(x.grad, whole.sum(0).expand(4, 6))
    torch.testing.assert_close(
        w.grad.full_tensor(), sum(x.detach().sum(0) for x in xs).expand(12, 6)
    )
    leaf = distribute_tensor(torch.randn(4, 6), mesh, [R]).requires_grad_()
    y = functional.linear(leaf, w)
    seed = torch.ones_like(y).detach()
    assert moved(lambda: y.backward(seed))[0] == ""
    assert leaf.grad.placements == (Partial(),)
    # Twice differentiated, fused in the first.
    x = xs[0].detach().requires_grad_()

    def first() -> Tensor:
        y = functional.linear(DTensor.from_local(x, mesh, [R]), w).pow(3).sum().full_tensor()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return grad

    told, grad = moved(first)
    assert told.count("R") == 1
    grad.square().sum().backward()
    plain = [t.detach().requires_grad_() for t in (x, whole)]
    (again,) = torch.autograd.grad(
        functional.linear(*plain).pow(3).sum(), plain[0], create_graph=True
    )
    torch.testing.assert_close(grad, again)
    plain[1].grad = None
    again.square().sum().backward()
    torch.testing.assert_close(x.grad, plain[0].grad, rtol=1e-4, atol=1e-2)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("engine", ["host", "generic"])
def test_keep_gathered(engine: Any) -> None:
    """2 collectives with the gathered input kept, 3 without, and the gradients of one process."""
    rank, W = dist.get_rank(), dist.get_world_size()
    for dim, frozen in ((0, False), (1, False), (0, True)):
        torch.manual_seed(7)
        plain = nn.Linear(6, 4 * W).double()
        plain.weight.requires_grad_(not frozen)
        whole = torch.randn(2 * W + 1, 2 * W + 1, 6, dtype=torch.float64, requires_grad=True)
        for keep in (True, False):
            layer = weft.ColumnParallelLinear.from_linear(
                copy.deepcopy(plain), sequence_dim=dim, keep_gathered=keep
            )
            layer.weight.requires_grad_(not frozen)
            x = own(whole, Shard(dim), rank, W).requires_grad_()
            saved: list[int] = []

            def pack(t: Tensor, saved: Any = saved) -> Tensor:
                saved.append(t.numel())
                return t

            def step(layer: Any = layer, x: Tensor = x, pack: Any = pack) -> Any:
                with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                    y = layer(x)
                y.square().sum().backward()
                return y

            with weft.engine(engine), CommDebugMode() as comm:
                y = step()
            grads = [t.grad for t in (x, *trained(layer))]
            gathers = 1 if keep or frozen else 2
            assert comm.get_total_counts() == gathers + 1, (dim, frozen, keep)
            kept = whole.numel() if keep and not frozen else x.numel()
            assert kept in saved and (keep or whole.numel() not in saved)
            expected = plain(whole)
            theirs = torch.autograd.grad(expected.square().sum(), [whole, *trained(plain)])
            close(y, own(expected, Shard(2), rank, W), "y")
            close(grads[0], own(theirs[0], Shard(dim), rank, W), "dx")
            for mine, of_plain in zip(grads[1:], theirs[1:], strict=True):
                close(mine, own(of_plain, S0, rank, W), "dw")
            # Twice, through the kept tensor too.
            x = x.detach().requires_grad_()  # without the hooks of what has counted
            with weft.engine(engine):
                y = layer(x)
                first = torch.autograd.grad(y.pow(3).sum(), trained(layer), create_graph=True)
                (twice,) = torch.autograd.grad(sum(f.square().sum() for f in first), x)
            y = plain(whole)
            first = torch.autograd.grad(y.pow(3).sum(), trained(plain), create_graph=True)
            (of_plain,) = torch.autograd.grad(sum(f.square().sum() for f in first), whole)
            torch.testing.assert_close(
                twice, own(of_plain, Shard(dim), rank, W), rtol=1e-9, atol=1e-9
            )
    with pytest.raises(TypeError, match=r"RowParallelLinear.*'keep_gathered'"):
        weft.RowParallelLinear(6, 4, keep_gathered=False, sequence_dim=0)


def _unpack(t: Tensor) -> Tensor:
    return t


def trained(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]
