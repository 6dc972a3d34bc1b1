// Attention over pages for one step of a ragged batch: its arguments, and its two functions.
//
// The numbers of a pool are [pages, layers, 2, kv_heads, block, head_dim], their rows in the order of page.h; of
// latents [pages, layers, 1, 1, block, head_dim], see latents.h. Strides are in bytes. After one head's keys of a block
// lie their scales, and after its values, too, where the form has scales.

#pragma once

#include <cstdint>

#include "simd.h"
#include "team.h"

namespace twostroke {

// How pages store a number. Numbers of one byte have a scale per token and head. Those of 4 bits are described in
// nibbles.h.
enum class Form : int32_t { FLOAT32, BFLOAT16, FLOAT16, INT8, FP8_E4M3, FP8_E5M2, INT4 };

// The rule of one layer: `NativeRule` of attention.py, field by field.
struct AttentionRule {
    float scale;
    float softcap;   // scores s, scaled, become softcap * tanh(s / softcap); 0: they stay as they are
    int64_t window;  // tokens that a token attends to, itself included; 0: all up to itself
    int64_t rope;    // index of the model's rope

    // The first position that a token attends to.
    int64_t first_visible(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
};

// `NativeStep` of attention.py, field by field.
struct AttentionStep {
    void *pool;
    int64_t page_stride, layer_stride, value_offset, head_stride;
    int64_t block, heads, kv_heads, head_dim;
    int64_t tokens;
    const float *cosines, *sines;  // [tokens, ropes, half of what is rotated]
    int64_t ropes;
    const int64_t *write_slots;    // [tokens]
    const int32_t *positions;      // [tokens]: a token attends to ..position of its sequence, whose pages hold them
    int64_t sequences;
    const int32_t *query_starts;  // [sequences + 1]
    // [sequences, table_stride]. Entries of blocks that a window hides from all rows are not read.
    const int32_t *block_tables;
    int64_t table_stride;
    const AttentionRule *rules;  // of each layer of the pool
    int32_t dtype;  // 0 float32, 1 bfloat16, 2 float16: of q, k, v and what is returned
    Form form;      // of the pool
    // [layer of the pool, kv_heads, head_dim]: subtracted from keys with scales before they are stored. Null if nothing
    // is.
    const float *key_centers;
    // Blocks of INT4 pages that are not full yet, as numbers of `dtype`. Null for other forms.
    void *exact_pool;
    int64_t exact_page_stride, exact_layer_stride, exact_value_offset, exact_head_stride;
    const int64_t *exact_slots;  // [tokens]: the exact slot of every token, whether or not it is written into the pool
    int64_t latent_rank;  // numbers of a latent, after which queries and keys are rotated; 0: no latents
    int64_t value_dim;    // numbers of a value, where a block is one piece of numbers without scales; 0: head_dim

    int64_t value_numbers() const { return value_dim ? value_dim : head_dim; }
};

// `NativePlace` of attention.py: the step that a layer of the model belongs to, and the layer's index in it. Layers of
// another form, or in other pages, have another step.
struct LayerPlace {
    int32_t step, layer;
};

// Calls f with a value of the type that q, k, v and the result have.
template <class F>
inline void with_dtype(int32_t dtype, F f) {
    switch (dtype) {
        case 0: return f(float());
        case 1: return f(BFloat16());
        case 2: return f(Float16());
    }
}

// Rotates q in place, and writes the rotated k, and v, into their slots. Strides are those of tokens; heads lie side by
// side.
void store_kv(Team *team, const AttentionStep &step, int64_t layer, void *q, int64_t q_stride, const void *k,
              int64_t k_stride, const void *v, int64_t v_stride);

// The query rows, and where the results go.
struct Queries {
    const void *rows;
    int64_t stride;      // of tokens
    void *out;           // [tokens, heads * value_dim], heads side by side
    int64_t out_stride;  // of tokens
    const float *sinks;  // [heads]: an additional scaled score of each softmax, whose value is zero; or null
};

void attend(Team *team, const AttentionStep &step, int64_t layer, const Queries &queries);

}  // namespace twostroke
