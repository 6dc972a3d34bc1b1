// All layers of a decoder over one ragged batch in one call, so that there is only arithmetic between them.
//
// The residual stream is float32; inputs of matrix products are bfloat16. Each layer is: norm, qkv, [head norm], rope
// and pages, attention, output, [norm]; norm, inner, down, [norm]. For rows that are not sampled, it ends with the last
// layer's keys and values.
//
// Where a worker has several ranks, what attention and MLP add to the residual stream is a part of a sum over all of them.

#include "attention.h"
#include "buffer.h"
#include "expanded.h"
#include "experts.h"
#include "fused.h"
#include "latents.h"
#include "linear.h"
#include "low_rank.h"
#include "profile.h"
#include "ranks.h"
#include "some_sequences.h"
#include "stored.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace twostroke {

// `NativeLatents` of kernels/cpu/forward.py, field by field. The first outputs of a layer's `qkv` are queries or their
// latent; then come the latent of keys and values, and the rotated key.
struct Latents {
    int64_t projected;  // numbers of all queries, or of their latent
    int64_t rank, plain_dim, rope_dim, value_dim;  // numbers of a latent, of a head's query in two parts, of its value
    float epsilon;
    const float *norm, *query_norm;
    const Linear *queries;  // from their latent; null, as the norm is, where `qkv` makes queries
    const Linear *absorb;   // [heads] plain_dim -> rank
    const Linear *expand;   // [heads] rank -> value_dim
    const Linear *up;  // rank -> plain_dim and value_dim of each head; null where prompts are not expanded

    int64_t key_dim() const { return rank + rope_dim; }
    int64_t query_dim() const { return plain_dim + rope_dim; }
    LatentWidths widths() const { return {rank, plain_dim, rope_dim, value_dim}; }
};

// `NativeLayer` of kernels/cpu/forward.py, field by field.
struct Layer {
    Norm attention_norm;
    Linear qkv;
    const float *q_norm, *k_norm;  // both or neither
    Linear output;
    Norm mlp_norm;
    Linear inner, down;
    const float *output_norm, *down_norm;  // both or neither: of what is added to the residual stream
    const Experts *experts;  // null for a dense layer; else `inner` and `down` are the shared expert's, if there is one
    const float *sinks;      // [heads] of attention; null where there is none
    const Latents *latents;  // null where pages hold keys and values
};

// `NativeModel` of kernels/cpu/forward.py.
struct Model {
    const uint16_t *embedding;  // bfloat16 [vocab, hidden], or null
    const Linear *table;        // otherwise the quantised embedding
    const Layer *layers;
    int64_t layer_count;
    Norm norm;
    const Linear *head;  // null on a worker that never samples
    const uint16_t *positions;  // [positions, hidden]: added to the embedding. Null if nothing.
    int64_t hidden, heads, kv_heads, head_dim;
    int64_t attended;  // width of a row's attention output, all heads together
    float epsilon;
    float embedding_scale;
    float final_softcap;  // of the logits; 0: none
    int32_t is_parallel;  // attention and MLP of a layer have the same input
    RankGroup *ranks;     // the ranks that compute the rest of each layer; null where there is one rank
};

// The arguments of one step.
struct Call {
    const int32_t *tokens;
    int64_t rows;
    const int64_t *sampled;  // rows that go on to the head
    int64_t samples;         // 0: stop once the last layer's keys and values are stored
    float *logits;           // [samples, vocab]
    const AttentionStep *steps;  // of each part of the layers
    const LayerPlace *places;    // of each layer, among the steps
    KernelRecords *kernels;  // null unless a profile is taken
    const RowAdapter *adapters;  // of each row; null where no row has one
};

template <class T>
void pick(Buffer<T> &buffer, int64_t rows, const int64_t *picked, int64_t count, int64_t stride) {
    Buffer<T> kept;
    T *to = kept.rows(count, stride);
    const T *from = buffer.rows(rows, stride);
    for (int64_t r = 0; r < count; r++) {
        std::memcpy(to + r * stride, from + picked[r] * stride, size_t(stride) * sizeof(T));
    }
    std::memcpy(buffer.rows(count, stride), to, size_t(count * stride) * sizeof(T));
}

class Forward {
  public:
    explicit Forward(const Model &model) : model_(model) {}

