"""Ranks that are threads, as `sim.run_on_gpu` runs them: on a CPU, with the engines that need no
kernels; on a GPU, by `pytest -m gpu`, the compiled kernels."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rank_pool import GpuRanks, RankPool
from test_kernel_collectives import gather_body, reduce_body
from test_matmul_ops import gather_case, random_cases, sum_case
from test_matmul_ops import repeated_body as matmuls_again
from test_ring_attention import repeated_body as ring_again
from triton.runtime.jit import JITFunction

import weft
from weft import collectives, sim
from weft.collectives.ranks.group import Group, virtual_rank
from weft.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from weft.errors import MismatchError, PeerTimeout
from weft.kernels.engine import chips
from weft.sim.cli import main as sim_command
from weft.sim.run import gpu
from weft.sim.run.team import Members

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def run_cases(kind: str, cases: list[dict[str, Any]]) -> list[torch.Tensor]:
    if kind == "gather":
        for case in cases:
            gather_case(case)
        return []
    return [sum_case(case) for case in cases]


def initialised(body: Callable[..., Any], *args: Any) -> Callable[[int], Any]:
    """`body(*args)` on a rank of the default process group."""

    def on_rank(rank: int) -> Any:
        dist.init_process_group("gloo")
        return body(*args)

    return on_rank


@pytest.mark.parametrize("engine", ["host", "generic"])
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_threads_run_the_ops_and_their_gradients(kind: str, engine: str) -> None:
    cases = random_cases(kind, 3, engine, 6)
    outs = gpu.run_threads(3, initialised(run_cases, kind, cases), CPU)
    if kind == "reduce":
        for others in outs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(outs[0], others, strict=True))


def messages(rank: int) -> tuple[torch.Tensor, int]:
    dist.init_process_group("gloo")
    right, left = (rank + 1) % 3, (rank - 1) % 3
    got = torch.empty(2)
    work = dist.isend(torch.full((2,), float(rank)), right)
    dist.recv(got, left)
    if work:
        work.wait()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    told: list[Any] = [None] * 3
    dist.all_gather_object(told, rank * 10)
    dist.destroy_process_group()
    return torch.cat([got, total]), sum(told)


def test_torch_distributed_means_the_threads() -> None:
    for rank, (values, told) in enumerate(gpu.run_threads(3, messages, CPU)):
        assert values.tolist() == [(rank - 1) % 3] * 2 + [3.0]
        assert told == 30


def sharded(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2))
    x: Any = distribute_tensor(torch.arange(30.0).view(5, 6), mesh, [Shard(0), Shard(1)])
    return (x @ x.t()).full_tensor(), x.redistribute(placements=[Shard(1), Replicate()]).to_local()


def test_dtensors_of_threads() -> None:
    x = torch.arange(30.0).view(5, 6)
    for rank, (product, part) in enumerate(gpu.run_threads(4, sharded, CPU)):
        assert torch.equal(product, x @ x.t())
        assert torch.equal(part, x.chunk(2, 1)[rank // 2])


def test_the_first_failure_is_told_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT_S", "30")

    def body(rank: int) -> None:
        collectives.all_reduce(torch.ones(3))
        if rank == 1:
            raise ValueError("of rank 1")
        while True:  # in a meeting, or awaiting a signal
            collectives.all_reduce(torch.ones(3 + rank))

    start = time.monotonic()
    with pytest.raises(ValueError, match="of rank 1") as caught:
        gpu.run_threads(3, body, CPU)
    assert time.monotonic() - start < 20
    assert getattr(caught.value, "__notes__", ["on virtual rank 1"]) == ["on virtual rank 1"]


def test_a_rank_that_cannot_begin_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_stream(stack: Any, device: torch.device) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "_own_stream", no_stream)
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu.run_threads(2, lambda rank: None, CPU)


def test_a_rank_that_stays_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT_S", "1")

    def body(rank: int) -> None:
        if rank != 2:
            collectives.empty((4,))

    with pytest.raises(PeerTimeout, match="rank 2"):
        gpu.run_threads(3, body, CPU)


def test_other_calls_are_told_apart() -> None:
    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(3 + rank))

    with pytest.raises(MismatchError, match=r"all_reduce.*all_reduce"):
        gpu.run_threads(2, body, CPU)


def test_where_the_ranks_are_when_time_is_up() -> None:
    done = False

    def body(rank: int) -> None:
        while rank == 1 and not done:
            time.sleep(0.01)

    with pytest.raises(TimeoutError, match=r"(?s)longer than 0.2 s.*rank 1:.*time.sleep"):
        gpu.run_threads(2, body, CPU, timeout=0.2)
    done = True
    assert gpu.run_threads(2, lambda rank: rank, CPU, timeout=math.inf) == [0, 1]


def test_memory_between_threads_holds_nan_until_it_is_written() -> None:
    def body(rank: int) -> bool:
        return bool(collectives.empty((4,)).local.isnan().all())

    assert gpu.run_threads(2, body, CPU) == [True, True]


class Sharing(Members):
    chip, hardware, device, sharing = "", None, CPU, 4


def test_ranks_that_share_a_gpu_have_a_part_of_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = chips.KNOWN[1]
    monkeypatch.setattr(chips, "_chip_behind", lambda device: whole)
    cuda = torch.device("cuda", 0)
    team: Any = Sharing("all", (0, 1, 2, 3))
    with virtual_rank(Group(None, 0, 4, (0, 1, 2, 3), (), virtual=team)):
        assert chips.chip_of(cuda).cores == whole.cores // 4
    assert chips.chip_of(cuda) is whole


def test_what_cuda_must_be_initialised_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    with pytest.raises(RuntimeError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=32.*before"):
        gpu.prepare_queues(initialised=True)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    gpu.prepare_queues(initialised=False)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    gpu.prepare_queues(initialised=True)


class Kernel:
    """What Triton would launch: notes who loads it and who launches it, in this order."""

    def __init__(self, load_s: float = 0.0) -> None:
        self.seen: list[tuple[str, int]] = []
        self._load_s = load_s

    def __call__(self, kernel: Any, *, grid: Any, warmup: bool) -> Kernel:
        if not warmup:
            self.seen.append(("launch", gpu.rank_here()))
        return self

    def _init_handles(self) -> None:
        time.sleep(self._load_s * gpu.rank_here())
        self.seen.append(("load", gpu.rank_here()))


def launch(kernel: Kernel) -> None:
    JITFunction.run(kernel, grid=(1,), warmup=False)


def test_no_rank_launches_before_all_have_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(load_s=0.05)
    monkeypatch.setattr(JITFunction, "run", kernel)
    monkeypatch.setattr(gpu, "_STEP_S", 0.01)  # to load one may take longer

    def body(rank: int) -> None:
        for _ in range(3):
            time.sleep(0.005 * rank)
            launch(kernel)

    gpu.run_threads(3, body, CPU, timeout=20)
    assert [what for what, _ in kernel.seen] == (["load"] * 3 + ["launch"] * 3) * 3
    assert all(
        {rank for _, rank in kernel.seen[at : at + 3]} == {0, 1, 2} for at in range(0, 18, 3)
    )
    assert JITFunction.run is kernel


def test_who_waits_or_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(JITFunction, "run", kernel)

    def body(rank: int) -> None:
        if rank == 1:
            launch(kernel)
        if rank != 2:
            dist.init_process_group("gloo")
            group = dist.new_group([0, 1], use_local_synchronization=True)
            collectives.all_reduce(torch.ones(2), group=group)
            launch(kernel)
            launch(kernel)

    start = time.monotonic()
    gpu.run_threads(3, body, CPU, timeout=20)
    assert time.monotonic() - start < gpu._STEP_S
    assert sorted(rank for what, rank in kernel.seen if what == "launch") == [0, 0, 1, 1, 1]


def test_a_rank_that_launches_less_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(JITFunction, "run", kernel)
    monkeypatch.setattr(gpu, "_STEP_S", 0.2)
    done = threading.Event()

    def body(rank: int) -> None:
        if rank == 0:
            launch(kernel)
            done.set()
        else:
            done.wait(10)  # as if for the GPU, which nobody sees
        launch(kernel)

    gpu.run_threads(2, body, CPU, timeout=20)
    assert next(rank for what, rank in kernel.seen if what == "launch") == 0
    assert len(kernel.seen) == 6


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    with pytest.raises(RuntimeError, match="no GPU"):
        sim.run_on_gpu(2, lambda rank: None)
    with pytest.raises(ValueError, match="world_size"):
        sim.run_on_gpu(0, lambda rank: None)
    script = tmp_path / "mine.py"
    script.write_text("def fn(rank): ...\n")
    with pytest.raises(SystemExit):
        sim_command([f"{script}:fn", "--gpu", "--schedules", "5", "--replay"])
    assert "leave out --schedules, --replay" in capsys.readouterr().err
    assert weft.sim is sim


class GpuThreads(GpuRanks):
    """Ranks that are threads of one process, on one GPU."""

    def run(self, body: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        results: list[list[Any]]
        results = super().run(on_threads, self.world_size, body, *args, timeout_s=timeout_s)
        return results[0]

    def _new_pool(self) -> RankPool:
        with patch.dict(os.environ):
            gpu.prepare_queues(initialised=False)
            return RankPool(1, device="cuda")


def on_threads(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """`body(*args)` on virtual ranks that share this process."""
    return sim.run_on_gpu(world_size, initialised(body, *args))


@pytest.fixture(scope="module")
def gpu_threads(gpu_ranks: GpuRanks) -> Iterator[GpuThreads]:
    threads = GpuThreads(gpu_ranks.world_size)
    yield threads
    threads.close()


def collectives_body() -> None:
    gather_body(torch.bfloat16)
    reduce_body(torch.float32)


def matmuls_body(W: int) -> None:
    for kind in ("gather", "scatter", "reduce"):
        run_cases(kind, random_cases(kind, W, "triton", 3))
    matmuls_again("triton")


def attention_body(W: int) -> None:
    ring_again("triton", W)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and -m gpu")
@pytest.mark.parametrize("body", [collectives_body, matmuls_body, attention_body])
def test_kernels_of_threads(gpu_threads: GpuThreads, body: Callable[..., Any]) -> None:
    args = () if body is collectives_body else (gpu_threads.world_size,)
    gpu_threads.run(body, *args, timeout_s=180)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and -m gpu")
def test_command() -> None:
    command = [sys.executable, "-m", "weft", "sim", "examples/own_kernel.py:check", "--gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "4 ranks on one GPU" in done.stdout
