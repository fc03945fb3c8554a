// Matrices in fewer bits, bit by bit as the formats' definitions in ops have them.
#pragma once

#include "formats.h"

namespace granite4_neuron {

// weight: [rows, columns] of any floating dtype; values and scales: the tensors for it, as the format's layout has them.
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

// As ops.weight.Format.quantize of the format that has this name.
inline void quantize(
    const at::Tensor& weight, const std::string& format, const at::Tensor& values, const at::Tensor& scales) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous());
  if (format_named(format) == Format::INT8) return quantize_rows<Int8Rows>(weight, values, scales);
  TORCH_CHECK(format_named(format) == Format::INT4, "nothing is quantized as ", format);
  quantize_rows<Int4Rows>(weight, values, scales);
}

}  // namespace granite4_neuron
