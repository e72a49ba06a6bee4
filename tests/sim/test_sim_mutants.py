"""Faults planted in copies of our kernels and exchanges: each must be found, by its right name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs_interpreter
from sim_faults import Fault
from sim_planting import FAULTS, PAGE, found_in, moved_texts, with_table

LONG = {"dispatch and combine of cut experts", "norm of whole sums, one shot"}


def table() -> Iterator[Any]:
    """`make test` has one fault in each kernel, `make test-slow` each fault in one kernel, the
    sweep all."""
    seen = set(LONG)
    for planted in FAULTS:
        for number, case in enumerate(planted.cases):
            marks = [pytest.mark.sweep] if number else [pytest.mark.slow] if case in seen else []
            seen |= {case} if number == 0 else set()
            yield pytest.param(planted, case, id=f"{planted.name}-{case}", marks=marks)


def test_every_fault_finds_the_text_that_it_replaces() -> None:
    assert not moved_texts(), "faults are planted by text: mend those in tests/sim_faults.py"


@needs_interpreter
@pytest.mark.parametrize("planted, case", [*table()])
def test_planted_faults_are_found(planted: Fault, case: str) -> None:
    found = found_in(planted, case)
    assert planted.is_what(found), f"found {found!r}"
    schedule = getattr(found, "schedule", None)
    if schedule:  # and, where it is not the first one, it is found again, alone
        assert isinstance(found_in(planted, case, schedule), type(found))


def test_the_table_of_the_docs_is_this_one() -> None:
    page = Path(__file__).resolve().parents[2] / PAGE
    assert page.read_text() == with_table(page.read_text()), (
        f"python tests/sim_planting.py --page {PAGE}"
    )
