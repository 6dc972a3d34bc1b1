// How the products of one panel use the cache, whatever instructions they are made of.

#pragma once

#include "linear.h"

namespace twostroke {

constexpr int64_t AHEAD = 8192;  // bytes that a single pass over a panel is ahead of its reading
constexpr int64_t LINE = 64;

// The share of the next panel that one pass over this one brings closer: `lines` per step, of which each reads two.
struct Ahead {
    const char *next = nullptr;
    int64_t lines = 0;
};

inline void bring(const Ahead &ahead, int64_t step, const char *here, bool is_only_pass) {
    if (is_only_pass) {
        __builtin_prefetch(here + AHEAD);
        __builtin_prefetch(here + AHEAD + LINE);
        return;
    }
    for (int64_t line = 0; line < ahead.lines; line++)
        __builtin_prefetch(ahead.next + (step * ahead.lines + line) * LINE, 0, 2);
}

}  // namespace twostroke
