// Whole layers as one call each: what takes 20 microseconds of Python between kernels takes one here.
#pragma once

#include "linear.h"
#include "mamba.h"
#include "norm.h"

namespace granite4_neuron {

// As ops.mlp.
inline at::Tensor mlp(const at::Tensor& x, const at::Tensor& input_weight, const at::Tensor& output_weight) {
  at::Tensor gate_up = granite4_neuron::linear(x, input_weight, std::nullopt);
  return granite4_neuron::linear(silu_and_mul(gate_up), output_weight, std::nullopt);
}

// As ops.cpu.mamba2.
inline at::Tensor mamba2(
    const at::Tensor& hidden_states, const at::Tensor& in_proj_weight, const std::optional<at::Tensor>& in_proj_bias,
    const at::Tensor& conv_weight, const std::optional<at::Tensor>& conv_bias, const at::Tensor& dt_bias,
    const at::Tensor& A_log, const at::Tensor& D, const at::Tensor& norm_weight, const at::Tensor& out_proj_weight,
    const std::optional<at::Tensor>& out_proj_bias, at::Tensor conv_state, at::Tensor ssm_state,
    const at::Tensor& lengths, const at::Tensor& read_slots, const at::Tensor& slots, int64_t n_groups, double dt_low,
    double dt_high, double eps) {
  at::Tensor projected = granite4_neuron::linear(hidden_states, in_proj_weight, in_proj_bias);
  int64_t inner = norm_weight.size(0);
  at::Tensor z = projected.narrow(-1, 0, inner), xBC_dt = projected.narrow(-1, inner, projected.size(-1) - inner);
  at::Tensor y = mamba_mixer(
      xBC_dt, conv_weight, conv_bias, dt_bias, A_log, D, conv_state, ssm_state, lengths, read_slots, slots, n_groups,
      dt_low, dt_high);
  return granite4_neuron::linear(rms_norm(y, z, norm_weight, eps, n_groups), out_proj_weight, out_proj_bias);
}

}  // namespace granite4_neuron
