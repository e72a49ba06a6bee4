"""How things are timed here: on real ranks, interleaved, medians, the slowest rank counts.

The machine's speed drifts, by more than what is compared. So all variants of a case run in turn,
one call each, round after round, in one set of processes; each call starts at a barrier. A
variant's time on a rank is the median over rounds, and the case's is the largest over ranks. Ratios
between variants are taken round by round, and their median is given.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from weft import collectives


@dataclass
class Case:
    """One row: the times of all variants on one problem.

    Attributes:
        us: per variant, the median over rounds on the slowest rank.
        spread: per variant, (90th - 10th percentile) / median of the slowest rank per round.
        ratios: per "a/b", the median over rounds of the ratio of the slowest ranks' times.
    """

    name: str
    us: dict[str, float]
    spread: dict[str, float]
    ratios: dict[str, float] = field(default_factory=dict)


def interleaved(
    variants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 3
) -> list[dict[str, float]]:
    """Seconds of each variant on this rank, one dict a round."""
    names = list(variants)
    for _ in range(warmup):
        for call in variants.values():
            call()
    table = []
    for number in range(rounds):
        row = {}
        # Rotated, so that no variant always follows the same other.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            collectives.barrier()
            start = time.perf_counter()
            variants[name]()
            row[name] = time.perf_counter() - start
        table.append(row)
    return table


def spread(times: list[float]) -> float:
    """(90th - 10th percentile) / median."""
    ordered = sorted(times)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
    return (high - low) / statistics.median(ordered)


def case(name: str, table: list[dict[str, float]], ratios: Iterable[tuple[str, str]] = ()) -> Case:
    """The row of one case, the same on every rank, from every rank's `interleaved` table."""
    names = list(table[0])
    own = torch.tensor([[row[n] for n in names] for row in table], dtype=torch.float64)
    slowest = collectives.all_reduce(own, reduce_op="max")
    medians = collectives.all_reduce(own.median(0).values, reduce_op="max")
    return Case(
        name,
        {n: float(medians[i]) * 1e6 for i, n in enumerate(names)},
        {n: spread(slowest[:, i].tolist()) for i, n in enumerate(names)},
        {
            f"{a}/{b}": statistics.median(
                (slowest[:, names.index(a)] / slowest[:, names.index(b)]).tolist()
            )
            for a, b in ratios
        },
    )


def _rank_main(rank: int, world_size: int, store: str, results: str, body: Any, args: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    value = body(*args)
    if rank == 0:
        torch.save(value, results)
    collectives.barrier()
    collectives.close()
    dist.destroy_process_group()


# glibc gives large blocks back to the system when they are freed, or does not, as its heuristics
# have it; getting them again costs up to a fifth of a step in page faults. Ranks keep them.
_KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
}


def on_ranks(world_size: int, body: Callable[..., Any], *args: Any) -> Any:
    """Run the module-level `body(*args)` on `world_size` CPU ranks; the value of rank 0."""
    os.environ.update(_KEEP_FREED_MEMORY)  # read by malloc when the ranks' processes start
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        store, results = f"{folder}/store", f"{folder}/results"
        spawn(_rank_main, (world_size, store, results, body, args), nprocs=world_size)
        return torch.load(results, weights_only=False)


def environment(world_size: int) -> dict[str, Any]:
    """What a figure depends on, to be kept beside it."""
    cpu = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    import triton

    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "ranks": world_size,
        "threads a rank": max(1, (os.cpu_count() or 1) // world_size),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def write_json(path: Path, suite: str, world_size: int, cases: list[Case]) -> None:
    """Keep a suite's rows and the environment under `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "suite": suite,
        "environment": environment(world_size),
        "cases": [asdict(each) for each in cases],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
