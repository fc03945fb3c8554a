// Small float32 matrix products whose operands are in cache.
#pragma once

#include "common.h"

namespace granite4_neuron {

// Rows of a tile of the result: a tile of two vectors' columns, its operands included, fits the vector registers.
constexpr int64_t GEMM_ROWS = LANES == 8 ? 6 : 12;

template <int ROWS, int VECTORS>
inline void gemm_tile(
    int64_t depth, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row, float* c,
    int64_t c_row, bool accumulate) {
  Vec totals[ROWS][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) totals[r][v] = accumulate ? Vec::loadu(c + r * c_row + v * LANES) : Vec(0.0f);
  for (int64_t k = 0; k < depth; k++) {
    Vec right[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) right[v] = Vec::loadu(b + k * b_row + v * LANES);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      Vec left(a[r * a_row + k * a_column]);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) totals[r][v] = at::vec::fmadd(left, right[v], totals[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) totals[r][v].store(c + r * c_row + v * LANES);
}

template <int ROWS>
inline void gemm_rows(
    int64_t columns, int64_t depth, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row,
    float* c, int64_t c_row, bool accumulate) {
  int64_t column = 0;
  for (; column + 2 * LANES <= columns; column += 2 * LANES)
    gemm_tile<ROWS, 2>(depth, a, a_row, a_column, b + column, b_row, c + column, c_row, accumulate);
  if (column < columns) gemm_tile<ROWS, 1>(depth, a, a_row, a_column, b + column, b_row, c + column, c_row, accumulate);
}

// c = a b, or c += a b. a: [rows, depth] with any strides; b: [depth, columns]; c: [rows, columns]; rows of b and c are
// b_row and c_row apart; columns is a multiple of LANES.
inline void gemm(
    int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row, int64_t a_column, const float* b,
    int64_t b_row, float* c, int64_t c_row, bool accumulate) {
  int64_t row = 0;
  for (; row + GEMM_ROWS <= rows; row += GEMM_ROWS)
    gemm_rows<GEMM_ROWS>(
        columns, depth, a + row * a_row, a_row, a_column, b, b_row, c + row * c_row, c_row, accumulate);
  for (; row + 4 <= rows; row += 4)
    gemm_rows<4>(columns, depth, a + row * a_row, a_row, a_column, b, b_row, c + row * c_row, c_row, accumulate);
  for (; row < rows; row++)
    gemm_rows<1>(columns, depth, a + row * a_row, a_row, a_column, b, b_row, c + row * c_row, c_row, accumulate);
}

}  // namespace granite4_neuron
