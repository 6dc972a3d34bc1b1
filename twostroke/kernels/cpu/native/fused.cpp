#include "fused.h"

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace twostroke {
namespace {

constexpr int64_t WORTH_A_TEAM = 16384;  // elements; fewer are done before a second thread has woken up

inline int count_at(int64_t i, int64_t width) { return int(std::min<int64_t>(simd::W, width - i)); }

template <class F>
void over_rows(Team *team, int64_t rows, int64_t width, F row) {
    auto part_of = [&](int part, int parts) {
        for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; r++) row(r);
    };
    if (rows * width < WORTH_A_TEAM) return part_of(0, 1);
    run_parts(team, part_of);
}

// The sum's order depends on the width alone.
template <class Load>
float inverse_rms(int64_t width, float epsilon, Load load) {
    simd::F squares[4];
    for (auto &sum : squares) sum = simd::zero();
    int lane = 0;
    for (int64_t i = 0; i < width; i += simd::W) {
        const simd::F x = load(i, count_at(i, width));
        squares[lane] = simd::fma(x, x, squares[lane]);
        lane = (lane + 1) % 4;
    }
    const simd::F sum = simd::add(simd::add(squares[0], squares[1]), simd::add(squares[2], squares[3]));
    return 1.0f / std::sqrt(simd::reduce_add(sum) / float(width) + epsilon);
}

template <class Load>
void norm(int64_t width, float epsilon, const float *weight, uint16_t *y, Load load) {
    const simd::F inverse = simd::set1(inverse_rms(width, epsilon, load));
    for (int64_t i = 0; i < width; i += simd::W) {
        const int count = count_at(i, width);
        const simd::F scaled = simd::mul(load(i, count), inverse);
        simd::store_up_to((BFloat16 *)y + i, simd::mul(scaled, simd::load_up_to(weight + i, count)), count);
    }
}

}  // namespace

void rms_norm(Team *team, const float *x, int64_t rows, int64_t width, const float *weight, float epsilon, uint16_t *y,
              int64_t y_stride) {
    over_rows(team, rows, width, [=](int64_t r) {
        const float *row = x + r * width;
        norm(width, epsilon, weight, y + r * y_stride,
             [row](int64_t i, int count) { return simd::load_up_to(row + i, count); });
    });
}

void head_norm(Team *team, uint16_t *x, int64_t rows, int64_t stride, int64_t heads, int64_t width,
               const float *weight, float epsilon) {
    over_rows(team, rows, heads * width, [=](int64_t r) {
        for (int64_t head = 0; head < heads; head++) {
            uint16_t *at = x + r * stride + head * width;
            norm(width, epsilon, weight, at,
                 [at](int64_t i, int count) { return simd::load_up_to((const BFloat16 *)at + i, count); });
        }
    });
}

void gather(const uint16_t *table, const int32_t *tokens, int64_t rows, int64_t width, float *y) {
    for (int64_t r = 0; r < rows; r++) {
        const auto *from = (const BFloat16 *)table + int64_t(tokens[r]) * width;
        for (int64_t i = 0; i < width; i += simd::W) {
            const int count = count_at(i, width);
            simd::store_up_to(y + r * width + i, simd::load_up_to(from + i, count), count);
        }
    }
}

}  // namespace twostroke
