// Products of rows with tokens' latents, read in place from pages.
//
// Numbers are multiplied a unit at a time, which is two vectors of sums. `Latents` defines how, and the order of a
// unit's numbers in queries and in sums. Every row is summed in the same order, however many rows and tokens a product
// has.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "page.h"
#include "rows.h"

namespace twostroke {

constexpr int UNIT = 2 * simd::W;
constexpr int TILE_TOKENS = simd::W == 16 ? 4 : 2;  // tokens of a product with MAX_ROWS rows, limited by registers
constexpr int TILE_UNITS = simd::W == 16 ? 2 : 1;   // units of a sum with MAX_ROWS rows

// Returns sum + a * b. It takes and returns values, so that the compiler keeps sums and factors in registers.
inline simd::F sum_with(simd::F sum, simd::F a, simd::F b) {
    simd::add_product(sum, a, b);
    return sum;
}

// One half of a unit as floats: the even or odd numbers of bfloat16, the first or last ones of other types.
template <int HALF, class T>
inline simd::F load_half(const T *unit) {
    if constexpr (std::is_same_v<T, BFloat16>) {
        const simd::I words = simd::load_words(unit);
        return HALF ? simd::second_bfloat16(words) : simd::first_bfloat16(words);
    } else {
        return simd::load(unit + HALF * simd::W);
    }
}

// Multiplies everything as floats.
template <class T>
struct FloatLatents {
    using Element = T;
    using Weights = FloatMath<float>;  // makes weights of scores
    static constexpr int KEY_PARTS = 2;  // parts of a unit, each of which adds to all sums
    static constexpr int TOKENS = 1;     // tokens of one multiply-add of values

    // The position of number `i` of a unit in queries and sums.
    static constexpr int place(int i) {
        return std::is_same_v<T, BFloat16> ? i % 2 * simd::W + i / 2 : i;
    }
    static void put_query(const float *numbers, float *unit) {
        for (int i = 0; i < UNIT; i++) unit[place(i)] = numbers[i];
    }
    template <int PART>
    static simd::F key(const T *unit) {
        return load_half<PART>(unit);
    }
    template <int HALF>
    static simd::F values(const T *const *tokens, int64_t at) {
        return load_half<HALF>(tokens[0] + at);
    }
    static simd::F weight(const float *weights, int token) { return simd::set1(weights[token]); }
    static simd::F multiply_add(simd::F a, simd::F b, simd::F sum) { return sum_with(sum, a, b); }
};

#if defined(__AVX512BF16__)
// Multiplies pairs of bfloat16 and sums floats: pairs of neighbours in a key, and of two tokens' values.
struct PairLatents {
    using Element = BFloat16;
    using Weights = PairMath;
    static constexpr int KEY_PARTS = 1, TOKENS = 2;

    static constexpr int place(int i) { return i % 8 / 4 * simd::W + i / 8 * 4 + i % 4; }
    static void put_query(const float *numbers, float *unit) {
        simd::store_narrow(unit, simd::load(numbers), simd::load(numbers + simd::W));
    }
    template <int>
    static simd::F key(const BFloat16 *unit) {
        return simd::as_floats(simd::load_words(unit));
    }
    template <int HALF>
    static simd::F values(const BFloat16 *const *tokens, int64_t at) {
        return simd::interleaved<HALF>(simd::load_words(tokens[0] + at), simd::load_words(tokens[1] + at));
    }
    static simd::F weight(const float *weights, int token) { return simd::set1(weights[token / 2]); }
    static simd::F multiply_add(simd::F a, simd::F b, simd::F sum) { return simd::fma_pairs(a, b, sum); }
};
#endif

// The first `count` numbers of a unit of some tokens, followed by zeros.
template <class T, int TOKENS>
struct PartialUnits {
    T numbers[TOKENS][UNIT];
    const T *rows[TOKENS];

    PartialUnits(const T *const *tokens, int64_t at, int64_t count) {
        std::memset(numbers, 0, sizeof numbers);
        for (int t = 0; t < TOKENS; t++) {
            std::memcpy(numbers[t], tokens[t] + at, size_t(count) * sizeof(T));
            rows[t] = numbers[t];
        }
    }
};

// Multiplies one unit of keys. Token t's unit lies at `units[t] + at`.
template <class Latents, int ROWS, int TOKENS, class T>
inline void multiply_unit(const float *queries, int row_floats, const T *const *units, int64_t at,
                          simd::F (&sums)[ROWS][TOKENS]) {
    for_each_constant<Latents::KEY_PARTS>([&](auto part) {
        constexpr int PART = decltype(part)::value;
        simd::F numbers[TOKENS];
        for (int t = 0; t < TOKENS; t++) numbers[t] = Latents::template key<PART>(units[t] + at);
        for (int r = 0; r < ROWS; r++) {
            const simd::F query = simd::load(queries + r * row_floats + PART * simd::W);
            for (int t = 0; t < TOKENS; t++) sums[r][t] = Latents::multiply_add(query, numbers[t], sums[r][t]);
        }
    });
}

template <int TOKENS>
inline void store_scores(const simd::F (&sums)[TOKENS], float *scores) {
#if defined(SIMD_SUMS_FOUR)
    if constexpr (TOKENS == 4) return simd::store_sums(sums[0], sums[1], sums[2], sums[3], scores);
    for (int t = 0; t < TOKENS; t++) {
        float four[4];
        simd::store_sums(sums[t], simd::zero(), simd::zero(), simd::zero(), four);
        scores[t] = four[0];
    }
#else
    for (int t = 0; t < TOKENS; t++) scores[t] = simd::reduce_add(sums[t]);
#endif
}

// The cache lines that one of several products prefetches, of some rows of `dim` numbers. Each product prefetches its
// own share of every row, spread over its units: processors drop prefetches that come faster than memory delivers.
template <int TOKENS>
struct Lines {
    const char *at[TOKENS];
    int every;  // units

