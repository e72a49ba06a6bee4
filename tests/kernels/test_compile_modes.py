"""The pass under torch's other ways to compile: graphs that break, regions, exports, packages."""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    reduce_scatter_tensor_autograd,
)

import weft
from weft.kernels.graphs import backend
from weft.kernels.graphs.backend import CompilePass
from weft.kernels.graphs.receipts import Receipts, receipts_of

H = 8
TRAINED = ["all_gather_matmul", "matmul_reduce_scatter"] * 2
BOTH = ["all_gather_matmul", "matmul_all_reduce"]


class Trained(nn.Module):
    """The same, with collectives that have gradients."""

    def __init__(self, of: Products) -> None:
        super().__init__()
        self.up, self.down = of.up, of.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        y = self.down(torch.relu(self.up(gathered)))
        made: torch.Tensor = reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD)
        return made


class Products(nn.Module):
    """No more than matmuls and collectives: Inductor has no C++ to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 2 * H, bias=False), nn.Linear(2 * H, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered = all_gather_tensor(x, 0, dist.group.WORLD)
        y: torch.Tensor = all_reduce(self.down(self.up(gathered)), "sum", dist.group.WORLD)
        return y


def products() -> tuple[Products, torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return Products().requires_grad_(False), torch.randn(4, H, generator=generator)


def same(made: torch.Tensor, plain: torch.Tensor) -> None:
    torch.testing.assert_close(made, plain, rtol=2e-5, atol=2e-5)


def fused(of: Any) -> list[str]:
    receipts = of if isinstance(of, Receipts) else receipts_of(of)
    return [each.fused for each in receipts]


def broken() -> list[str]:
    """What stands behind a break is told of as well."""
    model, x = products()

    def run(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        z: torch.Tensor = model(y)
        return z

    compiled = torch.compile(run, backend=weft.compile_backend)
    same(compiled(x), run(x))
    return fused(compiled)


def compiled_again() -> list[str]:
    model, x = products()

    def run(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x)
        return y

    compiled = torch.compile(run, backend=weft.compile_backend)
    for rows in 4, 2, 3:  # the second time torch makes a symbol of it
        same(compiled(x[:rows]), model(x[:rows]))
    return fused(compiled)


def regions() -> list[list[str]]:
    """Layers compiled for themselves, as torchtitan does; and marked in what is compiled whole."""
    model, x = products()
    layers = nn.Sequential(model, Products().requires_grad_(False))
    plain = layers(x)
    for layer in layers:
        layer.compile(backend=weft.compile_backend)
    same(layers(x), plain)
    found = [fused(layers[0])]

    torch._dynamo.reset()
    region = torch.compiler.nested_compile_region(Products.forward)

    def marked(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = region(model, region(model, x))
        return y

    compiled = torch.compile(marked, backend=weft.compile_backend, fullgraph=True)
    same(compiled(x), model(model(x)))
    return [*found, fused(compiled)]


def without_overhead() -> list[str]:
    """On GPUs Inductor captures a graph; on CPUs it is the same."""
    model, x = products()

    def run(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x)
        return y

    compiled = torch.compile(run, backend=weft.compile_backend, mode="reduce-overhead")
    for _ in range(3):
        same(compiled(x), model(x))
    return fused(compiled)


def exported() -> list[str]:
    model, x = products()
    program = torch.export.export(model, (x,)).run_decompositions()
    receipts = weft.compile_pass(program.graph_module)
    same(program.module()(x), model(x))
    return fused(receipts)


def packaged() -> list[str]:
    model, x = products()
    told: list[Receipts] = []
    program = torch.export.export(model, (x,))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, f"{os.getpid()}.pt2"))
        options = {"post_grad_custom_pre_pass": CompilePass(told=told.append)}
        torch._inductor.aoti_compile_and_package(
            program, package_path=path, inductor_configs=options
        )
        same(torch._inductor.aoti_load_package(path)(x), model(x))
    return [name for receipts in told for name in fused(receipts)]


def by_symbols() -> list[str]:
    """One graph for any number of rows, forward and backward."""
    plain, x = products()
    model = Trained(plain).requires_grad_()
    parameters = list(model.parameters())
    compiled = torch.compile(model, backend=weft.compile_backend, dynamic=True)
    for rows in 4, 2, 3:
        results = []
        for call in compiled, model:
            given = x[:rows].clone().requires_grad_()
            y = call(given)
            results.append([y, *torch.autograd.grad(y.square().sum(), [given, *parameters])])
        for mine, theirs in zip(*results, strict=True):
            same(mine, theirs)
    return fused(compiled)


def with_compiled_autograd(flag: bool) -> list[str]:
    """The backward is a graph of torch's compiled autograd: by its flag, or as its own context."""
    plain_model, x = products()
    model = Trained(plain_model).requires_grad_()
    parameters, x = list(model.parameters()), x.requires_grad_()
    plain = torch.autograd.grad(model(x).square().sum(), parameters)
    told: list[Receipts] = []
    with (
        mock.patch.object(backend, "keep_receipts", lambda _, receipts: told.append(receipts)),
        torch._dynamo.config.patch(compiled_autograd=flag),
    ):
        compiled = torch.compile(model, backend=weft.compile_backend)
        whole = torch.compile(backend=weft.compile_backend)
        with nullcontext() if flag else compiled_autograd._enable(whole):
            compiled(x).square().sum().backward()
    for mine, theirs in zip(parameters, plain, strict=True):
        assert mine.grad is not None
        same(mine.grad, theirs)
    return [name for receipts in told for name in fused(receipts)]


@pytest.mark.slow
def test_dynamic_shapes(ranks: Any) -> None:
    for found in ranks(2, by_symbols, timeout_s=300):
        assert found == TRAINED


@pytest.mark.slow
def test_compiled_autograd(ranks: Any) -> None:
    for flag in True, False:
        for found in ranks(2, with_compiled_autograd, flag, timeout_s=300):
            assert found == TRAINED


@pytest.mark.slow
def test_graph_breaks_recompiles_and_regions(ranks: Any) -> None:
    for found in ranks(2, broken):
        assert found == BOTH * 2
    for found in ranks(2, compiled_again):
        assert found == BOTH * 2
    for alone, marked in ranks(2, regions):
        assert alone == BOTH * 2 and marked == BOTH * 2


@pytest.mark.slow
def test_reduce_overhead(ranks: Any) -> None:
    for found in ranks(2, without_overhead):
        assert found == BOTH


def test_exported_programs(ranks: Any) -> None:
    for found in ranks(2, exported):
        assert found == BOTH


@pytest.mark.slow
def test_packages_of_aotinductor(ranks: Any) -> None:
    for found in ranks(2, packaged):
        assert found == BOTH
