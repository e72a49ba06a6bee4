"""The engines of a fused op, and the choice between them.

    triton    the fused kernel: compiled on a GPU, interpreted on a CPU (slow; for tests)
    host      torch.mm on peers' shards, in place through symmetric memory
    generic   a collective, then torch: always available
    hosts     for a group over several hosts: one of these inside each, block by block, while the
              process group moves the next one between them; "auto" takes it where it pays

All ranks must choose the same engine, or they would wait for each other forever: the choice depends
only on what every rank knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from weft import settings
from weft.collectives import Group, cost
from weft.collectives.prices import between_hosts, hardware, library
from weft.collectives.prices.hardware import Hardware
from weft.collectives.protocols import COLLECTIVE_OF, Collective, moved_bytes
from weft.collectives.ranks.caches import KeptDict
from weft.collectives.ranks.group import kept_by_group
from weft.collectives.ranks.reports import check_all
from weft.collectives.topology import hosts_in_words, in_two_levels
from weft.kernels.engine import fused_times, kernel_rates, tuning
from weft.kernels.engine.chips import chip_of

if TYPE_CHECKING:
    from weft.collectives.kernels.collective_launch import CollectiveConfig

RunnableEngine = Literal["triton", "host", "generic", "hosts"]

# The ops that run in two levels.
_OVER_HOSTS = *COLLECTIVE_OF, "ring_attention"


class TokensOverHosts(NamedTuple):
    """Bytes that a rank receives from other hosts, on average: each token once a host, as in two
    levels, and once for each of its experts.
    """

    once: float
    flat: float


@dataclass(frozen=True)
class Problem:
    """One call, described by what every rank knows.

    Attributes:
        M, N, K: the local matmul (M, K) @ (K, N), all weights of one call together.
        moved_bytes: bytes that a rank receives.
        refusal: why no fused engine can run the call; empty if one can.
        host_refusal, kernel_refusal: why that engine cannot; empty if it can.
        wire_dtype: in which partial sums are asked to travel; None: as each engine does by itself.
        attention: what it attends to, on GPUs.
        tokens: of experts over several hosts, what moves; None if they cannot go host by host.
        most_own: the most of any rank of the dim that only a rank itself knows, if they have told
            each other: the columns of a gather's weights, the contraction of a sum. 0: unknown.
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
    attention: fused_times.AttentionWork | None = None
    tokens: TokensOverHosts | None = None
    most_own: int = 0


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
    why = group.unreached(device) or _refusal_of(engine, problem, device)
    return not why, why


def _refusal_of(engine: RunnableEngine, problem: Problem, device: torch.device) -> str:
    """Why an engine cannot run `problem` where memory is shared; empty if it can."""
    if engine == "host":
        return problem.host_refusal
    if engine == "triton":
        if problem.kernel_refusal:
            return problem.kernel_refusal
        if problem.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
            return f"the kernels do not support {problem.dtype}"
        if problem.dtype == torch.float8_e4m3fn and not (chip := chip_of(device)).fp8:
            return f"{chip.name} has no float8_e4m3fn"
        if device.type == "cpu":
            from weft.collectives.device import signals

            ready, why = signals.interpreter_ready()
            return "" if ready else why
    return ""


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


def record_backward(
    op: str, engine: str, group: Group, *collectives: str, why: str = "as forward"
) -> None:
    """Tell listeners that the gradient of `op` runs, with the collectives that it makes."""
    if settings.tracing():
        for name in collectives:
            settings.record(f"{op} backward", engine, why, name, name, group.world_size)


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
_choices = KeptDict[tuple[Problem, Group, torch.device, bool, int], tuple[RunnableEngine, str]](
    4096, f"{__name__}._choices"
)
kept_by_group.append(_choices)
cost.kept_by_rates.append(_choices)


