// `simd.h` for Arm's SVE in vectors of 256 or 512 bits (-msve-vector-bits), with products of bfloat16 where the machine
// has them.

#pragma once

#include <arm_sve.h>

#include "simd.h"

namespace twostroke::simd {

typedef svfloat32_t F __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));
typedef svint32_t I __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));  // words: each two bfloat16 or four int8
constexpr int W = __ARM_FEATURE_SVE_BITS / 32;

inline svbool_t all_lanes() { return svptrue_b32(); }
inline svbool_t first_lanes(int n) { return svwhilelt_b32(0, n); }

inline F zero() { return svdup_f32(0); }
inline F set1(float x) { return svdup_f32(x); }
inline F add(F a, F b) { return svadd_x(all_lanes(), a, b); }
inline F sub(F a, F b) { return svsub_x(all_lanes(), a, b); }
inline F mul(F a, F b) { return svmul_x(all_lanes(), a, b); }
inline F div(F a, F b) { return svdiv_x(all_lanes(), a, b); }
inline F max(F a, F b) { return svmax_x(all_lanes(), a, b); }
inline F min(F a, F b) { return svmin_x(all_lanes(), a, b); }
inline F fma(F a, F b, F c) { return svmla_x(all_lanes(), c, a, b); }
inline void add_product(F &sum, F a, F b) { sum = fma(a, b, sum); }
inline float reduce_add(F x) { return svaddv(all_lanes(), x); }
inline float reduce_max(F x) { return svmaxv(all_lanes(), x); }

inline F as_floats(I words) { return svreinterpret_f32(words); }
inline I as_words(F x) { return svreinterpret_s32(x); }
inline F bits_to_exponent(F x) { return as_floats(svlsl_x(all_lanes(), as_words(x), 23)); }

// The lanes from n on become `fill`.
inline F keep_first(F x, int n, F fill) { return svsel(first_lanes(n), x, fill); }

inline I load_words(const void *p) { return svld1(all_lanes(), (const int32_t *)p); }
inline I set1_word(int32_t x) { return svdup_s32(x); }
inline F first_bfloat16(I x) { return as_floats(svlsl_x(all_lanes(), x, 16)); }
inline F second_bfloat16(I x) { return as_floats(svand_x(all_lanes(), x, int32_t(0xffff0000))); }
inline F to_floats(I x) { return svcvt_f32_x(all_lanes(), x); }
inline I keep_bits(I x, int32_t bits) { return svand_x(all_lanes(), x, bits); }
template <int N>
inline I shift_left(I x) {
    return svlsl_x(all_lanes(), x, N);
}
template <int N>
inline I shift_right(I x) {
    return svasr_x(all_lanes(), x, N);
}

// W numbers of two bytes, their signs in the higher bits.
inline I load_halves(const void *p) { return svld1sh_s32(all_lanes(), (const int16_t *)p); }

#define SIMD_HAS_DOTS 1
// Words of four int8: each lane of `sum` gains four products.
inline I add_dots(I sum, I a, I b) { return svdot(sum, svreinterpret_s8(a), svreinterpret_s8(b)); }

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)  // GCC 12 does not define __ARM_FEATURE_SVE_BF16
#define SIMD_HAS_PAIRS 1
// Words of two bfloat16: each lane of `sum` gains both products, rounded as this processor does it.
inline F fma_pairs(F a, F b, F sum) { return svbfdot(sum, svreinterpret_bf16(a), svreinterpret_bf16(b)); }
#endif

inline F load_lanes(svbool_t lanes, const float *p) { return svld1(lanes, p); }
inline F load_lanes(svbool_t lanes, const BFloat16 *p) {
    return svreinterpret_f32(svlsl_x(all_lanes(), svld1uh_u32(lanes, (const uint16_t *)p), 16));
}
inline F load_lanes(svbool_t lanes, const Float16 *p) {
    return svcvt_f32_x(all_lanes(), svreinterpret_f16(svld1uh_u32(lanes, (const uint16_t *)p)));
}
inline void store_lanes(svbool_t lanes, float *p, F x) { svst1(lanes, p, x); }
inline void store_lanes(svbool_t lanes, BFloat16 *p, F x) {
    const svuint32_t bits = svreinterpret_u32(x);
    const svuint32_t odd = svand_x(all_lanes(), svlsr_x(all_lanes(), bits, 16), 1);  // ties go to even
    const svuint32_t rounded = svadd_x(all_lanes(), svadd_x(all_lanes(), bits, 0x7fff), odd);
    svst1h(lanes, (uint16_t *)p, svlsr_x(all_lanes(), rounded, 16));
}
inline void store_lanes(svbool_t lanes, Float16 *p, F x) {
    svst1h(lanes, (uint16_t *)p, svreinterpret_u32(svcvt_f16_x(all_lanes(), x)));
}

template <class T>
inline F load(const T *p) {
    return load_lanes(all_lanes(), p);
}
template <class T>
inline F load_part(const T *p, int n) {
    return load_lanes(first_lanes(n), p);
}
template <class T>
inline void store(T *p, F x) {
    store_lanes(all_lanes(), p, x);
}
template <class T>
inline void store_part(T *p, F x, int n) {
    store_lanes(first_lanes(n), p, x);
}

// Words of two bfloat16: the first or the second of each, as floats.
inline F first_of_pairs(F words) { return first_bfloat16(as_words(words)); }
inline F second_of_pairs(F words) { return second_bfloat16(as_words(words)); }

}  // namespace twostroke::simd
