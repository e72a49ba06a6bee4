"""The choice of engine: forced, explained, by cost, and the fallback where none fits."""

from __future__ import annotations

import _thread
import json
import math
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from dtensors import world
from needs import needs_interpreter
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from tools import scaling_page
from weft import settings, sim
from weft.collectives import Group, cost, kept_files, resolve
from weft.collectives.prices import library
from weft.collectives.prices.hardware import H100, H200, named
from weft.collectives.protocols import COLLECTIVE_OF, nccl_us
from weft.dtensor import DTensor, Shard
from weft.kernels.engine import chips, engines, fp8, fused_times, kernel_rates, tuning


@pytest.mark.ranks(2)
def test_forced_engines_run_and_are_told() -> None:
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    lines = []
    for engine in ("host", "generic", "triton"):
        with weft.engine(engine):  # type: ignore[arg-type]
            for op in (weft.all_gather_matmul, weft.matmul_reduce_scatter, weft.matmul_all_reduce):
                explanation = weft.explain(op, x, w)
                assert (explanation[0].op, explanation[0].engine) == (op.__name__, engine)
                assert explanation[0].why == "asked for"
                assert isinstance(explanation.result, torch.Tensor)
                lines.append(str(explanation))
    with (
        weft.engine("host"),
        pytest.raises(NotImplementedError, match="gathered dim is the contraction"),
    ):
        weft.all_gather_matmul(x, torch.ones(8 * dist.get_world_size(), 2), gather_dim=1)
    with weft.engine("triton"), pytest.raises(NotImplementedError, match=r"support torch\.float64"):
        weft.matmul_all_reduce(x.double(), w.double())
    assert lines[0].startswith("all_gather_matmul(8x8 @ 8x8, 2 ranks): host, asked for")


def automatic_body(folder: str) -> tuple[str, list[str]]:
    os.environ["WEFT_CACHE_DIR"] = folder
    cost.forget_rates(resolve())
    cost._compared_matmuls.cache_clear()
    try:
        x, w = torch.ones(64, 32), torch.ones(32, 16)
        decision = weft.explain(lambda: weft.matmul_all_reduce(x, w))[0]
        columns = weft.explain(lambda: weft.all_gather_matmul(x, torch.ones(64, 4), gather_dim=1))
        assert columns[0].engine == "generic" and "contraction" in columns[0].why
        rates = cost.machine(resolve(), torch.device("cpu"))
        assert rates.copy > 0 and rates.sync_us > 0 and rates.flops["torch.float32"] > 0
        # Kept: a new process would read the same numbers.
        library = cost.onednn_is_quicker()
        cost.forget_rates(resolve())
        cost._compared_matmuls.cache_clear()
        assert cost.onednn_is_quicker() == library
        assert cost.machine(resolve(), torch.device("cpu")) == rates
        return str(decision), sorted(os.listdir(folder))
    finally:
        # Later tests on these ranks go by what the machine keeps, as every process does.
        del os.environ["WEFT_CACHE_DIR"]
        cost.forget_rates(resolve())
        cost._compared_matmuls.cache_clear()


def loaded_body(folder: str) -> list[tuple[float, int]]:
    """The load and the number of measurements, in processes that find one load after another."""
    os.environ["WEFT_CACHE_DIR"] = folder
    found = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            for load in (3.0, 2.9, 1.4, 0.6, 0.1, 0.1):
                patch.setattr(cost, "load_a_core", lambda now=load: now)
                cost.forget_rates(resolve())
                rates = cost.machine(resolve(), torch.device("cpu"))
                found.append((rates.load, rates.tries))
        return found
    finally:
        del os.environ["WEFT_CACHE_DIR"]
        cost.forget_rates(resolve())


def test_rates_taken_under_load_are_measured_again_later(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, loaded_body, str(tmp_path))
    assert first == second == [(3.0, 1), (3.0, 1), (1.4, 2), (0.6, 3), (0.6, 3), (0.6, 3)]


