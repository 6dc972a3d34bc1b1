// Attention of one step and layer over pages of plain numbers, or of bytes with a scale per token and head.

#pragma once

#include "attend_tasks.h"

namespace twostroke {

// The workspace of one task: the limits of each row, the queries and sums of each head, the sums of a split, and copied
// pieces.
template <class Math>
struct Workspace {
    using T = typename Math::Element;
    struct Head {
        float *queries;  // [rows, row_floats]
        Sums total, split;
        T *copied;
        float *scales;   // [2, SPLIT] of keys and of values, where those of the page cannot be read in place
        BFloat16 *wide;  // pieces of keys and values for many rows, where the page's have numbers of one byte
    };

    int rows;
    Limits *limits;  // [rows]
    std::vector<Head> heads;

    Workspace(const Shape<Math> &shape, const Task &task, int64_t copied_pieces)
        : rows(int(task.tokens) * shape.groups), heads(task.heads) {
        const int limit_floats = rounded_up(2 * rows, 16), queries = rounded_up(rows * shape.row_floats, 16);
        const int sums = rounded_up(Sums::floats(rows, shape.lanes), 16), scales = Math::IS_SCALED ? 2 * SPLIT : 0;
        const int64_t piece_size = PIECE * shape.dim, wide_pieces = is_widened() ? 2 * PIECES : 0;
        const int64_t copies = rounded_up(copied_pieces * piece_size * int64_t(sizeof(T)), 64) / 4;
        const int64_t wide = rounded_up(wide_pieces * piece_size * int64_t(sizeof(BFloat16)), 64) / 4;
        float *at = scratch(size_t(limit_floats) +
                            size_t(task.heads) * size_t(copies + queries + 2 * sums + scales + wide));
        auto take = [&at](int64_t count) { return (at += count) - count; };
        limits = (Limits *)take(limit_floats);
        for (Head &head : heads) {
            head.queries = take(queries);
            head.total = Sums::in(take(sums), rows, shape.lanes);
            head.split = Sums::in(take(sums), rows, shape.lanes);
            head.copied = (T *)take(copies);
            head.scales = take(scales);
            head.wide = (BFloat16 *)take(wide);
        }
    }

    // Where there are more rows than one product takes, numbers of one byte are widened to bfloat16 once for all of
    // them.
    bool is_widened() const { return Math::IS_SCALED && rows > MAX_ROWS; }
};

// What is read at once: one split of a task's context, for some of its heads.
struct Portion {
    const Task *task = nullptr;
    int64_t split = 0, first_head = 0, heads = 0;  // of the task's
    Place place;
};

template <class Math>
class Attention : public AttentionTasks<Math> {
  public:
    using Tasks = AttentionTasks<Math>;
    using Tasks::Tasks;

  private:
    using Tasks::step_, Tasks::shape_, Tasks::pool_, Tasks::partial, Tasks::scoring;
    using T = typename Math::Element;
    using Word = typename Math::Word;
    using Head = typename Workspace<Math>::Head;

    // Pages without pieces are copied into pieces first. Of other pages, only the values of a last piece that is not
    // full are copied.
    Workspace<Math> workspace(const Task &task) const {
        return {shape_, task, has_pieces(step_.block) ? 1 : 2 * PIECES};
    }

    void compute(const Task &task, const Task *upcoming, bool) const override {
        Workspace<Math> space = workspace(task);
        this->find_limits(task, space.limits);
        for (size_t h = 0; h < space.heads.size(); h++) {
            this->template load_queries<Math>(task, task.first_head + int64_t(h), space.heads[h].queries,
                                              shape_.row_floats);
            space.heads[h].total.clear(space.rows, shape_.lanes);
        }
        Fetch fetch;
        Portion portion = portion_of(&task, 0, 0), next;
        fetch.start(reading(portion));
        for (; portion.task == &task; portion = next) {
            next = after(portion, upcoming);
            fetch.follow(reading(next));
            sum_up_portion(portion, space, fetch);
        }
        if (!task.is_partial)
            for (size_t h = 0; h < space.heads.size(); h++)
                this->finish(task, task.first_head + int64_t(h), space.heads[h].total);
    }

