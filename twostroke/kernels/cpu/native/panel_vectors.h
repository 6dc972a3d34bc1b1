// Products of rows with one panel by the vectors of `simd.h`, for every width.
//
// Where no instruction multiplies bfloat16, both sides are widened to float32 lanes. Where none multiplies int8, it is
// multiplied as int16, two products to a word, which gives the same integers.

#pragma once

#include <algorithm>

#include "linear.h"
#include "panel_fp8.h"
#include "simd.h"

namespace twostroke {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MOST_SUMS = 24;  // vectors of sums, out of 32 registers
#else
constexpr int MOST_SUMS = 12;  // out of 16
#endif
constexpr int64_t PASS_ROWS = MOST_SUMS / 2;
constexpr int64_t SPARE_ROWS = 0;          // no row past the last one is read
constexpr int64_t STEP_BYTES = PANEL * 4;  // bytes of a panel in a step: one word for each output
constexpr int64_t AHEAD = 8192;            // bytes that the first pass over a panel prefetches ahead

#if defined(SIMD_HAS_PAIRS)
constexpr bool HAS_FP8_PANELS = false;  // they are widened to bfloat16
#else
constexpr bool HAS_FP8_PANELS = true;
#endif

struct TaskState {};  // tasks have no state

// The number of a panel's vectors that are summed side by side. For a few rows these are all vectors, because fewer
// sums would wait for each other; for more rows, as many as leave registers for every row.
constexpr int vectors_of(int rows) {
    int vectors = int(PANEL) / simd::W;
    while (vectors > 2 && rows * vectors > MOST_SUMS - 4) vectors /= 2;
    return vectors;
}

inline int64_t passes_of(int64_t rows) { return (rows + PASS_ROWS - 1) / PASS_ROWS; }

inline void bring(const char *here) {
    for (int64_t at = 0; at < STEP_BYTES; at += 64) __builtin_prefetch(here + AHEAD + at);
}

// One word of weights is two bfloat16 or four int8. It is multiplied in parts, each of which adds to all sums.
#if defined(SIMD_HAS_PAIRS)
struct BFloat16Parts {
    using Input = int32_t;  // a pair of bfloat16
    static constexpr int COUNT = 1;
    static simd::F weight(simd::I words, int) { return simd::as_floats(words); }
    static simd::F factor(Input pair) { return simd::as_floats(simd::set1_word(pair)); }
    static void add(simd::F &sum, simd::F w, simd::F x) { sum = simd::fma_pairs(w, x, sum); }
};
#else
struct BFloat16Parts {
    using Input = float;
    static constexpr int COUNT = 2;
    static simd::F weight(simd::I words, int part) {
        return part ? simd::second_bfloat16(words) : simd::first_bfloat16(words);
    }
    static simd::F factor(Input x) { return simd::set1(x); }
    static void add(simd::F &sum, simd::F w, simd::F x) { simd::add_product(sum, w, x); }
};
#endif

// The inputs of a word of weights become `COUNT` words. As int16, one word has the first and the third input, the next
// the second and the fourth.
#if defined(SIMD_HAS_DOTS)
struct Int8Parts {
    static constexpr int COUNT = 1;
    static simd::I weight(simd::I words, int) { return words; }
    static simd::I add(simd::I sum, simd::I w, simd::I x) { return simd::add_dots(sum, w, x); }
    static void store(const uint32_t *four, int32_t *words) {
        words[0] = int32_t((four[0] & 255) | (four[1] & 255) << 8 | (four[2] & 255) << 16 | four[3] << 24);
    }
};
#else
struct Int8Parts {
    static constexpr int COUNT = 2;
    static simd::I weight(simd::I words, int part) { return part ? simd::odd_int8(words) : simd::even_int8(words); }
    static simd::I add(simd::I sum, simd::I w, simd::I x) { return simd::add_products(sum, w, x); }
    static void store(const uint32_t *four, int32_t *words) {
        words[0] = int32_t((four[0] & 0xffff) | four[2] << 16);
        words[1] = int32_t((four[1] & 0xffff) | four[3] << 16);
    }
};
#endif

// Multiplies R rows with V vectors of a panel from `weights` on, into sums [R][32].
template <int R, int V, bool IS_FIRST_PASS>
void multiply_bfloat16(const char *weights, int64_t steps, const BFloat16Parts::Input *x, float *to) {
    constexpr int PARTS = BFloat16Parts::COUNT;
    const int64_t x_stride = PARTS * steps;
    simd::F sums[R][V];
#pragma GCC unroll 32
    for (int i = 0; i < R * V; i++) sums[i / V][i % V] = simd::zero();
    for (int64_t step = 0; step < steps; step++) {
        if (IS_FIRST_PASS) bring(weights + step * STEP_BYTES);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            simd::F w[V];
#pragma GCC unroll 16
            for (int v = 0; v < V; v++)
                w[v] = BFloat16Parts::weight(simd::load_words(weights + step * STEP_BYTES + v * simd::W * 4), part);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const simd::F factor = BFloat16Parts::factor(x[r * x_stride + PARTS * step + part]);
#pragma GCC unroll 16
                for (int v = 0; v < V; v++) BFloat16Parts::add(sums[r][v], w[v], factor);
            }
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < R * V; i++) simd::store(to + i / V * PANEL + i % V * simd::W, sums[i / V][i % V]);
}

