#include "attend_bytes.h"

#include "attend.h"

namespace twostroke {
namespace {

template <class Number>
void attend_numbers(Team *team, const AttentionStep &step, int64_t layer, const Queries &queries) {
#if defined(__AVX512BF16__)
    if (step.dtype == BFLOAT16_ROWS) return Attention<BytePairMath<Number>>(step, layer, queries).run(team);
#endif
    Attention<ByteMath<Number>>(step, layer, queries).run(team);
}

}  // namespace

void attend_bytes(Team *team, const AttentionStep &step, int64_t layer, const Queries &queries) {
    switch (step.form) {
        case Form::FP8_E4M3: return attend_numbers<Fp8E4M3>(team, step, layer, queries);
        case Form::FP8_E5M2: return attend_numbers<Fp8E5M2>(team, step, layer, queries);
        default: return attend_numbers<Int8>(team, step, layer, queries);
    }
}

}  // namespace twostroke
