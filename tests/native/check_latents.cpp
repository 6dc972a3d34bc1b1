// Storing latents and attending to them against plain loops in double.

#include <algorithm>
#include <array>
#include <type_traits>

#include "check.h"
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
    store_latents(&two_threads, s.step(0), 0, s.rows(s.q, 0, s.dim), s.k.data(), s.dim);
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

}  // namespace

void check_latents() {
    for (int64_t length : {1, 37, 300})
        for (auto [heads, rank, rope] : {std::array<int64_t, 3>{4, 32, 8}, {16, 64, 16}, {7, 40, 6}, {32, 24, 4}}) {
            check<float>("float", heads, rank, rope, length);
            check<BFloat16>("bfloat16", heads, rank, rope, length);
            check<Float16>("half", heads, rank, rope, length);
        }
}

}  // namespace twostroke
