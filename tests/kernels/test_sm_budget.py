"""WEFT_SMS: kernels leave SMs to others."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft import settings
from weft.collectives.kernels.collective_launch import collective_config
from weft.collectives.memory import symmetric
from weft.collectives.protocols import Fabric
from weft.errors import MismatchError
from weft.kernels.engine import chips
from weft.kernels.engine.plans import Plans

# What interpreted kernels are launched with is not what a GPU gets.
_GRIDS = """
import torch, weft
from weft.kernels.compile import aot_cases
from weft.kernels.engine import chips

for name in ("sm_90", "gfx942"):
    for dtype in (torch.bfloat16, torch.float32):
        for case, launch in aot_cases.launches(chips.known(name), dtype, wide=True):
            print(launch.grid[0], launch.kernel.__name__, case, sep="\\t")
"""


def grids(sms: str) -> dict[str, int]:
    env = os.environ | {"TRITON_INTERPRET": "0", "WEFT_SMS": sms}
    done = subprocess.run(
        [sys.executable, "-c", _GRIDS], env=env, capture_output=True, text=True, check=True
    )
    largest: dict[str, int] = {}
    for line in done.stdout.splitlines():
        grid, kernel, case = line.split("\t")
        # A row takes 64 programs, and 64 more to normalize it; words are not taken where a row of
        # theirs has too few; what merges parts waits for nobody.
        beyond = "norm of 65536" in case or "norm by words" in case
        if not beyond and kernel != "_merge_kernel":
            largest[kernel] = max(int(grid), largest.get(kernel, 0))
    return largest


@pytest.mark.slow
def test_no_grid_is_larger_than_the_budget() -> None:
    free, small = grids(""), grids("16")
    assert free.keys() == small.keys() and len(small) > 15
    assert max(small.values()) == 16 and min(free.values()) < 24 < max(free.values())


def test_a_chip_has_what_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, gpu = chips.known("sm_90"), torch.device("cuda", 0)
    monkeypatch.setattr(chips, "_chip_behind", lambda device: whole)
    assert chips.chip_of(gpu) is whole
    monkeypatch.setenv("WEFT_SMS", "100")
    assert chips.chip_of(gpu).cores == 100
    assert collective_config("all_gather", 1 << 20, 8, on_gpus=True).programs == 64
    monkeypatch.setenv("WEFT_SMS", "20")
    assert collective_config("all_gather", 1 << 20, 8, on_gpus=True).programs == 20
    monkeypatch.setenv("WEFT_SMS", "1000")
    assert chips.chip_of(gpu).cores == 132
    for wrong in ("few", "7", "-8", "8.5"):
        monkeypatch.setenv("WEFT_SMS", wrong)
        with pytest.raises(ValueError, match="WEFT_SMS must be a whole number of SMs, 8 or more"):
            settings.sms()


def test_what_is_kept_goes_by_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans, which have what a workspace must hold, and launches of words that carry flags."""
    links, plans = Fabric(2, 450e3, 450e3, 100e3), Plans[int](f"{__name__}.plans")
    found = []
    for sms in ("", "8", "16", "8"):
        monkeypatch.setenv("WEFT_SMS", sms)
        config = collective_config("all_reduce", 16 << 10, 2, True, links=links, words=True)
        found.append((config.by_words, config.programs, plans.of((), settings.sms)))
    assert found == [(True, 16, 0), (True, 8, 8), (True, 16, 16), (True, 8, 8)]


def test_ranks_with_different_budgets_are_told_so() -> None:
    """Their grids would differ, and programs wait for those of the same number."""
    specs = [(((4,), "torch.int8", "cuda", f"WEFT_SMS={sms}"), "", "", "") for sms in ("all", "64")]
    calls = SimpleNamespace(under_way=lambda: "")
    group: Any = SimpleNamespace(gather_objects=lambda mine, what: specs, calls=calls)
    with pytest.raises(MismatchError, match=r"WEFT_SMS=all.*rank 1 for .*WEFT_SMS=64"):
        symmetric._agree_on_spec(group, specs[0][0], "", "")
