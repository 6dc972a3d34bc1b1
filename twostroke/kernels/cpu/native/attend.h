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

// What one task works in: the queries and sums of each of its heads, the sums of a split, and pieces that are copied.
template <class Math>
struct Workspace {
    using T = typename Math::Element;
    struct Head {
        Queries queries;
        Sums total;
    };

    int rows;
    std::vector<Head> heads;
    Sums split;
    T *copied;

    Workspace(const Shape<Math> &shape, const Task &task, int64_t copied_pieces)
        : rows(int(task.tokens) * shape.groups), heads(task.heads) {
        const int limits = rounded_up(rows, 16), queries = rounded_up(rows * shape.row_floats, 16);
        const int sums = rounded_up(Sums::floats(rows, shape.lanes), 16);
        const int64_t copies = rounded_up(copied_pieces * PIECE * shape.dim * int64_t(sizeof(T)), 64) / 4;
        float *at = scratch(size_t(copies + sums) + size_t(task.heads) * size_t(limits + queries + sums));
        auto take = [&at](int64_t count) { return (at += count) - count; };
        copied = (T *)take(copies);
        split = Sums::in(take(sums), rows, shape.lanes);
        for (Head &head : heads) {
            head.queries = {rows, take(queries), (int32_t *)take(limits)};
            head.total = Sums::in(take(sums), rows, shape.lanes);
        }
    }
};

// Where a split's pieces lie: offsets into the pool for the layer's first kv head.
struct Place {
    int64_t start = 0;
    int count = 0;
    int64_t offsets[PIECES] = {};
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

    // Pages of plain rows are brought into pieces first; of others only the values of a last piece that is not full.
    Workspace<Math> workspace(const Task &task) const {
        return {shape_, task, has_pieces(step_.block) ? 1 : 2 * PIECES};
    }

    void compute(const Task &task) {
        Workspace<Math> space = workspace(task);
        for (size_t h = 0; h < space.heads.size(); h++) {
            load_queries(shape_, step_, q_, q_stride_, task.first_token, task.first_head + int64_t(h),
                         space.heads[h].queries);
            space.heads[h].total.clear(space.rows, shape_.lanes);
        }
        Place place, next = locate(task, 0);
        for (int64_t split = 0; split < task.splits; split++) {
            place = next;
            next = locate(task, split + 1);
            for (size_t h = 0; h < space.heads.size(); h++) {
                const Sums sums = task.is_partial ? partial(task, split, space.rows) : space.split;
                sum_up(shape_, space.heads[h].queries, look(task, int64_t(h), place, next, space.copied),
                       step_.scale * LOG2_E, sums);
                if (!task.is_partial) space.heads[h].total.merge(sums, space.rows, shape_.lanes);
            }
        }
        if (!task.is_partial)
            for (size_t h = 0; h < space.heads.size(); h++)
                finish(task, task.first_head + int64_t(h), space.heads[h].total);
    }

    void merge(const Task &task) {
        Workspace<Math> space = workspace(task);
        const Sums &total = space.heads[0].total;
        total.clear(space.rows, shape_.lanes);
        for (int64_t split = 0; split < task.splits; split++)
            total.merge(partial(task, split, space.rows), space.rows, shape_.lanes);
        finish(task, task.first_head, total);
    }

    void finish(const Task &task, int64_t kv_head, const Sums &sums) {
        write_out(shape_, step_, sums, int(task.tokens) * shape_.groups, task.first_token, kv_head, out_);
    }

    // The task's split number `split`, by the sequence's pages; an empty one behind the last.
    Place locate(const Task &task, int64_t split) const {
        Place place;
        place.start = (task.first_split + split) * SPLIT;
        if (split == task.splits) return place;
        place.count = int(std::min<int64_t>(task.context - place.start, SPLIT));
        for (int at = 0; at < place.count && has_pieces(step_.block); at += PIECE)
            place.offsets[at / PIECE] = offset(task, place.start + at);
        return place;
    }

    int64_t offset(const Task &task, int64_t position) const {
        const int64_t page = step_.block_tables[task.sequence * step_.table_stride + position / step_.block];
        return page * step_.page_stride + position % step_.block * shape_.dim;
    }

    // One head's keys and values in `place`, and behind them those that are needed next.
    Split<Math> look(const Task &task, int64_t head, const Place &place, const Place &next, T *copied) const {
        using Word = typename Math::Word;
        const bool is_last = head + 1 == task.heads;
        const T *keys = pool_ + (task.first_head + head) * step_.head_stride, *values = keys + step_.value_offset;
        const T *next_keys = is_last ? pool_ + task.first_head * step_.head_stride : keys + step_.head_stride;
        const Place &then = is_last ? next : place;
        Split<Math> split{place.start, place.count, {}, {}};
        for (int p = 0; p < PIECES; p++) {
            split.keys.now[p] = (const Word *)(keys + place.offsets[p]);
            split.keys.next[p] = (const Word *)(next_keys + then.offsets[p]);
            split.values.now[p] = (const Word *)(values + place.offsets[p]);
            split.values.next[p] = (const Word *)(next_keys + step_.value_offset + then.offsets[p]);
        }
        if (!has_pieces(step_.block))
            gather(task, keys, place, copied, split);
        else if (const int some = place.count % PIECE) {
            const int last = place.count / PIECE;
            copy_values(values + place.offsets[last], some, copied);
            split.values.now[last] = (const Word *)copied;
        }
        return split;
    }

    // The first `count` values of a piece, and zeros behind them.
    void copy_values(const T *piece, int count, T *copy) const {
        constexpr int N = PER_WORD<T>;
        const int64_t whole = count / N * N * shape_.dim;
        std::memcpy(copy, piece, size_t(whole) * sizeof(T));
        std::memset(copy + whole, 0, size_t(PIECE * shape_.dim - whole) * sizeof(T));
        for (int64_t i = 0; i < shape_.dim && count % N; i++) copy[whole + i * N] = piece[whole + i * N];
    }

    // Rows of pages without pieces, as pieces.
    void gather(const Task &task, const T *keys, const Place &place, T *copied, Split<Math> &split) const {
        using Word = typename Math::Word;
        const int64_t piece_size = PIECE * shape_.dim;
        std::memset(copied, 0, size_t(2 * PIECES * piece_size) * sizeof(T));
        for (int p = 0; p < PIECES; p++, copied += 2 * piece_size) {
            split.keys.now[p] = split.keys.next[p] = (const Word *)copied;
            split.values.now[p] = split.values.next[p] = (const Word *)(copied + piece_size);
            for (int t = 0; t < std::min(PIECE, place.count - p * PIECE); t++) {
                const T *row = keys + offset(task, place.start + p * PIECE + t);
                put_key(row, shape_.dim, t, copied);
                put_value(row + step_.value_offset, shape_.dim, t, copied + piece_size);
            }
        }
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
