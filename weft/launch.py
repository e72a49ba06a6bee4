"""Run a function on local ranks, and end all of them as soon as one fails or hangs.

The demo and the benchmarks start their ranks with it; training scripts are started by torchrun.
"""

from __future__ import annotations

import ctypes
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# How long the other ranks may take to report, once one has failed.
_GRACE_S = 1.0
# For Python and torch to start in every rank on a busy machine, whatever `stall_s` is.
_START_S = 120.0


class RankError(RuntimeError):
    """A rank raised, died or hung. The message holds its traceback, or the stack it hung in."""


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _backend_for(device: str, world_size: int) -> str:
    """The process group's backend; sets what the ranks read from the environment."""
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        return "gloo"
    if world_size <= torch.cuda.device_count():
        return "nccl"
    # NCCL refuses two ranks on one GPU; symmetric memory can be made to accept them.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return "gloo"


def launch(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    device: str = "cpu",
    threads: int = 1,
    on_progress: Callable[[Any], None] = lambda _: None,
    stall_s: float = 120,
) -> list[Any]:
    """Run `body(rank, progress, *args)` on `world_size` spawned processes.

    Args:
        body: a module-level function. What rank 0 gives to its `progress` goes to `on_progress`.
        device: "cpu", or "cuda": a GPU a rank, or shared ones where there are fewer. The process
            group is begun before `body` and ended after it; one rank gets none.
        threads: that torch may use in each rank.
        stall_s: seconds without progress, once all have started, after which ranks count as hung.

    Returns:
        The results, in rank order.

    Raises:
        RankError: a rank raised, died, or made no progress for `stall_s`.
    """
    backend = _backend_for(device, world_size)
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="weft-launch-") as folder:
        pipes: list[Connection] = []
        processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, body, args, device, backend, threads, theirs, folder),
                name=f"weft-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            results = _collect(processes, pipes, on_progress, stall_s, Path(folder))
            for process in processes:
                process.join(timeout=10)
            return results
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(
    processes: list[Any],
    pipes: list[Connection],
    on_progress: Callable[[Any], None],
    stall_s: float,
    folder: Path,
) -> list[Any]:
    results: dict[int, Any] = {}
    started = 0
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        patience_s = stall_s if started == len(pipes) else max(stall_s, _START_S)
        ready = wait(waiting, timeout=patience_s)
        if not ready:
            hung = [rank for rank in range(len(pipes)) if rank not in results]
            raise RankError(
                f"no progress for {patience_s:g} s.\nThis is where the ranks are:\n"
                + _rank_stacks(hung, processes, folder)
            )
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type] # a Connection, as all we wait for
            kind, value = _receive(pipes[rank], processes[rank], rank, folder)
            if kind == "started":
                started += 1
            elif kind == "progress":
                on_progress(value)
            elif kind == "done":
                results[rank] = value
            else:
                others = [r for r in range(len(pipes)) if r != rank and r not in results]
                raise RankError(value + _other_reports(others, processes, pipes, folder))
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection, process: Any, rank: int, folder: Path) -> tuple[str, Any]:
    """The next message of a rank; "failed" with the reason if it died without one."""
    try:
        kind, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        code = process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return "failed", f"rank {rank} was {how}\n{_stack(folder, rank)}"
    return kind, f"rank {rank} failed:\n{value}" if kind == "failed" else value


def _other_reports(
    others: list[int], processes: list[Any], pipes: list[Connection], folder: Path
) -> str:
    """What the other ranks report after a failure: their own tracebacks, or their stacks."""
    time.sleep(_GRACE_S)
    text, silent = "", []
    for rank in others:
        said = ""
        while not said and pipes[rank].poll():
            kind, value = _receive(pipes[rank], processes[rank], rank, folder)
            said = value if kind == "failed" else ""
        text += f"\n{said}" if said else ""
        silent += [] if said else [rank]
    return text + ("\n" + _rank_stacks(silent, processes, folder) if silent else "")


def _rank_stacks(ranks: list[int], processes: list[Any], folder: Path) -> str:
    """The Python stacks of running ranks, as they stand."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(_GRACE_S)
    return "\n".join(f"rank {rank} was at:\n{_stack(folder, rank)}" for rank in ranks)


def _stack(folder: Path, rank: int) -> str:
    file = _stack_file(folder, rank)
    return file.read_text() if file.exists() else "its start, before any of its own code\n"


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}.txt"


def _rank_main(
    rank: int,
    world_size: int,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    backend: str,
    threads: int,
    pipe: Connection,
    folder: str,
) -> None:
    def send(kind: str, value: Any) -> None:
        pipe.send_bytes(pickle.dumps((kind, value)))

    def progress(value: Any) -> None:
        if rank == 0:
            send("progress", value)

    _end_with_parent()
    with open(_stack_file(Path(folder), rank), "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the ranks
        torch.set_num_threads(threads)
        send("started", None)
        try:
            if device == "cuda":
                torch.cuda.set_device(rank % torch.cuda.device_count())
            if world_size > 1:
                dist.init_process_group(
                    backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size
                )
            result = body(rank, progress, *args)
            if world_size > 1:
                _end_group()
            send("done", result)
        except Exception:  # a result that cannot be sent included
            send("failed", traceback.format_exc())
            os._exit(1)  # no destructors: they would wait for peers that may be gone
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)


_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def _end_with_parent() -> None:
    """Have the kernel kill this rank when its launcher ends, however it does."""
    parent = mp.parent_process()
    if sys.platform == "linux" and parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent.pid:  # it has ended before that
            os._exit(1)


def _end_group() -> None:
    """Once no rank needs another's memory any more."""
    from weft import collectives

    collectives.barrier()
    collectives.close()
    dist.destroy_process_group()
