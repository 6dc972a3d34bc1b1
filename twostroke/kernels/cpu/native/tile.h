// One tile of keys and values, brought into the order in which products run, and the products themselves.
//
// A product multiplies rows of words by a panel [words, lanes]. A word is what one multiply-add takes from a row: a
// float, or on machines that multiply bfloat16 themselves, a pair of those. Every row is summed in the same order,
// however many rows a product has: a token's result depends on nothing else in the batch.

#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace twostroke {

constexpr int TILE = 128;  // tokens
constexpr int GROUP = std::max(16, 2 * simd::W);  // tokens that a partly filled tile is rounded up to
constexpr int MAX_ROWS = 6, MAX_VECTORS = simd::W == 16 ? 4 : 2;  // of a product, by the registers there are
static_assert(GROUP % simd::W == 0 && TILE % GROUP == 0, "groups are whole vectors, tiles whole groups");

// Where the tokens of a tile lie: offsets into the pool for the layer's first kv head.
struct Tile {
    int count;
    int64_t offsets[TILE];
};

// Everything as floats.
template <class T>
struct FloatMath {
    static constexpr int PER_WORD = 1;

    static simd::F load_words(const T *row, int at, int n) {
        return simd::load_up_to(row + at, n);
    }

    static void pack_value_rows(const T *const *rows, int at, int n, float *panel, int) {
        simd::store(panel, load_words(rows[0], at, n));
    }

    static simd::F multiply_add(simd::F a, simd::F b, simd::F sum) { return simd::fma(a, b, sum); }

    static simd::F exp2(simd::F x) { return simd::exp2_of_negative(x); }

    static void store_weights(float *words, int column, simd::F low, simd::F high) {
        simd::store(words + column, low);
        simd::store(words + column + simd::W, high);
    }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16, summed as floats.
struct PairMath {
    static constexpr int PER_WORD = 2;

    static simd::F load_words(const BFloat16 *row, int at, int n) {
        return simd::load_up_to((const float *)row + at, n);
    }

    static void pack_value_rows(const BFloat16 *const *rows, int at, int n, float *panel, int lanes_left) {
        simd::F low, high;
        simd::interleave(simd::load_halves(rows[0] + at, n), simd::load_halves(rows[1] + at, n), low, high);
        simd::store(panel, low);
        if (lanes_left > simd::W) simd::store(panel + simd::W, high);
    }

    static simd::F multiply_add(simd::F a, simd::F b, simd::F sum) { return simd::fma_pairs(a, b, sum); }

    static simd::F exp2(simd::F x) { return simd::rough_exp2_of_negative(x); }

