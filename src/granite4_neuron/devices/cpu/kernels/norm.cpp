// Norms, the activation of the MLPs, the residual sum and rotary positions: operations on each token by itself.
#include "norm.h"

#include "buffers.h"
#include "parallel.h"
#include "profile.h"
#include "rotary.h"

namespace granite4_neuron {

// One thread processes this many values before other threads can start.
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

at::Tensor rms_norm(
    const at::Tensor& any_x, const std::optional<at::Tensor>& any_z, const at::Tensor& weight, double eps,
    int64_t n_groups) {
  PartOfStep part(Part::norms);
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

at::Tensor silu_and_mul(const at::Tensor& x) {
  PartOfStep part(Part::norms);
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

at::Tensor relu2(const at::Tensor& x) {
  PartOfStep part(Part::norms);
  int64_t width = check_width(x, "x"), rows = x.numel() / width;
  TORCH_CHECK(x.is_contiguous(), "x must be contiguous");
  at::Tensor y = empty(x.sizes(), x.options());
  GRANITE4_DISPATCH(x.scalar_type(), "relu2", [&] {
    const auto* from = x.const_data_ptr<scalar_t>();
    auto* to = y.mutable_data_ptr<scalar_t>();
    parallel_tasks(rows, std::max<int64_t>(1, MIN_VALUES_PER_TASK / width), [&](int64_t begin, int64_t end) {
      relu2(from + begin * width, to + begin * width, (end - begin) * width);
    });
  });
  return y;
}

at::Tensor residual_add(const at::Tensor& x, const at::Tensor& y, double alpha) {
  PartOfStep part(Part::norms);
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

void apply_rotary(at::Tensor x, const RotaryTables& tables) {
  PartOfStep part(Part::norms);
  int64_t rows = x.size(0) * x.size(1), heads = x.size(2), half = x.size(3) / 2;
  TORCH_CHECK(x.is_contiguous() && x.size(3) == 2 * half, "heads have an odd number of values: ", x.size(3));
  for (const at::Tensor* table : {&tables.cos, &tables.sin})
    check_dense(*table, "a rotary table", {x.size(0), x.size(1), half}, at::kFloat);
  GRANITE4_DISPATCH(x.scalar_type(), "apply_rotary", [&] {
    auto* data = x.mutable_data_ptr<scalar_t>();
    parallel_tasks(rows, 32, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        const float *cos = tables.cos.const_data_ptr<float>() + row * half;
        const float *sin = tables.sin.const_data_ptr<float>() + row * half;
        for (int64_t head = 0; head < heads; head++) {
          scalar_t *first = data + (row * heads + head) * 2 * half, *second = first + half;
          for (int64_t i = 0; i < half; i++) {
            float a = static_cast<float>(first[i]), b = static_cast<float>(second[i]);
            first[i] = static_cast<scalar_t>(a * cos[i] - b * sin[i]);
            second[i] = static_cast<scalar_t>(b * cos[i] + a * sin[i]);
          }
        }
      }
    });
  });
}

}  // namespace granite4_neuron
