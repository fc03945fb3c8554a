// Checks of arguments at the entry of a call: an argument that would index memory out of bounds raises an error.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace granite4_neuron {

// shape: -1 is any size.
inline void check_shape(const at::Tensor& tensor, const char* name, at::IntArrayRef shape) {
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; fits && i < shape.size(); i++) fits = shape[i] == -1 || shape[i] == tensor.size(i);
  TORCH_CHECK(fits, name, " has the shape ", tensor.sizes(), " and should have ", shape);
}

// Checks the shape and dtype of a contiguous tensor.
inline void check_dense(const at::Tensor& tensor, const char* name, at::IntArrayRef shape, at::ScalarType dtype) {
  check_shape(tensor, name, shape);
  TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  TORCH_CHECK(tensor.scalar_type() == dtype, name, " is ", tensor.scalar_type(), " and should be ", dtype);
}

inline void check_last_axis(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(
      tensor.dim() > 0 && (tensor.stride(-1) == 1 || tensor.numel() == 0), name,
      " must be contiguous along its last axis");
}

// A vector's length.
inline int64_t check_width(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.dim() > 0 && tensor.size(-1) > 0, name, " has vectors of no values");
  return tensor.size(-1);
}

// Checks each row's slot of a state, [rows].
inline void check_slots(
    const at::Tensor& slots, const char* name, int64_t rows, int64_t num_slots, int64_t first_slot = 0) {
  check_dense(slots, name, {rows}, at::kLong);
  const auto* slot = slots.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; row++)
    TORCH_CHECK(
        first_slot <= slot[row] && slot[row] < num_slots, "row ", row, " is in slot ", slot[row], " of ", num_slots);
}

// starts: [rows], each row's first position. lengths: [rows], none of them negative.
inline void check_starts(const at::Tensor& starts, const at::Tensor& lengths, int64_t max_length) {
  int64_t rows = lengths.numel();
  check_dense(starts, "starts", {rows}, at::kLong);
  const auto *first = starts.const_data_ptr<int64_t>(), *length = lengths.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; row++) {
    if (length[row] == 0) continue;
    int64_t position = first[row];
    TORCH_CHECK(
        0 <= position && position <= max_length - length[row], "row ", row, " has ", length[row],
        " tokens from position ", position, " on: beyond the cache, which has ", max_length);
  }
}

}  // namespace granite4_neuron
