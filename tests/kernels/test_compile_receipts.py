"""What is told of a compiled model: where receipts are kept, logged and printed."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.kernels.graphs.backend import _being_compiled
from weft.kernels.graphs.receipts import (
    Receipt,
    Receipts,
    keep_receipts,
    line_of,
    receipts_of,
)


@pytest.mark.parametrize("asked", ["", "compile"])
def test_receipts_are_logged_where_asked_for(
    asked: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each collective, and the count; nothing of a graph without any."""
    monkeypatch.setenv("WEFT_LOG", asked)
    told = [
        Receipt("all_gather", ("8", "16"), "all_gather_matmul", "with 2 matmuls", "m.py:3, in up"),
        Receipt("all_reduce", ("2",), "", "no matmul makes what it adds up"),
    ]
    with caplog.at_level(logging.INFO, logger="weft.compile"):
        keep_receipts(None, Receipts(told))
        keep_receipts(None, Receipts())
    lines = [
        "all_gather(8 x 16) -> all_gather_matmul, with 2 matmuls   # m.py:3, in up",
        "all_reduce(2) stays: no matmul makes what it adds up",
        "1 of 2 collectives fused",
    ]
    wanted = [("weft.compile", logging.INFO, "\n".join(lines))] if asked else []
    assert caplog.record_tuples == wanted


_TOLD = """
import logging, sys
from weft.kernels.graphs.receipts import Receipt, Receipts, keep_receipts
if sys.argv[1:]:
    logging.basicConfig(format="mine: %(message)s")
for _ in range(2):
    keep_receipts(None, Receipts([Receipt("all_reduce", ("2",), "", "no matmul makes it")]))
"""


@pytest.mark.slow
def test_receipts_are_printed_by_the_variable_alone() -> None:
    """To stderr; or as the process logs, at whatever level, if it does."""
    for given, name in ((), "weft.compile"), (("configured",), "mine"):
        command = [sys.executable, "-c", _TOLD, *given]
        asked = os.environ | {"WEFT_LOG": "compile"}
        made = subprocess.run(command, env=asked, capture_output=True, text=True, check=True)
        line = f"{name}: all_reduce(2) stays: no matmul makes it\n0 of 1 collectives fused\n"
        assert made.stderr.endswith(line * 2) and made.stderr.count("0 of 1") == 2


def test_receipts_of_what_is_decorated() -> None:
    def forward() -> None: ...

    @functools.wraps(forward)
    def decorated() -> None:
        forward()

    told = Receipts([Receipt("all_reduce", ("2",), "", "no matmul makes what it adds up")])
    keep_receipts(decorated.__code__, told)
    assert receipts_of(decorated) == told and receipts_of(forward) == ()


class Model(nn.Module):
    """Of this file."""


def test_lines_are_those_of_the_model() -> None:
    """Of the file of a module that runs, whoever has wrapped that; else the innermost of others."""
    node = torch.fx.Graph().placeholder("x")
    frames = [(__file__, "forward"), ("/site/wrap.py", "wrapped"), (torch.__file__, "f")]
    node.meta["stack_trace"] = "\n".join(f'File "{at}", line 7, in {name}' for at, name in frames)
    assert line_of(node) == "/site/wrap.py:7, in wrapped"
    stack = {"0": ("model", Model), "1": ("model.up", nn.Linear)}
    for of in "nn_module_stack", "fwd_nn_module_stack":
        node.meta[of] = stack
        assert line_of(node) == f"{__file__}:7, in forward"
        del node.meta[of]


def test_what_has_not_been_compiled_is_told_so() -> None:
    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(Part(), Part())
    before = "call it first"
    assert before in str(weft.explain(torch.compile(model, backend="eager")))
    for part in model:
        part.compile(backend="eager")
    assert before in str(weft.explain(model)) and "0 of 0" not in str(weft.explain(model))
    # Regions of one class share their code: each graph is told of once.
    told = Receipts([Receipt("all_reduce", ("2",), "", "no matmul makes what it adds up")])
    keep_receipts(Part.forward.__code__, told)
    assert str(weft.explain(model)) == str(told)


def test_receipts_of_modules_of_torchs_own_are_told_apart() -> None:
    """Torch compiles one function for all of them, as it does not look into their forward."""

    def backend(model: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        size = (str(inputs[0].shape[-1]),)
        keep_receipts(_being_compiled(), Receipts([Receipt("all_reduce", size, "", "alone")]))
        return model.forward

    small, large = (torch.compile(nn.Sequential(nn.Linear(n, n)), backend=backend) for n in (2, 3))
    for n, each in ((2, small), (3, large)):
        each(torch.ones(1, n))
    for n, each in ((2, small), (3, large)):
        told = weft.explain(each).receipts
        assert [receipt.shape for receipt in told] == [(str(n),)], told
