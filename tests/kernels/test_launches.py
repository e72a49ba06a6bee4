"""Triton's own launcher hands kernels what they were given, on a driver that runs nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.bench.host import driver

HERE = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Those of a process that launches into nothing."""
    try:
        found = driver.build_stub(tmp_path_factory.mktemp("driver"))
    except RuntimeError as error:
        pytest.skip(str(error))
    return os.environ | found | {"PYTHONPATH": str(HERE.parent)}


def told_by(script: str, variables: dict[str, str], *args: str) -> dict[str, str]:
    """What a script of `tests` prints."""
    command = [sys.executable, str(HERE / script), *args]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told: dict[str, str] = json.loads(done.stdout)
    return told


# Descriptors of two weights, constants in tuples, numbers of all kinds; what is None; floats.
CASES = ("gate and up, 8 tokens", "signals of a stream", "pull", "decode, pages", "append, pages")


@pytest.mark.slow
def test_parameters_are_the_arguments(variables: dict[str, str]) -> None:
    told = told_by("launching.py", variables, "bfloat16", *CASES)
    assert {name.partition(": ")[2] for name in told} == set(CASES) and len(told) >= 8
    assert not any(told.values()), told


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_parameters_of_every_kernel_are_the_arguments(
    variables: dict[str, str], dtype: str
) -> None:
    told = told_by("launching.py", variables, dtype)
    assert len(told) > 20  # the fewest, of fp8
    assert not any(told.values()), told


@pytest.mark.slow
def test_kept_launches_are_those_that_would_be_made(variables: dict[str, str]) -> None:
    told = told_by("relaunching.py", variables)
    assert len(told) > 20 and not any(told.values()), told


@pytest.mark.slow
def test_a_graph_can_hold_a_layer_of_few_tokens(variables: dict[str, str]) -> None:
    """A launch each way, of arguments that do not depend on ids; the host waits for no result."""
    held_by_a_graph(variables, "experts, 64 tokens")


@pytest.mark.slow
def test_a_graph_can_hold_the_norms_of_few_rows(variables: dict[str, str]) -> None:
    """One launch, sum and residual included."""
    held_by_a_graph(variables, "all_reduce_residual_rms_norm", "reduce_scatter_rms_norm_all_gather")


def held_by_a_graph(variables: dict[str, str], *names: str) -> None:
    """Whether calls make the launches of `relaunching.GRAPHED`, and nothing else."""
    wanted = {name: "" for each in names for name in (each, f"{each}, in a graph")}
    assert told_by("relaunching.py", variables, *names) == wanted


@pytest.mark.sweep
def test_kept_launches_of_every_call_are_those_that_would_be_made(
    variables: dict[str, str],
) -> None:
    told = told_by("relaunching.py", variables, "all")
    assert len(told) > 30 and not any(told.values()), told
