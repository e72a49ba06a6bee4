"""Models of others, compiled with the pass, against one process and against themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.device_mesh import init_device_mesh

from tests.kernels import compiled_models as models
from weft.kernels.graphs.backend import CompilePass
from weft.kernels.graphs.receipts import Receipts

SIZE = models.Size()


def by_pass(graphs: list[Receipts]) -> Any:
    """As Inductor decomposes and cuts graphs, but they run as they are: no C++ is compiled."""
    rewritten = CompilePass(told=graphs.append)

    def compiled(module: Any, _: Any) -> Any:
        rewritten(module)
        return make_boxed_func(module.forward)

    cut = partial(min_cut_rematerialization_partition, compiler="inductor")
    return aot_autograd(
        fw_compiler=compiled, partition_fn=cut, decompositions=select_decomp_table()
    )


def trained(kind: str, backend: Any, amp: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of two steps and all weights after them: of the parallel model, and of one process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        model = models.sharded_too(SIZE, mesh, backend or "eager")
    else:
        make = {"torchtitan": models.torchtitan, "transformers": models.transformers_llama}[kind]
        model = make(SIZE, init_device_mesh("cpu", (ranks,)))
    one = models.as_one(model, SIZE)
    tokens = torch.randint(SIZE.vocabulary, (SIZE.batch, SIZE.length))
    run = model if kind == "fsdp" or backend is None else torch.compile(model, backend=backend)
    made = []
    for call, each in (run, model), (one, one):
        parameters = list(each.parameters())
        logits = [models.step(call, parameters, tokens, amp) for _ in range(2)]
        made.append([*map(models.whole, logits), *(models.whole(p).detach() for p in parameters)])
    return made[0], made[1]


def told(graphs: list[Receipts]) -> list[tuple[int, int, set[str]]]:
    """Of each graph: how many are fused, of how many, and why the others are not."""
    return [(g.fused, len(g), {r.why for r in g if not r.fused}) for g in graphs]


NO_PRODUCER, NO_CONSUMER = "no matmul makes what it adds up", "no matmul takes it as its rows"


def held(kind: str, amp: bool) -> list[tuple[int, int, set[str]]]:
    graphs: list[Receipts] = []
    made, one = trained(kind, by_pass(graphs), amp)
    half = amp or kind == "fsdp"
    for mine, theirs in zip(made, one, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=3e-2 if half else 1e-5)
    if half:  # no further from one process in float32 than what torch makes
        plain, _ = trained(kind, None, amp)
        for mine, theirs in zip(made, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
    return told(graphs)


def test_torchtitan_llama(ranks: Any) -> None:
    for amp in (False, True):
        for found in ranks(2, held, "torchtitan", amp):
            # Lookups in parts of the embedding, and logits that are gathered, stay.
            assert found == [(5, 7, {NO_PRODUCER, NO_CONSUMER}), (5, 6, {NO_CONSUMER})]
