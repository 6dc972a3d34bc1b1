// Finishes a panel's sums: factors, bias, gates, and the place where results are put.

#pragma once

#include <algorithm>
#include <cstdint>

#include "linear.h"
#include "simd.h"

namespace twostroke {

inline void put(void *y, int64_t at, simd::F sum, int count, Into into) {
    if (count <= 0) return;
    if (into == Into::BFLOAT16) return simd::store_up_to((BFloat16 *)y + at, sum, count);
    if (into == Into::ADD) sum = simd::add(sum, simd::load_up_to((const float *)y + at, count));
    simd::store_up_to((float *)y + at, sum, count);
}

// A value times its activated gate.
template <class Activate>
inline simd::F gated(simd::F gate, simd::F value, Activate activate) {
    return simd::mul(activate(gate), value);
}

// gate / (1 + e^(-alpha * gate)) * (value + 1), both clamped.
struct ClampedGate {
    Clamp clamp;
    simd::F operator()(simd::F gate) const { return simd::times_sigmoid(gate, simd::mul(gate, simd::set1(clamp.alpha))); }
};

inline simd::F gated(simd::F gate, simd::F value, const ClampedGate &by) {
    const simd::F most = simd::set1(by.clamp.limit), least = simd::set1(-by.clamp.limit), one = simd::set1(1.0f);
    return simd::mul(by(simd::min(gate, most)), simd::add(simd::max(simd::min(value, most), least), one));
}

// Calls f with the activation of a product, as a function of one vector.
template <class F>
void with_activation(const Linear &w, F f) {
    if (w.clamp.limit > 0) return f(ClampedGate{w.clamp});
    switch (w.activation) {
        case SILU: return f([](simd::F x) { return simd::silu(x); });
        case GELU_TANH: return f([](simd::F x) { return simd::gelu_tanh(x); });
        case GELU: return f([](simd::F x) { return simd::gelu(x); });
        default: return f([](simd::F x) { return x; });
    }
}

// Finishes the sums [count][32] of a panel, and puts the results where they belong.
template <class Activate>
void finish(const Linear &w, int64_t panel, const Rows &rows, int64_t first, int64_t count, Into into,
            const float *sums, Activate activate) {
    if (into == Into::SUMS) {
        for (int64_t r = 0; r < count; r++)
            std::copy_n(sums + r * PANEL, PANEL, (float *)rows.y + (first + r) * rows.y_stride + panel * PANEL);
        return;
    }
    const int64_t width = w.is_gated ? PANEL / 2 : PANEL, output = panel * width;
    for (int64_t at = 0; at < width; at += simd::W) {
        auto with_bias = [&](int64_t r, int64_t column) {
            simd::F sum = simd::load(sums + r * PANEL + column);
            if (w.factors) sum = simd::mul(sum, simd::load(w.factors + panel * PANEL + column));
            return w.bias ? simd::add(sum, simd::load(w.bias + panel * PANEL + column)) : sum;
        };
        const int left = int(std::min<int64_t>(simd::W, w.outputs - output - at));
        for (int64_t r = 0; r < count; r++) {
            const simd::F gate = with_bias(r, at);
            const simd::F sum = w.is_gated ? gated(gate, with_bias(r, at + width), activate) : activate(gate);
            put(rows.y, (first + r) * rows.y_stride + output + at, sum, left, into);
        }
    }
}

// Calls `finish` with the activation of the product.
inline void finish_activated(const Linear &w, int64_t panel, const Rows &rows, int64_t first, int64_t count, Into into,
                             const float *sums) {
    with_activation(w, [&](auto activate) { finish(w, panel, rows, first, count, into, sums, activate); });
}

// Number of panels of a task. A task takes some ten microseconds. That is long beside taking the next task, and short
// beside the wait for a thread whose core another program has taken.
inline int64_t panels_of_task(const Linear &w, int64_t rows, int64_t panels) {
    constexpr int64_t TASK_PRODUCTS = 4 << 20;
    constexpr int64_t ROWS_OF_READING = 12;  // reading a panel takes as long as multiplying so many rows with it
    constexpr int64_t TASKS = 8;             // least tasks of a kernel, if it has as many panels
    const int64_t products = PANEL * w.inputs * (rows + ROWS_OF_READING);
    return std::max<int64_t>(1, std::min(TASK_PRODUCTS / products, panels / TASKS));
}

}  // namespace twostroke
