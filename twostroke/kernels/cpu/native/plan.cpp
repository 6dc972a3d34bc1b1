#include "plan.h"

#include <algorithm>

#include "page.h"
#include "rows.h"

namespace twostroke {
namespace {

constexpr double TASKS_PER_PART = 3;  // so that others can take over work of threads that start late or run slowly
constexpr double READING_ROWS = 3;    // reading keys and values costs about as much as this many rows

// Returns blocks of query tokens, each for all heads and its whole context, to be cut further. Where rows attend to
// their own page's exact numbers, all rows of a block attend to the same page.
std::vector<Task> blocks_of(const AttentionStep &step, const AttentionRule &rule) {
    const int64_t groups = step.heads / step.kv_heads, longest = std::max<int64_t>(1, BLOCK_ROWS / groups);
    std::vector<Task> blocks;
    for (int64_t sequence = 0; sequence < step.sequences; sequence++) {
        const int64_t end = step.query_starts[sequence + 1];
        for (int64_t first = step.query_starts[sequence], tokens; first < end; first += tokens) {
            tokens = std::min(longest, end - first);
            if (step.exact_pool) tokens = std::min<int64_t>(tokens, PIECE - step.positions[first] % PIECE);
            const int64_t context = step.positions[first + tokens - 1] + 1;
            const int64_t first_split = rule.first_visible(step.positions[first]) / SPLIT;
            const int64_t splits = (context + SPLIT - 1) / SPLIT - first_split, seen = context - first_split * SPLIT;
            const double cost = double(seen) * double(step.kv_heads) * (double(tokens * groups) + READING_ROWS);
            blocks.push_back({sequence, first, tokens, context, 0, step.kv_heads, first_split, splits, false, 0, cost});
        }
    }
    return blocks;
}

void cut_context(const Task &task, int64_t rows, double most, Plan &plan) {
    Task merge = task;
    merge.first_sum = plan.sums;
    plan.merges.push_back(merge);
    const auto length = std::max<int64_t>(1, int64_t(most / task.cost * double(task.splits)));
    for (int64_t at = 0; at < task.splits; at += length) {
        Task piece = task;
        piece.first_split = task.first_split + at;
        piece.splits = std::min(length, task.splits - at);
        piece.is_partial = true;
        piece.first_sum = plan.sums + at * rows;
        piece.cost = task.cost * double(piece.splits) / double(task.splits);
        plan.tasks.push_back(piece);
    }
    plan.sums += task.splits * rows;
}

}  // namespace

Plan plan_tasks(const AttentionStep &step, const AttentionRule &rule, int parts) {
    Plan plan;
    double total = 0;
    const std::vector<Task> blocks = blocks_of(step, rule);
    for (const Task &block : blocks) total += block.cost;
    const double most = parts > 1 ? total / (TASKS_PER_PART * parts) : total;
    const int64_t groups = step.heads / step.kv_heads;
    for (const Task &block : blocks) {
        const bool is_short = block.tokens * groups * step.kv_heads <= BLOCK_ROWS;
        if (is_short && block.cost <= most) {
            plan.tasks.push_back(block);
            continue;
        }
        for (int64_t head = 0; head < step.kv_heads; head++) {
            Task one = block;
            one.first_head = head;
            one.heads = 1;
            one.cost = block.cost / double(step.kv_heads);
            if (one.cost > most && one.tokens <= PARTIAL_TOKENS && one.splits > 1)
                cut_context(one, one.tokens * groups, most, plan);
            else
                plan.tasks.push_back(one);
        }
    }
    if (parts > 1)
        std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                         [](const Task &a, const Task &b) { return a.cost > b.cost; });
    return plan;
}

}  // namespace twostroke
