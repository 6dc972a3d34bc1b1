#include "linear.h"

#include <algorithm>
#include <array>
#include <utility>

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include "panel_amx.h"
#elif defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include "panel_avx512.h"
#else
#include "panel_vectors.h"
#endif

namespace twostroke {
namespace {

constexpr int64_t CHUNK = 96;  // rows of a unit of work; a panel stays in the first cache meanwhile

// One function for each number of rows that a pass may have.
using Multiply = decltype(&multiply<1>);
template <size_t... R>
constexpr std::array<Multiply, sizeof...(R)> multiplies_of(std::index_sequence<R...>) {
    return {multiply<int(R) + 1>...};
}
constexpr auto MULTIPLIES = multiplies_of(std::make_index_sequence<PASS_ROWS>());

void put(void *y, int64_t at, simd::F sum, int count, Into into) {
    if (count <= 0) return;
    if (into == Into::BFLOAT16) return simd::store_up_to((BFloat16 *)y + at, sum, count);
    if (into == Into::ADD) sum = simd::add(sum, simd::load_up_to((const float *)y + at, count));
    simd::store_up_to((float *)y + at, sum, count);
}

// f with the activation, as a function of one vector.
template <class F>
void with_activation(int32_t activation, F f) {
    switch (activation) {
        case SILU: return f([](simd::F x) { return simd::silu(x); });
        case GELU_TANH: return f([](simd::F x) { return simd::gelu_tanh(x); });
        case GELU: return f([](simd::F x) { return simd::gelu(x); });
        default: return f([](simd::F x) { return x; });
    }
}

// From sums [count][32] of a panel to where they belong.
template <class Activate>
void finish(const Linear &w, int64_t panel, const Rows &rows, int64_t first, int64_t count, Into into,
            const float *sums, Activate activate) {
    const int64_t width = w.is_gated ? PANEL / 2 : PANEL, output = panel * width;
    for (int64_t at = 0; at < width; at += simd::W) {
        auto with_bias = [&](int64_t r, int64_t column) {
            const simd::F sum = simd::load(sums + r * PANEL + column);
            return w.bias ? simd::add(sum, simd::load(w.bias + panel * PANEL + column)) : sum;
        };
        const int left = int(std::min<int64_t>(simd::W, w.outputs - output - at));
        for (int64_t r = 0; r < count; r++) {
            simd::F sum = activate(with_bias(r, at));
            if (w.is_gated) sum = simd::mul(sum, with_bias(r, at + width));
            put(rows.y, (first + r) * rows.y_stride + output + at, sum, left, into);
        }
    }
}

// Rows first .. end with one panel, in passes of nearly equal size.
void unit(const Linear &w, int64_t panel, const Rows &rows, const Prepared &prepared, int64_t first, int64_t end,
          Into into, bool has_next) {
    alignas(64) float sums[PASS_ROWS * PANEL];
    const int64_t passes = passes_of(end - first);
    for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t from = first + (end - first) * pass / passes, to = first + (end - first) * (pass + 1) / passes;
        MULTIPLIES[size_t(to - from - 1)](w, panel, rows, prepared, from, {pass, passes, has_next}, sums);
        with_activation(w.activation,
                        [&](auto activate) { finish(w, panel, rows, from, to - from, into, sums, activate); });
    }
}

void prepare(Team *team, const Linear &w, const Rows &rows, Prepared &prepared) {
    const int64_t bytes = prepared_bytes(w), groups = w.inputs / GROUP;
    if (!bytes) return;
    prepared.values.resize(std::max(prepared.values.size(), size_t((rows.count + SPARE_ROWS) * bytes)));
    prepared.scales.resize(std::max(prepared.scales.size(), size_t(rows.count * groups)));
    auto part_of = [&](int part, int parts) {
        for (int64_t r = rows.count * part / parts; r < rows.count * (part + 1) / parts; r++)
            prepare_row(w, rows.x + r * rows.x_stride, prepared.values.data() + r * bytes,
                        prepared.scales.data() + r * groups);
    };
    if (rows.count < 8) return part_of(0, 1);
    run_parts(team, part_of);
}

// Panels of a task. It takes some ten microseconds: long beside taking the next one, and short beside the wait for a
// thread whose core somebody else has got meanwhile.
int64_t panels_of_task(const Linear &w, int64_t rows, int64_t panels) {
    constexpr int64_t TASK_PRODUCTS = 4 << 20;
    constexpr int64_t ROWS_OF_READING = 12;  // reading a panel takes as long as multiplying so many rows with it
    constexpr int64_t TASKS = 8;             // of a kernel, at least, where it has so many panels
    const int64_t products = PANEL * w.inputs * (rows + ROWS_OF_READING);
    return std::max<int64_t>(1, std::min(TASK_PRODUCTS / products, panels / TASKS));
}

}  // namespace

void linear(Team *team, const Linear &w, const Rows &rows, Into into, Prepared &prepared) {
    prepare(team, w, rows, prepared);
    const int64_t width = w.is_gated ? PANEL / 2 : PANEL;
    const int64_t panels = (w.outputs + width - 1) / width, chunks = (rows.count + CHUNK - 1) / CHUNK;
    const int64_t some = panels_of_task(w, rows.count, panels);
    run_tasks(team, size_t((panels + some - 1) / some), [&](size_t task, size_t, bool) {
        [[maybe_unused]] const TaskState state;
        const int64_t end = std::min(panels, (int64_t(task) + 1) * some);
        for (int64_t panel = int64_t(task) * some; panel < end; panel++)
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                const int64_t first = rows.count * chunk / chunks, last = rows.count * (chunk + 1) / chunks;
                unit(w, panel, rows, prepared, first, last, into, chunk == chunks - 1 && panel + 1 < panels);
            }
    });
}

}  // namespace twostroke

using namespace twostroke;

TWOSTROKE_EXPORT void twostroke_linear(Team *team, const Linear *w, const void *x, int64_t x_stride, int64_t rows,
                                       void *y, int64_t y_stride, int32_t into) {
    Prepared prepared;
    linear(team, *w, {(const uint16_t *)x, x_stride, rows, y, y_stride}, Into(into), prepared);
}
