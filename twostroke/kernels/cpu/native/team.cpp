#include "team.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "futex.h"

namespace twostroke {
namespace {

constexpr int SPINS = 20000;           // about half a millisecond; then a helper parks, even if the step is open
constexpr int64_t LOOK_NS = 500000;  // between two looks for idle cores, each of which costs a system call
constexpr int SPINS_BEFORE_YIELD = 2000;  // of the caller, whose helper may share a core with another thread

void futex(std::atomic<uint32_t> &word, int operation, uint32_t value) {
    syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
}

void pin_this_thread(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    sched_setaffinity(0, sizeof cores, &cores);
}

}  // namespace

Team::Team(TeamCores cores) : cores_(std::move(cores)) {
    const bool has_leases = !cores_.folder.empty();
    auto add = [&](int core, bool is_home) {
        slots_.push_back(std::make_unique<Slot>());
        slots_.back()->core = core;
        slots_.back()->is_home = is_home;
        if (has_leases) slots_.back()->lease = std::make_unique<Lease>(cores_.folder, core);
    };
    for (int core : cores_.home) add(core, true);
    if (has_leases)
        for (int core : cores_.borrowable) add(core, false);
    active_.reserve(slots_.size());
    try {
        for (size_t i = 1; i < slots_.size(); i++) slots_[i]->helper = std::thread([this, i] { serve(*slots_[i]); });
    } catch (...) {
        dismiss();
        throw;
    }
}

Team::~Team() { dismiss(); }

void Team::dismiss() {
    quit_ = true;
    for (auto &slot : slots_) {
        if (!slot->helper.joinable()) continue;
        tell(*slot, false);
        slot->helper.join();
    }
}

void Team::begin(bool borrows) {
    if (cores_.pin && pinned_caller_ != std::this_thread::get_id()) {
        pin_this_thread(slots_[0]->core);
        pinned_caller_ = std::this_thread::get_id();
    }
    most_borrowed_ = 0;
    borrows_ = borrows;
    for (auto &slot : slots_)
        if (acquire(*slot)) take(*slot);
    is_open_ = true;
    look_at_ns_ = now_ns() + LOOK_NS;
}

void Team::take(Slot &slot) {
    active_.push_back(&slot);
    slot.is_active = true;
    if (!slot.is_home) most_borrowed_ = std::max(most_borrowed_, int(active_.size() - cores_.home.size()));
    if (&slot == slots_[0].get()) return;
    slot.may_spin.store(true, std::memory_order_relaxed);
    tell(slot, false);
}

// Borrows cores that become idle within a step for the rest of it.
void Team::borrow_idle() {
    if (!is_open_ || active_.size() == slots_.size()) return;
    const int64_t now = now_ns();
    if (now < look_at_ns_) return;
    look_at_ns_ = now + LOOK_NS;
    for (auto &slot : slots_)
        if (!slot->is_active && acquire(*slot)) take(*slot);
}

void Team::end() {
    yield_wanted();
    for (Slot *slot : active_) release(*slot);
    active_.clear();
    is_open_ = false;
}

void Team::lend() {
    for (auto &slot : slots_)
        if (slot->is_home && slot->lease) slot->lease->lend_home();
}

bool Team::acquire(Slot &slot) {
    if (!slot.lease) return true;
    if (!slot.is_home) return borrows_ && slot.lease->borrow(cores_.owner_idle_ns);
    slot.lease->take_home(cores_.patience_ns);
    return true;
}

void Team::release(Slot &slot) {
    slot.may_spin.store(false, std::memory_order_relaxed);
    slot.is_active = false;
    if (!slot.lease) return;
    if (slot.is_home)
        slot.lease->release_home();
    else
        slot.lease->release();
}

void Team::yield_wanted() {
    size_t kept = 0;
    for (Slot *slot : active_) {
        if (slot->is_given_back)
            slot->is_given_back = false;
        else if (!slot->is_home && slot->lease->wanted_back())
            release(*slot);
        else
            active_[kept++] = slot;
    }
    active_.resize(kept);
}

bool Team::give_back_if_wanted(int part) {
    Slot &slot = *active_[part];
    if (slot.is_home || !slot.lease->wanted_back()) return false;
    slot.is_given_back = true;
    release(slot);
    return true;
}

void Team::run(Work work, void *context) {
    yield_wanted();
    borrow_idle();
    if (active_.size() <= 1) return work(context, 0, 1);
    work_ = work;
    context_ = context;
    parts_ = int(active_.size());
    pending_.store(parts_ - 1, std::memory_order_relaxed);
    for (int part = 1; part < parts_; part++) {
        active_[part]->part = part;
        tell(*active_[part], true);
    }
    work(context, 0, parts_);
    for (int spins = 0; pending_.load(std::memory_order_acquire) != 0; spins++) {
        if (spins < SPINS_BEFORE_YIELD)
            pause_core();
        else
            sched_yield();
    }
}

// A ticket's lowest bit says whether there is work. A ticket with work is never overwritten: the caller waits until the
// work is done.
void Team::tell(Slot &slot, bool has_work) {
    const uint32_t next = (slot.ticket.load(std::memory_order_relaxed) | 1) + 1 + (has_work ? 1 : 0);
    slot.ticket.store(next, std::memory_order_seq_cst);
    if (slot.parked.load(std::memory_order_seq_cst)) futex(slot.ticket, FUTEX_WAKE_PRIVATE, 1);
}

void Team::serve(Slot &slot) {
    if (cores_.pin) pin_this_thread(slot.core);
    uint32_t seen = 0;
    while (true) {
        for (int spins = 0; spins < SPINS && slot.may_spin.load(std::memory_order_relaxed); spins++) {
            if (slot.ticket.load(std::memory_order_acquire) != seen) break;
            pause_core();
        }
        if (slot.ticket.load(std::memory_order_acquire) == seen) {
            slot.parked.store(1, std::memory_order_seq_cst);
            while (slot.ticket.load(std::memory_order_seq_cst) == seen) futex(slot.ticket, FUTEX_WAIT_PRIVATE, seen);
            slot.parked.store(0, std::memory_order_relaxed);
        }
        seen = slot.ticket.load(std::memory_order_acquire);
        if (quit_) return;
        if (!(seen & 1)) continue;
        work_(context_, slot.part, parts_);
        pending_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace twostroke

using twostroke::Team;

// Returns null, and a message in `error`, where the leases cannot be opened or the threads cannot be started.
TWOSTROKE_EXPORT Team *twostroke_team_new(const int32_t *home, int64_t homes, const int32_t *borrowable,
                                          int64_t borrowables, const char *folder, int64_t owner_idle_us,
                                          int64_t patience_us, int32_t pin, char *error, int64_t error_size) {
    try {
        return new Team({{home, home + homes}, {borrowable, borrowable + borrowables}, folder, owner_idle_us * 1000,
                         patience_us * 1000, pin != 0});
    } catch (const std::exception &problem) {
        snprintf(error, size_t(error_size), "%s", problem.what());
        return nullptr;
    }
}

TWOSTROKE_EXPORT void twostroke_team_begin(Team *team, int32_t borrows) { team->begin(borrows != 0); }

TWOSTROKE_EXPORT void twostroke_team_lend(Team *team) { team->lend(); }

TWOSTROKE_EXPORT void twostroke_team_end(Team *team) { team->end(); }

TWOSTROKE_EXPORT int64_t twostroke_team_threads_now(const Team *team) { return team->threads_now(); }

TWOSTROKE_EXPORT int64_t twostroke_team_most_borrowed(const Team *team) { return team->most_borrowed(); }

TWOSTROKE_EXPORT void twostroke_team_free(Team *team) { delete team; }

// A kernel for tests that records which part ran: `who[unit]` is the part that had the unit. Each part spins `spins`
// rounds first.
TWOSTROKE_EXPORT int64_t twostroke_team_probe(Team *team, int32_t *who, int64_t units, int64_t spins) {
    int64_t ran = 1;
    twostroke::run_parts(team, [&](int part, int parts) {
        if (part == 0) ran = parts;
        for (volatile int64_t i = 0; i < spins; i = i + 1) {
        }
        for (int64_t unit = part; unit < units; unit += parts) who[unit] += part + 1;
    });
    return ran;
}

// A kernel for tests of tasks: `who[task]` counts the task's runs. Once `stop` is set, the remaining tasks do nothing.
TWOSTROKE_EXPORT void twostroke_team_probe_tasks(Team *team, int32_t *who, int64_t tasks, int64_t spins,
                                                 const volatile int32_t *stop) {
    twostroke::run_tasks(team, size_t(tasks), [&](size_t task, size_t, bool) {
        if (*stop) return;
        for (volatile int64_t i = 0; i < spins; i = i + 1) {
        }
        who[task] += 1;
    });
}
