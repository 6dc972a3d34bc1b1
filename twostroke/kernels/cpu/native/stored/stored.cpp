#include "stored.h"

#include <algorithm>
#include <cstring>

#include "byte_dots.h"
#include "facts.h"
#include "finish.h"
#include "group_tasks.h"
#include "panel_fp8.h"
#include "quantise.h"

namespace twostroke {
namespace {

using bytes::Words;
constexpr int64_t VECTORS = PANEL / bytes::LANES;       // vectors of a panel
constexpr int64_t TILE_ROWS = bytes::MOST_SUMS / 2;     // rows of a pass over an unpacked panel, two vectors at a time
constexpr int64_t AHEAD = 8192;                         // bytes that are prefetched ahead of the reading

constexpr uint8_t FP4_HALVES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};  // 2 * FP4 + 12

// How a panel stores codes. `word` returns four inputs of each lane's output.
struct Nibbles {
    static constexpr int UNIT = 32, WORDS = 4, MOST = 15;
    static Words word(const char *at, int step) {
        const Words two = bytes::load(at + step / 2 * PANEL * 4), mask = bytes::set1(0x0f0f0f0f);
        return bytes::both(step % 2 ? bytes::shifted_right(two, 4) : two, mask);
    }
};

struct Fp4 {
    static constexpr int UNIT = 32, WORDS = 4, MOST = 24;
    static Words word(const char *at, int step) { return bytes::looked_up(FP4_HALVES, Nibbles::word(at, step)); }
};

struct FiveBits {
    static constexpr int UNIT = 32, WORDS = 5, MOST = 31;
    static Words word(const char *at, int step) {
        const Words bits = bytes::load(at + 4 * PANEL * 4);
        const Words fifth = step < 4 ? bytes::shifted_left(bits, unsigned(4 - step))
                                     : bytes::shifted_right(bits, unsigned(step - 4));
        return bytes::either(Nibbles::word(at, step), bytes::both(fifth, bytes::set1(0x10101010)));
    }
};

struct SixBits {
    static constexpr int UNIT = 16, WORDS = 3, MOST = 63;
    static Words word(const char *at, int step) {
        const Words bits = bytes::load(at + 2 * PANEL * 4);
        const Words upper = step < 2 ? bytes::shifted_left(bits, unsigned(4 - 2 * step))
                                     : bytes::shifted_right(bits, unsigned(2 * step - 4));
        return bytes::either(Nibbles::word(at, step), bytes::both(upper, bytes::set1(0x30303030)));
    }
};

struct Whole {
    static constexpr int UNIT = 32, WORDS = 8, MOST = 0;
    static Words word(const char *at, int step) { return bytes::load(at + step * PANEL * 4); }
};

// Codes that were unpacked from `Packed`.
template <class Packed>
struct Unpacked {
    static constexpr int UNIT = Packed::UNIT, WORDS = UNIT / 4, MOST = Packed::MOST;
    static Words word(const char *at, int step) { return bytes::load(at + step * PANEL * 4); }
};

// Rows in the form in which they are multiplied with a panel.
struct Inputs {
    const int8_t *codes;  // [rows][inputs]
    const float *scales, *sums;  // [rows][units]
    const int32_t *starts;
    int64_t inputs, units;

