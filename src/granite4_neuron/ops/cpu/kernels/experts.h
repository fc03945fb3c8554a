// Mixture of experts for few tokens: only the weights of chosen experts are read, and each of them once.
#pragma once

#include "linear.h"
#include "norm.h"

namespace granite4_neuron {

// The choices of one expert, as numbers token * top_k + place.
struct Group {
  int64_t expert;
  std::vector<int64_t> choices;
};

inline std::vector<Group> group_by_expert(const int64_t* topk_ids, int64_t count) {
  std::vector<Group> groups;
  for (int64_t choice = 0; choice < count; choice++) {
    auto same = [&](const Group& group) { return group.expert == topk_ids[choice]; };
    auto found = std::find_if(groups.begin(), groups.end(), same);
    if (found == groups.end()) found = groups.insert(found, Group{topk_ids[choice], {}});
    found->choices.push_back(choice);
  }
  return groups;
}

// out[choice] = weights[expert of choice] . inputs[choice / per_input], for all choices of all groups.
//
// weights: [experts, rows, columns]; inputs: [.., columns]; out: [choices, rows].
template <typename T>
inline void multiply_groups(
    const std::vector<Group>& groups, const T* weights, int64_t rows, int64_t columns, const T* inputs,
    int64_t per_input, float* out) {
  std::vector<std::vector<T>> gathered(groups.size());
  for (size_t g = 0; g < groups.size(); g++)
    for (int64_t choice : groups[g].choices) {
      const T* x = inputs + choice / per_input * columns;
      gathered[g].insert(gathered[g].end(), x, x + columns);
    }
  at::parallel_for(0, static_cast<int64_t>(groups.size()) * rows, 8, [&](int64_t begin, int64_t end) {
    std::vector<typename Product<T>::Input> scratch;
    for (int64_t at = begin; at < end;) {
      int64_t g = at / rows, first = at % rows, last = std::min(rows, first + end - at);
      const auto& choices = groups[g].choices;
      const auto* x = as_input(gathered[g].data(), gathered[g].size(), scratch);
      multiply<T>(
          weights + groups[g].expert * rows * columns, x, choices.size(), columns, first, last,
          [&](int64_t row, int64_t vector, float value) { out[choices[vector] * rows + row] = value; });
      at += last - first;
    }
  });
}

// As ops.fused_experts. hidden_states: [tokens, hidden]; w1: [experts, 2 * width, hidden];
// w2: [experts, hidden, width]; topk_weights, topk_ids: [tokens, top_k].
inline at::Tensor fused_experts(
    const at::Tensor& hidden_states, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& topk_weights,
    const at::Tensor& topk_ids) {
  TORCH_CHECK(hidden_states.is_contiguous() && w1.is_contiguous() && w2.is_contiguous());
  TORCH_CHECK(topk_weights.is_contiguous() && topk_ids.is_contiguous() && topk_weights.scalar_type() == at::kFloat);
  int64_t tokens = hidden_states.size(0), hidden = hidden_states.size(1), width = w2.size(2), top_k = topk_ids.size(1);
  int64_t choices = tokens * top_k;
  at::Tensor output = at::empty(hidden_states.sizes(), hidden_states.options());
  std::vector<Group> groups = group_by_expert(topk_ids.const_data_ptr<int64_t>(), choices);
  GRANITE4_DISPATCH(hidden_states.scalar_type(), "fused_experts", [&] {
    std::vector<float> gate_up(choices * 2 * width), y(choices * hidden);
    std::vector<scalar_t> activated(choices * width);
    multiply_groups(
        groups, w1.const_data_ptr<scalar_t>(), 2 * width, hidden, hidden_states.const_data_ptr<scalar_t>(), top_k,
        gate_up.data());
    for (int64_t choice = 0; choice < choices; choice++) {
      const float* gate = &gate_up[choice * 2 * width];
      for (int64_t i = 0; i < width; i++)
        activated[choice * width + i] = static_cast<scalar_t>(silu(gate[i]) * gate[width + i]);
    }
    multiply_groups(groups, w2.const_data_ptr<scalar_t>(), hidden, width, activated.data(), 1, y.data());
    const float* weights = topk_weights.const_data_ptr<float>();
    auto* out = output.mutable_data_ptr<scalar_t>();
    for (int64_t token = 0; token < tokens; token++)
      for (int64_t i = 0; i < hidden; i++) {
        float total = 0.0f;
        for (int64_t choice = token * top_k; choice < (token + 1) * top_k; choice++)
          total += weights[choice] * y[choice * hidden + i];
        out[token * hidden + i] = static_cast<scalar_t>(total);
      }
  });
  return output;
}

}  // namespace granite4_neuron
