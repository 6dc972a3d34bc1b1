#include "latents.h"

#include <vector>

#include "attend_bytes.h"
#include "attend_tasks.h"
#include "latent_tile.h"
#include "rope.h"

namespace twostroke {
namespace {

constexpr int64_t ALONE_BYTES = 1 << 15;  // below this, waking the team costs more than it saves
constexpr int64_t GROUP_HEADS = 16;       // least heads of a task: fewer would read latents again for too few products
constexpr int KEY_TOKENS = 32;    // tokens that are multiplied at a time: they stay in a near cache, beside a product's queries
constexpr int CHUNK_TOKENS = 64;  // tokens that are added up at a time: their numbers stay in a near cache
constexpr int BAND_ROWS = 3 * MAX_ROWS;  // rows per pass over some tokens: queries of more would leave the cache

// Calls f with a value of the type of the pool's numbers. Latents only have forms without scales.
template <class F>
void with_numbers(Form form, F f) {
    switch (form) {
        case Form::FLOAT32: return f(float());
        case Form::BFLOAT16: return f(BFloat16());
        case Form::FLOAT16: return f(Float16());
        default: return;
    }
}

// Calls f with the class that multiplies the step's rows with the pool's numbers.
template <class F>
void with_latents(const AttentionStep &step, F f) {
#if defined(__AVX512BF16__)
    if (step.form == Form::BFLOAT16 && step.dtype == BFLOAT16_ROWS) return f(PairLatents());
#endif
    with_numbers(step.form, [&](auto number) { f(FloatLatents<decltype(number)>()); });
}

// The step for the planning of tasks: a group of neighbouring heads counts as one kv head, and head_dim is the width of
// sums.
AttentionStep step_of_groups(const AttentionStep &step) {
    AttentionStep groups = step;
    groups.kv_heads = step.heads % GROUP_HEADS == 0 ? step.heads / GROUP_HEADS : 1;
    groups.head_dim = rounded_up(step.latent_rank, UNIT);
    return groups;
}

// Calls f(first row, number of rows) for all `count` rows in products of nearly equal size. The number of rows is a
// compile-time constant.
template <class F>
void by_even_rows(int count, F f) {
    const int products = (count + MAX_ROWS - 1) / MAX_ROWS;
    for (int p = 0; p < products; p++) {
        const int first = count * p / products, rows = count * (p + 1) / products - first;
        by_rows(rows, [&](int, auto constant) { f(first, constant); });
    }
}

// The part of a task's context in one split: each token's row.
template <class T>
struct SplitTokens {
    int64_t start;
    int count;
    const T *rows[SPLIT];  // the last one is repeated once after it
};

// Tokens to prefetch: KEY_TOKENS after those that are multiplied, in the split or in the next.
template <class T>
struct Ahead {
    const SplitTokens<T> &split, *next;
    bool is_first;  // whether this is the first product over the split: later ones find its tokens in a cache

    // The row to prefetch while token `t` is multiplied; the token's own where there is nothing to prefetch.
    const T *row(int t) const {
        const int at = t + KEY_TOKENS;
        if (!is_first || (at >= split.count && at < SPLIT)) return split.rows[t];
        if (at < SPLIT) return split.rows[at];
        return next && at - SPLIT < next->count ? next->rows[at - SPLIT] : split.rows[t];
    }
};

// The rows of a task, or a band of them. Groups of heads use this memory in turn.
struct SplitRows {
    int rows;
    Limits *limits;  // [rows]
    float *scores;   // [BAND_ROWS, SPLIT], then weights
};

// The rows of a task for one group of heads.
struct GroupRows {
    float *queries;  // [rows, row_floats]
    Sums total, split;
};

template <class Latents>
class LatentAttention : public AttentionTasks<FloatMath<float>> {
  public:
    using T = typename Latents::Element;
    using Tasks = AttentionTasks<FloatMath<float>>;

    LatentAttention(const AttentionStep &step, const AttentionStep &groups, int64_t layer, const HeadRows &q,
                    const HeadRows &out)
        : Tasks(groups, layer, {}), dim_(int(step.head_dim)), rank_(int(step.latent_rank)),
          row_floats_(rounded_up(dim_, UNIT) / 2 * Latents::KEY_PARTS), queries_(q), sums_(out) {}

  private:
    using Tasks::partial, Tasks::pool_, Tasks::rows_of, Tasks::shape_, Tasks::step_;

