// A team of threads that run the parts of one kernel side by side, on cores that are this worker's or borrowed.
//
// Helpers spin only while a step is open, and park between steps: a kernel starts and ends within a microsecond, yet an
// idle worker costs nothing. How many parts there are is decided per kernel, since borrowed cores go back in between.

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
    std::string folder;  // of the leases; empty: the home cores are taken without asking
    int64_t owner_idle_ns;  // before a core may be borrowed
    int64_t patience_ns;    // with a borrower of a home core
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

    // f(part, parts) for every part, the caller's included; returns when all are done.
    template <class F>
    void run_parts(F f) {
        run([](void *context, int part, int parts) { (*static_cast<F *>(context))(part, parts); }, &f);
    }

    // Of a part that may run on a borrowed core: whether its owner wants it. If so, it is given back; the part ends.
    bool give_back_if_wanted(int part);

  private:
    using Work = void (*)(void *context, int part, int parts);

    // One core of the team. The first is the caller's, the others have a helper thread.
    struct alignas(64) Seat {
        std::atomic<uint32_t> ticket{0};  // what the helper was told last; it waits for the next
        std::atomic<uint32_t> parked{0};
        std::atomic<bool> may_spin{false};
        int part = 0;
        int core = 0;
        bool is_home = false;
        bool is_active = false;  // in the open step
        bool is_given_back = false;  // within a region, by its own part
        std::unique_ptr<Lease> lease;
        std::thread helper;
    };

    void run(Work work, void *context);
    void serve(Seat &slot);
    void dismiss();
    void tell(Seat &slot, bool has_work);
    void yield_wanted();
    void take(Seat &slot);
    void borrow_idle();
    bool acquire(Seat &slot);
    void release(Seat &slot);

    const TeamCores cores_;
    std::vector<std::unique_ptr<Seat>> seats_;
    std::vector<Seat *> active_;  // of the open step, the caller's first
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

// Kernels work with no team too, or with one that has no step open: then the caller does it all.
template <class F>
void run_parts(Team *team, F f) {
    if (team)
        team->run_parts(f);
    else
        f(0, 1);
}

// f(task, next, is_first) for every task of 0..count - 1, each by the thread that comes for it first: parts may be slow, start late,
// or leave. `next` is the task that nobody has come for yet, or `count`.
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
