"""Solo mode: a rank's true kernels with nobody beside it, interpreted, against float64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs_interpreter

import weft
from weft.bench.measure import deviation, listed
from weft.bench.problem import Spec
from weft.bench.rows import Case, Result, Timing
from weft.bench.solo import cases as solo_cases
from weft.bench.solo import command, measure
from weft.bench.solo import page as solo_page
from weft.collectives.ranks.pad import pad_bytes
from weft.errors import MismatchError, PeerTimeout
from weft.kernels.engine import kernel_rates
from weft.kernels.engine.chips import INTERPRETER, known
from weft.kernels.matmul import all_gather_kernel
from weft.sim.run.solo import SoloWorld
from weft.sim.unwaited import PARTS

pytestmark = needs_interpreter

CPU = torch.device("cpu")


def spec_of(name: str, world_size: int) -> Spec:
    """The first tiny case whose name begins so."""
    return next(spec for spec in solo_cases.cases(True, [world_size]) if spec.name.startswith(name))


def errors(spec: Spec, rank: int, calls: int = 3) -> list[float]:
    """How far the results of calls one after another are from the oracle, in tolerances."""
    world = SoloWorld(spec.params["ranks"])
    with weft.engine("triton"):
        problem = solo_cases.build(spec, rank, CPU)
        problem.prepare(world)
        world.learn(problem.run, problem.depth)
        expected, found = problem.expected(rank), []
        with world.at(rank):
            for _ in range(calls):
                world.post()
                made = problem.run(rank)
                world.check()
                found.append(deviation(listed(made), expected) / problem.tolerance)
    world.close()
    return found


QUICK = solo_cases.cases(True, [2])


@pytest.mark.parametrize("spec", QUICK, ids=lambda spec: spec.name.replace(" ", "-"))
def test_every_kind_of_call_of_two_ranks(spec: Spec) -> None:
    assert max(errors(spec, 1)) <= 1


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("all_gather_matmul", 3),
        ("matmul_all_reduce", 3),
        ("norm", 3),
        ("flash_decode", 3),
        ("matmul_reduce_scatter", 8),
        ("all_to_all", 8),
    ],
)
def test_larger_worlds(name: str, world_size: int) -> None:
    assert max(errors(spec_of(name, world_size), world_size - 1, calls=2)) <= 1


def test_shards_of_copy_engines_come_before_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config_for = all_gather_kernel.config_for

    def by_copy_engines(M: int, N: int, K: int, dtype: Any, W: int, *args: Any, **more: Any) -> Any:
        config = config_for(M, N, K, dtype, W, *args, **more)
        if W == 1:
            return config
        return all_gather_kernel.by_copy_engines(config, M, K, dtype, W, INTERPRETER)

    monkeypatch.setattr(all_gather_kernel, "config_for", by_copy_engines)
    spec = spec_of("all_gather_matmul", 3)
    assert max(errors(spec, 1)) <= 1
    case = measure.measured(spec, CPU, quick=True)
    assert case.failure == "" and "copying inside the chip" in case.timed
    assert "as copy engines are the link" in case.notes[0]


def small(world_size: int = 2) -> tuple[SoloWorld, Callable[[int], Any], torch.Tensor]:
    """A world that has learned an all_gather, and what that returns."""
    world, whole = SoloWorld(world_size), torch.arange(4.0 * world_size)

    def fn(rank: int) -> torch.Tensor:
        return weft.collectives.all_gather(whole.chunk(world_size)[rank])

    with weft.engine("triton"):
        world.learn(fn)
    return world, fn, whole


@pytest.mark.parametrize("lost", ["all", "one"])
def test_a_signal_that_is_missing_is_an_error(lost: str) -> None:
    world, fn, whole = small(3)
    kernels = [buffer for buffer in world.team.buffers if buffer.posted.any()]
    posted = kernels[-1].posted[0].nonzero().flatten()
    for word in posted if lost == "all" else posted[-1:]:
        kernels[-1].posted[0, word] = False
    with weft.engine("triton"), world.at(0):
        world.post()
        with pytest.raises(PeerTimeout, match=r"rank 0 waited .* for rank [12]"):
            fn(0)
        with world.at(1):
            world.post()
            assert torch.equal(fn(1), whole)  # the others are as they were


def test_signals_are_of_as_many_calls_as_were_posted() -> None:
    world, fn, whole = small()
    with weft.engine("triton"), world.at(0):
        world.post(3)
        for _ in range(3):
            assert torch.equal(fn(0), whole)
        with pytest.raises(PeerTimeout):
            fn(0)


def test_another_function_is_learned_after_calls_of_one_rank() -> None:
    world, fn, whole = small()

    def twice(rank: int) -> torch.Tensor:  # two calls on one channel
        return fn(rank) + weft.collectives.all_gather(2 * whole.chunk(2)[rank])

    with weft.engine("triton"):
        with world.at(1):
            world.post()
            fn(1)
        world.learn(twice)
        with world.at(1):
            for _ in range(2):
                world.post()
                assert torch.equal(twice(1), 3 * whole)


def test_calls_that_cannot_be_learned_are_refused() -> None:
    world = SoloWorld(2)

    def uneven(rank: int) -> torch.Tensor:
        return weft.collectives.all_gather(torch.ones(rank + 1))

    with weft.engine("triton"), pytest.raises(MismatchError, match="equal shards"):
        world.learn(uneven)
    world, _, _ = small()

    def larger(rank: int) -> torch.Tensor:
        return weft.collectives.all_gather(torch.ones(1000))

    with weft.engine("triton"), world.at(0):
        world.post()
        with pytest.raises(RuntimeError, match="after `learn`"):
            larger(0)


def test_a_wrong_result_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's data that changes after it was learned."""
    post = SoloWorld.post

    def corrupt(world: SoloWorld, calls: int = 1) -> None:
        for buffer in world.team.buffers:
            for segment in buffer.segments:
                segment[pad_bytes(2) :] = 0
        post(world, calls)

    monkeypatch.setattr(SoloWorld, "post", corrupt)
    case = measure.measured(spec_of("reduce_scatter", 2), CPU, quick=True)
    assert "times the tolerance" in case.failure and not case.variants


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "solo.json"
    tiny = ["--quick", "--device", "cpu", "--out", str(out)]
    with pytest.raises(SystemExit):
        command.main(["--quick", "--device", "cpu", "--filter", "no such case"])
    assert command.main(["--quick", "--device", "cpu", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [spec.name for spec in QUICK]
    assert command.main([*tiny, "--filter", "all_gather "]) == 0
    (case,) = Result.read(out).cases
    assert case.failure == "" and case.params["host_us"] > 0 and case.peer == "copy"
    assert {"weft", "warm L2", "copy", "posting"} <= case.timed.keys()
    first = case.variants

    assert command.main([*tiny, "--filter", "all_", "--resume", "--minutes", "0.0001"]) == 130
    assert [case.variants for case in Result.read(out).cases] == [first]
    assert command.main([*tiny, "--filter", "all_to_all", "--resume"]) == 0
    kept, new = Result.read(out).cases
    assert kept.variants == first and new.name.startswith("all_to_all") and new.failure == ""
    page = solo_page.lines(out)
    assert "### collectives" in page and sum(line.startswith("| all_") for line in page) == 2
    assert solo_page.lines(tmp_path / "none.json") == []
    assert {spec.params["op"] for spec in QUICK} == set(sum(solo_page.KINDS.values(), ()))


def test_rates_of_tiles_follow_from_the_figures(tmp_path: Path, monkeypatch: Any) -> None:
    def case(op: str, W: int, weft: float, library: float, **more: str) -> Case:
        params = {"op": op, "M": 4096, "N": 4096, "K": 4096, "dtype": "bfloat16", "ranks": W}
        timings = {"weft": weft, "cuBLAS": library}
        variants = {name: Timing([us], [us]) for name, us in timings.items()}
        return Case("solo", op, params | more, variants, main="weft", peer="cuBLAS")

    sums = "matmul_all_reduce"
    cases = [
        case(sums, 8, 200.0, 160.0),
        case(sums, 4, 200.0, 40.0),
        case(sums, 2, 50.0, 1.0),  # too short
        case(sums, 2, 200.0, 1.0, epilogue="bias"),
        Case("solo", "norm", {"op": "norm"}, {"weft": Timing([200.0], [200.0])}, main="weft"),
    ]
    found = measure.rates_of(Result("solo", {}, cases), CPU)
    tile = kernel_rates.Tile("bfloat16", 32, 32, 32)
    assert found == [(tile, 0.8), (tile, 0.2)]
    path = kernel_rates.write(tmp_path, "interpreter", found)
    assert path == tmp_path / "interpreter.rates.json"

    monkeypatch.setenv("WEFT_TUNED", str(tmp_path))
    assert kernel_rates.rate_of(INTERPRETER, tile)[0] == 0.4  # the geometric mean
    other, told = kernel_rates.rate_of(INTERPRETER, tile._replace(dtype="float32"))
    assert other == kernel_rates.GUESS and "not measured on interpreter" in told
    assert kernel_rates.rate_of(known("sm_90"), tile)[0] == kernel_rates.GUESS

    kernel_rates.load.cache_clear()
    path.write_text(path.read_text().replace("0.4", "-1"))
    with pytest.raises(ValueError, match=r"interpreter\.rates\.json is not a table of rates"):
        kernel_rates.rate_of(INTERPRETER, tile)


def test_kernels_without_waits_wait_for_nothing() -> None:
    """In a process of its own, as all of its kernels lack their waits."""
    code = """
import torch, weft
from weft.sim import unwaited
from weft.kernels.matmul import all_gather_kernel
from weft.kernels.engine import kernel_rates
from weft.kernels.engine.chips import INTERPRETER, known
from weft.sim.run.solo import SoloWorld
from weft.sim.unwaited import PARTS
unwaited.leave_out({!r})
with weft.engine("triton"), SoloWorld(2) as world:
    fn = lambda rank: weft.collectives.all_reduce(torch.ones(64))
    world.learn(fn)
    with world.at(0):
        fn(0)
        world.check()
"""
    for part in PARTS:
        subprocess.run([sys.executable, "-c", code.format(part)], check=True)
