"""The pass over torch's graphs: models that do not know weft, rewritten, against themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import weft
from weft.kernels.graphs.backend import CompilePass, MissedFusionError
from weft.kernels.graphs.receipts import (
    Receipts,
)

H, F, S, B = 16, 24, 8, 2


def by_pass(strict: bool, graphs: list[Receipts]) -> Callable[..., Any]:
    """A backend that runs what the pass has made, forward and backward, without Inductor."""
    rewritten = CompilePass(strict, graphs.append)

    def compiled(module: Any, _: Any) -> Any:
        rewritten(module)
        return make_boxed_func(module.forward)

    backend: Callable[..., Any] = aot_autograd(fw_compiler=compiled)
    return backend


def step(model: Callable[..., Any], x: torch.Tensor, parameters: list[nn.Parameter]) -> list[Any]:
    """A result and all gradients."""
    x = x.detach().requires_grad_()
    y = model(x)
    (y.to_local() if isinstance(y, DTensor) else y).square().sum().backward()
    grads = [x.grad, *(p.grad for p in parameters)]
    for p in parameters:
        p.grad = None
    local = [g.to_local() if isinstance(g, DTensor) else g for g in (y.detach(), *grads)]
    return [each.detach().clone() for each in local if each is not None]


def held(model: nn.Module, x: torch.Tensor, backend: Any, dynamic: bool | None = None) -> None:
    """Whether what is compiled returns what the model itself does."""
    torch._dynamo.reset()
    parameters = list(model.parameters())
    plain = step(model, x, parameters)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for _ in range(2):
        made = step(compiled, x, parameters)
        assert len(made) == len(plain)
        for mine, theirs in zip(made, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(H), nn.Linear(H, F), nn.Linear(F, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return y * 2


class Attention(nn.Module):
    """Q, K and V share a gather."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(H, H, bias=i == 0) for i in range(3))
        self.o = nn.Linear(H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: torch.Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return y


class Local(nn.Module):
    """A model's input and output as plain shards of the sequence."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.model, self.mesh = model, mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.model(DTensor.from_local(x, self.mesh, [Shard(1)], run_check=False))
        local: torch.Tensor = y.to_local() if isinstance(y, DTensor) else y
        return local


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def world() -> Any:
    return dist.group.WORLD


def gather(x: torch.Tensor, dim: int) -> torch.Tensor:
    """all_gather_tensor, but torch 2.11 breaks graphs where that joins what it has gathered."""
    whole: torch.Tensor = all_gather_tensor(x, 0, world())
    return torch.cat(whole.chunk(dist.get_world_size()), dim) if dim else whole


def own_part(seed: int) -> torch.Tensor:
    whole = torch.randn(
        B, S * dist.get_world_size(), H, generator=torch.Generator().manual_seed(seed)
    )
    return whole.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def dtensor_model(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """Of torch's own styles: what takes whole activations, or shards of the sequence."""
    torch.manual_seed(0)
    whole = kind.endswith("whole")
    layouts: dict[str, Any] = {} if whole else {"input_layouts": Shard(1)}
    back: dict[str, Any] = {} if whole else {"output_layouts": Shard(1), "use_local_output": False}
    model: nn.Module
    if kind == "prepared":
        model = nn.Sequential(nn.Linear(H, F), nn.ReLU(), nn.Linear(F, H))
        rowwise = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        parallelize_module(model, mesh(), {"0": ColwiseParallel(), "2": rowwise})
        around = PrepareModuleInputOutput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(),
            output_layouts=Shard(1), desired_output_layouts=Shard(1),
        )  # fmt: skip
        return parallelize_module(model, mesh(), around), own_part(1)
    if kind.startswith("mlp"):
        plan: dict[str, Any] = {"up": ColwiseParallel(**layouts), "down": RowwiseParallel(**back)}
        if not whole:
            plan["norm"] = SequenceParallel(use_local_output=False)
        model = parallelize_module(MLP(), mesh(), plan)
    else:
        styles = {name: ColwiseParallel(**layouts) for name in "qkv"}
        model = parallelize_module(Attention(), mesh(), {**styles, "o": RowwiseParallel(**back)})
    if whole:
        x = torch.randn(B, S, H, generator=torch.Generator().manual_seed(1))
        return model, x
    return Local(model, mesh()), own_part(1)


