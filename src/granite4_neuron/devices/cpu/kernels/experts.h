// Mixture of experts: only the weights of chosen experts are read, and each of them once.
#pragma once

#include "weight.h"

namespace granite4_neuron {

// As ops.topk_softmax. router_logits: [tokens, num_experts], float32, contiguous. Ties go to the first expert.
std::pair<at::Tensor, at::Tensor> topk_softmax(const at::Tensor& router_logits, int64_t top_k);

// The router's choice by `topk_sigmoid`.
struct SigmoidChoice {
  at::Tensor correction_bias;  // [num_experts], float32
  int64_t n_group, topk_group;
  bool norm_topk_prob;
  double scaling_factor;
};

// As ops.topk_sigmoid. router_logits: [tokens, num_experts], float32, contiguous. Ties go to the first expert.
std::pair<at::Tensor, at::Tensor> topk_sigmoid(
    const at::Tensor& router_logits, int64_t top_k, const SigmoidChoice& choice);

// up . down . x of each expert, both for vectors in float32, and the indices of the tokens whose products it is added to;
// no indices mean all tokens.
struct ExpertAddition {
  Weight down, up;
  std::optional<at::Tensor> tokens;
};
using ExpertAdditions = std::vector<ExpertAddition>;

// As ops.fused_experts. hidden_states: [tokens, hidden]; w1: [experts, 2 * width, hidden], or
// without a gate [experts, width, hidden]; w2: [experts, hidden, width]; topk_weights, topk_ids: [tokens, top_k].
// to_w1, to_w2: of matrices with the shapes of w1 and w2.
at::Tensor fused_experts(
    const at::Tensor& hidden_states, const Weight& w1, const Weight& w2, const at::Tensor& topk_weights,
    const at::Tensor& topk_ids, const ExpertAdditions& to_w1 = {}, const ExpertAdditions& to_w2 = {});

}  // namespace granite4_neuron