    void compute(const Task &task, const Task *, bool) const override {
        const int rows = rows_of(task), lanes = shape_.lanes;
        const int64_t limit_floats = rounded_up(2 * rows, 16), queries = rows * row_floats_;
        const int64_t sums = rounded_up(Sums::floats(rows, lanes), 16), scores = BAND_ROWS * SPLIT;
        float *at = scratch(size_t(limit_floats + scores + task.heads * (queries + 2 * sums)));
        auto take = [&at](int64_t count) { return (at += count) - count; };
        const SplitRows all{rows, (Limits *)take(limit_floats), take(scores)};
        find_limits(task, all.limits);
        std::vector<GroupRows> groups(size_t(task.heads));
        for (size_t g = 0; g < groups.size(); g++) {
            groups[g] = {take(queries), Sums::in(take(sums), rows, lanes), Sums::in(take(sums), rows, lanes)};
            load(task, task.first_head + int64_t(g), groups[g].queries);
            groups[g].total.clear(rows, lanes);
        }
        SplitTokens<T> splits[2];
        find(task, 0, splits[0]);
        for (int64_t split = 0; split < task.splits; split++) {
            const SplitTokens<T> &tokens = splits[split % 2], *next = nullptr;
            if (split + 1 < task.splits) find(task, split + 1, splits[(split + 1) % 2]), next = &splits[(split + 1) % 2];
            for (const GroupRows &group : groups) {
                const Sums into = task.is_partial ? partial(task, split) : group.split;
                sum_up_split(tokens, {tokens, next, &group == groups.data()}, group.queries, all, into);
                if (!task.is_partial) group.total.merge(into, rows, lanes);
            }
        }
        for (size_t g = 0; g < groups.size() && !task.is_partial; g++)
            finish(task, task.first_head + int64_t(g), groups[g].total);
    }

    void find(const Task &task, int64_t split, SplitTokens<T> &tokens) const {
        tokens.start = (task.first_split + split) * SPLIT;
        tokens.count = int(std::min<int64_t>(task.context - tokens.start, SPLIT));
        const int32_t *pages = step_.block_tables + task.sequence * step_.table_stride;
        for (int t = 0; t < tokens.count; t++) {
            const int64_t position = tokens.start + t;
            const char *page = pool_ + pages[position / step_.block] * step_.page_stride;
            tokens.rows[t] = (const T *)page + position % step_.block * dim_;
        }
        if (tokens.count < SPLIT) tokens.rows[tokens.count] = tokens.rows[tokens.count - 1];
    }

    void sum_up_split(const SplitTokens<T> &tokens, Ahead<T> ahead, const float *queries, const SplitRows &all,
                      const Sums &sums) const {
        const int bands = (all.rows + BAND_ROWS - 1) / BAND_ROWS;
        for (int b = 0; b < bands; b++, ahead.is_first = false) {
            const int first = all.rows * b / bands, end = all.rows * (b + 1) / bands;
            sum_up_band(tokens, ahead, queries + first * row_floats_, {end - first, all.limits + first, all.scores},
                        sums.from(first, shape_.lanes));
        }
    }

    // Multiplies some tokens at a time with all rows of the band, so that they stay in a near cache.
    void sum_up_band(const SplitTokens<T> &tokens, const Ahead<T> &ahead, const float *queries, const SplitRows &of,
                     const Sums &sums) const {
        const int seen = int(seen_of(of.limits, of.rows, tokens.start, tokens.count)), lanes = shape_.lanes;
        sums.clear(of.rows, lanes);
        if (seen <= 0) return;
        for (int first = 0; first < seen; first += KEY_TOKENS)
            multiply_keys(tokens, ahead, queries, of, first, std::min(first + KEY_TOKENS, seen));
        const Scoring by = scoring();
        const int columns = rounded_up(seen, UNIT);
        const Scales none = {};
        for (int r = 0; r < of.rows; r++) {
            float *row = of.scores + r * SPLIT;
            by.cap(row, 0, columns);
            hide(row, of.limits[r], tokens.start, tokens.count, columns);
            sums.peaks[r] =
                weigh<typename Latents::Weights>(row, columns, by.scale, none, sums.weights + r * simd::W);
        }
        for (int first = 0; first < seen; first += CHUNK_TOKENS)
            add_values(tokens, of, first, std::min(CHUNK_TOKENS, seen - first), sums);
    }

    // Computes the scores of tokens first .. end - 1, and prefetches those after them.
    void multiply_keys(const SplitTokens<T> &tokens, const Ahead<T> &ahead, const float *queries, const SplitRows &of,
                       int first, int end) const {
        const int products = (of.rows + MAX_ROWS - 1) / MAX_ROWS;
        int product = 0;
        by_even_rows(of.rows, [&](int row, auto count) {
            constexpr int ROWS = decltype(count)::value;
            const float *own = queries + row * row_floats_;
            float *scores = of.scores + row * SPLIT;
            int t = first;
            for (; t + TILE_TOKENS <= end; t += TILE_TOKENS) {
                const T *next[TILE_TOKENS];
                for (int i = 0; i < TILE_TOKENS; i++) next[i] = ahead.row(t + i);
                const Lines<TILE_TOKENS> lines(next, dim_, product, products);
                multiply_tokens<Latents, ROWS, TILE_TOKENS>(own, row_floats_, tokens.rows + t, dim_, scores + t, lines);
            }
            for (; t < end; t++)
                multiply_tokens<Latents, ROWS, 1>(own, row_floats_, tokens.rows + t, dim_, scores + t,
                                                  Lines<1>(tokens.rows + t, dim_, 0, 1));
            product++;
        });
    }

