// Waits for a word of memory to change, which processes may share.

#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace twostroke {

constexpr int64_t SECOND_NS = 1000000000;

// Lets the core pause between two reads of a word.
inline void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Sleeps while the word has this value, until woken, or for `most_ns` at most. It may return early.
inline void wait_while(std::atomic<uint32_t> &word, uint32_t value, int64_t most_ns) {
    const timespec most{time_t(most_ns / SECOND_NS), long(most_ns % SECOND_NS)};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
}

inline void wake(std::atomic<uint32_t> &word, int most = INT_MAX) {
    syscall(SYS_futex, &word, FUTEX_WAKE, most, nullptr, nullptr, 0);
}

}  // namespace twostroke
