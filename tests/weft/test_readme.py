"""The README says what is true: its example runs, its commands exist, its table is the kept one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import readme

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.slow  # test_docs_blocks.py runs it too, on ranks that have torch already
def test_the_example_runs_on_two_ranks(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script)],
        capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("all_gather_matmul(1024x512 @ 512x1024, 2 ranks): ") == 2


def test_its_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets


def test_its_table_is_that_of_the_kept_results() -> None:
    (shown,) = re.findall(r"<!-- bench -->\n(.*?)\n<!-- /bench -->", README, re.DOTALL)
    assert shown == readme.readme_figures()


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 80
