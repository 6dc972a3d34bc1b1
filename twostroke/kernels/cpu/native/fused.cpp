#include "fused.h"

#if defined(__AVX512BF16__)

#include <cmath>

#include "vector.h"

namespace twostroke {
namespace {

constexpr int64_t WORTH_A_TEAM = 16384;  // elements; fewer are done before a second thread has woken up

template <class F>
void over_rows(Team *team, int64_t rows, int64_t width, F row) {
    auto part_of = [&](int part, int parts) {
        for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; r++) row(r);
    };
    if (rows * width < WORTH_A_TEAM) return part_of(0, 1);
    run_parts(team, part_of);
}

// The sum's order depends on the width alone.
template <class Load>
float inverse_rms(int64_t width, float epsilon, Load load) {
    __m512 squares[4];
    for (auto &sum : squares) sum = _mm512_setzero_ps();
    int lane = 0;
    for (int64_t i = 0; i < width; i += LANES) {
        const __m512 x = load(i, lanes(width - i));
        squares[lane] = _mm512_fmadd_ps(x, x, squares[lane]);
        lane = (lane + 1) % 4;
    }
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(squares[0], squares[1]), _mm512_add_ps(squares[2], squares[3]));
    return 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / float(width) + epsilon);
}

template <class Load>
void norm(int64_t width, float epsilon, const float *weight, uint16_t *y, Load load) {
    const __m512 inverse = _mm512_set1_ps(inverse_rms(width, epsilon, load));
    for (int64_t i = 0; i < width; i += LANES) {
        const __mmask16 mask = lanes(width - i);
        const __m512 scaled = _mm512_mul_ps(load(i, mask), inverse);
        store_bfloat16(y + i, _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(mask, weight + i)), mask);
    }
}

}  // namespace

void rms_norm(Team *team, const float *x, int64_t rows, int64_t width, const float *weight, float epsilon, uint16_t *y,
              int64_t y_stride) {
    over_rows(team, rows, width, [=](int64_t r) {
        const float *row = x + r * width;
        norm(width, epsilon, weight, y + r * y_stride,
             [row](int64_t i, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, row + i); });
    });
}

void head_norm(Team *team, uint16_t *x, int64_t rows, int64_t stride, int64_t heads, int64_t width,
               const float *weight, float epsilon) {
    over_rows(team, rows, heads * width, [=](int64_t r) {
        for (int64_t head = 0; head < heads; head++) {
            uint16_t *at = x + r * stride + head * width;
            norm(width, epsilon, weight, at, [at](int64_t i, __mmask16 mask) { return load_bfloat16(at + i, mask); });
        }
    });
}

void gather(const uint16_t *table, const int32_t *tokens, int64_t rows, int64_t width, float *y) {
    for (int64_t r = 0; r < rows; r++) {
        const uint16_t *from = table + int64_t(tokens[r]) * width;
        for (int64_t i = 0; i < width; i += LANES) {
            const __mmask16 mask = lanes(width - i);
            _mm512_mask_storeu_ps(y + r * width + i, mask, load_bfloat16(from + i, mask));
        }
    }
}

}  // namespace twostroke

#endif
