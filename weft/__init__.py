"""weft: Triton kernels that fuse computation with communication, behind a lean DTensor.

Names are resolved on first use, so that `import weft` is quick: it does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft import bench as bench
    from weft import collectives as collectives
    from weft import dtensor as dtensor
    from weft import kernels as kernels
    from weft import sim as sim
    from weft.collectives import caches as caches
    from weft.collectives import close as close
    from weft.collectives import cuda_graph as cuda_graph
    from weft.errors import MismatchError as MismatchError
    from weft.errors import PeerTimeout as PeerTimeout
    from weft.errors import WeftError as WeftError
    from weft.kernels import ColumnParallelLinear as ColumnParallelLinear
    from weft.kernels import ExpertParallelMLP as ExpertParallelMLP
    from weft.kernels import RowParallelLinear as RowParallelLinear
    from weft.kernels import VocabParallelEmbedding as VocabParallelEmbedding
    from weft.kernels import all_gather_matmul as all_gather_matmul
    from weft.kernels import all_reduce_residual_rms_norm as all_reduce_residual_rms_norm
    from weft.kernels import append_to_cache as append_to_cache
    from weft.kernels import dispatch_grouped_matmul as dispatch_grouped_matmul
    from weft.kernels import flash_decode as flash_decode
    from weft.kernels import grouped_matmul_combine as grouped_matmul_combine
    from weft.kernels import matmul_all_reduce as matmul_all_reduce
    from weft.kernels import matmul_reduce_scatter as matmul_reduce_scatter
    from weft.kernels import (
        reduce_scatter_rms_norm_all_gather as reduce_scatter_rms_norm_all_gather,
    )
    from weft.kernels import ring_attention as ring_attention
    from weft.kernels import topk_router as topk_router
    from weft.kernels import ulysses_attention as ulysses_attention
    from weft.kernels import vocab_parallel_argmax as vocab_parallel_argmax
    from weft.kernels import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from weft.kernels.graphs.backend import compile_backend as compile_backend
    from weft.kernels.graphs.backend import compile_pass as compile_pass
    from weft.settings import engine as engine
    from weft.settings import explain as explain


def _version() -> str:
    """That of what is installed; of a checkout that is not, the one in pyproject.toml."""
    try:
        return version("weft")
    except PackageNotFoundError:
        told = Path(__file__).parent.parent / "pyproject.toml"
        lines = told.read_text().splitlines() if told.exists() else []
        found = [line.split('"')[1] for line in lines if line.startswith("version = ")]
        return found[0] if found else "0+unknown"


__version__ = _version()

_FOLDERS = ("bench", "collectives", "dtensor", "kernels", "sim")
# Public names, and the module that each is imported from.
_HOME = {
    "all_gather_matmul": "weft.kernels",
    "matmul_reduce_scatter": "weft.kernels",
    "matmul_all_reduce": "weft.kernels",
    "reduce_scatter_rms_norm_all_gather": "weft.kernels",
    "all_reduce_residual_rms_norm": "weft.kernels",
    "ring_attention": "weft.kernels",
    "ulysses_attention": "weft.kernels",
    "flash_decode": "weft.kernels",
    "append_to_cache": "weft.kernels",
    "dispatch_grouped_matmul": "weft.kernels",
    "grouped_matmul_combine": "weft.kernels",
    "ColumnParallelLinear": "weft.kernels",
    "ExpertParallelMLP": "weft.kernels",
    "RowParallelLinear": "weft.kernels",
    "VocabParallelEmbedding": "weft.kernels",
    "topk_router": "weft.kernels",
    "vocab_parallel_argmax": "weft.kernels",
    "vocab_parallel_cross_entropy": "weft.kernels",
    "compile_backend": "weft.kernels.graphs.backend",
    "compile_pass": "weft.kernels.graphs.backend",
    "engine": "weft.settings",
    "explain": "weft.settings",
    "caches": "weft.collectives",
    "close": "weft.collectives",
    "cuda_graph": "weft.collectives",
    "WeftError": "weft.errors",
    "PeerTimeout": "weft.errors",
    "MismatchError": "weft.errors",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        value: object = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _FOLDERS:
        value = importlib.import_module(f"weft.{name}")
    else:
        raise AttributeError(f"module 'weft' has no attribute {name!r}{_hint(name)}")
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """Where else a public name is, for those who look for it here."""
    # Names that inspectors ask every module for, and modules that `from weft import` comes to next.
    if name.startswith("_") or importlib.util.find_spec(f"weft.{name}"):
        return ""
    for folder in ("collectives", "kernels", "dtensor", "sim"):
        if name in importlib.import_module(f"weft.{folder}").__all__:
            return f": it is weft.{folder}.{name}"
    return ""


def __dir__() -> list[str]:
    return sorted({*_HOME, *_FOLDERS, "__version__"})
