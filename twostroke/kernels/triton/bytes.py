"""Numbers of one byte in pages: they are decoded after a load, and encoded with their scale before a store.

Both are bit operations and single roundings, the same as in `kernels/pools/page_pool.py` and the native kernels. So no
number type is needed that only newer devices have.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

KINDS: Final = {"int8": 1, "fp8_e4m3": 2, "fp8_e5m2": 3}
"""`KIND` of the kernels by the name of the form; 0 stands for numbers without scales."""


def kind_of(form: str) -> int:
    return KINDS.get(form, 0)


@triton.jit
def decoded(numbers, KIND: tl.constexpr):
    """Returns uint8 numbers of a kind as float32, and numbers without scales unchanged."""
    if KIND == 0:
        result = numbers
    else:
        signed = numbers.to(tl.int8, bitcast=True).to(tl.int32)
        if KIND == 1:
            result = signed.to(tl.float32)
        elif KIND == 2:
            # moves sign, exponent and fraction to their place in float32; the factor moves the exponent's bias
            result = ((signed << 20) & -2014314496).to(tl.float32, bitcast=True) * 1.329227995784916e36
        else:
            result = ((signed << 21) & -1881145344).to(tl.float32, bitcast=True) * 5.192296858534828e33
    return result


@triton.jit
def small_float(x, FRACTION: tl.constexpr, BIAS: tl.constexpr, MAGIC: tl.constexpr):
    """Returns x as uint8 with this many bits of fraction, rounded to nearest, ties to even. x must round to a finite
    number."""
    DROPPED: tl.constexpr = 23 - FRACTION
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + ((1 << (DROPPED - 1)) - 1) + ((size >> DROPPED) & 1)) >> DROPPED
    lifted = (size.to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True)
    subnormal = lifted - tl.full(lifted.shape, MAGIC, tl.float32).to(tl.int32, bitcast=True)
    small = tl.where(size < ((128 - BIAS) << 23), subnormal, normal - ((127 - BIAS) << FRACTION))
    return (small | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def size_bits(x):
    """Returns the absolute values of float32 as integers in the same order. NaN is the highest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(peak_bits, LARGEST: tl.constexpr):
    """Returns the scale of rows and its inverse, from the highest of their `size_bits`. Both are 0 for rows close to
    zero."""
    peak = peak_bits.to(tl.float32, bitcast=True)
    largest = tl.full(peak.shape, LARGEST, tl.float32)
    is_zero = peak < 1e-30
    inverse = tl.where(is_zero, 0.0, tl.div_rn(largest, tl.where(is_zero, 1.0, peak)))
    return tl.where(is_zero, 0.0, tl.div_rn(peak, largest)), inverse


@triton.jit
def encoded(x, KIND: tl.constexpr):
    """Returns x, multiplied by the inverse of its scale, as uint8."""
    if KIND == 1:
        magic = tl.full(x.shape, 12582912.0, tl.float32)
        digits = (x + magic).to(tl.int32, bitcast=True) - magic.to(tl.int32, bitcast=True)
        result = digits.to(tl.int8).to(tl.uint8, bitcast=True)
    elif KIND == 2:
        result = small_float(x, 3, 7, 24576.0)
    else:
        result = small_float(x, 2, 15, 192.0)
    return result