def test_the_least_time_of_the_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, [9.0, 5.0, 1.0, 2.0, 1.0, 8.0, 8.0]  # the first is not counted

    def call() -> None:
        nonlocal now
        now += calls.pop(0)

    monkeypatch.setattr(cost.time, "perf_counter", lambda: now)
    assert cost.least_us(call, 3, calls=2) == pytest.approx(1.5e6)


def test_a_cache_that_is_named_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv("WEFT_CACHE_DIR", raising=False)
    for folder in kept_files.folders():
        folder.mkdir(mode=0o700, parents=True)
        (folder / "machine.json").write_text(json.dumps(asdict(H100.rates())))
    fields = asdict(H100.rates())
    assert len(kept_files.folders()) == 2 and kept_files.load("machine.json", fields)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "fresh"))
    assert (
        kept_files.folders() == [tmp_path / "fresh"]
        and kept_files.load("machine.json", fields) is None
    )


def test_only_what_is_ours_and_possible_is_taken_from_a_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("WEFT_CACHE_DIR", raising=False)
    rates = asdict(H100.rates())
    kept_files.save("machine.json", rates)
    home, temporary = kept_files.folders()
    assert kept_files.load("machine.json", rates) == rates and home.stat().st_mode & 0o777 == 0o700
    for name, value in (
        ("copy", math.nan), ("wire", math.inf), ("sync_us", -1.0), ("load", "0"), ("tries", True),
        ("flops", {}), ("flops", 1.0), ("flops", {"torch.float32": 0}),
        ("between", [[0.0, 1.0]]), ("between", [1.0]), ("between", [[-1.0]]), ("between", None),
    ):  # fmt: skip
        (home / "machine.json").write_text(json.dumps({**rates, name: value}))
        assert kept_files.load("machine.json", rates) is None, (name, value)
    home.chmod(0o770)
    assert kept_files.folders() == [temporary]
    kept_files.save("machine.json", rates)
    assert kept_files.load("machine.json", rates) == rates
    temporary.rename(tmp_path / "elsewhere")
    temporary.symlink_to(tmp_path / "elsewhere")
    assert kept_files.folders() == [] and kept_files.load("machine.json", rates) is None
    temporary.unlink()
    temporary.mkdir(mode=0o700)
    assert kept_files.folders() == [temporary]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert kept_files.folders() == []


def test_what_is_told_of_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    group, cpu = round_rates(monkeypatch), torch.device("cpu")
    call = engines.Problem("matmul_all_reduce", **ROUND)
    assert engines._cheapest(call, group, cpu) == (
        "host", "predicted 610 us against 4,300 us for generic"
    )  # fmt: skip
    prices = {name: engines.Price(us, us, ()) for name, us in (("host", 6.12), ("generic", 6.4))}
    assert engines._compared("host", prices) == "predicted 6.12 us against 6.4 us for generic"
    prices["generic"] = engines.Price(6.121, 6.121, ())
    assert engines._compared("host", prices) == "predicted 6.12 us against the same for generic"


@pytest.mark.ranks(2)
def test_no_rank_keeps_a_choice_that_another_must_make_anew() -> None:
    rank = dist.get_rank()
    weft.matmul_all_reduce(torch.ones(4, 5 - rank), torch.ones(5 - rank, 4))
    cost.forget_rates(resolve())  # rank 0 has chosen for K = 5, rank 1 for K = 4
    y = weft.matmul_all_reduce(torch.ones(4, 5), torch.ones(5, 4))
    assert y.unique().tolist() == [10]


@pytest.mark.ranks(2)
def test_ranks_that_gather_tell_each_other_their_columns() -> None:
    rank, asked = dist.get_rank(), []

    def noted(problem: engines.Problem, *where: Any) -> engines.RunnableEngine:
        asked.append(problem.most_own)
        return engines.choose(problem, *where)

    x = torch.ones(4, 3 + 2)
    with patch("weft.kernels.matmul.all_gather.choose", noted):
        for mine, sizes in ((8 + rank, None), (8 + 3 * rank, None), (8 + rank, [4, 4])):
            y = weft.all_gather_matmul(x, torch.ones(5, mine), sizes=sizes)
            assert y.shape == (8, mine) and y.unique().tolist() == [5]
    assert asked == [9, 11, 0]  # rank 0 looks again, as rank 1 has other columns