    Met run(Team *team, const Call &call) {
        met_ = Met::ALL;
        rows_ = call.rows;
        kernels_ = call.kernels;
        layer_ = 0;
        adapters_.assign(call.adapters, call.adapters ? call.adapters + rows_ : nullptr);
        profiled(team, KernelKind::EMBEDDING, work_of_rows(rows_, model_.hidden), [&] {
            float *x = x_.rows(rows_, model_.hidden);
            embed(call, x);
        });
        for (int64_t layer = 0; layer < model_.layer_count; layer++) {
            const bool is_last = layer == model_.layer_count - 1;
            layer_ = int32_t(layer);
            const Latents *latents = model_.layers[layer].latents;
            latents ? store_latents(team, layer, *latents, call) : store(team, layer, call);
            if (is_last && call.samples == 0) return met_;
            latents ? attend_latents(team, layer, *latents, call) : attend(team, layer, call);
            if (is_last) prune(call.sampled, call.samples);
            finish(team, layer);
            if (met_ != Met::ALL) return met_;
        }
        const Linear &head = *model_.head;
        multiply(team, KernelKind::HEAD, head, normed(team, model_.norm, head, call.logits, head.outputs),
                 Into::FLOAT32);
        if (model_.final_softcap > 0) cap_rows(team, call.logits, rows_, head.outputs, model_.final_softcap);
        return met_;
    }

  private:
    void embed(const Call &call, float *x) {
        if (model_.table) {
            gather_stored(*model_.table, call.tokens, rows_, x);
            for (int64_t i = 0; i < rows_ * model_.hidden; i++) x[i] *= model_.embedding_scale;
        } else {
            gather(model_.embedding, call.tokens, rows_, model_.hidden, model_.embedding_scale, x);
        }
        if (model_.positions) add_gathered(model_.positions, call.steps->positions, rows_, model_.hidden, x);
    }

    template <class F>
    void profiled(const Team *team, KernelKind kind, const Work &work, F kernel) {
        if (!kernels_) return kernel();
        kernels_->record({0, 0, work, kind, layer_, int32_t(rows_), 0}, team, kernel);
    }

    void multiply(Team *team, KernelKind kind, const Linear &w, const Rows &rows, Into into) {
        profiled(team, kind, work_of(w, rows.count), [&] { linear(team, w, rows, into, prepared_); });
    }

    int64_t qkv_stride() const { return (model_.heads + 2 * model_.kv_heads) * model_.head_dim; }
    int64_t attended_stride() const { return model_.attended; }

    // Normalises the residual stream into the input rows of `w`.
    Rows normed(Team *team, const Norm &by, const Linear &w, void *y, int64_t y_stride) {
        uint16_t *to = normed_.rows(rows_, w.inputs);
        profiled(team, KernelKind::NORM, work_of_rows(rows_, model_.hidden), [&] {
            norm_rows(team, x_.rows(rows_, model_.hidden), rows_, model_.hidden, by, model_.epsilon, to, w.inputs);
        });
        return {to, w.inputs, rows_, y, y_stride};
    }

    void store(Team *team, int64_t index, const Call &call) {
        const Layer &layer = model_.layers[index];
        const int64_t dim = model_.head_dim, stride = qkv_stride();
        uint16_t *q = qkv_.rows(rows_, stride), *k = q + model_.heads * dim, *v = k + model_.kv_heads * dim;
        const Rows rows = normed(team, layer.attention_norm, layer.qkv, q, stride);
        multiply(team, KernelKind::QKV, layer.qkv, rows, Into::BFLOAT16);
        adapt(team, {{&AdapterLayer::q, 0, SIDE_BY_SIDE},
                     {&AdapterLayer::k, k - q, SIDE_BY_SIDE},
                     {&AdapterLayer::v, v - q, SIDE_BY_SIDE}}, rows, Into::BFLOAT16);
        if (layer.q_norm) {
            profiled(team, KernelKind::HEAD_NORM, work_of_rows(rows_, (model_.heads + model_.kv_heads) * dim), [&] {
                head_norm(team, q, rows_, stride, model_.heads, dim, layer.q_norm, model_.epsilon);
                head_norm(team, k, rows_, stride, model_.kv_heads, dim, layer.k_norm, model_.epsilon);
            });
        }
        profiled(team, KernelKind::STORE, work_of_rows(rows_, stride), [&] {
            const LayerPlace &place = call.places[index];
            store_kv(team, call.steps[place.step], place.layer, q, stride, k, stride, v, stride);
        });
    }

