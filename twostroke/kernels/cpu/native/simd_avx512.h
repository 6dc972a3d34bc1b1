// `simd.h` for AVX-512 (F, BW, VL, DQ), with bfloat16 products where the machine has them.

#pragma once

#include <immintrin.h>

#include "simd.h"

namespace twostroke::simd {

using F = __m512;
constexpr int W = 16;

inline __mmask16 first_lanes(int n) { return __mmask16(n >= W ? 0xffff : (1u << n) - 1); }

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline void add_product(F &sum, F a, F b) { sum = fma(a, b, sum); }
inline float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(F x) { return _mm512_reduce_max_ps(x); }

#define SIMD_SUMS_FOUR 1
// Stores the sums of four vectors' lanes, one after the other.
inline void store_sums(F a, F b, F c, F d, float *to) {
    const F low = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F high = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    F sums = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
    sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4(sums, sums, 0x4e));
    sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4(sums, sums, 0xb1));
    _mm512_mask_storeu_ps(to, 0xf, sums);
}

inline F bits_to_exponent(F x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 23));
}

// The lanes from n on become `fill`.
inline F keep_first(F x, int n, F fill) { return _mm512_mask_mov_ps(fill, first_lanes(n), x); }

inline F widen(__m256i halves, BFloat16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline F widen(__m256i halves, Float16) { return _mm512_cvtph_ps(halves); }
inline __m256i narrow(F x, BFloat16) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));  // ties go to even
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
inline __m256i narrow(F x, Float16) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

using I = __m512i;  // W words of 32 bits, each an integer, two bfloat16, two int16 or four int8

inline I load_words(const void *p) { return _mm512_loadu_si512(p); }
inline I set1_word(int32_t x) { return _mm512_set1_epi32(x); }
inline F first_bfloat16(I x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline F second_bfloat16(I x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int32_t(0xffff0000))));
}
inline I even_int8(I x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
inline I odd_int8(I x) { return _mm512_srai_epi16(x, 8); }
inline I add_products(I sum, I a, I b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
inline F to_floats(I x) { return _mm512_cvtepi32_ps(x); }
inline F as_floats(I x) { return _mm512_castsi512_ps(x); }
inline I keep_bits(I x, int32_t bits) { return _mm512_and_si512(x, _mm512_set1_epi32(bits)); }
template <int N>
inline I shift_left(I x) {
    return _mm512_slli_epi32(x, N);
}
template <int N>
inline I shift_right(I x) {
    return _mm512_srai_epi32(x, N);
}

// W numbers of one or two bytes, their signs in the higher bits.
inline I load_bytes(const void *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
inline I load_halves(const void *p) { return _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p)); }

inline F load(const float *p) { return _mm512_loadu_ps(p); }
inline F load_part(const float *p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store(float *p, F x) { _mm512_storeu_ps(p, x); }
inline void store_part(float *p, F x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }

template <class T>
inline F load(const T *p) {
    return widen(_mm256_loadu_si256((const __m256i *)p), T());
}
template <class T>
inline F load_part(const T *p, int n) {
    return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p), T());
}
template <class T>
inline void store(T *p, F x) {
    _mm256_storeu_si256((__m256i *)p, narrow(x, T()));
}
template <class T>
inline void store_part(T *p, F x, int n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x, T()));
}

// Words of two bfloat16: the first or the second of each, as floats.
inline F first_of_pairs(F words) { return first_bfloat16(_mm512_castps_si512(words)); }
inline F second_of_pairs(F words) { return second_bfloat16(_mm512_castps_si512(words)); }

#if defined(__AVX512BF16__)
// Words of two bfloat16: each lane of `sum` gains both products.
inline F fma_pairs(F a, F b, F sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

// The number that the STEP-th four bits of each half of a word stand for (`nibbles.h`), as bfloat16.
template <int STEP>
inline F nibble_pairs(I words) {
    alignas(64) static constexpr uint16_t NUMBERS[32] = {  // twice: an index's fifth bit is another number's
        0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020, 0xbfc0, 0xbf00, 0x3f00, 0x3fc0, 0x4020,
        0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0, 0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020,
        0xbfc0, 0xbf00, 0x3f00, 0x3fc0, 0x4020, 0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0};
    const __m512i table = _mm512_loadu_si512(NUMBERS);
    return (F)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * STEP), table);
}

// Pairs of a number of a and the same number of b: of each eight numbers the first four, or the last four.
template <int HALF>
inline F interleaved(I a, I b) {
    return (F)(HALF ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b));
}

// Joins two vectors to 2 W bfloat16, in order.
inline F join_narrow(F low, F high) { return (F)_mm512_cvtne2ps_pbh(high, low); }
inline void store_narrow(float *words, F low, F high) { store(words, join_narrow(low, high)); }
#endif

}  // namespace twostroke::simd
