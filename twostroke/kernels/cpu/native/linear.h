// Products with fixed weights, y = x W^T + b: bfloat16 in, float32 sums, weights packed once into panels.
//
// A panel holds 32 outputs of all inputs, in the order in which a kernel reads them. So weights stream from memory
// exactly once per product, for any number of rows. A result is one sum in the order of the inputs: it depends neither
// on other rows nor on the number of threads.

#pragma once

#include <cstdint>
#include <vector>

#include "team.h"

namespace twostroke {

constexpr int64_t PANEL = 32;  // outputs side by side
constexpr int64_t GROUP = 64;  // inputs that share a scale where weights are int8

enum Kind : int32_t {
    BFLOAT16 = 0,
    INT8 = 1,   // rounded by us; activations, too, in groups of the same size
    CODES = 2,  // integers of a file's own format: `stored.h`
    FP8 = 3,    // e4m3 of a file: multiplied as float32 (`panel_fp8.h`), or widened to bfloat16 panel by panel
};

// The types of a file's scales, each [panel][inputs / group][32]. Constants of kernels/layout.py.
enum class Scales : int32_t {
    FLOAT16 = 0,
    BFLOAT16 = 1,
    FLOAT32 = 2,
    EXPONENT = 3,  // one byte e: 2^(e - 128)
    UINT8 = 4,     // times the float16 of 256 inputs, `supers` [panel][inputs / 256][32]
    INT8 = 5,      // as UINT8, but signed
};

// What is added to a code times its scale.
enum class Mins : int32_t {
    NONE = 0,
    FLOAT16 = 1,  // this number
    ZERO = 2,     // one byte z: -z times the scale
    UINT8 = 3,    // one byte m: -m times a float16 of 256 inputs; `supers` then have two, [panel][inputs / 256][2][32]
    BFLOAT16 = 4,
    SIGNED_ZERO = 5,  // as ZERO, but signed
};

// `NativeLayout` of kernels/cpu/linear.py, field by field.
struct Layout {
    int32_t bits;    // of a code: 4, 5, 6 or 8
    int32_t is_fp4;  // a code of 4 bits stands for a number of FP4, in halves, plus `offset`
    int32_t group;   // inputs that share a scale
    int32_t offset;  // subtracted from every code
    Scales scales;
    Mins mins;

    bool operator==(const Layout &other) const {
        return bits == other.bits && is_fp4 == other.is_fp4 && group == other.group && offset == other.offset &&
               scales == other.scales && mins == other.mins;
    }
};

// The function of a sum before it is written: one more than its index in kernels/activation.py.
enum Activation : int32_t { NONE = 0, SILU = 1, GELU_TANH = 2, GELU = 3 };

// `NativeClamp` of kernels/cpu/linear.py, field by field. SILU of gates becomes gate / (1 + e^(-alpha * gate)), and one is
// added to the values.
struct Clamp {
    float alpha;
    float limit;  // of gates from above, and of values from both sides; 0: there is no clamp
};

// `NativeLinear` of kernels/cpu/linear.py, field by field.
struct Linear {
    const void *panels;    // BFLOAT16: [panel][inputs / 2][32][2]; INT8, FP8: [panel][inputs / 4][32][4]; CODES: `stored.h`
    const void *scales;    // INT8: float [panel][inputs / GROUP][32], of the weights; others: as `layout` says
    const int32_t *sums;   // INT8: the same shape: -128 times the sum of a group's weights
    const float *bias;     // [panels * 32] or null
    int64_t outputs;       // outputs that are written for a row
    int64_t inputs;        // padded with zeros to a multiple of 2, or of GROUP
    int32_t kind;
    int32_t is_gated;      // panels have 16 gates and their 16 values: W has two rows per output
    int32_t activation;    // of sums, or only of gates
    Clamp clamp;           // of gates and values
    const void *mins;      // CODES: as `layout` says
    const void *supers;    // CODES: float16 of 256 inputs, or null
    const float *factors;  // [panels * 32] of the sums, before the bias; or null
    const int32_t *order;  // CODES: the inputs in the order of their weights; null where that is their own
    const Linear *next;    // the outputs that follow these, in another layout; or null
    Layout layout;         // CODES and FP8
};

// The number of panels of a product.
inline int64_t panels_of(const Linear &w) {
    const int64_t width = w.is_gated ? PANEL / 2 : PANEL;
    return (w.outputs + width - 1) / width;
}

// Where a sum is put, and how.
enum class Into : int32_t {
    BFLOAT16 = 0,  // rounded into y
    FLOAT32 = 1,   // written into y
    ADD = 2,       // added to y, float32
    SUMS = 3,      // written into y, float32, in panel order: [panels * 32], before factors, bias and gates.
                   // For products without `next`.
};

struct Rows {
    const uint16_t *x;  // bfloat16; readable up to `Linear::inputs`, and zero beyond the model's inputs
    int64_t x_stride;
    int64_t count;
    void *y;
    int64_t y_stride;
};

// Activations in the form in which a machine multiplies them with one kind of weights.
struct Prepared {
    std::vector<uint8_t> values;
    std::vector<float> scales;  // INT8: [row][inputs / GROUP]; CODES: [row][inputs / unit]
    std::vector<float> sums;    // CODES: the same shape: the sum of a unit's inputs
    std::vector<int32_t> starts;  // CODES: the same shape: start values of integer sums
};

// One of the passes into which a panel's rows are cut.
struct Pass {
    int64_t index, count;
    bool has_next;  // another panel comes after this one
};

// Computes y = x W^T + b with the activation. If it is gated, y is activation(gate) * value of the sums.
void linear(Team *team, const Linear &w, const Rows &rows, Into into, Prepared &prepared);

// Puts results of Into::SUMS [rows.count][panels * 32] where `linear` would have put them. Both calls together give the
// same bits as one `linear`.
void finish_sums(Team *team, const Linear &w, const float *sums, const Rows &rows, Into into);

// Rows first .. end - 1 of a product, and the weights that they are multiplied with.
struct RowGroup {
    const Linear *w;
    int64_t first, end;
};

// Computes `linear` for groups of rows, each with its own weights. All weights have one shape.
void linear(Team *team, const std::vector<RowGroup> &groups, const Rows &rows, Into into, Prepared &prepared);

}  // namespace twostroke