    Inputs from(int64_t row) const {
        return {codes + row * inputs, scales + row * units, sums + row * units, starts + row * units, inputs, units};
    }
    Words four(int row, int64_t unit, int at, int width) const {
        int32_t four;
        std::memcpy(&four, codes + row * inputs + unit * width + at, 4);
        return bytes::set1(four);
    }
};

// Adds one unit of V vectors of outputs to the sums [R][32] of R rows.
template <class Codes, int R, int V>
inline void add_unit(const char *at, const Inputs &x, int64_t unit, const UnitFacts &facts, int column, float *sums) {
    using Sum = bytes::Sum<Codes::MOST>;
    constexpr int STEPS = Codes::UNIT / 4, PER_FOLD = std::min(STEPS, Sum::STEPS);
    Words totals[R][V];
#pragma GCC unroll 4
    for (int fold = 0; fold < STEPS / PER_FOLD; fold++) {
        Sum dots[R][V];
#pragma GCC unroll 8
        for (int some = 0; some < PER_FOLD; some++) {
            const int step = fold * PER_FOLD + some;
            Words w[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) w[v] = Codes::word(at + v * bytes::LANES * 4, step);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const Words four = x.four(r, unit, step * 4, Codes::UNIT);
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) dots[r][v].add(w[v], four);
            }
        }
#pragma GCC unroll 24
        for (int i = 0; i < R * V; i++) {
            Words &total = totals[i / V][i % V];
            total = fold ? bytes::plus(total, dots[i / V][i % V].folded()) : dots[i / V][i % V].folded();
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        const simd::F scale = simd::set1(x.scales[r * x.units + unit]);
        const simd::F sum_of_inputs = simd::set1(x.sums[r * x.units + unit]);
        const Words start = bytes::set1(x.starts[r * x.units + unit]);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const int lane = column + v * bytes::LANES;
            const simd::F dot = bytes::to_floats(bytes::plus(totals[r][v], start));
            simd::F sum = simd::load(sums + r * PANEL + lane);
            sum = simd::fma(dot, simd::mul(scale, simd::load(facts.scales + lane)), sum);
            if (facts.has_mins) sum = simd::fma(simd::load(facts.mins + lane), sum_of_inputs, sum);
            simd::store(sums + r * PANEL + lane, sum);
        }
    }
}

// Multiplies few rows with codes while they are unpacked, all vectors side by side.
template <class Codes, int R>
void multiply_direct(const Linear &w, int64_t panel, const Inputs &x, float *sums) {
    constexpr int V = R * VECTORS <= bytes::MOST_SUMS ? int(VECTORS) : 2;
    constexpr int64_t BYTES = Codes::WORDS * PANEL * 4;
    const char *at = (const char *)w.panels + panel * x.units * BYTES;
    std::fill(sums, sums + R * PANEL, 0.0f);
    UnitFacts facts;
    for (int64_t unit = 0; unit < x.units; unit++, at += BYTES) {
        for (int64_t line = 0; line < BYTES; line += 64) __builtin_prefetch(at + AHEAD + line);
        facts.read(w, panel, unit, Codes::UNIT);
        for (int column = 0; column < PANEL; column += V * bytes::LANES)
            add_unit<Codes, R, V>(at + column * 4, x, unit, facts, column, sums);
    }
}

template <class Codes, int R>
void multiply_tile(const char *tile, const UnitFacts *facts, const Inputs &x, float *sums) {
    constexpr int V = 2;
    std::fill(sums, sums + R * PANEL, 0.0f);
    for (int column = 0; column < PANEL; column += V * bytes::LANES)
        for (int64_t unit = 0; unit < x.units; unit++)
            add_unit<Codes, R, V>(tile + unit * Codes::WORDS * PANEL * 4 + column * 4, x, unit, facts[unit], column, sums);
}

// Calls f with `count`, from 1 to MOST, as a compile-time constant.
template <int MOST, class F>
inline void as_constant(int64_t count, F f) {
    if (count == MOST) return f(std::integral_constant<int, MOST>());
    if constexpr (MOST > 1) as_constant<MOST - 1>(count, f);
}

// A panel's bytes, scales and mins, unpacked once for many rows.
struct Tile {
    std::vector<char> bytes;
    std::vector<UnitFacts> facts;

