// Attention in the dtypes that a pool may have.

#include "attend.h"

namespace twostroke {

void attend(Team *team, const AttentionStep &step, int64_t layer, const void *q, int64_t q_stride, void *out) {
#if defined(__AVX512BF16__)
    using Bfloat16Math = PairMath;
#else
    using Bfloat16Math = WideningMath;
#endif
    switch (step.dtype) {
        case 0:
            return Attention<float, FloatMath<float>>(step, layer, (const float *)q, q_stride, (float *)out).run(team);
        case 1:
            return Attention<BFloat16, Bfloat16Math>(step, layer, (const BFloat16 *)q, q_stride, (BFloat16 *)out)
                .run(team);
        case 2:
            return Attention<Float16, FloatMath<Float16>>(step, layer, (const Float16 *)q, q_stride, (Float16 *)out)
                .run(team);
    }
}

}  // namespace twostroke

TWOSTROKE_EXPORT void twostroke_attend(twostroke::Team *team, const twostroke::AttentionStep *step, int64_t layer,
                                       const void *q, int64_t q_stride, void *out) {
    twostroke::attend(team, *step, layer, q, q_stride, out);
}
