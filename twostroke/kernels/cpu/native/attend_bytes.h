// Attention over pages of numbers of one byte.

#pragma once

#include "attention.h"

namespace twostroke {

constexpr int32_t BFLOAT16_ROWS = 1;  // the dtype of rows that are multiplied as bfloat16, where a machine can

void attend_bytes(Team *team, const AttentionStep &step, int64_t layer, const Queries &queries);

}  // namespace twostroke