def test_columns_that_all_know_decide() -> None:
    """What a rank alone has more of, or less, does not count; unknown columns are usual ones."""
    hardware, sizes = named("h100"), (1024, 4096)
    problem = engines.Problem("all_gather_matmul", sizes[0], 1792, sizes[1], torch.bfloat16, 0)
    us = {"triton": engines.kernel_time(problem, hardware, 8, False).us}
    us["generic"] = sum(part.us for part in engines.unfused_parts(problem, hardware, 8))
    told = replace(problem, most_own=1792)
    wanted = {engine: each / min(us.values()) for engine, each in us.items()}
    assert engines.regrets(told, hardware, 8) == wanted
    assert engines.regrets(replace(told, N=1700), hardware, 8) == wanted
    unknown = engines.regrets(problem, hardware, 8)
    assert unknown != wanted and engines.regrets(replace(problem, N=7), hardware, 8) == unknown


@pytest.mark.ranks(2)
def test_calls_have_names_in_the_profiler() -> None:
    x = torch.ones(4, 4)
    q = torch.ones(1, 2, 1, 4)
    mesh = world()
    with torch.profiler.profile() as profile:
        weft.matmul_reduce_scatter(x, x)
        weft.collectives.all_reduce(x)
        weft.collectives.all_gather(x)
        weft.collectives.all_to_all(x, [2, 2], [2, 2])
        weft.flash_decode(q, q, q, torch.ones(1, dtype=torch.int64))
        DTensor.from_local(x, mesh, [Shard(0)], run_check=False).full_tensor()
    names = {event.key for event in profile.key_averages()}
    wanted = {"all_reduce", "all_gather", "all_to_all", "redistribute", "flash_decode, merge"}
    assert {f"weft::{name}" for name in wanted} | {"_MatmulReduceScatter"} <= names


def unwritable_body(folder: str) -> list[float]:
    """The gain of bf16 where the cache cannot be written, and where nothing can."""
    file = Path(folder, "file")
    file.touch()
    home, gains = os.environ["HOME"], []
    os.environ["HOME"] = str(file)
    try:
        for temporary in (folder, str(file)):
            tempfile.tempdir = temporary
            cost._compared_matmuls.cache_clear()
            gains.append(cost.bfloat16_gain())
        return gains
    finally:
        os.environ["HOME"] = home
        tempfile.tempdir = None
        cost._compared_matmuls.cache_clear()


def test_ranks_choose_alike_where_they_cannot_keep_what_they_measured(
    ranks: Any, tmp_path: Path
) -> None:
    results = ranks(2, unwritable_body, str(tmp_path))
    assert results[0] == results[1]
    assert results[0][0] > 0 and results[0][1] == 0
    assert [name.split("-")[0] for name in os.listdir(next(tmp_path.glob("weft-*")))] == ["matmul"]


@pytest.mark.parametrize(
    "changed",
    ["", "[]", "{", {"flops": None}, {"flops": {"torch.float32": "fast"}}, {"sync_us": None}],
)
def test_what_is_kept_is_taken_only_if_it_is_rates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str | dict[str, Any]
) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    rates = asdict(H100.rates())
    kept_files.save("machine.json", rates)
    assert kept_files.load("machine.json", rates) == rates
    text = changed if isinstance(changed, str) else json.dumps(rates | changed)
    (tmp_path / "cache" / "machine.json").write_text(text)
    assert kept_files.load("machine.json", rates) is None


def test_auto_chooses_alike_on_every_rank_and_keeps_what_it_measured(
    ranks: Any, tmp_path: Path
) -> None:
    results = ranks(2, automatic_body, str(tmp_path))
    assert results[0] == results[1]
    decision, files = results[0]
    assert ": host, predicted " in decision and " us against " in decision
    assert [name.split("-")[0] for name in files] == ["machine", "matmul"]


