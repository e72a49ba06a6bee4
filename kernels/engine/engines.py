"""The three engines of a fused op, and the choice between them.

    triton    the fused kernel: compiled on a GPU, interpreted on a CPU (slow; for tests)
    host      torch.mm on peers' shards, in place through symmetric memory
    generic   a collective, then torch: always available

All ranks must choose the same engine, or they would wait for each other forever: the choice depends
only on what every rank knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from weft import settings
from weft.collectives import Group, cost
from weft.collectives.ranks import caches
from weft.collectives.ranks.group import kept_by_group
from weft.collectives.ranks.reports import check_all
from weft.kernels.engine import kernel_rates, tuning
from weft.kernels.engine.chips import ONE_SHOT_BYTES, chip_of, gathers_by_copy_engines

RunnableEngine = Literal["triton", "host", "generic"]


@dataclass(frozen=True)
class Problem:
    """One call, described by what every rank knows.

    Attributes:
        M, N, K: the local matmul (M, K) @ (K, N), all weights of one call together.
        moved_bytes: bytes that a rank receives.
        refusal: why no fused engine can run the call; empty if one can.
        host_refusal, kernel_refusal: why that engine cannot; empty if it can.
        wire_dtype: in which partial sums are asked to travel; None: as each engine does by itself.
    """

    op: str
    M: int
    N: int
    K: int
    dtype: torch.dtype
    moved_bytes: int
    refusal: str = ""
    host_refusal: str = ""
    kernel_refusal: str = ""
    wire_dtype: torch.dtype | None = None


def too_wide(D: int, widest: int) -> str:
    """Why the attention kernel cannot hold a tile of heads of width D; empty if it can."""
    return f"its tiles hold heads up to {widest} wide, got {D}" if widest < D else ""


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
        if problem.kernel_refusal:
            return False, problem.kernel_refusal
        if problem.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
            return False, f"the kernels do not support {problem.dtype}"
        if problem.dtype == torch.float8_e4m3fn and not (chip := chip_of(device)).fp8:
            return False, f"{chip.name} has no float8_e4m3fn"
        if device.type == "cpu":
            from weft.collectives.device import signals

            return signals.interpreter_ready()
    return True, ""


def choose(problem: Problem, group: Group, device: torch.device) -> RunnableEngine:
    """The engine for `problem`: the one asked for, else the fastest by the cost model.

    Raises:
        NotImplementedError: the engine asked for cannot run it.
    """
    check_all()
    asked = settings.current_engine()
    why = "asked for"
    if asked == "auto":
        engine, why = _remembered(problem, group, device)
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
        settings.record(problem.op, engine, why, shapes, ranks=group.world_size)
    return engine


def record_backward(op: str, engine: str, group: Group, *collectives: str) -> None:
    """Tell listeners that the gradient of `op` runs, with the collectives that it makes."""
    if settings.tracing():
        for name in collectives:
            settings.record(f"{op} backward", engine, "as forward", name, name, group.world_size)


def refuse_second_order(op: str) -> None:
    """Raise NotImplementedError in a backward that is itself to be differentiated: torch would
    record it op by op and miss what moves between ranks.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"the gradient of {op} is not differentiable: leave out create_graph=True, or compose "
            f"{op} of weft.collectives and torch's own ops, whose gradients are"
        )


# Predicting takes 25 us, longer than a small call, so it is done once for each shape.
_choices: dict[tuple[Problem, Group, torch.device], tuple[RunnableEngine, str]] = {}
kept_by_group.append(_choices)
cost.kept_by_rates.append(_choices)
_MAX_CHOICES = 4096
caches.register(f"{__name__}._choices", _choices, _MAX_CHOICES)


def _remembered(problem: Problem, group: Group, device: torch.device) -> tuple[RunnableEngine, str]:
    if group.virtual is not None:  # its rates may differ in the next run
        return _cheapest(problem, group, device)
    key = problem, group, device
    choice = _choices.get(key)
    if choice is None:
        if len(_choices) >= _MAX_CHOICES:
            _choices.clear()
        choice = _choices[key] = _cheapest(problem, group, device)
    return choice


def _cheapest(problem: Problem, group: Group, device: torch.device) -> tuple[RunnableEngine, str]:
    fused: RunnableEngine = "triton" if group.on_gpus(device) else "host"
    supported, reason = is_supported(fused, problem, group, device)
    if not supported:
        return "generic", reason
    if group.world_size == 1:
        return fused if problem.host_refusal else "host", "one rank"
    prices = predict(problem, group, device)
    # On GPUs the host engine is for what the kernel cannot do: in virtual time it is slower.
    offered = [engine for engine in prices if engine in (fused, "generic")]
    best = min(offered, key=lambda engine: prices[engine].beyond_us)
    return best, _compared(best, prices)


