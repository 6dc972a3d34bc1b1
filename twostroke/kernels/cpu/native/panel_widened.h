// Products of rows with one panel where no instruction multiplies bfloat16: both sides are widened to float32 lanes.
//
// int8 is multiplied as int16, two products to a word, which gives the same integers as the instructions for int8.

#pragma once

#include <algorithm>

#include "panel.h"
#include "simd.h"

namespace twostroke {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MOST_SUMS = 24;  // vectors, of the 32 registers
#else
constexpr int MOST_SUMS = 12;  // of 16
#endif
constexpr int64_t PASS_ROWS = MOST_SUMS / 2;
constexpr int PANEL_VECTORS = int(PANEL) / simd::W;

// The vectors of a panel that are summed at once for so many rows.
constexpr int vectors_of(int rows) {
    int vectors = PANEL_VECTORS;
    while (vectors > 1 && rows * vectors > MOST_SUMS) vectors /= 2;
    return vectors;
}

// Sums of R rows of float32 with V vectors of a panel from `weights` on, into sums [R][32].
template <int R, int V, bool IS_ONLY_PASS>
void multiply_floats(const char *weights, int64_t pairs, const float *x, int64_t x_stride, const Ahead &ahead,
                     float *sums) {
    simd::F sum[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) sum[r][v] = simd::zero();
    for (int64_t step = 0; step < pairs; step++) {
        const char *here = weights + step * 2 * LINE;
        bring(ahead, step, here, IS_ONLY_PASS);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            simd::F w[V];
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) {
                const simd::I pair = simd::load_words(here + v * simd::W * 4);
                w[v] = half ? simd::second_bfloat16(pair) : simd::first_bfloat16(pair);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const simd::F factor = simd::set1(x[r * x_stride + 2 * step + half]);
#pragma GCC unroll 16
                for (int v = 0; v < V; v++) sum[r][v] = simd::fma(w[v], factor, sum[r][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) simd::store(sums + r * PANEL + v * simd::W, sum[r][v]);
}

// The dots of one group of inputs. `x` has two words for four inputs: the first and third, the second and fourth.
template <int R, int V, bool IS_ONLY_PASS>
void multiply_group(const char *weights, int64_t first_step, const int32_t *x, int64_t x_stride, const Ahead &ahead,
                    simd::I (&dots)[R][V]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) dots[r][v] = simd::set1_word(0);
    for (int64_t step = first_step; step < first_step + GROUP / 4; step++) {
        const char *here = weights + step * 2 * LINE;
        bring(ahead, step, here, IS_ONLY_PASS);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            simd::I w[V];
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) {
                const simd::I four = simd::load_words(here + v * simd::W * 4);
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
}

// Exact within a group, float32 across groups. `scales` are the weights' from the first of the V vectors on.
template <int R, int V, bool IS_ONLY_PASS>
void multiply_int8(const char *weights, const float *scales, int64_t groups, const int32_t *x, const float *x_scales,
                   const Ahead &ahead, float *sums) {
    for (int r = 0; r < R; r++) std::fill(sums + r * PANEL, sums + r * PANEL + V * simd::W, 0.0f);
    for (int64_t group = 0; group < groups; group++) {
        simd::I dots[R][V];
        multiply_group<R, V, IS_ONLY_PASS>(weights, group * (GROUP / 4), x, groups * (GROUP / 2), ahead, dots);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const simd::F scale = simd::set1(x_scales[r * groups + group]);
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) {
                float *sum = sums + r * PANEL + v * simd::W;
                const simd::F by = simd::mul(scale, simd::load(scales + group * PANEL + v * simd::W));
                simd::store(sum, simd::fma(simd::to_floats(dots[r][v]), by, simd::load(sum)));
            }
        }
    }
}

template <int R, bool IS_ONLY_PASS>
void multiply(const Linear &w, int64_t panel, const Rows &, const Prepared &prepared, int64_t first, const Ahead &ahead,
              float *sums) {
    constexpr int V = vectors_of(R);
    const int64_t groups = w.inputs / GROUP, words = w.inputs / (w.kind == INT8 ? 4 : 2);
    const char *weights = (const char *)w.panels + panel * PANEL * 4 * words;
    for (int column = 0; column < PANEL; column += V * simd::W, weights += V * simd::W * 4) {
        const Ahead now = column ? Ahead{} : ahead;
        if (w.kind == BFLOAT16) {
            const float *x = (const float *)prepared.values.data() + first * w.inputs;
            multiply_floats<R, V, IS_ONLY_PASS>(weights, words, x, w.inputs, now, sums + column);
        } else {
            const int32_t *x = (const int32_t *)prepared.values.data() + first * (w.inputs / 2);
            const float *scales = w.scales + panel * groups * PANEL + column;
            multiply_int8<R, V, IS_ONLY_PASS>(weights, scales, groups, x, prepared.scales.data() + first * groups, now,
                                              sums + column);
        }
    }
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
    uint32_t rounded[GROUP];  // adding 1.5 * 2^23 rounds, and leaves the integer in the lowest bits
    for (int i = 0; i < GROUP; i += simd::W) {
        const simd::F shifted = simd::add(simd::mul(simd::load(x + i), inverse), simd::set1(0x1.8p23f));
        simd::store((float *)rounded + i, shifted);
    }
    for (int i = 0; i < GROUP; i += 4)
        for (int half = 0; half < 2; half++)
            words[i / 2 + half] = int32_t((rounded[i + half] & 0xffff) | rounded[i + half + 2] << 16);
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
