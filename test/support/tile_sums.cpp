// C functions for products of bfloat16 in AMX's order. test/unit/devices/cpu/kernels/test_tile_products.py compiles this.
#include "products.cpp"

#include "formats.h"

namespace granite4_neuron {

// weights.cpp has these in the library.
ThreadPool& ThreadPool::instance() {
  static ThreadPool* pool = new ThreadPool;
  return *pool;
}
template <typename T>
Products<T>& products_of(Format) {
  static Products<T> products;
  return products;
}

}  // namespace granite4_neuron

using namespace granite4_neuron;

// Packs a weight and computes y = x weight^T.
template <typename Tiles>
void pack_and_multiply(
    const void* values, const float* scales, int64_t rows, int64_t columns, const at::BFloat16* x, int64_t vectors,
    float* y) {
  Weight weight;
  weight.experts = 1;
  weight.rows = rows;
  weight.columns = columns;
  weight.tile_bytes = Tiles::tile_bytes(columns);
  Scratch<char> tiles(tiles_of(rows) * weight.tile_bytes);
  pack_tiles<Tiles>(static_cast<const typename Tiles::Value*>(values), scales, weight, tiles.data());
  weight.tiles = tiles.data();
  multiply_all<Tiles, at::BFloat16, float>(weight, x, vectors, nullptr, 1.0f, y);
}

// values, scales: in the format's layout, scales in float32 or null; x: [vectors, columns]; y: [vectors, rows].
#define MULTIPLY(NAME, ...)                                                                                          \
  extern "C" void NAME(                                                                                              \
      const void* values, const float* scales, int64_t rows, int64_t columns, const at::BFloat16* x, int64_t vectors, \
      float* y) {                                                                                                    \
    pack_and_multiply<granite4_neuron::NAME::Tiles<at::BFloat16>>(values, scales, rows, columns, x, vectors, y);     \
  }
MULTIPLY(plain)
GRANITE4_FORMATS(MULTIPLY)
