// Pages of 4-bit numbers: a number n of 0..15 stands for center + scale * (n - 7.5). One block is one piece.
//
// One head's keys have a scale and a center per channel over the block's tokens, its values per token and group of
// channels. In memory, its block is
//   keys: words [head_dim / 8, PIECE], scales [head_dim], centers [head_dim],
//   values: words [PIECE / 8, head_dim], scales [groups, PIECE], centers [groups, PIECE],
// scales and centers as Float16. A word of 32 bits holds eight numbers, of dimensions of a key or of tokens' values: the
// even ones, in order, in its lower half, the odd ones in the upper half.

#pragma once

#include <algorithm>
#include <cstdint>

#include "page.h"
#include "quantise.h"

namespace twostroke {

constexpr int PER_NIBBLE_WORD = 8;
constexpr int VALUE_GROUP = 32;  // channels of a value that share a scale
constexpr int MAX_NIBBLE_DIM = 256;
constexpr int MAX_GROUPS = MAX_NIBBLE_DIM / VALUE_GROUP;
// One head's block: numbers, and two Float16 for each channel of keys, and for each group of each token's values.
constexpr int MAX_NIBBLE_BYTES = PIECE * MAX_NIBBLE_DIM + 4 * (MAX_NIBBLE_DIM + PIECE * MAX_GROUPS);

inline int value_groups(int dim) { return (dim + VALUE_GROUP - 1) / VALUE_GROUP; }

// The starts of the parts of one head's block.
struct NibbleBlock {
    const uint32_t *keys;
    const Float16 *key_scales, *key_centers;
    const uint32_t *values;
    const Float16 *value_scales, *value_centers;

    NibbleBlock(const char *head, int dim)
        : keys((const uint32_t *)head),
          key_scales((const Float16 *)(keys + dim / PER_NIBBLE_WORD * PIECE)),
          key_centers(key_scales + dim),
          values((const uint32_t *)(key_centers + dim)),
          value_scales((const Float16 *)(values + PIECE / PER_NIBBLE_WORD * dim)),
          value_centers(value_scales + value_groups(dim) * PIECE) {}
};

// The bits of number i of a word.
constexpr int nibble_shift(int i) { return i % 2 * 16 + i / 2 * 4; }

// The scale and center of some numbers, and the 4-bit number of each.
class NibbleScale {
  public:
    NibbleScale(float lowest, float highest) {
        scale_ = rounded((highest - lowest) / 15.0f);
        center_ = rounded((highest + lowest) * 0.5f);
        const float scale = widened(scale_);
        inverse_ = scale < SMALLEST_SCALE ? 0.0f : 1.0f / scale;
        base_ = widened(center_);
    }

    uint32_t number(float x) const {
        const float moved = (x - base_) * inverse_ + 7.5f;
        return uint32_t(std::clamp(rounded_digits<23>(std::clamp(moved, 0.0f, 15.0f)), 0, 15));
    }

    Float16 scale() const { return scale_; }
    Float16 center() const { return center_; }

  private:
    static constexpr float SMALLEST_SCALE = 0x1p-24f;  // the smallest Float16 there is
    static constexpr float LARGEST_HALF = 65504.0f;

    static Float16 rounded(float x) {
        Float16 half;
        simd::store_part(&half, simd::set1(std::clamp(x, -LARGEST_HALF, LARGEST_HALF)), 1);
        return half;
    }
    static float widened(Float16 x) {
        float one;
        simd::store_part(&one, simd::load_part(&x, 1), 1);
        return one;
    }

    Float16 scale_, center_;
    float inverse_, base_;
};

// Element d of a token's key or value in a piece.
template <class T>
inline T key_in(const T *piece, int64_t token, int64_t d) {
    constexpr int N = PER_WORD<T>;
    return piece[d / N * N * PIECE + token * N + d % N];
}
template <class T>
inline T value_in(const T *piece, int64_t dim, int64_t token, int64_t d) {
    constexpr int N = PER_WORD<T>;
    return piece[token / N * N * dim + d * N + token % N];
}

inline float as_float(float x) { return x; }
inline float as_float(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }
inline float as_float(Float16 x) {
    float one;
    simd::store_part(&one, simd::load_part(&x, 1), 1);
    return one;
}

// The scale of `count` values that `at` returns.
template <class At>
NibbleScale scale_of(int count, At at) {
    float lowest = at(0), highest = lowest;
    for (int i = 1; i < count; i++) {
        lowest = std::min(lowest, at(i));
        highest = std::max(highest, at(i));
    }
    return {lowest, highest};
}

// Stores a whole block of one head, from the exact pieces of its keys and values. The bytes are made in separate memory
// first: ranks that have the same head all store the same bytes, and the others may read them already.
template <class T>
void quantise_block(const T *keys, const T *values, int dim, char *head) {
    alignas(64) char made[MAX_NIBBLE_BYTES];
    const NibbleBlock to(made, dim);
    std::memset(made, 0, size_t((const char *)to.key_scales - made));
    std::memset((char *)to.values, 0, size_t((const char *)to.value_scales - (const char *)to.values));
    for (int d = 0; d < dim; d++) {
        auto key = [&](int token) { return as_float(key_in(keys, token, d)); };
        const NibbleScale scale = scale_of(PIECE, key);
        ((Float16 *)to.key_scales)[d] = scale.scale();
        ((Float16 *)to.key_centers)[d] = scale.center();
        uint32_t *words = (uint32_t *)to.keys + d / PER_NIBBLE_WORD * PIECE;
        for (int token = 0; token < PIECE; token++)
            words[token] |= scale.number(key(token)) << nibble_shift(d % PER_NIBBLE_WORD);
    }
    for (int token = 0; token < PIECE; token++) {
        uint32_t *words = (uint32_t *)to.values + token / PER_NIBBLE_WORD * dim;
        for (int group = 0; group < value_groups(dim); group++) {
            const int first = group * VALUE_GROUP, count = std::min(VALUE_GROUP, dim - first);
            auto value = [&](int i) { return as_float(value_in(values, dim, token, first + i)); };
            const NibbleScale scale = scale_of(count, value);
            ((Float16 *)to.value_scales)[group * PIECE + token] = scale.scale();
            ((Float16 *)to.value_centers)[group * PIECE + token] = scale.center();
            for (int i = 0; i < count; i++)
                words[first + i] |= scale.number(value(i)) << nibble_shift(token % PER_NIBBLE_WORD);
        }
    }
    std::memcpy(head, made, size_t((const char *)(to.value_centers + value_groups(dim) * PIECE) - made));
}

}  // namespace twostroke
