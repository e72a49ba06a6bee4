"""Results of calls whose waits failed: NaN on every rank that waited, never what lay there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import sim_cases
import torch
import torch.distributed as dist
from needs import needs_interpreter
from triton.runtime.interpreter import GridExecutor

import weft
from weft.collectives import Workspace
from weft.collectives.memory.exchange import StreamExchange
from weft.collectives.ranks import reports


class Absent(BaseException):
    """In place of this rank's first kernel. Of an Exception, its peers would be told."""


def in_a_stream(ws: Workspace, op: str, *_: Any, **__: Any) -> StreamExchange:
    return StreamExchange(ws, op)


@contextmanager
def _nobody_fills() -> Iterator[None]:
    """New memory is of zeros, as it may be by chance; kernels wait for 4 us."""

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)

    def refuses(*_: Any, **__: Any) -> None:
        raise Absent

    impatient = property(lambda ws: 4000)
    with (
        patch.object(torch, "empty", empty),
        patch.object(torch, "empty_like", torch.zeros_like),
        patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
        patch.object(Workspace, "timeout_ns", impatient),
        # Exchanges as GPUs make them: every step is a kernel.
        patch.object(sys.modules[StreamExchange.__module__], "exchange_on", in_a_stream),
        # Interpreted kernels are over when their launch returns, and calls look at once.
        patch.object(Workspace, "check", lambda ws, op: None),
        patch.object(Workspace, "launched", lambda ws, op: None),
        patch.object(reports.Report, "check", lambda report: None),
    ):
        if dist.get_rank() == dist.get_world_size() - 1:
            with patch.object(GridExecutor, "__call__", refuses), pytest.raises(Absent):
                yield
        else:
            yield
    dist.barrier()
    weft.close()
    dist.barrier()


def _spoilt(result: torch.Tensor, wanted: torch.Tensor, **_: Any) -> None:
    assert result.shape == wanted.shape and result.isnan().all(), result


CASES = sim_cases.KERNELS | sim_cases.COLLECTIVES


@needs_interpreter
@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_of_a_kernel_that_waited_in_vain_are_nan(case: Callable[..., None]) -> None:
    with patch.object(torch.testing, "assert_close", _spoilt), _nobody_fills():
        case(dist.get_rank())


def _results(op: str) -> list[torch.Tensor]:
    """Of a call on the host engine, and its gradients."""
    W = dist.get_world_size()
    x = torch.ones(4, 8, requires_grad=True)
    w = torch.ones(8, 6, requires_grad=True)
    qkv = [torch.ones(1, 2, 4, 4, requires_grad=True) for _ in range(3)]
    leaves: list[torch.Tensor] = [x, w]
    if op == "all_gather_matmul":
        y = weft.all_gather_matmul(x, w, sizes=[4] * W)
    elif op == "matmul_reduce_scatter":
        y = weft.matmul_reduce_scatter(x, w)
    elif op == "matmul_all_reduce":
        leaves = []  # their gradients need no peer
        y = weft.matmul_all_reduce(x, w)
    elif op == "ring_attention":
        leaves = qkv
        y = weft.ring_attention(*qkv)
    elif op == "ulysses_attention":
        leaves = qkv
        y = weft.ulysses_attention(*qkv)
    elif op == "all_gather":
        leaves = [x]
        y = weft.collectives.all_gather(x, sizes=[4] * W)
    elif op == "reduce_scatter":
        leaves = [x]
        y = weft.collectives.reduce_scatter(x)
    elif op == "all_reduce":
        leaves = []
        y = weft.collectives.all_reduce(x.detach())
    elif op == "all_to_all":
        leaves = [x]
        y = weft.collectives.all_to_all(x)
    else:
        leaves = []
        y = weft.collectives.broadcast(x.detach(), src=1)
    if leaves:
        y.sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    assert None not in gradients
    return [y.detach(), *gradients]


@needs_interpreter
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "op",
    [
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "matmul_all_reduce",
        "ring_attention",
        "ulysses_attention",
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "broadcast",
    ],
)
def test_results_of_streams_that_waited_in_vain_are_nan(op: str) -> None:
    """The host engine and collectives without kernels of their own."""
    with weft.engine("host"):
        _results(op)  # has the workspaces made, with the help of all ranks
        with _nobody_fills():
            for result in _results(op):
                assert result.isnan().all(), result
