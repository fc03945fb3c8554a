// Half a decoder layer as one call each: what takes 100 microseconds of Python between kernels takes a few here.
#pragma once

#include "experts.h"
#include "linear.h"
#include "mamba.h"
#include "norm.h"

namespace granite4_neuron {

// As ops.cpu.mamba_block.
inline at::Tensor mamba_block(
    const at::Tensor& norm_weight, const at::Tensor& in_proj_weight, const std::optional<at::Tensor>& in_proj_bias,
    const std::optional<at::Tensor>& in_proj_scale, const at::Tensor& conv_taps,
    const std::optional<at::Tensor>& conv_bias, const at::Tensor& dt_bias, const at::Tensor& A, const at::Tensor& D,
    const at::Tensor& gated_norm_weight, const at::Tensor& out_proj_weight,
    const std::optional<at::Tensor>& out_proj_bias, const std::optional<at::Tensor>& out_proj_scale, int64_t n_groups,
    double dt_low, double dt_high, double eps, double residual_multiplier, const at::Tensor& hidden_states,
    at::Tensor conv_state, at::Tensor ssm_state, const at::Tensor& lengths, const at::Tensor& read_slots,
    const at::Tensor& slots, int64_t chunk_size, int64_t heads_per_task) {
  at::Tensor x = rms_norm(hidden_states, std::nullopt, norm_weight, eps, 1);
  at::Tensor projected = granite4_neuron::linear(x, in_proj_weight, in_proj_bias, in_proj_scale);
  int64_t inner = gated_norm_weight.size(0);
  at::Tensor z = projected.narrow(-1, 0, inner), xBC_dt = projected.narrow(-1, inner, projected.size(-1) - inner);
  at::Tensor y = mamba_mixer(
      xBC_dt, conv_taps, conv_bias, dt_bias, A, D, conv_state, ssm_state, lengths, read_slots, slots, n_groups, dt_low,
      dt_high, chunk_size, heads_per_task);
  at::Tensor gated = rms_norm(y, z, gated_norm_weight, eps, n_groups);
  return residual_add(
      hidden_states, granite4_neuron::linear(gated, out_proj_weight, out_proj_bias, out_proj_scale),
      residual_multiplier);
}

// As ops.mlp.
inline at::Tensor mlp(
    const at::Tensor& x, const at::Tensor& input_weight, const at::Tensor& output_weight,
    const std::optional<at::Tensor>& input_scale, const std::optional<at::Tensor>& output_scale) {
  at::Tensor gate_up = granite4_neuron::linear(x, input_weight, std::nullopt, input_scale);
  return granite4_neuron::linear(silu_and_mul(gate_up), output_weight, std::nullopt, output_scale);
}

// As ops.cpu.feed_forward_block, without experts or for few tokens.
inline at::Tensor feed_forward_block(
    const at::Tensor& norm_weight, const at::Tensor& input_weight, const at::Tensor& output_weight,
    const std::optional<at::Tensor>& input_scale, const std::optional<at::Tensor>& output_scale,
    const std::optional<at::Tensor>& router_weight, int64_t top_k, const std::optional<at::Tensor>& w1,
    const std::optional<at::Tensor>& w2, const std::optional<at::Tensor>& w1_scale,
    const std::optional<at::Tensor>& w2_scale, double eps, double residual_multiplier,
    const at::Tensor& hidden_states) {
  at::Tensor x = rms_norm(hidden_states, std::nullopt, norm_weight, eps, 1);
  at::Tensor mixed = mlp(x, input_weight, output_weight, input_scale, output_scale);
  at::Tensor output = residual_add(hidden_states, mixed, residual_multiplier);
  if (!router_weight.has_value()) return output;
  at::Tensor tokens = x.view({-1, x.size(-1)});
  auto [topk_weights, topk_ids] = topk_softmax(logits(tokens, *router_weight, 1.0, std::nullopt), top_k);
  at::Tensor experts = fused_experts(tokens, *w1, *w2, topk_weights, topk_ids, w1_scale, w2_scale);
  return residual_add(output, experts.view(hidden_states.sizes()), residual_multiplier);
}

}  // namespace granite4_neuron