@pytest.mark.parametrize(
    ("device", "rates", "best"),
    [
        ("cpu", {}, "host"),
        ("cpu", {"sync_us": 1e4}, "host"),  # the collective would signal as often
        ("cuda", {}, "triton"),
        ("cuda", {"sync_us": 1e4}, "generic"),  # waking up costs more than it saves
        ("cuda", {"copy": 1.0}, "generic"),  # memory slower than the wire
    ],
)
def test_the_cost_model_picks_the_quicker_engine(
    monkeypatch: pytest.MonkeyPatch, device: str, rates: dict[str, float], best: str
) -> None:
    usual = {"copy": 1e3, "sync_us": 5.0, "wire": 1e2, "wire_us": 100.0}
    machine = cost.Machine({"torch.float32": 1e6}, **usual | rates)
    monkeypatch.setattr(cost, "machine", lambda *_: machine)
    problem = engines.Problem("op", 64, 64, 64, torch.float32, moved_bytes=1 << 16)
    pair = Group(None, 0, 2, (0, 1), ())
    prices = engines.predict(problem, pair, torch.device(device))
    assert min(prices, key=lambda name: prices[name].score) == best
    for price in prices.values():
        least, most = max(us for _, us, _ in price.parts), sum(us for _, us, _ in price.parts)
        assert least <= price.us <= most * (1 + 1e-9)


def test_a_matmul_of_few_rows_takes_as_long_as_reading_its_weight() -> None:
    machine = cost.Machine({"torch.float32": 1e6}, 1e3, 5.0, 1e2, 100.0)
    touched = (64 + 64 * 64 + 64) * 4
    assert machine.matmul_us(1, 64, 64, torch.float32) == pytest.approx(touched / 2e3)
    assert machine.matmul_us(4096, 4096, 4096, torch.float32) == 2 * 4096**3 / 1e6
    assert machine.memory_us(4e3, syncs=3) == 19.0
    assert machine.memory_us(4e3, syncs=0) == 4.0
    assert machine.wire_time_us(4e3) == 140.0
    unreached = cost.Machine({"torch.float32": 1e6}, 0.0, 5.0, 1e2, 100.0)
    assert unreached.memory_us(1.0) > 1e8


# On `round_rates` 200 us of multiplications in bf16, 400 us of transfers; by the wire 4,100 us.
ROUND = {"M": 1000, "N": 500, "K": 400, "dtype": torch.bfloat16, "moved_bytes": 4_000_000}


def round_rates(monkeypatch: pytest.MonkeyPatch) -> Group:
    """Four ranks on sm_90, 132 cores: 5 us a signal, 1e4 bytes/us from peers, 1e3 by the wire."""
    flops = {"torch.float32": 1e6, "torch.bfloat16": 2e6}
    machine = cost.Machine(flops, 1e4, 5.0, 1e3, 100.0)
    monkeypatch.setattr(cost, "machine", lambda *_: machine)
    monkeypatch.setattr(engines, "chip_of", lambda _: chips.KNOWN[1])
    return Group(None, 0, 4, (0, 1, 2, 3), ())


def test_a_measured_rate_of_the_kernels_is_used_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group, gpu = round_rates(monkeypatch), torch.device("cuda")
    call = engines.Problem("matmul_reduce_scatter", 4000, 4000, 1000, torch.bfloat16, 0)
    narrow = replace(call, N=8)

    def matmul(problem: engines.Problem) -> engines.Part:
        return engines.predict(problem, group, gpu)["triton"].parts[0]

    shipped = matmul(call).us
    assert "at 95% of that (measured on sm_90, tiles of 128x256x64)" in matmul(call).how
    tile = kernel_rates.tile_of(call.op, chips.KNOWN[1], 4000, 4000, 1000, call.dtype, 4)
    assert tile == ("bfloat16", 128, 256, 64)
    kernel_rates.write(tmp_path, "sm_90", [(tile, 0.8)])
    monkeypatch.setenv("WEFT_TUNED", str(tmp_path))
    assert matmul(call).us == pytest.approx(shipped * 0.95 / 0.8)
    assert "at 80% of that (measured on sm_90, tiles of 128x256x64)" in matmul(call).how
    assert "assumed" in matmul(narrow).how  # other tiles


