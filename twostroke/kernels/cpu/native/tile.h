// Products of rows with one split's keys or values, read in place from pages.
//
// A product multiplies rows by words [words, lanes]; `page.h` defines a word. Every row is summed in the same order,
// however many rows a product has, so a token's result depends on nothing else in the batch.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "fetch.h"
#include "page.h"

namespace twostroke {

constexpr int VECTORS_PER_PIECE = PIECE / simd::W;  // of keys
constexpr int MAX_ROWS = 6, FEW_ROWS = 3;  // of a product, limited by registers; few rows take more vectors
constexpr int MANY_VECTORS = 4, SOME_VECTORS = simd::W == 16 ? 4 : 2;

// Multiplies everything as floats. A row has one float for each element of a word.
template <class T>
struct FloatMath {
    using Element = T;
    using Word = T;
    static constexpr int PARTS = 1;
    static constexpr bool IS_SCALED = HAS_SCALES<T>;

    // One part of W words, or of `lanes` words.
    template <bool IS_WHOLE, int>
    static simd::F column(const Word *at, int lanes) {
        return IS_WHOLE ? simd::load(at) : simd::load_part(at, lanes);
    }

    template <class Q>
    static void load_row(const Q *from, int dim, float *row) {
        for (int at = 0; at < dim; at += simd::W) {
            const int n = std::min(simd::W, dim - at);
            simd::store_up_to(row + at, simd::load_up_to(from + at, n), n);
        }
    }

    static simd::F multiply_add(simd::F a, simd::F b, simd::F sum) { return simd::fma(a, b, sum); }

    static simd::F exp2(simd::F x) { return simd::exp2_of_negative(x); }

    static void store_weights(float *row, int column, simd::F low, simd::F high) {
        simd::store(row + column, low);
        simd::store(row + column + simd::W, high);
    }
};

// Pairs of bfloat16, widened one after the other.
struct WideningMath : FloatMath<BFloat16> {
    using Word = float;
    static constexpr int PARTS = 2;

    template <bool IS_WHOLE, int PART>
    static simd::F column(const float *at, int lanes) {
        const simd::F words = IS_WHOLE ? simd::load(at) : simd::load_part(at, lanes);
        return PART ? simd::second_of_pairs(words) : simd::first_of_pairs(words);
    }
};

// Loads W words of two bytes, or only `lanes` of them.
template <bool IS_WHOLE>
inline simd::I load_halves(const uint16_t *at, int lanes) {
    if (IS_WHOLE) return simd::load_halves(at);
    uint16_t some[simd::W] = {};
    std::memcpy(some, at, size_t(lanes) * sizeof *at);
    return simd::load_halves(some);
}

// Pairs of numbers of one byte, converted to floats one after the other. Their scales are applied later.
template <class Number>
struct ByteMath : FloatMath<Number> {
    using Word = uint16_t;
    using Widened = WideningMath;
    static constexpr int PARTS = 2;

    template <bool IS_WHOLE, int PART>
    static simd::F column(const uint16_t *at, int lanes) {
        const simd::I pairs = load_halves<IS_WHOLE>(at, lanes);
        return simd::decode(PART ? simd::shift_right<8>(pairs) : simd::shift_right<24>(simd::shift_left<24>(pairs)),
                            Number());
    }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16, multiplied in pairs and summed as floats.
struct PairMath {
    using Element = BFloat16;
    using Word = float;
    static constexpr int PARTS = 1;
    static constexpr bool IS_SCALED = false;

    template <bool IS_WHOLE, int>
    static simd::F column(const float *at, int lanes) {
        return IS_WHOLE ? simd::load(at) : simd::load_part(at, lanes);
    }

    template <class Q>
    static void load_row(const Q *from, int dim, float *row) {
        for (int at = 0; at < dim; at += simd::W) {
            const int n = std::min(simd::W, dim - at);
            simd::store_up_to((BFloat16 *)row + at, simd::load_up_to(from + at, n), n);
        }
    }

    static simd::F multiply_add(simd::F a, simd::F b, simd::F sum) { return simd::fma_pairs(a, b, sum); }

