// A team of threads that run the parts of one kernel side by side, on cores that this worker owns or borrows.
//
// Helpers spin only while a step is open, and park between steps: so a kernel starts and ends within a microsecond, yet
// an idle worker costs nothing. The number of parts is decided for each kernel, since borrowed cores are given back
// between kernels.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lease.h"

#define TWOSTROKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace twostroke {

struct TeamCores {
    std::vector<int> home, borrowable;
    std::string folder;  // of the leases; empty: there are none, and home cores are used without them
    int64_t owner_idle_ns;  // how long its owner must be idle before a core may be borrowed
    int64_t patience_ns;    // how long to wait for a borrower of a home core
    bool pin;
};

class Team {
  public:
    explicit Team(TeamCores cores);
    ~Team();
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;

    void begin(bool borrows);
    void lend();  // between steps: the home cores may be borrowed at once
    void end();
    int threads_now() const { return int(active_.size()); }
    int most_borrowed() const { return most_borrowed_; }  // at once, in the open step or the last one

    // Calls f(part, parts) for every part, the caller's included. Returns when all are done.
    template <class F>
    void run_parts(F f) {
        run([](void *context, int part, int parts) { (*static_cast<F *>(context))(part, parts); }, &f);
    }

    // Gives a borrowed core back if its owner wants it. If so, it returns true, and the part must end.
    bool give_back_if_wanted(int part);

  private:
    using Work = void (*)(void *context, int part, int parts);

    // One core of the team. The first is the caller's, the others have a helper thread.
    struct alignas(64) Slot {
        std::atomic<uint32_t> ticket{0};  // the helper's latest ticket; it waits for the next
        std::atomic<uint32_t> parked{0};
        std::atomic<bool> may_spin{false};
        int part = 0;
        int core = 0;
        bool is_home = false;
        bool is_active = false;  // in the open step
        bool is_given_back = false;  // during a kernel, by its own part
        std::unique_ptr<Lease> lease;
        std::thread helper;
    };

    void run(Work work, void *context);
    void serve(Slot &slot);
    void dismiss();
    void tell(Slot &slot, bool has_work);
    void yield_wanted();
    void take(Slot &slot);
    void borrow_idle();
    bool acquire(Slot &slot);
    void release(Slot &slot);

    const TeamCores cores_;
    std::vector<std::unique_ptr<Slot>> slots_;
    std::vector<Slot *> active_;  // of the open step, the caller's first
    bool is_open_ = false;
    bool borrows_ = false;  // in the open step
    int most_borrowed_ = 0;
    int64_t look_at_ns_ = 0;  // when to look for idle cores again, within a step
    std::thread::id pinned_caller_;
    Work work_ = nullptr;
    void *context_ = nullptr;
    int parts_ = 0;
    std::atomic<bool> quit_{false};
    alignas(64) std::atomic<int> pending_{0};
};

// Kernels also work without a team, or with one that has no open step: then the caller computes all parts.
template <class F>
void run_parts(Team *team, F f) {
    if (team)
        team->run_parts(f);
    else
        f(0, 1);
}

// Calls f(task, next, is_first) for every task of 0..count - 1. The first free thread takes a task, since parts may be
// slow, start late, or leave. `next` is the first task that no thread has taken yet, or `count`.
template <class F>
void run_tasks(Team *team, size_t count, F f) {
    std::atomic<size_t> next{0};
    run_parts(count > 1 ? team : nullptr, [&](int part, int) {
        for (bool is_first = true; part == 0 || !team->give_back_if_wanted(part); is_first = false) {
            const size_t task = next.fetch_add(1, std::memory_order_relaxed);
            if (task >= count) return;
            f(task, std::min(next.load(std::memory_order_relaxed), count), is_first);
        }
    });
}

}  // namespace twostroke
