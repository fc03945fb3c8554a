// Products of a weight matrix with a few vectors: the weights are read once, at the speed of memory.
#pragma once

#include "common.h"
#include "parallel.h"

namespace granite4_neuron {

// A row's sum in two parts: with one, each step would wait for the step before.
struct TwoSums {
  using Total = std::pair<Vec, Vec>;
  static Total zero() {
    return {Vec(0.0f), Vec(0.0f)};
  }
  static float finish(const Total& total) {
    return sum(total.first + total.second);
  }
};

// How weights of type W meet vectors of type T: `Input` is what vectors are converted to, STEP how many columns a step
// takes, FETCH_FROM from how many vectors on weights are fetched ahead. Weights of int8 are multiplied as the whole
// numbers that they are; their scale is for what receives the sum.
template <typename T, typename W>
struct Product : TwoSums {
  using Input = float;
  using Weights = std::pair<Vec, Vec>;
  static constexpr int64_t STEP = PAIR;
  static constexpr int FETCH_FROM = std::is_same_v<W, int8_t> ? 1 : 3;
  static Weights load(const W* weights) {
    return load_pair(weights);
  }
  static void add(Total& total, const Weights& weights, const Input* x) {
    total.first = at::vec::fmadd(weights.first, Vec::loadu(x), total.first);
    total.second = at::vec::fmadd(weights.second, Vec::loadu(x + LANES), total.second);
  }
};

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
// One instruction multiplies 32 pairs of bfloat16, exactly, and adds them in float32.
template <>
struct Product<at::BFloat16, at::BFloat16> {
  using Input = at::BFloat16;
  using Weights = __m512bh;
  using Total = Vec;
  static constexpr int64_t STEP = 32;
  static constexpr int FETCH_FROM = 3;
  static Total zero() {
    return Vec(0.0f);
  }
  static Weights load(const at::BFloat16* weights) {
    return (__m512bh)_mm512_loadu_si512(weights);
  }
  static void add(Total& total, Weights weights, const Input* x) {
    total = Vec(_mm512_dpbf16_ps(total, weights, (__m512bh)_mm512_loadu_si512(x)));
  }
  static float finish(const Total& total) {
    return sum(total);
  }
};
#endif

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
// One byte of each of the numbers 0 to 127 in bfloat16, the upper half of float32.
constexpr std::array<uint8_t, 128> bfloat16_bytes(int shift) {
  std::array<uint8_t, 128> bytes{};
  for (int i = 0; i < 128; i++) bytes[i] = std::bit_cast<uint32_t>(static_cast<float>(i)) >> shift & 0xff;
  return bytes;
}

// Whole numbers from -127 to 127 are numbers of bfloat16 too: 64 of them are looked up at a time, which takes half the
// instructions that conversions do.
template <>
struct Product<at::BFloat16, int8_t> : TwoSums {
  using Input = at::BFloat16;
  using Weights = std::pair<__m512bh, __m512bh>;
  static constexpr int64_t STEP = 64;
  static constexpr int FETCH_FROM = 2;
  static Weights load(const int8_t* weights) {
    // Each 16 bytes of the two results are made of 8 bytes of the same 16: these are put there first.
    __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i values = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(weights));
    __m512i sizes = _mm512_abs_epi8(values);
    __m512i low = look_up(LOW, sizes), high = look_up(HIGH, sizes);
    high = _mm512_or_si512(high, _mm512_and_si512(values, _mm512_set1_epi8(-128)));  // the signs
    return {(__m512bh)_mm512_unpacklo_epi8(low, high), (__m512bh)_mm512_unpackhi_epi8(low, high)};
  }
  static void add(Total& total, const Weights& weights, const Input* x) {
    total.first = Vec(_mm512_dpbf16_ps(total.first, weights.first, (__m512bh)_mm512_loadu_si512(x)));
    total.second = Vec(_mm512_dpbf16_ps(total.second, weights.second, (__m512bh)_mm512_loadu_si512(x + 32)));
  }