def torch_styles(kind: str, dynamic: bool | None = None) -> list[list[tuple[str, str, str]]]:
    graphs: list[Receipts] = []
    model, x = dtensor_model(kind)
    held(model, x, by_pass(True, graphs), dynamic)
    return [[(r.collective, r.fused, r.why) for r in receipts] for receipts in graphs]


GATHER = ("all_gather", "all_gather_matmul")
SCATTER = ("reduce_scatter", "matmul_reduce_scatter", "a matmul")
REDUCE = ("all_reduce", "matmul_all_reduce", "a matmul")
SUM = "all_gather_matmul_backward, all_gather"


def added_up(*kind: str) -> list[tuple[str, ...]]:
    """Q's, K's and V's gradients of what they share."""
    return [(*kind, "3 matmuls"), *[(*kind, "added up before, and moved once")] * 2]


def test_styles_of_torch_are_fused_forward_and_backward(ranks: Any) -> None:
    for found in ranks(2, torch_styles, "mlp whole"):
        assert found == [[REDUCE], [REDUCE]]
    for found in ranks(2, torch_styles, "mlp sequence"):
        one = (*GATHER, "1 matmul")
        assert found == [[one, SCATTER], [one, SCATTER]]
    for found in ranks(2, torch_styles, "attention whole"):
        once = added_up("all_reduce", SUM)
        assert found == [[REDUCE], once]


@pytest.mark.slow
def test_styles_of_torch_on_four_ranks(ranks: Any) -> None:
    one = (*GATHER, "1 matmul")
    for kind in "mlp sequence", "prepared":
        for found in ranks(4, torch_styles, kind):
            assert found == [[one, SCATTER], [one, SCATTER]]
    for found in ranks(4, torch_styles, "attention whole"):
        assert found == [[REDUCE], added_up("all_reduce", SUM)]


def shared_gather() -> list[list[tuple[str, str, str]]]:
    graphs: list[Receipts] = []
    model, x = dtensor_model("attention sequence")
    held(model, x, by_pass(False, graphs))
    return [[(r.collective, r.fused, r.why) for r in receipts] for receipts in graphs]


def test_matmuls_that_share_a_gather_are_one_op(ranks: Any) -> None:
    for forward, backward in ranks(2, shared_gather):
        same = (*GATHER, "the same is gathered once")
        assert forward == [(*GATHER, "3 matmuls"), same, same, SCATTER]
        assert backward[-3:] == added_up("reduce_scatter", "all_gather_matmul_backward")


class Megatron(nn.Module):
    """Code of one's own with functional and in-place collectives; a reduction that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, F, bias=False), nn.Linear(F, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered = all_gather_tensor(x, 0, world())
        y = self.down(functional.silu(self.up(gathered)))
        dist.all_reduce(y)
        largest = all_reduce(y.abs().amax().detach(), "max", world())
        result: torch.Tensor = y / largest
        return result


def own_collectives() -> tuple[Any, list[str]]:
    graphs: list[Receipts] = []
    torch.manual_seed(0)
    model = Megatron()
    rows = torch.randn(4, H, generator=torch.Generator().manual_seed(dist.get_rank()))
    torch._dynamo.reset()
    with torch.no_grad():
        plain = model(rows)
        made = torch.compile(model, backend=by_pass(True, graphs))(rows)
    torch.testing.assert_close(made, plain, rtol=2e-5, atol=2e-5)
    return [[(r.fused, r.why) for r in receipts] for receipts in graphs], [
        r.line for receipts in graphs for r in receipts
    ]


def test_code_with_collectives_of_its_own(ranks: Any) -> None:
    for found, lines in ranks(2, own_collectives):
        assert found == [
            [
                ("all_gather_matmul", "1 matmul"),
                ("matmul_all_reduce", "a matmul"),
                ("", "no matmul makes what it adds up"),
            ]
        ]
        assert all("test_compile_pass.py" in line for line in lines)


def joined(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(result, x.contiguous())
    return result


def added(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(result, x.contiguous())
    return result


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return joined(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return added(grad)


class ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return added(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return joined(grad)


class IntoGiven(Megatron):
    """Sequence first, collectives into tensors that are there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(self.up(GatherRows.apply(x)))
        result: torch.Tensor = ScatterRows.apply(self.down(y))
        return result


