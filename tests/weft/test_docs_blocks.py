"""Every block of Python in docs/ runs as it stands: on two ranks, or by pytest if it is a test.

One that cannot says so, and why, behind its fence: ```python no-run: needs transformers
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs_interpreter

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [
    (f"{page.name}:{text[: found.start()].count(chr(10)) + 1}", found[1].strip(), found[2])
    for page in sorted((ROOT / "docs").glob("*.md"))
    for text in [page.read_text()]
    for found in re.finditer(r"^```python(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
]
# What a block prints, on each of two ranks.
PRINTED = {
    "print(y.placements": r"^\(Shard\(dim=0\),\) \(Partial\(sum\),\) torch\.Size\(\[8, 5\]\)$",
    "print(redistribute_plan": r"^float32\[6, 8\] \[S\(0\)\] on \[2\] -> .*: 1 steps$",
    "told = weft.explain": r"^all_gather_matmul\(128x32 @ 32x16, 2 ranks\): host, predicted ",
}


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 9


@needs_interpreter
@pytest.mark.parametrize(("info", "code"), [pytest.param(*b[1:], id=b[0]) for b in BLOCKS])
def test_block(info: str, code: str, tmp_path: Path) -> None:
    if info:
        assert re.match(r"no-run: \w+", info), f"a fence says python, or no-run with why: {info}"
        return
    script = tmp_path / "block.py"
    script.write_text(code)
    # On the path: weft alone, as transformers would take our folder `kernels` for its own.
    (tmp_path / "path").mkdir()
    (tmp_path / "path/weft").symlink_to(ROOT / "weft")
    logs = tmp_path / "logs"  # of each rank its own
    by = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    by += ["--redirects", "3", "--log-dir", str(logs)]
    if "\ndef test_" in code:
        by = ["pytest", "-q", "-p", "weft.pytest_plugin", "-p", "no:weft_sim"]
    run = subprocess.run(
        [sys.executable, "-m", *by, str(script)],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "path"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    said = [path.read_text() for path in logs.rglob("std*.log")]
    assert run.returncode == 0, "\n".join([run.stdout, run.stderr, *said])
    for part, printed in PRINTED.items():
        if part in code:
            assert sum(bool(re.search(printed, text, re.MULTILINE)) for text in said) == 2, said
