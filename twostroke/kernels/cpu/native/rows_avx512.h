// What panels of AVX-512 and of AMX have in common: prefetching, and int8 activations with their scales.

#pragma once

#include "linear.h"
#include "simd.h"

namespace twostroke {

constexpr int LANES = simd::W;
constexpr int64_t AHEAD = 8192;  // bytes that a single pass over a panel prefetches ahead
constexpr int64_t LINE = 64;

// The share of the next panel that one pass over this one prefetches: `lines` lines per step, while a step reads two.
struct Ahead {
    const char *next = nullptr;
    int64_t lines = 0;
};

inline int64_t panel_bytes(const Linear &w) { return PANEL * w.inputs * (w.kind == INT8 ? 1 : 2); }

// A single pass has no time to prefetch the next panel.
inline Ahead ahead_of(const Linear &w, int64_t panel, const Pass &pass) {
    if (pass.count == 1) return {};
    const int64_t steps = panel_bytes(w) / (2 * LINE);
    const int64_t done = 2 * pass.index / pass.count, due = 2 * (pass.index + 1) / pass.count;
    const char *next = (const char *)w.panels + (panel + 1) * panel_bytes(w) + done * steps * LINE;
    return {next, pass.has_next ? due - done : 0};
}

inline void bring(const Ahead &ahead, int64_t step, const char *here, bool is_only_pass) {
    if (is_only_pass) {
        __builtin_prefetch(here + AHEAD);
        __builtin_prefetch(here + AHEAD + LINE);
        return;
    }
    // GCC 12 removes a loop that has only __builtin_prefetch.
    for (int64_t line = 0; line < ahead.lines; line++)
        asm volatile("prefetcht1 %0" : : "m"(ahead.next[(step * ahead.lines + line) * LINE]));
}

inline void add_scaled(float *sum, __m512i dot, __m512 scale) {
    _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, _mm512_loadu_ps(sum)));
}

// int8 activations: x = (value - 128) * scale.
inline void quantise_row(int64_t inputs, const uint16_t *x, uint8_t *values, float *scales) {
    for (int64_t start = 0; start < inputs; start += GROUP) {
        __m512 lane[GROUP / LANES], peak = _mm512_setzero_ps();
        for (int i = 0; i < GROUP / LANES; i++) {
            lane[i] = simd::load((const BFloat16 *)x + start + i * LANES);
            peak = _mm512_max_ps(peak, _mm512_abs_ps(lane[i]));
        }
        const float scale = _mm512_reduce_max_ps(peak) / 127.0f;
        const __m512 inverse = _mm512_set1_ps(scale > 0 ? 1.0f / scale : 0.0f);
        for (int i = 0; i < GROUP / LANES; i++) {
            const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(lane[i], inverse));
            const __m512i shifted = _mm512_add_epi32(rounded, _mm512_set1_epi32(128));
            _mm_storeu_si128((__m128i *)(values + start + i * LANES), _mm512_cvtepi32_epi8(shifted));
        }
        scales[start / GROUP] = scale;
    }
}

}  // namespace twostroke
