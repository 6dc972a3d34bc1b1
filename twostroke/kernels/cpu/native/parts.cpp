#include "parts.h"

#include <cstdio>
#include <cstdlib>

namespace twostroke {
namespace {

Parts loaded;

template <class Function>
Function needed(Function function) {
    if (function) return function;
    std::fputs("a kernel was called whose part of the native kernels is not loaded\n", stderr);
    std::abort();
}

}  // namespace

void attend_bytes(Team *team, const AttentionStep &step, int64_t layer, const Queries &queries) {
    needed(loaded.attend_bytes)(team, step, layer, queries);
}

void attend_nibbles(Team *team, const AttentionStep &step, int64_t layer, const Queries &queries) {
    needed(loaded.attend_nibbles)(team, step, layer, queries);
}

void multiply_codes(Team *team, const RowGroup *groups, size_t count, const Rows &rows, Into into, Prepared &prepared) {
    needed(loaded.multiply_codes)(team, groups, count, rows, into, prepared);
}

void widen_fp8(const Linear &w, int64_t panel, uint16_t *to) { needed(loaded.widen_fp8)(w, panel, to); }

void gather_stored(const Linear &w, const int32_t *tokens, int64_t rows, float *y) {
    needed(loaded.gather_stored)(w, tokens, rows, y);
}

void store_latents(Team *team, const AttentionStep &step, int64_t layer, const HeadRows &ends, const void *k,
                   int64_t k_stride) {
    needed(loaded.store_latents)(team, step, layer, ends, k, k_stride);
}

void attend_latents(Team *team, const AttentionStep &step, int64_t layer, const HeadRows &q, const HeadRows &out) {
    needed(loaded.attend_latents)(team, step, layer, q, out);
}

}  // namespace twostroke

TWOSTROKE_EXPORT twostroke::Parts *twostroke_parts() { return &twostroke::loaded; }

TWOSTROKE_EXPORT void twostroke_store_latents(twostroke::Team *team, const twostroke::AttentionStep *step,
                                              int64_t layer, const twostroke::HeadRows *ends, const void *k,
                                              int64_t k_stride) {
    twostroke::store_latents(team, *step, layer, *ends, k, k_stride);
}

TWOSTROKE_EXPORT void twostroke_attend_latents(twostroke::Team *team, const twostroke::AttentionStep *step,
                                               int64_t layer, const twostroke::HeadRows *q,
                                               const twostroke::HeadRows *out) {
    twostroke::attend_latents(team, *step, layer, *q, *out);
}