 private:
  static constexpr std::array<uint8_t, 128> LOW = bfloat16_bytes(16), HIGH = bfloat16_bytes(24);
  static __m512i look_up(const std::array<uint8_t, 128>& table, __m512i at) {
    return _mm512_permutex2var_epi8(_mm512_loadu_si512(&table[0]), at, _mm512_loadu_si512(&table[64]));
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
template <typename P, int VECTORS, typename W, typename Fetch>
inline void multiply_row(
    const W* row, const typename P::Input* x, int64_t columns, int64_t from, int64_t to, float* totals,
    const Fetch& fetch) {
  typename P::Total sums[VECTORS];
  for (auto& one : sums) one = P::zero();
  int64_t column = from;
  for (; column + P::STEP <= to; column += P::STEP) {
    fetch();
    auto w = P::load(row + column);
    for (int v = 0; v < VECTORS; v++) P::add(sums[v], w, x + v * columns + column);
  }
  for (int v = 0; v < VECTORS; v++) {
    totals[v] += P::finish(sums[v]);
    for (int64_t c = column; c < to; c++)
      totals[v] += static_cast<float>(row[c]) * static_cast<float>(x[v * columns + c]);
  }
}

// `multiply` for a number of vectors that is known to the compiler.
//
// One row at a time: memory gives a single run of addresses almost twice what it gives several at once. From FETCH_FROM
// vectors on there is so much to do per row that the processor does not look ahead far enough by itself: each step
// fetches what the same step of the next group reads, in order, into the second-level cache. From there a group can be
// read in blocks of columns, for which the vectors stay near.
template <typename P, int VECTORS, typename W, typename Emit>
inline void multiply_vectors(
    const W* weights, const typename P::Input* x, int64_t columns, int64_t begin, int64_t end, const Emit& emit) {
  if constexpr (VECTORS < P::FETCH_FROM) {
    for (int64_t row = begin; row < end; row++) {
      float totals[VECTORS] = {};
      multiply_row<P, VECTORS>(weights + row * columns, x, columns, 0, columns, totals, [] {});
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
      for (size_t byte = 0; byte < P::STEP * sizeof(W); byte += 64) __builtin_prefetch(later + byte, 0, 2);
      later += P::STEP * sizeof(W);
    };
    for (int64_t from = 0; from < columns; from += BLOCK)
      for (int64_t r = 0; r < rows; r++)
        multiply_row<P, VECTORS>(
            weights + (first + r) * columns, x, columns, from, std::min(from + BLOCK, columns), totals[r], fetch);
    for (int64_t r = 0; r < rows; r++)
      for (int v = 0; v < VECTORS; v++) emit(first + r, v, totals[r][v]);
  }
}

// emit(row, vector, weights[row] . x[vector]) for rows begin to end and all vectors.
//
// weights: [rows, columns]. x: [vectors, columns], as `as_input` gives it.
template <typename P, typename W, typename Emit>
inline void multiply(
    const W* weights, const typename P::Input* x, int64_t vectors, int64_t columns, int64_t begin, int64_t end,
    const Emit& emit) {
  for (int64_t first = 0; first < vectors; first += FEW) {
    const auto* some = x + first * columns;
    auto emit_one = [&](int64_t row, int64_t vector, float value) { emit(row, first + vector, value); };
    switch (std::min(FEW, vectors - first)) {
      case 1: multiply_vectors<P, 1>(weights, some, columns, begin, end, emit_one); break;
      case 2: multiply_vectors<P, 2>(weights, some, columns, begin, end, emit_one); break;
      case 3: multiply_vectors<P, 3>(weights, some, columns, begin, end, emit_one); break;
      case 4: multiply_vectors<P, 4>(weights, some, columns, begin, end, emit_one); break;
      case 5: multiply_vectors<P, 5>(weights, some, columns, begin, end, emit_one); break;
      case 6: multiply_vectors<P, 6>(weights, some, columns, begin, end, emit_one); break;
      case 7: multiply_vectors<P, 7>(weights, some, columns, begin, end, emit_one); break;
      case 8: multiply_vectors<P, 8>(weights, some, columns, begin, end, emit_one); break;
    }
  }
}

// The vectors as `multiply` reads them: themselves, or a copy in `scratch`.
template <typename Input, typename T>
inline const Input* as_input(const T* x, int64_t count, std::vector<Input>& scratch) {
  if constexpr (std::is_same_v<T, Input>) {
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

// A matrix as `linear_few` reads it: scales of quantized rows and bias may be null.
template <typename T, typename W>
struct AffineView {
  const W* weight;          // [rows, columns]
  const float* row_scales;  // [rows]
  const T* bias;            // [rows]
  int64_t rows, columns;
};

// y = scale * row_scales * (weight . x) + bias, for few vectors. x: [vectors, columns]; y: [vectors, rows].
template <typename T, typename W, typename Out>
inline void linear_few(const T* x, int64_t vectors, const AffineView<T, W>& map, float scale, Out* y) {
  using P = Product<T, W>;
  std::vector<typename P::Input> scratch;
  const auto* input = as_input(x, vectors * map.columns, scratch);
  parallel_tasks(map.rows, rows_per_task(map.columns, sizeof(W)), [&](int64_t begin, int64_t end) {
    multiply<P>(map.weight, input, vectors, map.columns, begin, end, [&](int64_t row, int64_t vector, float value) {
      value *= map.row_scales ? scale * map.row_scales[row] : scale;
      y[vector * map.rows + row] = static_cast<Out>(map.bias ? value + static_cast<float>(map.bias[row]) : value);
    });
  });
}

// As ops.quantization.dequantize, of a matrix. values: [rows, columns], int8; scale: [rows].
inline at::Tensor dequantize(const at::Tensor& values, const at::Tensor& scale, at::ScalarType dtype) {
  int64_t rows = values.size(0), columns = values.size(1);
  at::Tensor weight = at::empty({rows, columns}, values.options().dtype(dtype));
  GRANITE4_DISPATCH(dtype, "dequantize", [&] {
    at::parallel_for(0, rows, rows_per_task(columns, sizeof(scalar_t)), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        const int8_t* from = values.const_data_ptr<int8_t>() + row * columns;
        scalar_t* to = weight.mutable_data_ptr<scalar_t>() + row * columns;
        float factor = scale.const_data_ptr<float>()[row];
        int64_t c = 0;
        for (; c + PAIR <= columns; c += PAIR) {
          auto [first, second] = load_pair(from + c);
          store_pair(to + c, first * Vec(factor), second * Vec(factor));
        }
        for (; c < columns; c++) to[c] = static_cast<scalar_t>(from[c] * factor);
      }
    });
  });
  return weight;
}

inline int64_t rows_of(const at::Tensor& x) {
  return x.numel() / x.size(-1);
}

inline std::vector<int64_t> with_last(const at::Tensor& x, int64_t size) {
  auto shape = x.sizes().vec();
  shape.back() = size;
  return shape;
}

// Weights that are dequantized at a time: they stay in cache until they are used.
constexpr int64_t DEQUANTIZED = 1 << 20;

// As `linear`, for many vectors.
inline at::Tensor linear_many(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& scale) {
  if (!scale.has_value()) return at::linear(x, weight, bias);
  int64_t rows = weight.size(0), block = std::max<int64_t>(1, DEQUANTIZED / weight.size(1));
  if (rows <= block) return at::linear(x, dequantize(weight, *scale, x.scalar_type()), bias);
  at::Tensor y = at::empty(with_last(x, rows), x.options());
  for (int64_t begin = 0; begin < rows; begin += block) {
    int64_t count = std::min(block, rows - begin);
    auto part = [&](const at::Tensor& tensor) { return tensor.narrow(0, begin, count); };
    std::optional<at::Tensor> bias_part;
    if (bias.has_value()) bias_part = part(*bias);
    y.narrow(-1, begin, count).copy_(
        at::linear(x, dequantize(part(weight), part(*scale), x.scalar_type()), bias_part));
  }
  return y;
}

// A quantized weight has a scale; any other is of the vectors' dtype and has none.
inline void check_weight(const at::Tensor& weight, const std::optional<at::Tensor>& scale, at::ScalarType dtype) {
  TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == (scale.has_value() ? at::kChar : dtype));
  if (!scale.has_value()) return;
  TORCH_CHECK(scale->is_contiguous() && scale->scalar_type() == at::kFloat);
  TORCH_CHECK(scale->numel() * weight.size(-1) == weight.numel());
}

inline void check_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scale) {
  check_weight(weight, scale, x.scalar_type());
  TORCH_CHECK(x.size(-1) == weight.size(-1));
}

