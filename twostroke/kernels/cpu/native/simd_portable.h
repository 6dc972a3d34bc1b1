// `simd.h` for all other machines: four lanes, in vector types that compilers map to the available instructions.

#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "simd.h"

namespace twostroke::simd {

typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));  // words: each an integer, two bfloat16, two int16 or four int8
typedef int16_t Halves __attribute__((vector_size(16)));
constexpr int W = 4;

inline F zero() { return F{0, 0, 0, 0}; }
inline F set1(float x) { return F{x, x, x, x}; }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F max(F a, F b) { return a > b ? a : b; }
inline F min(F a, F b) { return a < b ? a : b; }
#if defined(__aarch64__)
inline F fma(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
inline F fma(F a, F b, F c) { return a * b + c; }  // two roundings: there may be no fused instruction
#endif
inline void add_product(F &sum, F a, F b) { sum = fma(a, b, sum); }
inline float reduce_add(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float reduce_max(F x) {
    float highest = x[0];
    for (int i = 1; i < W; i++) highest = x[i] > highest ? x[i] : highest;
    return highest;
}

inline F bits_to_exponent(F x) { return (F)((I)x << 23); }

// The lanes from n on become `fill`.
inline F keep_first(F x, int n, F fill) { return I{0, 1, 2, 3} < I{n, n, n, n} ? x : fill; }

inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t as_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float to_float(float x) { return x; }
inline void from_float(float x, float &y) { y = x; }

inline float to_float(BFloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline void from_float(float x, BFloat16 &y) {
    const uint32_t bits = as_bits(x);
    y.bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}

inline float to_float(Float16 x) {
    const float magnitude = as_float(uint32_t(x.bits & 0x7fff) << 13) * 0x1p112f;  // moves the exponent's bias
    return as_float(as_bits(magnitude) | uint32_t(x.bits & 0x8000) << 16);
}
inline void from_float(float x, Float16 &y) {
    uint32_t bits = as_bits(x);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits >= 0x477ff000)
        bits = 0x7c00;  // beyond the largest half
    else if (bits < 0x38800000)
        bits = as_bits(as_float(bits) + 0.5f) - 0x3f000000;  // 1/2 lines a subnormal's bits up with the result, rounded
    else
        bits = (bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13;  // to nearest, ties to even
    y.bits = uint16_t(bits) | sign;
}

inline I load_words(const void *p) {
    I x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline I set1_word(int32_t x) { return I{x, x, x, x}; }
inline F first_bfloat16(I x) { return (F)(x << 16); }
inline F second_bfloat16(I x) { return (F)(x & int32_t(0xffff0000)); }
inline I even_int8(I x) { return (I)((Halves)((Halves)x << 8) >> 8); }
inline I odd_int8(I x) { return (I)((Halves)x >> 8); }
inline I add_products(I sum, I a, I b) { return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16); }
inline F to_floats(I x) { return __builtin_convertvector(x, F); }
inline F as_floats(I x) { return (F)x; }
inline I keep_bits(I x, int32_t bits) { return x & bits; }
template <int N>
inline I shift_left(I x) {
    return x << N;
}
template <int N>
inline I shift_right(I x) {
    return x >> N;
}

// W numbers of two bytes, their signs in the higher bits.
inline I load_halves(const void *p) {
    int16_t halves[W];
    std::memcpy(halves, p, sizeof halves);
    return I{halves[0], halves[1], halves[2], halves[3]};
}

template <class T>
inline F load_part(const T *p, int n) {
    F x = zero();
    for (int i = 0; i < W; i++)
        if (i < n) x[i] = to_float(p[i]);
    return x;
}
template <class T>
inline F load(const T *p) {
    return F{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
template <class T>
inline void store_part(T *p, F x, int n) {
    for (int i = 0; i < W; i++)
        if (i < n) from_float(x[i], p[i]);
}
template <class T>
inline void store(T *p, F x) {
    store_part(p, x, W);
}

inline F load(const float *p) {
    F x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void store(float *p, F x) { std::memcpy(p, &x, sizeof x); }

// Words of two bfloat16: the first or the second of each, as floats.
inline F first_of_pairs(F words) { return (F)((I)words << 16); }
inline F second_of_pairs(F words) {
    constexpr int32_t HIGH = int32_t(0xffff0000);
    return (F)((I)words & I{HIGH, HIGH, HIGH, HIGH});
}

}  // namespace twostroke::simd