    void attend(Team *team, int64_t layer, const Call &call) {
        uint16_t *q = qkv_.rows(rows_, qkv_stride()), *out = attended_.rows(rows_, attended_stride());
        const LayerPlace &place = call.places[layer];
        const AttentionStep &step = call.steps[place.step];
        const Queries queries{q, qkv_stride(), out, attended_stride(), model_.layers[layer].sinks};
        profiled(team, KernelKind::ATTENTION, kernels_ ? work_of_attention(step) : Work{},
                 [&] { twostroke::attend(team, step, place.layer, queries); });
    }

    void store_latents(Team *team, int64_t index, const Latents &latents, const Call &call) {
        const Layer &layer = model_.layers[index];
        const int64_t key_dim = latents.key_dim(), width = latents.projected, stride = width + key_dim;
        uint16_t *projected = qkv_.rows(rows_, stride), *k = projected + width;
        const Rows rows = normed(team, layer.attention_norm, layer.qkv, projected, stride);
        multiply(team, KernelKind::QKV, layer.qkv, rows, Into::BFLOAT16);
        profiled(team, KernelKind::HEAD_NORM, work_of_rows(rows_, latents.rank), [&] {
            head_norm(team, k, rows_, stride, 1, latents.rank, latents.norm, latents.epsilon);
        });
        latent_queries_ = {projected, stride, latents.query_dim()};
        if (latents.queries) latent_queries_ = queries_of(team, latents, projected, stride);
        HeadRows ends = latent_queries_;
        ends.at = (uint16_t *)ends.at + latents.plain_dim;
        profiled(team, KernelKind::STORE, work_of_rows(rows_, model_.heads * latents.rope_dim + key_dim), [&] {
            const LayerPlace &place = call.places[index];
            twostroke::store_latents(team, call.steps[place.step], place.layer, ends, k, stride);
        });
    }

    // Makes queries from their latents, which are the first of the projected numbers.
    HeadRows queries_of(Team *team, const Latents &latents, const uint16_t *projected, int64_t stride) {
        const Linear &w = *latents.queries;
        const int64_t rank = latents.projected;
        uint16_t *latent = query_latents_.rows(rows_, w.inputs);
        for (int64_t r = 0; r < rows_; r++)
            std::memcpy(latent + r * w.inputs, projected + r * stride, size_t(rank) * sizeof *latent);
        profiled(team, KernelKind::HEAD_NORM, work_of_rows(rows_, rank), [&] {
            head_norm(team, latent, rows_, w.inputs, 1, rank, latents.query_norm, latents.epsilon);
        });
        uint16_t *q = queries_.rows(rows_, w.outputs);
        multiply(team, KernelKind::LATENT_QUERIES, w, {latent, w.inputs, rows_, q, w.outputs}, Into::BFLOAT16);
        return {q, w.outputs, latents.query_dim()};
    }

    void attend_latents(Team *team, int64_t index, const Latents &latents, const Call &call) {
        const LayerPlace &place = call.places[index];
        const AttentionStep &step = call.steps[place.step];
        absorbed_sequences_.clear();
        for (int64_t sequence = 0; sequence < step.sequences; sequence++) {
            const int64_t first = step.query_starts[sequence], end = step.query_starts[sequence + 1];
            const bool may_expand = latents.up && step.form == Form::BFLOAT16 && first < end;
            if (may_expand && should_expand(latents.widths(), end - first, step.positions[end - 1] + 1))
                attend_expanded(team, latents, step, place.layer, sequence);
            else
                absorbed_sequences_.push_back(sequence);
        }
        if (absorbed_sequences_.empty()) return;
        const SomeSequences some(step, absorbed_sequences_);
        attend_absorbed(team, latents, some, place.layer);
    }

    void attend_expanded(Team *team, const Latents &latents, const AttentionStep &step, int64_t layer,
                         int64_t sequence) {
        const int64_t first_row = step.query_starts[sequence], dim = latents.value_dim;
        const auto *q = (const uint16_t *)latent_queries_.at + first_row * latent_queries_.token_stride;
        uint16_t *out = attended_.rows(rows_, attended_stride()) + first_row * attended_stride();
        expanded_.begin(latents.widths(), *latents.up, step, layer, sequence);
        const int64_t at_once = expanded_.heads_at_once(model_.heads);
        for (int64_t head = 0; head < model_.heads; head += at_once) {
            const int64_t count = std::min(at_once, model_.heads - head);
            profiled(team, KernelKind::EXPAND, kernels_ ? expanded_.work(count) : Work{},
                     [&] { expanded_.make(team, head, count, prepared_); });
            const Queries queries{q + head * latent_queries_.head_stride, latent_queries_.token_stride,
                                  out + head * dim, attended_stride(), nullptr};
            profiled(team, KernelKind::ATTENTION, kernels_ ? work_of_attention(expanded_.step()) : Work{},
                     [&] { twostroke::attend(team, expanded_.step(), 0, queries); });
        }
    }

