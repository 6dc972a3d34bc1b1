#include "linear.h"

#include <algorithm>
#include <array>
#include <utility>

#include "finish.h"
#include "group_tasks.h"
#include "stored.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include "panel_amx.h"
#elif defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include "panel_avx512.h"
#else
#include "panel_vectors.h"
#endif

namespace twostroke {
namespace {

constexpr int64_t CHUNK = 96;  // rows of a unit of work, during which a panel stays in the first cache

// One function for each number of rows that a pass may have.
using Multiply = decltype(&multiply<1>);
template <size_t... R>
constexpr std::array<Multiply, sizeof...(R)> multiplies_of(std::index_sequence<R...>) {
    return {multiply<int(R) + 1>...};
}
constexpr auto MULTIPLIES = multiplies_of(std::make_index_sequence<PASS_ROWS>());

// Multiplies rows first .. end - 1 with one panel, in passes of nearly equal size.
void unit(const Linear &w, int64_t panel, const Rows &rows, const Prepared &prepared, int64_t first, int64_t end,
          Into into, bool has_next) {
    alignas(64) float sums[PASS_ROWS * PANEL];
    const int64_t passes = passes_of(end - first);
    for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t from = first + (end - first) * pass / passes, to = first + (end - first) * (pass + 1) / passes;
        MULTIPLIES[size_t(to - from - 1)](w, panel, rows, prepared, from, {pass, passes, has_next}, sums);
        with_activation(w, [&](auto activate) { finish(w, panel, rows, from, to - from, into, sums, activate); });
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

// The bytes of a panel as bfloat16.
int64_t wide_bytes(const Linear &w) { return PANEL * w.inputs * 2; }

// The weight with the kind in which it is multiplied.
Linear as_multiplied(Linear w) {
    if (w.kind == FP8 && !HAS_FP8_PANELS) w.kind = BFLOAT16;
    return w;
}

// Multiplies panels from .. to - 1 with the rows of one group, chunk by chunk.
void multiply_panels(const RowGroup &group, int64_t from, int64_t to, const Rows &rows, const Prepared &prepared,
                     Into into) {
    [[maybe_unused]] const TaskState state;
    static thread_local std::vector<uint16_t> widened;
    const Linear &w = *group.w;
    const int64_t count = group.end - group.first, chunks = (count + CHUNK - 1) / CHUNK, panels = panels_of(w);
    for (int64_t panel = from; panel < to; panel++) {
        Linear of = as_multiplied(w);
        if (w.kind == FP8 && !HAS_FP8_PANELS) {
            widened.resize(std::max(widened.size(), size_t(wide_bytes(w)) / 2));
            widen_fp8(w, panel, widened.data());
            of.panels = (const char *)widened.data() - panel * wide_bytes(w);
        }
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            const int64_t first = group.first + count * chunk / chunks;
            const int64_t end = group.first + count * (chunk + 1) / chunks;
            const bool has_next = w.kind != FP8 && chunk == chunks - 1 && panel + 1 < panels;
            unit(of, panel, rows, prepared, first, end, into, has_next);
        }
    }
}

// Whether all groups need the same preparation of rows and are multiplied panel by panel.
bool are_alike(const std::vector<RowGroup> &groups) {
    const Linear &first = *groups.front().w;
    return std::all_of(groups.begin(), groups.end(), [&](const RowGroup &each) {
        const Linear &w = *each.w;
        if (w.kind != first.kind || w.next) return false;
        return w.kind != CODES || (!w.order && !first.order && w.layout == first.layout);
    });
}

void multiply(Team *team, const RowGroup *groups, size_t count, const Rows &rows, Into into, Prepared &prepared) {
    if (groups->w->kind == CODES) return multiply_codes(team, groups, count, rows, into, prepared);
    prepare(team, as_multiplied(*groups->w), rows, prepared);
    over_panels(team, groups, count, [&](const RowGroup &group, int64_t from, int64_t to) {
        multiply_panels(group, from, to, rows, prepared, into);
    });
}

}  // namespace

void linear(Team *team, const Linear &w, const Rows &rows, Into into, Prepared &prepared) {
    const RowGroup all{&w, 0, rows.count};
    multiply(team, &all, 1, rows, into, prepared);
    if (!w.next) return;
    Rows rest = rows;
    rest.y = (char *)rows.y + w.outputs * int64_t(into == Into::BFLOAT16 ? sizeof(uint16_t) : sizeof(float));
    linear(team, *w.next, rest, into, prepared);
}

void finish_sums(Team *team, const Linear &w, const float *sums, const Rows &rows, Into into) {
    const int64_t panels = panels_of(w), width = panels * PANEL;
    run_tasks(team, size_t((rows.count + 3) / 4), [&](size_t task, size_t, bool) {
        const int64_t end = std::min(rows.count, int64_t(task) * 4 + 4);
        for (int64_t r = int64_t(task) * 4; r < end; r++)
            for (int64_t panel = 0; panel < panels; panel++)
                finish_activated(w, panel, rows, r, 1, into, sums + r * width + panel * PANEL);
    });
}

void linear(Team *team, const std::vector<RowGroup> &groups, const Rows &rows, Into into, Prepared &prepared) {
    if (groups.empty()) return;
    if (are_alike(groups)) return multiply(team, groups.data(), groups.size(), rows, into, prepared);
    for (const RowGroup &group : groups) linear(team, *group.w, rows_of(group, rows, into), into, prepared);
}

}  // namespace twostroke

using namespace twostroke;

TWOSTROKE_EXPORT void twostroke_linear(Team *team, const Linear *w, const void *x, int64_t x_stride, int64_t rows,
                                       void *y, int64_t y_stride, int32_t into) {
    Prepared prepared;
    linear(team, *w, {(const uint16_t *)x, x_stride, rows, y, y_stride}, Into(into), prepared);
}
