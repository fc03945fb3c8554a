// Root mean square normalisation and the activation of the MLPs, each in one pass over its input.
#pragma once

#include "buffers.h"
#include "common.h"
#include "parallel.h"

namespace granite4_neuron {

// Values that one thread has done by the time that others have noticed.
constexpr int64_t MIN_VALUES_PER_TASK = 16384;

// to = x * silu(z) for `count` channels, or x where z is null; returns the sum of squares.
template <typename X, typename Z>
inline float gate_and_square(const X* x, const Z* z, float* to, int64_t count) {
  Vec squares(0.0f);
  int64_t i = 0;
  for (; i + PAIR <= count; i += PAIR) {
    auto [first, second] = load_pair(x + i);
    if (z != nullptr) {
      auto [z_first, z_second] = load_pair(z + i);
      first = first * silu(z_first);
      second = second * silu(z_second);
    }
    squares = at::vec::fmadd(first, first, squares);
    squares = at::vec::fmadd(second, second, squares);
    first.store(to + i);
    second.store(to + i + LANES);
  }
  float total = sum(squares);
  for (; i < count; i++) {
    to[i] = static_cast<float>(x[i]) * (z != nullptr ? silu(static_cast<float>(z[i])) : 1.0f);
    total += to[i] * to[i];
  }
  return total;
}

template <typename T>
inline void scale_by_weight(const float* x, float scale, const T* weight, T* to, int64_t count) {
  int64_t i = 0;
  for (; i + PAIR <= count; i += PAIR) {
    auto [w_first, w_second] = load_pair(weight + i);
    Vec factor(scale);
    store_pair(to + i, Vec::loadu(x + i) * factor * w_first, Vec::loadu(x + i + LANES) * factor * w_second);
  }
  for (; i < count; i++) to[i] = static_cast<T>(x[i] * scale * static_cast<float>(weight[i]));
}

// As ops.rms_norm, and with z as ops.rms_norm_gated. x: [..., channels], float32 or weight's dtype;
// z: [..., channels] in weight's dtype; weight: [channels].
inline at::Tensor rms_norm(
    const at::Tensor& any_x, const std::optional<at::Tensor>& any_z, const at::Tensor& weight, double eps,
    int64_t n_groups) {
  int64_t channels = check_width(any_x, "x"), rows = any_x.numel() / channels;
  TORCH_CHECK(n_groups > 0 && channels % n_groups == 0, "n_groups is ", n_groups, " of ", channels, " channels");
  int64_t width = channels / n_groups;
  check_dense(weight, "weight", {channels}, weight.scalar_type());
  if (any_z.has_value()) check_shape(*any_z, "z", any_x.sizes());
  at::Tensor x = any_x.reshape({rows, channels});
  std::optional<at::Tensor> z;
  if (any_z.has_value()) z = any_z->reshape({rows, channels});
  check_last_axis(x, "x");
  if (z.has_value()) check_last_axis(*z, "z");
  at::Tensor y = empty(any_x.sizes(), weight.options());
  GRANITE4_DISPATCH(weight.scalar_type(), "rms_norm", [&] {
    auto normalise = [&](auto* input) {
      const auto* gate = z.has_value() ? z->const_data_ptr<scalar_t>() : nullptr;
      const auto* w = weight.const_data_ptr<scalar_t>();
      auto* out = y.mutable_data_ptr<scalar_t>();
      int64_t x_stride = x.stride(0), z_stride = z.has_value() ? z->stride(0) : 0;
      parallel_tasks(rows, std::max<int64_t>(1, MIN_VALUES_PER_TASK / channels), [&](int64_t begin, int64_t end) {
        std::vector<float> gated(width);
        for (int64_t row = begin; row < end; row++) {
          for (int64_t from = 0; from < channels; from += width) {
            const scalar_t* z_from = gate ? gate + row * z_stride + from : nullptr;
            float squares = gate_and_square(input + row * x_stride + from, z_from, gated.data(), width);
            float scale = 1.0f / std::sqrt(squares / width + static_cast<float>(eps));
            scale_by_weight(gated.data(), scale, w + from, out + row * channels + from, width);
          }
        }
      });
    };
    if (x.scalar_type() == at::kFloat) {
      normalise(x.const_data_ptr<float>());
    } else {
      normalise(x.const_data_ptr<scalar_t>());
    }
  });
  return y;
}

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

// As ops.silu_and_mul. x: [..., 2 * width], contiguous.
inline at::Tensor silu_and_mul(const at::Tensor& x) {
  int64_t width = check_width(x, "x") / 2;
  TORCH_CHECK(x.is_contiguous() && x.size(-1) % 2 == 0, "x must be contiguous, and have an even number of channels");
  int64_t rows = x.numel() / x.size(-1);
  auto shape = x.sizes().vec();
  shape.back() = width;
  at::Tensor y = empty(shape, x.options());
  GRANITE4_DISPATCH(x.scalar_type(), "silu_and_mul", [&] {
    const auto* from = x.const_data_ptr<scalar_t>();
    auto* to = y.mutable_data_ptr<scalar_t>();
    parallel_tasks(rows, std::max<int64_t>(1, MIN_VALUES_PER_TASK / width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        const scalar_t* gate = from + row * 2 * width;
        silu_and_mul(gate, gate + width, to + row * width, width);
      }
    });
  });
  return y;
}

// As ops.residual_add. x: float32; y: any dtype; both contiguous and of one shape.
inline at::Tensor residual_add(const at::Tensor& x, const at::Tensor& y, double alpha) {
  int64_t width = check_width(x, "x"), rows = x.numel() / width;
  check_dense(x, "x", x.sizes(), at::kFloat);
  check_dense(y, "y", x.sizes(), y.scalar_type());
  at::Tensor sum = empty(x.sizes(), x.options());
  float factor = static_cast<float>(alpha);
  GRANITE4_DISPATCH(y.scalar_type(), "residual_add", [&] {
    parallel_tasks(rows, std::max<int64_t>(1, MIN_VALUES_PER_TASK / width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        const float* a = x.const_data_ptr<float>() + row * width;
        const scalar_t* b = y.const_data_ptr<scalar_t>() + row * width;
        float* out = sum.mutable_data_ptr<float>() + row * width;
        int64_t i = 0;
        for (; i + PAIR <= width; i += PAIR) {
          auto [first, second] = load_pair(b + i);
          at::vec::fmadd(Vec(factor), first, Vec::loadu(a + i)).store(out + i);
          at::vec::fmadd(Vec(factor), second, Vec::loadu(a + i + LANES)).store(out + i + LANES);
        }
        for (; i < width; i++) out[i] = a[i] + factor * static_cast<float>(b[i]);
      }
    });
  });
  return sum;
}

}  // namespace granite4_neuron
