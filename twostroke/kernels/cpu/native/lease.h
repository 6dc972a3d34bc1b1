// The lease of one core: a lock file that the workers of a host share, with a cell by which its owner asks for it back.
//
// The lock is flock's, so the operating system frees it when its holder dies. A core has an owner, for whom it is home,
// and borrowers, who hold it only while the owner does not want it.

#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace twostroke {

// What the file holds. Files are made of zeros: nobody wants the core, and it has been free since ever.
struct LeaseCell {
    std::atomic<uint32_t> wanted;      // by its owner, who has not got it
    std::atomic<uint32_t> yields;      // how often it was given back while it was wanted: the owner waits for a change
    std::atomic<int64_t> released_ns;  // by its owner, on the monotonic clock, which all processes of a host share
};
static_assert(sizeof(LeaseCell) == 16 && std::atomic<uint32_t>::is_always_lock_free, "processes share it as it is");

int64_t now_ns();  // on that clock

class Lease {
  public:
    Lease(const std::string &folder, int core);  // throws std::system_error
    ~Lease();
    Lease(const Lease &) = delete;
    Lease &operator=(const Lease &) = delete;

    // Waits for a borrower to yield, but not forever: one that was stopped never does. After that, its owner goes on
    // without the lease, keeps asking for it, and waits no more until it has got it once.
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
