"""Blocks of Python in README.md and docs/ run as they stand: on two ranks, or by pytest if tests.

One that cannot says so, and why, behind its fence: ```python no-run: needs transformers
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from needs import needs_interpreter
from rank_pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [
    (f"{page.name}:{text[: found.start()].count(chr(10)) + 1}", found[1].strip(), found[2])
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for text in [page.read_text()]
    for found in re.finditer(r"^```python(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
]
# What a block prints, on each of two ranks.
PRINTED = {
    "print(weft.explain(my_up": r"^all_gather_matmul\(1024x512 @ 512x1024, 2 ranks\): ",
    "print(y.placements": r"^\(Shard\(dim=0\),\) \(Partial\(sum\),\) torch\.Size\(\[8, 5\]\)$",
    "print(redistribute_plan": r"^float32\[6, 8\] \[S\(0\)\] on \[2\] -> .*: 1 steps$",
    "told = weft.explain": r"^all_gather_matmul\(128x32 @ 32x16, 2 ranks\): host, predicted ",
}


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 9


def on_a_rank(script: Path, port: int) -> tuple[int, str]:
    """Run a block where torchrun has set the environment: its exit status, and what it prints."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.chdir(script.parent)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if world_size == 1:
            by = ["-q", "-p", "weft.pytest_plugin", "-p", "no:weft_sim", "-p", "no:cacheprovider"]
            return int(pytest.main([*by, str(script)])), printed.getvalue()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        runpy.run_path(str(script), run_name="__main__")
    return 0, printed.getvalue()


@needs_interpreter
@pytest.mark.parametrize(
    ("info", "code"),
    [
        pytest.param(*b[1:], id=b[0], marks=[pytest.mark.slow] if "torch.compile(" in b[2] else [])
        for b in BLOCKS
    ],
)
def test_block(info: str, code: str, tmp_path: Path, own_ranks: Callable[[int], RankPool]) -> None:
    if info:
        assert re.match(r"no-run: \w+", info), f"a fence says python, or no-run with why: {info}"
        return
    script = tmp_path / "block.py"
    script.write_text(code)
    count = 1 if "\ndef test_" in code else 2  # pytest starts ranks of its own
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    ended = own_ranks(count).run(on_a_rank, script, port, timeout_s=300)
    assert [status for status, _ in ended] == [0] * count, ended
    for part, printed in PRINTED.items():
        if part in code:
            assert all(re.search(printed, said, re.MULTILINE) for _, said in ended), ended
