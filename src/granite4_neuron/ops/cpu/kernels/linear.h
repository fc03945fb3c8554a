// Products of a weight matrix with a few vectors: the weights are read once, at the speed of memory.
#pragma once

#include "common.h"
#include "parallel.h"

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace granite4_neuron {

// How a dtype's weights meet the vectors: `Input` is what vectors are converted to, STEP how many columns a step takes.
template <typename T>
struct Product {
  using Input = float;
  using Weights = std::pair<Vec, Vec>;
  static constexpr int64_t STEP = PAIR;
  static Weights load(const T* weights) {
    return load_pair(weights);
  }
  static Vec add(Vec total, const Weights& weights, const Input* x) {
    total = at::vec::fmadd(weights.first, Vec::loadu(x), total);
    return at::vec::fmadd(weights.second, Vec::loadu(x + LANES), total);
  }
};

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
// One instruction multiplies 32 pairs of bfloat16, exactly, and adds them in float32.
template <>
struct Product<at::BFloat16> {
  using Input = at::BFloat16;
  using Weights = __m512bh;
  static constexpr int64_t STEP = 32;
  static Weights load(const at::BFloat16* weights) {
    return (__m512bh)_mm512_loadu_si512(weights);
  }
  static Vec add(Vec total, Weights weights, const Input* x) {
    return Vec(_mm512_dpbf16_ps(total, weights, (__m512bh)_mm512_loadu_si512(x)));
  }
};
#endif

// Vectors up to which reading the weights takes longer than the arithmetic.
constexpr int64_t FEW = 8;

// Rows that are worked on while the next ones are fetched.
constexpr int64_t GROUP = 16;
// Bytes of vectors that stay in the nearest cache while weights pass through it.
constexpr int64_t NEAR = 16 * 1024;

// sums[v] + the tail = row . x[v] for columns `from` to `to`; calls fetch() once per step.
template <typename T, int VECTORS, typename Fetch>
inline void multiply_row(
    const T* row, const typename Product<T>::Input* x, int64_t columns, int64_t from, int64_t to, float* totals,
    const Fetch& fetch) {
  using P = Product<T>;
  Vec sums[VECTORS];
  for (auto& one : sums) one = Vec(0.0f);
  int64_t column = from;
  for (; column + P::STEP <= to; column += P::STEP) {
    fetch();
    auto w = P::load(row + column);
    for (int v = 0; v < VECTORS; v++) sums[v] = P::add(sums[v], w, x + v * columns + column);
  }
  for (int v = 0; v < VECTORS; v++) {
    totals[v] += sum(sums[v]);
    for (int64_t c = column; c < to; c++)
      totals[v] += static_cast<float>(row[c]) * static_cast<float>(x[v * columns + c]);
  }
}

// `multiply` for a number of vectors that is known to the compiler.
//
// One row at a time: memory gives a single run of addresses almost twice what it gives several at once. With three
// vectors and more there is so much to do per row that the processor does not look ahead far enough by itself: each
// step fetches what the same step of the next group reads, in order, into the second-level cache. From there a group
// can be read in blocks of columns, for which the vectors stay near.
template <typename T, int VECTORS, typename Emit>
inline void multiply_vectors(
    const T* weights, const typename Product<T>::Input* x, int64_t columns, int64_t begin, int64_t end,
    const Emit& emit) {
  using P = Product<T>;
  if constexpr (VECTORS < 3) {
    for (int64_t row = begin; row < end; row++) {
      float totals[VECTORS] = {};
      multiply_row<T, VECTORS>(weights + row * columns, x, columns, 0, columns, totals, [] {});
      for (int v = 0; v < VECTORS; v++) emit(row, v, totals[v]);
    }
    return;
  }
  constexpr int64_t BLOCK = NEAR / (VECTORS * sizeof(typename P::Input)) / P::STEP * P::STEP;
  for (int64_t first = begin; first < end; first += GROUP) {
    int64_t rows = std::min(GROUP, end - first);
    float totals[GROUP][VECTORS] = {};
    const char* later = reinterpret_cast<const char*>(weights + (first + rows) * columns);
    auto fetch = [&] {
      for (size_t byte = 0; byte < P::STEP * sizeof(T); byte += 64) __builtin_prefetch(later + byte, 0, 2);
      later += P::STEP * sizeof(T);
    };
    for (int64_t from = 0; from < columns; from += BLOCK)
      for (int64_t r = 0; r < rows; r++)
        multiply_row<T, VECTORS>(
            weights + (first + r) * columns, x, columns, from, std::min(from + BLOCK, columns), totals[r], fetch);
    for (int64_t r = 0; r < rows; r++)
      for (int v = 0; v < VECTORS; v++) emit(first + r, v, totals[r][v]);
  }
}

// emit(row, vector, weights[row] . x[vector]) for rows begin to end and all vectors.
//
// weights: [rows, columns]. x: [vectors, columns], as `as_input` gives it.
template <typename T, typename Emit>
inline void multiply(
    const T* weights, const typename Product<T>::Input* x, int64_t vectors, int64_t columns, int64_t begin, int64_t end,
    const Emit& emit) {
  for (int64_t first = 0; first < vectors; first += FEW) {
    const auto* some = x + first * columns;
    auto emit_one = [&](int64_t row, int64_t vector, float value) { emit(row, first + vector, value); };
    switch (std::min(FEW, vectors - first)) {
      case 1: multiply_vectors<T, 1>(weights, some, columns, begin, end, emit_one); break;
      case 2: multiply_vectors<T, 2>(weights, some, columns, begin, end, emit_one); break;
      case 3: multiply_vectors<T, 3>(weights, some, columns, begin, end, emit_one); break;
      case 4: multiply_vectors<T, 4>(weights, some, columns, begin, end, emit_one); break;
      case 5: multiply_vectors<T, 5>(weights, some, columns, begin, end, emit_one); break;
      case 6: multiply_vectors<T, 6>(weights, some, columns, begin, end, emit_one); break;
      case 7: multiply_vectors<T, 7>(weights, some, columns, begin, end, emit_one); break;
      case 8: multiply_vectors<T, 8>(weights, some, columns, begin, end, emit_one); break;
    }
  }
}

// The vectors as `multiply` reads them: themselves, or a copy in `scratch`.
template <typename T>
inline const typename Product<T>::Input* as_input(
    const T* x, int64_t count, std::vector<typename Product<T>::Input>& scratch) {
  if constexpr (std::is_same_v<T, typename Product<T>::Input>) {
    return x;
  } else {
    scratch.resize(count);
    to_float(x, scratch.data(), count);
    return scratch.data();
  }
}

// Rows of weights that a thread takes at a time: enough that it reads a long run of addresses, few enough that threads
// end together.
inline int64_t rows_per_task(int64_t columns, int64_t element_size) {
  return std::max<int64_t>(GROUP, 48 * 1024 / (columns * element_size));
}

// y = scale * (weight . x) + bias, for few vectors. x: [vectors, columns]; weight: [rows, columns]; y: [vectors, rows].
template <typename T, typename Out>
inline void linear_few(
    const T* x, int64_t vectors, const T* weight, const T* bias, float scale, Out* y, int64_t rows, int64_t columns) {
  std::vector<typename Product<T>::Input> scratch;
  const auto* input = as_input(x, vectors * columns, scratch);
  parallel_tasks(rows, rows_per_task(columns, sizeof(T)), [&](int64_t begin, int64_t end) {
    multiply<T>(weight, input, vectors, columns, begin, end, [&](int64_t row, int64_t vector, float value) {
      value *= scale;
      y[vector * rows + row] = static_cast<Out>(bias ? value + static_cast<float>(bias[row]) : value);
    });
  });
}

inline int64_t rows_of(const at::Tensor& x) {
  return x.numel() / x.size(-1);
}

inline std::vector<int64_t> with_last(const at::Tensor& x, int64_t size) {
  auto shape = x.sizes().vec();
  shape.back() = size;
  return shape;
}

inline void check_product(const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK(weight.is_contiguous() && x.scalar_type() == weight.scalar_type() && x.size(-1) == weight.size(1));
}

// As torch.nn.functional.linear. x: [..., columns]; weight: [rows, columns]; bias: [rows].
inline at::Tensor linear(const at::Tensor& any_x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (rows_of(any_x) > FEW) return at::linear(any_x, weight, bias);
  check_product(any_x, weight);
  at::Tensor x = any_x.contiguous(), y = at::empty(with_last(x, weight.size(0)), x.options());
  GRANITE4_DISPATCH(x.scalar_type(), "linear", [&] {
    linear_few<scalar_t>(
        x.const_data_ptr<scalar_t>(), rows_of(x), weight.const_data_ptr<scalar_t>(),
        bias.has_value() ? bias->const_data_ptr<scalar_t>() : nullptr, 1.0f, y.mutable_data_ptr<scalar_t>(),
        weight.size(0), weight.size(1));
  });
  return y;
}

// As ops.logits; for few tokens the products are never rounded to the weights' dtype.
inline at::Tensor logits(const at::Tensor& any_x, const at::Tensor& weight, double scaling) {
  if (rows_of(any_x) > FEW) return at::linear(any_x, weight).to(at::kFloat).div_(scaling);
  check_product(any_x, weight);
  at::Tensor x = any_x.contiguous(), y = at::empty(with_last(x, weight.size(0)), x.options().dtype(at::kFloat));
  GRANITE4_DISPATCH(x.scalar_type(), "logits", [&] {
    linear_few<scalar_t>(
        x.const_data_ptr<scalar_t>(), rows_of(x), weight.const_data_ptr<scalar_t>(),
        static_cast<const scalar_t*>(nullptr), static_cast<float>(1.0 / scaling), y.mutable_data_ptr<float>(),
        weight.size(0), weight.size(1));
  });
  return y;
}

}  // namespace granite4_neuron
