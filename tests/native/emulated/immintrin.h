// The vector instructions that the kernels use beyond AVX2, in plain C++, so that a machine without them runs the same
// kernels to the same bits. It stands in for the compiler's header; the check's compiler never says -mavx512.
//
// `vdpbf16ps` follows Intel's manual: two fused additions, the odd inputs' first; subnormals are zero. Of `tdpbf16ps`
// Intel's manual says one thing and its guide to intrinsics another: both are here.

#pragma once

#include <emmintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

typedef float __m512 __attribute__((vector_size(64), aligned(64)));
typedef long long __m512i __attribute__((vector_size(64), aligned(64)));
typedef short __m512bh __attribute__((vector_size(64), aligned(64)));
typedef long long __m256i __attribute__((vector_size(32), aligned(32)));
typedef short __m256bh __attribute__((vector_size(32), aligned(32)));
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;

enum { _MM_FROUND_TO_NEAREST_INT = 0, _MM_FROUND_NO_EXC = 8 };

namespace emulated {

typedef uint32_t U32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(64)));
typedef int8_t I8 __attribute__((vector_size(64)));
typedef uint8_t U8 __attribute__((vector_size(64)));
typedef uint16_t Half16 __attribute__((vector_size(32)));

template <class V>
inline V read(const void *p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// Lane by lane: f(i) is lane i.
template <class V, class F>
inline V lanes(F f) {
    V x = {};
    for (size_t i = 0; i < sizeof(V) / sizeof(x[0]); i++) x[i] = f(i);
    return x;
}

inline float as_float(uint32_t bits) { return read<float>(&bits); }
inline uint32_t as_bits(float x) { return read<uint32_t>(&x); }
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float of_bfloat16(uint32_t bits) { return flushed(as_float(bits << 16)); }

inline uint16_t to_bfloat16(float x) {
    if (std::isnan(x)) return uint16_t(as_bits(x) >> 16 | 64);
    const uint32_t bits = as_bits(flushed(x));
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float of_half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float x = exponent == 31 ? (fraction ? NAN : INFINITY)
                    : exponent     ? std::ldexp(float(1024 + fraction), exponent - 25)
                                   : std::ldexp(float(fraction), -24);
    return bits & 0x8000 ? -x : x;
}

inline uint16_t to_half(float x) {
    const uint16_t sign = uint16_t(as_bits(x) >> 16 & 0x8000);
    const float size = std::fabs(x);
    if (std::isnan(x)) return uint16_t(sign | 0x7e00);
    if (size >= 65520.0f) return uint16_t(sign | 0x7c00);
    int exponent;
    std::frexp(size, &exponent);
    exponent = std::max(exponent, -13);
    const int fraction = int(std::nearbyint(std::ldexp(size, 11 - exponent)));  // below 2^11, or just that
    return uint16_t(sign | (((exponent + 13) << 10) + fraction));
}

// The one instruction that kernels write themselves: four products of an unsigned and a signed byte to each lane.
inline void add_dots(__m512i &sum, __m512i x, __m512i w) {
    const U8 a = (U8)x;
    const I8 b = (I8)w;
    I32 to = (I32)sum;
    for (int i = 0; i < 64; i++) to[i / 4] += int(a[i]) * int(b[i]);
    sum = (__m512i)to;
}

}  // namespace emulated

#define asm(...) emulated::add_dots(sum, x, w)

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512i _mm512_setzero_si512() { return __m512i{}; }
inline __m512 _mm512_set1_ps(float x) { return x - __m512{}; }
inline __m512i _mm512_set1_epi32(int x) { return (__m512i)(x - emulated::I32{}); }
inline __m512i _mm512_set1_epi16(short x) { return (__m512i)(uint16_t(x) - emulated::U16{}); }
inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
inline __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
inline __m512 _mm512_min_ps(__m512 a, __m512 b) { return a < b ? a : b; }
inline __m512 _mm512_abs_ps(__m512 a) { return (__m512)((emulated::U32)a & 0x7fffffffu); }
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return emulated::lanes<__m512>([&](size_t i) { return __builtin_fmaf(a[i], b[i], c[i]); });
}

// Halves are joined four times, as compilers do it.
template <class Join>
inline float emulated_reduce(__m512 x, Join join) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] = join(x[i], x[i + half]);
    return x[0];
}
inline float _mm512_reduce_add_ps(__m512 x) {
    return emulated_reduce(x, [](float a, float b) { return a + b; });
}
inline float _mm512_reduce_max_ps(__m512 x) {
    return emulated_reduce(x, [](float a, float b) { return a > b ? a : b; });
}

