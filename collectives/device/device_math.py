"""Small functions that kernels need and Triton lacks, or has only in compiled kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device.addresses import INTERPRETED, Constant

_INTERPRETED = Constant(INTERPRETED)


# Not tl.cdiv: it is a jit function of Triton's own, interpreted only if TRITON_INTERPRET was set
# when triton was imported, which torch may have done before us.
@triton.jit
def cdiv(a, b):
    """a / b, rounded up."""
    return (a + b - 1) // b


@triton.jit
def element(values, index, COUNT: tl.constexpr):
    """values[index] of a tuple of COUNT integers, for an index known at run time only."""
    value = values[0]
    for i in tl.static_range(1, COUNT):
        value = tl.where(index == i, values[i], value)
    return value


@triton.jit
def either_ptr(condition, ptr, other):
    """`ptr` if `condition`, else `other`.

    An address, not a branch: loads from several ranks can be under way at the same time.
    """
    address = tl.where(condition, ptr.to(tl.int64), other.to(tl.int64))
    return address.to(ptr.dtype)


# Not mask & condition: the interpreter makes int32 of a comparison of numbers that is spread over
# lanes, which that of Triton 3.9 refuses as a mask.
@triton.jit
def mask_if(condition, mask):
    """`mask` if `condition`, else nothing."""
    return tl.where(condition, mask, False)


@triton.jit
def divided(x, BY: tl.constexpr):
    """x / BY, in fp32 rounded to nearest even as torch does."""
    result = x / BY
    if x.dtype == tl.float32:
        result = tl.div_rn(x, tl.full(x.shape, BY, tl.float32))
    return result


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """`x` (fp32) to `dtype`, to nearest even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        # The interpreter truncates. NaNs keep their upper half, which a carry could turn into inf,
        # and become quiet: their set bits may all be in the lower half.
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(x == x, nearest, (bits >> 16) | 0x40)
        result = nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(dtype)
    return result


@triton.jit
def fp8_scale(largest):
    """What undoes e4m3 of rows whose largest magnitudes these are, as `kernels.engine.fp8`."""
    return tl.maximum(largest, 6.018531076210112e-36) / 448.0


# By integers, as chips before sm_89 convert to no such type and the interpreter truncates.
@triton.jit
def fp8_bits(x):
    """`x` (fp32, of magnitudes that round to 448 at most) to e4m3, to nearest even: its bits."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # The last bit of 2^14 + |x| is 2^-9, as that of numbers below 2^-6 is here.
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    result = tl.where(magnitude < 0x3C800000, small, normal)
    result = tl.where(x == x, result, 0x7F)
    return (result | ((bits >> 24) & 0x80)).to(tl.uint8)