    template <class T>
    Lines(const T *const *rows, int dim, int product, int products) {
        const int bytes = dim * int(sizeof(T)), lines = (bytes + LINE - 1) / LINE;
        for (int t = 0; t < TOKENS; t++) at[t] = (const char *)rows[t] + lines * product / products * LINE;
        const int share = (lines + products - 1) / products;
        every = std::max(1, dim / UNIT / share);
    }

    void fetch(int line) const {
        for (const char *row : at) __builtin_prefetch(row + line * LINE);
    }
};

// Computes scores [ROWS, SPLIT] of TOKENS tokens, whose rows have `dim` numbers. Meanwhile it prefetches the lines of
// later ones.
template <class Latents, int ROWS, int TOKENS, class T>
void multiply_tokens(const float *queries, int row_floats, const T *const *tokens, int dim, float *scores,
                     const Lines<TOKENS> &lines) {
    constexpr int UNIT_FLOATS = Latents::KEY_PARTS * simd::W;
    simd::F sums[ROWS][TOKENS];
    for (auto &row : sums)
        for (auto &sum : row) sum = simd::zero();
    int at = 0, due = 0, line = 0;
    for (; at + UNIT <= dim; at += UNIT, queries += UNIT_FLOATS) {
        if (due-- == 0) {
            lines.fetch(line++);
            due = lines.every - 1;
        }
        multiply_unit<Latents>(queries, row_floats, tokens, at, sums);
    }
    if (at < dim) {
        const PartialUnits<T, TOKENS> rest(tokens, at, dim - at);
        multiply_unit<Latents>(queries, row_floats, rest.rows, 0, sums);
    }
    for (int r = 0; r < ROWS; r++) store_scores(sums[r], scores + r * SPLIT);
}

template <class Latents, int ROWS, int UNITS, class T>
inline void add_step(const float *weights, int token, const T *const *tokens, int64_t at,
                     simd::F (&total)[ROWS][2 * UNITS]) {
    simd::F numbers[2 * UNITS];
    for_each_constant<2 * UNITS>([&](auto half) {
        constexpr int HALF = decltype(half)::value;
        numbers[HALF] = Latents::template values<HALF % 2>(tokens, at + HALF / 2 * UNIT);
    });
    for (int r = 0; r < ROWS; r++) {
        const simd::F weight = Latents::weight(weights + r * SPLIT, token);
        for (int v = 0; v < 2 * UNITS; v++) total[r][v] = Latents::multiply_add(weight, numbers[v], total[r][v]);
    }
}

// sums [ROWS, lanes] += weights [ROWS, SPLIT] times UNITS units of the `count` tokens from `first` on. `first` is even.
// Where `count` is odd, one more token follows the last, with weight zero.
template <class Latents, int ROWS, int UNITS, bool IS_WHOLE, class T>
inline void add_units(const float *weights, int first, int count, const T *const *tokens, int64_t at, int64_t left,
                      float *sums, int lanes) {
    constexpr int STEP = Latents::TOKENS;
    simd::F total[ROWS][2 * UNITS];
    load_block(sums, lanes, total);
    for (int t = first; t < first + count; t += STEP) {
        if constexpr (IS_WHOLE) {
            add_step<Latents, ROWS, UNITS>(weights, t, tokens + t, at, total);
        } else {
            const PartialUnits<T, STEP> rest(tokens + t, at, left);
            add_step<Latents, ROWS, UNITS>(weights, t, rest.rows, 0, total);
        }
    }
    store_block(total, sums, lanes);
}

// Calls `add_units` for the first `dim` numbers of tokens.
template <class Latents, int ROWS, class T>
void add_tokens(const float *weights, int first, int count, const T *const *tokens, int dim, float *sums, int lanes) {
    constexpr int UNITS = ROWS <= 2 ? 2 * TILE_UNITS : TILE_UNITS;  // with few sums, each would wait for the one before
    int at = 0;
    for (; at + UNITS * UNIT <= dim; at += UNITS * UNIT)
        add_units<Latents, ROWS, UNITS, true>(weights, first, count, tokens, at, 0, sums + at, lanes);
    for (; at + UNIT <= dim; at += UNIT)
        add_units<Latents, ROWS, 1, true>(weights, first, count, tokens, at, 0, sums + at, lanes);
    if (at < dim) add_units<Latents, ROWS, 1, false>(weights, first, count, tokens, at, dim - at, sums + at, lanes);
}

}  // namespace twostroke
