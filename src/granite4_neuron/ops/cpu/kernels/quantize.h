// Quantizes matrices, bit by bit as the definitions in ops/formats.
#pragma once

#include "formats.h"

namespace granite4_neuron {

// Quantizes each row of a matrix.
//
// weight: [rows, columns] of any floating dtype; values and scales: the tensors of the format's layout.
//
// A format has these members in Rows:
//
//   Value, Scale  the types of values and scales
//   GROUP         the row that `quantize` gets is filled up with zeros to a multiple of so many columns
//   values_of     the number of values in a row of so many columns
//   scales_of     the number of its scales
//   quantize      a row in float32 to values and scales
template <typename Rows>
inline void quantize_rows(const at::Tensor& weight, at::Tensor values, at::Tensor scales) {
  using Value = typename Rows::Value;
  using Scale = typename Rows::Scale;
  int64_t rows = weight.size(0), columns = weight.size(1);
  int64_t row_values = Rows::values_of(columns), row_scales = Rows::scales_of(columns);
  TORCH_CHECK(values.is_contiguous() && values.numel() == rows * row_values);
  TORCH_CHECK(scales.is_contiguous() && scales.numel() == rows * row_scales);
  auto* to_values = values.mutable_data_ptr<Value>();
  auto* to_scales = scales.mutable_data_ptr<Scale>();
  GRANITE4_DISPATCH(weight.scalar_type(), "quantize", [&] {
    const auto* from = weight.const_data_ptr<scalar_t>();
    parallel_tasks(rows, 16, [&](int64_t begin, int64_t end) {
      std::vector<float> row((columns + Rows::GROUP - 1) / Rows::GROUP * Rows::GROUP);
      for (int64_t r = begin; r < end; r++) {
        to_float(from + r * columns, row.data(), columns);
        Rows::quantize(row.data(), columns, to_values + r * row_values, to_scales + r * row_scales);
      }
    });
  });
}

// `ops.weight.Format.quantize` of the format with this name.
inline void quantize(
    const at::Tensor& weight, const std::string& format, const at::Tensor& values, const at::Tensor& scales) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous());
#define GRANITE4_QUANTIZE_IF_NAMED(NAME, ...) \
  if (format == #NAME) return quantize_rows<NAME::Rows>(weight, values, scales);
  GRANITE4_FORMATS(GRANITE4_QUANTIZE_IF_NAMED)
  TORCH_CHECK(false, "nothing is quantized as ", format);
}

}  // namespace granite4_neuron
