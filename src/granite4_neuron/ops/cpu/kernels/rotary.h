// Rotary positions.
#pragma once

#include "common.h"
#include "parallel.h"

namespace granite4_neuron {

struct RotaryTables {
  at::Tensor cos, sin;  // [batch, tokens, head_dim / 2], float32
};

// As ops.apply_rotary, in place. x: [batch, tokens, heads, head_dim].
inline void apply_rotary(at::Tensor x, const RotaryTables& tables) {
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
