// Kernels of one variant against plain loops in double, and a row alone against the same row beside others.
//
// It is linked with the kernels' own sources, so it runs for every machine that a compiler knows: natively, under qemu-user, or
// with instructions that are emulated in plain C++. It prints what is wrong, and nothing else.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "fused.h"
#include "linear.h"

using namespace twostroke;

namespace {

int wrong = 0;
std::mt19937 source(7);

void expect(bool holds, const std::string &what) {
    if (holds) return;
    wrong++;
    std::printf("wrong: %s\n", what.c_str());
}

float as_float(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}

uint16_t to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

std::vector<uint16_t> numbers(int64_t count, float size = 1.0f) {
    std::normal_distribution<float> normal(0.0f, size);
    std::vector<uint16_t> values((size_t(count)));
    for (auto &value : values) value = to_bfloat16(normal(source));
    return values;
}

bool is_close(double ours, double truth, double relative, double absolute) {
    return std::fabs(ours - truth) <= absolute + relative * std::fabs(truth);
}

Team two_threads({{0, 1}, {}, "", 0, 0, false});

// One weight [outputs, inputs] and what the kernels take of it.
struct Weight {
    int64_t outputs, inputs;
    bool is_int8, is_gated;
    std::vector<double> values;  // as they are multiplied: those of int8 are rounded
    std::vector<uint16_t> wide;
    std::vector<int8_t> narrow;
    std::vector<float> scales, bias;
    std::vector<int32_t> sums;
    Linear native;

    int64_t rows() const { return is_gated ? 2 * outputs : outputs; }
    int64_t panels() const { return (outputs + width() - 1) / width(); }
    int64_t width() const { return is_gated ? PANEL / 2 : PANEL; }
    // Which row of the weight a panel's column is; past the end there is none.
    int64_t row_of(int64_t panel, int64_t column) const {
        const int64_t output = panel * width() + column % width();
        return output < outputs ? output + (column / width()) * outputs : -1;
    }

    Weight(int64_t outputs_, int64_t inputs_, bool int8, bool gated)
        : outputs(outputs_), inputs(inputs_), is_int8(int8), is_gated(gated) {
        const auto given = numbers(rows() * inputs);
        for (auto value : given) values.push_back(as_float(value));
        bias.resize(size_t(panels() * PANEL));
        int8 ? pack_int8() : pack_bfloat16(given);
        for (int64_t at = 0; at < panels() * PANEL; at++)
            bias[size_t(at)] = row_of(at / PANEL, at % PANEL) < 0 ? 0.0f : bias_of(row_of(at / PANEL, at % PANEL));
        native = {int8 ? (const void *)narrow.data() : wide.data(), scales.data(), sums.data(), bias.data(), outputs,
                  padded(), int8 ? INT8 : BFLOAT16, gated};
    }

    int64_t padded() const { return (inputs + 1) / 2 * 2; }
    static float bias_of(int64_t row) { return float(row % 7) - 3.0f; }

    void pack_bfloat16(const std::vector<uint16_t> &given) {
        wide.resize(size_t(panels() * PANEL * padded() + 65536));  // reads ahead end within it
        for (int64_t at = 0; at < panels() * PANEL; at++)
            for (int64_t i = 0; i < inputs; i++) {
                const int64_t panel = at / PANEL, column = at % PANEL, row = row_of(panel, column);
                const int64_t to = ((panel * (padded() / 2) + i / 2) * PANEL + column) * 2 + i % 2;
                if (row >= 0) wide[size_t(to)] = given[size_t(row * inputs + i)];
            }
    }

    void pack_int8() {
        const int64_t groups = inputs / GROUP;
        narrow.resize(size_t(panels() * PANEL * inputs + 65536));
        scales.resize(size_t(panels() * PANEL * groups));
        sums.resize(scales.size());
        for (int64_t at = 0; at < panels() * PANEL * groups; at++) {
            const int64_t panel = at / groups / PANEL, column = at / groups % PANEL, group = at % groups;
            const int64_t row = row_of(panel, column);
            if (row < 0) continue;
            double *of = &values[size_t(row * inputs + group * GROUP)];
            double peak = 0;
            for (int64_t i = 0; i < GROUP; i++) peak = std::max(peak, std::fabs(of[i]));
            const size_t fact = size_t((panel * groups + group) * PANEL + column);
            scales[fact] = float(peak / 127);
            for (int64_t i = 0; i < GROUP; i++) {
                const auto value = int8_t(std::lround(of[i] / scales[fact]));
                const int64_t input = group * GROUP + i;
                narrow[size_t(((panel * (inputs / 4) + input / 4) * PANEL + column) * 4 + input % 4)] = value;
                of[i] = double(value) * scales[fact];
                sums[fact] -= 128 * value;
            }
        }
    }

