"""On the ranks: prepare a case, compare every variant with the oracle, time what is right.

The machine's speed drifts by more than the differences of interest. So all variants of a case and
their bounds run in turn, one call each, round after round, in one set of processes; each call
starts at a barrier.
"""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from weft import collectives, settings
from weft.bench.problem import Call, Options, Prepared, Spec, Suite, Tensors
from weft.bench.rows import Case, Timing
from weft.collectives.cost import device_us
from weft.errors import PeerTimeout
from weft.settings import Decision

_WARMUP = 2
_ROUNDS = (7, 101)
_LONGEST = 300  # characters of a reason


@contextmanager
def time_limit(until: float | None) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at `until`, of time.monotonic(): as Ctrl-C would."""
    if until is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, max(until - time.monotonic(), 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class TimedRanks:
    """What the ranks of a run share: a clock, and a way to exchange results."""

    def __init__(self, options: Options, progress: Callable[[Any], None]) -> None:
        self.alive = lambda: progress(("alive", None))
        self.several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if self.several else None
        self._flush: torch.Tensor | None = None
        if options.device == "cuda":
            l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            self._flush = torch.empty(2 * l2, dtype=torch.uint8, device="cuda")

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        if not self.several:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def synchronize(self) -> None:
        if self._flush is not None:
            torch.cuda.synchronize()

    def seconds(self, call: Call, number: int) -> tuple[float, float]:
        """Time of one call, and how much of it went by waiting for peers (on the CPU)."""
        if self._flush is None:
            if self.several:
                collectives.barrier()
            waited, start = collectives.wait_seconds(), time.perf_counter()
            call(number)
            return time.perf_counter() - start, collectives.wait_seconds() - waited
        self._flush.zero_()  # nothing of the last call stays in L2
        torch.cuda.synchronize()
        if self.several:
            collectives.barrier()
        return device_us(lambda: call(number)) * 1e-6, 0.0


def run_case(suite: Suite, spec: Spec, options: Options, ranks: TimedRanks) -> Case:
    world_size = options.ranks if suite.WORLD == "ranks" else 1
    case = Case(suite.NAME, spec.name, {**spec.params, "ranks": world_size})
    prepared, case.failure, _ = _attempt(lambda: suite.prepare(spec, options), ranks)
    if prepared is None:
        return case
    case.params |= spec.params  # `prepare` may have added what it found
    case.bound_rule, case.main, case.peer = prepared.bound_rule, prepared.main, prepared.peer
    case.notes = prepared.notes
    if prepared.virtual:
        _ask(case, prepared, ranks)
        return case
    calls: dict[str, Call] = {}
    oracle = None
    if (expect := prepared.expected) is not None:
        oracle, case.failure, _ = _attempt(lambda: as_list(expect()), ranks)
        if case.failure:
            return case
    for name, call in prepared.variants.items():
        expected = None if name in prepared.unchecked else oracle
        timing = case.variants[name] = _checked(call, prepared, expected, ranks)
        if not timing.failure:
            calls[name] = call
        ranks.alive()
    del oracle
    for name, why in prepared.absent.items():
        case.variants[name] = Timing(failure=why)
    case.bounds = {name: Timing() for name in prepared.bounds}
    _fill_in_times(case, calls, prepared, options, ranks)
    return case


def _ask(case: Case, prepared: Prepared, ranks: TimedRanks) -> None:
    """Fill in the times of a case whose calls know them."""
    for kind, calls in ((case.variants, prepared.variants), (case.bounds, prepared.bounds)):
        for name, call in calls.items():
            us, failure, _ = _attempt(partial(call, 0), ranks)
            times = [] if failure else [us]
            kind[name] = Timing(times, times, failure=failure)
            ranks.alive()
    for name, why in prepared.absent.items():
        case.variants[name] = Timing(failure=why)


def _attempt(call: Callable[[], Any], ranks: TimedRanks) -> tuple[Any, str, list[Decision]]:
    """The value of a call, or why it raised, the same on every rank.

    Raises:
        RuntimeError: it raised on some ranks only: these cannot work together any more.
    """
    value, failure = None, ""
    decisions: list[Decision] = []
    try:
        with settings.explaining() as decisions:
            value = call()
        ranks.synchronize()
    except PeerTimeout:
        raise
    except Exception as error:  # whatever a variant raises is its row, not the end of the run
        failure = f"{type(error).__name__}: {short(str(error))}"
        ranks.synchronize()  # raises where the GPU refuses all that follows: others must go on
    failures = ranks.gather(failure)
    if all(failures):
        return None, failures[0], decisions
    if any(failures):
        rank, text = next((r, text) for r, text in enumerate(failures) if text)
        raise RuntimeError(f"only some ranks failed: rank {rank} with {text}")
    return value, "", decisions


def _checked(
    call: Call, prepared: Prepared, expected: list[torch.Tensor] | None, ranks: TimedRanks
) -> Timing:
    """A timing without a time: how far the variant's result is from the oracle's."""
    value, failure, decisions = _attempt(lambda: prepared.observe(call(0)), ranks)
    timing = Timing(failure=failure, engine=decisions[0].engine if decisions else "")
    if expected is not None and not failure:
        off = deviation(as_list(value), expected) / prepared.tolerance
        timing.error = max(ranks.gather(off))
        if not timing.error <= 1:
            timing.failure = (
                f"wrong: {timing.error:.3g} times the tolerance, {prepared.tolerance:.1e} of the "
                f"largest value, away from the oracle"
            )
    return timing


def as_list(value: Tensors) -> list[torch.Tensor]:
    """One tensor or several, as a list."""
    return [value] if isinstance(value, torch.Tensor) else list(value)


def deviation(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest deviation, relative to each tensor's largest value; inf for NaN, other shapes."""
    if [each.shape for each in got] != [each.shape for each in expected]:
        return math.inf
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        if a.numel() == 0:
            continue
        difference = (a.detach().to(torch.float64) - b.to(torch.float64)).abs().max().item()
        if math.isnan(difference):
            return math.inf
        worst = max(worst, difference / max(b.abs().max().item(), 1e-30))
    return worst