def _remembered(problem: Problem, group: Group, device: torch.device) -> tuple[RunnableEngine, str]:
    if group.virtual is not None:  # its rates may differ in the next run
        return _cheapest(problem, group, device)
    key = problem, group, device, settings.multimem(), settings.sms()
    choice = _choices.get(key)
    if choice is None:
        choice = _choices[key] = _cheapest(problem, group, device)
    return choice


def _cheapest(problem: Problem, group: Group, device: torch.device) -> tuple[RunnableEngine, str]:
    fused = _fused_engine(group, device)
    supported, reason = is_supported(fused, problem, group, device)
    if not supported:
        if not _over_hosts(problem, group, device):
            return "generic", reason
        prices = predict(problem, group, device)
        best = min(prices, key=lambda engine: prices[engine].score)
        if best == "hosts":
            reason = f"{hosts_in_words(group)}, fused inside each"
        return best, f"{reason}: {_compared(best, prices)}"
    without = f"; not host: {problem.host_refusal}" if problem.host_refusal else ""
    if group.world_size == 1:
        return fused if problem.host_refusal else "host", f"one rank{without}"
    prices = predict(problem, group, device)
    # On GPUs the host engine of matmuls is for what the kernel cannot do: in virtual time it is
    # slower. Ranks that stand for GPUs do not have the library's attention.
    by_library = problem.attention is not None and group.virtual is None
    offered = [engine for engine in prices if engine != "host" or fused == "host" or by_library]
    best = min(offered, key=lambda engine: prices[engine].score)
    return best, f"{_compared(best, prices)}{without}"


def _fused_engine(group: Group, device: torch.device) -> Literal["triton", "host"]:
    """The one for tensors on `device` where all ranks share memory."""
    return "triton" if group.on_gpus(device) else "host"


