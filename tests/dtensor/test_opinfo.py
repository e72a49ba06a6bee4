"""Torch's database of ops on DTensors: how many are right, and that none is wrong."""

from __future__ import annotations

import pytest
import torch
from opinfo import Task, check_op, count, op_variants

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
    result = check_op(Task(name, 2))
    assert result.verdict == "right", result


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("name", ["add", "index_put", "sum", "where"])
def test_some_ops_of_other_dtypes(name: str, dtype: torch.dtype) -> None:
    result = check_op(Task(name, 1, dtype=dtype))
    assert result.verdict == "right", result


@pytest.mark.sweep
@pytest.mark.parametrize(
    "dtype, samples, least",
    [(torch.float32, 3, 600), (torch.int64, 1, 450)],
)
def test_whole_database(dtype: torch.dtype, samples: int, least: int) -> None:
    results = count([Task(name, samples, dtype=dtype) for name in op_variants(dtype)], jobs=2)
    right = [r.name for r in results if r.verdict == "right"]
    wrong = {r.name: r.reasons for r in results if r.verdict == "wrong"}
    assert not wrong
    assert len(right) >= least, {r.name: r.reasons for r in results if r.verdict != "right"}
