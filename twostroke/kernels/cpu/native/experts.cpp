#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "simd.h"

namespace twostroke {
namespace {

constexpr int64_t WORTH_A_TEAM = 16384;  // elements; fewer are done before a second thread has woken up
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LEAST_SUM = 1e-20f;  // added to the sum of sigmoids, which may all be zero

template <class F>
void over_rows(Team *team, int64_t rows, int64_t width, F row) {
    auto part_of = [&](int part, int parts) {
        for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; r++) row(r);
    };
    if (rows * width < WORTH_A_TEAM) return part_of(0, 1);
    run_parts(team, part_of);
}

// Finds the indices of the `most` highest of `count` numbers, ascending.
void choose(const float *numbers, int64_t count, int64_t most, int32_t *chosen) {
    int64_t found = 0;  // number of entries of `chosen`, the highest first
    for (int32_t place = 0; place < count; place++) {
        int64_t at = found;
        while (at > 0 && numbers[place] > numbers[chosen[at - 1]]) at--;
        if (at == most) continue;
        found = std::min(found + 1, most);
        std::move_backward(chosen + at, chosen + found - 1, chosen + found);
        chosen[at] = place;
    }
    std::sort(chosen, chosen + most);
}

// The score of a group: the best score of its experts, or the sum of the two best.
float best_of(const float *ranks, int64_t count, bool of_two) {
    const float *best = std::max_element(ranks, ranks + count);
    if (!of_two) return *best;
    float second = -INFINITY;
    for (const float *at = ranks; at < ranks + count; at++)
        if (at != best) second = std::max(second, *at);
    return *best + second;
}

// Sets the scores of experts to -infinity if a row does not choose their group.
void hide_other_groups(const Experts &experts, float *ranks) {
    static thread_local std::vector<float> best;
    static thread_local std::vector<int32_t> chosen;
    const int64_t size = experts.count / experts.groups;
    best.resize(size_t(experts.groups));
    chosen.resize(size_t(experts.groups));
    for (int64_t group = 0; group < experts.groups; group++)
        best[size_t(group)] = best_of(ranks + group * size, size, experts.correction != nullptr);
    choose(best.data(), experts.groups, experts.groups_per_token, chosen.data());
    const int32_t *end = chosen.data() + experts.groups_per_token;
    for (int32_t group = 0; group < experts.groups; group++)
        if (std::find(chosen.data(), const_cast<int32_t *>(end), group) == end)
            std::fill(ranks + group * size, ranks + (group + 1) * size, -INFINITY);
}

// Chooses a row's experts by its logits. It replaces the logits by their sigmoids where those are the scores.
void choose_experts(const Experts &experts, float *logits, int32_t *chosen) {
    static thread_local std::vector<float> ranks;
    const float *by = logits;
    if (experts.correction || experts.groups_per_token < experts.groups) {
        ranks.assign(logits, logits + experts.count);
        for (int64_t expert = 0; experts.correction && expert < experts.count; expert++) {
            logits[expert] = 1 / (1 + std::exp(-logits[expert]));
            ranks[size_t(expert)] = logits[expert] + experts.correction[expert];
        }
        if (experts.groups_per_token < experts.groups) hide_other_groups(experts, ranks.data());
        by = ranks.data();
    }
    choose(by, experts.count, experts.per_token, chosen);
}

// Replaces logits by e^(logit - highest), and returns their sum.
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

// Computes the weights of a row's experts from its logits, or from their sigmoids.
void weigh(float *scores, const Experts &experts, const int32_t *chosen, float *weights) {
    float total = 1;
    if (!experts.correction)
        total = exponentials(scores, experts.count, *std::max_element(scores, scores + experts.count));
    if (experts.is_normalised) {
        total = experts.correction ? LEAST_SUM : 0;
        for (int64_t k = 0; k < experts.per_token; k++) total += scores[chosen[k]];
    }
    for (int64_t k = 0; k < experts.per_token; k++) weights[k] = scores[chosen[k]] / total * experts.scaling;
}

}  // namespace

void Routing::route(Team *team, const Experts &experts, float *logits, int64_t rows, int64_t stride) {
    rows_ = rows;
    per_token_ = experts.per_token;
    experts_.resize(size_t(pairs()));
    weights_.resize(size_t(pairs()));
    places_.resize(size_t(pairs()));
    over_rows(team, rows, experts.count * 4, [&](int64_t r) {
        choose_experts(experts, logits + r * stride, &experts_[size_t(r * per_token_)]);
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
    for (int64_t index = 0; index < experts.held; index++) {
        const size_t expert = size_t(experts.first + index);
        if (starts_[expert] < starts_[expert + 1])
            found.push_back({&(experts.table[index].*weights), starts_[expert], starts_[expert + 1]});
    }
    return found;
}

void Routing::add(Team *team, const Experts &experts, const float *answers, const float *shared, const float *gates,
                  int64_t gate_stride, int64_t width, float *x) const {
    over_rows(team, rows_, per_token_ * width, [&](int64_t r) {
        size_t begin = size_t(r * per_token_), end = size_t((r + 1) * per_token_);  // a row's experts are ascending
        while (begin < end && experts_[begin] < experts.first) begin++;
        while (begin < end && experts_[end - 1] >= experts.first + experts.held) end--;
        const float gate = shared && gates ? 1 / (1 + std::exp(-gates[r * gate_stride])) : 1;
        for (int64_t i = 0; i < width; i += simd::W) {
            const int count = int(std::min<int64_t>(simd::W, width - i));
            simd::F sum = simd::zero();
            for (size_t pair = begin; pair < end; pair++)
                sum = simd::fma(simd::set1(weights_[pair]),
                                simd::load_up_to(answers + places_[pair] * width + i, count), sum);
            if (shared) sum = simd::fma(simd::set1(gate), simd::load_up_to(shared + r * width + i, count), sum);
            simd::store_up_to(x + r * width + i, simd::add(simd::load_up_to(x + r * width + i, count), sum), count);
        }
    });
}

}  // namespace twostroke