    static simd::F exp2(simd::F x) { return simd::rough_exp2_of_negative(x); }

    static void store_weights(float *row, int column, simd::F low, simd::F high) {
        simd::store_narrow(row + column / 2, low, high);
    }
};

// Converts 2 W numbers of one byte to bfloat16, which keeps their values.
template <class Number>
inline simd::F widened(const Number *at) {
    const simd::I low = simd::load_bytes(at), high = simd::load_bytes(at + simd::W);
    return simd::join_narrow(simd::decode(low, Number()), simd::decode(high, Number()));
}

// Converts `count` numbers, a multiple of two vectors, to bfloat16.
template <class Number>
inline void widen(const Number *from, int64_t count, BFloat16 *to) {
    for (int64_t i = 0; i < count; i += 2 * simd::W) simd::store((float *)(to + i), widened(from + i));
}

// Pairs of numbers of one byte, widened to bfloat16 and multiplied in pairs.
template <class Number>
struct BytePairMath : PairMath {
    using Element = Number;
    using Word = uint16_t;
    using Widened = PairMath;
    static constexpr bool IS_SCALED = true;

    template <bool IS_WHOLE, int>
    static simd::F column(const uint16_t *at, int lanes) {
        if (IS_WHOLE) return widened((const Number *)at);
        uint16_t some[simd::W] = {};
        std::memcpy(some, at, size_t(lanes) * sizeof *at);
        return widened((const Number *)some);
    }
};

#else
// A table of the bfloat16 with the same value for each number of one byte.
template <class Number>
struct WidenedBytes {
    uint16_t of[256];