def _over_hosts(problem: Problem, group: Group, device: torch.device) -> bool:
    """Scales of fp8 do not cross. Attention is merged as on the host engine. Of experts, nothing
    but the fused engine can be inside a host.
    """
    fits = not problem.refusal and problem.dtype != torch.float8_e4m3fn
    fits &= problem.op != "ring_attention" or not problem.host_refusal
    if problem.tokens is not None:
        return fits and not _refusal_of(_fused_engine(group, device), problem, device)
    return fits and problem.op in _OVER_HOSTS and in_two_levels(group)


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
        score: what engines are compared by, less is better, from what every rank knows. Uneven
            parts of a weight, which ranks do not know of each other, do not count: us beyond the
            matmul, or of fused matmuls on GPUs the most that it takes of the best one's time.
        rule: how the parts make up `us`.
    """

    us: float
    score: float
    parts: tuple[Part, ...]
    rule: str = "one after the other"


def predict(problem: Problem, group: Group, device: torch.device) -> Mapping[RunnableEngine, Price]:
    """Predicted time of each engine. Interpreted kernels are not offered: they are for tests."""
    rates = cost.machine(group, device)
    if _over_hosts(problem, group, device):
        return _prices_in_two_levels(problem, group, device, rates)
    if group.unreached(device):
        return {"generic": _by_process_group(problem, rates)}
    if not group.on_gpus(device):
        return _prices_on_cpu(problem, group, device, rates)
    return _on_gpus(problem, group, device, rates)


def _prices_in_two_levels(
    problem: Problem, group: Group, device: torch.device, rates: cost.Machine
) -> dict[RunnableEngine, Price]:
    """Compared by what moves: of the levels, blocks of one hide behind those of the other."""
    if problem.tokens is not None:
        return _experts_in_two_levels(problem, problem.tokens, group, rates)
    op, size = COLLECTIVE_OF.get(problem.op, "all_gather"), problem.dtype.itemsize
    matmul, sizes = _matmul_part(problem, rates), (problem.op, problem.M, problem.N, problem.K)
    if problem.op not in COLLECTIVE_OF:  # gathers keys and values
        whole = flat_bytes = problem.moved_bytes * group.world_size // (group.world_size - 1)
    elif op == "all_gather":
        whole = flat_bytes = moved_bytes(*sizes, size)
    else:
        wire = problem.wire_dtype.itemsize if problem.wire_dtype else size
        whole, flat_bytes = moved_bytes(*sizes, wire), moved_bytes(*sizes, max(size, 4))
    ours, flat = between_hosts.lines(op, group, device)
    between = Part("between hosts", ours.between * whole, f"{_mib(whole)}, each host's part once")
    inside = Part("inside hosts", ours.inside * whole, f"at {rates.copy / 1e3:.3g} GB/s")
    start = Part("signals", ours.start, f"{rates.between_us:.3g} us of them between hosts")
    us = max(matmul.us + inside.us, between.us) + start.us
    moved_us = max(inside.us, between.us) + start.us
    flat_us = flat.us(flat_bytes)
    how = f"{_mib(flat_bytes)}, received at {rates.wire / 1e3:.3g} GB/s"
    rule = "the longer of what is between hosts and inside, with the matmul, then the rest"
    return {
        "hosts": Price(us, moved_us, (matmul, between, inside, start), rule),
        "generic": Price(matmul.us + flat_us, flat_us, (matmul, Part("collective", flat_us, how))),
    }


def _experts_in_two_levels(
    problem: Problem, tokens: TokensOverHosts, group: Group, rates: cost.Machine
) -> dict[RunnableEngine, Price]:
    """Tokens of two levels are pulled once more inside, in two exchanges of their own, and what is
    made of the two is put together.
    """
    matmul, rate = _matmul_part(problem, rates), between_hosts.slowest(rates)
    copied = problem.M * (problem.K + problem.N) * problem.dtype.itemsize
    inside = Part("inside hosts", copied / max(rates.copy, 1e-9), f"{_mib(copied)}, pulled, merged")
    start = Part("signals", rates.between_us + 4 * rates.sync_us, "1 between hosts, 4 inside")
    wire = Part("signals", rates.wire_us, "of the process group")
    once, flat = (
        Part("between hosts", nbytes / rate, f"{_mib(nbytes)} at {rate / 1e3:.3g} GB/s")
        for nbytes in tokens
    )
    ours, theirs = (matmul, once, inside, start), (matmul, flat, wire)
    return {
        "hosts": Price(sum(p.us for p in ours), sum(p.us for p in ours[1:]), ours),
        "generic": Price(sum(p.us for p in theirs), sum(p.us for p in theirs[1:]), theirs),
    }


def _on_gpus(
    problem: Problem, group: Group, device: torch.device, rates: cost.Machine
) -> dict[RunnableEngine, Price]:
    """Transfers overlap with the matmul."""
    if problem.op in tuning.OPS:
        return _fused_matmul(problem, group, device, rates)
    if problem.attention is not None:
        chip = hardware_of(group, device)
        return attention_prices(problem, problem.attention, chip, rates, group.world_size)
    W, matmul, sync = group.world_size, _matmul_part(problem, rates), rates.sync_us
    moved = _transfers(rates, problem.moved_bytes)
    how = f"{matmul.how}, at {kernel_rates.GUESS:.0%} of that (assumed)"
    kernel = Part("matmul", matmul.us / kernel_rates.GUESS, how)
    start = Part("signals", 2 * sync, f"2 of {sync:.3g} us")
    triton_us = max(kernel.us, moved.us) + start.us
    unfused = _by_process_group(problem, rates)
    rule = "the longer of matmul and transfers, then the rest"
    prices: dict[RunnableEngine, Price] = {
        "triton": Price(triton_us, triton_us, (kernel, moved, start), rule),
        "host": _by_copies(matmul, moved, W, sync),
        "generic": replace(unfused, score=unfused.us),
    }
    if problem.host_refusal:
        del prices["host"]
    return prices


def attention_prices(
    problem: Problem,
    work: fused_times.AttentionWork,
    chip: Hardware,
    rates: cost.Machine,
    W: int,
) -> dict[RunnableEngine, Price]:
    """Forward on W GPUs, by the rates of a library's attention."""
    sync = rates.sync_us
    times = fused_times.attention_times(work, chip, fused_times.dtype_name(problem.dtype))
    moved, how = _transfers(rates, problem.moved_bytes), f"{work.queries} queries, {work.seen} keys"
    kernel = Part("attention", times.fused, f"{how} at {times.rate:.0%} of a library")
    start = Part("signals", 2 * sync, f"2 of {sync:.3g} us")
    fused = max(kernel.us, moved.us) + start.us
    us = times.parts + times.merges
    parts = Part("attention", us, f"{how}, in {work.parts} parts, merged in {times.merges:.3g} us")
    host = _by_copies(parts, moved, W, sync)
    if work.parts == 1:  # whose heads must all have come
        us = parts.us + moved.us + 4 * W * sync
        host = Price(us, us, (parts, moved, host.parts[-1]))
    gathered = Part("attention", times.gathered, f"{how} of {work.keys}, by the library")
    unfused = (gathered, *_by_process_group(problem, rates).parts[1:])
    us = sum(part.us for part in unfused)
    rule = "the longer of attention and transfers, then the rest"
    prices: dict[RunnableEngine, Price] = {
        "triton": Price(fused, fused, (kernel, moved, start), rule),
        "host": host,
        "generic": Price(us, us, unfused),
    }
    if problem.host_refusal:
        del prices["host"]
    return prices


