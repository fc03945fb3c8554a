// Mixture of experts: only the weights of chosen experts are read, and each of them once.
#pragma once

#include "linear.h"
#include "norm.h"

namespace granite4_neuron {

// As ops.topk_softmax. router_logits: [tokens, num_experts], float32, contiguous. Of equal logits the first expert's
// counts more.
inline std::pair<at::Tensor, at::Tensor> topk_softmax(const at::Tensor& router_logits, int64_t top_k) {
  check_dense(router_logits, "router_logits", {-1, -1}, at::kFloat);
  TORCH_CHECK(
      0 < top_k && top_k <= router_logits.size(1), "top_k is ", top_k, " of ", router_logits.size(1), " experts");
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

inline std::vector<Group> group_by_expert(const int64_t* topk_ids, int64_t count, int64_t experts) {
  std::vector<Group> groups;
  std::vector<int64_t> group_numbers(experts, -1);
  for (int64_t choice = 0; choice < count; choice++) {
    int64_t expert = topk_ids[choice];
    TORCH_CHECK(0 <= expert && expert < experts, "there is no expert ", expert);
    if (group_numbers[expert] < 0) {
      group_numbers[expert] = groups.size();
      groups.push_back({expert, {}});
    }
    groups[group_numbers[expert]].choices.push_back(choice);
  }
  return groups;
}

// out[choice] = weight of the choice's expert . inputs[choice / per_input], for all choices of all groups.
//
// inputs: [.., columns]; out: [choices, rows].
template <typename Tiles, typename T>
inline void multiply_groups(
    const std::vector<Group>& groups, const Weight& weight, const T* inputs, int64_t per_input, float* out) {
  using Arithmetic = typename Tiles::Arithmetic;
  using Input = typename Arithmetic::Input;
  using Blocks = ActivationPanel<Arithmetic>;
  int64_t columns = weight.columns, rows = weight.rows, tiles = tiles_of(rows), size = 0;
  std::vector<int64_t> begins;
  for (const auto& group : groups) {
    begins.push_back(size);
    size += Blocks::size(group.choices.size(), columns);
  }
  Scratch<Input> scratch(size);
  std::vector<Blocks> vectors(groups.size());
  parallel_tasks(groups.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; g++) {
      auto row = [&](int64_t v) { return inputs + groups[g].choices[v] / per_input * columns; };
      vectors[g] = fill_panel<Arithmetic>(row, groups[g].choices.size(), columns, scratch.data() + begins[g]);
    }
  });
  parallel_tasks(groups.size() * tiles, TILE_UNROLL, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin, next = 0; task < end; task = next) {
      int64_t g = task / tiles;
      const auto& [expert, choices] = groups[g];
      next = std::min(end, (g + 1) * tiles);
      auto store = [&](int64_t number, int64_t v, const auto& acc) {
        int64_t row = number * TILE, count = std::min(TILE, rows - row);
        store_acc<T>(acc, 1.0f, nullptr, out + choices[v] * rows + row, count);
      };
      multiply_tiles<Tiles>(weight, expert, task - g * tiles, next - g * tiles, vectors[g], store);
    }
  });
}

// As ops.fused_experts. hidden_states: [tokens, hidden]; w1: [experts, 2 * width, hidden];
// w2: [experts, hidden, width]; topk_weights, topk_ids: [tokens, top_k].
inline at::Tensor fused_experts(
    const at::Tensor& hidden_states, const Weight& w1, const Weight& w2, const at::Tensor& topk_weights,
    const at::Tensor& topk_ids) {
  check_product(hidden_states, w1);
  TORCH_CHECK(
      w2.dtype == w1.dtype && w2.format == w1.format && w2.experts == w1.experts && w1.rows == 2 * w2.columns &&
          w2.rows == w1.columns,
      "w1 and w2 are not the two matrices of the same experts");
  check_dense(hidden_states, "hidden_states", {-1, w1.columns}, w1.dtype);
  check_dense(topk_ids, "topk_ids", {hidden_states.size(0), -1}, at::kLong);
  check_dense(topk_weights, "topk_weights", topk_ids.sizes(), at::kFloat);
  int64_t tokens = hidden_states.size(0), hidden = hidden_states.size(1), width = w2.columns, top_k = topk_ids.size(1);
  int64_t choices = tokens * top_k;
  at::Tensor output = empty(hidden_states.sizes(), hidden_states.options());
  std::vector<Group> groups = group_by_expert(topk_ids.const_data_ptr<int64_t>(), choices, w1.experts);
  GRANITE4_DISPATCH_WEIGHT(w1, "fused_experts", [&] {
    Scratch<float> gate_up(choices * 2 * width), y(choices * hidden);
    Scratch<scalar_t> activated(choices * width);
    multiply_groups<tiles_t>(groups, w1, hidden_states.const_data_ptr<scalar_t>(), top_k, gate_up.data());
    parallel_tasks(choices, 8, [&](int64_t begin, int64_t end) {
      for (int64_t choice = begin; choice < end; choice++) {
        const float* gate = gate_up.data() + choice * 2 * width;
        silu_and_mul(gate, gate + width, activated.data() + choice * width, width);
      }
    });
    multiply_groups<tiles_t>(groups, w2, activated.data(), 1, y.data());
    const float* weights = topk_weights.const_data_ptr<float>();
    auto* out = output.mutable_data_ptr<scalar_t>();
    parallel_tasks(tokens, 8, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; token++)
        for (int64_t i = 0; i < hidden; i++) {
          float total = 0.0f;
          for (int64_t choice = token * top_k; choice < (token + 1) * top_k; choice++)
            total += weights[choice] * y.data()[choice * hidden + i];
          out[token * hidden + i] = static_cast<scalar_t>(total);
        }
    });
  });
  return output;
}

}  // namespace granite4_neuron
