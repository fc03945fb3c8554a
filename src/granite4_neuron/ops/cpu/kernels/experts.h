// Mixture of experts for few tokens: only the weights of chosen experts are read, and each of them once.
#pragma once

#include "linear.h"
#include "norm.h"

namespace granite4_neuron {

// As ops.topk_softmax. router_logits: [tokens, num_experts], float32, contiguous. Of equal logits the first expert's counts more.
inline std::pair<at::Tensor, at::Tensor> topk_softmax(const at::Tensor& router_logits, int64_t top_k) {
  TORCH_CHECK(router_logits.is_contiguous() && 0 < top_k && top_k <= router_logits.size(1));
  int64_t tokens = router_logits.size(0), experts = router_logits.size(1);
  at::Tensor weights = at::empty({tokens, top_k}, router_logits.options());
  at::Tensor ids = at::empty({tokens, top_k}, router_logits.options().dtype(at::kLong));
  std::vector<int64_t> order(experts);
  for (int64_t token = 0; token < tokens; token++) {
    const float* scores = router_logits.const_data_ptr<float>() + token * experts;
    std::iota(order.begin(), order.end(), 0);
    // NaN sorts as the largest, as torch has it; otherwise the order would not be one.
    auto before = [&](int64_t a, int64_t b) {
      if (std::isnan(scores[a]) || std::isnan(scores[b])) return std::isnan(scores[a]) && !std::isnan(scores[b]);
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    };
    std::partial_sort(order.begin(), order.begin() + top_k, order.end(), before);
    float* weight = weights.mutable_data_ptr<float>() + token * top_k;
    float total = 0.0f;
    for (int64_t k = 0; k < top_k; k++) total += weight[k] = std::exp(scores[order[k]] - scores[order[0]]);
    for (int64_t k = 0; k < top_k; k++) weight[k] /= total;
    std::copy(order.begin(), order.begin() + top_k, ids.mutable_data_ptr<int64_t>() + token * top_k);
  }
  return {weights, ids};
}

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

// out[choice] = scales * (weights[expert of choice] . inputs[choice / per_input]), for all choices of all groups.
//
// weights: [experts, rows, columns]; scales: [experts, rows], or null; inputs: [.., columns]; out: [choices, rows].
template <typename T, typename W>
inline void multiply_groups(
    const std::vector<Group>& groups, const W* weights, const float* scales, int64_t rows, int64_t columns,
    const T* inputs, int64_t per_input, float* out) {
  using P = Product<T, W>;
  std::vector<std::vector<T>> gathered(groups.size());
  for (size_t g = 0; g < groups.size(); g++)
    for (int64_t choice : groups[g].choices) {
      const T* x = inputs + choice / per_input * columns;
      gathered[g].insert(gathered[g].end(), x, x + columns);
    }
  int64_t count = static_cast<int64_t>(groups.size()) * rows;
  parallel_tasks(count, rows_per_task(columns, sizeof(W)), [&](int64_t begin, int64_t end) {
    std::vector<typename P::Input> scratch;
    for (int64_t at = begin; at < end;) {
      int64_t g = at / rows, first = at % rows, last = std::min(rows, first + end - at);
      const auto& choices = groups[g].choices;
      const auto* x = as_input(gathered[g].data(), gathered[g].size(), scratch);
      const float* of_expert = scales ? scales + groups[g].expert * rows : nullptr;
      multiply<P>(
          weights + groups[g].expert * rows * columns, x, choices.size(), columns, first, last,
          [&](int64_t row, int64_t vector, float value) {
            out[choices[vector] * rows + row] = of_expert ? value * of_expert[row] : value;
          });
      at += last - first;
    }
  });
}

// As ops.fused_experts. hidden_states: [tokens, hidden]; w1: [experts, 2 * width, hidden];
// w2: [experts, hidden, width]; topk_weights, topk_ids: [tokens, top_k]; w1_scale, w2_scale: [experts, rows].
inline at::Tensor fused_experts(
    const at::Tensor& hidden_states, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& topk_weights,
    const at::Tensor& topk_ids, const std::optional<at::Tensor>& w1_scale, const std::optional<at::Tensor>& w2_scale) {
  check_product(hidden_states, w1, w1_scale);
  check_weight(w2, w2_scale, hidden_states.scalar_type());
  TORCH_CHECK(hidden_states.is_contiguous() && w1_scale.has_value() == w2_scale.has_value());
  TORCH_CHECK(topk_weights.is_contiguous() && topk_ids.is_contiguous() && topk_weights.scalar_type() == at::kFloat);
  int64_t tokens = hidden_states.size(0), hidden = hidden_states.size(1), width = w2.size(2), top_k = topk_ids.size(1);
  int64_t choices = tokens * top_k;
  at::Tensor output = at::empty(hidden_states.sizes(), hidden_states.options());
  std::vector<Group> groups = group_by_expert(topk_ids.const_data_ptr<int64_t>(), choices);
  GRANITE4_DISPATCH_WEIGHTS(hidden_states.scalar_type(), w1.scalar_type(), "fused_experts", [&] {
    std::vector<float> gate_up(choices * 2 * width), y(choices * hidden);
    std::vector<scalar_t> activated(choices * width);
    multiply_groups(
        groups, w1.const_data_ptr<weight_t>(), pointer<float>(w1_scale), 2 * width, hidden,
        hidden_states.const_data_ptr<scalar_t>(), top_k, gate_up.data());
    for (int64_t choice = 0; choice < choices; choice++) {
      const float* gate = &gate_up[choice * 2 * width];
      for (int64_t i = 0; i < width; i++)
        activated[choice * width + i] = static_cast<scalar_t>(silu(gate[i]) * gate[width + i]);
    }
    multiply_groups(
        groups, w2.const_data_ptr<weight_t>(), pointer<float>(w2_scale), hidden, width, activated.data(), 1, y.data());
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
