// Attention over pages of 4-bit numbers. A row attends to the exact numbers of its own token's block, and to the stored
// numbers of the blocks before it.
//
// Scales stay out of the products' inner loops. Keys have them per channel: for each block, the queries are multiplied
// by them, once for its 16 tokens. Values have them per token and group of channels: weights are multiplied by them.
// Centers become one sum per row and block, or per row and group.

#include "attend_nibbles.h"

#include "attend_tasks.h"
#include "nibbles.h"

namespace twostroke {
namespace {

constexpr int BLOCKS_AT_ONCE = std::max(1, SOME_VECTORS / VECTORS_PER_PIECE);  // of keys that are multiplied together
constexpr int TURNS_PER_WORD = 2;  // how often more lines are prefetched during the products of a word

// Converts the eight numbers of a word to floats one after the other: to 2^place times the number, since its bits are
// not moved. Rows hold 2^-place times their factors, so that the products keep their bits.
template <class ExactMath>
struct NibbleFloats {
    using Exact = ExactMath;
    static constexpr int STEPS = PER_NIBBLE_WORD;
    static constexpr int HIGHEST_PLACE = 24;  // four bits from there on never set the sign bit

    static constexpr int place(int step) { return std::min(nibble_shift(step), HIGHEST_PLACE); }
    static constexpr float power(int step) { return float(1 << place(step)); }

    template <int STEP>
    static simd::F column(simd::I words) {
        const simd::I moved = simd::shift_right<nibble_shift(STEP) - place(STEP)>(words);
        return simd::sub(simd::to_floats(simd::keep_bits(moved, 15 << place(STEP))), simd::set1(7.5f * power(STEP)));
    }

    static simd::F multiply_add(simd::F a, simd::F b, simd::F sum) { return simd::fma(a, b, sum); }
    static void store(float *row, int column, simd::F low, simd::F high) {
        alignas(64) static constexpr float INVERSE[16] = {  // twice: vectors are of 4, 8 or 16
            1 / power(0), 1 / power(1), 1 / power(2), 1 / power(3), 1 / power(4), 1 / power(5),
            1 / power(6), 1 / power(7), 1 / power(0), 1 / power(1), 1 / power(2), 1 / power(3),
            1 / power(4), 1 / power(5), 1 / power(6), 1 / power(7)};
        simd::store(row + column, simd::mul(low, simd::load(INVERSE)));
        simd::store(row + column + simd::W, simd::mul(high, simd::load(INVERSE + simd::W % PER_NIBBLE_WORD)));
    }
};

#if defined(__AVX512BF16__)
// Converts four pairs of numbers of a word to pairs of bfloat16 one after the other.
struct NibblePairs {
    using Exact = PairMath;
    static constexpr int STEPS = PER_NIBBLE_WORD / 2;

    template <int STEP>
    static simd::F column(simd::I words) {
        return simd::nibble_pairs<STEP>(words);
    }

    static simd::F multiply_add(simd::F a, simd::F b, simd::F sum) { return simd::fma_pairs(a, b, sum); }
    static void store(float *row, int column, simd::F low, simd::F high) {
        PairMath::store_weights(row, column, low, high);
    }
};
#endif

// Prefetches what the next split reads, some lines at a time while this one is multiplied: processors drop prefetches
// that come faster than memory delivers.
class NibbleFetch {
  public:
    // `turns`: how often `some` will be called, each time for the same share of what was added. `all` prefetches the
    // rest.
    explicit NibbleFetch(int64_t turns) : turns_(std::max<int64_t>(1, turns)) {}

    void add(const char *at, int64_t bytes) {
        const auto before = int64_t(reinterpret_cast<uintptr_t>(at) % LINE);
        const auto lines = int((before + bytes + LINE - 1) / LINE);
        parts_[count_++] = {at - before, lines};
        left_ += lines;
        per_turn_ = (left_ * UNIT + turns_ - 1) / turns_;
    }

