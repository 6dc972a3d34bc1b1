// Products of rows with tokens' latents, as these lie in pages.
//
// Numbers are taken a unit at a time, as two vectors: of bfloat16 the even numbers and the odd ones, of others the first
// half and the second. Queries and sums lie in the same order. Every row is summed in the same order, however many rows
// and tokens a product has.

#pragma once

#include <cstring>
#include <type_traits>

#include "page.h"
#include "rows.h"

namespace twostroke {

constexpr int UNIT = 2 * simd::W;
constexpr int TILE_TOKENS = simd::W == 16 ? 4 : 2;  // tokens of a product with MAX_ROWS rows, by the registers there are
constexpr int TILE_UNITS = simd::W == 16 ? 2 : 1;   // units of a sum of as many rows

// The place within a unit of number `i` of it.
template <class T>
constexpr int place_in_unit(int i) {
    return std::is_same_v<T, BFloat16> ? i % 2 * simd::W + i / 2 : i;
}

// One half of a unit.
template <int PART, class T>
inline simd::F load_half(const T *unit) {
    if constexpr (std::is_same_v<T, BFloat16>) {
        const simd::I words = simd::load_words(unit);
        return PART ? simd::second_bfloat16(words) : simd::first_bfloat16(words);
    } else {
        return simd::load(unit + PART * simd::W);
    }
}

// The first `count` numbers of a unit, and zeros behind them.
template <class T>
struct PartialUnit {
    T numbers[UNIT];

    PartialUnit(const T *unit, int count) {
        std::memset(numbers, 0, sizeof numbers);
        std::memcpy(numbers, unit, size_t(count) * sizeof(T));
    }
};

// sum + a * b. What the compiler keeps of a sum is a value: then it stays in a register, and so does a factor.
inline simd::F sum_with(simd::F sum, simd::F a, simd::F b) {
    simd::add_product(sum, a, b);
    return sum;
}

template <int ROWS, int TOKENS, class Load>
inline void add_half(const float *queries, int row_floats, Load load, simd::F (&sums)[ROWS][TOKENS]) {
    simd::F numbers[TOKENS];
    for (int t = 0; t < TOKENS; t++) numbers[t] = load(t);
    for (int r = 0; r < ROWS; r++) {
        const simd::F query = simd::load(queries + r * row_floats);
        for (int t = 0; t < TOKENS; t++) sums[r][t] = sum_with(sums[r][t], query, numbers[t]);
    }
}

// scores [ROWS, SPLIT] of TOKENS tokens, whose rows have `dim` numbers.
template <class T, int ROWS, int TOKENS>
void multiply_tokens(const float *queries, int row_floats, const T *const *tokens, int dim, float *scores) {
    simd::F sums[ROWS][TOKENS];
    for (auto &row : sums)
        for (auto &sum : row) sum = simd::zero();
    int at = 0;
    for (; at + UNIT <= dim; at += UNIT) {
        add_half(queries + at, row_floats, [&](int t) { return load_half<0>(tokens[t] + at); }, sums);
        add_half(queries + at + simd::W, row_floats, [&](int t) { return load_half<1>(tokens[t] + at); }, sums);
    }
    if (at < dim) {
        auto half = [&](int t, auto part) {
            return load_half<decltype(part)::value>(PartialUnit<T>(tokens[t] + at, dim - at).numbers);
        };
        add_half(queries + at, row_floats, [&](int t) { return half(t, std::integral_constant<int, 0>()); }, sums);
        add_half(queries + at + simd::W, row_floats,
                 [&](int t) { return half(t, std::integral_constant<int, 1>()); }, sums);
    }
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < TOKENS; t++) scores[r * SPLIT + t] = simd::reduce_add(sums[r][t]);
}

template <int ROWS, int UNITS, class Load>
inline void add_token(const float *weights, int t, Load load, simd::F (&total)[ROWS][2 * UNITS]) {
    simd::F numbers[2 * UNITS];
    for_each_constant<2 * UNITS>([&](auto half) { numbers[decltype(half)::value] = load(t, half); });
    for (int r = 0; r < ROWS; r++) {
        const simd::F weight = simd::set1(weights[r * SPLIT + t]);
        for (int v = 0; v < 2 * UNITS; v++) total[r][v] = sum_with(total[r][v], weight, numbers[v]);
    }
}

// sums [ROWS, lanes] += weights [ROWS, SPLIT] of `count` tokens times UNITS units of theirs, of which load(t, half) is one
// half.
template <int ROWS, int UNITS, class Load>
inline void add_units(const float *weights, int count, Load load, float *sums, int lanes) {
    simd::F total[ROWS][2 * UNITS];
    load_block(sums, lanes, total);
    for (int t = 0; t < count; t++) add_token<ROWS, UNITS>(weights, t, load, total);
    store_block(total, sums, lanes);
}

// The same for the first `dim` numbers of tokens.
template <class T, int ROWS>
void add_tokens(const float *weights, const T *const *tokens, int count, int dim, float *sums, int lanes) {
    constexpr int UNITS = ROWS <= 2 ? 2 * TILE_UNITS : TILE_UNITS;  // few sums would wait for each other
    auto whole = [&](int at, auto units) {
        auto load = [&](int t, auto half) {
            constexpr int HALF = decltype(half)::value;
            return load_half<HALF % 2>(tokens[t] + at + HALF / 2 * UNIT);
        };
        add_units<ROWS, decltype(units)::value>(weights, count, load, sums + at, lanes);
    };
    int at = 0;
    for (; at + UNITS * UNIT <= dim; at += UNITS * UNIT) whole(at, std::integral_constant<int, UNITS>());
    for (; at + UNIT <= dim; at += UNIT) whole(at, std::integral_constant<int, 1>());
    if (at == dim) return;
    auto load = [&](int t, auto half) {
        return load_half<decltype(half)::value>(PartialUnit<T>(tokens[t] + at, dim - at).numbers);
    };
    add_units<ROWS, 1>(weights, count, load, sums + at, lanes);
}

}  // namespace twostroke