def _by_copies(matmul: Part, moved: Part, W: int, sync: float) -> Price:
    """The host engine on GPUs, where each of its signals is a kernel."""
    signals = Part("signals", 4 * W * sync, f"{4 * W} of {sync:.3g} us")
    first = Part("first shard", moved.us / W, f"1/{W} of the transfers, which nothing hides")
    us = max(matmul.us, moved.us) + first.us + signals.us
    rule = "the longer of matmul and transfers, then the rest"
    return Price(us, us, (matmul, moved, first, signals), rule)


def _by_process_group(problem: Problem, rates: cost.Machine) -> Price:
    """Predicted time of the process group's collective and a matmul."""
    nbytes, matmul = problem.moved_bytes, _matmul_part(problem, rates)
    how = f"{_mib(nbytes)} at {rates.wire / 1e3:.3g} GB/s + {rates.wire_us:.3g} us"
    parts = matmul, Part("collective", rates.wire_time_us(nbytes), how)
    us = sum(part.us for part in parts)
    return Price(us, us - matmul.us, parts)


def _fused_matmul(
    problem: Problem, group: Group, device: torch.device, rates: cost.Machine
) -> dict[RunnableEngine, Price]:
    """By the closed forms that virtual time is held against."""
    W, dtype = group.world_size, fused_times.dtype_name(problem.dtype)
    chip = hardware_of(group, device)
    switch = settings.multimem()
    made = kernel_time(problem, chip, W, switch)
    nbytes = made.link_us * chip.link_rate(W)
    rate = f"at {chip.flops[dtype] * chip.sustained / 1e12:.3g} TFLOP/s"
    flop = f"2 x {problem.M} x {problem.N} x {problem.K} flop {rate}"
    parts = (
        Part("matmul", made.matmul_us, f"{flop}, at {made.rate:.0%} of that ({made.told})"),
        Part("transfers", made.link_us, f"{_mib(nbytes)} at {chip.link_rate(W) / 1e3:.3g} GB/s"),
        Part("not hidden", made.us - max(made.matmul_us, made.link_us), made.way),
    )
    most = regrets(problem, chip, W, switch)
    unfused = unfused_parts(problem, chip, W, switch)
    rule = "the longer of matmul and transfers, then the rest"
    prices: dict[RunnableEngine, Price] = {
        "triton": Price(made.us, most["triton"], parts, rule),
        "generic": Price(sum(part.us for part in unfused), most["generic"], unfused),
    }
    if not problem.host_refusal:
        moved = _transfers(rates, problem.moved_bytes)
        prices["host"] = _by_copies(unfused[0], moved, W, rates.sync_us)
    return prices


