#include "lease.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <system_error>
#include <time.h>
#include <unistd.h>

#include "futex.h"

namespace twostroke {
namespace {

constexpr int64_t LOOK_NS = SECOND_NS / 1000;  // because a borrower that dies wakes nobody

bool try_lock(int file) {
    int failed;
    do failed = flock(file, LOCK_EX | LOCK_NB);
    while (failed && errno == EINTR);
    return !failed;
}

// Allocates the file's blocks, not just its length: writing into a hole of a full file system would kill the process.
int open_cell(const std::string &path) {
    const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) throw std::system_error(errno, std::generic_category(), path);
    if (const int error = posix_fallocate(file, 0, sizeof(LeaseCell))) {
        close(file);
        throw std::system_error(error, std::generic_category(), path);
    }
    return file;
}

}  // namespace

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t(now.tv_sec) * SECOND_NS + now.tv_nsec;
}

Lease::Lease(const std::string &folder, int core) {
    const std::string path = folder + "/core-" + std::to_string(core);
    file_ = open_cell(path);
    void *cell = mmap(nullptr, sizeof(LeaseCell), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (cell == MAP_FAILED) {
        const int error = errno;
        close(file_);
        throw std::system_error(error, std::generic_category(), path);
    }
    cell_ = static_cast<LeaseCell *>(cell);
}

Lease::~Lease() {
    munmap(cell_, sizeof(LeaseCell));
    close(file_);
}

void Lease::take_home(int64_t patience_ns) {
    const bool is_ours = try_lock(file_) || (!is_overdue_ && wait_for_borrower(patience_ns));
    is_overdue_ = !is_ours;
    cell_->wanted.store(is_ours ? 0 : 1, std::memory_order_relaxed);  // 0 also clears what a dead owner left
}

// A borrower counts a yield after it has unlocked. If that happens between our attempt to lock and our sleep, we do not
// sleep.
bool Lease::wait_for_borrower(int64_t patience_ns) {
    cell_->wanted.store(1, std::memory_order_seq_cst);
    const int64_t end = now_ns() + patience_ns;
    do {
        const uint32_t yields = cell_->yields.load(std::memory_order_seq_cst);
        if (try_lock(file_)) return true;
        wait_while(cell_->yields, yields, LOOK_NS);
    } while (now_ns() < end);
    return false;
}

bool Lease::borrow(int64_t owner_idle_ns) {
    const int64_t idle_ns = now_ns() - cell_->released_ns.load(std::memory_order_relaxed);
    const bool was_just_used = idle_ns >= 0 && idle_ns < owner_idle_ns;  // less than 0: before the last reboot
    return !wanted_back() && !was_just_used && try_lock(file_);
}

void Lease::release_home() {
    cell_->released_ns.store(now_ns(), std::memory_order_relaxed);
    release();
}

void Lease::lend_home() { cell_->released_ns.store(0, std::memory_order_relaxed); }

void Lease::release() {
    flock(file_, LOCK_UN);
    if (!wanted_back()) return;
    cell_->yields.fetch_add(1, std::memory_order_seq_cst);
    wake(cell_->yields, 1);
}

}  // namespace twostroke
