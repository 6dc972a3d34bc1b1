#include "ranks.h"

#include <algorithm>
#include <cstring>

#include "futex.h"
#include "simd.h"

namespace twostroke {
namespace {

constexpr int SPINS = 2000;  // some ten microseconds, as long as a sleep and a call take. Ranks may share a core
constexpr int64_t LOOK_NS = SECOND_NS / 100;  // between two checks whether all waits were ended
constexpr int64_t PART_BYTES = 64 << 10;  // of a rank's values: fewer are done before a second thread has started

// Calls f(first, count) for parts of `count` values of `size` bytes, on as many threads as are useful.
template <class F>
void in_parts(Team *team, int64_t count, int64_t size, F f) {
    const int64_t each = PART_BYTES / size;
    run_tasks(team, size_t((count + each - 1) / each), [&](size_t task, size_t, bool) {
        const int64_t first = int64_t(task) * each;
        f(first, std::min(each, count - first));
    });
}

}  // namespace

template <class T>
simd::F RankGroup::sum_at(int64_t at, int n) const {
    simd::F sum = simd::load_up_to((const T *)slot(0) + at, n);
    for (int rank = 1; rank < ranks_; rank++) sum = simd::add(sum, simd::load_up_to((const T *)slot(rank) + at, n));
    return sum;
}

template <class T>
Met RankGroup::reduce(Team *team, T *values, int64_t count) {
    const int64_t most = slot_bytes_ / int64_t(sizeof(T)), bytes = count * int64_t(sizeof(T));
    for (int64_t done = 0; done < count; done += most) {
        T *own = values + done;
        const int64_t now = std::min(most, count - done);
        in_parts(team, now, sizeof(T), [&](int64_t first, int64_t n) {
            std::memcpy(slot(rank_) + first * int64_t(sizeof(T)), own + first, size_t(n) * sizeof(T));
        });
        if (const Met met = meet_for_sum(bytes); met != Met::ALL) return met;
        in_parts(team, now, sizeof(T), [&](int64_t first, int64_t n) {
            for (int64_t at = first; at < first + n; at += simd::W) {
                const int left = int(std::min<int64_t>(simd::W, first + n - at));
                simd::store_up_to(own + at, sum_at<T>(at, left), left);
            }
        });
        round_++;
    }
    return Met::ALL;
}

template Met RankGroup::reduce(Team *, float *, int64_t);
template Met RankGroup::reduce(Team *, BFloat16 *, int64_t);

Met RankGroup::add_partials(Team *team, float *values, int64_t count) {
    if (const Met met = meet_for_sum(count * int64_t(sizeof(float))); met != Met::ALL) return met;
    in_parts(team, count, sizeof(float), [&](int64_t first, int64_t n) {
        for (int64_t at = first; at < first + n; at += simd::W) {
            const int left = int(std::min<int64_t>(simd::W, first + n - at));
            simd::store_up_to(values + at, simd::add(simd::load_up_to(values + at, left), sum_at<float>(at, left)), left);
        }
    });
    round_++;
    return Met::ALL;
}

Met RankGroup::gather(const char *from, int64_t rows, int64_t row_bytes, int64_t whole_bytes, char *into) {
    const int64_t own_bytes = rows * row_bytes;
    int64_t most_bytes = rows > 0 ? 1 : 0;  // of a rank; every rank takes part in the first round, and learns it there
    for (int64_t done = 0; done < most_bytes; done += slot_bytes_) {
        if (done < own_bytes) std::memcpy(slot(rank_), from + done, size_t(std::min(slot_bytes_, own_bytes - done)));
        if (const Met met = meet({rows, own_bytes}); met != Met::ALL) return met;
        int64_t width = 0;  // bytes of a whole row
        for (int rank = 0; rank < ranks_; rank++) {
            if (posted(rank).rows != rows) return Met::MISMATCH;
            most_bytes = std::max(most_bytes, posted(rank).bytes);
            width += posted(rank).bytes / rows;
        }
        if (width != whole_bytes) return Met::MISMATCH;
        int64_t column = 0;
        for (int rank = 0; into && rank < ranks_; rank++) {
            const int64_t part = posted(rank).bytes / rows, end = std::min(done + slot_bytes_, posted(rank).bytes);
            for (int64_t at = done; at < end;) {
                const int64_t row = at / part, n = std::min(end, (row + 1) * part) - at;
                std::memcpy(into + row * width + column + at % part, slot(rank) + at - done, size_t(n));
                at += n;
            }
            column += part;
        }
        round_++;
    }
    return Met::ALL;
}

Met RankGroup::meet_for_sum(int64_t bytes) {
    if (const Met met = meet({1, bytes}); met != Met::ALL) return met;
    for (int rank = 0; rank < ranks_; rank++)
        if (posted(rank).rows != 1 || posted(rank).bytes != bytes) return Met::MISMATCH;
    return Met::ALL;
}

Met RankGroup::meet() {
    if (const Met met = meet({0, 0}); met != Met::ALL) return met;
    for (int rank = 0; rank < ranks_; rank++)
        if (posted(rank).rows != 0) return Met::MISMATCH;
    round_++;
    return Met::ALL;
}

// Ends the filling of a round. The round's slots are read before `round_` is increased.
Met RankGroup::meet(const Posted &posted) {
    RankCell &own = cells_[rank_];
    own.posted[round_ & 1] = posted;
    own.arrived.store(round_, std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst)) wake(own.arrived);
    for (int rank = 0; rank < ranks_; rank++)
        if (rank != rank_ && !wait_for(cells_[rank])) return Met::ABORTED;
    return is_aborted() ? Met::ABORTED : Met::ALL;
}

