// Attention of one step and layer in one dtype: threads take tasks, then merge what was computed in pieces.

#pragma once

#include <memory>

#include "plan.h"
#include "rows.h"

namespace twostroke {

// Floats of this thread, kept between calls, on a line of their own, not cleared.
inline float *scratch(size_t count) {
    static thread_local std::vector<float> memory;
    constexpr size_t LINE = 64;
    if (memory.size() < count + LINE) memory.resize(count + LINE);
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (LINE - address % LINE) % LINE / sizeof(float);
}

// What one task works in: the queries and sums of each of its heads, and one packed tile.
struct Workspace {
    struct Head {
        Queries queries;
        Sums split, total;
    };

    int rows;
    std::vector<Head> heads;
    float *keys, *values, *zeros;

    template <class Math>
    Workspace(const Shape<Math> &shape, const Task &task) : rows(int(task.tokens) * shape.groups), heads(task.heads) {
        const int limits = rounded_up(rows, 16), words = rounded_up(rows * shape.words, 16);
        const int sums = rounded_up(Sums::floats(rows, shape.lanes), 16);
        const int key_floats = shape.words * TILE, value_floats = TILE / Math::PER_WORD * shape.lanes;
        float *at = scratch(size_t(key_floats + value_floats + shape.lanes) +
                            size_t(task.heads) * size_t(limits + words + 2 * sums));
        auto take = [&at](int count) { return (at += count) - count; };
        keys = take(key_floats);
        values = take(value_floats);
        zeros = take(shape.lanes);
        std::fill(zeros, zeros + shape.lanes, 0.0f);
        for (Head &head : heads) {
            head.queries = {rows, take(words), (int32_t *)take(limits)};
            head.split = Sums::in(take(sums), rows, shape.lanes);
            head.total = Sums::in(take(sums), rows, shape.lanes);
        }
    }
};

template <class T, class Math>
class Attention {
  public:
    Attention(const AttentionStep &step, int64_t layer, const T *q, int64_t q_stride, T *out)
        : step_(step), shape_(step), pool_((const T *)step.pool + layer * step.layer_stride), q_(q),
          q_stride_(q_stride), out_(out) {}

    void run(Team *team) {
        const Plan plan = plan_tasks(step_, team ? std::max(1, team->threads_now()) : 1);
        partial_.reset(new float[size_t(Sums::floats(plan.sums, shape_.lanes))]);  // each is cleared by who needs it
        run_tasks(team, plan.tasks.size(), [&](size_t i) { compute(plan.tasks[i]); });
        if (!plan.merges.empty()) run_tasks(team, plan.merges.size(), [&](size_t i) { merge(plan.merges[i]); });
    }

  private:
    Sums partial(const Task &task, int64_t split, int rows) const {
        return Sums::in(partial_.get() + Sums::floats(task.first_sum + split * rows, shape_.lanes), rows, shape_.lanes);
    }

    void compute(const Task &task) {
        Workspace space(shape_, task);
        for (size_t h = 0; h < space.heads.size(); h++) {
            load_queries(shape_, step_, q_, q_stride_, task.first_token, task.first_head + int64_t(h),
                         space.heads[h].queries);
            space.heads[h].total.clear(space.rows, shape_.lanes);
        }
        const int64_t end = std::min(task.context, (task.first_split + task.splits) * SPLIT);
        Tile tile, next = locate(task, task.first_split * SPLIT, end);
        for (int64_t split = 0; split < task.splits; split++) {
            if (task.is_partial) space.heads[0].split = partial(task, split, space.rows);
            for (auto &head : space.heads) head.split.clear(space.rows, shape_.lanes);
            const int64_t first = (task.first_split + split) * SPLIT;
            for (int64_t start = first; start < std::min(end, first + SPLIT); start += TILE) {
                tile = next;
                next = locate(task, start + TILE, end);
                add(task, space, start, tile, next);
            }
            if (!task.is_partial)
                for (auto &head : space.heads) head.total.merge(head.split, space.rows, shape_.lanes);
        }
        if (!task.is_partial)
            for (size_t h = 0; h < space.heads.size(); h++)
                finish(task, task.first_head + int64_t(h), space.heads[h].total);
    }

    // One tile for all heads of a task. While a head's is packed, what comes after it is fetched.
    void add(const Task &task, Workspace &space, int64_t start, const Tile &tile, const Tile &next) {
        const T *first = pool_ + task.first_head * step_.head_stride;
        const int row_bytes = shape_.dim * int(sizeof(T));
        for (size_t h = 0; h < space.heads.size(); h++) {
            const bool is_last = h + 1 == space.heads.size();
            const T *keys = first + int64_t(h) * step_.head_stride, *values = keys + step_.value_offset;
            const T *next_keys = is_last ? first : keys + step_.head_stride;
            const T *next_values = next_keys + step_.value_offset;
            const Tile &then = is_last ? next : tile;
            pack_keys<Math>(keys, tile, shape_.words, next_keys, then, row_bytes, space.keys);
            pack_values<Math>(values, tile, shape_.dim, shape_.lanes, (const T *)space.zeros, next_values, then,
                              row_bytes, space.values);
            add_tile(shape_, space.heads[h].queries, start, tile.count, space.keys, space.values, step_.scale * LOG2_E,
                     space.heads[h].split);
        }
    }

    void merge(const Task &task) {
        Workspace space(shape_, task);
        Sums &total = space.heads[0].total;
        total.clear(space.rows, shape_.lanes);
        for (int64_t split = 0; split < task.splits; split++)
            total.merge(partial(task, split, space.rows), space.rows, shape_.lanes);
        finish(task, task.first_head, total);
    }

    void finish(const Task &task, int64_t kv_head, const Sums &sums) {
        write_out(shape_, step_, sums, int(task.tokens) * shape_.groups, task.first_token, kv_head, out_);
    }

    // The tokens from `start` on, up to `end`, by the sequence's pages.
    Tile locate(const Task &task, int64_t start, int64_t end) const {
        Tile tile;
        tile.count = int(std::clamp<int64_t>(end - start, 0, TILE));
        const int32_t *table = step_.block_tables + task.sequence * step_.table_stride;
        for (int t = 0; t < tile.count;) {
            const int64_t inside = (start + t) % step_.block;
            const int64_t at = table[(start + t) / step_.block] * step_.page_stride + inside * shape_.dim;
            const int stop = int(std::min<int64_t>(tile.count, t + step_.block - inside));
            for (int first = t; t < stop; t++) tile.offsets[t] = at + (t - first) * shape_.dim;
        }
        return tile;
    }

    const AttentionStep &step_;
    const Shape<Math> shape_;
    const T *pool_;  // from the layer's keys on
    const T *q_;
    const int64_t q_stride_;
    T *out_;
    std::unique_ptr<float[]> partial_;  // sums of splits that are computed apart
};

}  // namespace twostroke
