// Attention over pages of latents: one row of numbers per token, which all heads share.
//
// A row is [latent, rotated key], in plain order for all block sizes. A head's query is multiplied with the whole row;
// its value is the latent. A row of the result is summed in one order: it depends neither on other rows nor on how
// tasks are cut.

#pragma once

#include <cstdint>

#include "attention.h"

namespace twostroke {

// Rows of `AttentionStep::dtype`, one for each token and head.
struct HeadRows {
    void *at;
    int64_t token_stride, head_stride;
};

// Rotates the ends of queries [tokens, heads, head_dim - latent_rank] in place. Writes k [tokens, head_dim] with its
// end rotated into its slots.
void store_latents(Team *team, const AttentionStep &step, int64_t layer, const HeadRows &ends, const void *k,
                   int64_t k_stride);

// Writes sums of latents into out [tokens, heads, latent_rank].
void attend_latents(Team *team, const AttentionStep &step, int64_t layer, const HeadRows &q, const HeadRows &out);

}  // namespace twostroke
