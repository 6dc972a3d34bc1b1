// Products of rows with one panel by the tiles of AMX.
//
// A panel is stored in the order in which tiles are read: 16 lines of 32 inputs (64 of int8) are two tiles of 16
// outputs. Tiles multiply every number of rows. Intel's manual and its guide to intrinsics disagree on the order in
// which `tdpbf16ps` adds up (even and odd inputs separately, or pair by pair), and neither order is that of
// `vdpbf16ps`. Yet a tile's row does not depend on other rows. So a row has the same bits in every batch only if tiles
// make all of its sums.

#pragma once

#include <algorithm>

#include "rows_avx512.h"

namespace twostroke {

constexpr int64_t TILE = 16;              // rows of a tile, each of 64 bytes
constexpr int64_t PASS_ROWS = 2 * TILE;   // with a panel's two halves: four tiles of sums, and four of factors
constexpr bool HAS_FP8_PANELS = false;  // they are widened to bfloat16
constexpr int64_t SPARE_ROWS = TILE - 1;   // rows that the last tile reads past the last one; their sums are dropped

// Every tile is whole: rows and inputs are padded.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline constexpr TileShapes TILE_SHAPES;

// A thread configures tiles for one task only, since the system saves them whenever it stops the thread.
struct TaskState {
    TaskState() { _tile_loadconfig(&TILE_SHAPES); }
    ~TaskState() { _tile_release(); }
    TaskState(const TaskState &) = delete;
    TaskState &operator=(const TaskState &) = delete;
};

inline void bring_tiles(const Ahead &ahead, int64_t step, const char *here, bool is_only_pass) {
    for (int64_t line = 0; line < TILE; line++) {
        if (!is_only_pass) {
            bring(ahead, step + line, here, false);
            continue;
        }
        const char *later = here + AHEAD + line * 2 * LINE;  // not by __builtin_prefetch: see `bring`
        asm volatile("prefetcht0 %0" : : "m"(later[0]));
        asm volatile("prefetcht0 %0" : : "m"(later[LINE]));
    }
}

// tmm0 and tmm1 are the sums of the first rows with both halves, tmm2 and tmm3 those of the next rows.
template <bool HAS_TWO>
void add_bfloat16(const char *weights, const uint8_t *x, int64_t x_bytes) {
    _tile_loadd(4, x, x_bytes);
    _tile_loadd(6, weights, 2 * LINE);
    _tile_loadd(7, weights + LINE, 2 * LINE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (HAS_TWO) {
        _tile_loadd(5, x + TILE * x_bytes, x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

template <bool HAS_TWO>
void store_tiles(void *sums) {
    constexpr int64_t ROW = PANEL * 4, HALF = ROW / 2;
    char *to = (char *)sums;
    _tile_stored(0, to, ROW);
    _tile_stored(1, to + HALF, ROW);
    if (HAS_TWO) {
        _tile_stored(2, to + TILE * ROW, ROW);
        _tile_stored(3, to + TILE * ROW + HALF, ROW);
    }
}

// Multiplies one or two tiles of rows with one panel, into sums [32][32].
template <bool HAS_TWO>
void multiply_bfloat16(const Linear &w, int64_t panel, const uint8_t *x, int64_t x_bytes, const Ahead &ahead,
                       bool is_only_pass, float *sums) {
    const char *weights = (const char *)w.panels + panel * panel_bytes(w);
    const int64_t steps = w.inputs / 2, whole = steps / TILE * TILE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < whole; step += TILE) {
        const char *here = weights + step * 2 * LINE;
        bring_tiles(ahead, step, here, is_only_pass);
        add_bfloat16<HAS_TWO>(here, x + step * 4, x_bytes);
    }
    if (whole < steps) {
        alignas(64) char rest[TILE * 2 * LINE] = {};  // what follows in memory may be NaN
        std::memcpy(rest, weights + whole * 2 * LINE, size_t((steps - whole) * 2 * LINE));
        asm volatile("" ::: "memory");  // the compiler does not know that tiles read it
        add_bfloat16<HAS_TWO>(rest, x + whole * 4, x_bytes);
    }
    store_tiles<HAS_TWO>(sums);
}

// Does the same with int8 weights and activations. A group is one tile, with exact sums; groups are added in float32,
// as by AVX-512.
template <bool HAS_TWO>
void multiply_int8(const Linear &w, int64_t panel, const uint8_t *x, const float *x_scales, int64_t rows,
                   const Ahead &ahead, bool is_only_pass, float *sums) {
    const int64_t groups = w.inputs / GROUP;
    const char *weights = (const char *)w.panels + panel * panel_bytes(w);
    alignas(64) int32_t dots[PASS_ROWS * PANEL];
    std::fill(sums, sums + rows * PANEL, 0.0f);
    for (int64_t group = 0; group < groups; group++) {
        const char *here = weights + group * TILE * 2 * LINE;
        const int64_t facts = (panel * groups + group) * PANEL;
        bring_tiles(ahead, group * TILE, here, is_only_pass);
        _tile_loadd(0, w.sums + facts, 0);  // every row starts with the same sums
        _tile_loadd(1, w.sums + facts + LANES, 0);
        _tile_loadd(4, x + group * GROUP, w.inputs);
        _tile_loadd(6, here, 2 * LINE);
        _tile_loadd(7, here + LINE, 2 * LINE);
        if (HAS_TWO) {
            _tile_loadd(2, w.sums + facts, 0);
            _tile_loadd(3, w.sums + facts + LANES, 0);
            _tile_loadd(5, x + TILE * w.inputs + group * GROUP, w.inputs);
        }
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        if (HAS_TWO) {
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
        store_tiles<HAS_TWO>(dots);
        const __m512 left = _mm512_loadu_ps((const float *)w.scales + facts), right = _mm512_loadu_ps((const float *)w.scales + facts + LANES);
        for (int64_t r = 0; r < rows; r++) {
            const __m512 scale = _mm512_set1_ps(x_scales[r * groups + group]);
            const int32_t *dot = dots + r * PANEL;
            add_scaled(sums + r * PANEL, _mm512_loadu_si512(dot), _mm512_mul_ps(scale, left));
            add_scaled(sums + r * PANEL + LANES, _mm512_loadu_si512(dot + LANES), _mm512_mul_ps(scale, right));
        }
    }
}

// Rows of bfloat16 are padded with zeros to whole tiles.
inline int64_t prepared_bytes(const Linear &w) {
    return w.kind == INT8 ? w.inputs : (w.inputs * 2 + LINE - 1) / LINE * LINE;
}

inline void prepare_row(const Linear &w, const uint16_t *x, uint8_t *values, float *scales) {
    if (w.kind == INT8) return quantise_row(w.inputs, x, values, scales);
    std::memcpy(values, x, size_t(w.inputs) * 2);
    std::memset(values + w.inputs * 2, 0, size_t(prepared_bytes(w) - w.inputs * 2));
}

inline int64_t passes_of(int64_t rows) { return (rows + PASS_ROWS - 1) / PASS_ROWS; }

template <int R>
void multiply(const Linear &w, int64_t panel, const Rows &, const Prepared &prepared, int64_t first, const Pass &pass,
              float *sums) {
    constexpr bool HAS_TWO = R > TILE;
    const Ahead ahead = ahead_of(w, panel, pass);
    const uint8_t *x = prepared.values.data() + first * prepared_bytes(w);
    asm volatile("" ::: "memory");  // prepared rows are in memory before tiles read them
    if (w.kind == INT8) {
        const float *scales = prepared.scales.data() + first * (w.inputs / GROUP);
        return multiply_int8<HAS_TWO>(w, panel, x, scales, R, ahead, pass.count == 1, sums);
    }
    multiply_bfloat16<HAS_TWO>(w, panel, x, prepared_bytes(w), ahead, pass.count == 1, sums);
}

}  // namespace twostroke
