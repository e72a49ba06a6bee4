"""Virtual ranks on one GPU: threads of this process, with the kernels compiled and nothing checked.

    thread 0 --launches--> stream 0, on 1 / W of the cores  \\
    thread 1 --launches--> stream 1, on 1 / W of the cores   > signals and data in the GPU's memory
      ...                                                   /

The kernels of all ranks are on the GPU at the same time and wait for each other there. Why none of
them keeps another from starting:
    1. A grid that waits has at most cores / W programs (`chip_of`): those of all ranks fit.
    2. A stream has a hardware queue of its own. In a shared one, a kernel that waits would hold up
       what another rank has enqueued behind it. There are 32: with copy engines 8 ranks use them
       all (`copy_engines.STREAMS` and its own for each), so that no graph can be captured beside.
    3. No rank launches before all ranks are about to, or goes on before all have (`keep_step`).
       CUDA may wait for all that runs before it loads a kernel or makes a handle: a rank that had
       to do so before it launches would wait for a kernel that waits for it.
    4. Backward runs in the rank's own thread. Torch's thread for the GPU would serve all ranks.
What is overlooked here ends by the time-out that every wait has.
"""

from __future__ import annotations

import contextvars
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from weft import settings
from weft.collectives.memory.symmetric import SymmetricBuffer
from weft.collectives.memory.waiter import Waiter
from weft.collectives.memory.workspace import forget
from weft.collectives.prices.hardware import PRESETS, Hardware
from weft.collectives.ranks import pad
from weft.collectives.ranks.group import forget_meshes, here
from weft.errors import PeerTimeout
from weft.sim.hooks.host_access import tensors_in
from weft.sim.run import distributed_hooks
from weft.sim.run.team import Meeting, Members, OneMemory, Teams, VirtualMemory


def run_on_gpu(
    world_size: int, fn: Callable[[int], Any], *, timeout: float | None = None
) -> list[Any]:
    """Run `fn(rank)` on `world_size` virtual ranks that share the current GPU.

    Inside, `group=None` is the virtual world and torch.distributed works, as in `sim.run`. "cuda"
    is the default device, kernels are compiled, and each rank has a `world_size`-th of the GPU's
    cores. Ranks run at the same time and are not checked: `sim.run` finds races and deadlocks, this
    shows that the compiled kernels agree, without processes to start.

    The ranks are threads. They share Python's memory and torch's default generators: give what is
    random a `torch.Generator` of its own.

    Args:
        fn: called once a rank, in a stream of its own.
        timeout: seconds for all of it; None: no limit but WEFT_TIMEOUT_S, for each wait.

    Returns:
        fn's results, in rank order; the GPU has finished.

    Raises:
        RuntimeError: there is no GPU, kernels are interpreted in this process, or it has used the
            GPU without the variable that the message names.
        PeerTimeout: a rank did not come.
        TimeoutError: it took longer than `timeout`; says where the ranks were.
        Exception: what `fn` raised first, with a note of the rank.

    Example:
        >>> def mean(rank):
        ...     x = torch.tensor([float(rank)])
        ...     return weft.collectives.all_reduce(x, reduce_op="avg").item()
        >>> weft.sim.run_on_gpu(3, mean)
        [1.0, 1.0, 1.0]
    """
    if not 1 <= world_size <= pad.MAX_RANKS:
        raise ValueError(f"world_size must be in 1..{pad.MAX_RANKS}, got {world_size}")
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU here: sim.run needs none")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("kernels are interpreted in this process: unset TRITON_INTERPRET")
    prepare_queues(torch.cuda.is_initialized())
    device = torch.device("cuda", torch.cuda.current_device())
    return run_threads(world_size, fn, device, timeout)


def prepare_queues(initialised: bool) -> None:
    """Have the GPU's queues be as many as there may be, before it is `initialised`.

    Raises:
        RuntimeError: it was, with others.
    """
    name, value = "CUDA_DEVICE_MAX_CONNECTIONS", "32"
    if torch.version.hip:
        name, value = "GPU_MAX_HW_QUEUES", "24"
    if not initialised:
        os.environ[name] = value
    elif os.environ.get(name) != value:
        raise RuntimeError(
            f"ranks that share a process need {name}={value} in the environment before the process "
            f"first uses the GPU"
        )


_STEP_S = 5.0  # in which a rank that launches what others do is expected to


class _Stopped(BaseException):
    """Unwinds a rank after another one has failed."""


