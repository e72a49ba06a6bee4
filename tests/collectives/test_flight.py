"""The last calls of all ranks: in errors, in a folder, and as `weft doctor --flight` tells them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from needs import needs_interpreter
from workloads import WORK, make

import weft
from weft import collectives
from weft.bench.commands import doctor
from weft.collectives.kernels import collective_launch as kernels
from weft.collectives.memory.workspace import Workspace
from weft.collectives.ranks import flight, flight_files

ROOT = Path(__file__).resolve().parents[2]


def rings(*sequences: str) -> list[flight.Calls]:
    """What each of the ranks of a group sees that have made these calls, a letter each.

    Those of capital letters have failed.
    """
    recorders = [flight.FlightRecorder() for _ in sequences]
    readers = {r: flight.Reader(each.ring) for r, each in enumerate(recorders)}
    groups = [flight.Calls("g", readers, each, r) for r, each in enumerate(recorders)]
    for calls, sequence in zip(groups, sequences, strict=True):
        for letter in sequence:
            calls.end(calls.begin(flight.call_of(letter, ())), failed=letter.isupper())
    return groups


def test_the_ring_holds_the_last_calls_only() -> None:
    first, second = rings("b" + "a" * 300, "ca")
    assert first.words(0, flight.call_of("a", ()).hash) == "a"
    assert first.words(0, flight.call_of("b", ()).hash) == "another"
    assert second.words(1, flight.call_of("c", ()).hash) == "c"


def test_long_lists_are_told_apart_in_words_that_fit() -> None:
    cuts = [*range(0, 4000, 40), 4000]
    one, other, first = (
        flight.call_of("ring_attention", (("documents", tuple(each)), ("scale", scale)), "host")
        for each, scale in ((cuts, 1.0), ([*cuts[:95], 3801, *cuts[96:]], 1.0), (cuts, 2.0))
    )
    known = (
        r"ring_attention, documents \[0, 40, 80, \.\. 101 in all, #[0-9a-f]+\], scale 1.0 \(host\)"
    )
    for call in (one, other):
        assert re.fullmatch(known, call.text.decode())
    assert len({call.text for call in (one, other, first)}) == 3
    assert len({call.hash for call in (one, other, first)}) == 3
    long = [flight.call_of("é" * 200 + end, ()) for end in ("x", "y")]
    assert long[0].text != long[1].text and max(len(each.text) for each in long) <= 248
    assert [each.text.decode()[:100] for each in long] == ["é" * 100] * 2


def test_groups_and_processes_do_not_mix() -> None:
    own = flight.FlightRecorder()
    readers = {0: flight.Reader(own.ring)}
    one, other = (flight.Calls(name, readers, own) for name in "xy")
    for calls, letters in ((one, "ab"), (other, "c"), (one, "d")):
        for letter in letters:
            calls.begin(flight.call_of(letter, ()))
    assert re.findall(r"rank 0: (\w)", one.history()) == ["a", "b", "d"]
    assert re.findall(r"rank 0: (\w)", other.history()) == ["c"]


def test_the_first_place_where_ranks_part_is_shown_however_long_ago() -> None:
    history = rings("ab" + "x" * 20, "ac" + "x" * 20)[0].history().split("\n")
    assert history[1] == "  call 2   rank 0: b; rank 1: c   <- here they part"
    assert [line.split()[1] for line in history[2:]] == ["18", "19", "20", "21", "22"]
    assert "part" not in rings("abc", "ab")[0].history()


def test_a_difference_that_all_ranks_were_told_of_is_not_shown_for_a_later_one() -> None:
    def parts(*sequences: str) -> list[str]:
        return re.findall(r"call (\d+) .*here they part", rings(*sequences)[0].history())

    assert parts("aBxc", "aCxd") == ["4"]  # both failed in their second calls
    assert parts("aBxc", "acxd") == ["2"]  # one did
    assert parts("aB", "aC") == ["2"]  # nothing came after it


def test_how_a_call_ran_and_ended_is_told() -> None:
    (calls,) = rings("")
    outer = calls.begin(flight.call_of("outer", ()))
    calls.end(calls.begin(flight.call_of("set-up", ())))
    calls.runs(flight.HOST, 7)  # of the call, not of the set-up amid it
    calls.end(outer, failed=True)
    calls.begin(flight.call_of("next", ()))
    calls.runs(flight.TRITON, stream=0x70)
    lines = calls.history().split("\n")[1:]
    assert lines[0] == "  call 1   rank 0: outer (on host 7, failed)"
    assert lines[1] == "  call 2   rank 0: set-up"
    assert re.fullmatch(r"  call 3   rank 0: next \(on triton, under way for \S+ s\)", lines[2])


def test_a_call_whose_result_is_dropped_has_not_failed() -> None:
    (calls,) = rings("")

    def moved(name: str) -> Generator[None, None, None]:
        with calls.noting(flight.call_of(name, ())):
            yield

    for name in "dropped", "broken":
        under_way = moved(name)
        next(under_way)
        with contextlib.suppress(ValueError):
            under_way.close() if name == "dropped" else under_way.throw(ValueError)
    assert calls.history().split("\n")[1:] == [
        "  call 1   rank 0: dropped",
        "  call 2   rank 0: broken (failed)",
    ]


@pytest.mark.ranks(3)
def test_a_mismatch_shows_the_last_calls() -> None:
    x = torch.ones(4)
    for _ in range(2):  # the first one may set memory up, which is shown as well
        collectives.all_reduce(x, reduce_op="max")
    with pytest.raises(weft.MismatchError) as caught:
        collectives.all_reduce(x if dist.get_rank() else x.int())
    *_, before, here = [line for line in str(caught.value).split("\n") if "all_reduce" in line]
    assert "ranks 0, 1, 2: all_reduce(max)" in before
    assert re.search(r"rank 0: .*int32.*; ranks? 1.*: .*float32.*<- here they part$", here), (
        caught.value
    )


def away_body(folder: str) -> tuple[int, ...]:
    os.environ.update(WEFT_FLIGHT_DIR=folder, WEFT_TIMEOUT_S="2")
    rank, x = dist.get_rank(), torch.ones(4)
    collectives.all_reduce(x)
    with weft.engine("generic"):
        collectives.all_reduce(x)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(4)
        return ()
    with pytest.raises(weft.PeerTimeout, match="ranks 1, 3") as caught:
        collectives.barrier()
    return caught.value.absent


def test_a_barrier_names_all_who_are_absent_and_the_folder_shows_it(
    own_ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the calls of a rank that was killed."""
    four = own_ranks(4)
    four.start(away_body, str(tmp_path))
    replies = four.finish(timeout_s=60, dead=(3,))
    assert {rank: value for rank, (_, value) in replies.items()} == {0: (1, 3), 1: (), 2: (1, 3)}
    assert doctor.main(["--flight", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("4 rings, 1 groups that have made calls\n\ngroup of 4, global ranks 0-3")
    for rank, pid in enumerate(four.pids):
        assert f"rank {rank}: process {pid} on " in told
    assert re.search(r"all_reduce\(sum\), float32, \[4\] \(auto\) +host 1 +0-3$", told, re.M)
    assert re.search(r"all_reduce\(sum\), float32, \[4\] \(generic\) +generic +0-3$", told, re.M)
    assert re.search(r"barrier \(exchange, 0 bytes\) +host 2 +0, 2 +1, 3$", told, re.M)
    assert re.search(r"all made the same calls; ranks 1, 3 went no further than call \d+$", told)


def a_run(folder: Path, *sequences: str) -> list[Path]:
    """The rings of ranks that have made these calls and began one more, of a group of one more."""
    for rank, sequence in enumerate(sequences):
        own = flight.FlightRecorder(folder)
        calls = flight.Calls("g", own=own)
        own.joined(calls.group, tuple(range(len(sequences) + 1)), rank)
        for letter in sequence:
            calls.end(calls.begin(flight.call_of(letter, ())))
        calls.begin(flight.call_of("last", ()))
    return sorted(folder.glob("*.ring"))


def test_the_table_shows_where_calls_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path, "ab" + "x" * 20, "ac" + "x" * 20, "ab")
    assert doctor.main(["--flight", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "  no ring of rank 3\n" in told
    rows = {line.split()[0]: line for line in told.splitlines() if line[2:3].isdigit()}
    assert re.search(r"2\*    b +0, 2$", told, re.M) and re.search(r"2\*    c +1$", told, re.M)
    assert re.search(r"22 +x +0-1 +2$", rows["22"])
    assert re.search(r"23 +last +0-1, since \d\d:\d\d:\d\d\.\d{3} +2$", rows["23"])
    assert told.endswith("* they part at call 2\n") and len(rows) == 12


@pytest.mark.parametrize("what", ["none", "empty", "garbage", "cut", "other size", "a folder"])
def test_a_folder_without_rings_is_one_line(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "\x1b[31m"
    if what != "none":
        folder.mkdir()
    if what == "garbage":
        (folder / "x.ring").write_bytes(b"[" * 300_000)
    elif what == "a folder":
        (folder / "x.ring").mkdir()
    elif what in ("cut", "other size"):
        (path,) = a_run(folder, "a")
        data = path.read_bytes()
        path.write_bytes(data[:-9] if what == "cut" else data[1:])
    assert doctor.main(["--flight", str(folder)]) == 2
    told = capsys.readouterr()
    assert not told.out and "\x1b" not in told.err
    assert re.fullmatch(r"weft doctor: .*x1b\[31m.*\n", told.err)


def test_rings_with_flipped_bits_are_told_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = a_run(tmp_path, "abc" * 100)
    data = path.read_bytes()
    for seed in range(200):
        rng = random.Random(seed)
        flipped = bytearray(data)
        for _ in range(20):
            # Half of them in what tells whose ring it is, and in the first words.
            at = rng.choice([rng.randrange(len(data)), rng.randrange(flight.BYTES, len(data)), 3])
            flipped[at] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        assert doctor.main(["--flight", str(tmp_path)]) in (0, 2), f"{seed=}"
        told = capsys.readouterr()
        assert "\x1b" not in told.out + told.err, f"{seed=}"


# One that sits in C code, here until its input ends, has no Python handler run.
_IN_A_LIBRARY = """
import ctypes, select, signal, struct, sys
from weft.collectives.ranks import flight
{before}
flight.recorder()
print("ready", flush=True)
asked = ctypes.create_string_buffer(struct.pack("ihh", 0, select.POLLIN, 0))
while ctypes.PyDLL(None).poll(asked, 1, 60_000) < 0:  # a signal ends it
    pass
print(sys.argv[1:], flush=True)
"""


@pytest.mark.parametrize(
    ("before", "stacks"),
    [
        ("", True),
        ("signal.signal(signal.SIGUSR1, lambda *_: sys.argv.append('chained'))", True),
        ("import faulthandler; faulthandler.register(signal.SIGUSR1, open('other', 'w'))", False),
    ],
)
def test_the_signal_tells_where_threads_are_in_c_code_too(
    before: str, stacks: bool, tmp_path: Path
) -> None:
    """And whoever had it before is called as well, or has it still."""
    run = subprocess.Popen(
        [sys.executable, "-c", _IN_A_LIBRARY.format(before=before)], cwd=tmp_path, text=True,
        env={**os.environ, "WEFT_FLIGHT_DIR": str(tmp_path / "made"), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    time.sleep(0.3)
    run.send_signal(signal.SIGUSR1)
    time.sleep(0.3)
    assert run.poll() is None  # the signal's own effect would be its end
    written = {path.suffix: path.read_text(errors="replace") for path in tmp_path.glob("made/*")}
    assert ("most recent call first" in written.get(".stacks", "")) is stacks
    if not stacks:
        assert "most recent call first" in (tmp_path / "other").read_text()
    assert run.communicate()[0] == f"{['chained'] if 'chained' in before else []}\n"
    assert oct((tmp_path / "made").stat().st_mode)[-3:] == "700"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"WEFT_FLIGHT_DIR=.*file/in: .*cannot be kept there, Not a"
    ):
        flight.FlightRecorder(tmp_path / "file" / "in")


def test_without_the_variable_nothing_is_written_nor_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flight, "_own", None)
    monkeypatch.setattr(flight_files, "make", None)
    before = signal.getsignal(signal.SIGUSR1)
    assert os.readlink(f"/proc/self/fd/{flight.recorder().fd}").startswith("/memfd:")
    assert signal.getsignal(signal.SIGUSR1) is before


def several(world_size: int) -> tuple[list[flight.Calls], list[flight.Calls]]:
    """What ranks see of two groups of theirs."""
    recorders = [flight.FlightRecorder() for _ in range(world_size)]
    readers = {r: flight.Reader(each.ring) for r, each in enumerate(recorders)}
    one, other = (
        [flight.Calls(name, readers, own, r) for r, own in enumerate(recorders)] for name in "xy"
    )
    return one, other


@pytest.mark.parametrize("seed", range(10))
def test_calls_of_streams_that_differ_are_seen_by_the_last_of_two_neighbours(seed: int) -> None:
    """Ranks run ahead of each other at random; some differ in one call, or none does."""
    chance = random.Random(seed)
    W, calls, most_ahead = chance.choice((2, 3, 5)), 900, chance.choice((3, 200))
    at = chance.randrange(1, calls) if seed % 4 else calls + 1
    odd = set(chance.sample(range(W), chance.randrange(1, W)))
    one, other = several(W)
    raised: set[int] = set()
    while running := [r for r in range(W) if one[r].position < calls and r not in raised]:
        slowest = min(calls.position for calls in one)
        r = chance.choice([r for r in running if one[r].position <= slowest + most_ahead] or [-1])
        if r < 0:
            break
        other[r].begin(flight.call_of("call of another group", ()))
        differs = one[r].position + 1 == at and r in odd
        one[r].begin(flight.call_of("odd" if differs else "usual", ()))
        before = [p for p in ((r - 1) % W, (r + 1) % W) if one[p].position >= at]
        due = one[r].position == at and any((p in odd) != (r in odd) for p in before)
        try:
            one[r].check()
            assert not due
        except weft.MismatchError as error:
            raised.add(r)
            assert one[r].position >= at
            assert f"rank {r} called {'odd' if r in odd else 'usual'}" in str(error)
    assert bool(raised) == (at <= calls)
    for r, each in enumerate(one):
        assert bool(each.compare()) == (at <= each.position), (r, each.position, at)
    assert not any(each.compare() for each in other)


def steps_body(seed: int) -> int:
    """Right calls of all kinds, with those of streams compared although they are none."""
    check, late = Workspace.check, random.Random(dist.get_rank())

    def checked(ws: Workspace, op: str) -> None:
        check(ws, op)
        ws.group.calls.check()

    with patch.object(Workspace, "check", checked):
        for _ in range(60):
            if late.random() < 0.1:
                time.sleep(late.uniform(0, 0.02))
            seed = seed * 75 % 65537
            make(list(WORK)[seed % len(WORK)])
    calls = collectives.resolve().calls
    position = calls.position
    calls.begin(flight.call_of("odd" if dist.get_rank() == 1 else "usual", ()))
    dist.barrier()
    with pytest.raises(weft.MismatchError, match=r"rank . called .*; rank . called"):
        calls.check()
    return position


@pytest.mark.slow
@needs_interpreter
def test_calls_of_streams_are_never_refused_if_they_are_right(own_ranks: Any) -> None:
    positions = own_ranks(3).run(steps_body, 5, timeout_s=60)
    assert len(set(positions)) == 1 and positions[0] > 60


def waiting_kernel_body() -> str:
    """Rank 0 launches a kernel, which waits for rank 1, which calls something else."""
    rank, calls = dist.get_rank(), collectives.resolve().calls
    x = torch.ones(64)
    with weft.engine("triton"):
        collectives.all_gather(x)
    ws = collectives.workspace(channel="kernels")
    report = ws.buffer.report
    assert report is not None
    report.compare = calls.compare  # as on a GPU
    calls.begin(flight.call_of("all_gather" if rank == 0 else "barrier", ()))
    if rank == 1:
        with pytest.raises(weft.MismatchError, match=r"rank 0 called all_.*; rank 1 called barr"):
            while True:
                calls.check()
        return ""
    start = time.monotonic()
    config = kernels.collective_config("all_gather", x.nbytes, 2, False)
    kernels.launch_all_gather(x, torch.empty(128), ws, [64, 64], config)
    assert time.monotonic() - start < 10  # the bound is set far beyond it
    return str(report.error())


@needs_interpreter
def test_kernels_that_wait_in_different_calls_are_told(own_ranks: Any) -> None:
    told, _ = own_ranks(2).run(waiting_kernel_body, timeout_s=60)
    assert "rank 0 called all_gather; rank 1 called barrier" in told


def test_ranks_part_where_they_differ_since_all_were_told_of_the_last_time() -> None:
    """At 2 and 3 they differed until a call failed everywhere, and 4 was made by all again."""

    def entry(hash: int, ended: int, began: int = 2) -> Any:
        return SimpleNamespace(hash=hash, ended=ended, began=began)

    same, well, failed = (entry(1, 1), entry(1, 1)), 1, -1
    before = {1: same, 2: (entry(2, well), entry(3, well)), 3: (entry(4, failed), entry(5, failed))}
    for calls, at in (
        ({1: same}, None),
        (before, 2),  # nobody went on
        (before | {4: same}, None),
        (before | {4: same, 5: (entry(6, 0), entry(7, failed))}, 5),
        (before | {4: same, 5: (entry(6, well), entry(7, well)), 6: (entry(8, -1),) * 2}, 5),
        (before | {4: (entry(1, 0), entry(1, 1))}, 2),  # one has not ended
        (before | {4: (entry(6, well), entry(7, well)), 5: same}, 4),
        (before | {4: (entry(6, well, 0), entry(7, well, 0)), 5: same}, None),  # inside of 3
    ):
        assert flight.parting({at: dict(enumerate(both)) for at, both in calls.items()}) == at
