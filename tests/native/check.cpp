// Kernels of one variant against plain loops in double, and a row alone against the same row beside others: here products
// and norms, in check_attention.cpp what reads pages.
//
// It is linked with the kernels' own sources, so it runs for every machine that a compiler knows: natively, under qemu-user, or
// with instructions that are emulated in plain C++. It prints what is wrong, and nothing else.

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "fused.h"
#include "linear.h"
#include "low_rank.h"
#include "stored.h"

using namespace twostroke;

namespace {

// One weight [outputs, inputs] and what the kernels take of it.
struct Weight {
    int64_t outputs, inputs;
    bool is_int8, is_gated;
    Activation activation;
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

    Weight(int64_t outputs_, int64_t inputs_, bool int8, bool gated, Activation activation_)
        : outputs(outputs_), inputs(inputs_), is_int8(int8), is_gated(gated), activation(activation_) {
        const auto given = numbers(rows() * inputs);
        for (auto value : given) values.push_back(as_float(value));
        bias.resize(size_t(panels() * PANEL));
        int8 ? pack_int8() : pack_bfloat16(given);
        for (int64_t at = 0; at < panels() * PANEL; at++)
            bias[size_t(at)] = row_of(at / PANEL, at % PANEL) < 0 ? 0.0f : bias_of(row_of(at / PANEL, at % PANEL));
        native = {int8 ? (const void *)narrow.data() : wide.data(), scales.data(), sums.data(), bias.data(), outputs,
                  padded(), int8 ? INT8 : BFLOAT16, gated, activation};
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

// The same in two halves.
std::vector<float> finished_sums(const Weight &w, const std::vector<uint16_t> &x, int64_t stride, int64_t rows) {
    const int64_t width = w.panels() * PANEL;
    std::vector<float> sums(size_t(rows * width)), y(size_t(rows * w.outputs), 99.0f);
    Prepared prepared;
    linear(&two_threads, w.native, {x.data(), stride, rows, sums.data(), width}, Into::SUMS, prepared);
    finish_sums(&two_threads, w.native, sums.data(), {x.data(), stride, rows, y.data(), w.outputs}, Into::FLOAT32);
    return y;
}

double activated(double x, Activation activation) {
    switch (activation) {
        case SILU: return x / (1 + std::exp(-x));
        case GELU_TANH: return x / 2 * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
        case GELU: return x / 2 * (1 + std::erf(x * 0.7071067811865476));
        default: return x;
    }
}

void check_product(int64_t outputs, int64_t inputs, bool is_int8, bool is_gated, Activation activation) {
    const Weight w(outputs, inputs, is_int8, is_gated, activation);
    const int64_t stride = w.padded(), most = 101;
    auto x = numbers(most * stride);
    for (int64_t r = 0; inputs < stride && r < most; r++) x[size_t(r * stride + inputs)] = 0;
    const std::string what = std::to_string(outputs) + " x " + std::to_string(inputs) + (is_int8 ? " int8" : "") +
                             (is_gated ? " gated" : "") +
                             (activation > SILU ? ", activation " + std::to_string(activation) : "");
    const auto alone = product(nullptr, w, x, stride, 0, most);
    bool is_exact = true, is_independent = product(&two_threads, w, x, stride, 0, most) == alone;
    const double loose = is_int8 ? 0.03 * std::sqrt(double(inputs)) : 1e-5 * double(inputs);
    for (int64_t r = 0; r < most; r += 9)
        for (int64_t o = 0; o < outputs; o++) {
            double truth = w.truth(&x[size_t(r * stride)], o);
            double slack = loose;
            const double value = is_gated ? w.truth(&x[size_t(r * stride)], o + outputs) : 1;
            if (activation != NONE) slack = loose * (1 + std::fabs(value) + std::fabs(truth));
            truth = activated(truth, activation) * value;
            is_exact = is_exact && is_close(alone[size_t(r * outputs + o)], truth, 1e-5, slack);
        }
    for (int64_t rows : {1, 2, 3, 7, 8, 12, 13, 16, 17, 31, 33, 97}) {
        const int64_t first = most - rows;
        const auto some = product(&two_threads, w, x, stride, first, rows);
        is_independent = is_independent && std::equal(some.begin(), some.end(), alone.begin() + first * outputs);
    }
    expect(is_exact, what + ": not what loops give");
    expect(is_independent, what + ": a row depends on its neighbours or on the threads");
    expect(finished_sums(w, x, stride, most) == alone, what + ": in two halves it has other bits");
}

// What an adapter adds to every second row of a product whose outputs lie in groups of 16, `step` columns apart.
void check_low_rank(int64_t rank, int64_t inputs, int64_t outputs, int64_t step) {
    const int64_t count = 9, first = 3, stride = first + (outputs + 15) / 16 * step;
    const auto a = numbers(rank * inputs), b = numbers(rank * outputs), x = numbers(count * inputs);
    AdapterLayer layers[2] = {};
    layers[1].up = {a.data(), b.data(), rank, inputs, outputs, 0.5f, 0.0f};
    std::vector<RowAdapter> of_row;
    for (int64_t r = 0; r < count; r++) of_row.push_back(r % 2 ? layers : nullptr);
    auto added = [&](Team *team, int64_t from, int64_t rows) {
        std::vector<float> y(size_t(rows * stride), 1.0f);
        add_low_rank(team, of_row.data() + from, 1, {{&AdapterLayer::up, first, step}, {&AdapterLayer::q, 0, step}},
                     {x.data() + from * inputs, inputs, rows, y.data(), stride}, Into::ADD);
        return y;
    };
    const auto all = added(&two_threads, 0, count);
    std::vector<double> truth(all.size(), 1.0);
    for (int64_t r = 1; r < count; r += 2)
        for (int64_t k = 0; k < rank; k++) {
            double t = 0;
            for (int64_t i = 0; i < inputs; i++)
                t += double(as_float(a[size_t(k * inputs + i)])) * double(as_float(x[size_t(r * inputs + i)]));
            for (int64_t o = 0; o < outputs; o++)
                truth[size_t(r * stride + first + o / 16 * step + o % 16)] += t / 2 * as_float(b[size_t(k * outputs + o)]);
        }
    bool is_exact = true, is_independent = true;
    for (size_t i = 0; i < all.size(); i++)
        is_exact = is_exact && is_close(all[i], truth[i], 1e-5, 1e-5 * double(inputs * rank));
    for (int64_t r = 0; r < count; r++) {
        const auto alone = added(nullptr, r, 1);
        is_independent = is_independent && std::equal(alone.begin(), alone.end(), all.begin() + r * stride);
    }
    const std::string what = "an adapter of rank " + std::to_string(rank) + " for " + std::to_string(inputs) + " inputs";
    expect(is_exact, what + ": not what loops add");
    expect(is_independent, what + ": a row depends on its neighbours or on the threads");
}

// Groups of rows, each with weights of its own: what each weight gives for its rows.
void check_groups(bool is_int8, bool is_gated) {
    const int64_t outputs = 70, inputs = 128, most = 60;
    const auto x = numbers(most * inputs);
    std::vector<Weight> weights;
    for (int i = 0; i < 3; i++) weights.emplace_back(outputs, inputs, is_int8, is_gated, is_gated ? SILU : NONE);
    const std::vector<int64_t> starts = {0, 1, 40, most};
    std::vector<RowGroup> groups;
    std::vector<float> expected, y(size_t(most * outputs), 99.0f);
    for (size_t i = 0; i < weights.size(); i++) {
        groups.push_back({&weights[i].native, starts[i], starts[i + 1]});
        const auto alone = product(nullptr, weights[i], x, inputs, starts[i], starts[i + 1] - starts[i]);
        expected.insert(expected.end(), alone.begin(), alone.end());
    }
    Prepared prepared;
    linear(&two_threads, groups, {x.data(), inputs, most, y.data(), outputs}, Into::FLOAT32, prepared);
    expect(y == expected, std::string("groups of rows") + (is_int8 ? " int8" : "") + (is_gated ? " gated" : ""));
}

void check_norms(int64_t width) {
    const int64_t rows = 5;
    std::normal_distribution<float> normal(0.0f, 3.0f);
    std::vector<float> x(size_t(rows * width)), weight((size_t(width)));
    for (auto &value : x) value = normal(source);
    for (auto &value : weight) value = normal(source);
    std::vector<uint16_t> y(size_t(rows * width)), heads = numbers(rows * width), before = heads;
    norm_rows(nullptr, x.data(), rows, width, {weight.data(), nullptr}, 1e-5f, y.data(), width);
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
    std::vector<uint16_t> with_mean(size_t(rows * width));
    const std::vector<float> bias(size_t(width), 0.5f), added(x.begin(), x.begin() + width);
    std::vector<float> sum(size_t(width), 1.0f);
    norm_rows(nullptr, x.data(), 1, width, {weight.data(), bias.data()}, 1e-5f, with_mean.data(), width);
    add_norm(nullptr, added.data(), 1, width, {weight.data(), nullptr}, 1e-5f, sum.data());
    double mean = 0, variance = 0;
    for (int64_t i = 0; i < width; i++) mean += x[size_t(i)] / double(width);
    for (int64_t i = 0; i < width; i++) variance += std::pow(x[size_t(i)] - mean, 2) / double(width);
    for (int64_t i = 0; i < width; i++) {
        const auto at = size_t(i);
        const double one = (x[at] - mean) / std::sqrt(variance + 1e-5) * weight[at] + 0.5;
        is_exact = is_exact && is_close(as_float(with_mean[at]), one, 0.005, 1e-3);
        is_exact = is_exact && is_close(sum[at] - 1, as_float(y[at]), 0.005, 1e-5);
    }
    expect(is_exact, "norms of width " + std::to_string(width));
    std::vector<float> gathered(size_t(2 * width));
    const int32_t tokens[] = {3, 1};
    gather(before.data(), tokens, 2, width, 1, gathered.data());
    bool is_same = true;
    for (int64_t i = 0; i < 2 * width; i++)
        is_same = is_same && gathered[size_t(i)] == as_float(before[size_t(tokens[i / width] * width + i % width)]);
    expect(is_same, "rows of an embedding of width " + std::to_string(width));
}

// Codes of a file: vectors unpack what `gather_stored` reads one by one. Inputs are integers that int8 holds.
void check_stored(const Layout &layout) {
    const int64_t outputs = 70, inputs = 256, panels = 3, most = 29, groups = inputs / layout.group;
    std::uniform_int_distribution<int> byte(0, 255), input(-127, 127);
    std::vector<uint8_t> codes(size_t(panels * inputs / unit_of(layout) * unit_bytes(layout) + 65536));
    for (auto &value : codes) value = uint8_t(byte(source));
    std::vector<float> scales(size_t(panels * groups * PANEL));
    for (auto &scale : scales) scale = float(1 + byte(source)) / 4096;
    Linear w = {codes.data(), scales.data(), nullptr, nullptr, outputs, inputs, CODES, false};
    w.layout = layout;
    std::vector<int32_t> tokens;
    for (int64_t o = 0; o < outputs; o++) tokens.push_back(int32_t(o));
    std::vector<float> weights(size_t(outputs * inputs));
    gather_stored(w, tokens.data(), outputs, weights.data());
    std::vector<uint16_t> x;
    for (int64_t i = 0; i < most * inputs; i++) x.push_back(to_bfloat16(float(i % 16 ? input(source) : 127)));
    auto product = [&](int64_t rows) {
        std::vector<float> y(size_t(rows * outputs), 99.0f);
        Prepared prepared;
        linear(&two_threads, w, {x.data(), inputs, rows, y.data(), outputs}, Into::FLOAT32, prepared);
        return y;
    };
    const std::string what = "codes of " + std::to_string(layout.bits) + " bits" + (layout.is_fp4 ? " of FP4" : "");
    const auto all = product(most);
    bool is_exact = true, is_independent = true;
    for (int64_t r = 0; r < most; r++)
        for (int64_t o = 0; o < outputs; o++) {
            double truth = 0;
            for (int64_t i = 0; i < inputs; i++)
                truth += double(as_float(x[size_t(r * inputs + i)])) * double(weights[size_t(o * inputs + i)]);
            is_exact = is_exact && is_close(all[size_t(r * outputs + o)], truth, 1e-5, 0.02);
        }
    for (int64_t rows : {1, 2, 3, 4, 8, 9, 13}) {
        const auto some = product(rows);
        is_independent = is_independent && std::equal(some.begin(), some.end(), all.begin());
    }
    expect(is_exact, what + ": not what loops give");
    expect(is_independent, what + ": a row depends on its neighbours");
}

double fp8_number(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const double size = exponent ? std::ldexp(1 + fraction / 8.0, exponent - 7) : std::ldexp(fraction / 8.0, -6);
    return code & 128 ? -size : size;
}

// FP8 of a file, whose last group may be shorter. Some variants round each weight to bfloat16, others none.
void check_fp8(int64_t group) {
    const int64_t outputs = 70, inputs = 288, panels = 3, most = 29, groups = (inputs + group - 1) / group;
    std::vector<uint8_t> codes(size_t(panels * inputs * PANEL + 65536));
    for (auto &code : codes)
        if (code = uint8_t(source() & 255); (code & 127) == 127) code = 0;
    std::vector<float> scales(size_t(panels * groups * PANEL));
    for (auto &scale : scales) scale = float(1 + source() % 255) / 4096;
    Linear w = {codes.data(), scales.data(), nullptr, nullptr, outputs, inputs, FP8, false};
    w.layout = {8, 0, int32_t(group), 0, Scales::FLOAT32, Mins::NONE};
    const auto x = numbers(most * inputs);
    auto product = [&](int64_t rows) {
        std::vector<float> y(size_t(rows * outputs), 99.0f);
        Prepared prepared;
        linear(&two_threads, w, {x.data(), inputs, rows, y.data(), outputs}, Into::FLOAT32, prepared);
        return y;
    };
    const auto all = product(most);
    bool is_near = true, is_independent = true;
    for (int64_t r = 0; r < most; r++)
        for (int64_t o = 0; o < outputs; o++) {
            double truth = 0, size = 0;
            for (int64_t i = 0; i < inputs; i++) {
                const uint8_t code = codes[size_t(o / PANEL * inputs * PANEL + i / 4 * PANEL * 4 + o % PANEL * 4 + i % 4)];
                const double scale = scales[size_t((o / PANEL * groups + i / group) * PANEL + o % PANEL)];
                const double part = as_float(x[size_t(r * inputs + i)]) * fp8_number(code) * scale;
                truth += part;
                size += std::fabs(part);
            }
            is_near = is_near && is_close(all[size_t(r * outputs + o)], truth, 0, size / 256);
        }
    for (int64_t rows : {1, 2, 3, 4, 8, 9, 13}) {
        const auto some = product(rows);
        is_independent = is_independent && std::equal(some.begin(), some.end(), all.begin());
    }
    expect(is_near, "FP8 in groups of " + std::to_string(group) + ": not what loops give");
    expect(is_independent, "FP8 in groups of " + std::to_string(group) + ": a row depends on its neighbours");
}

}  // namespace

int main() {
    two_threads.begin(true);
    for (auto [outputs, inputs] : {std::pair<int64_t, int64_t>{1, 1}, {31, 2}, {33, 7}, {97, 130}, {64, 320}})
        for (bool is_gated : {false, true}) check_product(outputs, inputs, false, is_gated, is_gated ? SILU : NONE);
    for (auto [outputs, inputs] : {std::pair<int64_t, int64_t>{1, 64}, {70, 192}})
        for (bool is_gated : {false, true}) check_product(outputs, inputs, true, is_gated, is_gated ? SILU : NONE);
    for (bool is_int8 : {false, true})
        for (bool is_gated : {false, true}) check_groups(is_int8, is_gated);
    for (int64_t step : {16, 32}) {
        check_low_rank(1, 1, 1, step);
        check_low_rank(7, 70, 37, step);
        check_low_rank(16, 128, 64, step);
    }
    for (int64_t width : {1, 16, 96, 100, 576}) check_norms(width);
    for (const Layout &layout : {Layout{4, 0, 32, 8, Scales::FLOAT32, Mins::NONE}, Layout{4, 1, 32, 12, Scales::FLOAT32, Mins::NONE},
                                 Layout{5, 0, 64, 16, Scales::FLOAT32, Mins::NONE}, Layout{6, 0, 16, 32, Scales::FLOAT32, Mins::NONE},
                                 Layout{8, 0, 256, 0, Scales::FLOAT32, Mins::NONE}})
        check_stored(layout);
    for (int64_t group : {32, 128, 288}) check_fp8(group);
#if !defined(ONLY_PRODUCTS)  // which is all that some variants have of their own
    check_attention();
    check_latents();
#endif
    for (Activation activation : {SILU, GELU_TANH, GELU})
        for (bool is_gated : {false, true}) check_product(33, 70, false, is_gated, activation);
    two_threads.end();
    return wrong != 0;
}
