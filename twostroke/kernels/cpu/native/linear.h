// Products with fixed weights, y = x W^T + b: bfloat16 in, float32 sums, weights packed once into panels.
//
// A panel holds 32 outputs of all inputs, in the order in which a kernel reads them, so that weights stream from memory
// exactly once per product, whatever the number of rows. A result is one sum in the order of the inputs: it depends
// neither on the rows beside it nor on the number of threads.

#pragma once

#include <cstdint>
#include <vector>

#include "team.h"

namespace twostroke {

constexpr int64_t PANEL = 32;  // outputs side by side
constexpr int64_t GROUP = 64;  // inputs that share a scale where weights are int8

enum Kind : int32_t { BFLOAT16 = 0, INT8 = 1 };

// What becomes of a sum before it is written: one more than its index in kernels/activation.py.
enum Activation : int32_t { NONE = 0, SILU = 1, GELU_TANH = 2, GELU = 3 };

// `NativeLinear` of kernels/cpu/linear.py, field by field.
struct Linear {
    const void *panels;    // BFLOAT16: [panel][inputs / 2][32][2]; INT8: [panel][inputs / 4][32][4]
    const float *scales;   // INT8: [panel][inputs / GROUP][32], of the weights
    const int32_t *sums;   // INT8: the same shape: -128 times the sum of a group's weights
    const float *bias;     // [panels * 32] or null
    int64_t outputs;       // what is written of a row
    int64_t inputs;        // padded with zeros to a multiple of 2, or of GROUP
    int32_t kind;
    int32_t is_gated;      // panels of 16 gates and the 16 values that they let through: W has two rows per output
    int32_t activation;    // of a sum, or of the gates alone
};

// What becomes of a sum.
enum class Into : int32_t {
    BFLOAT16 = 0,  // rounded into y
    FLOAT32 = 1,   // written into y
    ADD = 2,       // added to y, float32
};

struct Rows {
    const uint16_t *x;  // bfloat16; readable, and zero beyond the model's inputs, up to `Linear::inputs`
    int64_t x_stride;
    int64_t count;
    void *y;
    int64_t y_stride;
};

// Activations in the form in which a machine multiplies them with one kind of weights.
struct Prepared {
    std::vector<uint8_t> values;
    std::vector<float> scales;  // INT8: [row][inputs / GROUP]
};

// One of the passes that a panel's rows are cut into.
struct Pass {
    int64_t index, count;
    bool has_next;  // another panel comes after this one
};

// Where it is gated, y is activation(gate) * value, of the sums.
void linear(Team *team, const Linear &w, const Rows &rows, Into into, Prepared &prepared);

}  // namespace twostroke
