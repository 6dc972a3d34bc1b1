// What each kernel of a forward pass took, and what it had to read and compute, for callers who profile.

#pragma once

#include <chrono>
#include <cstdint>

#include "attention.h"
#include "linear.h"

namespace twostroke {

// Named by `KERNELS` of twostroke/profiler.py, in this order.
enum class KernelKind : int32_t { EMBEDDING, NORM, QKV, HEAD_NORM, STORE, ATTENTION, OUTPUT, GATED, DOWN, HEAD };

// Bytes that a kernel reads and writes at least once, and its multiplications and additions.
struct Work {
    double bytes, operations;
};

// `KernelRecord` of twostroke/profiler.py, field by field.
struct KernelRecord {
    int64_t start_ns, end_ns;  // of the monotonic clock
    Work work;
    KernelKind kind;
    int32_t layer, rows, threads;
};

// `KernelRecords` of twostroke/profiler.py.
struct KernelRecords {
    static constexpr int64_t MOST = 2048;
    KernelRecord records[MOST];
    int64_t count;
};

inline int64_t now_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Runs the kernel, and records it where somebody profiles.
template <class F>
void profiled(KernelRecords *into, KernelRecord record, const Team *team, F kernel) {
    if (!into || into->count == KernelRecords::MOST) return kernel();
    record.start_ns = now_ns();
    kernel();
    record.end_ns = now_ns();
    record.threads = team ? team->threads_now() : 1;
    into->records[into->count++] = record;
}

// Weights are read once; activations, which caches hold, are counted where they are all that is read.
inline Work work_of(const Linear &w, int64_t rows) {
    const double weights = double(w.inputs) * double(w.outputs) * (w.is_gated ? 2 : 1);
    return {weights * (w.kind == INT8 ? 1 : 2), 2 * weights * double(rows)};
}

inline Work work_of_norm(int64_t rows, int64_t width) {
    return {double(rows) * double(width) * (sizeof(float) + sizeof(uint16_t)), double(rows) * double(width) * 4};
}

// Every key and value of a sequence is read once; a query and a key, or weights and values, are 2 * dim.
inline Work work_of_attention(const AttentionStep &step) {
    double context = 0, pairs = 0;
    for (int64_t sequence = 0; sequence < step.sequences; sequence++) {
        const int64_t first = step.query_starts[sequence], end = step.query_starts[sequence + 1];
        if (first < end) context += step.positions[end - 1] + 1;
        for (int64_t token = first; token < end; token++) pairs += step.positions[token] + 1;
    }
    const double values = context * double(step.kv_heads) * double(step.head_dim) * 2;
    return {values * (step.dtype == 0 ? 4 : 2), pairs * double(step.heads) * double(step.head_dim) * 4};
}

}  // namespace twostroke
