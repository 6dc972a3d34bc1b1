// Rounds numbers for pages: to numbers of one byte and a scale, or to other floats.
//
// Each step is one rounding that `kernels/pools/page_pool.py` repeats, so that all variants and torch write the same
// bits.

#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace twostroke {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

constexpr float SMALLEST_PEAK = 1e-30f;  // rows below it are zero: the inverse of their scale would overflow

// Rounds x to a multiple of magic's last digit, ties to even, and returns it in these units. |x| must be far below
// magic.
template <int EXPONENT>
inline int32_t rounded_digits(float x) {
    const float magic = 1.5f * float(1ull << EXPONENT);
    return int32_t(bits_of(x + magic) - bits_of(magic));
}

inline void encode(float x, Int8 &to) { to.bits = int8_t(rounded_digits<23>(x)); }

// Floats of one byte: FRACTION bits of fraction, and exponents from 1 - BIAS on. |x| must round to a finite one.
template <int FRACTION, int BIAS>
inline uint8_t to_small_float(float x) {
    constexpr int DROPPED = 23 - FRACTION;
    const uint32_t bits = bits_of(x), size = bits & 0x7fffffff;
    const uint32_t normal = (size + ((1u << (DROPPED - 1)) - 1) + ((size >> DROPPED) & 1)) >> DROPPED;
    const uint32_t subnormal = uint32_t(rounded_digits<23 - FRACTION + 1 - BIAS>(float_of(size)));
    const bool is_subnormal = size < uint32_t(128 - BIAS) << 23;
    const uint32_t small = is_subnormal ? subnormal : normal - (uint32_t(127 - BIAS) << FRACTION);
    return uint8_t(small | (bits >> 24 & 0x80));
}
inline void encode(float x, Fp8E4M3 &to) { to.bits = to_small_float<3, 7>(x); }
inline void encode(float x, Fp8E5M2 &to) { to.bits = to_small_float<2, 15>(x); }

template <class T>
inline constexpr float LARGEST = 127.0f;
template <>
inline constexpr float LARGEST<Fp8E4M3> = 448.0f;
template <>
inline constexpr float LARGEST<Fp8E5M2> = 57344.0f;

// Rounds one token's key or value [dim] to numbers of one byte, and returns their scale.
template <class Number>
inline float quantise(const float *row, int64_t dim, Number *to) {
    uint32_t highest = 0;  // compared as integers, so that NaN is the highest
    for (int64_t d = 0; d < dim; d++) highest = std::max(bits_of(row[d]) & 0x7fffffff, highest);
    const float peak = float_of(highest);
    const bool is_zero = peak < SMALLEST_PEAK;
    const float inverse = is_zero ? 0.0f : LARGEST<Number> / peak;
    for (int64_t d = 0; d < dim; d++) encode(row[d] * inverse, to[d]);
    return is_zero ? 0.0f : peak / LARGEST<Number>;
}

}  // namespace twostroke
