// Products of packed weights with any number of vectors.
#pragma once

#include "formats.h"
#include "matmul.h"

namespace granite4_neuron {

// to[i] = factor * acc[i] + bias[i] for `count` rows of a tile. bias: null for none.
template <typename T, typename Out>
inline void store_acc(
    const std::array<Vec, TILE / LANES>& acc, float factor, const T* bias, Out* to, int64_t count) {
  if (count == TILE) {
    for (int v = 0; v < TILE / LANES; v += 2) {
      Vec first = acc[v] * Vec(factor), second = acc[v + 1] * Vec(factor);
      if (bias != nullptr) {
        auto [b_first, b_second] = load_pair(bias + v * LANES);
        first = first + b_first;
        second = second + b_second;
      }
      store_pair(to + v * LANES, first, second);
    }
    return;
  }
  float values[TILE];
  for (int v = 0; v < TILE / LANES; v++) acc[v].store(values + v * LANES);
  for (int64_t i = 0; i < count; i++) {
    float value = values[i] * factor;
    to[i] = static_cast<Out>(bias != nullptr ? value + static_cast<float>(bias[i]) : value);
  }
}

// Prefetches on idle threads the weights that were used next in the previous step. With more than 1024 weights some are
// forgotten.
inline void prefetch_follower(const Weight& weight) {
  struct Follower {
    const char* tiles;
    int64_t bytes;
  };
  constexpr int BITS = 10;
  thread_local std::array<Follower, 1 << BITS> followers{};
  thread_local Follower* follower = followers.data();
  auto hash = reinterpret_cast<uintptr_t>(weight.tiles) / 64 * uint64_t{0x9E3779B97F4A7C15};
  *follower = {weight.tiles, weight.num_bytes()};
  follower = &followers[hash >> (64 - BITS)];
  ThreadPool::instance().prefetch_when_idle(follower->tiles, follower->bytes);
}

// y = factor * (weight . x) + bias. x: [vectors, columns]; bias: [rows], or null; y: [vectors, rows].
template <typename Tiles, typename T, typename Out>
inline void multiply_all(const Weight& weight, const T* x, int64_t vectors, const T* bias, float factor, Out* y) {
  using Arithmetic = typename Tiles::Arithmetic;
  Scratch<typename Arithmetic::Input> scratch(ActivationPanel<Arithmetic>::size(vectors, weight.columns));
  auto inputs = as_panel<Arithmetic>(x, vectors, weight.columns, scratch.data());
  prefetch_follower(weight);
  parallel_tasks(tiles_of(weight.rows), vectors <= SMALL_BATCH ? TILE_UNROLL : 1, [&](int64_t begin, int64_t end) {
    multiply_tiles<Tiles>(weight, 0, begin, end, inputs, [&](int64_t number, int64_t v, const auto& acc) {
      int64_t row = number * TILE, count = std::min(TILE, weight.rows - row);
      store_acc(acc, factor, bias ? bias + row : nullptr, y + v * weight.rows + row, count);
    });
  });
}

// Of the weights alone.
inline void check_bias(const Weight& weight, const std::optional<at::Tensor>& bias) {
  if (bias.has_value()) check_dense(*bias, "bias", {weight.rows}, weight.dtype);
}

inline int64_t rows_of(const at::Tensor& x) {
  return x.numel() / x.size(-1);
}

inline std::vector<int64_t> with_last(const at::Tensor& x, int64_t size) {
  auto shape = x.sizes().vec();
  shape.back() = size;
  return shape;
}

inline void check_product(const at::Tensor& x, const Weight& weight) {
  TORCH_CHECK(x.scalar_type() == weight.dtype, "vectors of ", x.scalar_type(), " and weights for ", weight.dtype);
  TORCH_CHECK(check_width(x, "x") == weight.columns, x.size(-1), " values of a vector and ", weight.columns, " columns");
}

inline void check_matrix(const Weight& weight) {
  TORCH_CHECK(weight.experts == 1, "there are ", weight.experts, " matrices where one is needed");
}

// As ops.linear. x: [..., columns]; bias: [rows].
inline at::Tensor linear(const at::Tensor& any_x, const Weight& weight, const std::optional<at::Tensor>& bias) {
  check_product(any_x, weight);
  check_matrix(weight);
  check_bias(weight, bias);
  at::Tensor x = any_x.contiguous(), y = empty(with_last(x, weight.rows), x.options());
  if (y.numel() == 0) return y;
  GRANITE4_DISPATCH_WEIGHT(weight, "linear", [&] {
    multiply_all<tiles_t>(
        weight, x.const_data_ptr<scalar_t>(), rows_of(x), pointer<scalar_t>(bias), 1.0f,
        y.mutable_data_ptr<scalar_t>());
  });
  return y;
}

// As ops.logits; products are never rounded to the weights' dtype.
inline at::Tensor logits(const at::Tensor& any_x, const Weight& weight, double scaling) {
  check_product(any_x, weight);
  check_matrix(weight);
  at::Tensor x = any_x.contiguous(), y = empty(with_last(x, weight.rows), x.options().dtype(at::kFloat));
  if (y.numel() == 0) return y;
  GRANITE4_DISPATCH_WEIGHT(weight, "logits", [&] {
    multiply_all<tiles_t, scalar_t>(
        weight, x.const_data_ptr<scalar_t>(), rows_of(x), nullptr, static_cast<float>(1.0 / scaling),
        y.mutable_data_ptr<float>());
  });
  return y;
}

}  // namespace granite4_neuron