    void add_values(const SplitTokens<T> &tokens, const SplitRows &of, int first, int count, const Sums &sums) const {
        by_even_rows(of.rows, [&](int row, auto rows) {
            add_tokens<Latents, decltype(rows)::value>(of.scores + row * SPLIT, first, count, tokens.rows, rank_,
                                                       sums.values + row * shape_.lanes, shape_.lanes);
        });
    }

    // Loads one group's query rows in the form in which they are multiplied.
    void load(const Task &task, int64_t group, float *to) const {
        with_dtype(step_.dtype, [&](auto type) {
            for (int row = 0; row < rows_of(task); row++) {
                const auto *from = (const decltype(type) *)queries_.at + place(queries_, task, group, row);
                float *into = to + row * row_floats_;
                for (int at = 0; at < dim_; at += UNIT, into += Latents::KEY_PARTS * simd::W) {
                    alignas(64) float numbers[UNIT] = {};
                    for (int half = 0; half < std::min(UNIT, dim_ - at); half += simd::W)
                        simd::store(numbers + half, simd::load_up_to(from + at + half, dim_ - at - half));
                    Latents::put_query(numbers, into);
                }
            }
        });
    }

    void finish(const Task &task, int64_t group, const Sums &sums) const override {
        with_dtype(step_.dtype, [&](auto type) {
            for (int row = 0; row < rows_of(task); row++) {
                auto *to = (decltype(type) *)sums_.at + place(sums_, task, group, row);
                const float *from = sums.values + row * shape_.lanes;
                const float inverse = 1.0f / simd::reduce_add(simd::load(sums.weights + row * simd::W));
                float numbers[UNIT];
                for (int at = 0; at < rank_; at += UNIT) {
                    for (int i = 0; i < UNIT; i++) numbers[i] = from[at + Latents::place(i)] * inverse;
                    for (int half = 0; half < std::min(UNIT, rank_ - at); half += simd::W)
                        simd::store_up_to(to + at + half, simd::load(numbers + half), rank_ - at - half);
                }
            }
        });
    }

    // The offset of a task's row among the rows of all tokens and heads.
    int64_t place(const HeadRows &rows, const Task &task, int64_t group, int row) const {
        const int64_t token = task.first_token + row / shape_.groups, head = group * shape_.groups + row % shape_.groups;
        return token * rows.token_stride + head * rows.head_stride;
    }

    const int dim_, rank_, row_floats_;
    const HeadRows queries_, sums_;
};

template <class T, class P>
void store_token(const AttentionStep &s, int64_t layer, int64_t token, T *ends, int64_t head_stride, const T *k) {
    const int64_t rank = s.latent_rank, half = (s.head_dim - rank) / 2;
    const int64_t angles = (token * s.ropes + s.rules[layer].rope) * half;
    const float *cosines = s.cosines + angles, *sines = s.sines + angles;
    for (int64_t head = 0; head < s.heads; head++)
        rotate(ends + head * head_stride, cosines, sines, half, ends + head * head_stride);
    std::vector<T> row(k, k + s.head_dim);
    rotate(k + rank, cosines, sines, half, row.data() + rank);
    const int64_t page = s.write_slots[token] / s.block, offset = s.write_slots[token] % s.block;
    P *to = (P *)((char *)s.pool + page * s.page_stride + layer * s.layer_stride) + offset * s.head_dim;
    if constexpr (std::is_same_v<T, P>) {
        std::memcpy(to, row.data(), row.size() * sizeof(T));
    } else {
        for (int64_t d = 0; d < s.head_dim; d += simd::W) {
            const int n = int(std::min<int64_t>(simd::W, s.head_dim - d));
            simd::store_up_to(to + d, simd::load_up_to(row.data() + d, n), n);
        }
    }
}

}  // namespace

void store_latents(Team *team, const AttentionStep &step, int64_t layer, const HeadRows &ends, const void *k,
                   int64_t k_stride) {
    with_dtype(step.dtype, [&](auto type) {
        using T = decltype(type);
        with_numbers(step.form, [&](auto number) {
            auto some = [&](int part, int parts) {
                for (int64_t t = step.tokens * part / parts; t < step.tokens * (part + 1) / parts; t++)
                    store_token<T, decltype(number)>(step, layer, t, (T *)ends.at + t * ends.token_stride, ends.head_stride,
                                                     (const T *)k + t * k_stride);
            };
            const int64_t rotated = step.tokens * step.heads * (step.head_dim - step.latent_rank);
            run_parts(rotated * int64_t(sizeof(T)) < ALONE_BYTES ? nullptr : team, some);
        });
    });
}

void attend_latents(Team *team, const AttentionStep &step, int64_t layer, const HeadRows &q, const HeadRows &out) {
    const AttentionStep groups = step_of_groups(step);
    with_latents(step, [&](auto latents) {
        LatentAttention<decltype(latents)>(step, groups, layer, q, out).run(team);
    });
}

}  // namespace twostroke
