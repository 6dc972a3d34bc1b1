// Some sequences of a step as a separate step, only for attention.

#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "attention.h"

namespace twostroke {

struct SomeSequences {
    std::vector<int64_t> rows;  // indices of its rows in the whole step
    AttentionStep step;

    SomeSequences(const AttentionStep &whole, const std::vector<int64_t> &sequences) : step(whole) {
        if (int64_t(sequences.size()) == whole.sequences) {
            rows.resize(size_t(whole.tokens));
            std::iota(rows.begin(), rows.end(), 0);
            return;
        }
        starts_.push_back(0);
        for (int64_t sequence : sequences) {
            for (int64_t row = whole.query_starts[sequence]; row < whole.query_starts[sequence + 1]; row++) {
                rows.push_back(row);
                positions_.push_back(whole.positions[row]);
            }
            starts_.push_back(int32_t(rows.size()));
            const int32_t *table = whole.block_tables + sequence * whole.table_stride;
            tables_.insert(tables_.end(), table, table + whole.table_stride);
        }
        step.tokens = int64_t(rows.size());
        step.sequences = int64_t(sequences.size());
        step.positions = positions_.data(), step.query_starts = starts_.data(), step.block_tables = tables_.data();
    }
    SomeSequences(const SomeSequences &) = delete;
    SomeSequences &operator=(const SomeSequences &) = delete;

  private:
    std::vector<int32_t> positions_, starts_, tables_;
};

}  // namespace twostroke
