// The running softmax of some query rows of one sequence and one kv head, over its context split by split.
//
// The context is cut into splits of fixed length. Each is summed up separately and merged into the total in order. So
// different threads may compute splits, and a row's result still has the same bits.

#pragma once

#include <vector>

#include "attention.h"
#include "tile.h"

namespace twostroke {

constexpr float LOWEST = -1e30f;  // below every score, yet finite: LOWEST - LOWEST is not NaN
constexpr float LOG2_E = 1.44269504f;

// Sums of some rows over one split, or over all splits so far. `values` are weighted by 2^(score - peak).
struct Sums {
    float *peaks;    // [rows]
    float *weights;  // [rows, W]: sums of weights lane by lane, added up at the end
    float *values;   // [rows, lanes]

    static int64_t floats(int64_t rows, int64_t lanes) { return rows * (1 + simd::W + lanes); }

    static Sums in(float *memory, int64_t rows, int64_t lanes) {
        return {memory + rows * (simd::W + lanes), memory + rows * lanes, memory};
    }

    Sums from(int row, int lanes) const { return {peaks + row, weights + row * simd::W, values + row * lanes}; }

    void clear(int rows, int lanes) const {
        std::fill(peaks, peaks + rows, LOWEST);
        std::fill(weights, weights + rows * simd::W, 0.0f);
        std::fill(values, values + rows * lanes, 0.0f);
    }

    void merge(const Sums &split, int rows, int lanes) const {
        for (int r = 0; r < rows; r++) {
            const float peak = std::max(peaks[r], split.peaks[r]);
            const simd::F ours = simd::exp2_of_negative(simd::set1(peaks[r] - peak));
            const simd::F theirs = simd::exp2_of_negative(simd::set1(split.peaks[r] - peak));
            peaks[r] = peak;
            add_scaled(weights + r * simd::W, ours, split.weights + r * simd::W, theirs, simd::W);
            add_scaled(values + r * lanes, ours, split.values + r * lanes, theirs, lanes);
        }
    }

  private:
    static void add_scaled(float *x, simd::F x_scale, const float *y, simd::F y_scale, int n) {
        for (int i = 0; i < n; i += simd::W)
            simd::store(x + i, simd::fma(simd::load(y + i), y_scale, simd::mul(simd::load(x + i), x_scale)));
    }
};

// The sizes of a step in the units that a kernel of one dtype counts in.
template <class Math>
struct Shape {
    int dim, words, row_floats, value_dim, lanes, groups;  // `dim` of a key

    explicit Shape(const AttentionStep &step)
        : dim(int(step.head_dim)),
          words(dim / PER_WORD<typename Math::Element>),
          row_floats(words * Math::PARTS),
          value_dim(int(step.value_numbers())),
          lanes(rounded_up(value_dim, simd::W)),
          groups(int(step.heads / step.kv_heads)) {}
};

// The tokens that a row attends to: from the first to the one before the end.
struct Limits {
    int32_t first, end;
};

// Turns products of queries and keys into scores of a softmax to the base 2.
struct Scoring {
    float softcap, inverse_softcap;  // 0 without a cap
    float scale;                     // of products, or of capped scores

    explicit Scoring(const AttentionRule &rule)
        : softcap(rule.softcap), inverse_softcap(softcap > 0 ? rule.scale / softcap : 0),
          scale(softcap > 0 ? LOG2_E : rule.scale * LOG2_E) {}