    void some() {
        due_ += per_turn_;
        for (; due_ >= UNIT && left_ > 0; due_ -= UNIT) ask();
    }
    void all() {
        while (left_ > 0) ask();
    }

  private:
    static constexpr int64_t UNIT = 1 << 16;  // a line
    struct Part {
        const char *at;
        int lines;
    };

    void ask() {
        Part &part = parts_[part_];
        __builtin_prefetch(part.at, 0, 2);
        part.at += LINE;
        left_--;
        if (--part.lines == 0) part_++;
    }

    const int64_t turns_;
    int64_t left_ = 0, per_turn_ = 0, due_ = 0;  // lines; the last two in shares of UNIT
    int count_ = 0, part_ = 0;
    Part parts_[PIECES + 2];  // blocks, exact keys, exact values
};

// One head's blocks in a split of the context.
struct NibbleSplit {
    int64_t start = 0;
    int count = 0, pieces = 0;  // numbers of tokens and of blocks
    int first = 0;              // first block that a row attends to
    int own = PIECES;           // the block whose exact numbers rows attend to, if it is in the split
    const char *heads[PIECES] = {};
    const char *exact_keys = nullptr, *exact_values = nullptr;

    int stored() const { return std::min(own, pieces); }
    int seen_blocks() const { return stored() - first; }  // stored blocks that a row attends to
};

// The workspace of one task.
template <class Numbers>
struct NibbleSpace {
    using Exact = typename Numbers::Exact;
    struct Head {
        float *queries, *exact_queries;  // [rows, lanes], [rows, exact_floats]
        Sums total;
    };

    int rows, lanes, exact_floats;
    Limits *limits;  // [rows]
    std::vector<Head> heads;
    Sums split;
    float *value_scales, *value_centers;  // [groups, SPLIT]
    typename Exact::Element *values;      // a piece of exact values, followed by zeros

