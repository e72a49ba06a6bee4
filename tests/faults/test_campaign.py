"""A part of `make faults`: a batch or two of every kind, and how the campaign counts and tells."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import campaign
import pytest
from campaign import KINDS, Count, run_batch, table
from needs import needs_interpreter
from trials import Kind, Skipped

_SHORT = [kind for kind in KINDS if not kind.name.startswith("the same in a steady step")]


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("kind", _SHORT, ids=lambda kind: kind.name)
def test_a_batch_holds(kind: Kind) -> None:
    count = Count()
    run_batch(kind, 0, count)
    if count.skipped:
        pytest.skip(count.skipped)
    assert not count.failures, count.failures[0]
    assert count.trials == count.held > 0


def _two_then(chance: random.Random, folder: Path, error: Exception) -> Iterator[None]:
    assert not list(folder.iterdir()) and chance.random() == random.Random("planted 7").random()
    yield from (None, None)
    raise error


@pytest.mark.parametrize(
    ("error", "row", "failure"),
    [
        (AssertionError("rank 1 hangs"), "| 3 | 2 |", "planted, --seed 7: rank 1 hangs"),
        (KeyError("a bug"), "| 3 | 2 |", "KeyError: 'a bug'"),
        (Skipped("no namespace"), "| skipped: no namespace | 2 |", ""),
    ],
)
def test_what_does_not_hold_is_counted_and_told(error: Exception, row: str, failure: str) -> None:
    kind = Kind("planted", "it holds", lambda chance, folder: _two_then(chance, folder, error), 9)
    count = Count()
    run_batch(kind, 7, count)
    assert table([kind], {"planted": count}).endswith(f"| planted | it holds {row}")
    assert failure in "".join(count.failures) and len(count.failures) == bool(failure)


def test_kinds_take_turns_until_all_have_had_their_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def batch(kind: Kind, seed: int, count: Count) -> None:
        order.append((kind.name, seed))
        count.trials += 2

    monkeypatch.setattr(campaign, "run_batch", batch)
    few, many = (Kind(name, "", _nothing, trials) for name, trials in (("few", 2), ("many", 6)))
    campaign.campaign([few, many], minutes=1, seed=5)
    assert order == [("few", 5), ("many", 5), ("many", 6), ("many", 7)]
    order.clear()
    campaign.campaign([few], minutes=0, seed=5)
    assert not order


def _nothing(chance: random.Random, folder: Path) -> Iterator[None]:
    yield
