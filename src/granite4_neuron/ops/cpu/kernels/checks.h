// Checks of arguments, where a call enters: whatever indexes memory below fits it, or there is an error.
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

// A tensor that is one run of memory.
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

// Checks the values that index memory: each row's number of real tokens, and its slot of the state; both [batch].
inline void check_rows(
    const at::Tensor& lengths, const at::Tensor& slots, int64_t batch, int64_t tokens, int64_t num_slots,
    int64_t first_slot = 0) {
  check_dense(lengths, "lengths", {batch}, at::kLong);
  check_dense(slots, "slots", {batch}, at::kLong);
  const auto *length = lengths.const_data_ptr<int64_t>(), *slot = slots.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < batch; row++) {
    TORCH_CHECK(
        0 <= length[row] && length[row] <= tokens, "row ", row, " has length ", length[row], " of ", tokens, " tokens");
    TORCH_CHECK(
        first_slot <= slot[row] && slot[row] < num_slots, "row ", row, " is in slot ", slot[row], " of ", num_slots);
  }
}

// positions: [batch, tokens], of which the first counts: a row without tokens needs none. lengths: as `check_rows` has
// seen them.
inline void check_positions(const at::Tensor& positions, const at::Tensor& lengths, int64_t max_length) {
  int64_t batch = lengths.numel();
  check_shape(positions, "positions", {batch, -1});
  const auto *first = positions.const_data_ptr<int64_t>(), *length = lengths.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < batch; row++) {
    if (length[row] == 0) continue;
    TORCH_CHECK(positions.size(1) > 0, "row ", row, " has no position");
    int64_t position = first[row * positions.stride(0)];
    TORCH_CHECK(
        0 <= position && position <= max_length - length[row], "row ", row, " has ", length[row],
        " tokens from position ", position, " on: beyond the cache, which has ", max_length);
  }
}

}  // namespace granite4_neuron
