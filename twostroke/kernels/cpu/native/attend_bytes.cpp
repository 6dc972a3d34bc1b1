#include "attend_bytes.h"

#include "attend.h"

namespace twostroke {
namespace {

template <class Number>
void attend_numbers(Team *team, const AttentionStep &step, int64_t layer, const void *q, int64_t q_stride, void *out) {
#if defined(__AVX512BF16__)
    if (step.dtype == BFLOAT16_ROWS) return Attention<BytePairMath<Number>>(step, layer, q, q_stride, out).run(team);
#endif
    Attention<ByteMath<Number>>(step, layer, q, q_stride, out).run(team);
}

}  // namespace

void attend_bytes(Team *team, const AttentionStep &step, int64_t layer, const void *q, int64_t q_stride, void *out) {
    switch (step.form) {
        case Form::FP8_E4M3: return attend_numbers<Fp8E4M3>(team, step, layer, q, q_stride, out);
        case Form::FP8_E5M2: return attend_numbers<Fp8E5M2>(team, step, layer, q, q_stride, out);
        default: return attend_numbers<Int8>(team, step, layer, q, q_stride, out);
    }
}

}  // namespace twostroke
