// Attention over pages of 4-bit numbers.

#pragma once

#include "attention.h"

namespace twostroke {

void attend_nibbles(Team *team, const AttentionStep &step, int64_t layer, const Queries &queries);

}  // namespace twostroke