    void cap(float *scores, int first, int columns) const {
        if (softcap <= 0) return;
        const simd::F by = simd::set1(inverse_softcap), most = simd::set1(softcap);
        for (int c = first; c < columns; c += simd::W)
            simd::store(scores + c, simd::mul(simd::tanh(simd::mul(simd::load(scores + c), by)), most));
    }
};

// Sets a row's scores of tokens that it must not attend to, in a split that begins at `start`, to -infinity.
inline void hide(float *scores, const Limits &limits, int64_t start, int count, int columns) {
    const simd::F nothing = simd::set1(-__builtin_inff());
    const int end = int(std::clamp<int64_t>(limits.end - start, 0, count));
    const int first = int(std::clamp<int64_t>(limits.first - start, 0, columns));
    for (int c = end / simd::W * simd::W; c < columns; c += simd::W)
        simd::store(scores + c, simd::keep_first(simd::load(scores + c), std::max(0, end - c), nothing));
    int c = 0;
    for (; c + simd::W <= first; c += simd::W) simd::store(scores + c, nothing);  // these may not have been computed
    if (c < first) simd::store(scores + c, simd::keep_first(nothing, first - c, simd::load(scores + c)));
}

// How many of a split's tokens the softmax of some rows must read.
inline int64_t seen_of(const Limits *limits, int rows, int64_t start, int count) {
    int64_t end = 0, first = INT64_MAX;
    for (int r = 0; r < rows; r++) {
        end = std::max<int64_t>(end, limits[r].end);
        first = std::min<int64_t>(first, limits[r].first);
    }
    return first >= start + count ? 0 : std::min<int64_t>(count, end - start);
}

// The scales of one split's keys, or values: PIECE of them for each piece.
using Scales = const float *[PIECES];

inline simd::F scales_of(const Scales &scales, int column) {
    return simd::load(scales[column / PIECE] + column % PIECE);
}

// Turns the scores of stored numbers into those of the keys that they stand for.
inline void multiply_scores(float *scores, const Scales &key_scales, int first, int columns) {
    for (int c = first; c < columns; c += simd::W)
        simd::store(scores + c, simd::mul(simd::load(scores + c), scales_of(key_scales, c)));
}

// The highest score of a row, scaled. Weights are relative to it.
inline float peak_of(const float *scores, int columns, float scale) {
    simd::F highest = simd::max(simd::load(scores), simd::load(scores + simd::W));
    for (int c = 2 * simd::W; c < columns; c += 2 * simd::W)
        highest = simd::max(highest, simd::max(simd::load(scores + c), simd::load(scores + c + simd::W)));
    return std::max(LOWEST, simd::reduce_max(highest) * scale);
}

// Turns the scores of a row into weights in place, and returns the highest score, scaled. `sum` gets the sum of the
// weights. Then each weight is multiplied by the scale of its token's value, if there are scales.
template <class Math>
float weigh(float *scores, int columns, float scale, const Scales &value_scales, float *sum) {
    const float peak = peak_of(scores, columns, scale);
    const simd::F base = simd::set1(-peak), by = simd::set1(scale);
    simd::F total = simd::zero();
    for (int c = 0; c < columns; c += 2 * simd::W) {
        simd::F low = Math::exp2(simd::fma(simd::load(scores + c), by, base));
        simd::F high = Math::exp2(simd::fma(simd::load(scores + c + simd::W), by, base));
        total = simd::add(total, simd::add(low, high));
        if constexpr (Math::IS_SCALED) {
            low = simd::mul(low, scales_of(value_scales, c));
            high = simd::mul(high, scales_of(value_scales, c + simd::W));
        }
        Math::store_weights(scores, c, low, high);
    }
    simd::store(sum, total);
    return peak;
}

// One head's keys and values in a split, and the sums over them.
template <class Math>
struct HeadSplit {
    const float *queries;
    Pieces<Math> keys, values;  // past the count, values or their scales are zero
    Scales key_scales, value_scales;  // where there are any
    Sums sums;
};

// The context of some heads in one split, and the limits of each row.
template <class Math>
struct Split {
    static constexpr int MOST_HEADS = 4;
    int64_t start;
    int count;        // of tokens
    int first_piece;  // no row attends to pieces before it
    int rows, heads;
    const Limits *limits;
    HeadSplit<Math> of[MOST_HEADS];
};

// Calls f(first row, number of rows) for all `count` rows, as many at once as a product takes. The number is a
// compile-time constant.
template <class F>
inline void by_rows(int count, F f) {
    for (int row = 0; row < count; row += MAX_ROWS) {
        switch (std::min(MAX_ROWS, count - row)) {
            case 1: f(row, std::integral_constant<int, 1>()); break;
            case 2: f(row, std::integral_constant<int, 2>()); break;
            case 3: f(row, std::integral_constant<int, 3>()); break;
            case 4: f(row, std::integral_constant<int, 4>()); break;
            case 5: f(row, std::integral_constant<int, 5>()); break;
            case 6: f(row, std::integral_constant<int, 6>()); break;
        }
    }
}

// Computes the sums of ROWS rows from `row` on over one split. Keys, then values, are read in the order in which pages
// hold them.
template <class Math, int ROWS>
void sum_up(const Shape<Math> &shape, const Split<Math> &split, int row, const Scoring &scoring, Fetch &fetch) {
    const Limits *limits = split.limits + row;
    const int64_t seen = seen_of(limits, ROWS, split.start, split.count);
    if (seen <= 0) {
        for (int h = 0; h < split.heads; h++) split.of[h].sums.from(row, shape.lanes).clear(ROWS, shape.lanes);
        return;
    }
    alignas(64) float scores[Split<Math>::MOST_HEADS][ROWS * SPLIT];
    const int first = split.first_piece, pieces = rounded_up(seen, PIECE) / PIECE;
    const int columns = rounded_up(seen, std::max(PIECE, 2 * simd::W));
    for (int piece = first; piece < pieces; piece += STREAMS)
        for (int h = 0; h < split.heads; h++)
            multiply_keys<Math, ROWS>(split.of[h].queries + row * shape.row_floats, shape.words, split.of[h].keys,
                                      piece * VECTORS_PER_PIECE,
                                      std::min(STREAMS, pieces - piece) * VECTORS_PER_PIECE, fetch, scores[h]);
    for (int h = 0; h < split.heads; h++) {
        const Sums sums = split.of[h].sums.from(row, shape.lanes);
        for (int r = 0; r < ROWS; r++) {
            float *row = scores[h] + r * SPLIT;
            if constexpr (Math::IS_SCALED) multiply_scores(row, split.of[h].key_scales, first * PIECE, columns);
            scoring.cap(row, first * PIECE, columns);
            hide(row, limits[r], split.start, split.count, columns);
            sums.peaks[r] = weigh<Math>(row, columns, scoring.scale, split.of[h].value_scales, sums.weights + r * simd::W);
        }
    }
    for (int piece = first; piece < pieces; piece += STREAMS)
        for (int h = 0; h < split.heads; h++)
            multiply_values<Math, ROWS>(scores[h], split.of[h].values, first, piece, std::min(STREAMS, pieces - piece),
                                        shape.value_dim, fetch, split.of[h].sums.from(row, shape.lanes).values, shape.lanes);
}

// Calls `sum_up` for any number of rows.
template <class Math>
void sum_up(const Shape<Math> &shape, const Split<Math> &split, const Scoring &scoring, Fetch &fetch) {
    by_rows(split.rows, [&](int row, auto rows) {
        sum_up<Math, decltype(rows)::value>(shape, split, row, scoring, fetch);
    });
}

// The final factor of a row's values, given the sum of its weights under its peak. The sink, if there is one, takes its
// part of the softmax here, once. So it has no influence on how a context is cut into splits.
inline float share_of_values(float total, float peak, const float *sink) {
    if (!sink) return 1.0f / total;
    const float score = *sink * LOG2_E, highest = std::max(peak, score);
    alignas(64) float powers[2][simd::W];
    simd::store(powers[0], simd::exp2_of_negative(simd::set1(peak - highest)));
    simd::store(powers[1], simd::exp2_of_negative(simd::set1(score - highest)));
    return powers[0][0] / (total * powers[0][0] + powers[1][0]);
}

// Writes the finished rows in the order of the output.
template <class Math, class T>
void write_out(const Shape<Math> &shape, const Sums &sums, int rows, int64_t first_token, int64_t kv_head,
               const Queries &queries, T *out) {
    const float *sinks = queries.sinks;
    for (int row = 0; row < rows; row++) {
        const int64_t token = first_token + row / shape.groups;
        const int64_t head = kv_head * shape.groups + row % shape.groups;
        T *to = out + token * queries.out_stride + head * shape.value_dim;
        const float total = simd::reduce_add(simd::load(sums.weights + row * simd::W));
        const simd::F share = simd::set1(share_of_values(total, sums.peaks[row], sinks ? sinks + head : nullptr));
        for (int at = 0; at < shape.value_dim; at += simd::W)
            simd::store_up_to(to + at, simd::mul(simd::load(sums.values + row * shape.lanes + at), share),
                             std::min(simd::W, shape.value_dim - at));
    }
}

}  // namespace twostroke
