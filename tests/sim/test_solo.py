"""Solo mode: a rank's true kernels with nobody beside it, interpreted, against float64."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from needs import needs_interpreter

import weft
from weft.bench.measure import as_list, deviation
from weft.bench.problem import Spec
from weft.bench.rows import Case, Result, Timing
from weft.bench.solo import attention_tiles, command, compiling, measure, rates, sweep
from weft.bench.solo import cases as solo_cases
from weft.bench.solo import page as solo_page
from weft.collectives.ranks.pad import pad_bytes
from weft.errors import MismatchError, PeerTimeout
from weft.kernels.engine import kernel_rates, tuning
from weft.kernels.engine.chips import INTERPRETER, known
from weft.kernels.engine.tuning import Trial
from weft.kernels.matmul import all_gather_launch
from weft.kernels.norm import rms_norm_launch
from weft.kernels.norm.rms_norm_launch import RMSNormConfig
from weft.sim.run.solo import SoloWorld
from weft.sim.unwaited import PARTS

pytestmark = needs_interpreter

CPU = torch.device("cpu")


def spec_of(name: str, world_size: int) -> Spec:
    """The first tiny case whose name begins so."""
    return next(spec for spec in solo_cases.cases(True, [world_size]) if spec.name.startswith(name))


def errors(spec: Spec, rank: int, calls: int = 2) -> list[float]:
    """How far the results of calls one after another are from the oracle, in tolerances."""
    world = SoloWorld(spec.params["ranks"])
    with weft.engine("triton"):
        problem = solo_cases.workload_of(spec, rank, CPU)
        problem.prepare(world)
        world.learn(problem.run, problem.depth)
        expected, found = problem.expected(rank), []
        with world.at(rank):
            for _ in range(calls):
                world.post()
                made = problem.run(rank)
                world.check()
                found.append(deviation(as_list(made), expected) / problem.tolerance)
    world.close()
    return found


QUICK = solo_cases.cases(True, [2])
LONG = "backward", "experts", "attention"


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(
            spec,
            marks=[pytest.mark.slow] * any(long in spec.name for long in LONG),
            id=spec.name.replace(" ", "-"),
        )
        for spec in QUICK
    ],
)
def test_every_kind_of_call_of_two_ranks(spec: Spec) -> None:
    assert max(errors(spec, 1)) <= 1


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("all_gather_matmul", 3),
        pytest.param("matmul_all_reduce", 3, marks=pytest.mark.slow),
        pytest.param("norm", 3, marks=pytest.mark.slow),
        pytest.param("flash_decode", 3, marks=pytest.mark.slow),
        pytest.param("matmul_reduce_scatter", 8, marks=pytest.mark.slow),
        ("all_to_all", 5),
    ],
)
def test_larger_worlds(name: str, world_size: int) -> None:
    assert max(errors(spec_of(name, world_size), world_size - 1)) <= 1


@pytest.mark.slow
def test_shards_of_copy_engines_come_before_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config_for = all_gather_launch.all_gather_config

    def by_copy_engines(M: int, N: int, K: int, dtype: Any, W: int, *args: Any, **more: Any) -> Any:
        config = config_for(M, N, K, dtype, W, *args, **more)
        if W == 1:
            return config
        return all_gather_launch.by_copy_engines(config, M, K, dtype, W, INTERPRETER)

    monkeypatch.setattr(all_gather_launch, "all_gather_config", by_copy_engines)
    spec = spec_of("all_gather_matmul", 3)
    assert max(errors(spec, 1)) <= 1
    case = measure.measured_case(spec, CPU, quick=True)
    assert case.failure == "" and "copying inside the chip" in case.timed
    assert "as copy engines are the link" in case.notes[0]


@pytest.mark.slow
def test_words_of_peers_that_carry_their_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_words(
        rows: int, share: int, H: int, dtype: Any, W: int, chip: Any, whole: bool
    ) -> RMSNormConfig:
        return rms_norm_launch.by_words(rows, share, H, dtype, False, chip)

    monkeypatch.setattr(rms_norm_launch, "quickest_norm", by_words)
    case = measure.measured_case(spec_of("norm", 2), CPU, quick=True)
    assert not case.failure and "weft" in case.timed


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
    case = measure.measured_case(spec_of("reduce_scatter", 2), CPU, quick=True)
    assert "times the tolerance" in case.failure and not case.variants


def test_launches_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best right one is kept at once, and a failure of one is no end of the others."""
    spec = sweep.launch_specs(True)[0]
    times = iter([9.0] * 9 + [5.0] * 9)
    monkeypatch.setattr(measure.Stopwatch, "us", lambda self, call, before: next(times))
    tried = sweep.Search.tried

    def fails(self: sweep.Search, choice: Any) -> Any:
        if choice.tiling and choice.tiling.block_m == 32:
            raise_in = pytest.MonkeyPatch()
            raise_in.setattr(self.problem, "run", lambda rank: {}["no resources"])
            try:
                return tried(self, choice)
            finally:
                raise_in.undo()
        return tried(self, choice)

    monkeypatch.setattr(sweep.Search, "tried", fails)
    entry, trials = sweep.search_launches(spec, CPU, tmp_path)
    assert [trial.us for trial in trials] == [9.0, 5.0, float("inf")]
    assert "no resources" in trials[2].failure
    assert entry["heuristic_us"] == 9.0 and entry["choice"]["tiling"]["block_m"] == 16
    table = tuning.load(str(tmp_path), "interpreter")
    key = tuning.key_of("all_gather_matmul", 32, 32, 64, torch.bfloat16, 2)
    assert table[key] == trials[1].choice
    # What is quicker by no more than noise is not worth an entry's risk.
    some = [Trial(trial.choice, us) for trial, us in zip(trials, (9.0, 8.9, 9.1), strict=True)]
    assert sweep.best_of(some) is some[0]


