// Products of packed weights with any number of vectors.
#pragma once

#include "checks.h"
#include "weight.h"

namespace granite4_neuron {

// Checks that need the weights only.
inline void check_bias(const Weight& weight, const std::optional<at::Tensor>& bias) {
  if (bias.has_value()) check_dense(*bias, "bias", {weight.rows}, weight.dtype);
}

inline void check_matrix(const Weight& weight) {
  TORCH_CHECK(weight.experts == 1, "there are ", weight.experts, " matrices where one is needed");
}

// As ops.linear. x: [..., columns]; bias: [rows].
at::Tensor linear(const at::Tensor& any_x, const Weight& weight, const std::optional<at::Tensor>& bias);

// As ops.logits; products are never rounded to the weights' dtype.
at::Tensor logits(const at::Tensor& any_x, const Weight& weight, double scaling);

}  // namespace granite4_neuron
