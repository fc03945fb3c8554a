// Products of packed weights with vectors. Their definitions are in products.cpp, which is compiled for each format.
#pragma once

#include "weight.h"

namespace granite4_neuron {

// y = factor * (weight . x) + bias. x: [vectors, columns]; bias: [rows], or null; y: [vectors, rows].
template <typename Tiles, typename T, typename Out>
void multiply_all(const Weight& weight, const T* x, int64_t vectors, const T* bias, float factor, Out* y);

// The choices of one expert, as numbers token * top_k + place.
struct Group {
  int64_t expert;
  std::vector<int64_t> choices;
};

// out[choice] = the expert's weight . inputs[choice / per_input], for all choices of all groups.
//
// inputs: [.., columns]; out: [choices, rows].
template <typename Tiles, typename T>
void multiply_groups(
    const std::vector<Group>& groups, const Weight& weight, const T* inputs, int64_t per_input, float* out);

}  // namespace granite4_neuron
