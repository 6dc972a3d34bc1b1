// Products with quantised weights of a file: codes of 4, 5, 6 or 8 bits with scales of groups of inputs.
//
// Inputs are rounded to int8, with a scale for each unit of 32 of them, or of 16 where codes have 6 bits. The integer
// sums of a unit are exact; float32 adds up the units in their order. So a result depends neither on other rows nor on
// how its weights are unpacked.
//
// A panel is [unit][words][32]: for each output the words of its codes.
//   8 bits  8 words of 4 codes
//   4 bits  4 words of 8 codes: those of the first four inputs in the low halves of the bytes, of the next four in the high
//   5 bits  4 such words, then one whose byte j has the fifth bit of the inputs j, 4 + j, .. 28 + j
//   6 bits  2 such words, then one whose byte j has the upper two bits of the inputs j, 4 + j, 8 + j and 12 + j

#pragma once

#include "linear.h"

namespace twostroke {

inline int64_t unit_of(const Layout &layout) { return layout.bits == 6 ? 16 : 32; }
inline int64_t unit_bytes(const Layout &layout) { return layout.bits * unit_of(layout) / 8 * PANEL; }

// y = x W^T + b for CODES, for each group's rows with its own weights, all in one layout. If there are several groups,
// their weights must not reorder inputs.
void multiply_codes(Team *team, const RowGroup *groups, size_t count, const Rows &rows, Into into, Prepared &prepared);

// Converts a panel of FP8 to BFLOAT16: each number times its scale, rounded once. `to` is [inputs / 2][32][2].
void widen_fp8(const Linear &w, int64_t panel, uint16_t *to);

// Copies rows of a table in any layout, as float32. `w.next` is not followed.
void gather_stored(const Linear &w, const int32_t *tokens, int64_t rows, float *y);

}  // namespace twostroke
