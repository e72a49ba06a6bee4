"""Tables of tuned launches: what they override, and the search that makes them, on all ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from weft.bench.commands import tune
from weft.kernels.engine import kernel_rates, tuning
from weft.kernels.engine.chips import INTERPRETER, KNOWN, Chip, Tiling, known
from weft.kernels.engine.tuning import Choice
from weft.kernels.matmul import (
    all_gather_launch,
    copy_engines,
    one_shot_kernel,
    reduce_scatter_kernel,
    two_shot_kernel,
)

H100 = known("sm_90")
TILING = Tiling(64, 128, 64, num_warps=4)


def entry(op: str, M: int, N: int, K: int, W: int = 8, **choice: object) -> dict[str, object]:
    key = {"op": op, "M": M, "N": N, "K": K, "dtype": "bfloat16", "W": W}
    return key | {"choice": choice, "us": 1.0, "heuristic_us": 2.0}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_TUNED", str(tmp_path))
    tiling = vars(TILING)
    tuning.write(
        tmp_path / "sm_90.json",
        "sm_90",
        [
            entry("all_gather_matmul", 8192, 3584, 512, tiling=tiling, copy_programs=5),
            entry("matmul_reduce_scatter", 8192, 8192, 0, tiling=tiling),
            entry("matmul_all_reduce", 8192, 8192, 0, tiling=tiling),
        ],
    )
    return tmp_path / "sm_90.json"


def test_a_table_goes_before_the_heuristics_for_its_problems_alone(table: Path) -> None:
    bf16 = torch.bfloat16

    def gather(M: int, N: int = 3584, K: int = 512, W: int = 8, dtype=bf16) -> tuple[Tiling, int]:
        config = all_gather_launch.all_gather_config(M, N, K, dtype, W, H100)
        return config.tiling, config.copy_programs

    assert gather(8192) == (TILING, 5)
    assert gather(4097) == (TILING, 5)  # the same power of two
    for other in (
        gather(4096), gather(8193), gather(8192, N=3585), gather(8192, K=256), gather(8192, W=4),
        gather(8192, dtype=torch.float16),
    ):  # fmt: skip
        assert other != (TILING, 5) and other[1] != 5
    scatter = reduce_scatter_kernel.reduce_scatter_config(1024, 8192, bf16, 8, H100)
    assert scatter.tiling == TILING
    assert scatter.programs == H100.programs
    assert two_shot_kernel.all_reduce_config(8192, 8192, bf16, 8, H100).tiling == TILING
    # Grids follow the tiles: 64 rows of 8192 columns are 1 x 64 of them.
    with tuning.trying(Choice(TILING)):
        assert two_shot_kernel.all_reduce_config(64, 8192, bf16, 8, H100).programs == 64
    table.unlink()
    tuning.load.cache_clear()
    assert gather(8192)[0] != TILING


def test_every_link_of_a_mesh_has_its_stream() -> None:
    """Copies of 4 ranks' shards of 4 rows, 2 a chunk: on a switch dealt to three streams in turn,
    on AMD's chips a peer's to its own; each stream waits for those that it copies from."""
    switch, mesh = (
        copy_engines._copies(1, [4, 4, 0, 4], 2, True, known(chip))[0]
        for chip in ("sm_90", "gfx942")
    )
    peers = [[copy.peer for copy in stream] for stream in switch]
    assert peers == [[3, 0], [3], [0]]
    assert [[copy.peer for copy in stream] for stream in mesh] == [[], [3, 3], [0, 0]]
    holds = [[copy.hold for copy in stream] for stream in mesh]
    assert holds == [[], [(2, 2, 3), None], [(3, 3, 3), None]]
    assert copy_engines.streams_for(known("gfx942"), 8) == 7


def test_what_was_measured_goes_before_what_was_modelled(table: Path) -> None:
    modelled = tuning.path_of(table.parent, "sm_90", modelled=True)
    assert modelled.name == "sm_90.modelled.json" and tuning.path_of(table.parent, "sm_90") == table
    other = replace(TILING, block_m=2 * TILING.block_m)
    tuning.write(
        modelled,
        "sm_90",
        [
            entry("matmul_all_reduce", M, 8192, 0, tiling=vars(other)) | {"modelled": ["H100"]}
            for M in (4096, 8192)
        ],
    )
    tilings = [
        two_shot_kernel.all_reduce_config(M, 8192, torch.bfloat16, 8, H100).tiling
        for M in (4096, 8192)
    ]
    assert tilings == [other, TILING]
    modelled.write_text("{}")
    tuning.load.cache_clear()
    with pytest.raises(ValueError, match=r"sm_90\.modelled\.json is not a table"):
        two_shot_kernel.all_reduce_config(8192, 8192, torch.bfloat16, 8, H100)


def test_the_tables_that_ship() -> None:
    """Entries that were modelled say of which chips, and those that were measured do not."""
    for path in tuning.OWN_FOLDER.glob("*.json"):
        if path.name.endswith(".rates.json"):
            continue
        found = json.loads(path.read_text())
        modelled = path.name.endswith(".modelled.json")
        assert known(found["chip"]).name == path.name.partition(".")[0]
        for each in found["entries"]:
            assert ("modelled" in each) == modelled
            assert each["us"] < each["heuristic_us"] or not each["choice"]
    for name in ("sm_90", "sm_100", "gfx942"):  # of the presets
        assert tuning.path_of(tuning.OWN_FOLDER, name, modelled=True).exists()
        assert len(tuning.load("", name)) > 0


def test_the_way_of_a_launch_goes_by_size() -> None:
    """On an H100, bf16, 8 ranks: each way up to the size that its comment names."""
    bf16 = torch.bfloat16

    def way(M: int, N: int, K: int, W: int = 8, **options: Any) -> str:
        config = all_gather_launch.all_gather_config(M, N, K, bf16, W, H100, **options)
        assert config.split == 1 or config.direct
        return "engines" if config.copy_engines else "direct" if config.direct else "fetched"

    # 8 column tiles read 7/8 of 64 rows of 2 KiB: 0.9 MiB. Twice as many rows are fetched.
    assert [way(M, 512, 1024) for M in (64, 128)] == ["direct", "fetched"]
    assert way(64, 512, 1024, keep=True) == "fetched"
    # Shards of 4 MiB: whatever N, of which ranks may have their own.
    for N in (1, 3584):
        assert [way(M, N, 8192) for M in (2047, 2048)] == ["fetched", "engines"]
    assert way(1 << 20, 64, 8192, W=1) != "engines"
    large = all_gather_launch.all_gather_config(65536, 3584, 8192, bf16, 8, H100)
    assert large.chunk_rows == 8192 // 4  # a quarter of a shard, of 4 MiB at least
    assert all_gather_launch.all_gather_config(2048, 3584, 8192, bf16, 8, H100).chunk_rows == 256
    assert large.programs == H100.cores - 1
    few = all_gather_launch.all_gather_config(1024, 3584, 8192, bf16, 8, H100)
    assert (few.copy_programs, few.tiling.group_m) == (16, 1)  # a shard is one tile high

    def one_shot(config: object) -> bool:
        return isinstance(config, one_shot_kernel.OneShotConfig)

    # 128 KiB of sums in fp32; two ranks have no second shot.
    whole = [two_shot_kernel.all_reduce_config(M, 8192, bf16, 8, H100) for M in (4, 5)]
    assert [one_shot(config) for config in whole] == [True, False]
    assert one_shot(two_shot_kernel.all_reduce_config(8192, 8192, bf16, 2, H100))
    sizes = [(64, 8192), (128, 4096), (512, 4096), (512, 16384), (8192, 8192)]
    shots = [two_shot_kernel.all_reduce_config(M, N, bf16, 8, H100) for M, N in sizes]
    blocks = [(64, 64), (64, 64), (128, 128), (128, 256), (128, 256)]
    assert [(shot.tiling.block_m, shot.tiling.block_n) for shot in shots] == blocks
    assert [shot.programs for shot in shots] == [128, 128, 128, 132, 132]
    chunks = [
        reduce_scatter_kernel.reduce_scatter_config(rows, 8192, bf16, 8, H100)
        for rows in (127, 128)
    ]
    assert [one_shot(config) for config in chunks] == [True, False]
    assert (
        isinstance(chunks[1], reduce_scatter_kernel.ReduceScatterConfig) and chunks[1].senders == 66
    )
    # 8 tiles for 132 cores: as many parts as there may be, which K bounds where it is known.
    assert one_shot_kernel.one_shot_config(16, 512, bf16, H100).split == 8
    assert all_gather_launch.all_gather_config(64, 512, 512, bf16, 8, H100).split == 2


def test_what_is_written_adds_to_what_was(table: Path) -> None:
    tuning.write(
        table,
        "sm_90",
        [
            entry("matmul_all_reduce", 8192, 8192, 0),
            entry("matmul_all_reduce", 16, 8192, 0, copy_programs=3),
        ],
    )
    known = tuning.load(str(table.parent), "sm_90")
    assert len(known) == 4
    key = tuning.key_of("matmul_all_reduce", 5000, 8192, 0, torch.bfloat16, 8)
    assert known[key] == tuning.HEURISTIC
    before = table.read_text()
    tuning.write(table, "sm_90", [])
    assert table.read_text() == before


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"entries": [{"op": 1}]}', '{"entries": [{"op": "x", "M": 1, "N": 1, "K": 1, '
     '"dtype": "bfloat16", "W": 2, "choice": {"tile": 3}}]}'],
)  # fmt: skip
def test_no_table_is_an_error_that_names_the_file(text: str, table: Path) -> None:
    table.write_text(text)
    tuning.load.cache_clear()
    with pytest.raises(ValueError, match=r"sm_90\.json is not a table of tuned launches"):
        all_gather_launch.all_gather_config(16, 16, 16, torch.bfloat16, 8, H100)


def test_candidates_fit_the_chip_and_begin_with_the_heuristic() -> None:
    for chip in KNOWN:
        for copies in (False, True):
            start = Tiling(128, 128, 64, num_stages=2)
            found = tuning.candidates(chip, torch.bfloat16, start, copies=copies)
            assert any(choice.copy_programs for choice in found) == copies
            assert found[0] == tuning.HEURISTIC
            assert len(set(found)) == len(found) > 3
            for choice in found:
                if tiling := choice.tiling:
                    tile = (tiling.block_m + tiling.block_n) * tiling.block_k * 2
                    assert tile * tiling.num_stages <= chip.shared_bytes
    # Few rows wait for loads, of which as many are under way as there is room for.
    few = tuning.candidates(H100, torch.bfloat16, Tiling(64, 64, 64, num_stages=6))
    deep = {(128, 256, 64): 4, (128, 128, 64): 6, (64, 128, 64): 8, (16, 64, 128): 8}
    for (block_m, block_n, block_k), stages in deep.items():
        tile = {"block_m": block_m, "block_n": block_n, "block_k": block_k, "num_stages": stages}
        assert any(each.tiling and tile.items() <= vars(each.tiling).items() for each in few)


@pytest.mark.parametrize(
    ("M", "N", "W", "tile", "halves"),
    [
        (512, 8192, 1, (128, 256), True), (256, 8192, 1, (128, 128), True),
        (512, 8192, 8, (128, 128), False), (2048, 7168, 1, (128, 256), True),
        (128, 8192, 1, (64, 128), True), (16, 8192, 1, (16, 64), False),
    ],
)  # fmt: skip
def test_a_rank_alone_has_tiles_in_as_few_waves_as_may_be(
    M: int, N: int, W: int, tile: tuple[int, int], halves: bool
) -> None:
    """Of 132 cores: 512 x 8192 is one wave of wide tiles and two of others; of 448 tiles of 2048 x
    7168, 52 would be a fourth wave, and are half of one in halves."""
    config = all_gather_launch.all_gather_config(M, N, 8192, torch.bfloat16, W, H100)
    assert (config.tiling.block_m, config.tiling.block_n) == tile
    assert config.halves == halves
    if (M, W) == (2048, 1):
        assert all_gather_launch.halved_tiles(448, 448, config) == 52


@pytest.mark.parametrize("chip", [H100, INTERPRETER], ids=lambda chip: chip.name)
def test_rates_are_of_the_tiles_that_are_launched(chip: Chip) -> None:
    for (M, N), W, dtype in product(
        product((1, 8, 63, 128, 500, 1016, 1024, 8192), (64, 512, 3584, 8192)),
        (2, 3, 8),
        (torch.float32, torch.bfloat16, torch.float8_e4m3fn),
    ):
        configs = {
            "all_gather_matmul": all_gather_launch.all_gather_config(M, N, 4096, dtype, W, chip),
            "matmul_all_reduce": two_shot_kernel.all_reduce_config(M, N, dtype, W, chip),
            "matmul_reduce_scatter": reduce_scatter_kernel.reduce_scatter_config(
                -(-M // W), N, dtype, W, chip
            ),
        }
        for op, config in configs.items():
            tiling = config.tiling
            tile = kernel_rates.tile_of(op, chip, M, N, 4096, dtype, W)
            assert tile[1:] == (tiling.block_m, tiling.block_n, tiling.block_k), (op, M, N, W)
            priced = kernel_rates.tiling_of(op, chip, M, N, 4096, dtype, W)
            assert priced.num_stages == tiling.num_stages, (op, M, N, W)


@pytest.mark.ranks(2)
def test_the_slowest_rank_decides_and_ranks_agree() -> None:
    """Ranks see different times, and one candidate is wrong on one rank: all must agree."""
    rank = dist.get_rank()
    choices = [Choice(), *(Choice(copy_programs=n) for n in (1, 2, 3))]
    own = {None: (9.0, 9.0), 1: (1.0, 8.0), 2: (5.0, 4.0), 3: (0.1, 0.1)}
    order = []

    def call() -> torch.Tensor:
        trying = tuning.choice_for("x", INTERPRETER, 1, 1, 1, torch.float32, 2).copy_programs
        order.append(trying)
        return torch.ones(2) * (2.0 if trying == 3 and rank == 1 else 1.0)

    def gather(value: object) -> list[object]:
        every: list[object] = [None, None]
        dist.all_gather_object(every, value)
        return every

    best, trials = tuning.search(choices, call, lambda _: own[order[-1]][rank], gather, 1e-3)
    assert order == [None, 1, 2, 3]
    assert "wrong" in trials[3].failure and trials[3].us == math.inf
    assert best.choice == Choice(copy_programs=2)
    assert [trial.us for trial in trials] == [9.0, 8.0, 5.0, math.inf]


def test_a_search_ends_where_a_rank_is_gone() -> None:
    """No later candidate could be told from one that fails."""
    results = iter([torch.ones(2)])

    def call() -> torch.Tensor:
        for result in results:
            return result
        raise weft.PeerTimeout(0, 1, "op", 2, 0.1)

    with pytest.raises(weft.PeerTimeout):
        tuning.search(
            [Choice(), Choice(copy_programs=1)], call, lambda _: 1.0, lambda value: [value], 1e-3
        )


@pytest.mark.slow
def test_weft_tune_writes_a_table_that_the_ops_then_use(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("WEFT_TUNED", str(tmp_path))
    asked = ["--device", "cpu", "--ranks", "2", "--shapes", "20,24,16", "--rounds", "1"]
    assert tune.main([*asked, "--out", str(tmp_path)]) == 0
    assert "wrote" in capsys.readouterr().out
    entries = json.loads((tmp_path / "interpreter.json").read_text())["entries"]
    assert [each["op"] for each in entries] == sorted(tuning.OPS)
    sizes = {each["op"]: (each["M"], each["N"], each["K"], each["W"]) for each in entries}
    assert sizes["all_gather_matmul"] == (32, 12, 16, 2)
    assert sizes["matmul_reduce_scatter"] == sizes["matmul_all_reduce"] == (32, 24, 0, 2)
    for each in entries:
        assert 0 < each["us"] <= each["heuristic_us"]


@pytest.mark.ranks(2)
def test_every_choice_gives_the_right_result() -> None:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=generator) for s in ((40, 32), (32, 24)))
    choices = tuning.candidates(INTERPRETER, x.dtype, Tiling(32, 32, 32))
    for choice in choices:
        with tuning.trying(choice), weft.engine("triton"):
            y = weft.all_gather_matmul(x[20 * rank : 20 * rank + 20], w)
            part = slice(16 * rank, 16 * rank + 16)
            z = weft.matmul_reduce_scatter(x[:, part], w[part])
            s = weft.matmul_all_reduce(x[:, part], w[part])
        for got, want in ((y, x @ w), (z, (x @ w).chunk(2)[rank]), (s, x @ w)):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