inline __m512i _mm512_castps_si512(__m512 x) { return (__m512i)x; }
inline __m512 _mm512_castsi512_ps(__m512i x) { return (__m512)x; }
inline __m512i _mm512_slli_epi32(__m512i x, unsigned n) { return (__m512i)((emulated::U32)x << n); }
inline __m512i _mm512_srli_epi32(__m512i x, unsigned n) { return (__m512i)((emulated::U32)x >> n); }
inline __m512i _mm512_slli_epi16(__m512i x, unsigned n) { return (__m512i)((emulated::U16)x << n); }
inline __m512i _mm512_srli_epi16(__m512i x, unsigned n) { return (__m512i)((emulated::U16)x >> n); }
inline __m512i _mm512_permutexvar_epi16(__m512i chosen, __m512i x) {
    return (__m512i)emulated::lanes<emulated::U16>([&](size_t i) { return ((emulated::U16)x)[((emulated::U16)chosen)[i] % 32]; });
}
inline __m512i _mm512_srai_epi32(__m512i x, unsigned n) { return (__m512i)((emulated::I32)x >> n); }
inline __m512i _mm512_srai_epi16(__m512i x, unsigned n) {
    typedef int16_t I16 __attribute__((vector_size(64)));
    return (__m512i)((I16)x >> n);
}
inline __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
inline __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
inline __m512i _mm512_broadcast_i32x4(__m128i x) {
    return (__m512i)emulated::lanes<emulated::U8>([=](size_t i) { return ((const uint8_t *)&x)[i % 16]; });
}
inline __m512i _mm512_shuffle_epi8(__m512i x, __m512i at) {
    const auto from = (emulated::U8)x, chosen = (emulated::U8)at;
    return (__m512i)emulated::lanes<emulated::U8>(
        [=](size_t i) { return chosen[i] & 128 ? uint8_t(0) : from[i / 16 * 16 + chosen[i] % 16]; });
}
inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((emulated::U32)a + (emulated::U32)b); }
inline __m512i _mm512_add_epi16(__m512i a, __m512i b) { return (__m512i)((emulated::U16)a + (emulated::U16)b); }
inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
    typedef int16_t I16 __attribute__((vector_size(64)));
    return (__m512i)emulated::lanes<emulated::I32>([&](size_t i) {
        return int(((I16)a)[2 * i]) * ((I16)b)[2 * i] + int(((I16)a)[2 * i + 1]) * ((I16)b)[2 * i + 1];
    });
}
inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
    return (__m512i)emulated::lanes<emulated::U32>([&](size_t i) { return ((emulated::Half16)x)[i]; });
}
inline __m512i _mm512_cvtepi8_epi32(__m128i x) {
    typedef int8_t Bytes __attribute__((vector_size(16)));
    return (__m512i)emulated::lanes<emulated::I32>([&](size_t i) { return ((Bytes)x)[i]; });
}
inline __m512i _mm512_cvtepi16_epi32(__m256i x) {
    return (__m512i)emulated::lanes<emulated::I32>([&](size_t i) { return int16_t(((emulated::Half16)x)[i]); });
}
inline __m256i _mm512_cvtepi32_epi16(__m512i x) {
    return (__m256i)emulated::lanes<emulated::Half16>([&](size_t i) { return uint16_t(((emulated::U32)x)[i]); });
}
inline __m512 _mm512_cvtepi32_ps(__m512i x) { return __builtin_convertvector((emulated::I32)x, __m512); }
inline __m512i _mm512_cvtps_epi32(__m512 x) {
    return (__m512i)emulated::lanes<emulated::I32>([&](size_t i) { return int(std::nearbyint(x[i])); });
}
inline __m128i _mm512_cvtepi32_epi8(__m512i x) {
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    return (__m128i)emulated::lanes<Bytes>([&](size_t i) { return uint8_t(((emulated::U32)x)[i]); });
}

