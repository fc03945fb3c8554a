// Quantizing matrices, packing them, and reading rows of packed matrices.
#pragma once

#include "weight.h"

namespace granite4_neuron {

// `ops.weight.Format.quantize` of the format with this name.
void quantize(
    const at::Tensor& weight, const std::string& format, const at::Tensor& values, const at::Tensor& scales);

// The size of a packed weight of this shape, [rows, columns] or [experts, rows, columns].
int64_t packed_bytes(at::IntArrayRef shape, const std::string& format, at::ScalarType dtype);

// Packs a matrix, or one of each expert, into `bytes`, which has room for `packed_bytes`.
//
// shape: the matrix's, [..., rows, columns]. values: in dtype and this shape, or in the format's layout; scales: in the
// format's layout, or none.
void pack(
    const at::Tensor& any_values, const std::optional<at::Tensor>& scales, const std::string& format,
    at::ScalarType dtype, at::IntArrayRef shape, at::Tensor bytes);

// Reads rows `ids` of a weight, in float32: [..., columns]. Rows are numbered through all experts.
at::Tensor weight_rows(const Weight& weight, const at::Tensor& any_ids);

}  // namespace granite4_neuron