def _fill_in_times(
    case: Case, calls: Mapping[str, Call], prepared: Prepared, options: Options, ranks: TimedRanks
) -> None:
    """Fill in the times of a case's variants and bounds, on every rank."""
    if not calls:
        return
    inputs = prepared.inputs
    names = [("variants", name) for name in calls] + [("bounds", name) for name in prepared.bounds]
    every = [*calls.values(), *prepared.bounds.values()]
    start = time.perf_counter()
    for number in range(_WARMUP):
        for call in every:
            ranks.seconds(call, number % inputs)
        ranks.alive()
    took = max(ranks.gather((time.perf_counter() - start) / _WARMUP))
    rounds = _rounds(options, took)
    own = torch.zeros(rounds, len(every), 2, dtype=torch.float64)
    for number in range(rounds):
        for i in order(len(every), number):
            own[number, i] = torch.tensor(ranks.seconds(every[i], number % inputs))
        ranks.alive()
    table = torch.stack(ranks.gather(own)) * (1e6 / prepared.repeats)
    medians = table.median(1).values  # of (rank, round, call, [time, wait])
    for i, (kind, name) in enumerate(names):
        timing: Timing = getattr(case, kind)[name]
        timing.rounds_us = table[:, :, i, 0].max(0).values.tolist()
        timing.ranks_us = medians[:, i, 0].tolist()
        timing.waited_us = float(medians[:, i, 1].max()) or None


def order(count: int, number: int) -> list[int]:
    """Who runs after whom in a round: over `count` rounds each follows each equally often.

    What ran before decides what is in the caches and whose threads still wind down. (A Williams
    design; for an odd count every other cycle of rounds runs backwards.)

    Example: of 4, rounds 0 to 3: 0 1 3 2, 1 2 0 3, 2 3 1 0, 3 0 2 1.
    """
    zigzag = [(i + 1) // 2 if i % 2 else -i // 2 for i in range(count)]
    order = [(each + number) % count for each in zigzag]
    return order[::-1] if count % 2 and number // count % 2 else order


def _rounds(options: Options, round_s: float) -> int:
    if options.rounds is not None:
        return options.rounds
    least, most = (3, 9) if options.quick else _ROUNDS
    seconds = options.seconds / 10 if options.quick else options.seconds
    return round(min(max(least, seconds / max(round_s, 1e-9)), most))


def short(text: str) -> str:
    """What went wrong: a rank's death, else the last line of a traceback; its first sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    died = [line for line in lines if re.match(r"rank \d+ was (killed|exited)", line)]
    named = [line for line in lines if line.partition(":")[0].endswith(("Error", "Timeout"))]
    line = (died or named or lines or ["no reason given"])[0]
    sentence = line.partition(". ")[0]
    return sentence if len(sentence) <= _LONGEST else f"{sentence[:_LONGEST]} ..."
