"""A pool of rank processes that run one function after another."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._device import _device_constructors


class RankError(AssertionError):
    """A body failed or hung on a rank; the message holds that rank's traceback."""


def poisoned(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.empty` or the like, filled with NaN (or a large number): unwritten output shows."""

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = plain(*args, **kwargs)
        if type(out) is torch.Tensor and not out.is_meta and kwargs.get("out") is None:
            with torch.no_grad():
                if out.is_floating_point():
                    out.fill_(float("nan"))
                elif out.dtype in (torch.int32, torch.int64):
                    out.fill_(-(2**30))
        return out

    return empty


def _serve(
    rank: int, world_size: int, store: str, pipe: Connection, trace_path: str, device: str
) -> None:
    # Open for the life of the rank: faulthandler writes there.
    with open(trace_path, "w") as trace:
        faulthandler.register(signal.SIGUSR1, trace, all_threads=True)
        torch.set_num_threads(1)
        # Default devices hold for the functions in this list, made when it is first asked for.
        _device_constructors()
        torch.empty = poisoned(torch.empty)  # type: ignore[assignment]
        if device == "cuda":  # several ranks may share a GPU, which NCCL refuses
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        pipe.send_bytes(b"ready")
        while True:
            try:
                job = pipe.recv_bytes()
            except EOFError:
                break
            try:
                body, args = pickle.loads(job)
                torch.manual_seed(0)
                reply = (True, body(*args))
            except BaseException as error:
                reply = (False, (repr(error), traceback.format_exc()))
                if isinstance(error, (KeyboardInterrupt, SystemExit)):  # not pytest's own
                    pipe.send_bytes(pickle.dumps(reply))
                    raise
            pipe.send_bytes(pickle.dumps(reply))
        sys.stdout.flush()
        os._exit(0)  # no destructors: a peer may be gone already


# What most tests need. Many ops import torch's tracer on their way.
PRELOADED = ["weft.kernels", "weft.dtensor", "torch._dynamo", "pytest"]


class RankPool:
    """`world_size` processes with torch.distributed (gloo) over them, for tensors on `device`.

    On a CPU they are forked from one process that has imported torch and weft, in 3 s less each.
    Those hash strings alike, and sets have the same order on them: rank 0 of several is spawned,
    and differs, unless `quick`.
    """

    def __init__(self, world_size: int, device: str = "cpu", quick: bool = False) -> None:
        self.world_size = world_size
        self.alive = True
        self._dir = tempfile.TemporaryDirectory(prefix="weft-ranks-")
        mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world_size):
            spawned = device != "cpu" or (rank == 0 < world_size - 1 and not quick)
            context = mp.get_context("spawn" if spawned else "forkserver")
            ours, theirs = context.Pipe()
            store, trace = f"{self._dir.name}/store", self._trace(rank)
            args = rank, world_size, store, theirs, trace, device
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        # A time limit is for a body, not for starting Python and torch on a busy machine.
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(120):
                raise RankError(f"rank {rank} did not start within 120 s")
            pipe.recv_bytes()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _trace(self, rank: int) -> str:
        return f"{self._dir.name}/trace{rank}"

    def start(self, body: Callable[..., Any], *args: Any) -> None:
        """Begin `body(*args)` on every rank; `finish` collects."""
        job = pickle.dumps((body, args))
        for pipe in self._pipes:
            pipe.send_bytes(job)

    def finish(self, timeout_s: float, dead: tuple[int, ...] = ()) -> dict[int, tuple[bool, Any]]:
        """(succeeded, value or (repr, traceback)) of every rank that is not in `dead`."""
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while waiting := [r for r in range(self.world_size) if r not in replies and r not in dead]:
            ready = wait([self._pipes[r] for r in waiting], deadline - time.monotonic())
            if not ready:
                break
            for rank in waiting:
                if self._pipes[rank] in ready:
                    try:
                        replies[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                    except (EOFError, ConnectionError):
                        self.alive = False
                        code = self._processes[rank].exitcode
                        replies[rank] = (False, (f"rank process ended, exit code {code}", ""))
            if not all(ok for ok, _ in replies.values()):
                # The others may wait for the rank that failed: they get a moment, not the whole
                # time.
                deadline = min(deadline, time.monotonic() + 5)
        return replies

    def run(self, body: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        self.start(body, *args)
        replies = self.finish(timeout_s)
        failed = {r: value for r, (ok, value) in replies.items() if not ok}
        missing = [r for r in range(self.world_size) if r not in replies]
        if not failed and not missing:
            return [replies[r][1] for r in range(self.world_size)]
        lines = [f"rank {r}: {value[0]}\n{value[1]}" for r, value in sorted(failed.items())]
        lines += [f"rank {r} hangs at\n{self._stack(r)}" for r in missing]
        in_vain = any("PeerTimeout" in error for error, _ in failed.values())
        if missing or len(failed) < self.world_size or in_vain:
            self.close()  # ranks are out of step: the next test gets new ones
        raise RankError("\n".join(lines))

    def _stack(self, rank: int) -> str:
        with suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)
        with open(self._trace(rank)) as trace:
            return trace.read()

    def close(self) -> None:
        self.alive = False
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.5)
            process.kill()
            process.join()
        self._dir.cleanup()


class GpuRanks:
    """Ranks on GPUs, which they may share; new ones after a failure, as a CUDA error is sticky."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._pool: RankPool | None = None

    def run(self, body: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        if self._pool is None:
            self._pool = self._new_pool()
        try:
            return self._pool.run(body, *args, timeout_s=timeout_s)
        except RankError:
            self.close()
            raise

    def _new_pool(self) -> RankPool:
        return RankPool(self.world_size, device="cuda")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