class ThreadWorld(Teams["ThreadTeam"]):
    """The threads of one run, all on `device`."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        super().__init__()
        self.world_size, self.device = world_size, device
        self.everybody = tuple(range(world_size))
        self.failure: Exception | None = None
        self.kept: list[torch.Tensor] = []  # a rank may read after its owner has let go
        self._changed = threading.Condition(threading.RLock())
        self._waits: dict[int, Callable[[], bool]] = {}  # by rank: whether what it awaits has come
        self._steps = [0] * world_size
        self._loading, self._loads = 0, threading.Lock()

    def new_team(self, name: str, ranks: tuple[int, ...]) -> ThreadTeam:
        return ThreadTeam(self, name, ranks)

    def team(self, name: str, ranks: tuple[int, ...]) -> ThreadTeam:
        """The group that its members call `name`."""
        with self._changed:
            return super().team(name, ranks)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other rank changes what they share inside the block. Then those that wait look."""
        with self._changed:
            yield
            self._changed.notify_all()

    @contextmanager
    def waiting(self, come: Callable[[], bool]) -> Iterator[None]:
        """This rank launches nothing inside the block before `come()`."""
        rank = rank_here()
        with self.alone():
            self._waits[rank] = come
        try:
            yield
        finally:
            with self.alone():
                del self._waits[rank]

    def sleep_until(self, come: Callable[[], bool], late: Callable[[float], Exception]) -> None:
        """Wait until `come()`; raise `late(seconds)` if that takes too long."""
        timeout_s = settings.timeout_s()
        with self._changed, self.waiting(come):
            at_most_s = min(timeout_s, threading.TIMEOUT_MAX)
            self._changed.wait_for(lambda: come() or self.failure, at_most_s)
            if not come():
                raise _Stopped if self.failure else late(timeout_s)

    def ended(self, rank: int) -> None:
        """`rank` launches nothing any more."""
        with self.alone():
            self._waits[rank] = lambda: False

    @contextmanager
    def loads(self) -> Iterator[None]:
        """Kernels are compiled and loaded by one rank at a time."""
        with self.alone():
            self._loading += 1
        try:
            with self._loads:
                yield
        finally:
            with self.alone():
                self._loading -= 1

    def keep_step(self) -> None:
        """Wait until all ranks have called this as often, but for those that cannot."""
        rank = rank_here()
        with self._changed:
            number = self._steps[rank] = self._steps[rank] + 1
            self._changed.notify_all()

            def come() -> bool:
                return bool(self.failure) or all(
                    count >= number or (other in self._waits and not self._waits[other]())
                    for other, count in enumerate(self._steps)
                )

            while not self._changed.wait_for(come, _STEP_S) and self._loading:
                pass
            if self.failure:
                raise _Stopped
            # Who waits, or does not launch this kernel, is not expected to catch up.
            self._steps = [max(count, number) for count in self._steps]

    def fail(self, error: Exception, rank: int) -> None:
        """End all ranks: what the first has to say, counts."""
        with self.alone():
            if self.failure is None:
                self.failure = error
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"on virtual rank {rank}")


