// Rope: the two numbers of a pair lie half of the rotated part apart.

#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace twostroke {

// Rotates x into y, both [2 * half]; they may be the same.
template <class T>
void rotate(const T *x, const float *cosines, const float *sines, int64_t half, T *y) {
    for (int64_t d = 0; d < half; d += simd::W) {
        const int n = int(std::min<int64_t>(simd::W, half - d));
        const simd::F low = simd::load_up_to(x + d, n), high = simd::load_up_to(x + d + half, n);
        const simd::F cosine = simd::load_up_to(cosines + d, n), sine = simd::load_up_to(sines + d, n);
        simd::store_up_to(y + d, simd::sub(simd::mul(low, cosine), simd::mul(high, sine)), n);
        simd::store_up_to(y + d + half, simd::fma(high, cosine, simd::mul(low, sine)), n);
    }
}

}  // namespace twostroke
