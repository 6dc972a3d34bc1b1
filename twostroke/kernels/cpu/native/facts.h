// Reads the scales and mins of a unit's 32 outputs in the types of a file.

#pragma once

#include <cstdint>
#include <cstring>

#include "linear.h"
#include "simd.h"

namespace twostroke {

template <class Number>
inline void read_floats(const Number *from, float *to) {
    for (int lane = 0; lane < PANEL; lane += simd::W) simd::store(to + lane, simd::load(from + lane));
}

// A weight is (code - offset) * scale + min.
struct UnitFacts {
    alignas(64) float scales[PANEL];
    alignas(64) float mins[PANEL];
    bool has_mins = false;

    void read(const Linear &w, int64_t panel, int64_t unit, int64_t width) {
        const Layout &layout = w.layout;
        const int64_t groups = (w.inputs + layout.group - 1) / layout.group;
        const int64_t at = (panel * groups + unit * width / layout.group) * PANEL;
        const int64_t super = panel * (w.inputs / SUPER) + unit * width / SUPER;
        read_scales(w, at, super);
        has_mins = layout.mins != Mins::NONE;
        if (has_mins) read_mins(w, at, super);
    }

  private:
    static constexpr int64_t SUPER = 256;  // inputs

    void read_scales(const Linear &w, int64_t at, int64_t super) {
        switch (w.layout.scales) {
            case Scales::FLOAT16: return read_floats((const Float16 *)w.scales + at, scales);
            case Scales::BFLOAT16: return read_floats((const BFloat16 *)w.scales + at, scales);
            case Scales::FLOAT32: return read_floats((const float *)w.scales + at, scales);
            case Scales::EXPONENT: return read_exponents((const uint8_t *)w.scales + at);
            case Scales::UINT8: {
                const int64_t parts = w.layout.mins == Mins::UINT8 ? 2 : 1;
                return read_products((const uint8_t *)w.scales + at, supers_of(w) + super * parts * PANEL, scales);
            }
            case Scales::INT8: return read_products((const int8_t *)w.scales + at, supers_of(w) + super * PANEL, scales);
        }
    }

    void read_mins(const Linear &w, int64_t at, int64_t super) {
        switch (w.layout.mins) {
            case Mins::NONE: return;
            case Mins::FLOAT16: return read_floats((const Float16 *)w.mins + at, mins);
            case Mins::BFLOAT16: return read_floats((const BFloat16 *)w.mins + at, mins);
            case Mins::ZERO: return read_zeros((const uint8_t *)w.mins + at);
            case Mins::SIGNED_ZERO: return read_zeros((const int8_t *)w.mins + at);
            case Mins::UINT8:
                read_products((const uint8_t *)w.mins + at, supers_of(w) + (super * 2 + 1) * PANEL, mins);
                for (int lane = 0; lane < PANEL; lane++) mins[lane] = -mins[lane];
        }
    }

    template <class Number>
    void read_zeros(const Number *zeros) {
        for (int lane = 0; lane < PANEL; lane++) mins[lane] = -float(zeros[lane]) * scales[lane];
    }

    void read_exponents(const uint8_t *exponents) {  // scales of halves: 2^(exponent - 128); 0 is the smallest normal
        for (int lane = 0; lane < PANEL; lane++) {
            const uint32_t exponent = exponents[lane] > 1 ? uint32_t(exponents[lane]) - 1 : 1;
            const uint32_t bits = exponent << 23;
            std::memcpy(scales + lane, &bits, sizeof bits);
        }
    }

    static const Float16 *supers_of(const Linear &w) { return (const Float16 *)w.supers; }

    template <class Number>
    static void read_products(const Number *codes, const Float16 *of_256, float *to) {
        read_floats(of_256, to);
        for (int lane = 0; lane < PANEL; lane++) to[lane] *= float(codes[lane]);
    }
};

}  // namespace twostroke
