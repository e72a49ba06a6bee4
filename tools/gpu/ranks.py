"""Ranks as threads, and the small calls of one rank alone: for steps, and to compile for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def on_ranks(
    device: str, W: int, body: Callable[[int], None], seconds: float, *, launches: bool = True
) -> None:
    """`body(rank)` on virtual ranks, with a process group: compiled on a GPU, else interpreted.

    Args:
        launches: whether kernels run: those of ranks that wait for each other need queues of their
            own on a GPU.
    """
    import torch.distributed as dist

    from weft import sim
    from weft.sim.run.gpu import run_threads

    def on_rank(rank: int) -> None:
        dist.init_process_group("gloo")
        body(rank)

    if device == "cuda" and not launches:
        run_threads(W, on_rank, torch.device(device, torch.cuda.current_device()), seconds)
    elif device == "cuda":
        sim.run_on_gpu(W, on_rank, timeout=seconds)
    else:
        sim.run(W, on_rank, races=False, timeout=seconds)


def small_cases() -> list[Any]:
    """Small calls of one of two ranks, which wait for nobody."""
    from weft.bench.solo import cases

    return list[Any](cases.of_each_kind(cases.cases(True, [2])))
