// Storing latents and attending to them against plain loops in double.

#include <algorithm>
#include <array>
#include <type_traits>

#include "check.h"
#include "expanded.h"
#include "latents.h"

namespace twostroke {
namespace {

constexpr int64_t BLOCK = 16, PAGES = 40;

// One sequence whose last tokens ask; its pages lie in another order than its blocks.
template <class T>
struct Sequence {
    int64_t heads, rank, dim, length, asked;
    AttentionRule rule;
    std::vector<T> pool, q, k, out;
    std::vector<int32_t> table, positions, starts;
    std::vector<int64_t> slots;
    std::vector<float> cosines, sines;

    Sequence(int64_t h, int64_t r, int64_t rope, int64_t tokens, int64_t last)
        : heads(h), rank(r), dim(r + rope), length(tokens), asked(last), rule{0.2f, 0, 0, 0},
          pool(size_t(PAGES * BLOCK * dim), Memory<T>::to(1e30f)), out(size_t(tokens * h * r)) {
        std::normal_distribution<float> normal(0.0f, 1.0f);
        auto fill = [&](std::vector<T> &rows, int64_t count) {
            for (int64_t i = 0; i < count; i++) rows.push_back(Memory<T>::to(normal(source)));
        };
        fill(q, tokens * heads * dim);
        fill(k, tokens * dim);
        for (int64_t page = 0; page < PAGES; page++) table.push_back(int32_t(page * 17 % PAGES));
        for (int64_t at = 0; at < tokens; at++) {
            positions.push_back(int32_t(at));
            slots.push_back(table[size_t(at / BLOCK)] * BLOCK + at % BLOCK);
            for (int64_t pair = 0; pair < rope / 2; pair++) {
                cosines.push_back(std::cos(float(at) / float(pair + 1)));
                sines.push_back(std::sin(float(at) / float(pair + 1)));
            }
        }
    }

    // The step of tokens first .. length - 1.
    AttentionStep step(int64_t first) {
        const int64_t half = (dim - rank) / 2;
        AttentionStep s = {};
        s.pool = pool.data(), s.page_stride = BLOCK * dim * int64_t(sizeof(T));
        s.block = BLOCK, s.heads = heads, s.kv_heads = 1, s.head_dim = dim, s.latent_rank = rank;
        s.tokens = length - first, s.sequences = 1, s.ropes = 1, s.rules = &rule;
        s.cosines = cosines.data() + first * half, s.sines = sines.data() + first * half;
        s.write_slots = slots.data() + first, s.positions = positions.data() + first;
        starts = {0, int32_t(s.tokens)};
        s.query_starts = starts.data(), s.block_tables = table.data(), s.table_stride = PAGES;
        s.dtype = Memory<T>::DTYPE;
        s.form = std::is_same_v<T, float> ? Form::FLOAT32 : std::is_same_v<T, BFloat16> ? Form::BFLOAT16 : Form::FLOAT16;
        return s;
    }

    HeadRows rows(std::vector<T> &of, int64_t first, int64_t width) {
        return {of.data() + first * heads * width, heads * width, width};
    }

    T *stored(int64_t at) { return pool.data() + slots[size_t(at)] * dim; }
};

template <class T>
double score(Sequence<T> &s, int64_t token, int64_t head, int64_t at) {
    double sum = 0;
    for (int64_t d = 0; d < s.dim; d++)
        sum += double(Memory<T>::of(s.q[size_t((token * s.heads + head) * s.dim + d)])) * Memory<T>::of(s.stored(at)[d]);
    return sum * s.rule.scale;
}

template <class T>
bool is_right(Sequence<T> &s, int64_t token, int64_t head) {
    std::vector<double> weights;
    double total = 0;
    for (int64_t at = 0; at <= token; at++) {
        weights.push_back(std::exp(score(s, token, head, at)));
        total += weights.back();
    }
    for (int64_t d = 0; d < s.rank; d++) {
        double truth = 0;
        for (int64_t at = 0; at <= token; at++)
            truth += weights[size_t(at)] / total * Memory<T>::of(s.stored(at)[d]);
        const T ours = s.out[size_t((token * s.heads + head) * s.rank + d)];
        if (!is_close(Memory<T>::of(ours), truth, Memory<T>::SLACK, Memory<T>::SLACK)) return false;
    }
    return true;
}

template <class T>
void check(const char *name, int64_t heads, int64_t rank, int64_t rope, int64_t length) {
    const std::string what = std::string("latents, ") + name + ", " + std::to_string(heads) + " heads of " +
                             std::to_string(rank) + " + " + std::to_string(rope);
    const int64_t asked = std::min<int64_t>(length, 5), first = length - asked;
    Sequence<T> s(heads, rank, rope, length, asked);
    const std::vector<T> before = s.k;
    HeadRows ends = s.rows(s.q, 0, s.dim);
    ends.at = s.q.data() + rank;
    store_latents(&two_threads, s.step(0), 0, ends, s.k.data(), s.dim);
    bool is_stored = true;
    for (int64_t at = 0; at < length; at++)
        for (int64_t d = 0; d < rank; d++)
            is_stored = is_stored && Memory<T>::of(s.stored(at)[d]) == Memory<T>::of(before[size_t(at * s.dim + d)]);
    expect(is_stored, what + ": another latent is stored than was given");
    attend_latents(&two_threads, s.step(first), 0, s.rows(s.q, first, s.dim), s.rows(s.out, first, rank));
    bool all_right = true;
    for (int64_t token = first; token < length; token++)
        for (int64_t head = 0; head < heads; head += 3) all_right = all_right && is_right(s, token, head);
    expect(all_right, what + ": not what loops give");
    const std::vector<T> together = s.out;
    attend_latents(nullptr, s.step(length - 1), 0, s.rows(s.q, length - 1, s.dim), s.rows(s.out, length - 1, rank));
    expect(std::memcmp(together.data(), s.out.data(), s.out.size() * sizeof(T)) == 0,
           what + ": a row depends on its neighbours");
}

// Weights [outputs, inputs] in panels.
struct Packed {
    std::vector<uint16_t> given, panels;
    Linear w = {};

