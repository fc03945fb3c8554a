// Any number of vectors, packed in the order in which products with tiles read them.
#pragma once

#include "buffers.h"
#include "weight.h"

namespace granite4_neuron {

constexpr int REGISTERS = LANES == 16 ? 32 : 16;

// The number of vectors that a tile is multiplied by at a time: their accumulators, a step of weights and one of a
// vector fit the registers.
constexpr int64_t MR = LANES == 16 ? 14 : 3;

// Vectors laid out for products, in blocks of `share` at most. A block has a step of all its vectors side by side,
// padded to LANES vectors; the padding is not read. A block of one vector is that vector. After the last column zeros
// fill a whole step.
template <typename Arithmetic>
struct ActivationPanel {
  using Input = typename Arithmetic::Input;
  static constexpr int64_t PLACES = LANES * Arithmetic::COLUMNS;  // inputs of a step

  const Input* data;
  int64_t count, share;

  static int64_t block_size(int64_t columns) {
    return (steps_of<Arithmetic>(columns) + LANES - 1) / LANES * LANES * PLACES;
  }
  // The size of `count` vectors.
  static int64_t size(int64_t count, int64_t columns) {
    int64_t share = share_of(count);
    return (count + share - 1) / share * block_size(columns);
  }
  // Each part of PART vectors is a task of its own; here there is one part.
  static constexpr int64_t PART = 0;
  int64_t parts() const {
    return 1;
  }
  ActivationPanel part(int64_t) const {
    return *this;
  }
  // How many of `count` vectors are multiplied at a time.
  static int64_t share_of(int64_t count) {
    int64_t blocks = std::max<int64_t>(1, (count + MR - 1) / MR);
    return std::max<int64_t>(1, (count + blocks - 1) / blocks);
  }
};

// One block of `ActivationPanel` at `to`, of `width` vectors: row(v) is the v-th, of T.
template <typename Arithmetic, typename Row>
inline void fill_block(const Row& row, int64_t width, int64_t columns, typename Arithmetic::Input* to) {
  using Input = typename Arithmetic::Input;
  static_assert(Arithmetic::COLUMNS * sizeof(Input) == sizeof(float));  // a step of one vector moves as one float
  int64_t steps = (steps_of<Arithmetic>(columns) + LANES - 1) / LANES * LANES, stride = steps * Arithmetic::COLUMNS;
  auto fill = [&](int64_t v, Input* vector) {
    convert(row(v), vector, columns);
    std::fill(vector + columns, vector + stride, static_cast<Input>(0.0f));
  };
  if (width == 1) return fill(0, to);
  Scratch<Input> rows(LANES * stride);
  for (int64_t v = 0; v < width; v++) fill(v, rows.data() + v * stride);
  const auto* from = reinterpret_cast<const float*>(rows.data());
  for (int64_t s = 0; s < steps; s += LANES)
    at::vec::transpose_mxn<float>(from + s, steps, reinterpret_cast<float*>(to) + s * LANES, LANES, LANES, LANES);
}

// `ActivationPanel` of row(0) to row(count - 1) in `scratch`, which has room for them.
template <typename Arithmetic, typename Row>
  requires(!HAS_TILE_SUMS<Arithmetic>)
inline ActivationPanel<Arithmetic> fill_panel(
    const Row& row, int64_t count, int64_t columns, typename Arithmetic::Input* scratch) {
  int64_t share = ActivationPanel<Arithmetic>::share_of(count), size = ActivationPanel<Arithmetic>::block_size(columns);
  for (int64_t first = 0; first < count; first += share, scratch += size)
    fill_block<Arithmetic>([&](int64_t v) { return row(first + v); }, std::min(share, count - first), columns, scratch);
  return {scratch - (count + share - 1) / share * size, count, share};
}

// `ActivationPanel` of x, [count, columns], in `scratch`, which has room for them.
template <typename Arithmetic, typename T>
  requires(!HAS_TILE_SUMS<Arithmetic>)
inline ActivationPanel<Arithmetic> as_panel(
    const T* x, int64_t count, int64_t columns, typename Arithmetic::Input* scratch) {
  int64_t share = ActivationPanel<Arithmetic>::share_of(count), size = ActivationPanel<Arithmetic>::block_size(columns);
  if constexpr (std::is_same_v<T, typename Arithmetic::Input>) {
    if (count == 1 && columns % Arithmetic::COLUMNS == 0) return {x, count, share};
  }
  parallel_tasks((count + share - 1) / share, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) {
      int64_t first = block * share;
      auto row = [&](int64_t v) { return x + (first + v) * columns; };
      fill_block<Arithmetic>(row, std::min(share, count - first), columns, scratch + block * size);
    }
  });
  return {scratch, count, share};
}

}  // namespace granite4_neuron
