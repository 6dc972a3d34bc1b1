// Applies rope, and writes keys and values into their slots.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "nibbles.h"
#include "page.h"
#include "quantise.h"
#include "rope.h"

namespace twostroke {
namespace {

constexpr int64_t ALONE_BYTES = 1 << 15;  // below this, waking the team costs more than it saves

// The workspace of one thread.
template <class T, class P>
struct Rows {
    std::vector<T> rotated;
    std::vector<float> wide;
    std::vector<P> stored;

    explicit Rows(int64_t dim) : rotated(size_t(dim)), wide(size_t(dim)), stored(size_t(dim)) {}
};

// Converts one token's key or value of one head, less `center` if there is one, to the page's numbers. Returns their
// scale, if they have one. Numbers without scales have no center.
template <class P, class T>
float convert(const T *row, const float *center, int64_t dim, float *wide, P *stored) {
    if constexpr (std::is_same_v<T, P>) {
        std::memcpy(stored, row, size_t(dim) * sizeof(T));
        return 0;
    }
    for (int64_t d = 0; d < dim; d += simd::W) {
        const int n = int(std::min<int64_t>(simd::W, dim - d));
        simd::store_up_to(wide + d, simd::load_up_to(row + d, n), n);
        if constexpr (!HAS_SCALES<P>) simd::store_up_to(stored + d, simd::load_up_to(row + d, n), n);
    }
    if constexpr (HAS_SCALES<P>) {
        for (int64_t d = 0; center && d < dim; d++) wide[d] -= center[d];
        return quantise(wide, dim, stored);
    }
    return 0;
}

// The slot of one token's numbers and their scale, in one head's keys or values of a block.
struct Slot {
    char *numbers;  // of the whole block
    int64_t block, dim, offset;

    template <class P>
    void put_scale(float scale) const {
        if constexpr (HAS_SCALES<P>)
            std::memcpy(numbers + block * dim + offset * int64_t(sizeof scale), &scale, sizeof scale);
    }

    template <class P>
    P *piece() const {
        const int64_t first = has_pieces(block) ? offset / PIECE * PIECE : offset;
        return (P *)numbers + first * dim;
    }

    template <class P>
    void put_key(const P *row, float scale) const {
        put_scale<P>(scale);
        if (has_pieces(block)) return twostroke::put_key(row, dim, offset % PIECE, piece<P>());
        std::memcpy(piece<P>(), row, size_t(dim) * sizeof(P));
    }

