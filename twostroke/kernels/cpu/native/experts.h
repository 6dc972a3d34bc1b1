// Mixtures of experts: which rows go to which experts, in what order they lie there, and what their answers add up to.
//
// A row's experts are chosen by its own logits alone, and its answers are added by ascending expert: its result depends
// neither on the rows beside it nor on the number of threads.

#pragma once

#include <cstdint>
#include <vector>

#include "linear.h"
#include "team.h"

namespace twostroke {

// `NativeExpert` of kernels/cpu/forward.py, field by field.
struct Expert {
    Linear inner, down;
};

// `NativeExperts` of kernels/cpu/forward.py.
struct Experts {
    Linear router;  // hidden -> a logit of each expert, then that of the shared expert's gate if there is one
    const Expert *table;  // [held]: the weights of each expert that is computed here
    int64_t first, held;  // which these are
    int64_t count, per_token;
    int64_t *tokens;  // [count] rows that each expert was ever chosen for
    const float *correction;  // [count], added to the sigmoids of logits when experts are chosen; null: a softmax
    int64_t groups, groups_per_token;  // of experts side by side, and those of a row
    float scaling;       // of the weights of a row's experts
    int32_t is_normalised;  // the weights of a row's experts sum up to 1; else they are their scores among all
    int32_t has_shared;  // a dense MLP besides
    int32_t has_shared_gate;  // whose answer is multiplied with the sigmoid of its gate
};

// Rows of one layer by the experts that they go to.
class Routing {
  public:
    // Chooses by logits [rows, stride], which become garbage but for the shared expert's gate. Of equal ones the lower
    // expert is chosen, and the lower group.
    void route(Team *team, const Experts &experts, float *logits, int64_t rows, int64_t stride);

    int64_t pairs() const { return rows_ * per_token_; }

    // Rows of bfloat16 [.., stride], once for each of their experts, by ascending expert and then by row.
    void gather(Team *team, const uint16_t *x, int64_t stride, uint16_t *grouped) const;

    // Which of those rows an expert multiplies with its weights, for all held experts that have any.
    std::vector<RowGroup> groups(const Experts &experts, Linear Expert::*weights) const;

    // x [rows, width] += the answers [pairs, width] of held experts, weighted; and the shared ones [rows, width], if there
    // are any, times the sigmoids of their gates, if there are those.
    void add(Team *team, const Experts &experts, const float *answers, const float *shared, const float *gates,
             int64_t gate_stride, int64_t width, float *x) const;

  private:
    int64_t rows_ = 0, per_token_ = 0;
    std::vector<int32_t> experts_;  // [rows, per_token], ascending
    std::vector<float> weights_;    // [rows, per_token]
    std::vector<int64_t> places_;   // [rows, per_token]: the pair's row among those that lie by expert
    std::vector<int64_t> starts_;   // [count + 1]: the first of those of each expert
};

}  // namespace twostroke
