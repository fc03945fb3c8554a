// Views of memory that someone else owns. Kernels pass them to one another in place of pointers and strides.
#pragma once

#include <cstdint>

namespace granite4_neuron {

// Element (r, c) is data[r * row_stride + c * column_stride].
template <typename T>
struct MatrixView {
  T* data;
  int64_t row_stride;
  int64_t column_stride = 1;

  T* row(int64_t r) const {
    return data + r * row_stride;
  }
  MatrixView from_row(int64_t r) const {
    return {row(r), row_stride, column_stride};
  }
  MatrixView from_column(int64_t c) const {
    return {data + c * column_stride, row_stride, column_stride};
  }
  operator MatrixView<const T>() const {
    return {data, row_stride, column_stride};
  }
};

}  // namespace granite4_neuron
