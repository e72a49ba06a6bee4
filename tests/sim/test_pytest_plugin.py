"""The fixture `sim_run`, in a session of pytest of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import sys

def test_before():
    assert "torch" not in sys.modules, "the plugin must not import it for everybody"

def test_values(sim_run):
    from weft import collectives
    import torch
    results = sim_run(3, lambda rank: collectives.all_gather(torch.tensor([rank])), schedules=2)
    assert [r.tolist() for r in results] == [[0, 1, 2]] * 3
    print(f"tried {results.schedules}")

def test_race(sim_run):
    import torch
    from weft import collectives
    def body(rank):
        buffer = collectives.empty((1,))
        buffer.get_buffer(0, (1,), torch.float32).fill_(rank)
    sim_run(2, body, schedules=2)

def test_wrong(sim_run):
    def body(rank):
        assert rank == 0, "as planted"
    sim_run(2, body)
"""


def run(tmp_path: Path, *options: str) -> str:
    (tmp_path / "test_it.py").write_text(TESTS)
    installed = any(e.name == "weft_sim" for e in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "weft.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "-s", *plugin, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(tmp_path / "test_it.py"), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_fixture(tmp_path: Path) -> None:
    out = run(tmp_path)
    assert "2 passed" in out and "2 failed" in out and "RaceError" in out and "tried 2" in out, out
    # Tracebacks are of the tests, not of weft.
    assert "test_it.py:20: " in out and "test_it.py:24: AssertionError" in out, out
    assert not re.findall(r"^(?:\S*/)?(?:weft|sim)/\S+:\d+:", out, re.MULTILINE), out
    out = run(tmp_path, "--sim-schedules=5", "--sim-seed=7", "-k", "values or race")
    assert "tried 5" in out and "seed=7, schedule=0" in out, out