def into_given() -> list[Any]:
    graphs: list[Receipts] = []
    torch.manual_seed(0)
    rows = torch.randn(3, B, H, generator=torch.Generator().manual_seed(dist.get_rank()))
    model = IntoGiven()
    if torch.__version__ >= "2.12":
        held(model, rows, by_pass(True, graphs))
    else:  # torch 2.11 makes zeros of the gradients of what is written to
        torch._dynamo.reset()
        with torch.no_grad():
            made = torch.compile(model, backend=by_pass(True, graphs), fullgraph=True)(rows)
            torch.testing.assert_close(made, model(rows), rtol=2e-5, atol=2e-5)
    up = torch.randn(H, F)

    def of_list(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, 1) @ up

    torch._dynamo.reset()
    made = torch.compile(of_list, backend=by_pass(True, graphs), fullgraph=True)(rows)
    torch.testing.assert_close(made, of_list(rows), rtol=2e-5, atol=2e-5)
    return [[r.fused for r in receipts] for receipts in graphs]


def test_collectives_into_given_tensors(ranks: Any) -> None:
    for found in ranks(2, into_given):
        both = ["all_gather_matmul", "matmul_reduce_scatter"]
        assert found == [both] * (len(found) - 1) + [["all_gather_matmul"]]
        assert len(found) == (3 if torch.__version__ >= "2.12" else 2)


def batches() -> list[Any]:
    """Shards of the sequence of batches of several sizes, in one graph and in their own."""
    torch.manual_seed(0)
    up, down = torch.randn(H, F), torch.randn(F, H)

    def call(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(gather(x, 1) @ up) @ down
        result: torch.Tensor = reduce_scatter_tensor(y, "sum", 1, world())
        return result

    fused = []
    for dynamic in (True, False):
        graphs: list[Receipts] = []
        torch._dynamo.reset()
        compiled = torch.compile(call, backend=by_pass(True, graphs), dynamic=dynamic)
        for shape in (2, 3, H), (3, 5, H), (1, 4, H):
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x), call(x), rtol=2e-5, atol=2e-5)
        fused.append([(receipts.fused, len(receipts)) for receipts in graphs])
    return fused


@pytest.mark.slow
def test_batches_of_one_and_symbols(ranks: Any) -> None:
    for dynamic, static in ranks(2, batches):
        assert dynamic == [(2, 2)] * 2 and static == [(2, 2)] * 3


@pytest.mark.slow
def test_styles_of_torch_by_symbols(ranks: Any) -> None:
    """Torch cuts what is gathered to the length that it has."""
    one = (*GATHER, "1 matmul")
    for found in ranks(2, torch_styles, "mlp sequence", True):
        assert found == [[one, SCATTER], [one, SCATTER]]


def rewritten(
    call: Callable[..., Any], *given: torch.Tensor, atol: float = 2e-5
) -> list[tuple[str, str]]:
    """What became of the collectives of `call`, whose results must stay what they are."""
    graphs: list[Receipts] = []
    torch._dynamo.reset()
    made = torch.compile(call, backend=by_pass(False, graphs), fullgraph=True)(*given)
    torch.testing.assert_close(made, call(*given), rtol=2e-5, atol=atol)
    return [(r.fused, r.why) for receipts in graphs for r in receipts]


