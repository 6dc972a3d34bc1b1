// Products of rows with one panel by the bfloat16 and int8 instructions of AVX-512.

#pragma once

#include <algorithm>

#include "rows_avx512.h"

namespace twostroke {

constexpr int64_t SPARE_ROWS = 0;  // no row past the last one is read
constexpr int64_t PASS_ROWS = 12;  // as many rows as registers hold sums for
constexpr bool HAS_FP8_PANELS = false;  // they are widened to bfloat16

struct TaskState {};  // tasks have no state

inline __m512i broadcast4(const void *at) {
    int32_t bits;
    std::memcpy(&bits, at, 4);
    return _mm512_set1_epi32(bits);
}

// Multiplies R rows with one panel, into sums [R][32].
template <int R, bool IS_ONLY_PASS>
void multiply_bfloat16(const Linear &w, int64_t panel, const uint16_t *x, int64_t x_stride, const Ahead &ahead, float *sums) {
    const char *weights = (const char *)w.panels + panel * PANEL * w.inputs * 2;
    __m512 low[R], high[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t step = 0; step < w.inputs / 2; step++) {
        const char *here = weights + step * 2 * LINE;
        const __m512bh left = (__m512bh)_mm512_loadu_si512(here);
        const __m512bh right = (__m512bh)_mm512_loadu_si512(here + LINE);
        bring(ahead, step, here, IS_ONLY_PASS);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const __m512bh pair = (__m512bh)broadcast4(x + r * x_stride + step * 2);
            low[r] = _mm512_dpbf16_ps(low[r], left, pair);
            high[r] = _mm512_dpbf16_ps(high[r], right, pair);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        _mm512_storeu_ps(sums + r * PANEL, low[r]);
        _mm512_storeu_ps(sums + r * PANEL + LANES, high[r]);
    }
}

// Assembly, because with the intrinsic GCC 12 copies every sum before it is added to.
inline void add_dots(__m512i &sum, __m512i x, __m512i w) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
}

// Does the same with int8 weights and activations: exact within a group, float32 across groups.
template <int R, bool IS_ONLY_PASS>
void multiply_int8(const Linear &w, int64_t panel, const uint8_t *x, const float *x_scales, const Ahead &ahead, float *sums) {
    const int64_t groups = w.inputs / GROUP;
    const char *weights = (const char *)w.panels + panel * PANEL * w.inputs;
    const float *scales = (const float *)w.scales + panel * groups * PANEL;
    const int32_t *starts = w.sums + panel * groups * PANEL;
    std::fill(sums, sums + R * PANEL, 0.0f);
    for (int64_t group = 0; group < groups; group++) {
        __m512i low[R], high[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            low[r] = _mm512_loadu_si512(starts + group * PANEL);
            high[r] = _mm512_loadu_si512(starts + group * PANEL + LANES);
        }
        for (int64_t step = group * (GROUP / 4); step < (group + 1) * (GROUP / 4); step++) {
            const char *here = weights + step * 2 * LINE;
            const __m512i left = _mm512_loadu_si512(here), right = _mm512_loadu_si512(here + LINE);
            bring(ahead, step, here, IS_ONLY_PASS);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const __m512i four = broadcast4(x + r * w.inputs + step * 4);
                add_dots(low[r], four, left);
                add_dots(high[r], four, right);
            }
        }
        const __m512 left_scale = _mm512_loadu_ps(scales + group * PANEL);
        const __m512 right_scale = _mm512_loadu_ps(scales + group * PANEL + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const __m512 scale = _mm512_set1_ps(x_scales[r * groups + group]);
            add_scaled(sums + r * PANEL, low[r], _mm512_mul_ps(scale, left_scale));
            add_scaled(sums + r * PANEL + LANES, high[r], _mm512_mul_ps(scale, right_scale));
        }
        asm volatile("" ::: "memory");  // keeps sums out of registers, since the dots need all of them
    }
}

template <int R, bool IS_ONLY_PASS>
void multiply_as(const Linear &w, int64_t panel, const Rows &rows, const Prepared &prepared, int64_t first,
                 const Ahead &ahead, float *sums) {
    if (w.kind == BFLOAT16) {
        const uint16_t *x = rows.x + first * rows.x_stride;
        return multiply_bfloat16<R, IS_ONLY_PASS>(w, panel, x, rows.x_stride, ahead, sums);
    }
    const uint8_t *x = prepared.values.data() + first * w.inputs;
    const float *scales = prepared.scales.data() + first * (w.inputs / GROUP);
    multiply_int8<R, IS_ONLY_PASS>(w, panel, x, scales, ahead, sums);
}

// As few passes as possible, but two where a single one would take longer than reading the panel from memory. The
// second one reads the panel from the cache, and has time to prefetch the next panel.
inline int64_t passes_of(int64_t rows) {
    return std::max((rows + PASS_ROWS - 1) / PASS_ROWS, int64_t(rows < 8 ? 1 : 2));
}

template <int R>
void multiply(const Linear &w, int64_t panel, const Rows &rows, const Prepared &prepared, int64_t first,
              const Pass &pass, float *sums) {
    const Ahead ahead = ahead_of(w, panel, pass);
    if (pass.count == 1) return multiply_as<R, true>(w, panel, rows, prepared, first, ahead, sums);
    multiply_as<R, false>(w, panel, rows, prepared, first, ahead, sums);
}

// Rows of bfloat16 need no preparation.
inline int64_t prepared_bytes(const Linear &w) { return w.kind == INT8 ? w.inputs : 0; }

inline void prepare_row(const Linear &w, const uint16_t *x, uint8_t *values, float *scales) {
    quantise_row(w.inputs, x, values, scales);
}

}  // namespace twostroke
