"""The calls of `weft bench host`, as cases of `weft bench solo`: those of a Llama of 8B."""

from __future__ import annotations

from typing import Any


def _matmul_params(op: str, M: int, N: int, K: int, **more: Any) -> dict[str, Any]:
    return {"op": op, "M": M, "N": N, "K": K, "dtype": "bfloat16", **more}


def _attention_params(op: str, step: str) -> dict[str, Any]:
    sizes = {"tokens": 4096, "H": 32, "H_kv": 8, "D": 128}
    return {"op": op, **sizes, "dtype": "bfloat16", "step": step}


def _collective_params(op: str) -> dict[str, Any]:
    return {"op": op, "nbytes": 64 << 10, "dtype": "bfloat16"}


# Hidden 4096, ffn 14336; N and K of the whole layer.
CALLS: dict[str, dict[str, Any]] = {
    "all_gather_matmul, 2048 tokens": _matmul_params("all_gather_matmul", 2048, 28672, 4096),
    "all_gather_matmul, 8192 tokens": _matmul_params("all_gather_matmul", 8192, 28672, 4096),
    "its gradient of w": _matmul_params("weight gradient", 2048, 28672, 4096),
    "matmul_reduce_scatter, 2048 tokens": _matmul_params(
        "matmul_reduce_scatter", 2048, 4096, 14336
    ),
    "matmul_all_reduce, 2048 tokens": _matmul_params("matmul_all_reduce", 2048, 4096, 14336),
    "matmul_all_reduce, 8 tokens": _matmul_params("matmul_all_reduce", 8, 4096, 14336),
    "... with bias and residual": _matmul_params(
        "matmul_all_reduce", 8, 4096, 14336, epilogue="bias + residual"
    ),
    "reduce_scatter_rms_norm_all_gather": {
        "op": "norm", "tokens": 8, "H": 4096, "dtype": "bfloat16",
    },
    "all_reduce_residual_rms_norm": {
        "op": "norm", "tokens": 8, "H": 4096, "dtype": "bfloat16", "which": "whole",
    },
    "ring_attention": _attention_params("ring_attention", "forward"),
    "its gradients": _attention_params("ring_attention", "backward"),
    "ulysses_attention": _attention_params("ulysses_attention", "forward"),
    "flash_decode": {
        "op": "flash_decode", "batch": 16, "tokens": 8192, "H": 32, "H_kv": 8, "D": 128,
        "dtype": "bfloat16",
    },
    "experts, 64 tokens": {
        "op": "experts", "tokens": 64, "H": 4096, "F": 1792, "experts": 64, "top_k": 8,
        "dtype": "bfloat16",
    },
    **{
        op: _collective_params(op)
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    },
}  # fmt: skip
