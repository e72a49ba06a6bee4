"""Models of others, compiled with the pass, against one process and against themselves."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.utils.checkpoint import checkpoint

import weft
from tests.kernels import compiled_models as models
from weft.kernels.graphs.backend import CompilePass
from weft.kernels.graphs.receipts import Receipts

SIZE = models.Size()


def by_pass(graphs: list[Receipts] | None, first: Any = None, last: Any = None) -> Any:
    """As Inductor decomposes and cuts graphs, but they run as they are: no C++ is compiled.

    Args:
        graphs: gets their receipts. None: as torch has made them, without the pass.
        first: what is done to forward and backward before they are cut.
        last: is given what is rewritten.
    """
    rewritten = None if graphs is None else CompilePass(told=graphs.append)

    def compiled(module: Any, _: Any) -> Any:
        if rewritten is not None:
            rewritten(module)
        if last is not None:
            last(module)
        return make_boxed_func(module.forward)

    def cut(joint: Any, *args: Any, **kwargs: Any) -> Any:
        if graphs is not None and first is not None:
            first(joint)
        if graphs is not None and (found := weft.compile_pass.joint(joint.graph)):
            graphs.append(found)
        return min_cut_rematerialization_partition(joint, *args, compiler="inductor", **kwargs)

    return aot_autograd(
        fw_compiler=compiled, partition_fn=cut, decompositions=select_decomp_table()
    )


def trained(kind: str, backend: Any, amp: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of two steps and all weights after them: of the parallel model, and of one process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, run = models.made(kind, SIZE, backend)
    one = models.as_one(model, SIZE)
    tokens = torch.randint(SIZE.vocabulary, (SIZE.batch, SIZE.length))
    results = []
    for call, each in (run, model), (one, one):
        parameters = list(each.parameters())
        logits = [models.step(call, parameters, tokens, amp) for _ in range(2)]
        results.append([models.whole(each).detach() for each in (*logits, *parameters)])
    return results[0], results[1]


def told(graphs: list[Receipts]) -> list[tuple[int, int, set[str]]]:
    """Of each graph: how many are fused, of how many, and why the others are not."""
    return [(g.fused, len(g), {r.why for r in g if not r.fused}) for g in graphs]


NO_PRODUCER, NO_CONSUMER = "no matmul makes what it adds up", "no matmul takes it as its rows"


def held(kind: str, amp: bool) -> list[tuple[int, int, set[str]]]:
    graphs: list[Receipts] = []
    made, one = trained(kind, by_pass(graphs), amp)
    if kind == "FSDP2 x TP":  # compiled, torch 2.13 itself has other gradients of the embedding
        one, _ = trained(kind, by_pass(None), amp)
    for mine, theirs in zip(made, one, strict=True):
        close = {"rtol": 1e-5, "atol": 3e-2 if amp else 1e-5}
        torch.testing.assert_close(mine, theirs, **close, check_dtype=False)
    if amp:  # about as far from one process as torch's own collectives are
        plain, _ = trained(kind, None, amp)

        def error(of: list[torch.Tensor]) -> float:
            return sum((a.float() - b.float()).norm().item() for a, b in zip(of, one, strict=True))

        assert error(made) < 1.5 * error(plain)
    return told(graphs)


@pytest.mark.slow
def test_torchtitan_llama(ranks: Any) -> None:
    for amp in (False, True):
        for found in ranks(2, held, "torchtitan", amp):
            # Lookups in parts of the embedding, and logits that are gathered, stay.
            assert found == [(5, 7, {NO_PRODUCER, NO_CONSUMER}), (5, 6, {NO_CONSUMER})]


_NCCL = "torch.distributed.is_nccl_available"


def asynchronous(kind: str) -> list[tuple[int, int]]:
    """Of each graph: the matmuls with a collective that torch's asynchronous TP fuses, and weft.

    It fuses nothing but on GPUs with symmetric memory: its pass is told that there is some, and
    given a copy of each graph.
    """
    counts: list[tuple[int, int]] = []
    rewritten = CompilePass()

    def compiled(module: Any, _: Any) -> Any:
        given = torch.fx.Graph()
        given.output(given.graph_copy(module.graph, {}))
        for node in given.nodes:  # as Inductor does before its passes
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        enabled = "torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group"
        with mock.patch(enabled, return_value=True), mock.patch(_NCCL, return_value=True):
            micro_pipeline_tp_pass(given)
        fused = [str(node.target) for node in given.nodes]
        by_torch = sum(name.startswith("symm_mem.fused_") for name in fused)
        counts.append((by_torch, rewritten(module).fused))
        return make_boxed_func(module.forward)

    cut = partial(min_cut_rematerialization_partition, compiler="inductor")
    decompositions = select_decomp_table()
    backend = aot_autograd(fw_compiler=compiled, partition_fn=cut, decompositions=decompositions)
    made, one = trained(kind, backend, False)
    for mine, theirs in zip(made, one, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    return counts


@pytest.mark.slow
def test_what_asynchronous_tp_fuses_and_misses(ranks: Any) -> None:
    for forward, backward in ranks(2, asynchronous, "torchtitan"):
        # All of its matches, and the two gradients that it misses with torch 2.13.
        assert forward == (5, 5) and backward[1] == 5 >= backward[0]


@pytest.mark.slow
def test_fully_shard_beside_tensor_parallel(ranks: Any) -> None:
    for found in ranks(4, held, "FSDP2 x TP", False):
        # FSDP gathers weights outside of the layers' graphs.
        assert found == [(4, 4, set()), (4, 4, set())]


def test_llama_of_transformers(ranks: Any) -> None:
    pytest.importorskip("transformers", reason="weft does not depend on it")
    for found in ranks(2, held, "transformers", False):
        assert found == [(2, 4, {NO_PRODUCER, NO_CONSUMER}), (6, 6, set())]


def checkpointed() -> list[tuple[int, int, set[str]]]:
    """The layer's forward runs once more in the backward, and gathers once more."""
    torch._dynamo.reset()
    up, down = torch.randn(8, 12, requires_grad=True), torch.randn(12, 8, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(all_gather_tensor_autograd(x, 0, dist.group.WORLD) @ up) @ down
        result: torch.Tensor = reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD)
        return result

    def run(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(layer, x, use_reentrant=False)
        return y

    graphs: list[Receipts] = []
    given, results = torch.randn(4, 8), []
    for call in run, torch.compile(run, backend=by_pass(graphs), fullgraph=True):
        x = given.clone().requires_grad_()
        y = call(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, up, down])])
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-5)
    return told(graphs)