    void sum_up_portion(const Portion &portion, Workspace<Math> &space, Fetch &fetch) const {
        const Task &task = *portion.task;
        Split<Math> split{portion.place.start, portion.place.count, portion.place.first_piece(), space.rows, int(portion.heads), space.limits, {}};
        for (int64_t h = 0; h < portion.heads; h++) {
            const Head &head = space.heads[size_t(portion.first_head + h)];
            split.of[h].queries = head.queries;
            split.of[h].sums = task.is_partial ? partial(task, portion.split) : head.split;
            look(task, task.first_head + portion.first_head + h, portion.place, head, split.of[h]);
        }
        if constexpr (Math::IS_SCALED) {
            if (space.is_widened())
                sum_up_widened(split, space, fetch);
            else
                sum_up(shape_, split, scoring(), fetch);
        } else {
            sum_up(shape_, split, scoring(), fetch);
        }
        for (int64_t h = 0; h < portion.heads && !task.is_partial; h++) {
            const Head &head = space.heads[size_t(portion.first_head + h)];
            head.total.merge(head.split, space.rows, shape_.lanes);
        }
    }

    // Returns an empty portion where there is no task. With few rows, several heads' keys and values are read in the
    // order of the page. With many rows, one head's are used again and again from the first cache.
    Portion portion_of(const Task *task, int64_t split, int64_t first_head) const {
        if (!task) return {};
        const int64_t most = task->tokens * shape_.groups <= MAX_ROWS ? Split<Math>::MOST_HEADS : 1;
        return {task, split, first_head, std::min(most, task->heads - first_head), locate(*task, split)};
    }

    Portion after(const Portion &portion, const Task *upcoming) const {
        const Task *task = portion.task;
        if (const int64_t head = portion.first_head + portion.heads; head < task->heads)
            return portion_of(task, portion.split, head);
        if (portion.split + 1 < task->splits) return portion_of(task, portion.split + 1, 0);
        return portion_of(upcoming, 0, 0);
    }

    Reading reading(const Portion &portion) const {
        if (!portion.task || !has_pieces(step_.block)) return {};
        const char *keys = pool_ + (portion.task->first_head + portion.first_head) * step_.head_stride;
        return {portion.place, keys, step_, sizeof(T), Math::IS_SCALED, int(portion.heads)};
    }

    // The place of the task's split number `split` in the sequence's pages.
    Place locate(const Task &task, int64_t split) const {
        Place place;
        place.start = (task.first_split + split) * SPLIT;
        place.count = int(std::min<int64_t>(task.context - place.start, SPLIT));
        place.hidden = this->hidden_of(task, place.start);
        for (int at = place.first_piece() * PIECE; at < place.count && has_pieces(step_.block); at += PIECE) {
            place.offsets[at / PIECE] = offset(task, place.start + at);
            place.scale_offsets[at / PIECE] = scale_offset(task, place.start + at);
        }
        return place;
    }

    int64_t page_offset(const Task &task, int64_t position) const {
        const int64_t page = step_.block_tables[task.sequence * step_.table_stride + position / step_.block];
        return page * step_.page_stride;
    }

    int64_t offset(const Task &task, int64_t position) const {
        return page_offset(task, position) + position % step_.block * shape_.dim * int64_t(sizeof(T));
    }

    // Scales lie after all numbers of the block.
    int64_t scale_offset(const Task &task, int64_t position) const {
        const int64_t numbers = step_.block * shape_.dim * int64_t(sizeof(T));
        return page_offset(task, position) + numbers + position % step_.block * int64_t(sizeof(float));
    }

    // Finds one head's keys and values in `place`.
    void look(const Task &task, int64_t kv_head, const Place &place, const Head &head, HeadSplit<Math> &of) const {
        const char *keys = pool_ + kv_head * step_.head_stride, *values = keys + step_.value_offset;
        if constexpr (Math::IS_SCALED) look_at_scales(task, keys, place, head.scales, of);
        if (!has_pieces(step_.block)) return gather(task, keys, place, head.copied, of);
        for (int p = place.first_piece(); p < PIECES; p++) {
            of.keys[p] = (const Word *)(keys + place.offsets[p]);
            of.values[p] = (const Word *)(values + place.offsets[p]);
        }
        const int some = Math::IS_SCALED ? 0 : place.count % PIECE;  // a scale of zero hides a finite value
        if (some) {
            const int last = place.count / PIECE;
            copy_values((const T *)(values + place.offsets[last]), some, shape_.value_dim, head.copied);
            of.values[last] = (const Word *)head.copied;
        }
    }

