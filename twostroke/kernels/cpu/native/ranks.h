// What the ranks of one worker share: processes of one host that each compute a part of every layer.
//
// Their memory holds a cell per rank and, twice, a slot of bytes per rank. In every round each rank fills its slot, says
// that it has arrived, waits for the others, and reads their slots. Rounds take turns between the two sets of slots: who
// fills a slot in round n + 2 has seen all arrive in round n + 1, so nobody reads it any more. Sums go over the ranks in
// their order, in float32, and are rounded once: their bits depend on nothing else, and are the same on all ranks.

#pragma once

#include <atomic>
#include <cstdint>

#include "simd.h"
#include "team.h"

namespace twostroke {

// Constants of ranks/group.py.
enum class Met : int32_t {
    ALL = 0,
    ABORTED = 1,   // somebody has ended all waits
    MISMATCH = 2,  // another rank has come with other sizes: the ranks are no longer in step
};

// How much a rank brings to a round.
struct Posted {
    int64_t rows, bytes;  // in all rounds of one call
};

struct alignas(64) RankCell {
    std::atomic<uint32_t> arrived;   // rounds
    std::atomic<uint32_t> sleepers;  // who wants to be woken when `arrived` changes; those killed meanwhile stay in it
    std::atomic<uint64_t> beats;     // by which others see that it is not frozen
    Posted posted[2];                // by the set of slots
};

struct alignas(64) RankHeader {
    std::atomic<uint32_t> aborted;
};

static_assert(sizeof(RankCell) == 64 && std::atomic<uint64_t>::is_always_lock_free, "processes share it as it is");

class RankGroup {
  public:
    // `memory`: zeros before the first rank comes, `bytes_of` them, a multiple of 64 its address; `slot_bytes` as well.
    RankGroup(void *memory, int rank, int ranks, int64_t slot_bytes)
        : header_((RankHeader *)memory), cells_((RankCell *)(header_ + 1)), slots_((char *)(cells_ + ranks)),
          rank_(rank), ranks_(ranks), slot_bytes_(slot_bytes) {}

    static int64_t bytes_of(int ranks, int64_t slot_bytes) {
        return int64_t(sizeof(RankHeader)) + ranks * int64_t(sizeof(RankCell)) + 2 * ranks * slot_bytes;
    }

    // The sum of all ranks' `values`, in their place. T: float or BFloat16.
    template <class T>
    Met reduce(Team *team, T *values, int64_t count);

    // Where this rank's next partial sum of `count` numbers is best made, which saves copying it there; null where it is
    // longer than a slot.
    float *partial(int64_t count) const { return count * int64_t(sizeof(float)) <= slot_bytes_ ? (float *)slot(rank_) : nullptr; }
    // The sum of what all ranks have made there, added to `values`.
    Met add_partials(Team *team, float *values, int64_t count);

    // `rows` of `row_bytes` of this rank, which may be more or less than the others', and make up `whole_bytes` with
    // these. Rank 0 gets all ranks' parts of a row side by side at `into`, others pass null.
    Met gather(const char *from, int64_t rows, int64_t row_bytes, int64_t whole_bytes, char *into);

    Met meet();  // nothing but the others

    void abort();
    bool is_aborted() const { return header_->aborted.load(std::memory_order_acquire) != 0; }
    void beat() { cells_[rank_].beats.fetch_add(1, std::memory_order_relaxed); }
    uint64_t beats(int rank) const { return cells_[rank].beats.load(std::memory_order_relaxed); }
    uint32_t arrived(int rank) const { return cells_[rank].arrived.load(std::memory_order_relaxed); }

  private:
    Met meet(const Posted &posted);
    Met meet_for_sum(int64_t bytes);
    template <class T>
    simd::F sum_at(int64_t at, int n) const;
    bool wait_for(RankCell &cell);
    bool has_arrived(const RankCell &cell) const;
    char *slot(int rank) const { return slots_ + ((round_ & 1) * ranks_ + rank) * slot_bytes_; }
    const Posted &posted(int rank) const { return cells_[rank].posted[round_ & 1]; }

    RankHeader *header_;
    RankCell *cells_;
    char *slots_;
    const int rank_, ranks_;
    const int64_t slot_bytes_;
    uint32_t round_ = 1;  // the one that is being filled
};

}  // namespace twostroke
