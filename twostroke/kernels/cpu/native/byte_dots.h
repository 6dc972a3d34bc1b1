// Integer products of rows with words of four inputs, one word for each output: codes of weights and int8 activations.
//
// All machines add up the same integers. A code is at most 255 as an unsigned byte, or signed where it has 8 bits.

#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace twostroke::bytes {

#if defined(__AVX512BW__)

using Words = __m512i;
constexpr int LANES = 16;
constexpr int MOST_SUMS = 24;

inline Words load(const void *p) { return _mm512_loadu_si512(p); }
inline Words set1(int32_t x) { return _mm512_set1_epi32(x); }
inline Words both(Words a, Words b) { return _mm512_and_si512(a, b); }
inline Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
inline Words plus(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words shifted_right(Words a, unsigned n) { return _mm512_srli_epi32(a, n); }
inline Words shifted_left(Words a, unsigned n) { return _mm512_slli_epi32(a, n); }
inline Words looked_up(const uint8_t (&table)[16], Words at) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), at);
}
inline void store(void *p, Words x) { _mm512_storeu_si512(p, x); }
inline simd::F to_floats(Words x) { return _mm512_cvtepi32_ps(x); }

#elif defined(__AVX2__)

using Words = __m256i;
constexpr int LANES = 8;
constexpr int MOST_SUMS = 12;

inline Words load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline Words set1(int32_t x) { return _mm256_set1_epi32(x); }
inline Words both(Words a, Words b) { return _mm256_and_si256(a, b); }
inline Words either(Words a, Words b) { return _mm256_or_si256(a, b); }
inline Words plus(Words a, Words b) { return _mm256_add_epi32(a, b); }
inline Words shifted_right(Words a, unsigned n) { return _mm256_srli_epi32(a, int(n)); }
inline Words shifted_left(Words a, unsigned n) { return _mm256_slli_epi32(a, int(n)); }
inline Words looked_up(const uint8_t (&table)[16], Words at) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), at);
}
inline void store(void *p, Words x) { _mm256_storeu_si256((__m256i *)p, x); }
inline simd::F to_floats(Words x) { return _mm256_cvtepi32_ps(x); }

#endif

// Sum<MOST> is a sum of products of one word of codes and one of inputs at a time. MOST is the largest unsigned code,
// or 0 where codes are signed. After STEPS words the sum is folded into integers. SHIFT is added to a signed code,
// which makes it unsigned.
#if defined(__AVX512VNNI__)

constexpr int DIRECT_ROWS = 8;

// Adds four products of an unsigned byte of x and a signed one of w to each lane. It is assembly because the intrinsic
// copies every sum first.
inline void add_dots(__m512i &sum, __m512i x, __m512i w) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
}

template <int MOST>
struct Sum {
    static constexpr int STEPS = 8;
    static constexpr int SHIFT = MOST ? 0 : 128;
    Words lanes = _mm512_setzero_si512();

    void add(Words w, Words x) {
        if (!MOST) w = _mm512_xor_si512(w, _mm512_set1_epi32(int32_t(0x80808080)));
        add_dots(lanes, w, x);
    }
    Words folded() const { return lanes; }
};

#elif defined(__AVX2__)

constexpr int DIRECT_ROWS = 3;

#if defined(__AVX512BW__)

inline Words zeros() { return _mm512_setzero_si512(); }
inline Words pairs_of(Words w, Words x) { return _mm512_maddubs_epi16(w, x); }
inline Words plus_pairs(Words a, Words b) { return _mm512_add_epi16(a, b); }
inline Words fours_of(Words pairs) { return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
inline Words sizes(Words w) { return _mm512_abs_epi8(w); }
inline Words with_signs_of(Words w, Words x) {
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
}

#else

inline Words zeros() { return _mm256_setzero_si256(); }
inline Words pairs_of(Words w, Words x) { return _mm256_maddubs_epi16(w, x); }
inline Words plus_pairs(Words a, Words b) { return _mm256_add_epi16(a, b); }
inline Words fours_of(Words pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
inline Words sizes(Words w) { return _mm256_abs_epi8(w); }
inline Words with_signs_of(Words w, Words x) { return _mm256_sign_epi8(x, w); }

#endif

// Pairs of products are added up in 16 bits, as often as the largest code permits without overflow.
template <int MOST>
struct Sum {
    static constexpr int MAY_ADD = 32767 / (2 * MOST * 127);
    static constexpr int STEPS = MAY_ADD >= 8 ? 8 : MAY_ADD >= 4 ? 4 : 2;
    static constexpr int SHIFT = 0;
    static_assert(MAY_ADD >= STEPS, "two products of every step fit into 16 bits");
    Words lanes = zeros();

    void add(Words w, Words x) { lanes = plus_pairs(lanes, pairs_of(w, x)); }
    Words folded() const { return fours_of(lanes); }
};

// The absolute value of a signed code is multiplied with the input, which gets the code's sign.
template <>
struct Sum<0> {
    static constexpr int STEPS = 8;
    static constexpr int SHIFT = 0;
    Words lanes = zeros();

    void add(Words w, Words x) { lanes = plus(lanes, fours_of(pairs_of(sizes(w), with_signs_of(w, x)))); }
    Words folded() const { return lanes; }
};

#else

constexpr int LANES = simd::W;
constexpr int MOST_SUMS = 12, DIRECT_ROWS = 3;

typedef int32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint32_t Unsigned __attribute__((vector_size(LANES * 4)));

inline Words load(const void *p) {
    Words y;
    std::memcpy(&y, p, sizeof y);
    return y;
}
inline void store(void *p, Words x) { std::memcpy(p, &x, sizeof x); }
inline Words set1(int32_t x) { return x - Words{}; }
inline Words both(Words a, Words b) { return a & b; }
inline Words either(Words a, Words b) { return a | b; }
inline Words plus(Words a, Words b) { return a + b; }
inline Words shifted_right(Words a, unsigned n) { return (Words)((Unsigned)a >> n); }
inline Words shifted_left(Words a, unsigned n) { return (Words)((Unsigned)a << n); }
inline Words looked_up(const uint8_t (&table)[16], Words at) {
    uint8_t bytes[LANES * 4];
    std::memcpy(bytes, &at, sizeof bytes);
    for (uint8_t &byte : bytes) byte = table[byte & 15];
    return load(bytes);
}

template <int MOST>
struct Sum {
    static constexpr int STEPS = 8;
    static constexpr int SHIFT = 0;
    Words lanes = {};

    void add(Words w, Words x) {
        for (unsigned byte = 0; byte < 32; byte += 8) {
            const Words code = MOST ? both(shifted_right(w, byte), set1(255)) : shifted_left(w, 24 - byte) >> 24;
            lanes += code * (shifted_left(x, 24 - byte) >> 24);
        }
    }
    Words folded() const { return lanes; }
};

inline simd::F to_floats(Words x) {
    float y[LANES];
    for (int lane = 0; lane < LANES; lane++) y[lane] = float(x[lane]);
    return simd::load(y);
}

#endif

}  // namespace twostroke::bytes
