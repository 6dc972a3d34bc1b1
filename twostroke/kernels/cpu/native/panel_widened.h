// Products of rows with one panel where no instruction multiplies bfloat16: both sides are widened to float32 lanes.
//
// int8 is multiplied as int16, two products to a word, which gives the same integers as the instructions for int8.

#pragma once

#include <algorithm>

#include "linear.h"
#include "simd.h"

namespace twostroke {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MOST_SUMS = 24;  // vectors, of the 32 registers
#else
constexpr int MOST_SUMS = 12;  // of 16
#endif
constexpr int64_t PASS_ROWS = MOST_SUMS / 2;
constexpr int64_t STEP_BYTES = PANEL * 4;  // of a panel: one word of each output
constexpr int64_t AHEAD = 8192;            // bytes that the first pass over a panel is ahead of its reading

// The vectors of a panel that are summed side by side: all of them for a few rows, whose sums would otherwise wait for
// each other, and then as many as leave registers for every row.
constexpr int vectors_of(int rows) {
    int vectors = int(PANEL) / simd::W;
    while (vectors > 2 && rows * vectors > MOST_SUMS - 4) vectors /= 2;
    return vectors;
}

inline int64_t passes_of(int64_t rows) { return (rows + PASS_ROWS - 1) / PASS_ROWS; }

inline void bring(const char *here) {
    for (int64_t at = 0; at < STEP_BYTES; at += 64) __builtin_prefetch(here + AHEAD + at);
}

// Sums of R rows of float32 with V vectors of a panel from `weights` on, into sums [R][32].
template <int R, int V, bool IS_FIRST_PASS>
void multiply_floats(const char *weights, int64_t steps, const float *x, int64_t x_stride, float *to) {
    simd::F sums[R][V];
#pragma GCC unroll 32
    for (int i = 0; i < R * V; i++) sums[i / V][i % V] = simd::zero();
    for (int64_t step = 0; step < steps; step++) {
        if (IS_FIRST_PASS) bring(weights + step * STEP_BYTES);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            simd::F w[V];
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) {
                const simd::I pair = simd::load_words(weights + step * STEP_BYTES + v * simd::W * 4);
                w[v] = half ? simd::second_bfloat16(pair) : simd::first_bfloat16(pair);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const simd::F factor = simd::set1(x[r * x_stride + 2 * step + half]);
#pragma GCC unroll 16
                for (int v = 0; v < V; v++) simd::add_product(sums[r][v], w[v], factor);
            }
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < R * V; i++) simd::store(to + i / V * PANEL + i % V * simd::W, sums[i / V][i % V]);
}

// The same with int8 weights and activations: exact within a group, float32 across groups. `scales` are the weights', as
// the panel lies from `weights` on. `x` has two words for four inputs: the first and third, the second and fourth.
template <int R, int V, bool IS_FIRST_PASS>
void multiply_int8(const char *weights, const float *scales, int64_t groups, const int32_t *x, const float *x_scales,
                   float *to) {
    constexpr int64_t GROUP_STEPS = GROUP / 4;
    const int64_t steps = groups * GROUP_STEPS, x_stride = 2 * steps;
    for (int r = 0; r < R; r++) std::fill(to + r * PANEL, to + r * PANEL + V * simd::W, 0.0f);
    for (int64_t group = 0; group < groups; group++) {
        simd::I dots[R][V];
#pragma GCC unroll 32
        for (int i = 0; i < R * V; i++) dots[i / V][i % V] = simd::set1_word(0);
        for (int64_t step = group * GROUP_STEPS; step < (group + 1) * GROUP_STEPS; step++) {
            if (IS_FIRST_PASS) bring(weights + step * STEP_BYTES);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                simd::I w[V];
#pragma GCC unroll 16
                for (int v = 0; v < V; v++) {
                    const simd::I four = simd::load_words(weights + step * STEP_BYTES + v * simd::W * 4);
                    w[v] = half ? simd::odd_int8(four) : simd::even_int8(four);
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const simd::I two = simd::set1_word(x[r * x_stride + 2 * step + half]);
#pragma GCC unroll 16
                    for (int v = 0; v < V; v++) dots[r][v] = simd::add_products(dots[r][v], w[v], two);
                }
            }
        }
#pragma GCC unroll 32
        for (int i = 0; i < R * V; i++) {
            const int r = i / V, v = i % V;
            const simd::F scale = simd::load(scales + group * PANEL + v * simd::W);
            const simd::F by = simd::mul(simd::set1(x_scales[r * groups + group]), scale);
            float *sum = to + r * PANEL + v * simd::W;
            simd::store(sum, simd::fma(simd::to_floats(dots[r][v]), by, simd::load(sum)));
        }
    }
}