    template <class Codes>
    void unpack(const Linear &w, int64_t panel, int64_t units) {
        constexpr int64_t STEPS = Codes::UNIT / 4, WHOLE = STEPS * PANEL * 4;
        const char *at = (const char *)w.panels + panel * units * Codes::WORDS * PANEL * 4;
        bytes.resize(size_t(units * WHOLE));
        facts.resize(size_t(units));
        for (int64_t unit = 0; unit < units; unit++, at += Codes::WORDS * PANEL * 4) {
            facts[size_t(unit)].read(w, panel, unit, Codes::UNIT);
            char *to = bytes.data() + unit * WHOLE;
#pragma GCC unroll 8
            for (int step = 0; step < STEPS; step++)
                for (int64_t v = 0; v < VECTORS; v++)
                    twostroke::bytes::store(to + (step * PANEL + v * twostroke::bytes::LANES) * 4,
                                            Codes::word(at + v * twostroke::bytes::LANES * 4, step));
        }
    }
};

template <class Codes>
void multiply_panel(const Linear &w, int64_t panel, const Rows &rows, const Inputs &x, Into into) {
    constexpr int64_t MOST_ROWS = std::max<int64_t>(TILE_ROWS, bytes::DIRECT_ROWS);
    alignas(64) float sums[MOST_ROWS * PANEL];
    if (rows.count <= bytes::DIRECT_ROWS) {
        as_constant<bytes::DIRECT_ROWS>(rows.count, [&](auto r) { multiply_direct<Codes, r()>(w, panel, x, sums); });
        return finish_activated(w, panel, rows, 0, rows.count, into, sums);
    }
    static thread_local Tile tile;
    tile.unpack<Codes>(w, panel, x.units);
    const int64_t passes = (rows.count + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t from = rows.count * pass / passes, to = rows.count * (pass + 1) / passes;
        as_constant<TILE_ROWS>(to - from, [&](auto r) {
            multiply_tile<Unpacked<Codes>, r()>(tile.bytes.data(), tile.facts.data(), x.from(from), sums);
        });
        finish_activated(w, panel, rows, from, to - from, into, sums);
    }
}

// Calls f with the class that reads the codes.
template <class F>
void with_codes(const Layout &layout, F f) {
    switch (layout.bits) {
        case 4: return layout.is_fp4 ? f(Fp4()) : f(Nibbles());
        case 5: return f(FiveBits());
        case 6: return f(SixBits());
        default: return f(Whole());
    }
}

// Rounds `unit` inputs to int8, and computes their scale and sum.
inline void quantise_unit(const uint16_t *x, int64_t unit, int8_t *codes, float &scale, int32_t &sum) {
    uint32_t highest = 0;
    for (int64_t i = 0; i < unit; i++) highest = std::max(uint32_t(x[i]) << 16 & 0x7fffffff, highest);
    scale = float_of(highest) / 127.0f;
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    int32_t total = 0;
    for (int64_t i = 0; i < unit; i++) {
        const int32_t code = rounded_digits<23>(float_of(uint32_t(x[i]) << 16) * inverse);
        codes[i] = int8_t(code);
        total += codes[i];
    }
    sum = total;
}

void prepare_codes(Team *team, const Linear &w, const Rows &rows, int64_t unit, Prepared &prepared) {
    const int64_t units = w.inputs / unit;
    const size_t facts = size_t(rows.count * units);
    prepared.values.resize(std::max(prepared.values.size(), size_t(rows.count * w.inputs)));
    prepared.scales.resize(std::max(prepared.scales.size(), facts));
    prepared.sums.resize(std::max(prepared.sums.size(), facts));
    prepared.starts.resize(std::max(prepared.starts.size(), facts));
    const int32_t offset = w.layout.offset + (w.layout.bits == 8 ? bytes::Sum<0>::SHIFT : 0);
    auto part_of = [&](int part, int parts) {
        uint16_t picked[32];
        for (int64_t r = rows.count * part / parts; r < rows.count * (part + 1) / parts; r++)
            for (int64_t u = 0; u < units; u++) {
                const size_t fact = size_t(r * units + u);
                const uint16_t *x = rows.x + r * rows.x_stride;
                for (int64_t i = 0; w.order && i < unit; i++) picked[i] = x[w.order[u * unit + i]];
                int32_t sum;
                quantise_unit(w.order ? picked : x + u * unit, unit,
                              (int8_t *)prepared.values.data() + r * w.inputs + u * unit, prepared.scales[fact], sum);
                prepared.sums[fact] = prepared.scales[fact] * float(sum);
                prepared.starts[fact] = -offset * sum;
            }
    };
    if (rows.count < 8) return part_of(0, 1);
    run_parts(team, part_of);
}