@pytest.mark.parametrize(
    ("op", "changes", "expected"),
    [
        ("ring_attention", {}, {"triton": (410, 410), "host": (580, 580), "generic": (4300, 4300)}),
        ("on a CPU", {}, {"host": (200 + 400 + 10, 410), "generic": (200 + 4100, 810)}),
    ],
)
def test_prices_add_up(
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    changes: dict[str, Any],
    expected: dict[engines.RunnableEngine, tuple[float, float | None]],
) -> None:
    group = round_rates(monkeypatch)
    device = torch.device("cpu" if op == "on a CPU" else "cuda")
    prices = engines.predict(engines.Problem(op, **(ROUND | changes)), group, device)
    for engine, (us, score) in expected.items():
        assert prices[engine].us == pytest.approx(us), engine
        assert score is None or prices[engine].score == pytest.approx(score), engine


@pytest.mark.parametrize("op", tuning.OPS)
def test_fused_matmuls_are_priced_by_the_closed_forms(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """Of what was measured: 2 TFLOP/s, 10 GB/s of a link, 1 GB/s of the process group."""
    group, device = round_rates(monkeypatch), torch.device("cuda")
    problem = engines.Problem(op, **ROUND)
    chip = engines.hardware_of(group, device)
    assert chip.flops["bfloat16"] * chip.sustained == pytest.approx(2e12)
    assert chip.link_rate(4) == pytest.approx(1e4)
    prices = engines.predict(problem, group, device)
    made = fused_times.fused_time(op, 1000, 500, 400, "bfloat16", chip, 4)
    assert prices["triton"].us == made.us
    matmul, moved, rest = prices["triton"].parts
    assert prices["triton"].us == pytest.approx(max(matmul.us, moved.us) + rest.us)
    (_, collective, *rounding) = prices["generic"].parts
    gathers, sums = op == "all_gather_matmul", op == "matmul_all_reduce"
    nbytes = 1000 * 400 * 2 if gathers else 1000 * 500 * 4  # sums travel in fp32
    wire, fabric = nbytes * (6 if sums else 3) / 4, chip.fabric(4)
    expected = 7.2 + 1.5 * sums + wire / (0.56 * fabric.port)  # by a kernel, in two shots if sums
    assert expected < nccl_us(COLLECTIVE_OF[op], nbytes, fabric)
    assert collective.us == pytest.approx(expected, rel=0.01)
    assert bool(rounding) != gathers
    halves = engines.predict(replace(problem, wire_dtype=torch.bfloat16), group, device)
    if not gathers:
        assert len(halves["generic"].parts) == 2
        assert halves["generic"].parts[1].us < 0.55 * collective.us
        assert halves["triton"].us < prices["triton"].us


def test_what_auto_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    group, device = round_rates(monkeypatch), torch.device("cuda")
    gather = engines.Problem("all_gather_matmul", **ROUND)
    prices = engines.predict(gather, group, device)
    assert set(prices) == {"triton", "host", "generic"}
    best = min(("triton", "generic"), key=lambda engine: prices[engine].score)
    assert engines._cheapest(gather, group, device)[0] == best  # never by copies
    refused = engines.Problem("all_gather_matmul", **ROUND, host_refusal="no")
    assert "host" not in engines.predict(refused, group, device)
    alone = Group(None, 0, 1, (0,), ())
    assert engines._cheapest(gather, alone, device)[0] == "host"
    assert engines._cheapest(refused, alone, device)[0] == "triton"
    eight_bits = engines.Problem("op", **(ROUND | {"dtype": torch.float8_e4m3fn}))
    assert engines.is_supported("triton", eight_bits, group, device)[0]
    monkeypatch.setattr(engines, "chip_of", lambda _: chips.KNOWN[0])
    refusal = "sm_80 has no float8_e4m3fn"
    assert engines.is_supported("triton", eight_bits, group, device) == (False, refusal)


def test_scaled_products_are_torchs_only_where_the_chip_has_fp8() -> None:
    """An AMD chip has the number of a newer one of NVIDIA's, but torch refuses the format there."""
    with (
        FakeTensorMode(),
        patch.object(chips, "_chip_behind", lambda _: chips.known("gfx942")),
        patch.object(torch, "_scaled_mm", side_effect=AssertionError("asked for")),
    ):
        x, w = (torch.empty(16, 16, dtype=fp8.FP8, device="cuda") for _ in range(2))
        rows, columns = torch.empty(16, 1, device="cuda"), torch.empty(1, 16, device="cuda")
        scaling = fp8.Scaling(rows, [columns], torch.bfloat16)
        (y,) = fp8.scaled_products(x, [w], [None], scaling)
        assert y.dtype == torch.bfloat16


def measured_body() -> None:
    """Rates from times that a clock made up: of matmuls, of exchanges, of the process group's."""
    group, device = resolve(None), torch.device("cpu")
    # By how many rounds of how many calls are timed.
    times = {(7, 1): 300.0, (4, 10): 60.0, (4, 2): 300.0, (5, 8): 40.0, (3, 2): 540.0}

    def timed(call: Callable[[], object], rounds: int, device: Any = None, calls: int = 1) -> float:
        call()
        return times[rounds, calls]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "least_us", timed)
        found = cost._measure(group, device)
    flops, nbytes = 2 * 384**3 / 300, 4 << 20
    assert found.flops == {"torch.float32": flops, "torch.bfloat16": flops}
    assert (found.sync_us, found.wire_us) == (60.0, 40.0)
    assert found.copy == nbytes / (300 - 60)
    assert found.wire == nbytes * (group.world_size - 1) / (540 - 40)