template <int R, bool IS_FIRST_PASS>
void multiply_as(const Linear &w, int64_t panel, const Prepared &prepared, int64_t first, float *sums) {
    constexpr int V = vectors_of(R), COLUMNS = V * simd::W;
    const int64_t groups = w.inputs / GROUP, steps = w.inputs / (w.kind == INT8 ? 4 : 2);
    const char *weights = (const char *)w.panels + panel * steps * STEP_BYTES;
    for (int column = 0; column < PANEL; column += COLUMNS, weights += COLUMNS * 4, sums += COLUMNS) {
        if (w.kind == BFLOAT16) {
            const float *x = (const float *)prepared.values.data() + first * w.inputs;
            multiply_floats<R, V, IS_FIRST_PASS>(weights, steps, x, w.inputs, sums);
        } else {
            const int32_t *x = (const int32_t *)prepared.values.data() + first * (w.inputs / 2);
            const float *x_scales = prepared.scales.data() + first * groups;
            const float *scales = w.scales + panel * groups * PANEL + column;
            multiply_int8<R, V, IS_FIRST_PASS>(weights, scales, groups, x, x_scales, sums);
        }
    }
}

template <int R>
void multiply(const Linear &w, int64_t panel, const Rows &, const Prepared &prepared, int64_t first, const Pass &pass,
              float *sums) {
    if (pass.index == 0) return multiply_as<R, true>(w, panel, prepared, first, sums);
    multiply_as<R, false>(w, panel, prepared, first, sums);
}

inline int64_t prepared_bytes(const Linear &w) { return w.inputs * (w.kind == INT8 ? 2 : 4); }

inline void quantise_group(const BFloat16 *x, int32_t *words, float &scale) {
    simd::F peak = simd::zero();
    for (int i = 0; i < GROUP; i += simd::W) {
        const simd::F lane = simd::load(x + i);
        peak = simd::max(peak, simd::max(lane, simd::sub(simd::zero(), lane)));
    }
    scale = simd::reduce_max(peak) / 127.0f;
    const simd::F inverse = simd::set1(scale > 0 ? 1.0f / scale : 0.0f);
    float shifted[GROUP];  // adding 1.5 * 2^23 rounds, and leaves the integer in the lowest bits
    for (int i = 0; i < GROUP; i += simd::W)
        simd::store(shifted + i, simd::add(simd::mul(simd::load(x + i), inverse), simd::set1(0x1.8p23f)));
    uint32_t bits[GROUP];
    std::memcpy(bits, shifted, sizeof bits);
    for (int i = 0; i < GROUP; i += 4)
        for (int half = 0; half < 2; half++)
            words[i / 2 + half] = int32_t((bits[i + half] & 0xffff) | bits[i + half + 2] << 16);
}

inline void prepare_row(const Linear &w, const uint16_t *x, uint8_t *values, float *scales) {
    const auto *from = (const BFloat16 *)x;
    if (w.kind == INT8) {
        for (int64_t i = 0; i < w.inputs; i += GROUP)
            quantise_group(from + i, (int32_t *)values + i / 2, scales[i / GROUP]);
        return;
    }
    for (int64_t i = 0; i < w.inputs; i += simd::W) {
        const int n = int(std::min<int64_t>(simd::W, w.inputs - i));
        simd::store_up_to((float *)values + i, simd::load_up_to(from + i, n), n);
    }
}

}  // namespace twostroke