    // Finds the scales of the tokens in `place`, in the page where possible. Those after the last value are 0, and
    // those of pieces that no row attends to.
    void look_at_scales(const Task &task, const char *keys, const Place &place, float *copied,
                        HeadSplit<Math> &of) const {
        const int whole = has_pieces(step_.block) ? place.count / PIECE : 0;
        for (int p = 0; p < PIECES; p++) {
            of.key_scales[p] = copied + p * PIECE;
            of.value_scales[p] = copied + SPLIT + p * PIECE;
            if (p >= whole || p < place.first_piece()) continue;
            of.key_scales[p] = (const float *)(keys + place.scale_offsets[p]);
            of.value_scales[p] = (const float *)(keys + step_.value_offset + place.scale_offsets[p]);
        }
        const int unseen = place.first_piece() * PIECE;
        for (float *scales : {copied, copied + SPLIT}) {
            std::memset(scales, 0, size_t(unseen) * sizeof(float));
            std::memset(scales + whole * PIECE, 0, size_t(SPLIT - whole * PIECE) * sizeof(float));
        }
        for (int at = std::max(whole * PIECE, place.hidden); at < place.count; at++) {
            const char *from = keys + scale_offset(task, place.start + at);
            std::memcpy(copied + at, from, sizeof(float));
            std::memcpy(copied + SPLIT + at, from + step_.value_offset, sizeof(float));
        }
    }

    // Sums up with the numbers widened to bfloat16, which keeps their values: rows get the same bits as if each had
    // been multiplied from the page.
    void sum_up_widened(const Split<Math> &split, const Workspace<Math> &space, Fetch &fetch) const {
        using Wide = Scaled<typename Math::Widened>;
        Split<Wide> wide{split.start, split.count, split.first_piece, split.rows, split.heads, split.limits, {}};
        const int64_t piece_size = PIECE * shape_.dim;
        for (int h = 0; h < split.heads; h++) {
            const HeadSplit<Math> &from = split.of[h];
            HeadSplit<Wide> &to = wide.of[h];
            to.queries = from.queries, to.sums = from.sums;
            std::copy(from.key_scales, from.key_scales + PIECES, to.key_scales);
            std::copy(from.value_scales, from.value_scales + PIECES, to.value_scales);
            BFloat16 *at = space.heads[size_t(h)].wide;
            widen_pieces(from.keys, split, at, to.keys, fetch);
            widen_pieces(from.values, split, at + PIECES * piece_size, to.values, fetch);
        }
        Fetch nothing;
        sum_up(Shape<Wide>(step_), wide, scoring(), nothing);
    }

    template <class To>
    void widen_pieces(const Pieces<Math> &from, const Split<Math> &split, BFloat16 *at, To &to, Fetch &fetch) const {
        const int64_t piece_size = PIECE * shape_.dim;
        const int lines = int(piece_size * int64_t(sizeof(T)) / LINE);
        for (int p = split.first_piece; p < (split.count + PIECE - 1) / PIECE; p++) {
            if ((p - split.first_piece) % STREAMS == 0) {
                const Streams ahead = fetch.take(lines, from[p]);
                for (int line = 0; line < lines; line++) ahead.fetch(line);
            }
            widen((const T *)from[p], piece_size, at + p * piece_size);
            to[p] = (const float *)(at + p * piece_size);
        }
    }

    // Copies rows of pages without pieces into pieces.
    void gather(const Task &task, const char *keys, const Place &place, T *copied, HeadSplit<Math> &of) const {
        const int64_t piece_size = PIECE * shape_.dim;
        std::memset(copied, 0, size_t(2 * PIECES * piece_size) * sizeof(T));
        for (int p = 0; p < PIECES; p++, copied += 2 * piece_size) {
            of.keys[p] = (const Word *)copied;
            of.values[p] = (const Word *)(copied + piece_size);
            for (int t = std::max(0, place.hidden - p * PIECE); t < std::min(PIECE, place.count - p * PIECE); t++) {
                const char *row = keys + offset(task, place.start + p * PIECE + t);
                put_key((const T *)row, shape_.dim, t, copied);
                put_value((const T *)(row + step_.value_offset), shape_.dim, t, copied + piece_size);
            }
        }
    }
};

}  // namespace twostroke