    WidenedBytes() {
        for (int byte = 0; byte < 256; byte += simd::W) {
            uint16_t halves[simd::W];
            for (int i = 0; i < simd::W; i++) halves[i] = uint16_t(int8_t(byte + i));
            simd::store((BFloat16 *)of + byte, simd::decode(simd::load_halves(halves), Number()));
        }
    }
};

// Converts `count` numbers to bfloat16.
template <class Number>
inline void widen(const Number *from, int64_t count, BFloat16 *to) {
    static const WidenedBytes<Number> table;
    for (int64_t i = 0; i < count; i++) to[i].bits = table.of[uint8_t(from[i].bits)];
}
#endif

// Numbers that were widened to bfloat16 before. Their scales still apply.
template <class Math>
struct Scaled : Math {
    static constexpr bool IS_SCALED = true;
};

inline int rounded_up(int64_t n, int64_t step) { return int((n + step - 1) / step * step); }

// The addresses of one split's pieces for one head.
template <class Math>
using Pieces = const typename Math::Word *[PIECES];

// Calls f with each of 0..COUNT - 1 as a compile-time constant.
template <int COUNT, class F>
inline void for_each_constant(F f) {
    if constexpr (COUNT > 0) {
        for_each_constant<COUNT - 1>(f);
        f(std::integral_constant<int, COUNT - 1>());
    }
}

// sums += a [ROWS, words] b [words, VECTORS * W], where a vector's words are `stride` apart.
template <class Math, bool IS_WHOLE, int ROWS, int VECTORS, class Word>
inline void accumulate(const float *a, int a_stride, const Word *const (&b)[VECTORS], int stride, int words, int lanes,
                       Fetch &fetch, simd::F (&sums)[ROWS][VECTORS]) {
    constexpr int PER_LINE = std::max(1, STREAMS * LINE / int(VECTORS * simd::W * sizeof(Word)));
    const Streams ahead = fetch.take((words + PER_LINE - 1) / PER_LINE, b[0]);
    for_each_constant<Math::PARTS>([&](auto part) {
        constexpr int PART = decltype(part)::value;
#pragma GCC unroll 1
        for (int w = 0; w < words; w++) {
            if (w % PER_LINE == 0 && w / PER_LINE % Math::PARTS == PART) ahead.fetch(w / PER_LINE);
            auto row = [&](int r) { return simd::set1(a[r * a_stride + w * Math::PARTS + PART]); };
            auto column = [&](int v) {
                return Math::template column<IS_WHOLE, PART>(b[v] + w * stride, lanes);
            };
            if constexpr (ROWS < VECTORS) {  // whichever are fewer stay in registers
                simd::F rows[ROWS];
                for (int r = 0; r < ROWS; r++) rows[r] = row(r);
                for (int v = 0; v < VECTORS; v++) {
                    const simd::F x = column(v);
                    for (int r = 0; r < ROWS; r++) sums[r][v] = Math::multiply_add(rows[r], x, sums[r][v]);
                }
            } else {
                simd::F columns[VECTORS];
                for (int v = 0; v < VECTORS; v++) columns[v] = column(v);
                for (int r = 0; r < ROWS; r++) {
                    const simd::F x = row(r);
                    for (int v = 0; v < VECTORS; v++) sums[r][v] = Math::multiply_add(x, columns[v], sums[r][v]);
                }
            }
        }
    });
}

template <int ROWS, int VECTORS>
inline void store_block(const simd::F (&sums)[ROWS][VECTORS], float *c, int c_stride) {
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) simd::store(c + r * c_stride + v * simd::W, sums[r][v]);
}

template <int ROWS, int VECTORS>
inline void load_block(const float *c, int c_stride, simd::F (&sums)[ROWS][VECTORS]) {
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = simd::load(c + r * c_stride + v * simd::W);
}

// Calls f(first vector, number of vectors) for all `count` vectors, as many at once as registers allow. The number is a
// compile-time constant.
template <int ROWS, class F>
inline void by_blocks(int count, F f) {
    constexpr int MOST = ROWS <= FEW_ROWS ? MANY_VECTORS : SOME_VECTORS;
    int at = 0;
    for (; at + MOST <= count; at += MOST) f(at, std::integral_constant<int, MOST>());
    if (MOST > 2 && at + 2 <= count) {
        f(at, std::integral_constant<int, 2>());
        at += 2;
    }
    if (at < count) f(at, std::integral_constant<int, 1>());
}

// Computes scores [ROWS, SPLIT] of `count` vectors of keys from `from` on.
template <class Math, int ROWS>
void multiply_keys(const float *rows, int words, const Pieces<Math> &keys, int from, int count, Fetch &fetch,
                   float *scores) {
    by_blocks<ROWS>(count, [&](int at, auto vectors) {
        constexpr int VECTORS = decltype(vectors)::value;
        const int first = from + at;
        const typename Math::Word *b[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            b[v] = keys[(first + v) / VECTORS_PER_PIECE] + (first + v) % VECTORS_PER_PIECE * simd::W;
        simd::F sums[ROWS][VECTORS] = {};
        accumulate<Math, true>(rows, words * Math::PARTS, b, PIECE, words, simd::W, fetch, sums);
        store_block(sums, scores + first * simd::W, SPLIT);
    });
}

// out [ROWS, lanes] += weights [ROWS, SPLIT] times values of `count` pieces from `from` on. Piece `begin` starts the
// sums.
template <class Math, int ROWS>
void multiply_values(const float *weights, const Pieces<Math> &values, int begin, int from, int count, int dim,
                     Fetch &fetch, float *out, int lanes) {
    constexpr int WORDS = PIECE / PER_WORD<typename Math::Element>;
    auto block = [&](int first, auto vectors, auto is_whole) {
        constexpr int VECTORS = decltype(vectors)::value;
        const int left = std::min(simd::W, dim - first * simd::W);
        simd::F sums[ROWS][VECTORS] = {};
        if (from > begin) load_block(out + first * simd::W, lanes, sums);
        for (int piece = from; piece < from + count; piece++) {
            const typename Math::Word *b[VECTORS];
            for (int v = 0; v < VECTORS; v++) b[v] = values[piece] + (first + v) * simd::W;
            accumulate<Math, is_whole>(weights + piece * WORDS * Math::PARTS, SPLIT, b, dim, WORDS, left, fetch, sums);
        }
        store_block(sums, out + first * simd::W, lanes);
    };
    by_blocks<ROWS>(dim / simd::W, [&](int first, auto vectors) { block(first, vectors, std::true_type()); });
    if (dim % simd::W) block(dim / simd::W, std::integral_constant<int, 1>(), std::false_type());
}

}  // namespace twostroke
