"""Closed forms of fused matmuls against virtual time, and the links of the presets."""

from __future__ import annotations

import statistics

import pytest

from tools import scaling_fit, scaling_page
from weft.collectives.prices import library
from weft.collectives.prices.hardware import (
    A100,
    B200,
    B300,
    H20,
    H100,
    H800,
    MI300X,
    MI355X,
    PRESETS,
)
from weft.kernels.engine.fused_times import fused_us, sent_bytes


@pytest.mark.parametrize(
    ("op", "least", "median", "ninth"),
    [
        ("all_gather_matmul", 36, 0.04, 0.12),
        ("matmul_reduce_scatter", 36, 0.02, 0.06),
        ("matmul_all_reduce", 16, 0.03, 0.06),
    ],
)
def test_the_closed_form_against_virtual_time(
    op: str, least: int, median: float, ninth: float
) -> None:
    """The rows of docs/scaling.md, and of them those that no constant was fitted to."""
    rows = [row for row in scaling_page.read_rows_of(scaling_page.KEPT) if row.op == op]
    assert len(rows) >= least
    for some in (rows, [row for row in rows if not scaling_fit.is_fitted_on(row)]):
        errors = sorted(abs(scaling_fit.error_of(row)) for row in some)
        assert statistics.median(errors) < median
        assert errors[len(errors) * 9 // 10] < ninth and errors[-1] < 0.18


# Llama-3 8B by `tools.scaling_page`, in virtual time. No constant was fitted on these; the form,
# with its terms for meshes and copies, was chosen with them in view.
PLAYED = [
    ("all_gather_matmul", 512, 4, "h100", 71.3),
    ("all_gather_matmul", 512, 2, "h100", 86.3),
    ("matmul_reduce_scatter", 512, 4, "h100", 62.2),
    ("matmul_reduce_scatter", 512, 2, "h100", 82.8),
    ("matmul_all_reduce", 64, 2, "h100", 31.0),
    ("matmul_all_reduce", 64, 4, "h100", 26.8),
    ("matmul_all_reduce", 16, 4, "h100", 22.4),
    ("matmul_reduce_scatter", 64, 8, "h100", 14.9),
    ("all_gather_matmul", 1024, 8, "b200", 97.2),
    ("matmul_reduce_scatter", 1024, 8, "b200", 51.2),
    ("all_gather_matmul", 4096, 8, "mi300x", 241.0),
    ("all_gather_matmul", 16, 8, "h100", 36.1),
    ("matmul_reduce_scatter", 16, 8, "h100", 16.0),
    ("all_gather_matmul", 1024, 8, "mi300x", 85.1),
    ("matmul_reduce_scatter", 2048, 8, "mi300x", 92.8),
    ("matmul_reduce_scatter", 1024, 4, "mi300x", 104.7),
    ("matmul_all_reduce", 64, 8, "mi300x", 30.9),
]


def test_the_closed_form_against_other_ranks_and_chips() -> None:
    """Within 18 % on H100 and MI300X, but for its sums of few rows that all keep, at 36 %: on 4,
    their links take 12 us of 35 in virtual time, and in the form 7. Within 24 % on B200, where
    half of the programs send one tile each.
    """
    limits = {"h100": 0.18, "b200": 0.24, "mi300x": 0.18}
    for op, M, ranks, chip, us in PLAYED:
        up, own = op == "all_gather_matmul", 14336 // ranks
        N, K = (own, 4096) if up else (4096, own)
        got = fused_us(op, M, N, K, "bfloat16", scaling_fit.as_played(PRESETS[chip]), ranks)
        limit = 0.36 if (op, chip) == ("matmul_all_reduce", "mi300x") else limits[chip]
        assert abs(got / us - 1) < limit, (op, M, ranks, chip, got, us)


def test_bytes_of_the_fused_matmuls() -> None:
    assert sent_bytes("all_gather_matmul", 1024, 1, 512, "bfloat16", 8) == 1024 * 512 * 2 * 7 / 8
    assert (
        sent_bytes("matmul_reduce_scatter", 1024, 512, 1, "bfloat16", 8) == 1024 * 512 * 3 * 7 / 8
    )
    assert sent_bytes("matmul_reduce_scatter", 1024, 512, 1, "float32", 8) == 1024 * 512 * 4 * 7 / 8
    assert sent_bytes("matmul_all_reduce", 1024, 512, 1, "bfloat16", 8) == 1024 * 512 * 5 * 7 / 8
    one = sent_bytes("matmul_all_reduce", 8, 512, 1, "bfloat16", 8, "one shot")
    assert one == 8 * 512 * 3 * 7
    with pytest.raises(ValueError, match="three fused matmuls"):
        sent_bytes("matmul", 1, 1, 1, "bfloat16", 8)


def test_links_of_the_presets() -> None:
    """Bytes a us of a rank's port, by the data sheets."""
    for chip, port in ((A100, 300), (H800, 200), (H100, 450), (H20, 450), (B200, 900), (B300, 900)):
        assert chip.fabric(8).port == chip.fabric(8).direct == port * 1e3
    # In a mesh a rank has a link to each other one that takes part.
    assert MI300X.fabric(8).port == pytest.approx(448e3)
    assert MI300X.fabric(4).port == pytest.approx(192e3)
    assert MI355X.fabric(8).port == pytest.approx(537.6e3)
    assert H100.fabric(8).multicast
    assert not (A100.fabric(8).multicast or MI300X.fabric(8).multicast)
    two = H100.fabric(16, hosts=2)
    assert (two.hosts, two.rail) == (2, 50e3)
    for ranks, hosts in ((9, 2), (16, 1)):
        with pytest.raises(ValueError, match="H100 has up to 8"):
            H100.fabric(ranks, hosts)


def test_other_chips_by_their_data_sheets() -> None:
    """Dense bf16 rates of a 16k matmul are below what the sheet says, and not by half."""
    for chip in PRESETS.values():
        us = library.matmul_us(chip, 16384, 16384, 16384, "bfloat16")
        share = 2 * 16384**3 / us / (chip.flops["bfloat16"] / 1e6)
        assert 0.45 < share < chip.sustained, chip.name
