"""Matmuls and attention fused with communication, and the layers made of them.

    function                  file: checks, host and     kernels of its triton engine,
                              generic engine, gradient   forward and backward
    all_gather_matmul         gathered_matmul            all_gather_gemm, all_gather_contract
    matmul_reduce_scatter     scattered_matmul           gemm_reduce_scatter, gemm_one_shot
    matmul_all_reduce         reduced_matmul             gemm_all_reduce, gemm_one_shot
    reduce_scatter_rms_norm_all_gather
                              normalized_sum             sum_rms_norm
    ring_attention            sequence_attention         ring_flash, ring_flash_backward
    ulysses_attention         head_exchange              heads_flash, heads_flash_backward
    flash_decode              cached_attention           flash_decoding
    append_to_cache           cached_attention           flash_decoding

The matmul kernels are built from `tiles`, `gathers` or `copy_engines`, `partial_sums`, `splits` and
`turns`; the attention kernels from `attention_tiles`, `ring_keys`, `ring_dkv` and `head_units`.
`engines` chooses an engine, `library` registers the functions as custom ops, `aot` compiles all
kernels without a GPU.
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
from weft.kernels.flash.geometry import from_zigzag, to_zigzag, zigzag_sizes
from weft.kernels.layers.linear import ColumnParallelLinear, RowParallelLinear
from weft.kernels.layers.vocabulary import (
    VocabParallelEmbedding,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
)
from weft.kernels.matmul.all_gather import all_gather_matmul
from weft.kernels.matmul.all_reduce import matmul_all_reduce
from weft.kernels.matmul.reduce_scatter import matmul_reduce_scatter
from weft.kernels.norm.rms_norm import reduce_scatter_rms_norm_all_gather

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "all_gather_matmul",
    "append_to_cache",
    "flash_decode",
    "from_zigzag",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter_rms_norm_all_gather",
    "ring_attention",
    "to_zigzag",
    "ulysses_attention",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "zigzag_sizes",
]