// Does the same with int8 weights and activations: exact within a group, float32 across groups. `scales` are those of
// the weights from `weights` on.
template <int R, int V, bool IS_FIRST_PASS>
void multiply_int8(const char *weights, const float *scales, int64_t groups, const int32_t *x, const float *x_scales,
                   float *to) {
    constexpr int64_t GROUP_STEPS = GROUP / 4, PARTS = Int8Parts::COUNT;
    const int64_t steps = groups * GROUP_STEPS, x_stride = PARTS * steps;
    for (int r = 0; r < R; r++) std::fill(to + r * PANEL, to + r * PANEL + V * simd::W, 0.0f);
    for (int64_t group = 0; group < groups; group++) {
        simd::I dots[R][V];
#pragma GCC unroll 32
        for (int i = 0; i < R * V; i++) dots[i / V][i % V] = simd::set1_word(0);
        for (int64_t step = group * GROUP_STEPS; step < (group + 1) * GROUP_STEPS; step++) {
            if (IS_FIRST_PASS) bring(weights + step * STEP_BYTES);
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) {
                simd::I w[V];
#pragma GCC unroll 16
                for (int v = 0; v < V; v++)
                    w[v] = Int8Parts::weight(simd::load_words(weights + step * STEP_BYTES + v * simd::W * 4), part);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const simd::I inputs = simd::set1_word(x[r * x_stride + PARTS * step + part]);
#pragma GCC unroll 16
                    for (int v = 0; v < V; v++) dots[r][v] = Int8Parts::add(dots[r][v], w[v], inputs);
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

// The bytes of a row's inputs in the form in which they are multiplied.
inline int64_t prepared_bytes(const Linear &w) {
    if (w.kind == INT8) return w.inputs / 4 * Int8Parts::COUNT * 4;
    return w.inputs / 2 * BFloat16Parts::COUNT * 4;
}

template <int R, bool IS_FIRST_PASS>
void multiply_as(const Linear &w, int64_t panel, const Prepared &prepared, int64_t first, float *sums) {
    constexpr int V = vectors_of(R), COLUMNS = V * simd::W;
    const int64_t groups = w.inputs / GROUP, steps = w.inputs / (w.kind == BFLOAT16 ? 2 : 4);
    const char *weights = (const char *)w.panels + panel * steps * STEP_BYTES;
    for (int column = 0; column < PANEL; column += COLUMNS, weights += COLUMNS * 4, sums += COLUMNS) {
        const uint8_t *x = prepared.values.data() + first * prepared_bytes(w);
        if (w.kind == BFLOAT16) {
            multiply_bfloat16<R, V, IS_FIRST_PASS>(weights, steps, (const BFloat16Parts::Input *)x, sums);
        } else if (HAS_FP8_PANELS && w.kind == FP8) {
            multiply_fp8<R, V, IS_FIRST_PASS>(w, panel, column, (const float *)x, sums,
                                              [](const char *here) { bring(here); });
        } else {
            const float *x_scales = prepared.scales.data() + first * groups;
            const float *scales = (const float *)w.scales + panel * groups * PANEL + column;
            multiply_int8<R, V, IS_FIRST_PASS>(weights, scales, groups, (const int32_t *)x, x_scales, sums);
        }
    }
}

template <int R>
void multiply(const Linear &w, int64_t panel, const Rows &, const Prepared &prepared, int64_t first, const Pass &pass,
              float *sums) {
    if (pass.index == 0) return multiply_as<R, true>(w, panel, prepared, first, sums);
    multiply_as<R, false>(w, panel, prepared, first, sums);
}

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
    for (int i = 0; i < GROUP; i += 4) Int8Parts::store(bits + i, words + i / 4 * Int8Parts::COUNT);
}

inline void prepare_row(const Linear &w, const uint16_t *x, uint8_t *values, float *scales) {
    const auto *from = (const BFloat16 *)x;
    if (w.kind == INT8) {
        for (int64_t i = 0; i < w.inputs; i += GROUP)
            quantise_group(from + i, (int32_t *)values + i / 4 * Int8Parts::COUNT, scales[i / GROUP]);
        return;
    }
#if defined(SIMD_HAS_PAIRS)
    std::memcpy(values, x, size_t(w.inputs) * 2);
#else
    const simd::F factor = simd::set1(w.kind == FP8 ? FP8_HALF_WAY : 1.0f);
    for (int64_t i = 0; i < w.inputs; i += simd::W) {
        const int n = int(std::min<int64_t>(simd::W, w.inputs - i));
        simd::store_up_to((float *)values + i, simd::mul(simd::load_up_to(from + i, n), factor), n);
    }
#endif
}

}  // namespace twostroke
