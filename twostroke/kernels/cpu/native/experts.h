// Mixtures of experts: routes rows to experts, groups the rows of each expert, and adds up the outputs.
//
// A row's experts are chosen only by its own logits, and their outputs are added by ascending expert. So its result
// depends neither on the other rows nor on the number of threads.

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
    int64_t first, held;  // the indices of these: first .. first + held - 1
    int64_t count, per_token;
    int64_t *tokens;  // [count] rows that each expert was ever chosen for
    const float *correction;  // [count], added to the sigmoids of logits when experts are chosen; null: a softmax
    int64_t groups, groups_per_token;  // of neighbouring experts, and how many of them a row chooses
    float scaling;       // factor on the weights of a row's experts
    int32_t is_normalised;  // whether the weights of a row's experts sum up to 1
    int32_t has_shared;  // whether there is a shared expert, a dense MLP
    int32_t has_shared_gate;  // whether its output is multiplied with the sigmoid of a gate
};

// Rows of one layer by the experts that they go to.
class Routing {
  public:
    // Chooses experts by logits [rows, stride]. Afterwards only the shared expert's gate is valid in them. Of equal
    // experts, and of equal groups, the lower one is chosen.
    void route(Team *team, const Experts &experts, float *logits, int64_t rows, int64_t stride);

    int64_t pairs() const { return rows_ * per_token_; }

    // Copies rows of bfloat16 [.., stride], once for each of their experts, by ascending expert and then by row.
    void gather(Team *team, const uint16_t *x, int64_t stride, uint16_t *grouped) const;

    // The range of these rows for each held expert that has any.
    std::vector<RowGroup> groups(const Experts &experts, Linear Expert::*weights) const;

    // Adds to x [rows, width] the weighted outputs [pairs, width] of held experts. It also adds the outputs [rows,
    // width] of the shared expert, if there is one, times the sigmoids of its gates, if it has any.
    void add(Team *team, const Experts &experts, const float *answers, const float *shared, const float *gates,
             int64_t gate_stride, int64_t width, float *x) const;

  private:
    int64_t rows_ = 0, per_token_ = 0;
    std::vector<int32_t> experts_;  // [rows, per_token], ascending
    std::vector<float> weights_;    // [rows, per_token]
    std::vector<int64_t> places_;   // [rows, per_token]: the pair's row among the rows grouped by expert
    std::vector<int64_t> starts_;   // [count + 1]: the first grouped row of each expert
};

}  // namespace twostroke
