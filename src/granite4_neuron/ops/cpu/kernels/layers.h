// Half a decoder layer as one call each: what takes 100 microseconds of Python between kernels takes a few here.
//
// The definitions are in Python: layers.mamba2.Mamba2 behind a norm, and layers.moe.feed_forward.
#pragma once

#include "experts.h"
#include "linear.h"
#include "mamba.h"
#include "norm.h"

namespace granite4_neuron {

// A projection; scale and an int8 weight where it is quantized.
struct LinearWeights {
  at::Tensor weight;  // [rows, columns]
  std::optional<at::Tensor> bias, scale;
};

inline at::Tensor linear(const at::Tensor& x, const LinearWeights& weights) {
  return granite4_neuron::linear(x, weights.weight, weights.bias, weights.scale);
}

struct MambaBlockWeights {
  at::Tensor norm;  // [hidden_size]
  LinearWeights in_proj;
  MixerWeights mixer;
  at::Tensor gated_norm;  // [inner]
  LinearWeights out_proj;
};

// eps: of a block's norms. residual_multiplier: of what a block adds.
struct BlockConstants {
  double eps, residual_multiplier;
};

// As ops.cpu.blocks.MambaBlock. hidden_states: [batch, tokens, hidden_size], float32; rows as `mamba_mixer` has them.
inline at::Tensor mamba_block(
    const at::Tensor& hidden_states, const MambaBlockWeights& weights, const MixerState& state, at::TensorList rows,
    const MixerSettings& settings, const BlockConstants& constants) {
  auto [eps, residual_multiplier] = constants;
  at::Tensor x = rms_norm(hidden_states, std::nullopt, weights.norm, eps, 1);
  at::Tensor projected = linear(x, weights.in_proj);
  int64_t inner = weights.gated_norm.size(0);
  at::Tensor z = projected.narrow(-1, 0, inner), xBC_dt = projected.narrow(-1, inner, projected.size(-1) - inner);
  at::Tensor y = mamba_mixer(xBC_dt, weights.mixer, state, rows, settings);
  at::Tensor gated = rms_norm(y, z, weights.gated_norm, eps, settings.groups);
  return residual_add(hidden_states, linear(gated, weights.out_proj), residual_multiplier);
}

// As ops.mlp.
inline at::Tensor mlp(
    const at::Tensor& x, const at::Tensor& input_weight, const at::Tensor& output_weight,
    const std::optional<at::Tensor>& input_scale, const std::optional<at::Tensor>& output_scale) {
  at::Tensor gate_up = granite4_neuron::linear(x, input_weight, std::nullopt, input_scale);
  return granite4_neuron::linear(silu_and_mul(gate_up), output_weight, std::nullopt, output_scale);
}

// Experts' weights [experts, rows, columns] have scales [experts, rows] where they are quantized.
struct ExpertWeights {
  at::Tensor router;  // [experts, hidden_size]
  LinearWeights input, output;
};

struct FeedForwardWeights {
  at::Tensor norm;  // [hidden_size]
  LinearWeights input, output;
  std::optional<ExpertWeights> experts;
};

// As ops.cpu.blocks.FeedForwardBlock, without experts or for few tokens. top_k: experts per token.
inline at::Tensor feed_forward_block(
    const at::Tensor& hidden_states, const FeedForwardWeights& weights, int64_t top_k,
    const BlockConstants& constants) {
  auto [eps, residual_multiplier] = constants;
  const auto& [norm, input, output, experts] = weights;
  at::Tensor x = rms_norm(hidden_states, std::nullopt, norm, eps, 1);
  at::Tensor mixed = mlp(x, input.weight, output.weight, input.scale, output.scale);
  at::Tensor sum = residual_add(hidden_states, mixed, residual_multiplier);
  if (!experts.has_value()) return sum;
  at::Tensor tokens = x.view({-1, x.size(-1)});
  auto [topk_weights, topk_ids] = topk_softmax(logits(tokens, experts->router, 1.0, std::nullopt), top_k);
  at::Tensor of_experts = fused_experts(
      tokens, experts->input.weight, experts->output.weight, topk_weights, topk_ids, experts->input.scale,
      experts->output.scale);
  return residual_add(sum, of_experts.view(hidden_states.sizes()), residual_multiplier);
}

}  // namespace granite4_neuron
