// Products of rows with one panel of FP8 (e4m3) in float32 lanes, where no instruction multiplies bfloat16.
//
// Only shifts turn numbers into floats, which are 2^-120 times the numbers: those that are subnormal then are so in
// float32, too. Inputs are multiplied by 2^60 when they are prepared, and the sum of a group by the other 2^60 and its
// scale. None of that rounds: a group's sum is that of its exact numbers, one input after the other.

#pragma once

#include <algorithm>

#include "facts.h"
#include "linear.h"
#include "simd.h"

namespace twostroke {

constexpr float FP8_HALF_WAY = 0x1p60f;  // factor on inputs, and on scales

// The numbers of one input for each output: byte PART of the words.
template <int PART>
inline simd::F fp8_numbers(simd::I words) {
    constexpr int32_t SIGN_EXPONENT_FRACTION = int32_t(0x87f00000);
    return simd::as_floats(simd::keep_bits(simd::shift_right<4>(simd::shift_left<24 - 8 * PART>(words)),
                                           SIGN_EXPONENT_FRACTION));
}

// Adds the products of one input with V vectors from `at` on to the sums of R rows.
template <int PART, int R, int V>
inline void add_fp8(const char *at, const float *x, int64_t x_stride, simd::F (&sums)[R][V]) {
    simd::F w[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) w[v] = fp8_numbers<PART>(simd::load_words(at + v * simd::W * 4));
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        const simd::F factor = simd::set1(x[r * x_stride + PART]);
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) simd::add_product(sums[r][v], w[v], factor);
    }
}

// Multiplies R rows with V vectors of a panel, from output `column` on, into sums [R][32].
template <int R, int V, bool IS_FIRST_PASS, class Bring>
void multiply_fp8(const Linear &w, int64_t panel, int column, const float *x, float *to, Bring bring) {
    const char *weights = (const char *)w.panels + panel * w.inputs * PANEL + column * 4;
    const int64_t group = std::min<int64_t>(w.layout.group, w.inputs);
    UnitFacts facts;
    for (int r = 0; r < R; r++) std::fill(to + r * PANEL, to + r * PANEL + V * simd::W, 0.0f);
    for (int64_t begin = 0; begin < w.inputs; begin += group) {
        simd::F sums[R][V];
#pragma GCC unroll 32
        for (int i = 0; i < R * V; i++) sums[i / V][i % V] = simd::zero();
        const int64_t end = std::min(w.inputs, begin + group);
        for (int64_t input = begin; input < end; input += 4) {
            const char *at = weights + input * PANEL;
            if (IS_FIRST_PASS) bring(at);
            add_fp8<0>(at, x + input, w.inputs, sums);
            add_fp8<1>(at, x + input, w.inputs, sums);
            add_fp8<2>(at, x + input, w.inputs, sums);
            add_fp8<3>(at, x + input, w.inputs, sums);
        }
        facts.read(w, panel, begin / 32, 32);
#pragma GCC unroll 32
        for (int i = 0; i < R * V; i++) {
            const int lane = i % V * simd::W;
            const simd::F scale = simd::mul(simd::load(facts.scales + column + lane), simd::set1(FP8_HALF_WAY));
            float *total = to + i / V * PANEL + lane;
            simd::store(total, simd::fma(sums[i / V][i % V], scale, simd::load(total)));
        }
    }
}

}  // namespace twostroke
