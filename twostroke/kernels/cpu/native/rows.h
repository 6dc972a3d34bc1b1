// The running softmax of some query rows of one sequence and one kv head, over its context tile by tile.
//
// The context is cut into splits of fixed length. Each is summed up on its own and merged into the total in order, so
// that splits may be computed by different threads and a row's result still is the same to the last bit.

#pragma once

#include <vector>

#include "attention.h"
#include "tile.h"

namespace twostroke {

constexpr int SPLIT = 256;  // tokens
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

    void clear(int rows, int lanes) {
        std::fill(peaks, peaks + rows, LOWEST);
        std::fill(weights, weights + rows * simd::W, 0.0f);
        std::fill(values, values + rows * lanes, 0.0f);
    }

    void merge(const Sums &split, int rows, int lanes) {
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
    int dim, words, lanes, groups;

    explicit Shape(const AttentionStep &step)
        : dim(int(step.head_dim)),
          words(dim / Math::PER_WORD),
          lanes(rounded_up(dim, simd::W)),
          groups(int(step.heads / step.kv_heads)) {}
};

// Query rows, words of them side by side: [tokens, groups] of one kv head, with what each may see.
struct Queries {
    int rows;
    float *words;    // [rows, words]
    int32_t *limits;  // [rows]: tokens that the row attends to
};

template <class Math, class T>
void load_queries(const Shape<Math> &shape, const AttentionStep &step, const T *q, int64_t q_stride,
                  int64_t first_token, int64_t kv_head, Queries &queries) {
    for (int row = 0; row < queries.rows; row++) {
        const int64_t token = first_token + row / shape.groups;
        const T *from = q + token * q_stride + (kv_head * shape.groups + row % shape.groups) * shape.dim;
        queries.limits[row] = step.positions[token] + 1;
        for (int at = 0; at < shape.words; at += simd::W) {
            const int n = std::min(simd::W, shape.words - at);
            simd::store_up_to(queries.words + row * shape.words + at, Math::load_words(from, at, n), n);
        }
    }
}

// A row's scores from column `at` on; those of tokens that it must not see are -infinity.
inline simd::F visible_scores(const float *scores, int at, int visible) {
    const simd::F x = simd::load(scores + at);
    if (at + simd::W <= visible) return x;
    return simd::keep_first(x, std::max(0, visible - at), simd::set1(-__builtin_inff()));
}

// Turns the scores of a product's rows into weights under their new peaks; `shrink`: what older sums are worth now.
// Phase by phase over all rows, because a single row's maximum and exponentials are one long chain of dependent steps.
template <class Math>
void weigh(int rows, const float *scores, int columns, const int *visible, float scale, float *peaks, float *sums,
           float *weights, float *shrink) {
    alignas(64) float change[simd::W * 2] = {};
    for (int r = 0; r < rows; r++) {
        simd::F highest = visible_scores(scores + r * TILE, 0, visible[r]);
        for (int c = simd::W; c < columns; c += simd::W)
            highest = simd::max(highest, visible_scores(scores + r * TILE, c, visible[r]));
        const float peak = std::max(peaks[r], simd::reduce_max(highest) * scale);
        change[r] = peaks[r] - peak;
        peaks[r] = peak;
    }
    for (int r = 0; r < rows; r += simd::W) simd::store(shrink + r, simd::exp2_of_negative(simd::load(change + r)));
    for (int r = 0; r < rows; r++) {
        const simd::F base = simd::set1(-peaks[r]), by = simd::set1(scale);
        simd::F total = simd::zero();
        for (int c = 0; c < columns; c += 2 * simd::W) {
            const simd::F low = Math::exp2(simd::fma(visible_scores(scores + r * TILE, c, visible[r]), by, base));
            const simd::F high =
                Math::exp2(simd::fma(visible_scores(scores + r * TILE, c + simd::W, visible[r]), by, base));
            total = simd::add(total, simd::add(low, high));
            Math::store_weights(weights + r * TILE, c, low, high);
        }
        simd::store(sums, simd::fma(simd::load(sums), simd::set1(shrink[r]), total));
        sums += simd::W;
    }
}

// One tile, packed, for all rows that see any of it. `start` is the position of its first token.
template <class Math>
void add_tile(const Shape<Math> &shape, const Queries &queries, int64_t start, int count, const float *keys,
              const float *values, float scale, Sums &sums) {
    alignas(64) float scores[MAX_ROWS * TILE], weights[MAX_ROWS * TILE];
    for (int first = 0; first < queries.rows; first += MAX_ROWS) {
        const int rows = std::min(MAX_ROWS, queries.rows - first);
        const int32_t *limits = queries.limits + first;
        const int64_t seen = std::min<int64_t>(count, *std::max_element(limits, limits + rows) - start);
        if (seen <= 0) continue;
        const int columns = rounded_up(seen, GROUP);
        multiply<Math>(rows, queries.words + first * shape.words, shape.words, keys, TILE, shape.words, nullptr, scores,
                       TILE, columns);
        int visible[MAX_ROWS];
        for (int r = 0; r < rows; r++) visible[r] = int(std::clamp<int64_t>(limits[r] - start, 0, count));
        alignas(64) float shrink[2 * simd::W];
        weigh<Math>(rows, scores, columns, visible, scale, sums.peaks + first, sums.weights + first * simd::W, weights,
                    shrink);
        multiply<Math>(rows, weights, TILE, values, shape.lanes, columns / Math::PER_WORD, shrink,
                       sums.values + first * shape.lanes, shape.lanes, shape.lanes);
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
