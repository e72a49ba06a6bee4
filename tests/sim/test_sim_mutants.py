"""Faults planted in copies of our kernels and exchanges: each must be found, by its right name."""

from __future__ import annotations

from pathlib import Path

import pytest
from needs import needs_interpreter
from sim_faults import Fault
from sim_planting import FAULTS, PAGE, found_in, moved_texts, with_table

# One kernel a fault in `make test`, the others in `make test-all`.
TABLE = [
    pytest.param(
        planted,
        case,
        id=f"{planted.name}-{case}",
        marks=[pytest.mark.sweep] if number else [],
    )
    for planted in FAULTS
    for number, case in enumerate(planted.cases)
]


def test_every_fault_finds_the_text_that_it_replaces() -> None:
    assert not moved_texts(), "faults are planted by text: mend those in tests/sim_faults.py"


@needs_interpreter
@pytest.mark.parametrize("planted, case", TABLE)
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
