// Cuts the attention of one step into tasks that threads take one after the other.

#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace twostroke {

// Some query tokens of one sequence, for some kv heads, over some splits of their context.
struct Task {
    int64_t sequence, first_token, tokens;
    int64_t context;  // tokens that the last query token attends to
    int64_t first_head, heads;
    int64_t first_split, splits;
    bool is_partial;    // whether the sums of its splits are merged with others' afterwards
    int64_t first_sum;  // first of its sums among all partial sums, in rows: a split has one sum per row
    double cost;
};

struct Plan {
    std::vector<Task> tasks;   // the costliest first
    std::vector<Task> merges;  // one for all partial tasks of the same tokens and head
    int64_t sums = 0;          // number of partial sums, in rows
};

Plan plan_tasks(const AttentionStep &step, const AttentionRule &rule, int parts);

constexpr int64_t BLOCK_ROWS = 126;      // a multiple of a product's rows, enough to make up for packing a tile
constexpr int64_t PARTIAL_TOKENS = 16;  // longer spans are many tasks anyway

}  // namespace twostroke
