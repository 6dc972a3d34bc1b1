// What a transformer does between its products, each in one pass: norms and rows of the embedding.

#pragma once

#include <cstdint>

#include "team.h"

namespace twostroke {

// y = x / rms(x) * weight for rows of float32.
void rms_norm(Team *team, const float *x, int64_t rows, int64_t width, const float *weight, float epsilon, uint16_t *y,
              int64_t y_stride);

// The same in place, for each of `heads` bfloat16 vectors that lie side by side in each row.
void head_norm(Team *team, uint16_t *x, int64_t rows, int64_t stride, int64_t heads, int64_t width,
               const float *weight, float epsilon);

// Rows of a bfloat16 table [.., width], as float32.
void gather(const uint16_t *table, const int32_t *tokens, int64_t rows, int64_t width, float *y);

}  // namespace twostroke
