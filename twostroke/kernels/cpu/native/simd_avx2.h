// `simd.h` for AVX2 with FMA and half-precision conversion.

#pragma once

#include <immintrin.h>

#include "simd.h"

namespace twostroke::simd {

using F = __m256;
constexpr int W = 8;

inline __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline F zero() { return _mm256_setzero_ps(); }
inline F set1(float x) { return _mm256_set1_ps(x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

// sum += a * b. For the intrinsic, GCC 12 chooses forms that overwrite a factor, and then lacks registers for the sums.
inline void add_product(F &sum, F a, F b) { asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }

inline float reduce_add(F x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}
inline float reduce_max(F x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
}

inline F bits_to_exponent(F x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 23));
}

// The lanes from n on become `fill`.
inline F keep_first(F x, int n, F fill) { return _mm256_blendv_ps(fill, x, _mm256_castsi256_ps(first_lanes(n))); }

inline F widen(__m128i halves, BFloat16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline F widen(__m128i halves, Float16) { return _mm256_cvtph_ps(halves); }
inline __m128i narrow(F x, BFloat16) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));  // ties go to even
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i high = _mm256_srli_epi32(rounded, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
inline __m128i narrow(F x, Float16) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

using I = __m256i;  // W words of 32 bits, each an integer, two bfloat16, two int16 or four int8

inline I load_words(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline I set1_word(int32_t x) { return _mm256_set1_epi32(x); }
inline F first_bfloat16(I x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline F second_bfloat16(I x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000)))); }
inline I even_int8(I x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
inline I odd_int8(I x) { return _mm256_srai_epi16(x, 8); }
inline I add_products(I sum, I a, I b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
inline F to_floats(I x) { return _mm256_cvtepi32_ps(x); }
inline F as_floats(I x) { return _mm256_castsi256_ps(x); }
inline I keep_bits(I x, int32_t bits) { return _mm256_and_si256(x, _mm256_set1_epi32(bits)); }
template <int N>
inline I shift_left(I x) {
    return _mm256_slli_epi32(x, N);
}
template <int N>
inline I shift_right(I x) {
    return _mm256_srai_epi32(x, N);
}

// W numbers of two bytes, their signs in the higher bits.
inline I load_halves(const void *p) { return _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)p)); }

inline F load(const float *p) { return _mm256_loadu_ps(p); }
inline F load_part(const float *p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store(float *p, F x) { _mm256_storeu_ps(p, x); }
inline void store_part(float *p, F x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }

template <class T>
inline F load(const T *p) {
    return widen(_mm_loadu_si128((const __m128i *)p), T());
}
template <class T>
inline F load_part(const T *p, int n) {
    T halves[W] = {};
    std::memcpy(halves, p, size_t(n < W ? n : W) * sizeof(T));
    return load(halves);
}
template <class T>
inline void store(T *p, F x) {
    _mm_storeu_si128((__m128i *)p, narrow(x, T()));
}
template <class T>
inline void store_part(T *p, F x, int n) {
    T halves[W];
    store(halves, x);
    std::memcpy(p, halves, size_t(n < W ? n : W) * sizeof(T));
}

// Words of two bfloat16: the first or the second of each, as floats.
inline F first_of_pairs(F words) { return first_bfloat16(_mm256_castps_si256(words)); }
inline F second_of_pairs(F words) { return second_bfloat16(_mm256_castps_si256(words)); }

}  // namespace twostroke::simd
