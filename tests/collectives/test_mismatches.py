"""Calls that differ between ranks: an error on every rank that tells both, and never a hang."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from weft import collectives
from weft.collectives.ranks import flight

SOON_S = 20  # on a busy machine; the bound on waits is set far beyond it


def absent_body() -> str:
    os.environ["WEFT_TIMEOUT_S"] = "1"
    collectives.all_reduce(torch.ones(4))
    collectives.all_reduce(torch.ones(5), reduce_op="max")
    if dist.get_rank() == 1:
        time.sleep(3)
        return ""
    with pytest.raises(weft.PeerTimeout) as caught:
        collectives.all_gather(torch.ones(7), sizes=[7, 7])
    return caught.value.history


def test_a_time_out_shows_the_last_calls_of_all_ranks(own_ranks: Any) -> None:
    history, _ = own_ranks(2).run(absent_body, timeout_s=60)
    *_, before, last = history.split("\n")
    assert re.search(r"ranks 0, 1: all_reduce\(max\), float32, \[5\]", before)
    assert re.search(
        r"rank 0: all_gather.*sizes \[7, 7\].*under way for .*; rank 1: not begun", last
    )


def rings(*sequences: str) -> list[flight.Calls]:
    """What each of the ranks of a group sees that have made these calls, a letter each."""
    recorders = [flight.Recorder() for _ in sequences]
    readers = {r: flight.Reader(each.ring) for r, each in enumerate(recorders)}
    groups = [flight.Calls("g", r, readers, each) for r, each in enumerate(recorders)]
    for calls, sequence in zip(groups, sequences, strict=True):
        for letter in sequence:
            calls.end(calls.begin(flight.call_of(letter, ())))
    return groups


@pytest.mark.parametrize(
    ("sequences", "parted"),
    [
        (("abc", "abc"), ""),
        (("abc", "ab"), ""),
        (("abc", ""), ""),
        (("abc", "abd"), "call 3 of the group: rank 0 called c; rank 1 called d"),
        (("abc", "adcc"), "call 2 of the group: rank 0 called b; rank 1 called d"),
        (("abcd", "ab", "abd"), "call 3 of the group: rank 0 called c; rank 2 called d"),
        (("a" * 300 + "b", "a" * 300 + "c"), "call 301 of the group: rank 0 called b; rank 1"),
        (("b" + "a" * 300, "c" + "a" * 300), "before call 46"),
    ],
)
def test_where_ranks_part(sequences: tuple[str, ...], parted: str) -> None:
    for calls in (rings(*sequences)[rank] for rank in (0, len(sequences) - 1)):
        found = calls.parted()
        assert parted in found and bool(found) == bool(parted)


def test_what_an_error_has_told_is_not_told_again() -> None:
    first, second = rings("ab", "ac")
    assert first.parted()
    first.told()
    assert not first.parted()
    second.told()
    for calls in (first, second):
        calls.begin(flight.call_of("d", ()))
        assert not calls.parted() and "d" in calls.history()


def test_groups_and_processes_do_not_mix() -> None:
    own = flight.Recorder()
    readers = {0: flight.Reader(own.ring)}
    one, other = (flight.Calls(name, 0, readers, own) for name in "xy")
    for calls, letters in ((one, "ab"), (other, "c"), (one, "d")):
        for letter in letters:
            calls.begin(flight.call_of(letter, ()))
    assert re.findall(r"rank 0: (\w)", one.history()) == ["a", "b", "d"]
    assert re.findall(r"rank 0: (\w)", other.history()) == ["c"]


@pytest.mark.ranks(2)
def test_lines_of_the_program_are_told_on_demand() -> None:
    """WEFT_CHECK=1: who called what, from which line."""
    x, rank = torch.ones(4), dist.get_rank()
    os.environ["WEFT_CHECK"] = "1"
    try:
        with pytest.raises(weft.MismatchError, match=r"test_mismatches\.py:\d+.*test_mismatches"):
            collectives.all_reduce(x if rank else x.int())
        assert collectives.all_reduce(x).tolist() == [2.0] * 4
    finally:
        del os.environ["WEFT_CHECK"]