    // Makes absorbed queries of some sequences, which attend to latents, head by head, since each head has its own
    // weights.
    HeadRows absorb(Team *team, const Latents &latents, const std::vector<int64_t> &rows) {
        const int64_t inputs = latents.absorb->inputs, key_dim = latents.key_dim(), count = int64_t(rows.size());
        const int64_t all = model_.heads * count;
        uint16_t *plain = plain_.rows(all, inputs), *absorbed = absorbed_.rows(all, key_dim);
        for (int64_t head = 0; head < model_.heads; head++) {
            for (int64_t r = 0; r < count; r++) {
                const auto *from = (const uint16_t *)latent_queries_.at +
                                   rows[size_t(r)] * latent_queries_.token_stride + head * latents.query_dim();
                const int64_t row = head * count + r;
                std::memcpy(plain + row * inputs, from, size_t(latents.plain_dim) * sizeof *from);
                std::memcpy(absorbed + row * key_dim + latents.rank, from + latents.plain_dim,
                            size_t(latents.rope_dim) * sizeof *from);
            }
        }
        by_head(team, KernelKind::ABSORB, latents.absorb, count, {plain, inputs, all, absorbed, key_dim});
        return {absorbed, key_dim, count * key_dim};
    }

    void attend_absorbed(Team *team, const Latents &latents, const SomeSequences &some, int64_t layer) {
        const int64_t inputs = latents.expand->inputs, dim = latents.value_dim, count = int64_t(some.rows.size());
        const HeadRows q = absorb(team, latents, some.rows);
        const int64_t all = model_.heads * count;
        const HeadRows sums{latent_sums_.rows(all, inputs), inputs, count * inputs};
        profiled(team, KernelKind::ATTENTION, kernels_ ? work_of_attention(some.step) : Work{},
                 [&] { twostroke::attend_latents(team, some.step, layer, q, sums); });
        uint16_t *values = values_.rows(all, dim), *attended = attended_.rows(rows_, attended_stride());
        by_head(team, KernelKind::EXPAND, latents.expand, count, {(const uint16_t *)sums.at, inputs, all, values, dim});
        for (int64_t head = 0; head < model_.heads; head++)
            for (int64_t r = 0; r < count; r++)
                std::memcpy(attended + some.rows[size_t(r)] * attended_stride() + head * dim,
                            values + (head * count + r) * dim, size_t(dim) * sizeof *values);
    }

    // Multiplies `each` rows of every head, which lie head by head, with the head's weights.
    void by_head(Team *team, KernelKind kind, const Linear *weights, int64_t each, const Rows &rows) {
        heads_.clear();
        for (int64_t head = 0; head < model_.heads; head++)
            heads_.push_back({weights + head, head * each, (head + 1) * each});
        profiled(team, kind, kernels_ ? work_of(heads_) : Work{},
                 [&] { linear(team, heads_, rows, Into::BFLOAT16, prepared_); });
    }

    // Keeps only these rows for what follows.
    void prune(const int64_t *sampled, int64_t count) {
        pick(x_, rows_, sampled, count, model_.hidden);
        pick(attended_, rows_, sampled, count, attended_stride());
        std::vector<RowAdapter> kept;
        for (int64_t r = 0; r < count && !adapters_.empty(); r++) kept.push_back(adapters_[size_t(sampled[r])]);
        adapters_ = std::move(kept);
        rows_ = count;
    }

    // Adds the products of the rows' adapters to parts of this layer's product, whose rows are those of `into`.
    void adapt(Team *team, std::initializer_list<AddedPart> parts, const Rows &rows, Into into) {
        if (adapters_.empty()) return;
        const RowAdapter *of_row = adapters_.data();
        profiled(team, KernelKind::ADAPTERS, kernels_ ? work_of(of_row, layer_, parts, rows.count) : Work{},
                 [&] { add_low_rank(team, of_row, layer_, parts, rows, into); });
    }