bool RankGroup::has_arrived(const RankCell &cell) const {
    return int32_t(cell.arrived.load(std::memory_order_acquire) - round_) >= 0;
}

bool RankGroup::wait_for(RankCell &cell) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (has_arrived(cell)) return true;
        pause_core();
    }
    cell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (!is_aborted()) {
        const uint32_t seen = cell.arrived.load(std::memory_order_seq_cst);
        if (int32_t(seen - round_) >= 0) break;
        wait_while(cell.arrived, seen, LOOK_NS);
    }
    cell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return has_arrived(cell);
}

// A rank that checked just before this still goes to sleep, and checks again after LOOK_NS.
void RankGroup::abort() {
    header_->aborted.store(1, std::memory_order_seq_cst);
    for (int rank = 0; rank < ranks_; rank++) wake(cells_[rank].arrived);
}

}  // namespace twostroke

using namespace twostroke;

TWOSTROKE_EXPORT int64_t twostroke_ranks_bytes(int32_t ranks, int64_t slot_bytes) {
    return RankGroup::bytes_of(ranks, slot_bytes);
}

TWOSTROKE_EXPORT RankGroup *twostroke_ranks_new(void *memory, int32_t rank, int32_t ranks, int64_t slot_bytes) {
    return new RankGroup(memory, rank, ranks, slot_bytes);
}

TWOSTROKE_EXPORT void twostroke_ranks_free(RankGroup *group) { delete group; }

TWOSTROKE_EXPORT int32_t twostroke_ranks_reduce(RankGroup *group, Team *team, void *values, int64_t count,
                                                int32_t is_bfloat16) {
    return int32_t(is_bfloat16 ? group->reduce(team, (BFloat16 *)values, count)
                               : group->reduce(team, (float *)values, count));
}

TWOSTROKE_EXPORT float *twostroke_ranks_partial(const RankGroup *group, int64_t count) { return group->partial(count); }

TWOSTROKE_EXPORT int32_t twostroke_ranks_add_partials(RankGroup *group, Team *team, float *values, int64_t count) {
    return int32_t(group->add_partials(team, values, count));
}

TWOSTROKE_EXPORT int32_t twostroke_ranks_gather(RankGroup *group, const char *from, int64_t rows, int64_t row_bytes,
                                                int64_t whole_bytes, char *into) {
    return int32_t(group->gather(from, rows, row_bytes, whole_bytes, into));
}

TWOSTROKE_EXPORT int32_t twostroke_ranks_meet(RankGroup *group) {
    return int32_t(group->meet());
}

TWOSTROKE_EXPORT void twostroke_ranks_abort(RankGroup *group) { group->abort(); }

TWOSTROKE_EXPORT void twostroke_ranks_beat(RankGroup *group) { group->beat(); }

TWOSTROKE_EXPORT uint64_t twostroke_ranks_beats(const RankGroup *group, int32_t rank) { return group->beats(rank); }

TWOSTROKE_EXPORT uint32_t twostroke_ranks_arrived(const RankGroup *group, int32_t rank) { return group->arrived(rank); }
