#include "lease.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <system_error>
#include <time.h>
#include <unistd.h>

namespace twostroke {
namespace {

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

bool lock(int file, int how) {
    int failed;
    do failed = flock(file, how);
    while (failed && errno == EINTR);
    return !failed;
}

}  // namespace

Lease::Lease(const std::string &folder, int core) {
    const std::string path = folder + "/core-" + std::to_string(core);
    file_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file_ < 0) throw std::system_error(errno, std::generic_category(), path);
    void *cell = MAP_FAILED;
    if (ftruncate(file_, sizeof(LeaseCell)) == 0)
        cell = mmap(nullptr, sizeof(LeaseCell), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
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

void Lease::take_home() {
    if (!lock(file_, LOCK_EX | LOCK_NB)) {
        cell_->wanted.store(1, std::memory_order_relaxed);
        lock(file_, LOCK_EX);
    }
    cell_->wanted.store(0, std::memory_order_relaxed);  // also where an earlier owner died waiting
}

bool Lease::borrow(int64_t owner_idle_ns) {
    if (wanted_back() || now_ns() - cell_->released_ns.load(std::memory_order_relaxed) < owner_idle_ns) return false;
    return lock(file_, LOCK_EX | LOCK_NB);
}

void Lease::release_home() {
    cell_->released_ns.store(now_ns(), std::memory_order_relaxed);
    release();
}

void Lease::release() { lock(file_, LOCK_UN); }

}  // namespace twostroke