    // Computes the layer from the attention output to its end.
    void finish(Team *team, int64_t index) {
        const Layer &layer = model_.layers[index];
        const Rows attended{attended_.rows(rows_, attended_stride()), attended_stride(), rows_, nullptr, 0};
        if (model_.is_parallel) begin_mlp(team, layer);
        add(team, KernelKind::OUTPUT, layer.output, attended, layer.output_norm, &AdapterLayer::output);
        if (layer.experts) return add_experts(team, layer, *layer.experts);
        if (!model_.is_parallel) begin_mlp(team, layer);
        const int64_t inputs = layer.down.inputs;
        add(team, KernelKind::DOWN, layer.down, {inner_.rows(rows_, inputs), inputs, rows_, nullptr, 0},
            layer.down_norm, &AdapterLayer::down);
    }

    void begin_mlp(Team *team, const Layer &layer) {
        uint16_t *inner = inner_.rows(rows_, layer.down.inputs);
        const Rows rows = normed(team, layer.mlp_norm, layer.inner, inner, layer.down.inputs);
        if (adapters_.empty()) return multiply(team, KernelKind::GATED, layer.inner, rows, Into::BFLOAT16);
        adapt_gated(team, layer.inner, rows);
    }

    // Computes gates and values, adds the adapters' products, and then applies the activation.
    void adapt_gated(Team *team, const Linear &w, const Rows &rows) {
        const int64_t stride = panels_of(w) * PANEL;
        Rows sums = rows;
        sums.y = sums_.rows(rows_, stride);
        sums.y_stride = stride;
        multiply(team, KernelKind::GATED, w, sums, Into::SUMS);
        adapt(team, {{&AdapterLayer::gate, 0, PANEL}, {&AdapterLayer::up, PANEL / 2, PANEL}}, sums, Into::ADD);
        profiled(team, KernelKind::ACTIVATION, work_of_rows(rows_, stride),
                 [&] { finish_sums(team, w, (const float *)sums.y, rows, Into::BFLOAT16); });
    }

    // Adds the outputs of each row's experts to the residual stream.
    void add_experts(Team *team, const Layer &layer, const Experts &experts) {
        const int64_t hidden = model_.hidden, gates = experts.router.outputs;
        float *logits = logits_.rows(rows_, gates);
        const Rows rows = normed(team, layer.mlp_norm, experts.router, logits, gates);
        profiled(team, KernelKind::ROUTER, work_of(experts.router, rows_), [&] {
            linear(team, experts.router, rows, Into::FLOAT32, prepared_);
            routing_.route(team, experts, logits, rows_, gates);
        });
        const float *shared = experts.has_shared ? shared_expert(team, layer, rows) : nullptr;
        const int64_t pairs = routing_.pairs(), inner = experts.table->down.inputs;
        uint16_t *grouped = grouped_.rows(pairs, rows.x_stride), *between = expert_inner_.rows(pairs, inner);
        routing_.gather(team, rows.x, rows.x_stride, grouped);
        by_expert(team, KernelKind::EXPERTS_GATED, routing_.groups(experts, &Expert::inner),
                  {grouped, rows.x_stride, pairs, between, inner}, Into::BFLOAT16);
        float *answers = answers_.rows(pairs, hidden);
        by_expert(team, KernelKind::EXPERTS_DOWN, routing_.groups(experts, &Expert::down),
                  {between, inner, pairs, answers, hidden}, Into::FLOAT32);
        profiled(team, KernelKind::EXPERTS_SUM, work_of_rows(pairs, hidden), [&] {
            const float *shared_gates = experts.has_shared_gate ? logits + experts.count : nullptr;
            float *sums = model_.ranks ? part_of_sum() : x_.rows(rows_, hidden);
            if (model_.ranks) std::fill_n(sums, rows_ * hidden, 0.0f);
            routing_.add(team, experts, answers, shared, shared_gates, gates, hidden, sums);
        });
        if (model_.ranks) add_sum(team);
    }

    // The memory in which this rank computes its part of what all ranks add to the residual stream.
    float *part_of_sum() {
        const int64_t count = rows_ * model_.hidden;
        float *shared = model_.ranks->partial(count);
        return shared ? shared : ranked_.rows(rows_, model_.hidden);
    }