inline __m512 _mm512_cvtph_ps(__m256i x) {
    return emulated::lanes<__m512>([&](size_t i) { return emulated::of_half(((emulated::Half16)x)[i]); });
}
inline __m256i _mm512_cvtps_ph(__m512 x, int) {
    return (__m256i)emulated::lanes<emulated::Half16>([&](size_t i) { return emulated::to_half(x[i]); });
}
inline __m256bh _mm512_cvtneps_pbh(__m512 x) {
    return (__m256bh)emulated::lanes<emulated::Half16>([&](size_t i) { return emulated::to_bfloat16(x[i]); });
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    return (__m512bh)emulated::lanes<emulated::U16>(
        [&](size_t i) { return emulated::to_bfloat16(i < 16 ? low[i] : high[i - 16]); });
}
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    using namespace emulated;
    const U32 x = (U32)a, y = (U32)b;
    return lanes<__m512>([&](size_t i) {
        const float odd =
            flushed(__builtin_fmaf(of_bfloat16(x[i] >> 16), of_bfloat16(y[i] >> 16), flushed(sum[i])));
        return flushed(__builtin_fmaf(of_bfloat16(x[i] & 0xffff), of_bfloat16(y[i] & 0xffff), odd));
    });
}

inline __m512 _mm512_loadu_ps(const void *p) { return emulated::read<__m512>(p); }
inline __m512i _mm512_loadu_si512(const void *p) { return emulated::read<__m512i>(p); }
inline __m256i _mm256_loadu_si256(const __m256i *p) { return emulated::read<__m256i>(p); }
inline void _mm512_storeu_ps(void *p, __m512 x) { std::memcpy(p, &x, sizeof x); }
inline void _mm512_storeu_si512(void *p, __m512i x) { std::memcpy(p, &x, sizeof x); }
inline void _mm256_storeu_si256(__m256i *p, __m256i x) { std::memcpy(p, &x, sizeof x); }

// Under a mask, lanes that are off are neither read nor written.
inline __m512 _mm512_mask_mov_ps(__m512 rest, __mmask16 mask, __m512 x) {
    return emulated::lanes<__m512>([&](size_t i) { return mask >> i & 1 ? x[i] : rest[i]; });
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void *p) {
    return emulated::lanes<__m512>([&](size_t i) { return mask >> i & 1 ? ((const float *)p)[i] : 0.0f; });
}
inline void _mm512_mask_storeu_ps(void *p, __mmask16 mask, __m512 x) {
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) ((float *)p)[i] = x[i];
}
inline __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void *p) {
    return (__m512i)emulated::lanes<emulated::U16>(
        [&](size_t i) { return mask >> i & 1 ? ((const uint16_t *)p)[i] : uint16_t(0); });
}
inline __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void *p) {
    return (__m256i)emulated::lanes<emulated::Half16>(
        [&](size_t i) { return mask >> i & 1 ? ((const uint16_t *)p)[i] : uint16_t(0); });
}
inline void _mm256_mask_storeu_epi16(void *p, __mmask16 mask, __m256i x) {
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) ((uint16_t *)p)[i] = ((emulated::Half16)x)[i];
}

// Within each quarter of four lanes.
inline __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
    const emulated::U16 x = (emulated::U16)a, y = (emulated::U16)b;
    return (__m512i)emulated::lanes<emulated::U16>([&](size_t i) { return (i % 2 ? y : x)[i / 8 * 8 + i % 8 / 2]; });
}
inline __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
    const emulated::U16 x = (emulated::U16)a, y = (emulated::U16)b;
    return (__m512i)emulated::lanes<emulated::U16>([&](size_t i) { return (i % 2 ? y : x)[i / 8 * 8 + 4 + i % 8 / 2]; });
}
inline __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) {
    return emulated::lanes<__m512>([&](size_t i) { return (i & 1 ? b : a)[(i & 12) + (i & 3) / 2]; });
}
inline __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) {
    return emulated::lanes<__m512>([&](size_t i) { return (i & 1 ? b : a)[(i & 12) + 2 + (i & 3) / 2]; });
}
inline __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int order) {
    return emulated::lanes<__m512>(
        [&](size_t i) { return (i & 2 ? b : a)[(i & 12) + size_t(order >> 2 * (i & 3) & 3)]; });
}
// Whole quarters.
inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int order) {
    return emulated::lanes<__m512>(
        [&](size_t i) { return (i & 8 ? b : a)[size_t(order >> 2 * (i / 4) & 3) * 4 + (i & 3)]; });
}
inline __m512i _mm512_permutex2var_epi16(__m512i a, __m512i at, __m512i b) {
    using emulated::U16;
    return (__m512i)emulated::lanes<U16>([&](size_t i) {
        const size_t from = ((U16)at)[i] & 63;
        return from < 32 ? ((U16)a)[from] : ((U16)b)[from - 32];
    });
}
template <class... Lane>
inline __m512i _mm512_set_epi16(Lane... lanes) {
    static_assert(sizeof...(lanes) == 32, "highest first");
    const uint16_t highest_first[] = {uint16_t(lanes)...};
    return (__m512i)emulated::lanes<emulated::U16>([&](size_t i) { return highest_first[31 - i]; });
}

