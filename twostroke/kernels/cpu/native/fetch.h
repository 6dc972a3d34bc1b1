// Prefetches keys and values shortly before they are multiplied, in the same order.
//
// Processors drop prefetches that come faster than memory delivers. If a whole split were prefetched at once, most of
// it would be lost. So it prefetches one head's part of a few pages ahead of the reading, in step with it.

#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "page.h"

namespace twostroke {

// The place of a split: offsets of its pieces in bytes into the pool for the layer's first kv head, and those of their
// scales.
struct Place {
    int64_t start = 0;
    int count = 0;  // of tokens
    int hidden = 0;  // leading tokens that no row attends to; pieces of only such tokens are not read

    int first_piece() const { return hidden / PIECE; }
    int64_t offsets[PIECES] = {}, scale_offsets[PIECES] = {};
};

constexpr int STREAMS = std::max(1, 4 * simd::W / PIECE), LINE = 64;

// The next cache lines to prefetch in each stream.
struct Streams {
    const char *at[STREAMS];

    void fetch(int line) const {
        for (const char *stream : at) __builtin_prefetch(stream + line * LINE);
    }
};

// What is read of one split: the keys of some heads, then their values. STREAMS pieces are read side by side, which
// memory delivers faster than one after the other.
class Reading {
  public:
    Reading() = default;

    // `keys` are the first head's. The place's offsets count from there.
    Reading(const Place &place, const char *keys, const AttentionStep &step, int64_t element_bytes, bool has_scales,
            int heads)
        : place_(place), keys_(keys), value_offset_(step.value_offset), head_stride_(step.head_stride), heads_(heads),
          has_scales_(has_scales), lines_{lines_of(step.head_dim, element_bytes), lines_of(step.value_numbers(), element_bytes)},
          pieces_((place.count + PIECE - 1) / PIECE), piece_(place.first_piece()) {
        turn();
    }

    // Number of parts of a head that are prefetched ahead of what is multiplied: about as many bytes in every form.
    int lead() const { return has_scales_ ? 2 : 1; }

    int lines_left() const { return left_; }  // left in the present streams; 0 at the end

    // Takes the next `lines` lines of each stream, or those that its piece still has.
    Streams take(int lines) {
        const Streams found = streams_;
        for (const char *&at : streams_.at) at += lines * LINE;
        left_ -= lines;
        if (left_ <= 0) turn();
        return found;
    }

  private:
    static int lines_of(int64_t dim, int64_t element_bytes) { return int(PIECE * dim * element_bytes / LINE); }

    // Moves the streams on: after one head's part of the pieces to the next head's, then to the next pieces, then to
    // the values.
    void turn() {
        left_ = 0;
        const int lines = lines_[is_value_];
        if (piece_ >= pieces_ || lines == 0) return;
        const int64_t from = (is_value_ ? value_offset_ : 0) + head_ * head_stride_;
        left_ = lines * std::min(STREAMS, pieces_ - piece_) / STREAMS;  // fewer pieces are multiplied in fewer steps
        for (int s = 0; s < STREAMS; s++) {
            const int line = s * left_;
            streams_.at[s] = keys_ + from + place_.offsets[piece_ + line / lines] + line % lines * LINE;
        }
        if (has_scales_ && !is_value_) fetch_scales();
        if (++head_ < heads_) return;
        head_ = 0;
        piece_ += STREAMS;
        if (piece_ < pieces_ || is_value_) return;
        is_value_ = true;
        piece_ = place_.first_piece();
    }

    // Both scales of a piece are needed before its values are read.
    void fetch_scales() const {
        const char *keys = keys_ + head_ * head_stride_;
        for (int piece = piece_; piece < std::min(piece_ + STREAMS, pieces_); piece++)
            for (const char *part : {keys, keys + value_offset_})
                __builtin_prefetch(part + place_.scale_offsets[piece]);
    }

    Place place_;
    const char *keys_ = nullptr;
    int64_t value_offset_ = 0, head_stride_ = 0;
    int heads_ = 0;
    bool has_scales_ = false;
    int lines_[2] = {}, left_ = 0;  // of a piece of keys, and of values
    int pieces_ = 0, piece_ = 0, head_ = 0;
    bool is_value_ = false;
    Streams streams_{};
};

class Fetch {
  public:
    // Prefetches the first parts of a head, each of STREAMS pieces. From then on prefetches stay as many parts ahead of
    // what is multiplied.
    void start(const Reading &first) {
        now_ = first;
        for (int part = 0; part < first.lead(); part++) {
            const int lines = now_.lines_left();
            const Streams streams = now_.take(lines);
            for (int line = 0; line < lines; line++) streams.fetch(line);
        }
    }

    // Sets what is read after the present reading.
    void follow(const Reading &next) { next_ = next; }

    // Takes lines to prefetch while as many are multiplied. When there are none left, it returns `here`, which is in
    // the cache already.
    Streams take(int lines, const void *here) {
        if (now_.lines_left() == 0) {
            if (next_.lines_left() == 0) return idle((const char *)here);
            now_ = next_;
            next_ = {};
        }
        return now_.take(lines);
    }

  private:
    static Streams idle(const char *here) {
        Streams streams;
        std::fill(streams.at, streams.at + STREAMS, here);
        return streams;
    }

    Reading now_, next_;
};

}  // namespace twostroke
