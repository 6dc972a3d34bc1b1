// One vector of floats, `F`, of `W` lanes, and what kernels do with it, for each instruction set that we compile for.
//
// Memory holds float, bfloat16 or half; lanes are always float. Functions with a count `n` touch the first n lanes only.

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

}  // namespace twostroke

#if defined(__AVX512BF16__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace twostroke::simd {

// 2^x for x <= 0, to three units in the last place; zero below -126, and for -infinity.
inline F exp2_of_negative(F x) {
    x = max(x, set1(-127.0f));
    const F magic = set1(0x1.8p23f + 127.0f);  // adding it rounds to integers and leaves x + 127 in the lowest bits
    const F shifted = add(x, magic);
    const F f = sub(x, sub(shifted, magic));
    F p = set1(0.0013264726390411416f);
    p = fma(p, f, set1(0.009671512697265194f));
    p = fma(p, f, set1(0.05550733745934455f));
    p = fma(p, f, set1(0.2402224208411917f));
    p = fma(p, f, set1(0.6931469775972973f));
    p = fma(p, f, set1(1.0f));
    return mul(p, bits_to_exponent(shifted));
}

}  // namespace twostroke::simd