    double truth(const uint16_t *x, int64_t row) const {
        double sum = bias_of(row);
        for (int64_t i = 0; i < inputs; i++) sum += as_float(x[i]) * values[size_t(row * inputs + i)];
        return sum;
    }
};

std::vector<float> product(Team *team, const Weight &w, const std::vector<uint16_t> &x, int64_t stride, int64_t first,
                           int64_t rows) {
    std::vector<float> y(size_t(rows * w.outputs), 99.0f);
    Prepared prepared;
    linear(team, w.native, {x.data() + first * stride, stride, rows, y.data(), w.outputs}, Into::FLOAT32, prepared);
    return y;
}

void check_product(int64_t outputs, int64_t inputs, bool is_int8, bool is_gated) {
    const Weight w(outputs, inputs, is_int8, is_gated);
    const int64_t stride = w.padded(), most = 101;
    auto x = numbers(most * stride);
    for (int64_t r = 0; inputs < stride && r < most; r++) x[size_t(r * stride + inputs)] = 0;
    const std::string what = std::to_string(outputs) + " x " + std::to_string(inputs) + (is_int8 ? " int8" : "") +
                             (is_gated ? " gated" : "");
    const auto alone = product(nullptr, w, x, stride, 0, most);
    bool is_exact = true, is_independent = product(&two_threads, w, x, stride, 0, most) == alone;
    const double loose = is_int8 ? 0.03 * std::sqrt(double(inputs)) : 1e-5 * double(inputs);
    for (int64_t r = 0; r < most; r += 9)
        for (int64_t o = 0; o < outputs; o++) {
            double truth = w.truth(&x[size_t(r * stride)], o);
            double slack = loose;
            if (is_gated) {
                const double value = w.truth(&x[size_t(r * stride)], o + outputs);
                slack = loose * (1 + std::fabs(value) + std::fabs(truth));
                truth = truth / (1 + std::exp(-truth)) * value;
            }
            is_exact = is_exact && is_close(alone[size_t(r * outputs + o)], truth, 1e-5, slack);
        }
    for (int64_t rows : {1, 2, 3, 7, 8, 12, 13, 16, 17, 31, 33, 97}) {
        const int64_t first = most - rows;
        const auto some = product(&two_threads, w, x, stride, first, rows);
        is_independent = is_independent && std::equal(some.begin(), some.end(), alone.begin() + first * outputs);
    }
    expect(is_exact, what + ": not what loops give");
    expect(is_independent, what + ": a row depends on its neighbours or on the threads");
}

void check_norms(int64_t width) {
    const int64_t rows = 5;
    std::normal_distribution<float> normal(0.0f, 3.0f);
    std::vector<float> x(size_t(rows * width)), weight((size_t(width)));
    for (auto &value : x) value = normal(source);
    for (auto &value : weight) value = normal(source);
    std::vector<uint16_t> y(size_t(rows * width)), heads = numbers(rows * width), before = heads;
    rms_norm(nullptr, x.data(), rows, width, weight.data(), 1e-5f, y.data(), width);
    head_norm(nullptr, heads.data(), 1, rows * width, rows, width, weight.data(), 1e-5f);
    bool is_exact = true;
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0, head_squares = 0;
        for (int64_t i = 0; i < width; i++) {
            squares += double(x[size_t(r * width + i)]) * x[size_t(r * width + i)];
            head_squares += std::pow(as_float(before[size_t(r * width + i)]), 2);
        }
        for (int64_t i = 0; i < width; i++) {
            const auto at = size_t(r * width + i);
            const double one = x[at] / std::sqrt(squares / double(width) + 1e-5) * weight[size_t(i)];
            const double two = as_float(before[at]) / std::sqrt(head_squares / double(width) + 1e-5) * weight[size_t(i)];
            is_exact = is_exact && is_close(as_float(y[at]), one, 0.005, 1e-6);
            is_exact = is_exact && is_close(as_float(heads[at]), two, 0.005, 1e-6);
        }
    }
    expect(is_exact, "norms of width " + std::to_string(width));
    std::vector<float> gathered(size_t(2 * width));
    const int32_t tokens[] = {3, 1};
    gather(before.data(), tokens, 2, width, gathered.data());
    bool is_same = true;
    for (int64_t i = 0; i < 2 * width; i++)
        is_same = is_same && gathered[size_t(i)] == as_float(before[size_t(tokens[i / width] * width + i % width)]);
    expect(is_same, "rows of an embedding of width " + std::to_string(width));
}

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