def kernel_time(problem: Problem, chip: Hardware, W: int, switch: bool) -> fused_times.FusedTime:
    """The kernel as it is launched; where the switch may add up, by that if it is quicker."""
    sizes = problem.op, problem.M, problem.N, problem.K, fused_times.dtype_name(problem.dtype)
    wire, of = problem.wire_dtype, problem.dtype
    if of.itemsize == 1:
        of = torch.bfloat16  # the result
    made = fused_times.fused_time(*sizes, chip, W, wire=wire)
    # Of 24 bits, in which half precision travels by itself, the switch can add up nothing.
    if not switch or made.way != "two shots" or (problem.dtype.itemsize < 4 and wire is None):
        return made
    sent, shown = (problem.M * problem.N * each for each in ((wire or of).itemsize, of.itemsize))
    if not fused_times.adds_by_switch(sent, shown, chip.fabric(W)):
        return made
    return fused_times.fused_time(*sizes, chip, W, "by the switch", wire=wire)


def collective_config_on(chip: Hardware, op: Collective, piece: int, W: int) -> CollectiveConfig:
    """How `auto` launches a kernel's collective of floats on such chips; `piece` as `nbytes` there.

    Words that carry their flag are for sums on chips of NVIDIA, as `movement` has it.
    """
    from weft.collectives.kernels.collective_launch import collective_config

    words = not chip.chip.startswith("gfx")
    return collective_config(op, piece, W, True, links=chip.fabric(W), words=words)


