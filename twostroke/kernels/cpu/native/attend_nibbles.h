// Attention over pages of 4-bit numbers.

#pragma once

#include "attention.h"

namespace twostroke {

void attend_nibbles(Team *team, const AttentionStep &step, int64_t layer, const void *q, int64_t q_stride, void *out);

}  // namespace twostroke