    template <class P>
    void put_value(const P *row, float scale) const {
        put_scale<P>(scale);
        if (has_pieces(block)) return twostroke::put_value(row, dim, offset % PIECE, piece<P>());
        std::memcpy(piece<P>(), row, size_t(dim) * sizeof(P));
    }
};

template <class T, class P>
void store_token(const AttentionStep &s, int64_t layer, int64_t token, T *q, const T *k, const T *v, Rows<T, P> &rows) {
    const int64_t dim = s.head_dim, half = dim / 2;
    const int64_t angles = (token * s.ropes + s.rules[layer].rope) * half;
    const float *cosines = s.cosines + angles, *sines = s.sines + angles;
    for (int64_t head = 0; head < s.heads; head++) rotate(q + head * dim, cosines, sines, half, q + head * dim);
    const int64_t page = s.write_slots[token] / s.block, offset = s.write_slots[token] % s.block;
    char *numbers = (char *)s.pool + page * s.page_stride + layer * s.layer_stride;
    P *stored = rows.stored.data();
    const float *center = s.key_centers ? s.key_centers + layer * s.kv_heads * dim : nullptr;
    for (int64_t head = 0; head < s.kv_heads; head++, numbers += s.head_stride) {
        rotate(k + head * dim, cosines, sines, half, rows.rotated.data());
        const float *own = center ? center + head * dim : nullptr;
        const float key_scale = convert(rows.rotated.data(), own, dim, rows.wide.data(), stored);
        Slot{numbers, s.block, dim, offset}.put_key(stored, key_scale);
        const float value_scale = convert(v + head * dim, nullptr, dim, rows.wide.data(), stored);
        Slot{numbers + s.value_offset, s.block, dim, offset}.put_value(stored, value_scale);
    }
}

template <class P, class T>
void store_any(Team *team, const AttentionStep &s, int64_t layer, T *q, int64_t q_stride, const T *k, int64_t k_stride,
               const T *v, int64_t v_stride) {
    auto some = [&](int part, int parts) {
        Rows<T, P> rows(s.head_dim);
        for (int64_t t = s.tokens * part / parts; t < s.tokens * (part + 1) / parts; t++)
            store_token(s, layer, t, q + t * q_stride, k + t * k_stride, v + t * v_stride, rows);
    };
    const bool is_small = s.tokens * s.heads * s.head_dim * int64_t(sizeof(T)) < ALONE_BYTES;
    run_parts(is_small ? nullptr : team, some);
}

// Calls f with a value of the type of the form's numbers.
template <class F>
void with_form(Form form, F f) {
    switch (form) {
        case Form::FLOAT32: return f(float());
        case Form::BFLOAT16: return f(BFloat16());
        case Form::FLOAT16: return f(Float16());
        case Form::INT8: return f(Int8());
        case Form::FP8_E4M3: return f(Fp8E4M3());
        case Form::FP8_E5M2: return f(Fp8E5M2());
        case Form::INT4: return;  // its pages are stored in whole blocks
    }
}

// The step that stores into the exact pages.
AttentionStep exact_step(const AttentionStep &s) {
    AttentionStep exact = s;
    exact.pool = s.exact_pool, exact.write_slots = s.exact_slots;
    exact.page_stride = s.exact_page_stride, exact.layer_stride = s.exact_layer_stride;
    exact.value_offset = s.exact_value_offset, exact.head_stride = s.exact_head_stride;
    return exact;
}

// Stores blocks whose last token is in the step, from their exact pages into the pool.
template <class T>
void store_full_blocks(Team *team, const AttentionStep &s, int64_t layer) {
    std::vector<int64_t> last;
    for (int64_t token = 0; token < s.tokens; token++)
        if (s.positions[token] % PIECE == PIECE - 1) last.push_back(token);
    if (last.empty()) return;
    run_tasks(team, last.size() * size_t(s.kv_heads), [&](size_t i, size_t, bool) {
        const int64_t token = last[i / size_t(s.kv_heads)], head = int64_t(i % size_t(s.kv_heads));
        const char *exact = (const char *)s.exact_pool + s.exact_slots[token] / PIECE * s.exact_page_stride +
                            layer * s.exact_layer_stride + head * s.exact_head_stride;
        char *to = (char *)s.pool + s.write_slots[token] / PIECE * s.page_stride + layer * s.layer_stride +
                   head * s.head_stride;
        quantise_block((const T *)exact, (const T *)(exact + s.exact_value_offset), int(s.head_dim), to);
    });
}

}  // namespace

void store_kv(Team *team, const AttentionStep &step, int64_t layer, void *q, int64_t q_stride, const void *k,
              int64_t k_stride, const void *v, int64_t v_stride) {
    with_dtype(step.dtype, [&](auto type) {
        using T = decltype(type);
        if (step.form == Form::INT4) {
            store_any<T>(team, exact_step(step), layer, (T *)q, q_stride, (const T *)k, k_stride, (const T *)v,
                         v_stride);
            return store_full_blocks<T>(team, step, layer);
        }
        with_form(step.form, [&](auto number) {
            store_any<decltype(number)>(team, step, layer, (T *)q, q_stride, (const T *)k, k_stride, (const T *)v,
                                        v_stride);
        });
    });
}

}  // namespace twostroke

TWOSTROKE_EXPORT void twostroke_store(twostroke::Team *team, const twostroke::AttentionStep *step, int64_t layer,
                                      void *q, int64_t q_stride, const void *k, int64_t k_stride, const void *v,
                                      int64_t v_stride) {
    twostroke::store_kv(team, *step, layer, q, q_stride, k, k_stride, v, v_stride);
}