constexpr int64_t BLOCK = 16, PAGES = 80, LAYERS = 2;

bool has_scales(Form form) { return form == Form::INT8 || form == Form::FP8_E4M3 || form == Form::FP8_E5M2; }

int64_t number_bytes(Form form) {
    if (has_scales(form)) return 1;
    return form == Form::FLOAT32 ? 4 : 2;
}

// To the nearest number that has so many bits of fraction, and is a multiple of 2^lowest; ties to even.
double rounded(double x, int fraction, int lowest) {
    int exponent;
    std::frexp(x, &exponent);
    const int unit = std::max(exponent - 1 - fraction, lowest);
    return std::ldexp(std::nearbyint(std::ldexp(x, -unit)), unit);
}

// What a page stores of one token's key or value.
std::vector<double> stored(Form form, const std::vector<double> &row) {
    double peak = 0;
    for (double x : row) peak = std::max(peak, std::fabs(x));
    const double largest = form == Form::INT8 ? 127 : form == Form::FP8_E4M3 ? 448 : 57344;
    const double scale = has_scales(form) ? peak / largest : 1;
    std::vector<double> numbers;
    for (double x : row) {
        switch (form) {
            case Form::FLOAT32: numbers.push_back(x); break;
            case Form::BFLOAT16: numbers.push_back(rounded(x, 7, -133)); break;
            case Form::FLOAT16: numbers.push_back(rounded(x, 10, -24)); break;
            case Form::INT8: numbers.push_back(std::nearbyint(x / scale) * scale); break;
            case Form::FP8_E4M3: numbers.push_back(rounded(x / scale, 3, -9) * scale); break;
            case Form::FP8_E5M2: numbers.push_back(rounded(x / scale, 2, -16) * scale); break;
        }
    }
    return numbers;
}

// Sequences that have their whole context written, of which some last tokens ask.
template <class T>
struct Pages {
    int64_t heads, kv_heads, dim;
    Form form;
    std::vector<char> pool;
    std::vector<int32_t> tables;
    int64_t table_stride = PAGES / 4;

    Pages(int64_t h, int64_t kv, int64_t d, Form f) : heads(h), kv_heads(kv), dim(d), form(f) {
        pool.resize(size_t(PAGES * LAYERS * 2 * kv * head_bytes()), 0x7f);  // stale bytes, which nobody may use
        for (int64_t page = 0; page < PAGES; page++) tables.push_back(int32_t(page * 37 % PAGES));
    }

    int64_t head_bytes() const { return BLOCK * (dim * number_bytes(form) + (has_scales(form) ? 4 : 0)); }

    AttentionStep step(int64_t tokens) {
        AttentionStep s = {};
        s.pool = pool.data();
        s.form = form;
        s.head_stride = head_bytes();
        s.value_offset = kv_heads * s.head_stride;
        s.layer_stride = 2 * s.value_offset;
        s.page_stride = LAYERS * s.layer_stride;
        s.block = BLOCK, s.heads = heads, s.kv_heads = kv_heads, s.head_dim = dim, s.tokens = tokens;
        s.block_tables = tables.data(), s.table_stride = table_stride;
        s.scale = float(1 / std::sqrt(double(dim))), s.dtype = Memory<T>::DTYPE;
        return s;
    }

    T number() {
        static std::normal_distribution<float> normal(0.0f, 1.0f);
        return Memory<T>::to(normal(source));
    }
};

// One call of both kernels: `lengths` tokens of each sequence, all written, the last `asked` of each attending.
template <class T>
struct Ragged {
    Pages<T> &pages;
    std::vector<int64_t> slots;
    std::vector<int32_t> positions, starts;
    std::vector<float> cosines, sines;
    std::vector<T> q, k, v;

