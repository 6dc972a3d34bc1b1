// The memory that the ranks of one worker share: processes of one host that each compute a part of every layer.
//
// The memory has a cell per rank and two sets of slots, with a slot of bytes per rank in each. In every round each rank
// fills its slot, announces that it has arrived, waits for the others, and reads their slots. Rounds alternate between
// the two sets. A rank that fills a slot in round n + 2 has seen all ranks arrive in round n + 1, so none reads that
// slot any more. Sums are added in the order of ranks, in float32, and rounded once: their bits depend on nothing else,
// and are the same on all ranks.

#pragma once

#include <atomic>
#include <cstdint>

#include "simd.h"
#include "team.h"

namespace twostroke {

// Constants of ranks/group.py.
enum class Met : int32_t {
    ALL = 0,
    ABORTED = 1,   // all waits were ended
    MISMATCH = 2,  // another rank has other sizes: the ranks are not in step
};

// How much a rank contributes to a round.
struct Posted {
    int64_t rows, bytes;  // in all rounds of one call
};

struct alignas(64) RankCell {
    std::atomic<uint32_t> arrived;   // number of the last round that it has filled
    std::atomic<uint32_t> sleepers;  // ranks to be woken when `arrived` changes; those killed meanwhile stay counted
    std::atomic<uint64_t> beats;     // heartbeats: others see that it is not frozen
    Posted posted[2];                // one for each set of slots
};

struct alignas(64) RankHeader {
    std::atomic<uint32_t> aborted;
};

static_assert(sizeof(RankCell) == 64 && std::atomic<uint64_t>::is_always_lock_free, "processes share it as it is");

class RankGroup {
  public:
    // `memory` has `bytes_of` bytes, zeros before the first rank joins. Its address and `slot_bytes` are multiples of
    // 64.
    RankGroup(void *memory, int rank, int ranks, int64_t slot_bytes)
        : header_((RankHeader *)memory), cells_((RankCell *)(header_ + 1)), slots_((char *)(cells_ + ranks)),
          rank_(rank), ranks_(ranks), slot_bytes_(slot_bytes) {}

    static int64_t bytes_of(int ranks, int64_t slot_bytes) {
        return int64_t(sizeof(RankHeader)) + ranks * int64_t(sizeof(RankCell)) + 2 * ranks * slot_bytes;
    }

    // Replaces `values` by their sum over all ranks. T: float or BFloat16.
    template <class T>
    Met reduce(Team *team, T *values, int64_t count);

    // Memory for this rank's next partial sum of `count` numbers, which saves copying it there; null where the sum is
    // longer than a slot.
    float *partial(int64_t count) const { return count * int64_t(sizeof(float)) <= slot_bytes_ ? (float *)slot(rank_) : nullptr; }
    // Adds the sum of all ranks' partial sums to `values`.
    Met add_partials(Team *team, float *values, int64_t count);

    // Gathers `rows` rows. `row_bytes` of each are this rank's, which may be more or fewer than others'; together they
    // are `whole_bytes`. Rank 0 gets all ranks' parts of a row side by side at `into`; others pass null.
    Met gather(const char *from, int64_t rows, int64_t row_bytes, int64_t whole_bytes, char *into);

    Met meet();  // only waits for the others

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
    uint32_t round_ = 1;  // the round that is being filled
};

}  // namespace twostroke
