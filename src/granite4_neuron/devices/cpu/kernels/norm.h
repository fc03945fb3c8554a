// Root mean square normalisation and the activation of the MLPs, each in one pass over its input.
#pragma once

#include "common.h"

namespace granite4_neuron {

// As ops.rms_norm, and with z as ops.rms_norm_gated. x: [..., channels], float32 or weight's dtype;
// z: [..., channels] in weight's dtype; weight: [channels].
at::Tensor rms_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& z, const at::Tensor& weight, double eps, int64_t n_groups);

// As ops.silu_and_mul. x: [..., 2 * width], contiguous.
at::Tensor silu_and_mul(const at::Tensor& x);

// The same for `count` channels.
template <typename X, typename T>
inline void silu_and_mul(const X* gate, const X* up, T* to, int64_t count) {
  int64_t i = 0;
  for (; i + PAIR <= count; i += PAIR) {
    auto [g_first, g_second] = load_pair(gate + i);
    auto [u_first, u_second] = load_pair(up + i);
    store_pair(to + i, silu(g_first) * u_first, silu(g_second) * u_second);
  }
  for (; i < count; i++) to[i] = static_cast<T>(silu(static_cast<float>(gate[i])) * static_cast<float>(up[i]));
}

// As ops.relu2. x: [..., width], contiguous.
at::Tensor relu2(const at::Tensor& x);

// The same for `count` channels.
template <typename X, typename T>
inline void relu2(const X* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    float value = std::max(static_cast<float>(from[i]), 0.0f);
    to[i] = static_cast<T>(value * value);
  }
}

// As ops.activate: `relu2` of [..., width], and `silu_and_mul` of [..., 2 * width].
inline at::Tensor activate(const at::Tensor& x, int64_t width) {
  return x.size(-1) == width ? relu2(x) : silu_and_mul(x);
}

// As ops.residual_add. x: float32; y: any dtype; both contiguous and of one shape.
at::Tensor residual_add(const at::Tensor& x, const at::Tensor& y, double alpha);

}  // namespace granite4_neuron
