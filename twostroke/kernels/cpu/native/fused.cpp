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

// The order of the sum depends only on the width.
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

// The sum of a row's elements, in an order that depends only on the width.
template <class Load>
float sum_of(int64_t width, Load load) {
    simd::F sums[4];
    for (auto &sum : sums) sum = simd::zero();
    int lane = 0;
    for (int64_t i = 0; i < width; i += simd::W) {
        sums[lane] = simd::add(sums[lane], load(i, count_at(i, width)));
        lane = (lane + 1) % 4;
    }
    return simd::reduce_add(simd::add(simd::add(sums[0], sums[1]), simd::add(sums[2], sums[3])));
}

void layer_norm(const float *x, int64_t width, const Norm &by, float epsilon, uint16_t *y) {
    auto load = [x](int64_t i, int count) { return simd::load_up_to(x + i, count); };
    const simd::F mean = simd::set1(sum_of(width, load) / float(width));
    const float variance = sum_of(width, [&](int64_t i, int count) {
                               const simd::F less = simd::sub(load(i, count), mean);
                               return simd::keep_first(simd::mul(less, less), count, simd::zero());
                           }) / float(width);
    const simd::F inverse = simd::set1(1.0f / std::sqrt(variance + epsilon));
    for (int64_t i = 0; i < width; i += simd::W) {
        const int count = count_at(i, width);
        const simd::F scaled = simd::mul(simd::sub(load(i, count), mean), inverse);
        const simd::F weight = simd::load_up_to(by.weight + i, count), bias = simd::load_up_to(by.bias + i, count);
        simd::store_up_to((BFloat16 *)y + i, simd::fma(scaled, weight, bias), count);
    }
}

}  // namespace

void norm_rows(Team *team, const float *x, int64_t rows, int64_t width, const Norm &by, float epsilon, uint16_t *y,
               int64_t y_stride) {
    over_rows(team, rows, width, [=](int64_t r) {
        const float *row = x + r * width;
        if (by.bias) return layer_norm(row, width, by, epsilon, y + r * y_stride);
        norm(width, epsilon, by.weight, y + r * y_stride,
             [row](int64_t i, int count) { return simd::load_up_to(row + i, count); });
    });
}

void add_norm(Team *team, const float *y, int64_t rows, int64_t width, const Norm &by, float epsilon, float *x) {
    over_rows(team, rows, width, [=](int64_t r) {
        const float *from = y + r * width;
        float *to = x + r * width;
        const simd::F inverse = simd::set1(inverse_rms(
            width, epsilon, [from](int64_t i, int count) { return simd::load_up_to(from + i, count); }));
        for (int64_t i = 0; i < width; i += simd::W) {
            const int count = count_at(i, width);
            const simd::F scaled = simd::mul(simd::load_up_to(from + i, count), inverse);
            const simd::F weight = simd::load_up_to(by.weight + i, count);
            simd::store_up_to(to + i, simd::fma(scaled, weight, simd::load_up_to(to + i, count)), count);
        }
    });
}

void cap_rows(Team *team, float *x, int64_t rows, int64_t width, float softcap) {
    over_rows(team, rows, width, [=](int64_t r) {
        float *row = x + r * width;
        const simd::F by = simd::set1(1.0f / softcap), most = simd::set1(softcap);
        for (int64_t i = 0; i < width; i += simd::W) {
            const int count = count_at(i, width);
            const simd::F capped = simd::tanh(simd::mul(simd::load_up_to(row + i, count), by));
            simd::store_up_to(row + i, simd::mul(capped, most), count);
        }
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

// Calls f(place in y, vector of the token's row of the table, number of its valid lanes) for all of y.
template <class F>
static void with_rows(const uint16_t *table, const int32_t *tokens, int64_t rows, int64_t width, float *y, F f) {
    for (int64_t r = 0; r < rows; r++) {
        const auto *from = (const BFloat16 *)table + int64_t(tokens[r]) * width;
        for (int64_t i = 0; i < width; i += simd::W) {
            const int count = count_at(i, width);
            f(y + r * width + i, simd::load_up_to(from + i, count), count);
        }
    }
}

void gather(const uint16_t *table, const int32_t *tokens, int64_t rows, int64_t width, float scale, float *y) {
    const simd::F by = simd::set1(scale);
    with_rows(table, tokens, rows, width, y,
              [by](float *to, simd::F x, int count) { simd::store_up_to(to, simd::mul(x, by), count); });
}

void add_gathered(const uint16_t *table, const int32_t *tokens, int64_t rows, int64_t width, float *y) {
    with_rows(table, tokens, rows, width, y, [](float *to, simd::F x, int count) {
        simd::store_up_to(to, simd::add(simd::load_up_to(to, count), x), count);
    });
}

}  // namespace twostroke
