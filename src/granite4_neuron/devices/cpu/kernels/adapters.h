// Adds adapters to projections, for the tokens of those rows of a step that use one.
//
// The definition is in Python: model/adapters.py.
#pragma once

#include <map>

#include "experts.h"
#include "linear.h"
#include "packed.h"

namespace granite4_neuron {

// A packed matrix, or one of each expert, with the memory that it is in.
struct Matrix {
  at::Tensor bytes;
  Weight weight;

  explicit Matrix(const at::Tensor& packed) : bytes(packed), weight(weight_in(packed)) {}
};

// An adapter that rows of a step use, and the indices of these rows' tokens in the step; no indices mean all tokens.
struct AdapterTokens {
  int64_t adapter;
  std::optional<at::Tensor> tokens;
};
using AdapterRows = std::vector<AdapterTokens>;

// adapters: the number of each row's adapter, 0 for none, [rows]; or nothing for a step without adapters.
// tokens: the step's number of tokens, with padding.
inline AdapterRows adapter_rows(const std::optional<at::Tensor>& adapters, const PackedRows& rows, int64_t tokens) {
  if (!adapters.has_value()) return {};
  check_dense(*adapters, "adapters", {rows.count()}, at::kLong);
  check_packed(rows, tokens);
  std::map<int64_t, std::vector<int64_t>> numbers;
  for (int64_t row = 0; row < rows.count(); row++)
    for (int64_t token = 0; token < rows.length(row); token++)
      numbers[adapters->const_data_ptr<int64_t>()[row]].push_back(rows.offset(row) + token);
  AdapterRows found;
  for (const auto& [adapter, its_tokens] : numbers) {
    int64_t count = its_tokens.size();
    if (adapter == 0) continue;
    if (count == tokens) return {{adapter, std::nullopt}};
    at::Tensor its_numbers = adapters->new_empty({count});
    std::copy(its_tokens.begin(), its_tokens.end(), its_numbers.mutable_data_ptr<int64_t>());
    found.push_back({adapter, its_numbers});
  }
  return found;
}

// up . down . x, or that of each expert, in float32, as two products, so that a token's sums do not depend on other
// tokens.
struct LowRank {
  Matrix down, up;

  LowRank(const at::Tensor& down, const at::Tensor& up) : down(down), up(up) {
    for (const Matrix* matrix : {&this->down, &this->up})
      TORCH_CHECK(
          matrix->weight.dtype == at::kFloat, "an adapter's matrix is for vectors of ", matrix->weight.dtype,
          " and should be for Float");
    TORCH_CHECK(this->up.weight.columns == this->down.weight.rows, "the ranks of an adapter's two matrices differ");
  }
  // x: [tokens, columns] in any dtype. Returns [tokens, rows] in float32. Not for experts.
  at::Tensor operator()(const at::Tensor& x) const {
    return logits(logits(x.to(at::kFloat), down.weight, 1.0), up.weight, 1.0);
  }
};

// The additions of all adapters to one projection, by the adapters' numbers; some adapters may have none.
class Additions {
 public:
  // projection: the weight that it is added to.
  void append(int64_t adapter, const LowRank& addition, const Weight& projection) {
    const Weight &down = addition.down.weight, &up = addition.up.weight;
    TORCH_CHECK(
        down.columns == projection.columns && up.rows == projection.rows, "an adapter for a projection of [", up.rows,
        ", ", down.columns, "] does not fit one of [", projection.rows, ", ", projection.columns, "]");
    TORCH_CHECK(
        down.experts == projection.experts && up.experts == projection.experts, "an adapter of ", down.experts, " and ",
        up.experts, " matrices does not fit ", projection.experts);
    TORCH_CHECK(
        adapter > 0 && additions_.emplace(adapter, addition).second, "an adapter has number ", adapter,
        ", which should be above 0 and not in use");
  }
  // Those that rows of a step use, for a projection of experts.
  ExpertAdditions of_experts(const AdapterRows& rows) const {
    ExpertAdditions chosen;
    for (const auto& [adapter, tokens] : rows)
      if (auto found = additions_.find(adapter); found != additions_.end())
        chosen.push_back({found->second.down.weight, found->second.up.weight, tokens});
    return chosen;
  }
  // Adds them to y, the projection of x; y is rounded to its dtype once more. x: [..., columns], y: [..., rows].
  void add(const at::Tensor& x, const at::Tensor& y, const AdapterRows& rows) const {
    if (additions_.empty()) return;
    for (const auto& [adapter, tokens] : rows) {
      auto found = additions_.find(adapter);
      if (found == additions_.end()) continue;
      at::Tensor all_x = x.reshape({-1, x.size(-1)}), all_y = y.view({-1, y.size(-1)});
      int64_t count = tokens.has_value() ? tokens->numel() : all_x.size(0);
      for (int64_t first = 0; first < count; first += BLOCK) {
        int64_t size = std::min(BLOCK, count - first);
        if (!tokens.has_value()) {
          all_y.narrow(0, first, size).add_(found->second(all_x.narrow(0, first, size)));
        } else {
          at::Tensor numbers = tokens->narrow(0, first, size);
          at::Tensor sum = all_y.index_select(0, numbers).add_(found->second(all_x.index_select(0, numbers)));
          all_y.index_copy_(0, numbers, sum);
        }
      }
    }
  }

 private:
  // Tokens at a time, so that an addition is still in the processor's caches when it is added.
  static constexpr int64_t BLOCK = 64;

  std::map<int64_t, LowRank> additions_;
};

}  // namespace granite4_neuron