def test_rates_are_made_of_what_is_measured(virtual_ranks: Any) -> None:
    virtual_ranks(3, measured_body, races=False)  # what is copied is memory as it was


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_auto_on_gpus_does_not_ask_for_what_ranks_may_differ_in(op: str) -> None:
    """Ranks have their own N in a gather, their own K in a sum; none of these, in the end."""
    seen = set()
    for M in (1, 64, 512, 2048, 8192):
        chosen = set()
        for own in (0, 1, 100, 4096, 1 << 20):
            sizes = (own, 16384) if op == "all_gather_matmul" else (16384, own)
            problem = engines.Problem(op, M, *sizes, torch.bfloat16, M * 16384)
            regrets = engines.regrets(problem, H200, 4)
            chosen.add(min(regrets, key=lambda engine: regrets[engine]))
        assert len(chosen) == 1
        seen |= chosen
    assert "triton" in seen and (op != "all_gather_matmul" or "generic" in seen)


def test_auto_takes_the_quicker_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fused kernel as docs/scaling.md has it, and the unfused way by its model."""
    monkeypatch.setattr(engines, "chip_of", lambda _: chips.KNOWN[1])
    group, device = Group(None, 0, 8, tuple(range(8)), ()), torch.device("cuda")
    rows = scaling_page.read_rows_of(scaling_page.KEPT)
    assert {row.hardware for row in rows} == {"H100", "H200"}
    for row in rows:
        hardware = named(row.hardware)
        monkeypatch.setattr(cost, "machine", lambda *_, of=hardware: of.rates())
        M, N, K = row.sizes
        told = N if row.op == "all_gather_matmul" else 0
        problem = engines.Problem(row.op, M, N, K, torch.bfloat16, M * N * 4, most_own=told)
        chosen = engines._cheapest(problem, group, device)[0]
        same = replace(hardware, sustained=hardware.sustained / library.UNDER_POWER)
        unfused = sum(part.us for part in engines.unfused_parts(problem, same, 8))
        us = {"triton": row.us, "generic": unfused}
        assert us[chosen] <= 1.1 * min(us.values()), (row, chosen, us)


@pytest.mark.slow
@needs_interpreter
def test_auto_agrees_where_shards_are_uneven() -> None:
    told: dict[int, list[str]] = {0: [], 1: [], 2: []}

    def body(rank: int) -> None:
        own = (1000, 3, 0)[rank]
        heard = told[rank]
        with settings.listening(lambda decision: heard.append(decision.engine)):
            for M in (96, 6144):
                shard = torch.empty(M // 3, 8192, dtype=torch.bfloat16)
                w = torch.empty(8192, own, dtype=torch.bfloat16)
                assert weft.all_gather_matmul(shard, w, sizes=[M // 3] * 3).shape == (M, own)
            x, w = torch.empty(64, own), torch.empty(own, 96)
            assert weft.matmul_reduce_scatter(x, w).shape[1] == 96

    sim.run(3, body, hardware="h100", numerics=False)
    assert told[0] == told[1] == told[2] and {"triton", "generic"} <= set(told[0])


def seen_by(start: Callable[[Callable[[], None]], object]) -> tuple[str, bool]:
    """The engine, and whether somebody listens, as another thread sees it."""
    seen: list[tuple[str, bool]] = []
    done = threading.Event()

    def look() -> None:
        seen.append((settings.current_engine(), settings.tracing()))
        done.set()

    start(look)
    assert done.wait(10)
    return seen[0]


def test_blocks_hold_for_the_backward_that_torch_runs_in_threads_of_its_own() -> None:
    def of_torch(look: Callable[[], None]) -> object:
        return _thread.start_new_thread(look, ())  # which `threading` has not made

    def of_python(look: Callable[[], None]) -> object:
        return threading.Thread(target=look).start()

    assert seen_by(of_torch) == ("auto", False)
    with weft.engine("generic"), settings.explaining():
        with weft.engine("host"):
            assert seen_by(of_torch) == ("host", True)
        assert seen_by(of_torch) == ("generic", True)
        assert seen_by(of_python) == ("auto", False)
    assert seen_by(of_torch) == ("auto", False)


def test_what_no_program_can_hold_is_refused() -> None:
    """On a chip: a launch would fail, or take its registers from memory."""

    def body(rank: int) -> tuple[str, ...]:
        q = torch.empty(1, 4, 8, 264, dtype=torch.bfloat16)
        wide = weft.explain(weft.ring_attention, q, q, q, sizes=[8, 8])
        decodes = []
        for tokens, D in ((8, 1024), (1, 1032)):
            x = torch.empty(1, 4, tokens, D, dtype=torch.bfloat16)
            keys = torch.empty(1, 1, 80, D, dtype=torch.bfloat16)
            lengths = torch.tensor([100])
            decodes.append(weft.explain(weft.flash_decode, x, keys, keys, lengths, block_size=1))
        with weft.engine("triton"), pytest.raises(NotImplementedError, match="heads up to 256"):
            weft.ring_attention(q, q, q, sizes=[8, 8])
        return wide[0].engine, *(each[0].engine for each in decodes), decodes[1][0].why

    for wide, most, wider, why in sim.run(2, body, hardware="h100", numerics=False):
        assert (wide, most, wider) == ("generic", "triton", "generic")
        assert "up to 1024 wide, got 1032" in why


@pytest.mark.parametrize(
    ("chip", "M", "N", "wide"),
    [("sm_90", 128, 3584, 64), ("sm_90", 256, 3584, 128), ("sm_90", 64, 8192, 128),
     ("sm_100", 256, 3584, 128), ("gfx942", 256, 8192, 64)],
)  # fmt: skip
def test_gathers_have_wider_tiles_where_small_ones_would_take_waves(
    chip: str, M: int, N: int, wide: int
) -> None:
    """Of the programs that fetch no shards: 116 on sm_90."""
    tiling = chips.gather_tiling_for(chips.known(chip), M, N, torch.bfloat16, 8)
    assert (tiling.block_m, tiling.block_n) == (64, wide)
    tile = kernel_rates.tile_of(
        "all_gather_matmul", chips.known(chip), M, N, 4096, torch.bfloat16, 8
    )
    assert (tile.block_m, tile.block_n) == (64, wide)


def test_explain_takes_what_can_be_called() -> None:
    with pytest.raises(TypeError, match=r"weft\.explain\(layer, x\), or .*, got a Tensor"):
        weft.explain(torch.ones(2))  # type: ignore[arg-type]
