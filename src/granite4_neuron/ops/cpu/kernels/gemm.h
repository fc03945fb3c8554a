// Small float32 matrix products whose operands are in cache.
#pragma once

#include "common.h"
#include "views.h"

namespace granite4_neuron {

// Rows of a tile of the result: a tile of two vectors' columns, its operands included, fits the vector registers.
constexpr int64_t GEMM_ROWS = LANES == 8 ? 6 : 12;

// Of c = a b: a is [rows, depth], b [depth, columns], c [rows, columns].
struct GemmSizes {
  int64_t rows, columns, depth;
};

template <int ROWS, int VECTORS>
inline void gemm_tile(
    int64_t depth, MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c, bool accumulate) {
  Vec totals[ROWS][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) totals[r][v] = accumulate ? Vec::loadu(c.row(r) + v * LANES) : Vec(0.0f);
  for (int64_t k = 0; k < depth; k++) {
    Vec right[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) right[v] = Vec::loadu(b.row(k) + v * LANES);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      Vec left(a.data[r * a.row_stride + k * a.column_stride]);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) totals[r][v] = at::vec::fmadd(left, right[v], totals[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) totals[r][v].store(c.row(r) + v * LANES);
}

template <int ROWS>
inline void gemm_rows(
    int64_t columns, int64_t depth, MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c,
    bool accumulate) {
  int64_t column = 0;
  for (; column + 2 * LANES <= columns; column += 2 * LANES)
    gemm_tile<ROWS, 2>(depth, a, b.from_column(column), c.from_column(column), accumulate);
  if (column < columns) gemm_tile<ROWS, 1>(depth, a, b.from_column(column), c.from_column(column), accumulate);
}

// c = a b, or c += a b. a may have any strides; the columns of b and c lie side by side, a multiple of LANES of them.
inline void gemm(
    GemmSizes sizes, MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c, bool accumulate) {
  auto [rows, columns, depth] = sizes;
  int64_t row = 0;
  for (; row + GEMM_ROWS <= rows; row += GEMM_ROWS)
    gemm_rows<GEMM_ROWS>(columns, depth, a.from_row(row), b, c.from_row(row), accumulate);
  for (; row + 4 <= rows; row += 4) gemm_rows<4>(columns, depth, a.from_row(row), b, c.from_row(row), accumulate);
  for (; row < rows; row++) gemm_rows<1>(columns, depth, a.from_row(row), b, c.from_row(row), accumulate);
}

}  // namespace granite4_neuron