@pytest.mark.parametrize("number", [0, 1])
def test_tiles_of_attention_are_searched(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong ones are out, and the kernel's own are compared with."""
    spec = attention_tiles.tile_specs(True)[number]
    name = "block_m" if spec.params["step"] == "forward" else "dkv_m"
    times = iter([9.0] * 9 + [5.0] * 9)
    monkeypatch.setattr(measure.Stopwatch, "us", lambda self, call, before: next(times))
    found = attention_tiles.search_tiles(spec, CPU)
    assert found["choice"] == {name: 16} and (found["us"], found["heuristic_us"]) == (5.0, 9.0)
    assert found["times"] == [[{}, 9.0], [{name: 16}, 5.0]]
    times = iter([9.0] * 9)
    deviations = iter([0.0, 1.0])
    monkeypatch.setattr(attention_tiles, "deviation", lambda made, expected: next(deviations))
    found = attention_tiles.search_tiles(spec, CPU)
    assert found["choice"] == {} and "times the tolerance" in found["failed"][0]


def test_a_wrong_launch_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    search = sweep.Search(sweep.launch_specs(True)[0], CPU)
    search.expected = [search.expected[0] + 10]
    assert "times the tolerance" in search.tried(tuning.HEURISTIC).failure


def test_a_device_that_refuses_everything_fails_the_case_alone(monkeypatch: Any) -> None:
    """As after an error that stays: what tidies up raises as well."""

    def refuses(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(SoloWorld, "learn", refuses)
    monkeypatch.setattr(SoloWorld, "close", refuses)
    case = measure.measured_case(QUICK[0], CPU, quick=True)
    assert "illegal memory access" in case.failure


def test_a_run_ends_where_the_device_is_lost_and_goes_on_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "solo.json"
    tiny = ["--quick", "--device", "cpu", "--out", str(out), "--filter", "all_", "--resume"]
    measured: list[str] = []

    def fake(spec: Spec, *args: Any, **options: Any) -> Case:
        measured.append(spec.name)
        lost = len(measured) == 1
        return Case("solo", spec.name, dict(spec.params), failure="lost" if lost else "")

    monkeypatch.setattr(measure, "measured_case", fake)
    monkeypatch.setattr(measure, "usable", lambda device: False)
    assert command.main(tiny) == 1
    assert [case.failure for case in Result.read(out).cases] == ["lost"]
    assert command.main(tiny) == 0
    first, *others = [spec.name for spec in QUICK if "all_" in spec.name]
    assert measured == [first, *others, first]


def has_few_queues() -> None:
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.slow
def test_compilers_outlive_what_fails_and_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setattr(compiling, "cores", lambda: 2)
    compilers = compiling.Compilers(CPU)
    units = [
        ("fine", has_few_queues),
        ("wrong", partial(int, "x")),
        ("dies", partial(os._exit, 1)),
        ("again", partial(time.sleep, 0)),
    ]
    done = compilers.run(units[:2], time.monotonic() + 300)
    assert done.ended == 1 and [why.partition(":")[0] for why in done.wrong] == ["wrong"]
    assert compilers.run(units[2:3], time.monotonic() + 300).wrong == [
        "dies: its process, or one beside it, died"
    ]
    assert compilers.run(units[3:], time.monotonic() + 300).ended == 1
    hangs = [("hangs", partial(time.sleep, 600))]
    assert compilers.run(hangs, time.monotonic() + 1).left == ["hangs"]
    compilers.close()


def lack_memory(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    raise torch.AcceleratorError("CUDA error: out of memory")


@pytest.mark.slow
def test_fewer_processes_go_on_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "cores", lambda: 2)
    compilers, said = compiling.Compilers(CPU), list[str]()
    units = [("much", partial(lack_memory, tmp_path)), ("fine", partial(time.sleep, 0))]
    done = compilers.run(units, time.monotonic() + 300, said.append)
    compilers.close()
    assert compilers.count == 1 and done.ended == 1 and not done.left
    assert done.wrong == ["much: AcceleratorError: CUDA error: out of memory"]
    assert f"{done.wrong[0]}: again, by fewer processes" in said
    assert len(list(tmp_path.iterdir())) == 2  # the first, which holds memory, has ended


def test_kernels_are_compiled_with_what_launches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made.append("compiled" if warmup else "launched")
        return SimpleNamespace(_init_handles=lambda: made.append("with what launches it"))

    monkeypatch.setattr(triton.JITFunction, "run", run)
    with compiling.compiling():
        triton.JITFunction.run(None, grid=(1,), warmup=False)
    assert made == ["compiled", "with what launches it"]


def test_segments_of_what_is_compiled_only_share_memory() -> None:
    with SoloWorld(8, hollow=True) as world:
        memory = world.team.memory(0, 4096, 10 << 20, CPU)
        starts = [segment.data_ptr() for segment in world.team.buffers[0].segments]
        assert {b - a for a, b in pairwise(starts)} == {4096}
        whole = world.team.buffers[0].segments[0].untyped_storage().nbytes()
        assert memory is not None and whole < 11 << 20


def test_what_is_compiled_only_looks_at_no_status() -> None:
    """Data of a rank lie over the pads of others, as those of a group's gather did."""
    ran: list[int] = []

    def fn(rank: int) -> None:
        buffer = weft.collectives.empty((1 << 20,), torch.uint8)
        buffer.get_buffer(rank, (1 << 20,), torch.uint8).fill_(205)
        kept.append(buffer)
        ran.append(rank)

    kept: list[Any] = []
    with SoloWorld(4, hollow=True) as world:
        world.learn(fn, depth=2)
        assert ran == [0, 1, 2, 3]
        assert any(int(buffer.status_of(rank)) for rank, buffer in enumerate(kept))
        with world.at(2):
            fn(2)  # asks for more memory
            world.check()


@pytest.mark.slow
def test_an_epilogue_of_a_group_of_one_is_given_whole_rows() -> None:
    op, dtype = "matmul_reduce_scatter", "bfloat16"
    params = {"op": op, "M": 32, "N": 32, "K": 64, "dtype": dtype, "epilogue": "bias + residual"}
    spec = Spec(op, {**params, "ranks": 2})
    with compiling.compiling():
        compiling.compiled(spec, CPU)
    case = measure.measured_case(spec, CPU, quick=True)
    assert case.failure == "" and case.variants["alone"].failure == ""
    assert max(errors(spec, 1)) <= 1


def test_what_an_epilogue_adds() -> None:
    params = {"op": "matmul_all_reduce", "M": 8, "N": 8, "K": 8, "dtype": "bfloat16", "ranks": 2}

    def case(name: str, us: float, **more: str) -> Case:
        return Case("solo", name, params | more, {"weft": Timing([us], [us])}, main="weft")

    both = [case("plain", 7.0), case("with bias", 9.5, epilogue="bias")]
    assert solo_page.epilogues(both) == ["with bias: the epilogue adds 2.5 us to plain"]
    assert not solo_page.epilogues(both[1:])


@pytest.mark.slow
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
    page = solo_page.solo_lines(out)
    assert "### collectives" in page and sum(line.startswith("| all_") for line in page) == 2
    assert solo_page.solo_lines(tmp_path / "none.json") == []
    assert {spec.params["op"] for spec in QUICK} == set(sum(solo_page.KINDS.values(), ()))


def test_rates_of_tiles_follow_from_the_figures(tmp_path: Path, monkeypatch: Any) -> None:
    def case(op: str, W: int, weft: float, library: float, **more: str) -> Case:
        params = {"op": op, "M": 4096, "N": 4096, "K": 4096, "dtype": "bfloat16", "ranks": W}
        timings = {"weft": weft, "cuBLAS": library}
        variants = {name: Timing([us], [us]) for name, us in timings.items()}
        made = Case("solo", op, params | more, variants, main="weft", peer="cuBLAS")
        made.params |= {"flop": 2 * 4096**3, "rated": rates.launched_tile(made, INTERPRETER)}
        return made

    sums = "matmul_all_reduce"
    cases = [
        case(sums, 8, 200.0, 160.0),
        case(sums, 4, 200.0, 40.0),
        case(sums, 2, 50.0, 1.0),  # too short
        case(sums, 2, 200.0, 1.0, epilogue="bias"),
        Case("solo", "norm", {"op": "norm"}, {"weft": Timing([200.0], [200.0])}, main="weft"),
    ]
    tile = kernel_rates.Tile("bfloat16", 32, 32, 32)
    assert rates.rates_of(cases) == {"interpreter": [(tile, 0.8), (tile, 0.2)]}
    # Of fp8 to twice the library's best in bf16, not to the library's own, exact and slow.
    (_, fp8) = rates.rates_of([*cases[:2], case(sums, 8, 25.0, 1e3, dtype="float8_e4m3fn")], 20.0)[
        "interpreter"
    ][-1]
    assert fp8 == pytest.approx(40.0 / 25.0 / 2)
    (path,) = rates.write_rates(tmp_path, cases)
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


@pytest.mark.slow
def test_kernels_without_waits_wait_for_nothing() -> None:
    """In a process of its own, as all of its kernels lack their waits."""
    code = """
import torch, weft
from weft.sim import unwaited
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
