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
    std::atomic<uint8_t> wanted;
    uint8_t unused[7];
    std::atomic<int64_t> released_ns;  // by its owner, on the monotonic clock, which all processes of a host share
};

class Lease {
  public:
    Lease(const std::string &folder, int core);  // throws std::system_error
    ~Lease();
    Lease(const Lease &) = delete;
    Lease &operator=(const Lease &) = delete;

    void take_home();  // waits for a borrower to yield
    bool borrow(int64_t owner_idle_ns);
    bool wanted_back() const { return cell_->wanted.load(std::memory_order_relaxed) != 0; }
    void release_home();
    void release();

  private:
    int file_;
    LeaseCell *cell_;
};

}  // namespace twostroke
