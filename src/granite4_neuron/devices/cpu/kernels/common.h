// The base of all kernels: float32 vectors over tensors of any floating dtype.
//
// Kernels are written with ATen's Vectorized<float>, so that one source serves AVX2, AVX-512 and Arm. All arithmetic is
// float32. Tensors are contiguous along their last axis; the Python side sees to that.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.h"

namespace granite4_neuron {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();
// Most vectors of a reduced dtype hold twice as many values as one of float32: they are loaded as a pair.
constexpr int64_t PAIR = 2 * LANES;

// Run BODY with scalar_t as the C++ type of a dtype: float32, bfloat16 or float16.
#define GRANITE4_DISPATCH(DTYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(                       \
      DTYPE, NAME,                          \
      AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__) AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__) \
          AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__))

// f(0), f(1) ... f(COUNT - 1) with numbers known to the compiler, so that an array's elements stay in registers.
template <int COUNT, typename F>
[[gnu::always_inline]] inline void for_each(const F& f) {
  [&]<int... NUMBERS>(std::integer_sequence<int, NUMBERS...>) {
    (f(std::integral_constant<int, NUMBERS>()), ...);
  }(std::make_integer_sequence<int, COUNT>());
}

template <typename T>
inline std::pair<Vec, Vec> load_pair(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return {Vec::loadu(from), Vec::loadu(from + LANES)};
  } else {
    auto [first, second] = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(from));
    return {first, second};
  }
}

template <typename T>
inline void store_pair(T* to, Vec first, Vec second) {
  if constexpr (std::is_same_v<T, float>) {
    first.store(to);
    second.store(to + LANES);
  } else {
    at::vec::convert_from_float<T>(first, second).store(to);
  }
}

inline float sum(Vec values) {
#if defined(CPU_CAPABILITY_AVX512)
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(values), _mm512_extractf32x8_ps(values, 1));
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
#else
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, values);
#endif
}

// The largest value, or NaN if there is one.
inline float maximum(Vec values) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, values);
}

inline float silu(float x) {
  return x / (1.0f + std::exp(-x));
}

inline Vec silu(Vec x) {
  return x / (Vec(1.0f) + x.neg().exp_u20());
}

// As torch's softplus: above 20 it is the identity to float32's precision.
inline float softplus(float x) {
  return x > 20.0f ? x : std::log1p(std::exp(x));
}

inline Vec softplus(Vec x) {
  return Vec::blendv(at::vec::minimum(x, Vec(20.0f)).exp().log1p(), x, x > Vec(20.0f));
}

template <typename T>
inline void to_float(const T* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + PAIR <= count; i += PAIR) {
    auto [first, second] = load_pair(from + i);
    first.store(to + i);
    second.store(to + i + LANES);
  }
  for (; i < count; i++) to[i] = static_cast<float>(from[i]);
}

template <typename T>
inline void from_float(const float* from, T* to, int64_t count) {
  int64_t i = 0;
  for (; i + PAIR <= count; i += PAIR) store_pair(to + i, Vec::loadu(from + i), Vec::loadu(from + i + LANES));
  for (; i < count; i++) to[i] = static_cast<T>(from[i]);
}

// Copies values in their dtype, or converts to or from float32.
template <typename T, typename To>
inline void convert(const T* from, To* to, int64_t count) {
  if constexpr (std::is_same_v<T, To>) {
    std::memcpy(to, from, count * sizeof(T));
  } else {
    to_float(from, to, count);
  }
}

// A tensor's memory; null without a tensor.
template <typename T>
inline const T* pointer(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr<T>() : nullptr;
}

}  // namespace granite4_neuron
