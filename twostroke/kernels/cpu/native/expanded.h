// Attention of a prompt to latents through keys and values, which are expanded from the latents of its whole context.
//
// An absorbed query is multiplied with a whole latent, and adds up whole latents. Expanded keys and values are several
// times narrower, but first each latent has to be multiplied with the weights of all heads. So this is faster where
// many tokens of a sequence attend at once. Its results have other bits than absorbed ones. Keys and values are
// expanded for some heads at a time, rounded to bfloat16, in pieces as in pages, and dropped afterwards.

#pragma once

#include <vector>

#include "attention.h"
#include "buffer.h"
#include "linear.h"
#include "profile.h"

namespace twostroke {

// Numbers of a latent, of both parts of a head's key, and of its value.
struct LatentWidths {
    int64_t rank, plain_dim, rope_dim, value_dim;

    int64_t key_dim() const { return plain_dim + rope_dim; }
    int64_t made_dim() const { return plain_dim + value_dim; }  // of a token and head
};

// Whether the last `tokens` of a context attend with fewer operations through keys and values.
bool should_expand(const LatentWidths &widths, int64_t tokens, int64_t context);

class ExpandedAttention {
  public:
    // Begins with one sequence of a step over pages of bfloat16. `up` makes plain keys and values, head by head, from
    // latents.
    void begin(const LatentWidths &widths, const Linear &up, const AttentionStep &step, int64_t layer, int64_t sequence);

    // How many heads to expand at a time, of all heads or of those that are left.
    int64_t heads_at_once(int64_t heads) const;

    // Expands keys and values of heads first .. first + count - 1. `first` is a multiple of `heads_at_once`.
    void make(Team *team, int64_t first, int64_t count, Prepared &prepared);

    // What `make` reads and computes for this many heads.
    Work work(int64_t count) const;

    // The step that attends to what was expanded: its tokens are the sequence's, its heads the expanded ones.
    const AttentionStep &step() const { return made_step_; }

  private:
    void gather(Team *team, int64_t start, int64_t count);
    void place(Team *team, int64_t start, int64_t count, int64_t heads);
    const BFloat16 *stored(int64_t position) const;

    LatentWidths widths_ = {};
    Linear up_ = {};
    AttentionStep step_ = {}, made_step_ = {};
    int64_t layer_ = 0, sequence_ = 0, context_ = 0, pages_ = 0;
    std::vector<int32_t> tables_, starts_;
    Buffer<uint16_t> latents_, made_, pieces_;
};

}  // namespace twostroke