def chains() -> list[Any]:
    x, up, down = torch.randn(1, S, H), torch.randn(H, F), torch.randn(F, H)
    half = torch.bfloat16

    def einsum(x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bsh,hf->bsf", gather(x, 1), up).relu()
        y = torch.einsum("bsf,fh->bsh", y, down)
        result: torch.Tensor = reduce_scatter_tensor(y, "sum", 1, world())
        return result

    def cast_up(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(gather(x, 1).to(half) @ up.to(half)) @ down.to(half)
        result: torch.Tensor = reduce_scatter_tensor(y.float(), "sum", 1, world())
        return result

    def cast_down(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = all_reduce((x @ up).to(half), "sum", world())
        return result

    def mean_of_sums(x: torch.Tensor) -> torch.Tensor:
        y = (x @ up).relu() @ down + x @ up @ down
        result: torch.Tensor = reduce_scatter_tensor(y / 3 * 2, "avg", 1, world())
        return result

    def sums(x: torch.Tensor) -> torch.Tensor:
        y = all_reduce(x @ up, "sum", world()) + x @ up
        return y + all_reduce(x.relu() @ up, "sum", world())

    def uneven_sums(x: torch.Tensor) -> torch.Tensor:
        return sums(x[0, :3])

    def something_else(x: torch.Tensor) -> torch.Tensor:
        y = all_to_all_single(x[0] @ up @ down, None, None, world()) + x
        result: torch.Tensor = reduce_scatter_tensor(y, "sum", 1, world())
        return result

    def sliced(x: torch.Tensor) -> torch.Tensor:
        """As gradients are cut of what was gathered along another dim than the first."""
        y = (gather(x, 1) @ up).relu() @ down
        y = torch.cat([y[:, :S], y[:, S:]])
        result: torch.Tensor = reduce_scatter_tensor(y, "sum", 0, world())
        return result

    def used_in_part(x: torch.Tensor) -> torch.Tensor:
        y = x[0] @ up
        pieces = y[:, : F // 2], y[:, F // 2 :]
        result: torch.Tensor = reduce_scatter_tensor(torch.cat(pieces), "sum", 0, world())
        return result + pieces[0]

    def squared(x: torch.Tensor) -> torch.Tensor:
        rows = gather(x[0], 0)
        return rows @ rows.t()

    def of_one(x: torch.Tensor) -> torch.Tensor:
        """A batch of one matrix, which is square, times the matrix itself."""
        rows = gather(x[0, :, : 2 * S], 0)
        alone = rows.unsqueeze(0)
        return torch.matmul(alone, rows) + torch.bmm(alone, alone) + rows

    def cast_beside_others(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Casts of what is gathered joined to what is not, or not by this gather."""
        rows = torch.cat([gather(x, 1), x], 1).to(half)
        return (
            rows,
            rows @ up.to(half),
            torch.cat([gather(x.cos(), 1), gather(x.sin(), 1)]).to(half),
        )

    found = [rewritten(einsum, x), rewritten(cast_up, x, atol=0.5), rewritten(cast_down, x)]
    more = (
        cast_beside_others,
        sliced,
        used_in_part,
        squared,
        of_one,
        mean_of_sums,
        sums,
        uneven_sums,
        something_else,
    )
    return [*found, *(rewritten(call, x) for call in more)]


def corners() -> list[Any]:
    """Matrices are square, so that what is turned by mistake has the right shape."""
    x, w, one = torch.randn(H // 2, H), torch.randn(H, H), torch.randn(1)
    half = torch.bfloat16

    def turned(x: torch.Tensor) -> torch.Tensor:
        y = gather(x, 0).permute(-1, 0) @ w
        y = all_reduce(y.permute(-1, 0) @ w, "sum", world())
        result: torch.Tensor = all_reduce((y @ w).permute(-1, 0), "sum", world())
        return result

    def one_number(x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(gather(x, 0), w, one)
        result: torch.Tensor = all_reduce(functional.linear(y, w, one), "sum", world())
        return result

    def twice(x: torch.Tensor) -> torch.Tensor:
        y = all_reduce(x @ w, "sum", world())
        return y + y

    def complex_numbers(x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.complex64) @ w.to(torch.complex64)
        return torch.view_as_real(all_reduce(y, "sum", world()))

    def cast_up(x: torch.Tensor) -> torch.Tensor:
        y = (x.to(half) @ w.to(half)).float()
        result: torch.Tensor = all_reduce(y, "sum", world())
        return result

    torch._dynamo.reset()
    summed = torch.compile(cast_up, backend=by_pass(False, []))(x)
    exact = all_reduce(x.to(half).double() @ w.to(half).double(), "sum", world())
    ours, models = ((y - exact).abs().mean() for y in (summed, cast_up(x)))
    near = bool(ours <= 1.25 * models)  # rounded once, as a sum; of rounded terms it is 1.45
    return [
        near,
        *(rewritten(c, x, atol=1e-3) for c in (turned, one_number, twice, complex_numbers)),
    ]


def test_dims_from_behind_biases_of_one_number_and_sums_used_twice(ranks: Any) -> None:
    for near, turned, one_number, twice, complex_numbers in ranks(2, corners):
        assert near
        assert [fused for fused, _ in turned] == ["all_gather_matmul_backward", REDUCE[1], ""]
        assert one_number == [
            ("", "no matmul takes it as its rows"),
            ("", "each rank adds a matrix of its own"),
        ]
        assert twice == [REDUCE[1:]]
        assert complex_numbers == [("", "matmuls of torch.complex64")]


def test_casts_batches_of_one_and_sums_of_matmuls(ranks: Any) -> None:
    both = [("all_gather_matmul", "1 matmul"), ("matmul_reduce_scatter", "a matmul")]
    for found in ranks(2, chains):
        assert found == [
            both,
            both,
            [("matmul_all_reduce", "a matmul")],
            [("", "no matmul takes it as its rows")] * 3,
            both,
            [("", "this rank's partial result has other uses")],
            [("", "no matmul takes it as its rows")],
            [("", "no matmul takes it as its rows")],
            [("all_gather_matmul_backward", "2 matmuls")],
            [(SUM, "2 matmuls"), (SUM, "added up before, and moved once")],
            [REDUCE[1:]] * 2,
            [
                ("all_to_all", "rows of matmuls, through shared memory"),
                ("", "no matmul makes what it adds up"),
            ],
        ]


def halves() -> list[bool]:
    """Whether sums of half precision on CPUs are of products that each rank has rounded."""
    x, up = own_part(7).flatten(0, 1).bfloat16().repeat(1, 8), torch.randn(8 * H, F).bfloat16()
    graphs: list[Receipts] = []
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: all_reduce(x @ up, "sum", world()), backend=by_pass(False, graphs)
    )
    made, terms = compiled(x), [torch.empty(len(x), F).bfloat16() for _ in range(2)]
    dist.all_gather(terms, x @ up)
    return [
        graphs[0][0].fused == REDUCE[1],
        torch.equal(made, (terms[0].float() + terms[1]).to(x.dtype)),
    ]


def test_half_precision_is_rounded_as_the_model_does(ranks: Any) -> None:
    assert ranks(2, halves) == [[True, True]] * 2


def contractions() -> list[Any]:
    x, dy = own_part(1), torch.randn(B, 2 * S, F, generator=torch.Generator().manual_seed(2))

    def gathered(dim: int, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = gather(x, dim).flatten(0, -2)
        return result

    def of_linear(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return dy.flatten(0, 1).t() @ gathered(1, x)

    def of_product(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return gathered(0, x[0]).t() @ dy[0]

    def of_both(x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = gathered(1, x)
        return dy.flatten(0, 1).t() @ rows, rows.t() @ (dy * 2).flatten(0, 1)

    def with_others(x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = gathered(1, x)
        return dy.flatten(0, 1).t() @ rows, rows.abs()

    return [rewritten(call, x, dy) for call in (of_linear, of_product, of_both, with_others)]


def test_gradients_of_weights_whose_rows_are_gathered(ranks: Any) -> None:
    name = "all_gather_matmul_backward"
    for found in ranks(2, contractions):
        assert found == [
            [(name, "1 contraction")],
            [(name, "1 contraction")],
            [(name, "2 contractions")],
            [("", "no matmul takes it as its rows")],
        ]


def gathers_far_apart() -> list[Any]:
    x, w = torch.randn(S, H), torch.randn(H, H)

    def twice(x: torch.Tensor, kept: bool) -> tuple[torch.Tensor, ...]:
        gathered = all_gather_tensor(x, 0, world())
        y = gathered @ w
        y = y + all_reduce(y.relu(), "sum", world())
        again = all_gather_tensor(x, 0, world()) @ w.t()
        return y, again, gathered.abs() if kept else again.sum()

    return [rewritten(lambda x, kept=kept: twice(x, kept), x) for kept in (False, True)]


def test_a_gather_is_shared_only_where_that_keeps_nothing_longer(ranks: Any) -> None:
    one, other = ("all_gather_matmul", "1 matmul"), ("", "no matmul makes what it adds up")
    for apart, kept in ranks(2, gathers_far_apart):
        assert apart == [one, other, one]
        assert kept == [one, ("all_gather_matmul", "the same is gathered once"), other]


def biases_of_their_own() -> list[Any]:
    """As serving engines' row-parallel layers: rank 0 alone adds it. Or each rank has another."""
    rank, W = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    x, down, bias = torch.randn(3 * W, H + 2 * rank), torch.randn(H + 2 * rank, H), torch.randn(H)

    def product(x: torch.Tensor, first: bool = True) -> torch.Tensor:
        adds = rank == 0 or not first
        return torch.addmm(bias, x, down) if adds else x @ down

    def first(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = all_reduce(product(x), "sum", world())
        return y

    def each(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = reduce_scatter_tensor(product(x, False), "avg", 0, world())
        return y

    def added_before(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = all_reduce(product(x) + product(x.relu()), "sum", world())
        return y

    def added_after(x: torch.Tensor) -> torch.Tensor:
        return first(x) + first(x.relu())

    return [rewritten(call, x) for call in (first, each, added_before, added_after)]


def test_a_bias_of_one_rank(ranks: Any) -> None:
    for found in ranks(2, biases_of_their_own):
        assert found == [
            [REDUCE[1:]],
            [SCATTER[1:]],
            [(SUM, "2 matmuls")],
            [(SUM, "2 matmuls"), (SUM, "added up before, and moved once")],
        ]


class UsedTwice(nn.Module):
    """What a rank adds is used as it is as well."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.down(x)
        y: torch.Tensor = all_reduce(own, "sum", world())
        return y / own


def strict() -> str:
    torch._dynamo.reset()
    model, x = UsedTwice(), torch.ones(3, H)
    with torch.no_grad():
        plain = model(x)
        graphs: list[Receipts] = []
        made = torch.compile(model, backend=by_pass(False, graphs))(x)
        assert torch.equal(made, plain) and graphs[0].fused == 0
        torch._dynamo.reset()
        try:
            torch.compile(model, backend=by_pass(True, graphs))(x)
        except Exception as error:
            assert "MissedFusion" in f"{type(error).__name__} {error!r}", repr(error)
            return str(error)
    return ""


def test_strict_tells_what_was_missed(ranks: Any) -> None:
    for message in ranks(2, strict):
        assert (
            "this rank's partial result has other uses" in message
            and "test_compile_pass.py" in message
        )


def by_inductor() -> tuple[str, Any]:
    model, x = dtensor_model("mlp sequence")
    held(model, x, weft.compile_backend)
    compiled = torch.compile(model, backend=weft.compile_backend)
    compiled(x)
    explained = weft.explain(compiled)
    assert explained.receipts.fused == 6 and not explained
    return str(explained), weft.compile_pass.uuid()


def test_inductor_runs_it(ranks: Any) -> None:
    for text, uuid in ranks(2, by_inductor):
        assert text.endswith("6 of 6 collectives fused")  # forward again
        assert uuid == weft.compile_pass.uuid() != CompilePass(strict=True).uuid()


def test_the_error_is_of_weft() -> None:
    assert issubclass(MissedFusionError, weft.WeftError)
