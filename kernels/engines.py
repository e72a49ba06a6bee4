"""The three engines of a fused op, and the choice between them.

    triton    the fused kernel: compiled on a GPU, interpreted on a CPU (slow; for tests)
    host      torch.mm on peers' shards, in place through symmetric memory
    generic   collective, then torch: always there

Every rank must choose the same engine, or they wait for each other for ever: the choice depends
only on what all ranks know alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from weft import settings
from weft.collectives import Group, cost

RunnableEngine = Literal["triton", "host", "generic"]


@dataclass(frozen=True)
class Problem:
    """One call, by what all ranks know alike.

    Attributes:
        M, N, K: the local matmul (M, K) @ (K, N), all weights of one call together.
        moved_bytes: bytes that a rank receives.
        refusal: why no fused engine can run the call; empty if one can.
        host_refusal: why the host engine cannot; empty if it can.
    """

    op: str
    M: int
    N: int
    K: int
    dtype: torch.dtype
    moved_bytes: int
    refusal: str = ""
    host_refusal: str = ""


def is_supported(
    engine: RunnableEngine, problem: Problem, group: Group, device: torch.device
) -> tuple[bool, str]:
    """Whether `engine` can run `problem`, and if not, why."""
    if engine == "generic":
        return True, ""
    if problem.refusal:
        return False, problem.refusal
    if group.why:
        return False, group.why
    if engine == "host" and problem.host_refusal:
        return False, problem.host_refusal
    if engine == "triton":
        if problem.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return False, f"the kernels take float32, bfloat16 and float16, not {problem.dtype}"
        if device.type == "cpu":
            from weft.collectives import signals

            return signals.interpreter_ready()
    return True, ""


def choose(problem: Problem, group: Group, device: torch.device) -> RunnableEngine:
    """The engine for `problem`: the one asked for, else the quickest by the cost model.

    Raises:
        NotImplementedError: the engine asked for cannot run it.
    """
    asked = settings.current_engine()
    why = "asked for"
    if asked == "auto":
        engine, why = _cheapest(problem, group, device)
    else:
        engine = asked
        supported, reason = is_supported(engine, problem, group, device)
        if not supported:
            raise NotImplementedError(
                f'{problem.op} cannot run on the "{engine}" engine that was asked for: {reason}. '
                f'weft.engine("auto") falls back.'
            )
    if settings.tracing():
        shapes = f"{problem.M}x{problem.K} @ {problem.K}x{problem.N}, {group.world_size} ranks"
        settings.record(problem.op, engine, why, shapes)
    return engine


def record_backward(op: str, engine: str, *collectives: str) -> None:
    """Tell who listens that the gradient of `op` runs, and the collectives that it does."""
    if settings.tracing():
        for collective in collectives:
            settings.record(f"{op} backward", engine, "as forward", collective, collective)


def _cheapest(problem: Problem, group: Group, device: torch.device) -> tuple[RunnableEngine, str]:
    fused: RunnableEngine = "triton" if group.on_gpus(device) else "host"
    supported, reason = is_supported(fused, problem, group, device)
    if not supported:
        return "generic", reason
    if group.world_size == 1:
        return fused if problem.host_refusal else "host", "one rank"
    times = predict(problem, group, device)
    best = min(times, key=lambda engine: times[engine])
    others = ", ".join(f"{us:.0f} us for {e}" for e, us in times.items() if e != best)
    return best, f"{times[best]:.0f} us against {others}"


def predict(problem: Problem, group: Group, device: torch.device) -> Mapping[RunnableEngine, float]:
    """Predicted time of each engine in us. CPU interpretation is not offered: it is for tests."""
    rates = cost.machine(group, device)
    matmul = rates.matmul_us(problem.M, problem.N, problem.K, problem.dtype)
    generic = matmul + rates.wire_time_us(problem.moved_bytes)
    moved = rates.memory_us(problem.moved_bytes, syncs=2)
    if not group.on_gpus(device):
        # The ranks' cores do the copies as well: nothing overlaps, but there is no second pass.
        return {"host": matmul + moved, "generic": generic}
    # The copy engine overlaps all but the first chunk; the kernel overlaps all but filling its
    # pipeline, at 95 % of the library's matmul rate.
    world_size = group.world_size
    times: dict[RunnableEngine, float] = {
        "triton": max(matmul / 0.95, moved) + 2 * rates.sync_us,
        "host": max(matmul, moved) + moved / world_size + 2 * world_size * rates.sync_us,
        "generic": generic,
    }
    if problem.host_refusal:
        del times["host"]
    return times
