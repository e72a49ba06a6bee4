"""Matmuls fused with communication, and the layers that are made of them."""

if not __name__.startswith("weft."):
    raise ImportError("import weft.kernels: the top-level name is not ours")

from weft.kernels import library as library  # registers torch.ops.weft
from weft.kernels import library_attention as library_attention
from weft.kernels.cached_attention import flash_decode
from weft.kernels.gathered_matmul import all_gather_matmul
from weft.kernels.head_exchange import ulysses_attention
from weft.kernels.parallel_linear import ColumnParallelLinear, RowParallelLinear
from weft.kernels.reduced_matmul import matmul_all_reduce
from weft.kernels.scattered_matmul import matmul_reduce_scatter
from weft.kernels.sequence_attention import ring_attention
from weft.kernels.sharded_sequence import from_zigzag, to_zigzag, zigzag_sizes

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "all_gather_matmul",
    "flash_decode",
    "from_zigzag",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "ring_attention",
    "to_zigzag",
    "ulysses_attention",
    "zigzag_sizes",
]