    // Adds all ranks' parts to the residual stream.
    void add_sum(Team *team) {
        if (met_ != Met::ALL) return;
        const int64_t count = rows_ * model_.hidden;
        float *x = x_.rows(rows_, model_.hidden);
        profiled(team, KernelKind::RANKS_SUM, work_of_rows(rows_, model_.hidden), [&] {
            if (model_.ranks->partial(count)) {
                met_ = model_.ranks->add_partials(team, x, count);
                return;
            }
            const float *parts = ranked_.rows(rows_, model_.hidden);
            met_ = model_.ranks->reduce(team, ranked_.rows(rows_, model_.hidden), count);
            for (int64_t i = 0; i < count; i++) x[i] += parts[i];
        });
    }

    // Replaces rows [hidden] by their sum over all ranks.
    void reduce(Team *team, float *rows) {
        if (met_ != Met::ALL) return;
        profiled(team, KernelKind::RANKS_SUM, work_of_rows(rows_, model_.hidden),
                 [&] { met_ = model_.ranks->reduce(team, rows, rows_ * model_.hidden); });
    }

    void by_expert(Team *team, KernelKind kind, const std::vector<RowGroup> &groups, const Rows &rows, Into into) {
        profiled(team, kind, kernels_ ? work_of(groups) : Work{}, [&] { linear(team, groups, rows, into, prepared_); });
    }

    // The output of the shared expert for the normalised rows.
    const float *shared_expert(Team *team, const Layer &layer, Rows rows) {
        const int64_t inner = layer.down.inputs;
        uint16_t *between = shared_inner_.rows(rows_, inner);
        float *answers = added_.rows(rows_, model_.hidden);
        rows.y = between;
        rows.y_stride = inner;
        multiply(team, KernelKind::GATED, layer.inner, rows, Into::BFLOAT16);
        multiply(team, KernelKind::DOWN, layer.down, {between, inner, rows_, answers, model_.hidden}, Into::FLOAT32);
        return answers;
    }

    // Adds a product's rows to the residual stream, with the adapters' products, and normalised if there is a norm.
    void add(Team *team, KernelKind kind, const Linear &w, Rows rows, const float *norm, LowRank AdapterLayer::*part) {
        float *x = x_.rows(rows_, model_.hidden);
        rows.y = norm ? added_.rows(rows_, model_.hidden) : model_.ranks ? part_of_sum() : x;
        rows.y_stride = model_.hidden;
        multiply(team, kind, w, rows, norm || model_.ranks ? Into::FLOAT32 : Into::ADD);
        adapt(team, {{part, 0, SIDE_BY_SIDE}}, rows, Into::ADD);
        if (!norm) return model_.ranks ? add_sum(team) : void();
        if (model_.ranks) reduce(team, added_.rows(rows_, model_.hidden));
        profiled(team, KernelKind::NORM, work_of_rows(rows_, model_.hidden), [&] {
            add_norm(team, (const float *)rows.y, rows_, model_.hidden, {norm, nullptr}, model_.epsilon, x);
        });
    }

    const Model model_;
    Met met_ = Met::ALL;  // how the ranks of this step met so far
    int64_t rows_ = 0;
    int32_t layer_ = 0;
    KernelRecords *kernels_ = nullptr;
    Buffer<float> x_, added_, logits_, answers_, sums_, ranked_;
    Buffer<uint16_t> normed_, qkv_, attended_, inner_, shared_inner_, grouped_, expert_inner_;
    Buffer<uint16_t> query_latents_, queries_, plain_, absorbed_, latent_sums_, values_;
    std::vector<RowGroup> heads_;
    HeadRows latent_queries_ = {};  // [plain_dim, rope_dim] of each token and head of the layer, rotated
    std::vector<int64_t> absorbed_sequences_;
    ExpandedAttention expanded_;
    Prepared prepared_;
    Routing routing_;
    std::vector<RowAdapter> adapters_;  // of each row; empty where no row has one
};

}  // namespace twostroke

using namespace twostroke;

TWOSTROKE_EXPORT Forward *twostroke_forward_new(const Model *model) { return new Forward(*model); }

TWOSTROKE_EXPORT void twostroke_forward_free(Forward *forward) { delete forward; }

TWOSTROKE_EXPORT int32_t twostroke_forward_run(Forward *forward, Team *team, const Call *call) {
    return int32_t(forward->run(team, *call));
}