class ThreadTeam(OneMemory, Members):
    """The ranks `ranks` of a `ThreadWorld`, in this order."""

    chip = ""  # that of the device itself

    def __init__(self, world: ThreadWorld, name: str, ranks: tuple[int, ...]) -> None:
        super().__init__(name, ranks)
        self._world = world
        self.device, self.sharing = world.device, world.world_size

    @property
    def hardware(self) -> Hardware | None:
        """What the choice of an engine is made from: ranks with a GPU each, of this kind."""
        from weft.kernels.engine.chips import chip_of

        chip = chip_of(self.device).name
        return next((each for each in PRESETS.values() if each.chip == chip), None)

    def arrive(self, member: int, value: Any, call: str) -> Meeting:
        """Bring `value` to the next call of the team, which must be the same `call` for all.

        Raises:
            MismatchError: another member makes another call.
        """
        _finish_writing(value)
        with self._world.alone():
            return self.enter(member, value, call)

    def attend(self, meeting: Meeting, call: str) -> list[Any]:
        """What every member brought to `meeting`, once all have come."""

        def late(seconds: float) -> Exception:
            member, *_ = set(range(len(self.ranks))) - set(meeting.values)
            return PeerTimeout(rank_here(), self.ranks[member], call, meeting.number, seconds)

        self._world.sleep_until(lambda: meeting.complete, late)
        values = [meeting.values[i][0] for i in range(len(self.ranks))]
        _use_here(values)
        return values

    def timed_as_one(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def memory(
        self, member: int, pad_bytes: int, data_bytes: int, device: torch.device
    ) -> VirtualMemory:
        """Zeroed pads and data that hold NaN."""
        segments: list[torch.Tensor] = []
        if member == 0:
            for _ in self.ranks:
                segment = torch.full(
                    (pad_bytes + data_bytes,), 255, dtype=torch.uint8, device=device
                )
                segment[:pad_bytes] = 0
                segments.append(segment)
            self._world.kept += segments
        return VirtualMemory(self.gather(member, segments)[0])

    def waiter(self, buffer: SymmetricBuffer) -> Waiter:
        """Signals between the hosts of the members."""
        return _ThreadWaiter(self._world, buffer)

    def send(self, source: int, target: int, tag: int, value: torch.Tensor) -> None:
        """Leave `value` for member `target`; never waits."""
        _finish_writing(value)
        with self._world.alone():
            self.mail[source, target, tag].append(value)

    def receive(self, source: int | None, target: int, tag: int) -> tuple[int, torch.Tensor]:
        """The next value that `source` (None: anybody) left for `target`, and who it was."""
        sources = range(len(self.ranks)) if source is None else [source]

        def late(seconds: float) -> Exception:
            peer = self.ranks[next(s for s in sources if s != target)]
            return PeerTimeout(self.ranks[target], peer, f"receive, {tag=}", 0, seconds)

        self._world.sleep_until(lambda: self.has_mail(source, target, tag), late)
        with self._world.alone():
            sender = self.senders(source, target, tag)[0]
            value = self.mail[sender, target, tag].popleft()
        _use_here(value)
        return sender, value


def rank_here() -> int:
    """The rank of this thread."""
    assert here.world is not None
    return here.world.rank


class _ThreadWaiter(Waiter):
    """Gives way at once, as threads of one process take turns in Python."""

    SPIN_S = YIELD_S = 0.0

    def __init__(self, world: ThreadWorld, buffer: SymmetricBuffer) -> None:
        super().__init__(buffer)
        self._world = world

    def _wait(self, slot: int, peer: int, value: int, op: str) -> None:
        with self._world.waiting(lambda: self.own[slot] >= value):
            super()._wait(slot, peer, value, op)

    def check(self, op: str) -> None:
        """Raise if a wait on this memory has timed out, or a rank has failed."""
        if self._world.failure:
            raise _Stopped
        super().check(op)


def _finish_writing(value: Any) -> None:
    """Hold this thread until the tensors in `value` can be read in other streams."""
    if any(x.is_cuda for x in tensors_in([value])):
        torch.cuda.current_stream().synchronize()


def _use_here(value: Any) -> None:
    """The memory of the tensors in `value` is not used again before this stream has come so far."""
    for x in tensors_in([value]):
        if x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))


def run_threads(
    world_size: int, fn: Callable[[int], Any], device: torch.device, timeout: float | None = None
) -> list[Any]:
    """`run_on_gpu`, on any device. On a CPU kernels cannot run, as the interpreter is one for all
    threads: the other engines can.
    """
    world = ThreadWorld(world_size, device)
    results: list[Any] = [None] * world_size
    ready = threading.Barrier(world_size)

    def body(rank: int) -> None:
        try:
            with ExitStack() as stack:
                stream = _own_stream(stack, device)
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                stack.callback(world.ended, rank)
                stack.callback(forget, rank)
                stack.enter_context(distributed_hooks.rank_of(world, rank))
                ready.wait()
                results[rank] = fn(rank)
                if stream:
                    stream.synchronize()
        except Exception as error:
            world.fail(error, rank)
            ready.abort()
        except (_Stopped, SystemExit):
            pass

    with distributed_hooks.installed(), _launched_together(world):
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(body, rank), daemon=True)
            for rank in world.everybody
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        for thread in threads:
            thread.join(min(max(end - time.monotonic(), 0), threading.TIMEOUT_MAX))
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"took longer than {timeout:g} s (timeout=):\n{_stacks(threads)}")
    for forget_mesh in forget_meshes:
        forget_mesh()
    if world.failure is not None:
        raise world.failure
    return results


def _own_stream(stack: ExitStack, device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    stack.enter_context(torch.cuda.stream(stream))
    stack.enter_context(device)  # the default one
    return stream


@contextmanager
def _launched_together(world: ThreadWorld) -> Iterator[None]:
    """The ranks load, and then launch, each of Triton's kernels together."""
    run = JITFunction.run

    def run_with_others(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if warmup or here.world is None:
            return run(kernel, *args, grid=grid, warmup=warmup, **options)
        with world.loads():
            run(kernel, *args, grid=grid, warmup=True, **options)._init_handles()
        world.keep_step()
        launched = run(kernel, *args, grid=grid, warmup=False, **options)
        world.keep_step()
        return launched

    with patch.object(JITFunction, "run", run_with_others):
        yield


def _stacks(threads: list[threading.Thread]) -> str:
    frames = sys._current_frames()
    return "\n".join(
        f"rank {rank}:\n{''.join(traceback.format_stack(frames[thread.ident])[-6:])}"
        for rank, thread in enumerate(threads)
        if thread.ident in frames
    )