def test_activation_checkpointing(ranks: Any) -> None:
    again = 3 if torch.__version__ >= "2.12" else 2  # torch 2.11 keeps what it has gathered
    for found in ranks(2, checkpointed):
        assert found == [(2, 2, set()), (again, again, set())]


def served() -> list[tuple[int, int, set[str]]]:
    torch._dynamo.reset()
    parts = dist.get_world_size()
    layer = models.ServedLayer(SIZE, parts).bfloat16()
    x, residual = (torch.randn(3, SIZE.width).bfloat16() for _ in range(2))
    for each in x, residual:  # the same on every rank
        dist.broadcast(each, 0)
    graphs: list[Receipts] = []
    with torch.no_grad():
        plain = layer(x, residual)
        made = torch.compile(layer, backend=by_pass(graphs), fullgraph=True)(x, residual)
    torch.testing.assert_close(made, plain, rtol=2e-2, atol=2e-2)
    return told(graphs)


class OfVLLM(models.ServedLayer):
    """With its own collectives: custom ops, which name its groups."""

    def summed(self, y: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = torch.ops.vllm.all_reduce(y, group_name="tp:0")
        return total

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts, v = dist.get_world_size(), torch.ops.vllm
        x = v.reduce_scatter(x @ x.t(), 0, parts, "tp:0")
        x = v.all_gather(x, 0, parts, group_name="tp:0") @ self.o_proj.weight[:, :4].t()
        y, residual = super().forward(x, residual)
        columns = [v.reduce_scatter(residual, 1, parts, "tp:0") for _ in range(2)]
        return y, v.all_gather(residual, -1, parts, "tp:0"), *columns


def by_vllm() -> tuple[list[tuple[int, int, set[str]]], list[str]]:
    """The layer, between a scatter and a gather of logits; and the collectives that are left."""
    torch._dynamo.reset()
    library, parts = torch.library.Library("vllm", "DEF"), dist.get_world_size()
    how = "Tensor tensor, int dim, int world_size, str group_name"

    def all_reduce(x: torch.Tensor, group_name: str) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    def all_gather(x: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
        every = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(every, x.contiguous())
        return torch.cat(every, dim)

    def reduce_scatter(x: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
        return all_reduce(x, "").chunk(world_size, dim)[dist.get_rank()].clone()

    def shapes(x: torch.Tensor, dim: int, parts: int, group_name: str, grows: bool) -> Any:
        sizes = [*x.shape]
        sizes[dim] = sizes[dim] * parts if grows else sizes[dim] // parts
        return x.new_empty(sizes)

    for name, given, op in (
        ("all_reduce", "Tensor tensor, str group_name", all_reduce),
        ("all_gather", how, all_gather),
        ("reduce_scatter", how, reduce_scatter),
    ):
        library.define(f"{name}({given}) -> Tensor")
        library.impl(name, op, "CPU")
    torch.library.register_fake("vllm::all_reduce", lambda x, _: torch.empty_like(x), lib=library)
    for name in "all_gather", "reduce_scatter":
        fake = partial(shapes, grows=name == "all_gather")
        torch.library.register_fake(f"vllm::{name}", fake, lib=library)
    group = SimpleNamespace(device_group=dist.group.WORLD)
    state = SimpleNamespace(_groups={"tp:0": lambda: group})
    layer = OfVLLM(SIZE, parts)
    x, residual = (torch.randn(4, SIZE.width) for _ in range(2))
    for each in x, residual:
        dist.broadcast(each, 0)
    graphs, left = list[Receipts](), list[str]()

    def looked_at(module: Any) -> None:
        left.extend(str(n.target) for n in module.graph.nodes if "vllm" in str(n.target))

    with mock.patch.dict("sys.modules", {"vllm.distributed.parallel_state": state}):
        run = torch.compile(layer, backend=by_pass(graphs, last=looked_at), fullgraph=True)
        with torch.no_grad():
            torch.testing.assert_close(run(x, residual), layer(x, residual), rtol=1e-4, atol=1e-4)
    return told(graphs), left


def test_collectives_of_vllm(ranks: Any) -> None:
    """By a stand-in for its ops; those that stay are its own again."""
    for found, left in ranks(2, by_vllm):
        assert found == [(4, 7, {NO_CONSUMER, NO_PRODUCER})]
        assert sorted(left) == ["vllm.all_gather.default"] + ["vllm.reduce_scatter.default"] * 2


def test_decoder_layer_as_it_is_served(ranks: Any) -> None:
    for found in ranks(2, served):
        assert found == [(2, 2, set())]
