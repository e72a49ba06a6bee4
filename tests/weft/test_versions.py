"""What weft is tested with is said in one place, and other versions give one warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from weft import versions

ROOT = Path(__file__).resolve().parents[2]


def pins(lane: str) -> dict[str, tuple[int, int]]:
    (line,) = re.findall(rf"^  {lane}\) (.*)$", (ROOT / "tools" / "lane.sh").read_text(), re.M)
    return {name: versions.release(v) for name, v in re.findall(r"(torch|triton)==([\d.]+)", line)}


def test_lanes_run_what_is_said_to_be_tested() -> None:
    packages = {"torch", "triton"}
    assert pins("oldest") == {name: versions.OLDEST[name] for name in packages}
    assert pins("newest") == {name: versions.NEWEST[name] for name in packages}


def test_what_pip_is_asked_for_is_the_oldest() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    asked = re.findall(r'(python|torch|triton)(?: = ")?>=([\d.]+)', project)
    assert {name: versions.release(version) for name, version in asked} == versions.OLDEST


def test_these_versions_are_tested() -> None:
    assert versions.untested() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_if_untested()


@pytest.mark.parametrize("name, here", [("torch", "2.99.0+cu140"), ("triton", "3.5.1")])
def test_others_give_one_warning(name: str, here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda each: here if each == name else None)
    with pytest.warns(UserWarning, match=rf"not tested with {name} {re.escape(here)}") as told:
        versions.warn_if_untested()
    assert len(told) == 1
    monkeypatch.setenv("LOCAL_RANK", "1")  # the other ranks of the host need not repeat it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_if_untested()


@pytest.mark.slow
def test_a_program_is_told_once_and_goes_on() -> None:
    code = """
from weft import versions
versions.NEWEST["torch"] = versions.OLDEST["torch"] = (1, 0)
import weft.collectives, weft.kernels, weft.dtensor
print(weft.all_gather_matmul.__name__)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env=os.environ | {"LOCAL_RANK": "0"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout == "all_gather_matmul\n"
    assert run.stderr.count("weft is not tested with torch") == 1