def _compared(best: RunnableEngine, prices: Mapping[RunnableEngine, Price]) -> str:
    """Why the best was taken."""
    least = _three_digits(prices[best].us)
    others = [(_three_digits(price.us), e) for e, price in prices.items() if e != best]
    told = (f"{'the same' if us == least else f'{us} us'} for {engine}" for us, engine in others)
    return f"predicted {least} us against {', '.join(told)}"


def _three_digits(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.3g}"


class Part(NamedTuple):
    """A part of a predicted time; `how` tells where `us` comes from."""

    name: str
    us: float
    how: str


@dataclass(frozen=True)
class Price:
    """Predicted time of one engine and how it is made up, as `weft bench explain` prints it.

    Attributes:
        beyond_us: what engines are compared by: the time beyond the matmul, from what every rank
            knows. Uneven parts of a weight, which ranks do not know of each other, do not count.
        rule: how the parts make up `us`.
    """

    us: float
    beyond_us: float
    parts: tuple[Part, ...]
    rule: str = "one after the other"


def predict(problem: Problem, group: Group, device: torch.device) -> Mapping[RunnableEngine, Price]:
    """Predicted time of each engine. Interpreted kernels are not offered: they are for tests."""
    rates = cost.machine(group, device)
    if group.why:
        return {"generic": _by_process_group(problem, group, device, rates)}
    if not group.on_gpus(device):
        return _on_cpu(problem, group, device, rates)
    return _on_gpus(problem, group, device, rates)


def _on_gpus(
    problem: Problem, group: Group, device: torch.device, rates: cost.Machine
) -> dict[RunnableEngine, Price]:
    """Transfers overlap with the matmul; what does not was found in virtual time (docs/scaling.md).

    The fused gather waits for its first shards and ends with whole tiles, which costs about 2 empty
    exchanges and a third of a tile, or 16 and a 16th by copy engines. Fused sums are compared by
    their worst case, multiplying first and transferring then, without the matmul: ranks may differ
    in K.
    """
    W, matmul, sync = group.world_size, _matmul(problem, rates), rates.sync_us
    moved, (packed, start) = _moved(rates, problem.moved_bytes), _fused(problem, W, device, rates)
    kernel = _by_kernel(problem, matmul, W, device)
    # Each signal of the host engine is a kernel there.
    signals = Part("signals", 4 * W * sync, f"{4 * W} of {sync:.3g} us")
    first = Part("first shard", moved.us / W, f"1/{W} of the transfers, which nothing hides")
    triton_us = max(kernel.us, packed.us) + start.us
    host_us = max(matmul.us, moved.us) + first.us + signals.us
    generic = _by_process_group(problem, group, device, rates)
    beyond = {"triton": triton_us, "host": host_us, "generic": generic.us}
    if problem.op == "all_gather_matmul":
        beyond = {"triton": start.us, "host": first.us + signals.us, "generic": generic.beyond_us}
    elif problem.op in _SUMS:
        beyond = {"triton": packed.us + start.us, "host": moved.us + signals.us}
        beyond["generic"] = generic.beyond_us
    rule = "the longer of matmul and transfers, then the rest"
    prices: dict[RunnableEngine, Price] = {
        "triton": Price(triton_us, beyond["triton"], (kernel, packed, start), rule),
        "host": Price(host_us, beyond["host"], (matmul, moved, first, signals), rule),
        "generic": replace(generic, beyond_us=beyond["generic"]),
    }
    if problem.host_refusal:
        del prices["host"]
    return prices


def _fused(
    problem: Problem, W: int, device: torch.device, rates: cost.Machine
) -> tuple[Part, Part]:
    """Transfers of the fused kernel, and what does not overlap with its matmul."""
    sync, nbytes = rates.sync_us, problem.moved_bytes
    start = Part("signals", 2 * sync, f"2 of {sync:.3g} us")
    if problem.op == "all_gather_matmul":
        tile = rates.flops_us(128, 256, problem.K, problem.dtype) * chip_of(device).cores
        by_engines = gathers_by_copy_engines(problem.M, problem.K, problem.dtype, W)
        syncs, share = (16, 16) if by_engines else (2, 3)
        how = f"{syncs} of {sync:.3g} us, 1/{share} of a tile's {tile:.3g} us"
        start = Part("first and last tiles", syncs * sync + tile / share, how)
    elif problem.op in _SUMS:
        # moved_bytes counts fp32; for results in half precision the kernels send 24 bits, unless
        # they are asked for another dtype, which is counted.
        narrow, wire = problem.dtype.itemsize < 4, problem.wire_dtype
        counted = wire.itemsize if wire else 4
        large = problem.M * problem.N * 4 > ONE_SHOT_BYTES
        if problem.op == "matmul_all_reduce" and W > 2 and large:
            partial = counted if wire or not narrow else 3
            sent = partial + (2 if narrow else 4)  # bytes of a partial sum, and of the whole one
            nbytes = nbytes * sent // (counted * W)
            start = Part("signals of two shots", 4 * sync, f"4 of {sync:.3g} us")
        elif narrow and wire is None:
            nbytes = nbytes * 3 // 4
    return _moved(rates, nbytes), start


