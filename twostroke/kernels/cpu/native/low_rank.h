// What LoRA adapters add to a product: y += (x A^T) B^T for the rows of each adapter, and nothing for the others.
//
// The order of a row's sums is fixed: they depend neither on other rows nor on the number of threads.

#pragma once

#include <cstdint>
#include <initializer_list>

#include "linear.h"

namespace twostroke {

// `NativeLowRank` of engine/adapters/model_adapters.py, field by field.
struct LowRank {
    const uint16_t *a;  // bfloat16 [rank][inputs]; null: nothing is added
    const uint16_t *b;  // bfloat16 [rank][outputs]
    int64_t rank, inputs, outputs;
    float scale;
    float unused;
};

// `NativeAdapterLayer` of engine/adapters/model_adapters.py.
struct AdapterLayer {
    LowRank q, k, v, output, gate, up, down;
};

// The adapter of a row: its layers. Null: none.
using RowAdapter = const AdapterLayer *;

// A part of the outputs of a product: the 16 from output 16 i on lie in y at column first + i * step.
struct AddedPart {
    LowRank AdapterLayer::*part;
    int64_t first, step;
};

constexpr int64_t SIDE_BY_SIDE = 16;  // step of outputs that follow one another

void add_low_rank(Team *team, const RowAdapter *of_row, int64_t layer, std::initializer_list<AddedPart> parts,
                  const Rows &rows, Into into);

}  // namespace twostroke