    static void store_weights(float *words, int column, simd::F low, simd::F high) {
        simd::store_narrow(words + column / 2, low, high);
    }
};
#endif

inline int rounded_up(int64_t n, int64_t step) { return int((n + step - 1) / step * step); }

// Keys of one head as [words of a row, TILE tokens], whole groups of tokens; those past the tile's count are zero.
// Rows of the tile that comes next are fetched meanwhile.
template <class Math, class T>
void pack_keys(const T *pool, const Tile &tile, int words, const T *next_pool, const Tile &next, int row_bytes,
               float *panel) {
    for (int first = 0; first < tile.count; first += simd::W) {
        for (int t = first; t < std::min(first + simd::W, next.count); t++)
            for (int at = 0; at < row_bytes; at += 64)
                __builtin_prefetch((const char *)(next_pool + next.offsets[t]) + at);
        for (int at = 0; at < words; at += simd::W) {
            const int n = std::min(simd::W, words - at);
            simd::F rows[simd::W];
            for (int t = 0; t < simd::W; t++)
                rows[t] = first + t < tile.count ? Math::load_words(pool + tile.offsets[first + t], at, n)
                                                 : simd::zero();
            simd::transpose(rows);
            for (int w = 0; w < n; w++) simd::store(panel + (at + w) * TILE + first, rows[w]);
        }
    }
    for (int first = rounded_up(tile.count, simd::W); first < rounded_up(tile.count, GROUP); first += simd::W)
        for (int w = 0; w < words; w++) simd::store(panel + w * TILE + first, simd::zero());
}

// Values of one head as [words of a column of the tile, lanes]; those past the tile's count are zero.
template <class Math, class T>
void pack_values(const T *pool, const Tile &tile, int dim, int lanes, const T *zeros, const T *next_pool,
                 const Tile &next, int row_bytes, float *panel) {
    for (int t = 0; t < rounded_up(tile.count, GROUP); t += Math::PER_WORD) {
        const T *rows[Math::PER_WORD];
        for (int i = 0; i < Math::PER_WORD; i++) {
            rows[i] = t + i < tile.count ? pool + tile.offsets[t + i] : zeros;
            if (t + i < next.count)
                for (int at = 0; at < row_bytes; at += 64)
                    __builtin_prefetch((const char *)(next_pool + next.offsets[t + i]) + at);
        }
        constexpr int STEP = simd::W * Math::PER_WORD;
        for (int at = 0; at < lanes; at += STEP)
            Math::pack_value_rows(rows, at, std::min(STEP, dim - at), panel + at, lanes - at);
        panel += lanes;
    }
}

// c [ROWS, VECTORS * W] = c * shrink + a [ROWS, words] b [words, VECTORS * W]; without `shrink`, what c held is gone.
template <class Math, int ROWS, int VECTORS>
void multiply_block(const float *a, int a_stride, const float *b, int b_stride, int words, const float *shrink,
                    float *c, int c_stride) {
    simd::F sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = shrink ? simd::mul(simd::load(c + r * c_stride + v * simd::W), simd::set1(shrink[r]))
                                : simd::zero();
    for (int w = 0; w < words; w++) {
        simd::F panel[VECTORS];
        for (int v = 0; v < VECTORS; v++) panel[v] = simd::load(b + w * b_stride + v * simd::W);
        for (int r = 0; r < ROWS; r++) {
            const simd::F word = simd::set1(a[r * a_stride + w]);
            for (int v = 0; v < VECTORS; v++) sums[r][v] = Math::multiply_add(word, panel[v], sums[r][v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) simd::store(c + r * c_stride + v * simd::W, sums[r][v]);
}

template <class Math, int ROWS>
void multiply_rows(const float *a, int a_stride, const float *b, int b_stride, int words, const float *shrink, float *c,
                   int c_stride, int lanes) {
    int at = 0;
    for (; at + MAX_VECTORS * simd::W <= lanes; at += MAX_VECTORS * simd::W)
        multiply_block<Math, ROWS, MAX_VECTORS>(a, a_stride, b + at, b_stride, words, shrink, c + at, c_stride);
    if (MAX_VECTORS > 2 && at + 2 * simd::W <= lanes) {
        multiply_block<Math, ROWS, 2>(a, a_stride, b + at, b_stride, words, shrink, c + at, c_stride);
        at += 2 * simd::W;
    }
    if (at < lanes) multiply_block<Math, ROWS, 1>(a, a_stride, b + at, b_stride, words, shrink, c + at, c_stride);
}

// For 1 to MAX_ROWS rows; `lanes` is a whole number of vectors.
template <class Math>
void multiply(int rows, const float *a, int a_stride, const float *b, int b_stride, int words, const float *shrink,
              float *c, int c_stride, int lanes) {
    switch (rows) {
        case 1: return multiply_rows<Math, 1>(a, a_stride, b, b_stride, words, shrink, c, c_stride, lanes);
        case 2: return multiply_rows<Math, 2>(a, a_stride, b, b_stride, words, shrink, c, c_stride, lanes);
        case 3: return multiply_rows<Math, 3>(a, a_stride, b, b_stride, words, shrink, c, c_stride, lanes);
        case 4: return multiply_rows<Math, 4>(a, a_stride, b, b_stride, words, shrink, c, c_stride, lanes);
        case 5: return multiply_rows<Math, 5>(a, a_stride, b, b_stride, words, shrink, c, c_stride, lanes);
        case 6: return multiply_rows<Math, 6>(a, a_stride, b, b_stride, words, shrink, c, c_stride, lanes);
    }
}

}  // namespace twostroke
