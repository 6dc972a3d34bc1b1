#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "simd.h"

namespace twostroke {
namespace {

constexpr int64_t WORTH_A_TEAM = 16384;  // elements; fewer are done before a second thread has woken up
constexpr float LOG2_E = 1.4426950408889634f;

template <class F>
void over_rows(Team *team, int64_t rows, int64_t width, F row) {
    auto part_of = [&](int part, int parts) {
        for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; r++) row(r);
    };
    if (rows * width < WORTH_A_TEAM) return part_of(0, 1);
    run_parts(team, part_of);
}

// The experts of the highest logits, ascending.
void choose(const float *logits, int64_t count, int64_t per_token, int32_t *chosen) {
    int64_t found = 0;  // `chosen` holds so many, the highest first
    for (int32_t expert = 0; expert < count; expert++) {
        int64_t at = found;
        while (at > 0 && logits[expert] > logits[chosen[at - 1]]) at--;
        if (at == per_token) continue;
        found = std::min(found + 1, per_token);
        std::move_backward(chosen + at, chosen + found - 1, chosen + found);
        chosen[at] = expert;
    }
    std::sort(chosen, chosen + per_token);
}

// Logits become e^(logit - highest), in place; returns their sum.
float exponentials(float *logits, int64_t count, float highest) {
    const simd::F base = simd::set1(highest), by = simd::set1(LOG2_E);
    simd::F sum = simd::zero();
    for (int64_t i = 0; i < count; i += simd::W) {
        const int some = int(std::min<int64_t>(simd::W, count - i));
        const simd::F below = simd::mul(simd::sub(simd::load_up_to(logits + i, some), base), by);
        const simd::F power = simd::keep_first(simd::exp2_of_negative(below), some, simd::zero());
        simd::store_up_to(logits + i, power, some);
        sum = simd::add(sum, power);
    }
    return simd::reduce_add(sum);
}

void weigh(float *logits, const Experts &experts, const int32_t *chosen, float *weights) {
    float total = exponentials(logits, experts.count, *std::max_element(logits, logits + experts.count));
    if (experts.is_normalised) {
        total = 0;
        for (int64_t k = 0; k < experts.per_token; k++) total += logits[chosen[k]];
    }
    for (int64_t k = 0; k < experts.per_token; k++) weights[k] = logits[chosen[k]] / total;
}

}  // namespace

void Routing::route(Team *team, const Experts &experts, float *logits, int64_t rows, int64_t stride) {
    rows_ = rows;
    per_token_ = experts.per_token;
    experts_.resize(size_t(pairs()));
    weights_.resize(size_t(pairs()));
    places_.resize(size_t(pairs()));
    over_rows(team, rows, experts.count * 4, [&](int64_t r) {
        choose(logits + r * stride, experts.count, per_token_, &experts_[size_t(r * per_token_)]);
        weigh(logits + r * stride, experts, &experts_[size_t(r * per_token_)], &weights_[size_t(r * per_token_)]);
    });
    starts_.assign(size_t(experts.count + 1), 0);
    for (int32_t expert : experts_) starts_[size_t(expert + 1)]++;
    for (size_t expert = 0; expert < size_t(experts.count); expert++) {
        experts.tokens[expert] += starts_[expert + 1];
        starts_[expert + 1] += starts_[expert];
    }
    std::vector<int64_t> next(starts_.begin(), starts_.end() - 1);
    for (size_t pair = 0; pair < size_t(pairs()); pair++) places_[pair] = next[size_t(experts_[pair])]++;
}

void Routing::gather(Team *team, const uint16_t *x, int64_t stride, uint16_t *grouped) const {
    over_rows(team, rows_, per_token_ * stride, [&](int64_t r) {
        for (int64_t k = 0; k < per_token_; k++)
            std::memcpy(grouped + places_[size_t(r * per_token_ + k)] * stride, x + r * stride,
                        size_t(stride) * sizeof *x);
    });
}

std::vector<RowGroup> Routing::groups(const Experts &experts, Linear Expert::*weights) const {
    std::vector<RowGroup> found;
    for (size_t expert = 0; expert < size_t(experts.count); expert++)
        if (starts_[expert] < starts_[expert + 1])
            found.push_back({&(experts.table[expert].*weights), starts_[expert], starts_[expert + 1]});
    return found;
}

void Routing::add(Team *team, const float *answers, const float *shared, const float *gates, int64_t gate_stride,
                  int64_t width, float *x) const {
    over_rows(team, rows_, per_token_ * width, [&](int64_t r) {
        const float gate = shared ? 1 / (1 + std::exp(-gates[r * gate_stride])) : 0;
        for (int64_t i = 0; i < width; i += simd::W) {
            const int count = int(std::min<int64_t>(simd::W, width - i));
            simd::F sum = simd::zero();
            for (size_t pair = size_t(r * per_token_); pair < size_t((r + 1) * per_token_); pair++)
                sum = simd::fma(simd::set1(weights_[pair]),
                                simd::load_up_to(answers + places_[pair] * width + i, count), sum);
            if (shared) sum = simd::fma(simd::set1(gate), simd::load_up_to(shared + r * width + i, count), sum);
            simd::store_up_to(x + r * width + i, simd::add(simd::load_up_to(x + r * width + i, count), sum), count);
        }
    });
}

}  // namespace twostroke
