// The tasks of one step and layer, for all forms of pages: threads take them, then merge the sums of splits.

#pragma once

#include <memory>

#include "plan.h"
#include "rows.h"

namespace twostroke {

// Memory of this thread for floats, kept between calls. It begins on a cache line, and is not cleared.
inline float *scratch(size_t count) {
    static thread_local std::vector<float> memory;
    if (memory.size() < count + LINE) memory.resize(count + LINE);
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (LINE - address % LINE) % LINE / sizeof(float);
}

// `Math` defines how rows are multiplied and what their sums look like.
template <class Math>
class AttentionTasks {
  public:
    AttentionTasks(const AttentionStep &step, int64_t layer, const Queries &queries)
        : step_(step), rule_(step.rules[layer]), shape_(step), pool_((const char *)step.pool + layer * step.layer_stride),
          queries_(queries) {}
    virtual ~AttentionTasks() = default;

    void run(Team *team) {
        const Plan plan = plan_tasks(step_, rule_, team ? std::max(1, team->threads_now()) : 1);
        partial_.reset(new float[size_t(Sums::floats(plan.sums, shape_.lanes))]);  // a task clears its own
        const std::vector<Task> &tasks = plan.tasks;
        run_tasks(team, tasks.size(), [&](size_t i, size_t next, bool is_first) {
            compute(tasks[i], next < tasks.size() ? &tasks[next] : nullptr, is_first);
        });
        if (!plan.merges.empty())
            run_tasks(team, plan.merges.size(), [&](size_t i, size_t, bool) { merge(plan.merges[i]); });
    }

  protected:
    // Sums up every split of the task. A partial task puts the sums of each split into `partial`; another finishes the
    // sums of all. What is read after this task is most likely `upcoming`. What a thread's first task reads has not
    // been prefetched.
    virtual void compute(const Task &task, const Task *upcoming, bool is_first) const = 0;

    int rows_of(const Task &task) const { return int(task.tokens) * shape_.groups; }

    Sums partial(const Task &task, int64_t split) const {
        const int64_t rows = rows_of(task);
        return Sums::in(partial_.get() + Sums::floats(task.first_sum + split * rows, shape_.lanes), rows, shape_.lanes);
    }

    // For each row, the first token that it attends to, and the one after the last.
    void find_limits(const Task &task, Limits *limits) const {
        for (int row = 0; row < rows_of(task); row++) {
            const int32_t position = step_.positions[task.first_token + row / shape_.groups];
            limits[row] = {int32_t(rule_.first_visible(position)), position + 1};
        }
    }

    // How many tokens from `start` on no row of the task attends to.
    int hidden_of(const Task &task, int64_t start) const {
        const int64_t first = rule_.first_visible(step_.positions[task.first_token]);
        return int(std::clamp<int64_t>(first - start, 0, SPLIT));
    }

    Scoring scoring() const { return Scoring(rule_); }

    // Loads one head's query rows in the form that `RowMath` multiplies, `stride` floats apart.
    template <class RowMath>
    void load_queries(const Task &task, int64_t kv_head, float *queries, int stride) const {
        with_dtype(step_.dtype, [&](auto type) {
            using Q = decltype(type);
            for (int row = 0; row < rows_of(task); row++) {
                const int64_t token = task.first_token + row / shape_.groups;
                const int64_t head = kv_head * shape_.groups + row % shape_.groups;
                RowMath::load_row((const Q *)queries_.rows + token * queries_.stride + head * shape_.dim, shape_.dim,
                                  queries + row * stride);
            }
        });
    }

    // Writes the results of one head's rows to where they belong.
    virtual void finish(const Task &task, int64_t kv_head, const Sums &sums) const {
        with_dtype(step_.dtype, [&](auto type) {
            write_out(shape_, sums, rows_of(task), task.first_token, kv_head, queries_, (decltype(type) *)queries_.out);
        });
    }

    const AttentionStep &step_;
    const AttentionRule &rule_;
    const Shape<Math> shape_;
    const char *const pool_;  // from the layer's first head on

  private:
    void merge(const Task &task) const {
        const int rows = rows_of(task);
        const Sums total = Sums::in(scratch(size_t(Sums::floats(rows, shape_.lanes))), rows, shape_.lanes);
        total.clear(rows, shape_.lanes);
        for (int64_t split = 0; split < task.splits; split++) total.merge(partial(task, split), rows, shape_.lanes);
        finish(task, task.first_head, total);
    }

    const Queries queries_;
    std::unique_ptr<float[]> partial_;  // sums of splits that are computed apart
};

}  // namespace twostroke
