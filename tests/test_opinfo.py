"""Torch's database of ops on DTensors: how many are right, and that none is wrong."""

from __future__ import annotations

import pytest
import torch
from opinfo import check_op, count, op_variants

# Of each family one, quick: the whole database is a sweep.
SOME = [
    "add",
    "amax",
    "cumsum",
    "index_put",
    "linalg_inv",
    "masked_select",
    "nn_functional_conv2d",
    "nn_functional_mse_loss",
    "sort",
    "unfold",
    "view",
]


if hasattr(torch.nn.functional, "linear_cross_entropy"):  # of torch 2.13
    SOME.append("nn_functional_linear_cross_entropy_chunked_none")


@pytest.mark.parametrize("name", SOME)
def test_some_ops(name: str) -> None:
    result = check_op(name, 2)
    assert result.verdict == "right", result


@pytest.mark.sweep
def test_whole_database() -> None:
    results = count(list(op_variants()), 3, jobs=2)
    right = [r.name for r in results if r.verdict == "right"]
    wrong = {r.name: r.reasons for r in results if r.verdict == "wrong"}
    assert not wrong
    assert len(right) >= 600, {r.name: r.reasons for r in results if r.verdict != "right"}