    Packed(int64_t outputs, int64_t inputs) : given(numbers(outputs * inputs, 0.2f)) {
        panels.resize(size_t((outputs + PANEL - 1) / PANEL * PANEL * inputs));
        for (int64_t o = 0; o < outputs; o++)
            for (int64_t i = 0; i < inputs; i++)
                panels[size_t(((o / PANEL * (inputs / 2) + i / 2) * PANEL + o % PANEL) * 2 + i % 2)] =
                    given[size_t(o * inputs + i)];
        w.panels = panels.data(), w.outputs = outputs, w.inputs = inputs, w.kind = BFLOAT16;
    }

    double times(int64_t output, const BFloat16 *x) const {
        double sum = 0;
        for (int64_t i = 0; i < w.inputs; i++)
            sum += double(as_float(given[size_t(output * w.inputs + i)])) * Memory<BFloat16>::of(x[i]);
        return sum;
    }
};

// What a head's row adds up, in double, of keys and values that are never rounded.
std::vector<double> expanded_row(Sequence<BFloat16> &s, const LatentWidths &widths, const Packed &up, int64_t token,
                                 int64_t head, const BFloat16 *q) {
    std::vector<double> sums(size_t(widths.value_dim));
    double total = 0;
    for (int64_t at = 0; at <= token; at++) {
        const BFloat16 *stored = s.stored(at);
        double score = 0;
        for (int64_t d = 0; d < widths.key_dim(); d++) {
            const bool is_plain = d < widths.plain_dim;
            const double key = is_plain ? up.times(head * widths.made_dim() + d, stored)
                                        : double(Memory<BFloat16>::of(stored[widths.rank + d - widths.plain_dim]));
            score += key * Memory<BFloat16>::of(q[d]);
        }
        const double weight = std::exp(score * s.rule.scale);
        total += weight;
        for (int64_t d = 0; d < widths.value_dim; d++)
            sums[size_t(d)] += weight * up.times(head * widths.made_dim() + widths.plain_dim + d, stored);
    }
    for (double &sum : sums) sum /= total;
    return sums;
}

// Heads are made in two portions, of a context that ends within a page.
void check_expanded(int64_t length) {
    const LatentWidths widths{32, 16, 8, 20};
    const int64_t heads = 16, tokens = std::min<int64_t>(length, 33), first = length - tokens, width = heads * 20;
    Sequence<BFloat16> s(heads, widths.rank, widths.rope_dim, length, tokens);
    HeadRows ends = s.rows(s.q, 0, s.dim);
    ends.at = s.q.data() + widths.rank;
    store_latents(&two_threads, s.step(0), 0, ends, s.k.data(), s.dim);
    const Packed up(heads * widths.made_dim(), widths.rank);
    const std::vector<uint16_t> q = numbers(tokens * heads * widths.key_dim());
    std::vector<BFloat16> out(size_t(tokens * width));
    ExpandedAttention expanded;
    Prepared prepared;
    const AttentionStep step = s.step(first);
    expanded.begin(widths, up.w, step, 0, 0);
    for (int64_t head = 0; head < heads; head += 8) {
        expanded.make(&two_threads, head, 8, prepared);
        attend(&two_threads, expanded.step(), 0,
               {q.data() + head * widths.key_dim(), heads * widths.key_dim(), out.data() + head * 20, width, nullptr});
    }
    bool all_right = true;
    for (int64_t token = 0; token < tokens; token += 8)
        for (int64_t head = 0; head < heads; head += 5) {
            const auto *row = (const BFloat16 *)q.data() + (token * heads + head) * widths.key_dim();
            const std::vector<double> truth = expanded_row(s, widths, up, first + token, head, row);
            for (int64_t d = 0; d < 20; d++)
                all_right = all_right && is_close(Memory<BFloat16>::of(out[size_t(token * width + head * 20 + d)]),
                                                  truth[size_t(d)], 0.03, 0.03);
        }
    expect(all_right, "latents, expanded over " + std::to_string(length) + ": not what loops give");
}

}  // namespace

void check_latents() {
    for (int64_t length : {33, 300}) check_expanded(length);
    for (int64_t length : {1, 37, 300})
        for (auto [heads, rank, rope] : {std::array<int64_t, 3>{4, 32, 8}, {16, 64, 16}, {7, 40, 6}, {32, 24, 4}}) {
            check<float>("float", heads, rank, rope, length);
            check<BFloat16>("bfloat16", heads, rank, rope, length);
            check<Float16>("half", heads, rank, rope, length);
        }
}

}  // namespace twostroke
