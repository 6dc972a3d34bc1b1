// The order of keys and values inside a page: products read them in place, vector by vector.
//
// A page whose block is a multiple of PIECE tokens is cut into pieces of PIECE tokens for each kv head. A piece of keys
// is [words of a head, PIECE], a piece of values [words of a piece, head_dim]. A word is what one multiply-add takes:
// an element, or a pair of bfloat16 or of bytes (of two dimensions of a key, of two tokens' values). Other pages hold
// plain rows. Scales lie after all numbers of a head's keys, or values: one float per token of the block, in order.

#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace twostroke {

constexpr int PIECE = 16;             // tokens
constexpr int SPLIT = 256;            // tokens that are summed up separately
constexpr int PIECES = SPLIT / PIECE;  // pieces of a split

template <class T>
inline constexpr int PER_WORD = 1;
template <>
inline constexpr int PER_WORD<BFloat16> = 2;
template <>
inline constexpr int PER_WORD<Int8> = 2;
template <>
inline constexpr int PER_WORD<Fp8E4M3> = 2;
template <>
inline constexpr int PER_WORD<Fp8E5M2> = 2;

template <class T>
inline constexpr bool HAS_SCALES = sizeof(T) == 1;

inline bool has_pieces(int64_t block) { return block % PIECE == 0; }

// Puts one token's key, or its value, into its column of a piece.
template <class T>
void put_key(const T *row, int64_t dim, int64_t token, T *piece) {
    constexpr int N = PER_WORD<T>;
    for (int64_t d = 0; d < dim; d += N) std::memcpy(piece + d * PIECE + token * N, row + d, N * sizeof(T));
}
template <class T>
void put_value(const T *row, int64_t dim, int64_t token, T *piece) {
    constexpr int N = PER_WORD<T>;
    T *to = piece + token / N * N * dim + token % N;
    for (int64_t d = 0; d < dim; d++) to[d * N] = row[d];
}

// Copies the first `count` values of a piece, followed by zeros.
template <class T>
void copy_values(const T *piece, int count, int64_t dim, T *copy) {
    constexpr int N = PER_WORD<T>;
    const int64_t whole = count / N * N * dim;
    std::memcpy(copy, piece, size_t(whole) * sizeof(T));
    std::memset(copy + whole, 0, size_t(PIECE * dim - whole) * sizeof(T));
    for (int64_t d = 0; d < dim && count % N; d++) copy[whole + d * N] = piece[whole + d * N];
}

}  // namespace twostroke
