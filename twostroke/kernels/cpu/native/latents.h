// Attention over pages of latents: one row of numbers per token, which all heads share.
//
// A row is [latent, rotated key], in the order of its numbers, whatever the block. A head's query meets the whole row; its
// value is the latent. A row of the result is summed in one order: it depends neither on the rows beside it nor on how
// tasks are cut.

#pragma once

#include <cstdint>

#include "attention.h"

namespace twostroke {

// Rows of `AttentionStep::dtype`, one of each token and head.
struct HeadRows {
    void *at;
    int64_t token_stride, head_stride;
};

// Rotates the ends of queries [tokens, heads, head_dim - latent_rank] in place; k [tokens, head_dim], its end rotated, goes
// to its slots.
void store_latents(Team *team, const AttentionStep &step, int64_t layer, const HeadRows &ends, const void *k,
                   int64_t k_stride);

// out [tokens, heads, latent_rank]: sums of latents.
void attend_latents(Team *team, const AttentionStep &step, int64_t layer, const HeadRows &q, const HeadRows &out);

}  // namespace twostroke