    NibbleSpace(const Shape<Exact> &shape, const Task &task)
        : rows(int(task.tokens) * shape.groups), lanes(rounded_up(shape.dim, 2 * simd::W)),
          exact_floats(shape.row_floats), heads(size_t(task.heads)) {
        const int limit_floats = rounded_up(2 * rows, 16), sums = rounded_up(Sums::floats(rows, shape.lanes), 16);
        const int scales = value_groups(shape.dim) * SPLIT, piece = PIECE * lanes, queries = rows * lanes;
        const int exact = rounded_up(rows * exact_floats, 16);
        float *at = scratch(size_t(limit_floats + sums + 2 * scales + piece) +
                            size_t(task.heads) * size_t(queries + exact + sums));
        auto take = [&at](int64_t count) { return (at += count) - count; };
        limits = (Limits *)take(limit_floats);
        split = Sums::in(take(sums), rows, shape.lanes);
        value_scales = take(scales);
        value_centers = take(scales);
        values = (typename Exact::Element *)take(piece);
        for (Head &head : heads) head = {take(queries), take(exact), Sums::in(take(sums), rows, shape.lanes)};
    }
};

// Computes scores [ROWS, SPLIT] of COUNT blocks. Queries are scaled by the block's channels; centers are added up
// separately.
template <class Numbers, int ROWS, int COUNT>
void multiply_nibble_keys(const float *queries, int lanes, const char *const *heads, int dim, NibbleFetch &fetch,
                          float *scores) {
    constexpr int VECTORS = COUNT * VECTORS_PER_PIECE, STEPS = Numbers::STEPS;
    alignas(64) float rows[COUNT][ROWS][MAX_NIBBLE_DIM];
    float base[COUNT][ROWS];
    const uint32_t *words[VECTORS];
    for (int p = 0; p < COUNT; p++) {
        const NibbleBlock block(heads[p], dim);
        for (int v = 0; v < VECTORS_PER_PIECE; v++) words[p * VECTORS_PER_PIECE + v] = block.keys + v * simd::W;
        simd::F sums[ROWS] = {};
        for (int at = 0; at < dim; at += 2 * simd::W) {
            const int low = std::min(simd::W, dim - at), high = std::clamp(dim - at - simd::W, 0, simd::W);
            const simd::F scales[2] = {simd::load_up_to(block.key_scales + at, low),
                                       simd::load_up_to(block.key_scales + at + simd::W, high)};
            const simd::F centers[2] = {simd::load_up_to(block.key_centers + at, low),
                                        simd::load_up_to(block.key_centers + at + simd::W, high)};
            for (int r = 0; r < ROWS; r++) {
                const float *query = queries + r * lanes + at;
                const simd::F first = simd::load(query), second = simd::load(query + simd::W);
                Numbers::store(rows[p][r], at, simd::mul(first, scales[0]), simd::mul(second, scales[1]));
                sums[r] = simd::fma(second, centers[1], simd::fma(first, centers[0], sums[r]));
            }
        }
        for (int r = 0; r < ROWS; r++) base[p][r] = simd::reduce_add(sums[r]);
    }
    simd::F sums[ROWS][VECTORS] = {};
#pragma GCC unroll 1
    for (int line = 0; line < dim / PER_NIBBLE_WORD; line++) {
        simd::I lines[VECTORS];
        for (int v = 0; v < VECTORS; v++) lines[v] = simd::load_words(words[v] + line * PIECE);
        for_each_constant<STEPS>([&](auto step) {
            constexpr int STEP = decltype(step)::value;
            if (STEP % (STEPS / TURNS_PER_WORD) == 0) fetch.some();
            for (int v = 0; v < VECTORS; v++) {
                const simd::F column = Numbers::template column<STEP>(lines[v]);
                for (int r = 0; r < ROWS; r++)
                    sums[r][v] = Numbers::multiply_add(
                        simd::set1(rows[v / VECTORS_PER_PIECE][r][line * STEPS + STEP]), column, sums[r][v]);
            }
        });
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++)
            simd::store(scores + r * SPLIT + v * simd::W,
                        simd::add(sums[r][v], simd::set1(base[v / VECTORS_PER_PIECE][r])));
}

// Weights [ROWS, SPLIT] of one row group: for the exact block, and scaled for each group of values.
template <int ROWS>
struct NibbleWeights {
    alignas(64) float exact[ROWS * SPLIT];
    alignas(64) float scaled[MAX_GROUPS][ROWS * SPLIT];
    float base[ROWS][MAX_GROUPS];  // sums of weights times centers
};

// Does what `weigh` of rows.h does, with the scales and centers of values.
template <class Numbers, int ROWS>
float weigh_nibbles(const NibbleSpace<Numbers> &space, float *scores, int row, int columns, float scale, int groups,
                    NibbleWeights<ROWS> &weights, float *sum) {
    const float peak = peak_of(scores, columns, scale);
    const simd::F less = simd::set1(-peak), by = simd::set1(scale);
    simd::F total = simd::zero(), centers[MAX_GROUPS];
    for (int g = 0; g < groups; g++) centers[g] = simd::zero();
    for (int c = 0; c < columns; c += 2 * simd::W) {
        const simd::F low = Numbers::Exact::exp2(simd::fma(simd::load(scores + c), by, less));
        const simd::F high = Numbers::Exact::exp2(simd::fma(simd::load(scores + c + simd::W), by, less));
        total = simd::add(total, simd::add(low, high));
        Numbers::Exact::store_weights(weights.exact + row * SPLIT, c, low, high);
        for (int g = 0; g < groups; g++) {
            const float *scales = space.value_scales + g * SPLIT + c, *own = space.value_centers + g * SPLIT + c;
            Numbers::store(weights.scaled[g] + row * SPLIT, c, simd::mul(low, simd::load(scales)),
                                   simd::mul(high, simd::load(scales + simd::W)));
            centers[g] = simd::fma(low, simd::load(own), centers[g]);
            centers[g] = simd::fma(high, simd::load(own + simd::W), centers[g]);
        }
    }
    for (int g = 0; g < groups; g++) weights.base[row][g] = simd::reduce_add(centers[g]);
    simd::store(sum, total);
    return peak;
}

// Computes out [ROWS, lanes] for VECTORS vectors from `first` on: the weights of their groups times the values of all
// stored blocks.
template <class Numbers, int ROWS, int VECTORS>
void multiply_nibble_values(const NibbleWeights<ROWS> &weights, const NibbleSplit &split, int dim, int first,
                            NibbleFetch &fetch, float *out, int lanes) {
    constexpr int STEPS = Numbers::STEPS, PER_PIECE = PIECE / PER_NIBBLE_WORD * STEPS;
    simd::F sums[ROWS][VECTORS] = {};
    for (int piece = split.first; piece < split.stored(); piece++) {
        const uint32_t *words = NibbleBlock(split.heads[piece], dim).values + first * simd::W;
#pragma GCC unroll 1
        for (int line = 0; line < PIECE / PER_NIBBLE_WORD; line++) {
            simd::I lines[VECTORS];
            for (int v = 0; v < VECTORS; v++) lines[v] = simd::load_words(words + line * dim + v * simd::W);
            for_each_constant<STEPS>([&](auto step) {
                constexpr int STEP = decltype(step)::value;
                const int at = piece * PER_PIECE + line * STEPS + STEP;
                if (STEP % (STEPS / TURNS_PER_WORD) == 0) fetch.some();
                for (int v = 0; v < VECTORS; v++) {
                    const simd::F column = Numbers::template column<STEP>(lines[v]);
                    const float *group = weights.scaled[(first + v) * simd::W / VALUE_GROUP] + at;
                    for (int r = 0; r < ROWS; r++)
                        sums[r][v] = Numbers::multiply_add(simd::set1(group[r * SPLIT]), column, sums[r][v]);
                }
            });
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) {
            const simd::F base = simd::set1(weights.base[r][(first + v) * simd::W / VALUE_GROUP]);
            simd::store(out + r * lanes + (first + v) * simd::W, simd::add(sums[r][v], base));
        }
}

template <class Numbers>
class NibbleAttention : public AttentionTasks<typename Numbers::Exact> {
  public:
    using Tasks = AttentionTasks<typename Numbers::Exact>;

    NibbleAttention(const AttentionStep &step, int64_t layer, const Queries &queries)
        : Tasks(step, layer, queries),
          exact_((const char *)step.exact_pool + layer * step.exact_layer_stride) {}

  private:
    using Tasks::step_, Tasks::shape_, Tasks::pool_, Tasks::partial;
    using Exact = typename Numbers::Exact;
    using T = typename Exact::Element;
    using Space = NibbleSpace<Numbers>;
    using Head = typename Space::Head;

    void compute(const Task &task, const Task *upcoming, bool is_first) const override {
        Space space(shape_, task);
        this->find_limits(task, space.limits);
        for (int64_t h = 0; h < task.heads; h++) {
            const Head &head = space.heads[size_t(h)];
            std::fill(head.queries, head.queries + space.rows * space.lanes, 0.0f);
            this->template load_queries<FloatMath<float>>(task, task.first_head + h, head.queries, space.lanes);
            this->template load_queries<Exact>(task, task.first_head + h, head.exact_queries, space.exact_floats);
            head.total.clear(space.rows, shape_.lanes);
        }
        if (is_first) {
            NibbleFetch now(1);
            add_split(task, 0, now);
            now.all();
        }
        for (int64_t s = 0; s < task.splits; s++) {
            NibbleFetch fetch(turns(task, s));
            if (s + 1 < task.splits)
                add_split(task, s + 1, fetch);
            else if (upcoming)
                add_split(*upcoming, 0, fetch);
            for (int64_t h = 0; h < task.heads; h++) {
                const Sums sums = task.is_partial ? partial(task, s) : space.split;
                const Head &head = space.heads[size_t(h)];
                sum_up_split(split_of(task, task.first_head + h, s), space, head, sums, fetch);
                if (!task.is_partial) head.total.merge(sums, space.rows, shape_.lanes);
            }
            fetch.all();
        }
        for (int64_t h = 0; h < task.heads && !task.is_partial; h++)
            this->finish(task, task.first_head + h, space.heads[size_t(h)].total);
    }

    const char *head_of(const Task &task, int64_t head, int64_t piece) const {
        const int64_t page = step_.block_tables[task.sequence * step_.table_stride + piece];
        return pool_ + page * step_.page_stride + head * step_.head_stride;
    }

    NibbleSplit split_of(const Task &task, int64_t head, int64_t s) const {
        NibbleSplit split;
        split.start = (task.first_split + s) * SPLIT;
        split.count = int(std::min<int64_t>(task.context - split.start, SPLIT));
        split.pieces = (split.count + PIECE - 1) / PIECE;
        split.first = this->hidden_of(task, split.start) / PIECE;
        for (int p = split.first; p < split.pieces; p++) split.heads[p] = head_of(task, head, split.start / PIECE + p);
        if (split.start + split.count == task.context) {
            split.own = split.pieces - 1;
            const int64_t page = step_.exact_slots[task.first_token] / PIECE;
            split.exact_keys = exact_ + page * step_.exact_page_stride + head * step_.exact_head_stride;
            split.exact_values = split.exact_keys + step_.exact_value_offset;
        }
        return split;
    }

    // Adds all that a split reads, for all heads of the task.
    void add_split(const Task &task, int64_t s, NibbleFetch &fetch) const {
        const NibbleSplit split = split_of(task, task.first_head, s);
        for (int p = split.first; p < split.stored(); p++) fetch.add(split.heads[p], task.heads * step_.head_stride);
        if (split.own >= PIECES) return;
        fetch.add(split.exact_keys, task.heads * step_.exact_head_stride);
        fetch.add(split.exact_values, task.heads * step_.exact_head_stride);
    }

    // How often the products of a split prefetch more lines, if all rows attend to all of it.
    int64_t turns(const Task &task, int64_t s) const {
        const int stored = split_of(task, task.first_head, s).seen_blocks();
        const int64_t keys = (stored / BLOCKS_AT_ONCE + stored % BLOCKS_AT_ONCE) * (shape_.dim / PER_NIBBLE_WORD);
        int64_t values = 0;
        by_blocks<MAX_ROWS>(vectors(), [&](int, auto) { values += stored * (PIECE / PER_NIBBLE_WORD); });
        const int64_t products = (this->rows_of(task) + MAX_ROWS - 1) / MAX_ROWS;
        return task.heads * products * (keys + values) * TURNS_PER_WORD;
    }

    int vectors() const { return (shape_.dim + simd::W - 1) / simd::W; }

    void sum_up_split(const NibbleSplit &split, Space &space, const Head &head, const Sums &sums,
                      NibbleFetch &fetch) const {
        look_at_values(split, space);
        by_rows(space.rows, [&](int row, auto rows) {
            sum_up_rows<decltype(rows)::value>(split, space, head, row, sums, fetch);
        });
    }

    // Copies the scales and centers of the stored blocks' values that rows attend to, with zeros around them, and the
    // exact block's values, followed by zeros.
    void look_at_values(const NibbleSplit &split, Space &space) const {
        const int groups = value_groups(shape_.dim), stored = split.stored();
        for (int g = 0; g < groups; g++) {
            float *scales = space.value_scales + g * SPLIT, *centers = space.value_centers + g * SPLIT;
            std::fill(scales, scales + split.first * PIECE, 0.0f);
            std::fill(centers, centers + split.first * PIECE, 0.0f);
            for (int p = split.first; p < stored; p++) {
                const NibbleBlock block(split.heads[p], shape_.dim);
                for (int at = 0; at < PIECE; at += simd::W) {
                    simd::store(scales + p * PIECE + at, simd::load(block.value_scales + g * PIECE + at));
                    simd::store(centers + p * PIECE + at, simd::load(block.value_centers + g * PIECE + at));
                }
            }
            std::fill(scales + stored * PIECE, scales + SPLIT, 0.0f);
            std::fill(centers + stored * PIECE, centers + SPLIT, 0.0f);
        }
        if (split.own >= PIECES) return;
        copy_values((const T *)split.exact_values, split.count - split.own * PIECE, shape_.dim, space.values);
    }

    template <int ROWS>
    void sum_up_rows(const NibbleSplit &split, const Space &space, const Head &head, int row, const Sums &all,
                     NibbleFetch &fetch) const {
        const Sums sums = all.from(row, shape_.lanes);
        const Limits *limits = space.limits + row;
        const Scoring scoring = this->scoring();
        if (seen_of(limits, ROWS, split.start, split.count) <= 0) return sums.clear(ROWS, shape_.lanes);
        alignas(64) float scores[ROWS * SPLIT];
        score<ROWS>(split, space, head, row, fetch, scores);
        const int columns = rounded_up(split.count, std::max(PIECE, 2 * simd::W)), groups = value_groups(shape_.dim);
        NibbleWeights<ROWS> weights;
        for (int r = 0; r < ROWS; r++) {
            scoring.cap(scores + r * SPLIT, split.first * PIECE, columns);
            hide(scores + r * SPLIT, limits[r], split.start, split.count, columns);
            sums.peaks[r] = weigh_nibbles(space, scores + r * SPLIT, r, columns, scoring.scale, groups, weights,
                                          sums.weights + r * simd::W);
        }
        if (split.seen_blocks() > 0) {
            by_blocks<MAX_ROWS>(vectors(), [&](int first, auto vectors) {
                multiply_nibble_values<Numbers, ROWS, decltype(vectors)::value>(weights, split, shape_.dim, first, fetch,
                                                                                 sums.values, shape_.lanes);
            });
        }
        if (split.own >= PIECES) return;
        Fetch nothing;
        Pieces<Exact> values = {};
        values[split.own] = (const typename Exact::Word *)space.values;
        multiply_values<Exact, ROWS>(weights.exact, values, split.first, split.own, 1, shape_.dim, nothing, sums.values,
                                     shape_.lanes);
    }

    // Computes the scores of all blocks of the split.
    template <int ROWS>
    void score(const NibbleSplit &split, const Space &space, const Head &head, int row, NibbleFetch &fetch,
               float *scores) const {
        const float *queries = head.queries + row * space.lanes;
        const int stored = split.stored();
        int p = split.first;
        for (; p + BLOCKS_AT_ONCE <= stored; p += BLOCKS_AT_ONCE)
            multiply_nibble_keys<Numbers, ROWS, BLOCKS_AT_ONCE>(queries, space.lanes, split.heads + p, shape_.dim, fetch,
                                                          scores + p * PIECE);
        for (; p < stored; p++)
            multiply_nibble_keys<Numbers, ROWS, 1>(queries, space.lanes, split.heads + p, shape_.dim, fetch,
                                                   scores + p * PIECE);
        if (split.own >= PIECES) return;
        Fetch nothing;
        Pieces<Exact> keys = {};
        keys[split.own] = (const typename Exact::Word *)split.exact_keys;
        multiply_keys<Exact, ROWS>(head.exact_queries + row * space.exact_floats, shape_.words, keys,
                                   split.own * VECTORS_PER_PIECE, VECTORS_PER_PIECE, nothing, scores);
    }

    const char *const exact_;  // from the layer's first head on
};

}  // namespace

void attend_nibbles(Team *team, const AttentionStep &step, int64_t layer, const Queries &queries) {
    auto by = [&](auto numbers) { NibbleAttention<decltype(numbers)>(step, layer, queries).run(team); };
    switch (step.dtype) {
        case 0: return by(NibbleFloats<FloatMath<float>>());
        case 2: return by(NibbleFloats<FloatMath<Float16>>());
        default:
#if defined(__AVX512BF16__)
            return by(NibblePairs());
#else
            return by(NibbleFloats<WideningMath>());
#endif
    }
}

}  // namespace twostroke
