// Rope, page writes and attention over pages for rows of a ragged batch: plain C interface, no dependencies.
//
// The pool is [pages, layers, 2, kv_heads, block, head_dim]; strides come in elements. A row is one query token; it
// attends to the first `context` tokens of its sequence's pages, read where they lie. Arithmetic is float32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" {

struct Step {
    void *pool;
    int64_t page_stride, layer_stride, value_offset, head_stride;
    int64_t block, heads, kv_heads, head_dim;
    int64_t tokens;
    const float *cosines, *sines;    // [tokens, head_dim / 2]
    const int64_t *write_slots;      // [tokens]
    int64_t rows;
    const int32_t *row_tokens;       // [rows] index of the query token
    const int32_t *row_sequences;    // [rows] index of its block table
    const int32_t *row_contexts;     // [rows] tokens it attends to
    const int32_t *block_tables;     // [sequences, table_stride]
    int64_t table_stride;
    float scale;
    int32_t dtype;                   // 0 float32, 1 bfloat16, 2 float16
};
}

namespace {

struct BFloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline void from_float(float x, float &y) { y = x; }

inline void from_float(float x, BFloat16 &y) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    y.bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}

// In software: compilers turn this into vectors, which few do with a half-precision type of their own.
struct Float16 {
    uint16_t bits;
};

inline float to_float(Float16 x) {
    uint32_t bits = uint32_t(x.bits & 0x7fff) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude *= 0x1p112f;  // moves the exponent's bias; exact for subnormals too
    std::memcpy(&bits, &magnitude, 4);
    bits |= sign;
    std::memcpy(&magnitude, &bits, 4);
    return magnitude;
}

inline void from_float(float x, Float16 &y) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits >= 0x477ff000) {
        bits = 0x7c00;  // beyond the largest half
    } else if (bits < 0x38800000) {
        float magnitude;  // adding 1/2 lines a subnormal's bits up with the result, rounded
        std::memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, 4);
        bits -= 0x3f000000;
    } else {
        bits = (bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13;  // to nearest, ties to even
    }
    y.bits = uint16_t(bits) | sign;
}

// e^x for x <= 0, to about two units in the last place; written out so that compilers vectorise it.
inline float exp_of_negative(float x) {
    x = std::max(x, -87.0f);
    float n = std::floor(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t exponent = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &exponent, 4);
    return p * power;
}

template <class T>
void rotate(const T *x, const float *cosines, const float *sines, int64_t half, T *y) {
#pragma omp simd
    for (int64_t d = 0; d < half; d++) {
        float low = to_float(x[d]), high = to_float(x[d + half]);
        from_float(low * cosines[d] - high * sines[d], y[d]);
        from_float(high * cosines[d] + low * sines[d], y[d + half]);
    }
}

// Rotates q in place; k, rotated, and v go to their slots.
template <class T>
void store(const Step &s, int64_t layer, T *q, int64_t q_stride, const T *k, int64_t k_stride, const T *v,
           int64_t v_stride) {
    const int64_t dim = s.head_dim, half = dim / 2;
    for (int64_t t = 0; t < s.tokens; t++) {
        const float *cosines = s.cosines + t * half, *sines = s.sines + t * half;
        for (int64_t head = 0; head < s.heads; head++) {
            T *at = q + t * q_stride + head * dim;
            rotate(at, cosines, sines, half, at);
        }
        const int64_t page = s.write_slots[t] / s.block, offset = s.write_slots[t] % s.block;
        for (int64_t head = 0; head < s.kv_heads; head++) {
            T *slot = (T *)s.pool + page * s.page_stride + layer * s.layer_stride + head * s.head_stride + offset * dim;
            rotate(k + t * k_stride + head * dim, cosines, sines, half, slot);
            std::memcpy(slot + s.value_offset, v + t * v_stride + head * dim, dim * sizeof(T));
        }
    }
}

// Running softmax of one row over the pages of one kv head, for all query heads that share it.
template <class T, int64_t FIXED_DIM>
struct Heads {
    const int64_t dim, groups, block;
    std::vector<float> query, sum_of_values, scores;
    std::vector<float> peak, sum;

    explicit Heads(const Step &s)
        : dim(FIXED_DIM ? FIXED_DIM : s.head_dim),
          groups(s.heads / s.kv_heads),
          block(s.block),
          query(groups * dim),
          sum_of_values(groups * dim),
          scores(groups * s.block),
          peak(groups),
          sum(groups) {}

    void begin(const T *q, float scale) {
        for (int64_t i = 0; i < groups * dim; i++) query[i] = to_float(q[i]) * scale;
        std::fill(sum_of_values.begin(), sum_of_values.end(), 0.0f);
        std::fill(peak.begin(), peak.end(), -INFINITY);
        std::fill(sum.begin(), sum.end(), 0.0f);
    }

