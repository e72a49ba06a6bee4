"""The measuring of `weft bench host`: each call by one rank of 8 H100 that are not there.

Peers are words and memory of this process (`weft.sim.run.solo`). Tensors lie on the CPU: what CUDA
itself takes, and what orders streams, is in none of the times. Nor is a copy: it is enqueued with
no bytes.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from triton.backends.nvidia.driver import CudaLauncher

import weft
from weft.bench.host.add_kernel import add_kernel
from weft.bench.host.calls import CALLS
from weft.bench.host.driver import CHIP
from weft.bench.problem import Spec
from weft.bench.solo import cases
from weft.collectives.device import signals
from weft.collectives.memory import exchange
from weft.collectives.memory.waiter import Waiter
from weft.collectives.ranks import pad
from weft.kernels.attention import decode
from weft.kernels.engine import shards
from weft.kernels.matmul import all_gather_launch, copy_engines
from weft.sim.run import solo

WORLD_SIZE, RANK = 8, 1
_FAR = 1 << 62
_Call = Callable[..., Any]


@dataclass(frozen=True)
class Enqueued:
    """Medians of what the host takes for a call, in us.

    Attributes:
        total: all of it.
        launching: what Triton's launcher takes, once it has all arguments, and torch to enqueue
            copies and words of a stream: so many.
        peer: what torch.distributed takes for the same collective, through a process group that
            does nothing, or its autograd for a gradient that nobody computes; None where there is
            no one such.
    """

    name: str
    total: float
    launching: float
    launches: int
    peer: float | None

    @property
    def own(self) -> float:
        """Weft's part, and those of torch, for tensors, and of Triton, to find the kernel."""
        return self.total - self.launching

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"own": self.own}


class _Launches:
    """What Triton's launcher takes inside `watched`, and torch for copies and words of streams."""

    def __init__(self) -> None:
        self.us, self.count = 0.0, 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        with (
            patch.object(CudaLauncher, "__call__", self._timed(CudaLauncher.__call__)),
            patch.object(torch.Tensor, "copy_", self._timed(_copied)),
            patch.object(copy_engines, "stream_write", self._timed(_written)),
        ):
            yield

    def _timed(self, enqueue: _Call) -> _Call:
        def timed(*args: Any) -> Any:
            start = time.thread_time()
            result = enqueue(*args)
            self.us += (time.thread_time() - start) * 1e6
            self.count += 1
            return result

        return timed


def thread_median_us(call: _Call, rounds: int, calls: int = 20) -> float:
    """The median over rounds of the mean time of so many calls in a row.

    Time of this thread: what else the machine does is not in it.
    """
    call()
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            call()
        times.append((time.thread_time() - start) * 1e6 / calls)
    return statistics.median(times)


def enqueue_times(name: str, rounds: int, profile: bool = False) -> Enqueued:
    """One of `CALLS`; `profile`: print where its time goes."""
    with prepared(CALLS[name]) as run:
        call = partial(run, RANK)
        total = thread_median_us(call, rounds)
        told = []
        for _ in range(rounds):
            launches = _Launches()
            with launches.watched():
                call()
            told.append(launches)
        if profile:
            _profile(name, call)
    peer = peers().get(name) or peers().get(CALLS[name]["op"])
    return Enqueued(
        name,
        total,
        statistics.median(launches.us for launches in told),
        told[0].count,
        thread_median_us(peer, rounds) if peer else None,
    )


def _profile(name: str, call: _Call) -> None:
    taken = cProfile.Profile()
    taken.enable()
    for _ in range(300):
        call()
    taken.disable()
    print(f"\n{name}, 300 calls:")
    pstats.Stats(taken).sort_stats("tottime").print_stats(25)


@contextmanager
def prepared(params: dict[str, Any]) -> Iterator[Callable[[int], Any]]:
    """The call, made often enough that all is kept that is kept.

    Yields:
        what makes it, given whose tensors to take: those of any rank, all alike but for values.
    """
    device = torch.device("cpu")
    world = solo.SoloWorld(WORLD_SIZE, device, hollow=True)
    world.team.chip = CHIP
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(signals, "interpreter_ready", lambda: (True, "")))
            stack.enter_context(patch.object(torch.Tensor, "copy_", _copied))
            stack.enter_context(patch.object(decode, "host_reads", lambda lengths: False))
            for module in (all_gather_launch, shards):
                stack.enter_context(patch.object(module, "is_eager", lambda device: True))
            stack.enter_context(patch.object(copy_engines, "stream_write", _written))
            stack.enter_context(
                patch.object(exchange, "_VirtualStreamExchange", exchange.StreamExchange)
            )
            stack.enter_context(weft.engine("triton"))
            problem = cases.workload_of(Spec("", {**params, "ranks": WORLD_SIZE}), RANK, device)
            problem.prepare(world)
            stack.enter_context(world.at(RANK))
            for _ in range(3):
                problem.run(RANK)
            world.team.learning = False
            for each in ("post", "meet"):
                stack.enter_context(patch.object(solo._SoloWaiter, each, getattr(Waiter, each)))
            for buffer in world.team.buffers:
                own = buffer.segments[RANK][: pad.pad_bytes(WORLD_SIZE)].view(torch.int64)
                own[pad.HOST_SLOTS : pad.KERNEL_SLOTS : pad.LINE] = _FAR  # all hosts have come
            yield problem.run
    finally:
        world.close()


_NOTHING = torch.empty(0)
_copy = torch.Tensor.copy_


def _copied(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`into`, where a copy was enqueued that moves nothing."""
    _copy(_NOTHING, _NOTHING)
    return into


def _written(words: torch.Tensor, at: int, value: int) -> None:
    """A word was enqueued that is written nowhere."""
    _NOTHING.fill_(value)


def launch_us(rounds: int) -> float:
    """What Triton takes to launch a kernel of six arguments."""
    a, b, out = (torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3))
    return thread_median_us(lambda: add_kernel[(4,)](a, b, out, 64, 64, BLOCK=1024), rounds)


# Names of torch 2.13 on; those of before tell that they are deprecated.
_gather: _Call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: _Call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _NoGradient(torch.autograd.Function):
    """An op whose gradients nobody computes."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (*(torch.empty_like(grads[0]) for _ in ctx.needs_input_grad),)


def _autograd_alone(count: int) -> _Call:
    """What autograd itself takes for so many."""
    inputs = [torch.zeros(8, 64, requires_grad=True) for _ in range(count)]
    y = _NoGradient.apply(*inputs)
    return partial(torch.autograd.grad, y, inputs, torch.zeros_like(y), retain_graph=True)


def peers() -> dict[str, _Call]:
    """Torch's own collectives, by what weft's are called, in a group that does nothing; and what
    its autograd takes, by the names of calls."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD_SIZE)
    part, whole = torch.zeros(8, 64), torch.zeros(8 * WORLD_SIZE, 64)
    found: dict[str, _Call] = {
        "all_gather": partial(_gather, whole, part),
        "reduce_scatter": partial(_scatter, part, whole),
        "all_reduce": lambda: dist.all_reduce(part),
        "all_to_all": lambda: dist.all_to_all_single(whole, whole),
    }
    return found | {
        "its gradient of w": _autograd_alone(1),
        "its gradients": _autograd_alone(3),
        "all_gather_matmul": found["all_gather"],
        "matmul_reduce_scatter": found["reduce_scatter"],
        "matmul_all_reduce": found["all_reduce"],
    }