// As ops.quantization.linear. x: [..., columns]; weight: [rows, columns]; bias, scale: [rows].
inline at::Tensor linear(
    const at::Tensor& any_x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& scale) {
  check_product(any_x, weight, scale);
  if (rows_of(any_x) > FEW) return linear_many(any_x, weight, bias, scale);
  at::Tensor x = any_x.contiguous(), y = at::empty(with_last(x, weight.size(0)), x.options());
  GRANITE4_DISPATCH_WEIGHTS(x.scalar_type(), weight.scalar_type(), "linear", [&] {
    AffineView<scalar_t, weight_t> map{
        weight.const_data_ptr<weight_t>(), pointer<float>(scale), pointer<scalar_t>(bias), weight.size(0),
        weight.size(1)};
    linear_few(x.const_data_ptr<scalar_t>(), rows_of(x), map, 1.0f, y.mutable_data_ptr<scalar_t>());
  });
  return y;
}

// As ops.logits; for few tokens the products are never rounded to the weights' dtype.
inline at::Tensor logits(
    const at::Tensor& any_x, const at::Tensor& weight, double scaling, const std::optional<at::Tensor>& scale) {
  check_product(any_x, weight, scale);
  if (rows_of(any_x) > FEW) return linear_many(any_x, weight, std::nullopt, scale).to(at::kFloat).div_(scaling);
  at::Tensor x = any_x.contiguous(), y = at::empty(with_last(x, weight.size(0)), x.options().dtype(at::kFloat));
  GRANITE4_DISPATCH_WEIGHTS(x.scalar_type(), weight.scalar_type(), "logits", [&] {
    AffineView<scalar_t, weight_t> map{
        weight.const_data_ptr<weight_t>(), pointer<float>(scale), nullptr, weight.size(0), weight.size(1)};
    float factor = static_cast<float>(1.0 / scaling);
    linear_few(x.const_data_ptr<scalar_t>(), rows_of(x), map, factor, y.mutable_data_ptr<float>());
  });
  return y;
}

}  // namespace granite4_neuron