def unfused_parts(
    problem: Problem, chip: Hardware, W: int, switch: bool = False
) -> tuple[Part, ...]:
    """A matmul by the library, and the quickest collective: the generic engine under "auto".

    Args:
        switch: whether the NVLink switch may add up, in an order of its own.
    """
    from weft.collectives.kernels import collective_launch as kernels

    M, N, K, op = problem.M, problem.N, problem.K, COLLECTIVE_OF[problem.op]
    size, dtype = problem.dtype.itemsize, fused_times.dtype_name(problem.dtype)
    summed = op != "all_gather"
    wire = problem.wire_dtype.itemsize if problem.wire_dtype else max(size, 4)
    nbytes = moved_bytes(problem.op, M, N, K, wire if summed else size)
    piece = nbytes if op == "all_reduce" else -(-nbytes // W)
    config = collective_config_on(chip, op, piece, W)
    may_switch = size > 1 and (switch or not summed)
    way, us, _ = kernels.quickest_way(op, piece, chip.fabric(W), config, switch=may_switch)
    by = {"triton": "a kernel", "switch": "the switch", "generic": "NCCL"}[way]
    matmul = library.matmul_us(chip, M, N, K, dtype)
    parts = [
        Part("matmul", matmul, f"2 x {M} x {N} x {K} flop by the library"),
        Part("collective", us, f"{op} of {_mib(nbytes)} by {by}"),
    ]
    if summed and size < wire:
        rows = M // W if op == "reduce_scatter" else M
        us = chip.launch_us + library.moved_us(chip, rows * N * (wire + size))
        parts.append(Part("rounding", us, "a kernel more"))
    return tuple(parts)


# Of the dim that ranks have parts of, maybe uneven ones, sizes that layers have on all of them,
# relative to the other dim: of projections of attention, and of feed-forward layers.
_OWN_SIZES = (1.0, 2.0, 4.0)


def regrets(
    problem: Problem, chip: Hardware, W: int, switch: bool = False
) -> dict[RunnableEngine, float]:
    """The most that each engine takes of the quickest one's time: at `most_own`, or over sizes of
    the dim that only a rank itself knows.

    Args:
        switch: whether the NVLink switch may add up.
    """
    return dict(_regrets(_with_own(problem, problem.most_own), chip, W, switch))


def _with_own(problem: Problem, size: int) -> Problem:
    """`size` for the dim that only a rank knows."""
    if problem.op == "all_gather_matmul":
        return replace(problem, N=max(1, size))
    return replace(problem, K=max(1, size))


@lru_cache(maxsize=4096)
def _regrets(
    problem: Problem, chip: Hardware, W: int, switch: bool
) -> tuple[tuple[RunnableEngine, float], ...]:
    most: dict[RunnableEngine, float] = {"triton": 0.0, "generic": 0.0}
    known = problem.K if problem.op == "all_gather_matmul" else problem.N
    usual = [round(known * part / W) for part in _OWN_SIZES]
    for size in [problem.most_own] if problem.most_own else usual:
        tried = _with_own(problem, size)
        us: dict[RunnableEngine, float] = {
            "triton": kernel_time(tried, chip, W, switch).us,
            "generic": sum(each.us for each in unfused_parts(tried, chip, W, switch)),
        }
        for engine, each in us.items():
            most[engine] = max(most[engine], each / min(us.values()))
    return tuple(most.items())


def hardware_of(group: Group, device: torch.device) -> Hardware:
    """The chips of a group, with the cores that are a rank's own."""
    found = hardware.of_group(group, device)
    if group.virtual is not None and group.virtual.hardware is not None:
        return found
    return replace(found, cores=chip_of(device).cores)


def _prices_on_cpu(
    problem: Problem, group: Group, device: torch.device, rates: cost.Machine
) -> dict[RunnableEngine, Price]:
    """The ranks' cores also copy, so nothing overlaps; but nothing is copied twice.

    `auto` has collectives through the same memory in the place of the process group's. They read
    the same bytes, and write them once more before the matmul can begin: it never leaves the host
    engine for them, and so compares by that.
    """
    matmul, moved = _matmul_part(problem, rates), _transfers(rates, problem.moved_bytes)
    signals = Part("signals", 2 * rates.sync_us, f"2 of {rates.sync_us:.3g} us")
    beyond_us = exposed_us(problem.moved_bytes, rates)
    generic = _by_process_group(problem, rates)
    return {
        "host": Price(matmul.us + beyond_us, beyond_us, (matmul, moved, signals)),
        "generic": replace(generic, score=collective_us(problem.moved_bytes, rates)),
    }


def exposed_us(nbytes: float, rates: cost.Machine, hidden_us: float = 0.0) -> float:
    """What a fused op takes beyond its computation, which hides `hidden_us` of the transfers."""
    return max(rates.memory_us(nbytes, syncs=0) - hidden_us, 0.0) + rates.memory_us(0, syncs=2)


def collective_us(nbytes: float, rates: cost.Machine) -> float:
    """What a collective of its own takes through symmetric memory: it reads what a fused op would,
    and writes it once more before the computation can begin.
    """
    return rates.memory_us(2 * nbytes, syncs=2)


def _matmul_part(problem: Problem, rates: cost.Machine) -> Part:
    M, N, K, dtype = problem.M, problem.N, problem.K, problem.dtype
    us = rates.matmul_us(M, N, K, dtype)
    if us > rates.flops_us(M, N, K, dtype):
        touched = _mib((M * K + K * N + M * N) * dtype.itemsize)
        return Part("matmul", us, f"{touched} of operands at {2 * rates.copy / 1e3:.3g} GB/s")
    how = f"2 x {M} x {N} x {K} flop at {rates.flops_of(dtype) / 1e3:.3g} GFLOP/s"
    return Part("matmul", us, how)


def _transfers(rates: cost.Machine, nbytes: int) -> Part:
    us = rates.memory_us(nbytes, syncs=0)
    return Part("transfers", us, f"{_mib(nbytes)} from peers at {rates.copy / 1e3:.3g} GB/s")


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.3g} MiB"
