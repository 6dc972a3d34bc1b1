// What all checks use: numbers by chance, comparisons, and a count of what is wrong.

#pragma once

#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "simd.h"
#include "team.h"

namespace twostroke {

inline int wrong = 0;
inline std::mt19937 source(7);

inline void expect(bool holds, const std::string &what) {
    if (holds) return;
    wrong++;
    std::printf("wrong: %s\n", what.c_str());
}

inline float as_float(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}

inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline std::vector<uint16_t> numbers(int64_t count, float size = 1.0f) {
    std::normal_distribution<float> normal(0.0f, size);
    std::vector<uint16_t> values((size_t(count)));
    for (auto &value : values) value = to_bfloat16(normal(source));
    return values;
}

inline bool is_close(double ours, double truth, double relative, double absolute) {
    return std::fabs(ours - truth) <= absolute + relative * std::fabs(truth);
}

inline Team two_threads({{0, 1}, {}, "", 0, 0, false});

// Memory's dtypes, for one body of each check.
template <class T>
struct Memory;
template <>
struct Memory<float> {
    static constexpr int32_t DTYPE = 0;
    static constexpr double SLACK = 1e-4;
    static float of(float x) { return x; }
    static float to(float x) { return x; }
};
template <>
struct Memory<BFloat16> {
    static constexpr int32_t DTYPE = 1;
    static constexpr double SLACK = 0.03;
    static float of(BFloat16 x) { return as_float(x.bits); }
    static BFloat16 to(float x) { return {to_bfloat16(x)}; }
};
template <>
struct Memory<Float16> {
    static constexpr int32_t DTYPE = 2;
    static constexpr double SLACK = 0.005;
    static float of(Float16 x) {
        const float size = float(std::ldexp((x.bits & 1023) + (x.bits & 0x7c00 ? 1024 : 0),
                                            std::max(x.bits >> 10 & 31, 1) - 25));
        return x.bits & 0x8000 ? -size : size;
    }
    static Float16 to(float x) {  // cut off: the numbers need only be halves
        int exponent;
        const int fraction = int(std::ldexp(std::frexp(std::fabs(x), &exponent), 11));
        if (exponent < -13) return {0};
        return {uint16_t((x < 0 ? 0x8000 : 0) | ((exponent + 14) << 10) | (fraction & 1023))};
    }
};

// Rope, storing and attention over pages of every form.
void check_attention();

// The same of latents.
void check_latents();

}  // namespace twostroke