def _by_kernel(problem: Problem, matmul: Part, W: int, device: torch.device) -> Part:
    """The matmul of the fused kernel."""
    op, M, N, K, dtype = problem.op, problem.M, problem.N, problem.K, problem.dtype
    rate, told = kernel_rates.GUESS, "assumed"
    if op in tuning.OPS:
        chip = chip_of(device)
        rate, told = kernel_rates.rate_of(chip, kernel_rates.tile_of(op, chip, M, N, K, dtype, W))
    return Part("matmul", matmul.us / rate, f"{matmul.how}, at {rate:.0%} of that ({told})")


_SUMS = ("matmul_reduce_scatter", "matmul_all_reduce")


def _by_process_group(
    problem: Problem, group: Group, device: torch.device, rates: cost.Machine
) -> Price:
    """Predicted time of the process group's collective and a matmul."""
    nbytes = problem.moved_bytes
    if problem.op == "matmul_all_reduce" and group.on_gpus(device):
        nbytes = 2 * nbytes // group.world_size
    wire = rates.wire_time_us(nbytes)
    matmul = _matmul(problem, rates)
    how = f"{_mib(nbytes)} at {rates.wire / 1e3:.3g} GB/s + {rates.wire_us:.3g} us"
    parts = [matmul, Part("collective", wire, how)]
    if problem.op in _SUMS and problem.dtype.itemsize < 4 and group.on_gpus(device):
        parts.append(Part("rounding", rates.sync_us, f"a kernel more, {rates.sync_us:.3g} us"))
    us = sum(part.us for part in parts)
    return Price(us, us - matmul.us, tuple(parts))


def _on_cpu(
    problem: Problem, group: Group, device: torch.device, rates: cost.Machine
) -> dict[RunnableEngine, Price]:
    """The ranks' cores also copy, so nothing overlaps; but nothing is copied twice.

    `auto` has collectives through the same memory in the place of the process group's. They read
    the same bytes, and write them once more before the matmul can begin: it never leaves the host
    engine for them, and so compares by that.
    """
    matmul, moved = _matmul(problem, rates), _moved(rates, problem.moved_bytes)
    signals = Part("signals", 2 * rates.sync_us, f"2 of {rates.sync_us:.3g} us")
    beyond_us = fused_us(problem.moved_bytes, rates)
    generic = _by_process_group(problem, group, device, rates)
    return {
        "host": Price(matmul.us + beyond_us, beyond_us, (matmul, moved, signals)),
        "generic": replace(generic, beyond_us=collective_us(problem.moved_bytes, rates)),
    }


def fused_us(nbytes: float, rates: cost.Machine, hidden_us: float = 0.0) -> float:
    """What a fused op takes beyond its computation, which hides `hidden_us` of the transfers."""
    return max(rates.memory_us(nbytes, syncs=0) - hidden_us, 0.0) + rates.memory_us(0, syncs=2)


def collective_us(nbytes: float, rates: cost.Machine) -> float:
    """What a collective of its own takes through symmetric memory: it reads what a fused op would,
    and writes it once more before the computation can begin.
    """
    return rates.memory_us(2 * nbytes, syncs=2)


def _matmul(problem: Problem, rates: cost.Machine) -> Part:
    M, N, K, dtype = problem.M, problem.N, problem.K, problem.dtype
    us = rates.matmul_us(M, N, K, dtype)
    if us > rates.flops_us(M, N, K, dtype):
        touched = _mib((M * K + K * N + M * N) * dtype.itemsize)
        return Part("matmul", us, f"{touched} of operands at {2 * rates.copy / 1e3:.3g} GB/s")
    how = f"2 x {M} x {N} x {K} flop at {rates.flops_of(dtype) / 1e3:.3g} GFLOP/s"
    return Part("matmul", us, how)


def _moved(rates: cost.Machine, nbytes: int) -> Part:
    us = rates.memory_us(nbytes, syncs=0)
    return Part("transfers", us, f"{_mib(nbytes)} from peers at {rates.copy / 1e3:.3g} GB/s")


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.3g} MiB"
