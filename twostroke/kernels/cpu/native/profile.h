// Records the time of each kernel of a forward pass, and what it had to read and compute, while a profile is taken.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "attention.h"
#include "linear.h"
#include "low_rank.h"
#include "page.h"

namespace twostroke {

// The kinds of kernels, in the order of `KERNELS` of twostroke/observability/profiler.py.
enum class KernelKind : int32_t {
    EMBEDDING, NORM, QKV, HEAD_NORM, STORE, ATTENTION, OUTPUT, GATED, DOWN, HEAD,
    ROUTER, EXPERTS_GATED, EXPERTS_DOWN, EXPERTS_SUM,
    LATENT_QUERIES, ABSORB, EXPAND,
    ADAPTERS, ACTIVATION,
    RANKS_SUM
};

// Bytes that a kernel reads and writes at least once, and its multiplications and additions.
struct Work {
    double bytes, operations;
};

// `KernelRecord` of twostroke/observability/profiler.py, field by field.
struct KernelRecord {
    int64_t start_ns, end_ns;  // of the monotonic clock
    Work work;
    KernelKind kind;
    int32_t layer, rows, threads;
};

// `KernelRecords` of twostroke/observability/profiler.py.
struct KernelRecords {
    static constexpr int64_t MOST = 2048;
    KernelRecord records[MOST];
    int64_t count;

    // Runs `kernel` and adds the record with its times and threads, as long as there is room.
    template <class F>
    void record(KernelRecord about, const Team *team, F kernel) {
        about.start_ns = now_ns();
        kernel();
        about.end_ns = now_ns();
        about.threads = team ? std::max(1, team->threads_now()) : 1;
        if (count < MOST) records[count++] = about;
    }

    static int64_t now_ns() {
        return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
};

// Weights are read once. Activations are in caches, and count only where nothing else is read.
inline Work work_of(const Linear &w, int64_t rows) {
    const double weights = double(w.inputs) * double(w.outputs) * (w.is_gated ? 2 : 1);
    const double bits = w.kind == BFLOAT16 ? 16 : w.kind == INT8 ? 8 : w.layout.bits;
    const Work rest = w.next ? work_of(*w.next, rows) : Work{};
    return {weights * bits / 8 + rest.bytes, 2 * weights * double(rows) + rest.operations};
}

// Products of groups of rows, each with its own weights, which are read once.
inline Work work_of(const std::vector<RowGroup> &groups) {
    Work sum{0, 0};
    for (const RowGroup &group : groups) {
        const Work one = work_of(*group.w, group.end - group.first);
        sum = {sum.bytes + one.bytes, sum.operations + one.operations};
    }
    return sum;
}

// Weights of an adapter are read once, however many rows use it.
inline Work work_of(const RowAdapter *of_row, int64_t layer, std::initializer_list<AddedPart> parts, int64_t rows) {
    Work sum{0, 0};
    for (const AddedPart &added : parts) {
        for (int64_t r = 0; r < rows; r++) {
            if (!of_row[r]) continue;
            const LowRank &w = of_row[r][layer].*added.part;
            const double weights = w.a ? double(w.rank) * double(w.inputs + w.outputs) : 0;
            const bool is_read_before = std::find(of_row, of_row + r, of_row[r]) != of_row + r;
            sum.bytes += is_read_before ? 0 : weights * sizeof(uint16_t);
            sum.operations += 2 * weights;
        }
    }
    return sum;
}

// One pass over rows of activations.
inline Work work_of_rows(int64_t rows, int64_t width) {
    const double values = double(rows) * double(width);
    return {values * (sizeof(float) + sizeof(uint16_t)), values * 4};
}

// Bytes of one token's key in one head.
inline double token_bytes(Form form, int64_t dim) {
    switch (form) {
        case Form::FLOAT32: return 4.0 * double(dim);
        case Form::BFLOAT16:
        case Form::FLOAT16: return 2.0 * double(dim);
        case Form::INT4: return double(dim) / 2 + sizeof(float) * double(dim) / PIECE;
        default: return double(dim) + sizeof(float);
    }
}

// Every key and value of a sequence, or every latent, is read once. A query with a key, and a weight with a value, take
// 2 * dim operations each.
inline Work work_of_attention(const AttentionStep &step) {
    double context = 0, pairs = 0;
    for (int64_t sequence = 0; sequence < step.sequences; sequence++) {
        const int64_t first = step.query_starts[sequence], end = step.query_starts[sequence + 1];
        if (first < end) context += step.positions[end - 1] + 1;
        for (int64_t token = first; token < end; token++) pairs += step.positions[token] + 1;
    }
    const double token = token_bytes(step.form, step.head_dim), dims = double(step.head_dim);
    if (step.latent_rank) return {context * token, pairs * double(step.heads) * (dims + double(step.latent_rank)) * 2};
    const double value = token_bytes(step.form, step.value_numbers()), values = double(step.value_numbers());
    return {context * double(step.kv_heads) * (token + value), pairs * double(step.heads) * (dims + values) * 2};
}

}  // namespace twostroke