// The code of one input of one output of a panel.
inline int32_t code_of(const Layout &layout, const char *panel, int64_t lane, int64_t input) {
    const int64_t unit = unit_of(layout), words = unit_bytes(layout) / (PANEL * 4), at = input % unit;
    const auto *of = (const uint8_t *)panel + input / unit * unit_bytes(layout) + lane * 4;
    if (layout.bits == 8) return int8_t(of[at / 4 * PANEL * 4 + at % 4]);
    const int32_t low = of[at / 8 * PANEL * 4 + at % 4] >> (at % 8 / 4 * 4) & 15;
    if (layout.is_fp4) return FP4_HALVES[low];
    const int32_t upper = of[(words - 1) * PANEL * 4 + at % 4];
    if (layout.bits == 5) return low | (upper >> at / 4 & 1) << 4;
    if (layout.bits == 6) return low | (upper >> at / 4 * 2 & 3) << 4;
    return low;
}

}  // namespace

void multiply_codes(Team *team, const RowGroup *groups, size_t count, const Rows &rows, Into into, Prepared &prepared) {
    const Linear &first = *groups->w;
    const int64_t unit = unit_of(first.layout), units = first.inputs / unit;
    prepare_codes(team, first, rows, unit, prepared);
    const Inputs x = {(const int8_t *)prepared.values.data(), prepared.scales.data(), prepared.sums.data(),
                      prepared.starts.data(), first.inputs, units};
    over_panels(team, groups, count, [&](const RowGroup &group, int64_t from, int64_t to) {
        const Rows own = rows_of(group, rows, into);
        const Inputs inputs = x.from(group.first);
        with_codes(group.w->layout, [&](auto codes) {
            for (int64_t panel = from; panel < to; panel++)
                multiply_panel<decltype(codes)>(*group.w, panel, own, inputs, into);
        });
    });
}

void widen_fp8(const Linear &w, int64_t panel, uint16_t *to) {
    const char *at = (const char *)w.panels + panel * w.inputs * PANEL;
    const simd::F unit = simd::set1(0x1p120f);
    UnitFacts facts;
    for (int64_t input = 0; input < w.inputs; input += 4, at += PANEL * 4, to += PANEL * 4) {
        if (input % 32 == 0) facts.read(w, panel, input / 32, 32);
        for (int lane = 0; lane < PANEL; lane += simd::W) {
            const simd::I words = simd::load_words(at + lane * 4);
            const simd::F scale = simd::load(facts.scales + lane);
            auto weight = [&](simd::F number) { return simd::mul(simd::mul(number, unit), scale); };
            simd::store_pairs(to + lane * 2, weight(fp8_numbers<0>(words)), weight(fp8_numbers<1>(words)));
            simd::store_pairs(to + (PANEL + lane) * 2, weight(fp8_numbers<2>(words)), weight(fp8_numbers<3>(words)));
        }
    }
}

void gather_stored(const Linear &w, const int32_t *tokens, int64_t rows, float *y) {
    const int64_t unit = unit_of(w.layout), units = w.inputs / unit;
    UnitFacts facts;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t panel = tokens[r] / PANEL, lane = tokens[r] % PANEL;
        const char *of = (const char *)w.panels + panel * units * unit_bytes(w.layout);
        for (int64_t u = 0; u < units; u++) {
            facts.read(w, panel, u, unit);
            for (int64_t input = u * unit; input < (u + 1) * unit; input++) {
                const int32_t code = code_of(w.layout, of, lane, input) - w.layout.offset;
                const float number = float(code) * facts.scales[lane];
                y[r * w.inputs + input] = facts.has_mins ? number + facts.mins[lane] : number;
            }
        }
    }
}

}  // namespace twostroke
