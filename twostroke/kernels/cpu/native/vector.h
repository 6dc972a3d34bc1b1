// AVX-512 in the words of the kernels: bfloat16 as float32 lanes, and the functions that a transformer needs of them.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace twostroke {

constexpr int LANES = 16;

inline __mmask16 lanes(int64_t count) {
    return count >= LANES ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

inline __m512 widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m512 load_bfloat16(const uint16_t *at) { return widen(_mm256_loadu_si256((const __m256i *)at)); }

inline __m512 load_bfloat16(const uint16_t *at, __mmask16 mask) {
    return widen(_mm256_maskz_loadu_epi16(mask, at));
}

inline void store_bfloat16(uint16_t *at, __m512 x, __mmask16 mask) {
    _mm256_mask_storeu_epi16(at, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

// e^x within two units in the last place; 0 far below, infinity far above.
inline __m512 exp(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-104.0f)), _mm512_set1_ps(89.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

// x / (1 + e^-x)
inline __m512 silu(__m512 x) {
    const __m512 power = exp(_mm512_sub_ps(_mm512_setzero_ps(), x));
    return _mm512_div_ps(x, _mm512_add_ps(power, _mm512_set1_ps(1.0f)));
}

}  // namespace twostroke
