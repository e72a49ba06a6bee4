"""What a process waits for before its first call, beside torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CALLS = """
import sys, torch, torch.distributed as dist
import weft

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x, q = torch.ones(4, 4), torch.ones(1, 1, 4, 8)
weft.matmul_reduce_scatter(weft.all_gather_matmul(x, x), x)
weft.collectives.all_reduce(x)
weft.ring_attention(q, q, q)
weft.dispatch_grouped_matmul(x, torch.zeros(4, 1, dtype=torch.int64), x[None])
import weft.dtensor
print([name for name in ("triton", "weft.sim", "torch._inductor") if name in sys.modules])
"""


@pytest.mark.slow
def test_cpu_ranks_do_not_import_triton() -> None:
    """A third of a second of a quiet core, which every rank of a busy machine would wait for."""
    run = subprocess.run([sys.executable, "-c", _CALLS], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.split() == ["[]"], run.stdout + run.stderr
