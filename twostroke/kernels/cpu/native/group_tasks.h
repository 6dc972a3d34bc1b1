// The panels of several products as tasks that threads take one after the other. Each product has its own rows.

#pragma once

#include <algorithm>
#include <vector>

#include "finish.h"
#include "linear.h"
#include "team.h"

namespace twostroke {

// Only the rows of one group.
inline Rows rows_of(const RowGroup &group, const Rows &rows, Into into) {
    const int64_t element = into == Into::BFLOAT16 ? sizeof(uint16_t) : sizeof(float);
    return {rows.x + group.first * rows.x_stride, rows.x_stride, group.end - group.first,
            (char *)rows.y + group.first * rows.y_stride * element, rows.y_stride};
}

// The tasks of one group, in the numbering of all groups' tasks.
struct GroupTasks {
    int64_t panels;  // of a task
    size_t first, end;

    GroupTasks(const RowGroup &group, size_t first_task)
        : panels(panels_of_task(*group.w, group.end - group.first, panels_of(*group.w))), first(first_task),
          end(first_task + size_t((panels_of(*group.w) + panels - 1) / panels)) {}

    // Calls f(group, the task's first panel, the one after its last).
    template <class F>
    void run(const RowGroup &group, size_t task, F f) const {
        const int64_t from = int64_t(task - first) * panels;
        f(group, from, std::min(panels_of(*group.w), from + panels));
    }
};

// Calls f as above for all panels of all groups, which must not be empty.
template <class F>
void over_panels(Team *team, const RowGroup *groups, size_t count, F f) {
    if (count == 1) {
        const GroupTasks all(*groups, 0);
        return run_tasks(team, all.end, [&](size_t task, size_t, bool) { all.run(*groups, task, f); });
    }
    std::vector<GroupTasks> tasks;
    tasks.reserve(count);
    for (size_t i = 0; i < count; i++) tasks.emplace_back(groups[i], tasks.empty() ? 0 : tasks.back().end);
    run_tasks(team, tasks.back().end, [&](size_t task, size_t, bool) {
        const auto of = std::upper_bound(tasks.begin(), tasks.end(), task,
                                         [](size_t at, const GroupTasks &each) { return at < each.end; });
        of->run(groups[of - tasks.begin()], task, f);
    });
}

}  // namespace twostroke
