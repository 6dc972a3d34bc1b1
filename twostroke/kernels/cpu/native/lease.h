// The lease of one core: a lock file that the workers of a host share, with a cell through which its owner asks for it
// back.
//
// The lock is flock's, so the operating system frees it when its holder dies. The home of a core is the worker that
// owns it. Others borrow it, and hold it only while the owner does not want it.

#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace twostroke {

// The content of the file. A new file has zeros: nobody wants the core, and it was released long ago.
struct LeaseCell {
    std::atomic<uint32_t> wanted;      // whether the owner waits for it
    std::atomic<uint32_t> yields;      // count of releases while it was wanted: the owner waits for a change
    std::atomic<int64_t> released_ns;  // when its owner released it, on the monotonic clock, which all processes share
};
static_assert(sizeof(LeaseCell) == 16 && std::atomic<uint32_t>::is_always_lock_free, "processes share it as it is");

int64_t now_ns();  // the time of that clock

class Lease {
  public:
    Lease(const std::string &folder, int core);  // throws std::system_error
    ~Lease();
    Lease(const Lease &) = delete;
    Lease &operator=(const Lease &) = delete;

    // Waits for a borrower to yield, but not forever: one that was stopped never does. After that, its owner computes
    // without the lease and still asks for it, but does not wait again until it has got it once.
    void take_home(int64_t patience_ns);
    bool borrow(int64_t owner_idle_ns);
    bool wanted_back() const { return cell_->wanted.load(std::memory_order_relaxed) != 0; }
    void release_home();
    void lend_home();  // as if released long ago
    void release();

  private:
    bool wait_for_borrower(int64_t patience_ns);

    int file_;
    LeaseCell *cell_;
    bool is_overdue_ = false;
};

}  // namespace twostroke