    Ragged(Pages<T> &p, const std::vector<int32_t> &lengths) : pages(p), starts{0} {
        for (size_t s = 0; s < lengths.size(); s++) {
            for (int32_t t = 0; t < lengths[s]; t++) {
                slots.push_back(int64_t(p.tables[s * size_t(p.table_stride) + size_t(t / BLOCK)]) * BLOCK + t % BLOCK);
                positions.push_back(t);
                for (int64_t d = 0; d < p.dim / 2; d++) {
                    const double angle = t * std::pow(100.0, -2.0 * double(d) / double(p.dim));
                    cosines.push_back(float(std::cos(angle)));
                    sines.push_back(float(std::sin(angle)));
                }
            }
            starts.push_back(int32_t(positions.size()));
        }
        for (size_t i = 0; i < positions.size() * size_t(p.heads * p.dim); i++) q.push_back(p.number());
        for (size_t i = 0; i < positions.size() * size_t(p.kv_heads * p.dim); i++) {
            k.push_back(p.number());
            v.push_back(p.number());
        }
    }

    AttentionStep step() {
        AttentionStep s = pages.step(int64_t(positions.size()));
        s.cosines = cosines.data(), s.sines = sines.data(), s.write_slots = slots.data();
        s.positions = positions.data(), s.sequences = int64_t(starts.size()) - 1, s.query_starts = starts.data();
        return s;
    }

    double rotated(const std::vector<T> &x, int64_t heads, int64_t token, int64_t head, int64_t d) const {
        const int64_t half = pages.dim / 2, angle = token * half + d % half;
        const T *at = &x[size_t((token * heads + head) * pages.dim)];
        const double self = Memory<T>::of(at[d]), other = Memory<T>::of(at[(d + half) % pages.dim]);
        return self * cosines[size_t(angle)] + (d < half ? -other : other) * sines[size_t(angle)];
    }
};

// What plain loops make of one query row.
template <class T>
std::vector<double> attended(const Ragged<T> &r, const std::vector<T> &q, int64_t first, int64_t token, int64_t head) {
    const Pages<T> &p = r.pages;
    const int64_t kv_head = head / (p.heads / p.kv_heads);
    std::vector<double> weights, out(size_t(p.dim), 0.0);
    double total = 0;
    std::vector<std::vector<double>> values;
    for (int64_t t = first; t <= token; t++) {
        std::vector<double> key, value;
        for (int64_t d = 0; d < p.dim; d++) {
            key.push_back(Memory<T>::of(Memory<T>::to(float(r.rotated(r.k, p.kv_heads, t, kv_head, d)))));
            value.push_back(Memory<T>::of(r.v[size_t((t * p.kv_heads + kv_head) * p.dim + d)]));
        }
        key = stored(p.form, key);
        values.push_back(stored(p.form, value));
        double score = 0;
        for (int64_t d = 0; d < p.dim; d++)
            score += Memory<T>::of(q[size_t((token * p.heads + head) * p.dim + d)]) * key[size_t(d)];
        weights.push_back(std::exp(score / std::sqrt(double(p.dim))));
        total += weights.back();
    }
    for (int64_t t = first; t <= token; t++)
        for (int64_t d = 0; d < p.dim; d++)
            out[size_t(d)] += weights[size_t(t - first)] / total * values[size_t(t - first)][size_t(d)];
    return out;
}

// The last tokens of every sequence again, in a step of their own: as a decode step, or a later chunk, asks them.
template <class T>
std::vector<T> asked_again(Team *team, Ragged<T> &r, const std::vector<T> &q, const std::vector<int32_t> &last,
                           int64_t only) {
    const Pages<T> &p = r.pages;
    std::vector<T> queries;
    std::vector<int32_t> positions, starts{0}, tables;
    for (size_t s = 0; s < last.size(); s++) {
        if (only >= 0 && int64_t(s) != only) continue;
        const int32_t end = r.starts[s + 1], first = end - last[s];
        queries.insert(queries.end(), q.begin() + first * p.heads * p.dim, q.begin() + end * p.heads * p.dim);
        positions.insert(positions.end(), r.positions.begin() + first, r.positions.begin() + end);
        starts.push_back(int32_t(positions.size()));
        tables.insert(tables.end(), p.tables.begin() + int64_t(s) * p.table_stride,
                      p.tables.begin() + int64_t(s + 1) * p.table_stride);
    }
    AttentionStep step = r.step();
    step.tokens = int64_t(positions.size()), step.positions = positions.data();
    step.sequences = int64_t(starts.size()) - 1, step.query_starts = starts.data(), step.block_tables = tables.data();
    std::vector<T> out(queries.size());
    attend(team, step, 1, queries.data(), p.heads * p.dim, out.data());
    return out;
}

