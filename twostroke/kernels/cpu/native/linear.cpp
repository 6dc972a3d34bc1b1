#include "linear.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

#include <algorithm>

#include "vector.h"

namespace twostroke {
namespace {

constexpr int64_t CHUNK = 96;      // rows of a unit of work; a panel stays in the first cache meanwhile
constexpr int64_t AHEAD = 8192;    // bytes that a single pass over a panel is ahead of its reading
constexpr int64_t LINE = 64;
constexpr int64_t PASS_ROWS = 12;  // as many as registers hold sums for

// The share of the next panel that one pass over this one brings closer: `lines` per step, of which each reads two.
struct Ahead {
    const char *next = nullptr;
    int64_t lines = 0;
};

inline __m512i broadcast4(const void *at) {
    int32_t bits;
    std::memcpy(&bits, at, 4);
    return _mm512_set1_epi32(bits);
}

inline void bring(Ahead &ahead, int64_t step, const char *here, bool is_only_pass) {
    if (is_only_pass) {
        _mm_prefetch(here + AHEAD, _MM_HINT_T0);
        _mm_prefetch(here + AHEAD + LINE, _MM_HINT_T0);
        return;
    }
    for (int64_t line = 0; line < ahead.lines; line++) {
        _mm_prefetch(ahead.next + (step * ahead.lines + line) * LINE, _MM_HINT_T1);
    }
}

// Sums of R rows with one panel, into sums [R][32].
template <int R, bool IS_ONLY_PASS>
void multiply_bfloat16(const Linear &w, int64_t panel, const uint16_t *x, int64_t x_stride, Ahead ahead, float *sums) {
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

// The intrinsic of the same makes GCC 12 copy every sum before it is added to.
inline void add_dots(__m512i &sum, __m512i x, __m512i w) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
}

inline void add_scaled(float *sum, __m512i dot, __m512 scale) {
    _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, _mm512_loadu_ps(sum)));
}

// The same with int8 weights and activations: exact within a group, float32 across groups.
template <int R, bool IS_ONLY_PASS>
void multiply_int8(const Linear &w, int64_t panel, const uint8_t *x, const float *x_scales, Ahead ahead, float *sums) {
    const int64_t groups = w.inputs / GROUP;
    const char *weights = (const char *)w.panels + panel * PANEL * w.inputs;
    const float *scales = w.scales + panel * groups * PANEL;
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
        asm volatile("" ::: "memory");  // keeps sums out of registers, which are all wanted for the dots
    }
}

// As few as there can be, but two where one would be longer than bringing the panel from memory: a second one's reads
// are from the cache, and it has time to bring the next panel.
int64_t passes_of(int64_t rows) { return std::max((rows + PASS_ROWS - 1) / PASS_ROWS, int64_t(rows < 8 ? 1 : 2)); }

template <int R>
void multiply(const Linear &w, int64_t panel, const Rows &rows, const Quantised &q, int64_t first, Ahead ahead,
              bool is_only_pass, float *sums) {
    if (w.kind == BFLOAT16) {
        const uint16_t *x = rows.x + first * rows.x_stride;
        if (is_only_pass) return multiply_bfloat16<R, true>(w, panel, x, rows.x_stride, ahead, sums);
        return multiply_bfloat16<R, false>(w, panel, x, rows.x_stride, ahead, sums);
    }
    const uint8_t *x = q.values.data() + first * w.inputs;
    const float *scales = q.scales.data() + first * (w.inputs / GROUP);
    if (is_only_pass) return multiply_int8<R, true>(w, panel, x, scales, ahead, sums);
    multiply_int8<R, false>(w, panel, x, scales, ahead, sums);
}

void multiply_any(const Linear &w, int64_t panel, const Rows &rows, const Quantised &q, int64_t first, int64_t count,
                  Ahead ahead, bool is_only_pass, float *sums) {
    switch (count) {
#define TWOSTROKE_ROWS(R) \
    case R: return multiply<R>(w, panel, rows, q, first, ahead, is_only_pass, sums);
        TWOSTROKE_ROWS(1) TWOSTROKE_ROWS(2) TWOSTROKE_ROWS(3) TWOSTROKE_ROWS(4)
        TWOSTROKE_ROWS(5) TWOSTROKE_ROWS(6) TWOSTROKE_ROWS(7) TWOSTROKE_ROWS(8)
        TWOSTROKE_ROWS(9) TWOSTROKE_ROWS(10) TWOSTROKE_ROWS(11) TWOSTROKE_ROWS(12)
#undef TWOSTROKE_ROWS
    }
}

void put(void *y, int64_t at, __m512 sum, __mmask16 mask, Into into) {
    switch (into) {
        case Into::BFLOAT16: return store_bfloat16((uint16_t *)y + at, sum, mask);
        case Into::FLOAT32: return _mm512_mask_storeu_ps((float *)y + at, mask, sum);
        case Into::ADD:
            sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, (float *)y + at));
            return _mm512_mask_storeu_ps((float *)y + at, mask, sum);
    }
}

