"""How partial sums travel: as fp32, or as its upper 24 bits; what comes back, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from needs import needs_interpreter

import weft
from weft.collectives import resolve
from weft.kernels.device import partial_sums
from weft.kernels.device.summed_tiles import SumVariant
from weft.kernels.engine.chips import Tiling
from weft.kernels.matmul import one_shot_kernel

ROWS, COLUMNS = 16, 64


@triton.jit
def _there_and_back_kernel(out_ptr, in_ptr, slots_ptr, COUNT: tl.constexpr, V: tl.constexpr):
    """out (ROWS, COLUMNS) = the sum of `in` (COUNT, ROWS, COLUMNS), sent and received: in stripes,
    and once more (1, ROWS, COLUMNS) in rows.
    """
    ROWS: tl.constexpr = V.tiles.block_m
    COLUMNS: tl.constexpr = V.tiles.block_n
    WIRE: tl.constexpr = V.wire
    whole = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    sums = partial_sums.empty_parts(V)
    for slot in tl.static_range(COUNT):
        x = tl.load(in_ptr + slot * ROWS * COLUMNS + whole)
        partial_sums.send_tile(slots_ptr, x, V)
        parts = partial_sums.load_parts(slots_ptr, V)
        sums = parts if slot == 0 else partial_sums.added(sums, parts)
    tl.store(out_ptr + whole, partial_sums.joined(sums, V))
    row_ptrs = slots_ptr + rows * V.row_words
    for slot in tl.static_range(COUNT):
        x = tl.load(in_ptr + slot * ROWS * COLUMNS + whole)
        one_shot_kernel.send_rows(row_ptrs, x, rows >= 0, WIRE)
        parts = one_shot_kernel.load_sent_rows(row_ptrs, rows >= 0, COLUMNS, WIRE)
        sums = parts if slot == 0 else partial_sums.added(sums, parts)
    tl.store(out_ptr + ROWS * COLUMNS + whole, partial_sums.parts_beside(sums))


def there_and_back(
    x: torch.Tensor, dtype: torch.dtype, wire_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The sum of x (COUNT, ROWS, COLUMNS) as a result of `dtype` would get it before rounding."""
    wire = partial_sums.wire_of(dtype, wire_dtype)
    words, tiling = wire.row_words(COLUMNS), Tiling(ROWS, COLUMNS, 16)
    variant = SumVariant(1, tiling, 1, True, False, False, wire, words, ROWS, 1, 1)
    slots, out = torch.full((ROWS * words,), torch.nan), torch.empty(2, ROWS, COLUMNS)
    _there_and_back_kernel[(1,)](out, x, slots, len(x), variant)
    assert torch.equal(*out.view(torch.int32))
    return out[0]


def numbers(count: int) -> torch.Tensor:
    """Bit patterns of all kinds: (count, ROWS, COLUMNS) fp32; first those that are at an edge."""
    edges = [
        0x7FFFFFFF, 0x7F800001, 0x7FC00000,  # NaN: tensor cores' own, one bit, torch's
        0x7F800000, 0x7F7FFFFF, 0x7F7FFF7F, 0x7F7FFF80,  # infinity and the largest
        0, 1, 0x7F, 0x80, 0x007FFFFF, 0x00800000, 0x3F800080, 0x3F80007F,  # tiny, and ties
    ]  # fmt: skip
    bits = torch.randint(0, 1 << 32, (count * ROWS * COLUMNS,), generator=torch.manual_seed(1))
    signed = torch.tensor(edges + [edge | 1 << 31 for edge in edges])
    bits[: len(signed)] = signed
    return bits.to(torch.uint32).view(torch.float32).view(count, ROWS, COLUMNS)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To the nearest number whose lower 8 bits are zero; ties away from zero."""
    mantissa, exponent = torch.frexp(x.double())
    # 16 bits of mantissa, fewer below 2^-126.
    ulp = torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent.clamp(min=-125) - 16)
    exact = torch.ldexp(mantissa, exponent)
    near = torch.copysign((exact.abs() / ulp + 0.5).floor() * ulp, exact)
    return torch.where(x.isfinite(), near, x.double()).float()


@needs_interpreter
def test_fp32_comes_back_bit_by_bit() -> None:
    x = numbers(1)
    back = there_and_back(x, torch.float32)
    assert torch.equal(back.view(torch.int32), x[0].view(torch.int32))


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_half_precision_the_upper_24_bits_come_back(dtype: torch.dtype) -> None:
    x = numbers(1)
    back, want = there_and_back(x, dtype), rounded(x[0])
    assert torch.equal(back.isnan(), x[0].isnan())
    some = ~x[0].isnan()
    assert torch.equal(back[some].view(torch.int32), want[some].view(torch.int32))
    usual = some & (x[0].abs() > torch.finfo(torch.float32).tiny) & want.isfinite()
    error = (back.double() - x[0].double())[usual] / x[0].double()[usual]
    assert 2**-17 < error.abs().max() <= 2**-16  # and it is no coarser, and no finer, than said


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float32])
def test_what_was_asked_for_travels(dtype: torch.dtype, wire: torch.dtype) -> None:
    x = numbers(3)
    terms = x.to(wire).float()
    back, want = there_and_back(x, dtype, wire), terms[0] + terms[1] + terms[2]
    torch.testing.assert_close(back, want, rtol=0, atol=0, equal_nan=True)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slots_are_added_up_in_order(dtype: torch.dtype) -> None:
    x = torch.randn(3, ROWS, COLUMNS, generator=torch.manual_seed(2))
    parts = rounded(x) if dtype == torch.bfloat16 else x
    assert torch.equal(there_and_back(x, dtype), parts[0] + parts[1] + parts[2])


def special_values(dtype: torch.dtype) -> torch.Tensor:
    """Rank 0 adds what is in `values`, rank 1 what is in `others`, row by row of both sums."""
    group = resolve(None)
    most, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, most, -most, tiny, torch.inf, 1.0])
    others = torch.tensor([1.0, torch.inf, 1.0, 0.0, most, tiny, torch.inf, -1.0])
    rows = 8 * group.world_size
    x = (others if group.rank else values).repeat(group.world_size).to(dtype)[:, None]
    w = torch.ones(1, 40, dtype=dtype)
    with weft.engine("triton"):
        scattered = weft.matmul_reduce_scatter(x, w)
        whole = weft.matmul_all_reduce(x, w)
    want = (values.to(dtype).double() + others.to(dtype).double()).to(dtype)[:, None].expand(8, 40)
    assert whole.shape == (rows, 40)
    for got in (scattered, whole[:8]):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    return whole


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_infinities_nan_and_the_smallest_survive(ranks: Any, dtype: torch.dtype) -> None:
    first, second = ranks(2, special_values, dtype)
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))
