// A vector of floats, `F`, of `W` lanes, and its operations, for each instruction set that we compile for.
//
// Memory holds float, bfloat16 or half; lanes are always float. Functions with a count `n` access only the first n. Two
// features are not in all instruction sets. SIMD_HAS_PAIRS: products of pairs of bfloat16 (`fma_pairs`). SIMD_HAS_DOTS:
// products of four int8 (`add_dots`).

#pragma once

#include <cstdint>
#include <cstring>

namespace twostroke {

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

// Numbers of one byte, which have a meaning only together with a scale.
struct Int8 {
    int8_t bits;
};

struct Fp8E4M3 {  // sign, 4 bits of exponent, 3 of fraction: at most 448, and no infinity
    uint8_t bits;
};

struct Fp8E5M2 {  // sign, 5 bits of exponent, 2 of fraction: the upper half of a Float16
    uint8_t bits;
};

}  // namespace twostroke

#if defined(__AVX512BW__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS >= 256
#include "simd_sve.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

namespace twostroke::simd {

// Loads the first n lanes, where n is mostly W or more.
template <class T>
inline F load_up_to(const T *p, int n) {
    return n >= W ? load(p) : load_part(p, n);
}
template <class T>
inline void store_up_to(T *p, F x, int n) {
    if (n >= W)
        store(p, x);
    else
        store_part(p, x, n);
}

// Stores two vectors as bfloat16, alternating between them.
inline void store_pairs(uint16_t *to, F even, F odd) {
#if defined(__AVX512BW__)
    const __m512i first = _mm512_cvtepu16_epi32(narrow(even, BFloat16()));
    const __m512i second = _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(odd, BFloat16())), 16);
    _mm512_storeu_si512(to, _mm512_or_si512(first, second));
#else
    BFloat16 first[W], second[W];
    store(first, even);
    store(second, odd);
    for (int lane = 0; lane < W; lane++) {
        to[2 * lane] = first[lane].bits;
        to[2 * lane + 1] = second[lane].bits;
    }
#endif
}

// Converts numbers of one byte, sign-extended in each lane, to floats. All are finite: memory that was never written
// must not make a weight of zero NaN.
inline F decode(I bytes, Int8) { return to_floats(bytes); }
inline F decode(I bytes, Fp8E4M3) {  // the factor moves the exponent's bias
    return mul(as_floats(keep_bits(shift_left<20>(bytes), int32_t(0x87f00000))), set1(0x1p120f));
}
inline F decode(I bytes, Fp8E5M2) {
    return mul(as_floats(keep_bits(shift_left<21>(bytes), int32_t(0x8fe00000))), set1(0x1p112f));
}

// Splits x <= 0 into an integer and a rest of -1/2 to 1/2. `bits_to_exponent` makes 2^integer from the result.
inline F split_exponent(F x, F &rest) {
    x = max(x, set1(-127.0f));                 // its power is zero
    const F magic = set1(0x1.8p23f + 127.0f);  // adding it rounds, and leaves x + 127 in the lowest bits
    const F shifted = add(x, magic);
    rest = sub(x, sub(shifted, magic));
    return shifted;
}

// 2^x for x <= 0, to three units in the last place. It is 0 below -126, and for -infinity.
inline F exp2_of_negative(F x) {
    F f;
    const F exponent = split_exponent(x, f);
    F p = set1(0.0013264726390411416f);
    p = fma(p, f, set1(0.009671512697265194f));
    p = fma(p, f, set1(0.05550733745934455f));
    p = fma(p, f, set1(0.2402224208411917f));
    p = fma(p, f, set1(0.6931469775972973f));
    p = fma(p, f, set1(1.0f));
    return mul(p, bits_to_exponent(exponent));
}

// 2^x for x <= 0 to one part in ten thousand, for weights that are rounded to bfloat16 anyway.
inline F rough_exp2_of_negative(F x) {
    F f;
    const F exponent = split_exponent(x, f);
    F p = set1(0.055008928068727175f);
    p = fma(p, f, set1(0.24221096023823613f));
    p = fma(p, f, set1(0.6932829277032073f));
    p = fma(p, f, set1(1.0f));
    return mul(p, bits_to_exponent(exponent));
}

// x / (1 + e^-y).
inline F times_sigmoid(F x, F y) {
    const F power = exp2_of_negative(min(mul(y, set1(-1.44269504f)), set1(127.0f)));
    return div(x, add(power, set1(1.0f)));
}

// x / (1 + e^-x), which is nearly zero far below 0.
inline F silu(F x) {
    x = max(set1(-127.0f), x);  // in this order NaN stays NaN
    return times_sigmoid(x, x);
}

// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), whose tanh is written as a sigmoid.
inline F gelu_tanh(F x) {
    x = max(set1(-127.0f), x);
    return times_sigmoid(x, mul(x, fma(mul(x, x), set1(0.0713548163f), set1(1.59576912f))));
}

inline F absolute(F x) { return max(x, sub(zero(), x)); }

// x / 2 (1 + erf(x / sqrt(2))), by formula 7.1.26 of Abramowitz and Stegun's handbook: to 4e-7.
inline F gelu(F x) {
    const F size = absolute(x), t = div(set1(1.0f), fma(size, set1(0.231641888f), set1(1.0f)));
    F p = set1(1.061405429f);
    p = fma(p, t, set1(-1.453152027f));
    p = fma(p, t, set1(1.421413741f));
    p = fma(p, t, set1(-0.284496736f));
    p = mul(fma(p, t, set1(0.254829592f)), t);
    const F tail = mul(p, exp2_of_negative(mul(mul(size, size), set1(-0.721347520f))));
    return sub(max(zero(), x), mul(mul(size, tail), set1(0.5f)));
}

// tanh(x), to three units in the last place: twice the angle of Lambert's continued fraction at x / 2.
inline F tanh(F x) {
    const F y = max(set1(-4.6f), min(set1(4.6f), mul(x, set1(0.5f)))), square = mul(y, y);
    F over = add(square, set1(990.0f)), under = fma(square, set1(45.0f), set1(13860.0f));
    over = fma(over, square, set1(135135.0f)), under = fma(under, square, set1(945945.0f));
    over = fma(over, square, set1(4729725.0f)), under = fma(under, square, set1(16216200.0f));
    over = mul(fma(over, square, set1(34459425.0f)), y), under = fma(under, square, set1(34459425.0f));
    return div(mul(mul(over, under), set1(2.0f)), fma(over, over, mul(under, under)));
}

}  // namespace twostroke::simd
