"""Closed forms of two levels: what must hold of them, and the page that is made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools import hosts_page
from weft import sim
from weft.cli import main
from weft.kernels.engine import fused_times
from weft.sim.time.levels import layer_times, over_hosts


def test_one_host_is_the_fused_kernel() -> None:
    made = over_hosts("all_gather_matmul", 8192, 3584, 8192, sim.H100, 1, 8)
    alone = fused_times.fused_us("all_gather_matmul", 8192, 3584, 8192, "bfloat16", sim.H100, 8)
    assert made.two_levels == made.inside == alone and made.crosses == 0


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_between_the_longer_of_both_levels_and_their_sum(op: str) -> None:
    """Cards hide behind cores or the other way round; nothing is quicker than either."""
    for hosts in (2, 3, 8, 64):
        for gigabytes in (1, 12.5, 50, 1e6):
            hardware = replace(sim.H100, rail_bandwidth=gigabytes * 1e9)
            sizes = (16384, 1792, 8192) if op[0] == "a" else (16384, 8192, 1792)
            made = over_hosts(op, *sizes, hardware, hosts, 8)  # type: ignore[arg-type]
            card = made.crosses / (gigabytes * 1e3)
            assert max(made.inside, card) <= 1.000001 * made.two_levels, (hosts, gigabytes)
            assert made.two_levels < made.inside + card / 0.7 + 300, (hosts, gigabytes)
            # Every other host's rows, by their share of this rank.
            row = 2 * 8192
            assert made.crosses == pytest.approx(16384 * row * (hosts - 1) / (8 * hosts), rel=1e-3)


def test_weights_cross_unseen_where_there_are_tokens_enough() -> None:
    sizes = 8192, 28672, 10240, 8192
    one = layer_times(65536, *sizes, sim.H100, 1)
    assert one.two_levels == one.sharded < one.flat
    assert layer_times(8 * 65536, *sizes, sim.H100, 8).sharded == one.sharded
    few = layer_times(8 * 256, *sizes, sim.H100, 8)
    assert few.sharded > layer_times(256, *sizes, sim.H100, 1).sharded


def test_the_page_is_that_of_the_closed_forms(tmp_path: Path) -> None:
    """`python -m tools.hosts_page` makes it anew."""
    page = tmp_path / "page.md"
    page.write_text(hosts_page.PAGE.read_text())
    assert hosts_page.main(["--page", str(page)]) == 0
    assert page.read_text() == hosts_page.PAGE.read_text()


def test_times_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch, weft\n"
        "def fn(rank):\n"
        "    return weft.all_gather_matmul(torch.ones(8, 16), torch.ones(16, 4), sizes=[8] * 4)\n"
    )
    asked = ["sim", f"{script}:fn", "--hosts", "2x2", "--schedules", "1", "--hardware", "h100"]
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert "bf16 on 2 x 2 H100, 50 GB/s from each" in told
    assert "all_gather_matmul(32x16 @ 16x4, 4 ranks): " in told and "us in two levels" in told
    for wrong in ["--no-numerics"], ["--plot", "x.png"]:
        with pytest.raises(SystemExit):
            main([*asked, *wrong])
        assert "closed form" in capsys.readouterr().err