// The tiles of AMX, of each thread. An instruction that finds no configuration ends the process, as the processor does.
namespace emulated {

struct Tiles {
    bool is_configured = false;
    int bytes[8], rows[8];
    uint8_t values[8][16][64];
};

inline Tiles &tiles() {
    static thread_local Tiles tiles;
    return tiles;
}

inline Tiles &configured(std::initializer_list<int> used) {
    Tiles &t = tiles();
    if (!t.is_configured) std::abort();
    for (int tile : used)
        if (t.rows[tile] == 0 || t.rows[tile] > 16 || t.bytes[tile] == 0 || t.bytes[tile] > 64) std::abort();
    return t;
}

template <class T>
inline T &element(Tiles &t, int tile, int row, int at) {
    return *(T *)(t.values[tile][row] + size_t(at) * sizeof(T));
}

// f(row, column, lines): a tile [rows, columns] of four bytes each is a product of `lines` four bytes.
template <class F>
inline void over_products(int to, int a, int b, F f) {
    Tiles &t = configured({to, a, b});
    if (t.rows[a] != t.rows[to] || t.bytes[b] != t.bytes[to] || t.rows[b] != t.bytes[a] / 4) std::abort();
    for (int m = 0; m < t.rows[to]; m++)
        for (int n = 0; n < t.bytes[to] / 4; n++) f(t, m, n, t.bytes[a] / 4);
}

inline float fused(uint16_t a, uint16_t b, float sum) {
    return flushed(__builtin_fmaf(of_bfloat16(a), of_bfloat16(b), flushed(sum)));
}

}  // namespace emulated

inline void _tile_loadconfig(const void *config) {
    using namespace emulated;
    if (read<uint8_t>(config) != 1) std::abort();  // the palette
    Tiles &t = tiles();
    t.is_configured = true;
    std::memset(t.values, 0, sizeof t.values);
    for (int tile = 0; tile < 8; tile++) {
        t.bytes[tile] = read<uint16_t>((const char *)config + 16 + 2 * tile);
        t.rows[tile] = read<uint8_t>((const char *)config + 48 + tile);
    }
}
inline void _tile_release() { emulated::tiles().is_configured = false; }
inline void _tile_zero(int tile) {
    auto &t = emulated::configured({tile});
    std::memset(t.values[tile], 0, sizeof t.values[tile]);
}
inline void _tile_loadd(int tile, const void *from, int64_t stride) {
    auto &t = emulated::configured({tile});
    for (int r = 0; r < t.rows[tile]; r++)
        std::memcpy(t.values[tile][r], (const char *)from + r * stride, size_t(t.bytes[tile]));
}
inline void _tile_stored(int tile, void *to, int64_t stride) {
    auto &t = emulated::configured({tile});
    for (int r = 0; r < t.rows[tile]; r++)
        std::memcpy((char *)to + r * stride, t.values[tile][r], size_t(t.bytes[tile]));
}
inline void _tile_dpbf16ps(int to, int a, int b) {
    using namespace emulated;
    over_products(to, a, b, [=](Tiles &t, int m, int n, int lines) {
        auto x = [&](int at) { return element<uint16_t>(t, a, m, at); };
        auto w = [&](int line, int which) { return element<uint16_t>(t, b, line, 2 * n + which); };
        float &sum = element<float>(t, to, m, n);
#if defined(TILES_ADD_PAIR_BY_PAIR)  // as Intel's guide to intrinsics says
        for (int k = 0; k < lines; k++) sum = fused(x(2 * k + 1), w(k, 1), fused(x(2 * k), w(k, 0), sum));
#else  // as Intel's manual of the instruction set says
        float even = 0, odd = 0;
        for (int k = 0; k < lines; k++) {
            even = fused(x(2 * k), w(k, 0), even);
            odd = fused(x(2 * k + 1), w(k, 1), odd);
        }
        sum = flushed(flushed(sum) + flushed(even + odd));
#endif
    });
}
inline void _tile_dpbusd(int to, int a, int b) {
    using namespace emulated;
    over_products(to, a, b, [=](Tiles &t, int m, int n, int lines) {
        for (int k = 0; k < lines; k++)
            for (int i = 0; i < 4; i++)
                element<int32_t>(t, to, m, n) += int(element<uint8_t>(t, a, m, 4 * k + i)) *
                                                 int(element<int8_t>(t, b, k, 4 * n + i));
    });
}
