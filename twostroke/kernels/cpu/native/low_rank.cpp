#include "low_rank.h"

#include <algorithm>

#include "simd.h"

namespace twostroke {
namespace {

constexpr int64_t MOST_RANK = 512;
constexpr int64_t TASK_ROWS = 4;
constexpr int TOGETHER = 4;  // independent sums, so that none waits for the one before
static_assert(SIDE_BY_SIDE % simd::W == 0, "a vector of outputs never crosses the end of 16");

const BFloat16 *plain(const uint16_t *at) { return (const BFloat16 *)at; }

// Computes K numbers of t [rank] = A x * scale, from `first` on.
template <int K>
void shrink_some(const LowRank &w, const BFloat16 *x, int64_t first, float *t) {
    const BFloat16 *a = plain(w.a) + first * w.inputs;
    simd::F sums[K];
    for (auto &sum : sums) sum = simd::zero();
    int64_t i = 0;
    for (; i + simd::W <= w.inputs; i += simd::W) {
        const simd::F values = simd::load(x + i);
        for (int k = 0; k < K; k++) sums[k] = simd::fma(simd::load(a + k * w.inputs + i), values, sums[k]);
    }
    if (const int left = int(w.inputs - i)) {
        const simd::F values = simd::load_up_to(x + i, left);
        for (int k = 0; k < K; k++)
            sums[k] = simd::fma(simd::load_up_to(a + k * w.inputs + i, left), values, sums[k]);
    }
    for (int k = 0; k < K; k++) t[first + k] = simd::reduce_add(sums[k]) * w.scale;
}

void shrink(const LowRank &w, const BFloat16 *x, float *t) {
    int64_t first = 0;
    for (; first + TOGETHER <= w.rank; first += TOGETHER) shrink_some<TOGETHER>(w, x, first, t);
    for (; first < w.rank; first++) shrink_some<1>(w, x, first, t);
}

template <class T>
void add_to(T *y, simd::F sum, int count) {
    simd::store_up_to(y, simd::add(simd::load_up_to(y, count), sum), count);
}

// y += B t, at the columns of `added`.
template <class T>
void expand(const LowRank &w, const float *t, const AddedPart &added, T *y) {
    constexpr int VECTORS = SIDE_BY_SIDE / simd::W;
    for (int64_t o = 0; o < w.outputs; o += SIDE_BY_SIDE) {
        simd::F sums[VECTORS];
        for (auto &sum : sums) sum = simd::zero();
        T *to = y + added.first + o / SIDE_BY_SIDE * added.step;
        const BFloat16 *b = plain(w.b) + o;
        if (o + SIDE_BY_SIDE <= w.outputs) {
            for (int64_t k = 0; k < w.rank; k++) {
                const simd::F factor = simd::set1(t[k]);
                for (int v = 0; v < VECTORS; v++)
                    sums[v] = simd::fma(factor, simd::load(b + k * w.outputs + v * simd::W), sums[v]);
            }
            for (int v = 0; v < VECTORS; v++) add_to(to + v * simd::W, sums[v], simd::W);
            continue;
        }
        for (int v = 0; v < VECTORS; v++) {
            const int left = int(std::min<int64_t>(simd::W, w.outputs - o - v * simd::W));
            if (left <= 0) break;
            for (int64_t k = 0; k < w.rank; k++)
                sums[v] = simd::fma(simd::set1(t[k]), simd::load_up_to(b + k * w.outputs + v * simd::W, left), sums[v]);
            add_to(to + v * simd::W, sums[v], left);
        }
    }
}

}  // namespace

void add_low_rank(Team *team, const RowAdapter *of_row, int64_t layer, std::initializer_list<AddedPart> parts,
                  const Rows &rows, Into into) {
    run_tasks(team, size_t((rows.count + TASK_ROWS - 1) / TASK_ROWS), [&](size_t task, size_t, bool) {
        const int64_t first = int64_t(task) * TASK_ROWS, end = std::min(rows.count, first + TASK_ROWS);
        float t[MOST_RANK];
        for (const AddedPart &added : parts) {
            for (int64_t r = first; r < end; r++) {
                if (!of_row[r]) continue;
                const LowRank &w = of_row[r][layer].*added.part;
                if (!w.a) continue;
                shrink(w, plain(rows.x + r * rows.x_stride), t);
                const int64_t row = r * rows.y_stride;
                if (into == Into::BFLOAT16)
                    expand(w, t, added, (BFloat16 *)rows.y + row);
                else
                    expand(w, t, added, (float *)rows.y + row);
            }
        }
    });
}

}  // namespace twostroke
