// The running softmax of some query rows of one sequence and one kv head, over its context split by split.
//
// The context is cut into splits of fixed length. Each is summed up on its own and merged into the total in order, so
// that splits may be computed by different threads and a row's result still is the same to the last bit.

#pragma once

#include <vector>

#include "attention.h"
#include "tile.h"

namespace twostroke {

constexpr float LOWEST = -1e30f;  // below every score, yet finite: LOWEST - LOWEST is no NaN
constexpr float LOG2_E = 1.44269504f;

// Sums of some rows over one split, or over all splits so far. `sums` are the values weighed by 2^(score - peak).
struct Sums {
    float *peaks;    // [rows]
    float *weights;  // [rows, W]: lane by lane, added up at the end
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

// How a kernel of one dtype sees a step: sizes in the units that its loops count in.
template <class Math>
struct Shape {
    int dim, words, row_floats, lanes, groups;

    explicit Shape(const AttentionStep &step)
        : dim(int(step.head_dim)),
          words(dim / PER_WORD<typename Math::Element>),
          row_floats(words * Math::PARTS),
          lanes(rounded_up(dim, simd::W)),
          groups(int(step.heads / step.kv_heads)) {}
};

// Query rows, side by side: [tokens, groups] of one kv head, with what each may see.
struct Queries {
    int rows;
    float *floats;    // [rows, row_floats]
    int32_t *limits;  // [rows]: tokens that the row attends to
};

template <class Math, class T>
void load_queries(const Shape<Math> &shape, const AttentionStep &step, const T *q, int64_t q_stride,
                  int64_t first_token, int64_t kv_head, Queries &queries) {
    for (int row = 0; row < queries.rows; row++) {
        const int64_t token = first_token + row / shape.groups;
        const T *from = q + token * q_stride + (kv_head * shape.groups + row % shape.groups) * shape.dim;
        queries.limits[row] = step.positions[token] + 1;
        Math::load_row(from, shape.dim, queries.floats + row * shape.row_floats);
    }
}

// A row's scores of tokens that it must not see become -infinity.
inline void hide(float *scores, int visible, int columns) {
    for (int c = visible / simd::W * simd::W; c < columns; c += simd::W)
        simd::store(scores + c, simd::keep_first(simd::load(scores + c), std::max(0, visible - c),
                                                 simd::set1(-__builtin_inff())));
}

// Turns the scores of a row into weights under their highest, which is returned scaled; adds the weights up in `sum`.
template <class Math>
float weigh(const float *scores, int columns, float scale, float *sum, float *weights) {
    simd::F highest = simd::max(simd::load(scores), simd::load(scores + simd::W));
    for (int c = 2 * simd::W; c < columns; c += 2 * simd::W)
        highest = simd::max(highest, simd::max(simd::load(scores + c), simd::load(scores + c + simd::W)));
    const float peak = std::max(LOWEST, simd::reduce_max(highest) * scale);
    const simd::F base = simd::set1(-peak), by = simd::set1(scale);
    simd::F total = simd::zero();
    for (int c = 0; c < columns; c += 2 * simd::W) {
        const simd::F low = Math::exp2(simd::fma(simd::load(scores + c), by, base));
        const simd::F high = Math::exp2(simd::fma(simd::load(scores + c + simd::W), by, base));
        total = simd::add(total, simd::add(low, high));
        Math::store_weights(weights, c, low, high);
    }
    simd::store(sum, total);
    return peak;
}

// What of one head's context lies in a split.
template <class Math>
struct Split {
    int64_t start;
    int count;
    Pieces<Math> keys, values;  // values of tokens past the count are zero
};

// Sums of ROWS rows over one split.
template <class Math, int ROWS>
void sum_up(const Shape<Math> &shape, const float *queries, const int32_t *limits, const Split<Math> &split, float scale,
            const Sums &sums) {
    const int64_t seen = std::min<int64_t>(split.count, *std::max_element(limits, limits + ROWS) - split.start);
    if (seen <= 0) return sums.clear(ROWS, shape.lanes);
    alignas(64) float scores[ROWS * SPLIT], weights[ROWS * SPLIT];
    const int pieces = rounded_up(seen, PIECE) / PIECE, columns = rounded_up(seen, std::max(PIECE, 2 * simd::W));
    multiply_keys<Math, ROWS>(queries, shape.words, split.keys, pieces, scores);
    for (int r = 0; r < ROWS; r++) {
        hide(scores + r * SPLIT, int(std::clamp<int64_t>(limits[r] - split.start, 0, split.count)), columns);
        sums.peaks[r] =
            weigh<Math>(scores + r * SPLIT, columns, scale, sums.weights + r * simd::W, weights + r * SPLIT);
    }
    multiply_values<Math, ROWS>(weights, split.values, pieces, shape.dim, sums.values, shape.lanes);
}

// The same for any number of rows.
template <class Math>
void sum_up(const Shape<Math> &shape, const Queries &queries, const Split<Math> &split, float scale, const Sums &sums) {
    for (int first = 0; first < queries.rows; first += MAX_ROWS) {
        const float *floats = queries.floats + first * shape.row_floats;
        const int32_t *limits = queries.limits + first;
        const Sums mine = sums.from(first, shape.lanes);
        switch (std::min(MAX_ROWS, queries.rows - first)) {
            case 1: sum_up<Math, 1>(shape, floats, limits, split, scale, mine); break;
            case 2: sum_up<Math, 2>(shape, floats, limits, split, scale, mine); break;
            case 3: sum_up<Math, 3>(shape, floats, limits, split, scale, mine); break;
            case 4: sum_up<Math, 4>(shape, floats, limits, split, scale, mine); break;
            case 5: sum_up<Math, 5>(shape, floats, limits, split, scale, mine); break;
            case 6: sum_up<Math, 6>(shape, floats, limits, split, scale, mine); break;
        }
    }
}

// The finished rows, back in the order of the output.
template <class Math, class T>
void write_out(const Shape<Math> &shape, const AttentionStep &step, const Sums &sums, int rows, int64_t first_token,
               int64_t kv_head, T *out) {
    for (int row = 0; row < rows; row++) {
        const int64_t token = first_token + row / shape.groups;
        const int64_t head = kv_head * shape.groups + row % shape.groups;
        T *to = out + (token * step.heads + head) * shape.dim;
        const simd::F inverse = simd::set1(1.0f / simd::reduce_add(simd::load(sums.weights + row * simd::W)));
        for (int at = 0; at < shape.dim; at += simd::W)
            simd::store_up_to(to + at, simd::mul(simd::load(sums.values + row * shape.lanes + at), inverse),
                             std::min(simd::W, shape.dim - at));
    }
}

}  // namespace twostroke
