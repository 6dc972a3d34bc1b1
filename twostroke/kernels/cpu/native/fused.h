// The operations of a transformer between its matrix products, each in one pass: norms, rows of the embedding, soft
// caps.

#pragma once

#include <cstdint>

#include "team.h"

namespace twostroke {

// y = x / rms(x) * weight for rows of float32; where there is a bias, y = (x - mean(x)) / deviation(x) * weight + bias.
struct Norm {
    const float *weight;
    const float *bias;  // null for an RMS norm
};

void norm_rows(Team *team, const float *x, int64_t rows, int64_t width, const Norm &by, float epsilon, uint16_t *y,
               int64_t y_stride);

// x += the RMS norm of y.
void add_norm(Team *team, const float *y, int64_t rows, int64_t width, const Norm &by, float epsilon, float *x);

// x becomes softcap * tanh(x / softcap).
void cap_rows(Team *team, float *x, int64_t rows, int64_t width, float softcap);

// The RMS norm, in place, of each of `heads` bfloat16 vectors that lie side by side in each row.
void head_norm(Team *team, uint16_t *x, int64_t rows, int64_t stride, int64_t heads, int64_t width,
               const float *weight, float epsilon);

// Rows of a bfloat16 table [.., width] times `scale`, as float32.
void gather(const uint16_t *table, const int32_t *tokens, int64_t rows, int64_t width, float scale, float *y);

// Adds rows of a bfloat16 table to y.
void add_gathered(const uint16_t *table, const int32_t *tokens, int64_t rows, int64_t width, float *y);

}  // namespace twostroke