    void add_page(const T *keys, const T *values, int64_t count) {
        const int64_t D = FIXED_DIM ? FIXED_DIM : dim;
        for (int64_t p = 0; p < count; p++) {
            for (int64_t g = 0; g < groups; g++) {
                const float *q = &query[g * D];
                const T *key = keys + p * D;
                float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
                for (int64_t d = 0; d < D; d++) dot += q[d] * to_float(key[d]);
                scores[g * block + p] = dot;
            }
        }
        for (int64_t g = 0; g < groups; g++) weigh(g, count);
        for (int64_t g = 0; g < groups; g++) {
            float *out = &sum_of_values[g * D];
            const float *weights = &scores[g * block];
            for (int64_t p = 0; p < count; p++) {
                const T *value = values + p * D;
                const float weight = weights[p];
#pragma omp simd
                for (int64_t d = 0; d < D; d++) out[d] += weight * to_float(value[d]);
            }
        }
    }

    // Turn this page's scores into weights under the new peak, and bring what was summed before under it too.
    void weigh(int64_t g, int64_t count) {
        float *score = &scores[g * block];
        float highest = peak[g];
        for (int64_t p = 0; p < count; p++) highest = std::max(highest, score[p]);
        float page_sum = 0.0f;
#pragma omp simd reduction(+ : page_sum)
        for (int64_t p = 0; p < count; p++) {
            score[p] = exp_of_negative(score[p] - highest);
            page_sum += score[p];
        }
        if (highest > peak[g]) {
            const float shrink = exp_of_negative(peak[g] - highest);
            float *out = &sum_of_values[g * dim];
#pragma omp simd
            for (int64_t d = 0; d < dim; d++) out[d] *= shrink;
            sum[g] *= shrink;
            peak[g] = highest;
        }
        sum[g] += page_sum;
    }

    void finish(T *out) {
        for (int64_t g = 0; g < groups; g++) {
            const float inverse = 1.0f / sum[g];
            for (int64_t d = 0; d < dim; d++) from_float(sum_of_values[g * dim + d] * inverse, out[g * dim + d]);
        }
    }
};

template <class T, int64_t FIXED_DIM>
void attend(const Step &s, int64_t layer, const T *q, int64_t q_stride, T *out) {
    Heads<T, FIXED_DIM> heads(s);
    const int64_t width = heads.groups * s.head_dim;  // of one kv head's query heads
    for (int64_t row = 0; row < s.rows; row++) {
        const int64_t token = s.row_tokens[row], context = s.row_contexts[row];
        const int32_t *table = s.block_tables + s.row_sequences[row] * s.table_stride;
        for (int64_t head = 0; head < s.kv_heads; head++) {
            heads.begin(q + token * q_stride + head * width, s.scale);
            for (int64_t start = 0; start < context; start += s.block) {
                const T *keys = (const T *)s.pool + table[start / s.block] * s.page_stride + layer * s.layer_stride +
                                head * s.head_stride;
                heads.add_page(keys, keys + s.value_offset, std::min(s.block, context - start));
            }
            heads.finish(out + token * s.heads * s.head_dim + head * width);
        }
    }
}

template <class T>
void attend_any(const Step &s, int64_t layer, const void *q, int64_t q_stride, void *out) {
    switch (s.head_dim) {
        case 64: return attend<T, 64>(s, layer, (const T *)q, q_stride, (T *)out);
        case 128: return attend<T, 128>(s, layer, (const T *)q, q_stride, (T *)out);
        default: return attend<T, 0>(s, layer, (const T *)q, q_stride, (T *)out);
    }
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void twostroke_store(const Step *s, int64_t layer, void *q, int64_t q_stride, const void *k, int64_t k_stride,
                     const void *v, int64_t v_stride) {
    switch (s->dtype) {
        case 0:
            return store(*s, layer, (float *)q, q_stride, (const float *)k, k_stride, (const float *)v, v_stride);
        case 1:
            return store(*s, layer, (BFloat16 *)q, q_stride, (const BFloat16 *)k, k_stride, (const BFloat16 *)v,
                         v_stride);
        case 2:
            return store(*s, layer, (Float16 *)q, q_stride, (const Float16 *)k, k_stride, (const Float16 *)v,
                         v_stride);
    }
}

__attribute__((visibility("default"))) void twostroke_attend(const Step *s, int64_t layer, const void *q, int64_t q_stride, void *out) {
    switch (s->dtype) {
        case 0: return attend_any<float>(*s, layer, q, q_stride, out);
        case 1: return attend_any<BFloat16>(*s, layer, q, q_stride, out);
        case 2: return attend_any<Float16>(*s, layer, q, q_stride, out);
    }
}
}
