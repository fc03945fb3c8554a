// Products of packed weights with vectors. Their definitions are in products.cpp, which is compiled for each format.
#pragma once

#include "weight.h"

namespace granite4_neuron {

// The choices of one expert, as numbers token * top_k + place.
struct Group {
  int64_t expert;
  std::vector<int64_t> choices;
};

// The products of one format's weights with vectors of T.
template <typename T>
struct Products {
  // y = factor * (weight . x) + bias. x: [vectors, columns]; bias: [rows], or null; y: [vectors, rows].
  void (*multiply_all)(const Weight& weight, const T* x, int64_t vectors, const T* bias, float factor, T* y);
  void (*multiply_to_float)(const Weight& weight, const T* x, int64_t vectors, const T* bias, float factor, float* y);
  // out[choice] = the expert's weight . inputs[choice / per_input], for all choices of all groups.
  //
  // inputs: [.., columns]; out: [choices, rows].
  void (*multiply_groups)(
      const std::vector<Group>& groups, const Weight& weight, const T* inputs, int64_t per_input, float* out);
};

// The products of a format, for T float32, bfloat16 and float16. A format's unit sets them when it is loaded.
template <typename T>
Products<T>& products_of(Format format);

}  // namespace granite4_neuron
