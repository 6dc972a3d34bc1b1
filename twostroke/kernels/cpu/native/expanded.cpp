#include "expanded.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "page.h"

namespace twostroke {
namespace {

constexpr int64_t FEWEST_TOKENS = 32;  // fewer are a prompt's tail or a draft, which the next decode step continues
constexpr int64_t TILE = 512;          // tokens whose latents are multiplied at a time: they stay in a near cache
constexpr int64_t MADE_BYTES = 32 << 20;  // of keys and values: at 4,096 tokens, enough heads for all threads

// The product of only some outputs, which begin with a panel.
Linear outputs_of(const Linear &w, int64_t first, int64_t count) {
    const int64_t panel = first / PANEL, weights = panel * PANEL * w.inputs;
    Linear part = w;
    part.outputs = count;
    part.panels = (const char *)w.panels + weights * int64_t(w.kind == BFLOAT16 ? sizeof(uint16_t) : sizeof(int8_t));
    if (w.kind == INT8) {
        part.scales = (const float *)w.scales + weights / GROUP;
        part.sums = w.sums + weights / GROUP;
    }
    return part;
}

}  // namespace

bool should_expand(const LatentWidths &widths, int64_t tokens, int64_t context) {
    if (tokens < FEWEST_TOKENS || widths.plain_dim % 2 || widths.rope_dim % 2) return false;
    const double pairs = double(tokens) * (double(context) - double(tokens - 1) / 2);
    const double saved = double(2 * widths.rank - widths.made_dim()), up = double(widths.rank * widths.made_dim());
    return pairs * saved > double(context - tokens) * up;  // absorbed tokens also use both halves of the weights
}

void ExpandedAttention::begin(const LatentWidths &widths, const Linear &up, const AttentionStep &step, int64_t layer,
                              int64_t sequence) {
    widths_ = widths, up_ = up, step_ = step, layer_ = layer, sequence_ = sequence;
    const int64_t first = step.query_starts[sequence], tokens = step.query_starts[sequence + 1] - first;
    context_ = step.positions[first + tokens - 1] + 1;
    pages_ = (context_ + PIECE - 1) / PIECE;
    tables_.resize(size_t(pages_));
    std::iota(tables_.begin(), tables_.end(), 0);
    starts_ = {0, int32_t(tokens)};
    AttentionStep &made = made_step_ = {};
    made.page_stride = PIECE * (widths.key_dim() + widths.value_dim) * int64_t(sizeof(BFloat16));
    made.head_stride = pages_ * made.page_stride;
    made.value_offset = PIECE * widths.key_dim() * int64_t(sizeof(BFloat16));
    made.block = PIECE, made.head_dim = widths.key_dim(), made.value_dim = widths.value_dim;
    made.tokens = tokens, made.positions = step.positions + first;
    made.sequences = 1, made.query_starts = starts_.data();
    made.block_tables = tables_.data(), made.table_stride = pages_;
    made.rules = step.rules + layer, made.dtype = step.dtype, made.form = Form::BFLOAT16;
}

int64_t ExpandedAttention::heads_at_once(int64_t heads) const {
    const int64_t whole = PANEL / std::gcd(PANEL, widths_.made_dim());  // so that the next ones begin with a panel
    const int64_t fitting = MADE_BYTES / made_step_.head_stride / whole * whole;
    return std::min(heads, std::max(whole, fitting));
}

void ExpandedAttention::make(Team *team, int64_t first, int64_t count, Prepared &prepared) {
    made_step_.pool = pieces_.rows(count, made_step_.head_stride / int64_t(sizeof(BFloat16)));
    made_step_.heads = made_step_.kv_heads = count;
    const int64_t outputs = count * widths_.made_dim();
    const Linear up = outputs_of(up_, first * widths_.made_dim(), outputs);
    for (int64_t start = 0; start < context_; start += TILE) {
        const int64_t tokens = std::min(TILE, context_ - start);
        gather(team, start, tokens);
        const Rows rows{latents_.rows(tokens, up.inputs), up.inputs, tokens, made_.rows(tokens, outputs), outputs};
        linear(team, up, rows, Into::BFLOAT16, prepared);
        place(team, start, tokens, count);
    }
}

Work ExpandedAttention::work(int64_t count) const {
    return work_of(outputs_of(up_, 0, count * widths_.made_dim()), context_);
}

const BFloat16 *ExpandedAttention::stored(int64_t position) const {
    const int64_t page = step_.block_tables[sequence_ * step_.table_stride + position / step_.block];
    const char *of_layer = (const char *)step_.pool + page * step_.page_stride + layer_ * step_.layer_stride;
    return (const BFloat16 *)of_layer + position % step_.block * step_.head_dim;
}

// Copies the latents of a tile into rows. The numbers after them, up to the product's inputs, are zero.
void ExpandedAttention::gather(Team *team, int64_t start, int64_t count) {
    uint16_t *rows = latents_.rows(TILE, up_.inputs);
    run_parts(team, [&](int part, int parts) {
        for (int64_t t = count * part / parts; t < count * (part + 1) / parts; t++)
            std::memcpy(rows + t * up_.inputs, stored(start + t), size_t(widths_.rank) * sizeof(BFloat16));
    });
}

// Puts keys, with their rotated part, and values of a tile into pieces.
void ExpandedAttention::place(Team *team, int64_t start, int64_t count, int64_t heads) {
    const int64_t made_dim = widths_.made_dim(), plain = widths_.plain_dim, pieces = (count + PIECE - 1) / PIECE;
    const auto *rows = (const BFloat16 *)made_.rows(count, heads * made_dim);
    run_parts(team, [&](int part, int parts) {
        for (int64_t p = pieces * part / parts; p < pieces * (part + 1) / parts; p++) {
            for (int64_t head = 0; head < heads; head++) {
                char *piece = (char *)made_step_.pool + head * made_step_.head_stride +
                              (start / PIECE + p) * made_step_.page_stride;
                auto *keys = (BFloat16 *)piece, *values = (BFloat16 *)(piece + made_step_.value_offset);
                for (int64_t t = 0; t < std::min<int64_t>(PIECE, count - p * PIECE); t++) {
                    const BFloat16 *row = rows + ((p * PIECE + t) * heads + head) * made_dim;
                    put_key(row, plain, t, keys);
                    put_key(stored(start + p * PIECE + t) + widths_.rank, widths_.rope_dim, t, keys + plain * PIECE);
                    put_value(row + plain, widths_.value_dim, t, values);
                }
            }
        }
    });
}

}  // namespace twostroke