// From sums [count][32] of a panel to where they belong.
void finish(const Linear &w, int64_t panel, const Rows &rows, int64_t first, int64_t count, Into into,
            const float *sums) {
    __m512 low_bias = _mm512_setzero_ps(), high_bias = low_bias;
    if (w.bias) {
        low_bias = _mm512_loadu_ps(w.bias + panel * PANEL);
        high_bias = _mm512_loadu_ps(w.bias + panel * PANEL + LANES);
    }
    const int64_t output = panel * (w.is_gated ? LANES : PANEL);
    const __mmask16 low_mask = lanes(w.outputs - output), high_mask = lanes(w.outputs - output - LANES);
    for (int64_t r = 0; r < count; r++) {
        const __m512 low = _mm512_add_ps(_mm512_loadu_ps(sums + r * PANEL), low_bias);
        const __m512 high = _mm512_add_ps(_mm512_loadu_ps(sums + r * PANEL + LANES), high_bias);
        const int64_t at = (first + r) * rows.y_stride + output;
        if (w.is_gated) {
            put(rows.y, at, _mm512_mul_ps(silu(low), high), low_mask, into);
        } else {
            put(rows.y, at, low, low_mask, into);
            put(rows.y, at + LANES, high, high_mask, into);
        }
    }
}

// Rows first .. end with one panel, in passes of nearly equal size, which together bring the next panel closer.
void unit(const Linear &w, int64_t panel, const Rows &rows, const Quantised &q, int64_t first, int64_t end, Into into,
          bool has_next) {
    alignas(64) float sums[PASS_ROWS * PANEL];
    const int64_t panel_bytes = PANEL * w.inputs * (w.kind == INT8 ? 1 : 2);
    const int64_t steps = panel_bytes / (2 * LINE);
    const char *next = (const char *)w.panels + (panel + 1) * panel_bytes;
    const int64_t passes = passes_of(end - first);
    for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t from = first + (end - first) * pass / passes, to = first + (end - first) * (pass + 1) / passes;
        const int64_t done = 2 * pass / passes, due = 2 * (pass + 1) / passes;
        const Ahead ahead{next + done * steps * LINE, has_next ? due - done : 0};
        multiply_any(w, panel, rows, q, from, to - from, ahead, passes == 1, sums);
        finish(w, panel, rows, from, to - from, into, sums);
    }
}

void quantise_row(const uint16_t *x, int64_t inputs, uint8_t *values, float *scales) {
    for (int64_t start = 0; start < inputs; start += GROUP) {
        __m512 lane[GROUP / LANES], peak = _mm512_setzero_ps();
        for (int i = 0; i < GROUP / LANES; i++) {
            lane[i] = load_bfloat16(x + start + i * LANES);
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

void quantise(Team *team, const Linear &w, const Rows &rows, Quantised &q) {
    const int64_t groups = w.inputs / GROUP;
    q.values.resize(std::max(q.values.size(), size_t(rows.count * w.inputs)));
    q.scales.resize(std::max(q.scales.size(), size_t(rows.count * groups)));
    auto part_of = [&](int part, int parts) {
        for (int64_t r = rows.count * part / parts; r < rows.count * (part + 1) / parts; r++) {
            quantise_row(rows.x + r * rows.x_stride, w.inputs, q.values.data() + r * w.inputs,
                         q.scales.data() + r * groups);
        }
    };
    if (rows.count < 8) return part_of(0, 1);
    run_parts(team, part_of);
}

}  // namespace

void linear(Team *team, const Linear &w, const Rows &rows, Into into, Quantised &scratch) {
    if (w.kind == INT8) quantise(team, w, rows, scratch);
    const int64_t width = w.is_gated ? LANES : PANEL;
    const int64_t panels = (w.outputs + width - 1) / width, chunks = (rows.count + CHUNK - 1) / CHUNK;
    run_parts(team, [&](int part, int parts) {
        const int64_t end = panels * chunks * (part + 1) / parts;
        for (int64_t u = panels * chunks * part / parts; u < end; u++) {
            const int64_t panel = u / chunks, chunk = u % chunks;
            const int64_t first = rows.count * chunk / chunks, last = rows.count * (chunk + 1) / chunks;
            unit(w, panel, rows, scratch, first, last, into, chunk == chunks - 1 && u + 1 < end);
        }
    });
}

}  // namespace twostroke

using namespace twostroke;

TWOSTROKE_EXPORT int32_t twostroke_linear_is_supported() {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

TWOSTROKE_EXPORT void twostroke_linear(Team *team, const Linear *w, const void *x, int64_t x_stride, int64_t rows,
                                       void *y, int64_t y_stride, int32_t into) {
    Quantised scratch;
    linear(team, *w, {(const uint16_t *)x, x_stride, rows, y, y_stride}, Into(into), scratch);
}

#else

TWOSTROKE_EXPORT int32_t twostroke_linear_is_supported() { return 0; }

#endif
