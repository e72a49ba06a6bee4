"""Matmuls and attention fused with communication, and the layers made of them.

    function                  checks, host and generic    kernels of its triton engine,
                              engine, gradient            forward and backward
    all_gather_matmul         matmul/all_gather           all_gather_kernel, contract_kernel
    matmul_reduce_scatter     matmul/reduce_scatter       reduce_scatter_kernel, one_shot_kernel
    matmul_all_reduce         matmul/all_reduce           two_shot_kernel, one_shot_kernel
    reduce_scatter_rms_norm_all_gather
                              norm/rms_norm               rms_norm_kernel
    all_reduce_residual_rms_norm
                              norm/all_reduce_norm        rms_norm_kernel
    ring_attention            attention/ring              flash/ring_kernel, ring_grad_kernel
    ulysses_attention         attention/ulysses           heads/heads_kernel, heads_grad_kernel
    flash_decode              attention/decode            flash/decode_kernel
    append_to_cache           attention/decode            flash/append_kernel
    dispatch_grouped_matmul   experts/dispatch            expert_kernels/dispatch_kernel
    grouped_matmul_combine    experts/combine             expert_kernels/combine_kernel

From the bottom up: `engine` (what all ops share on the host), `device` (what matmul kernels are
built from), `matmul`, `norm`, `flash`, `heads`, `attention`, `expert_kernels`,
`experts`, `layers`; `custom_ops` registers the
functions with torch.library, `compile` has all kernels compiled without a GPU.
"""

if not __name__.startswith("weft."):
    raise ImportError(
        "import weft.kernels: the top-level name is not ours. If another package is meant, "
        "install weft (pip install -e .) rather than have its checkout on the path"
    )

from weft.kernels import custom_ops as custom_ops  # they register torch.ops.weft
from weft.kernels.attention import custom_ops as _attention_ops  # noqa: F401
from weft.kernels.attention.decode import append_to_cache, flash_decode
from weft.kernels.attention.ring import ring_attention
from weft.kernels.attention.ulysses import ulysses_attention
from weft.kernels.experts import custom_ops as _expert_ops  # noqa: F401
from weft.kernels.experts.combine import combine, grouped_matmul_combine
from weft.kernels.experts.dispatch import dispatch, dispatch_grouped_matmul
from weft.kernels.experts.grouped import grouped_matmul
from weft.kernels.experts.routing import Routing, route
from weft.kernels.flash.geometry import from_zigzag, to_zigzag, zigzag_sizes
from weft.kernels.layers.experts import ExpertParallelMLP
from weft.kernels.layers.linear import ColumnParallelLinear, RowParallelLinear
from weft.kernels.layers.router import topk_router
from weft.kernels.layers.vocabulary import (
    VocabParallelEmbedding,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
)
from weft.kernels.matmul.all_gather import all_gather_matmul
from weft.kernels.matmul.all_reduce import matmul_all_reduce
from weft.kernels.matmul.reduce_scatter import matmul_reduce_scatter
from weft.kernels.norm import custom_ops as _norm_ops  # noqa: F401
from weft.kernels.norm.all_reduce_norm import all_reduce_residual_rms_norm
from weft.kernels.norm.rms_norm import reduce_scatter_rms_norm_all_gather

__all__ = [
    "ColumnParallelLinear",
    "ExpertParallelMLP",
    "Routing",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "all_gather_matmul",
    "all_reduce_residual_rms_norm",
    "append_to_cache",
    "combine",
    "dispatch",
    "dispatch_grouped_matmul",
    "flash_decode",
    "from_zigzag",
    "grouped_matmul",
    "grouped_matmul_combine",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter_rms_norm_all_gather",
    "ring_attention",
    "route",
    "to_zigzag",
    "topk_router",
    "ulysses_attention",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "zigzag_sizes",
]


def __dir__() -> list[str]:
    """What is public, for completion."""
    return sorted(__all__)
