// `simd.h` for Arm's NEON: the portable vectors, and its products of bfloat16 and int8 where the machine has them.

#pragma once

#include "simd_portable.h"

namespace twostroke::simd {

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define SIMD_HAS_PAIRS 1
// Words of two bfloat16: each lane of `sum` gains both products, rounded as this processor does it.
inline F fma_pairs(F a, F b, F sum) {
    return (F)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#endif

#if defined(__ARM_FEATURE_DOTPROD)
#define SIMD_HAS_DOTS 1
// Words of four int8: each lane of `sum` gains four products.
inline I add_dots(I sum, I a, I b) { return (I)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b); }
#endif

}  // namespace twostroke::simd