template <class T>
void check_attention(int64_t heads, int64_t kv_heads, int64_t dim, Form form) {
    const std::string what = "attention of " + std::to_string(heads) + " heads, " + std::to_string(kv_heads) +
                             " of keys, " + std::to_string(dim) + " wide, dtype " + std::to_string(Memory<T>::DTYPE) + ", form " +
                             std::to_string(int(form));
    Pages<T> pages(heads, kv_heads, dim, form);
    const std::vector<int32_t> lengths{1, 19, 300};
    Ragged<T> r(pages, lengths);
    std::vector<T> q = r.q;
    const AttentionStep step = r.step();
    store_kv(&two_threads, step, 1, q.data(), heads * dim, r.k.data(), kv_heads * dim, r.v.data(), kv_heads * dim);
    // A key that is rotated a little differently may be rounded to the next number.
    const double slack = has_scales(form) ? std::max(Memory<T>::SLACK, 0.02) : Memory<T>::SLACK;
    bool is_rotated = true, is_exact = true, is_independent = true;
    for (int64_t t = 0; t < step.tokens; t += 7)
        for (int64_t d = 0; d < dim; d++)
            is_rotated = is_rotated && is_close(Memory<T>::of(q[size_t(t * heads * dim + d)]),
                                                r.rotated(r.q, heads, t, 0, d), 0.01, 0.01);
    std::vector<T> out(q.size());
    attend(nullptr, step, 1, q.data(), heads * dim, out.data());
    for (size_t s = 0; s < lengths.size(); s++)
        for (int64_t t = r.starts[s]; t < r.starts[s + 1]; t += t % 50 ? 1 : 30)
            for (int64_t head = 0; head < heads; head += 3) {
                const auto truth = attended(r, q, r.starts[s], t, head);
                for (int64_t d = 0; d < dim; d++)
                    is_exact = is_exact && is_close(Memory<T>::of(out[size_t((t * heads + head) * dim + d)]),
                                                    truth[size_t(d)], slack, slack);
            }
    const size_t row = size_t(heads * dim) * sizeof(T);
    for (const auto &last : {std::vector<int32_t>{1, 1, 1}, {1, 5, 13}}) {
        const auto together = asked_again(&two_threads, r, q, last, -1);
        size_t at = 0;
        for (size_t s = 0; s < last.size(); s++) {
            const auto alone = asked_again<T>(nullptr, r, q, last, int64_t(s));
            const size_t count = size_t(last[s]), first = size_t(r.starts[s + 1]) - count;
            is_independent = is_independent && !std::memcmp(&together[at], alone.data(), count * row) &&
                             !std::memcmp(&out[first * size_t(heads * dim)], alone.data(), count * row);
            at += alone.size();
        }
    }
    expect(is_rotated, what + ": queries are rotated wrongly");
    expect(is_exact, what + ": not what loops give");
    expect(is_independent, what + ": a row depends on its neighbours or on the threads");
}

}  // namespace

int main() {
    two_threads.begin(true);
    for (auto [outputs, inputs] : {std::pair<int64_t, int64_t>{1, 1}, {31, 2}, {33, 7}, {97, 130}, {64, 320}})
        for (bool is_gated : {false, true}) check_product(outputs, inputs, false, is_gated);
    for (auto [outputs, inputs] : {std::pair<int64_t, int64_t>{1, 64}, {70, 192}})
        for (bool is_gated : {false, true}) check_product(outputs, inputs, true, is_gated);
    for (int64_t width : {1, 16, 96, 100, 576}) check_norms(width);
#if !defined(ONLY_PRODUCTS)  // which is all that some variants have of their own
    check_attention<BFloat16>(4, 2, 64, Form::BFLOAT16);
    check_attention<BFloat16>(9, 3, 128, Form::BFLOAT16);
    check_attention<BFloat16>(2, 2, 80, Form::BFLOAT16);
    check_attention<Float16>(4, 1, 96, Form::FLOAT16);
    check_attention<float>(4, 2, 64, Form::FLOAT32);
    for (Form form : {Form::FLOAT32, Form::FLOAT16, Form::INT8, Form::FP8_E4M3, Form::FP8_E5M2})
        check_attention<BFloat16>(4, 2, 64, form);
    for (Form form : {Form::BFLOAT16, Form::INT8, Form::FP8_E4M3, Form::FP8_E5M2}) check_attention<float>(6, 2, 80, form);
#endif
    two_threads.end();
    return wrong != 0;
}
