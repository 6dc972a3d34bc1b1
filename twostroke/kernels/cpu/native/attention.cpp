// Attention over pages of numbers without scales. Attention over other forms is compiled separately.

#include "attend.h"
#include "attend_bytes.h"
#include "attend_nibbles.h"

namespace twostroke {

void attend(Team *team, const AttentionStep &step, int64_t layer, const Queries &queries) {
    auto by = [&](auto math) { Attention<decltype(math)>(step, layer, queries).run(team); };
    switch (step.form) {
        case Form::FLOAT32: return by(FloatMath<float>());
        case Form::FLOAT16: return by(FloatMath<Float16>());
        case Form::BFLOAT16:
#if defined(__AVX512BF16__)
            if (step.dtype == BFLOAT16_ROWS) return by(PairMath());
#endif
            return by(WideningMath());
        case Form::INT8:
        case Form::FP8_E4M3:
        case Form::FP8_E5M2: return attend_bytes(team, step, layer, queries);
        case Form::INT4: return attend_nibbles(team, step, layer, queries);
    }
}

}  // namespace twostroke

TWOSTROKE_EXPORT void twostroke_attend(twostroke::Team *team, const twostroke::AttentionStep *step, int64_t layer,
                                       const void *q, int64_t q_stride, void *out, const float *sinks) {
    twostroke::attend(team, *step, layer, {q, q_stride, out, step->heads * step->value_numbers(), sinks});
}
