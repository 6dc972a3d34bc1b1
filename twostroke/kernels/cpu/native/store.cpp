// Rope, and the writing of keys and values into their slots.

#include <algorithm>
#include <vector>

#include "attention.h"
#include "page.h"

namespace twostroke {
namespace {

constexpr int64_t ALONE_BYTES = 1 << 15;  // below this, waking the team costs more than it saves

template <class T>
void rotate(const T *x, const float *cosines, const float *sines, int64_t half, T *y) {
    for (int64_t d = 0; d < half; d += simd::W) {
        const int n = int(std::min<int64_t>(simd::W, half - d));
        const simd::F low = simd::load_up_to(x + d, n), high = simd::load_up_to(x + d + half, n);
        const simd::F cosine = simd::load_up_to(cosines + d, n), sine = simd::load_up_to(sines + d, n);
        simd::store_up_to(y + d, simd::sub(simd::mul(low, cosine), simd::mul(high, sine)), n);
        simd::store_up_to(y + d + half, simd::fma(high, cosine, simd::mul(low, sine)), n);
    }
}

template <class T>
void store_token(const AttentionStep &s, int64_t layer, int64_t token, T *q, const T *k, const T *v, T *rotated) {
    const int64_t dim = s.head_dim, half = dim / 2;
    const float *cosines = s.cosines + token * half, *sines = s.sines + token * half;
    for (int64_t head = 0; head < s.heads; head++) rotate(q + head * dim, cosines, sines, half, q + head * dim);
    const int64_t page = s.write_slots[token] / s.block, offset = s.write_slots[token] % s.block;
    const int64_t column = has_pieces(s.block) ? offset % PIECE : 0;
    T *slot = (T *)s.pool + page * s.page_stride + layer * s.layer_stride + (offset - column) * dim;
    for (int64_t head = 0; head < s.kv_heads; head++, slot += s.head_stride) {
        if (has_pieces(s.block)) {
            rotate(k + head * dim, cosines, sines, half, rotated);
            put_key(rotated, dim, column, slot);
            put_value(v + head * dim, dim, column, slot + s.value_offset);
        } else {
            rotate(k + head * dim, cosines, sines, half, slot);
            std::memcpy(slot + s.value_offset, v + head * dim, size_t(dim) * sizeof(T));
        }
    }
}

template <class T>
void store_any(Team *team, const AttentionStep &s, int64_t layer, T *q, int64_t q_stride, const T *k, int64_t k_stride,
               const T *v, int64_t v_stride) {
    auto some = [&](int part, int parts) {
        std::vector<T> rotated(size_t(s.head_dim));
        for (int64_t t = s.tokens * part / parts; t < s.tokens * (part + 1) / parts; t++)
            store_token(s, layer, t, q + t * q_stride, k + t * k_stride, v + t * v_stride, rotated.data());
    };
    const bool is_small = s.tokens * s.heads * s.head_dim * int64_t(sizeof(T)) < ALONE_BYTES;
    run_parts(is_small ? nullptr : team, some);
}

}  // namespace

void store_kv(Team *team, const AttentionStep &step, int64_t layer, void *q, int64_t q_stride, const void *k,
              int64_t k_stride, const void *v, int64_t v_stride) {
    auto as = [&](auto type) {
        using T = decltype(type);
        store_any(team, step, layer, (T *)q, q_stride, (const T *)k, k_stride, (const T *)v, v_stride);
    };
    switch (step.dtype) {
        case 0: return as(float());
        case 1: return as(BFloat16());
        case 2: return as(Float16());
    }
}

}  // namespace twostroke

TWOSTROKE_EXPORT void twostroke_store(twostroke::Team *team, const twostroke::AttentionStep *step, int64_t layer,
                                      void *q, int64_t q_stride, const void *k, int64_t k_stride, const void *v,
                                      int64_t v_stride) {
    twostroke::store_kv(team, *step, layer, q, q_stride, k, k_stride, v, v_stride);
}
