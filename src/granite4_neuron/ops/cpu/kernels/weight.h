// A matrix of weights as products read it: tiles of 32 rows, one after another, each of which is one run of addresses.
//
// Within a tile columns come one step after another: a step has all rows' values of one column or of a pair. So a
// product adds up each of its results in the order of the columns, in a lane of its own, and the sum is the same bit by
// bit however many vectors there are and whichever thread takes the tile. A format says what a step is, see
// `PlainTiles`.
#pragma once

#include "common.h"
#include "parallel.h"

namespace granite4_neuron {

constexpr int64_t TILE = 32;  // rows

// Rows of the last tile, and columns of the last step, that the matrix does not have are zeros.
inline int64_t tiles_of(int64_t rows) {
  return (rows + TILE - 1) / TILE;
}

// Sums in float32, of products in float32: one column a step.
struct Floats {
  static constexpr int64_t COLUMNS = 1;
  static constexpr int VECTORS = TILE / LANES;
  using Input = float;  // what the vectors are converted to
  using Operand = std::array<Vec, 2>;
  using Total = std::array<Vec, VECTORS>;

  static Vec load(const char* from) {
    return Vec::loadu(from);
  }
  // What is loaded once: the compiler would load it again for each of its uses.
  static Vec in_register(Vec loaded) {
#if defined(CPU_CAPABILITY_AVX2)
    __m256 kept = loaded;
    asm("" : "+x"(kept));
    return kept;
#else
    return loaded;
#endif
  }
  static Vec broadcast(const Input* x) {
    return Vec(*x);
  }
  static Vec add(Vec total, Vec weights, Vec factor) {
    return at::vec::fmadd(weights, factor, total);
  }
};

template <typename T>
struct ArithmeticOf {
  using type = Floats;
};

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
// Sums in float32, of pairs of products of bfloat16, which are exact.
struct Bfloat16Pairs {
  static constexpr int64_t COLUMNS = 2;
  static constexpr int VECTORS = TILE / LANES;
  using Input = at::BFloat16;
  using Operand = std::array<__m512bh, 2>;
  using Total = std::array<Vec, VECTORS>;

  static __m512bh load(const char* from) {
    return (__m512bh)_mm512_loadu_si512(from);
  }
  static __m512bh in_register(__m512bh loaded) {
    return loaded;
  }
  static __m512bh broadcast(const Input* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof(pair));
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Vec add(Vec total, __m512bh weights, __m512bh factors) {
    return Vec(_mm512_dpbf16_ps(total, weights, factors));
  }
};

template <>
struct ArithmeticOf<at::BFloat16> {
  using type = Bfloat16Pairs;
};
#endif

template <typename Arithmetic>
inline int64_t steps_of(int64_t columns) {
  return (columns + Arithmetic::COLUMNS - 1) / Arithmetic::COLUMNS;
}

enum class Format : int64_t { PLAIN, INT8, INT4 };

// What is to know of a matrix, or one of each expert.
struct WeightHeader {
  Format format;
  at::ScalarType dtype;  // of the vectors that it is multiplied by
  int64_t experts, rows, columns, tile_bytes;
  uint64_t mark = MARK;

  static constexpr uint64_t MARK = 0x67346e2d74696c65;
};

// A packed matrix, or one of each expert: a view of the tensor of bytes that operators pass one another, in which the
// header stands before all experts' tiles, one after another. Torch hands a tensor over in a hundredth of the time that
// an object of a class takes.
struct Weight : WeightHeader {
  const char* tiles = nullptr;

  // Before the first tile, which begins with a cache line.
  static constexpr int64_t HEADER_BYTES = 64;
  static_assert(sizeof(WeightHeader) <= HEADER_BYTES);

  int64_t num_bytes() const {
    return HEADER_BYTES + experts * tiles_of(rows) * tile_bytes;
  }
  const char* tile(int64_t expert, int64_t number) const {
    return tiles + (expert * tiles_of(rows) + number) * tile_bytes;
  }
};

// The weight in `bytes`, which must outlive it.
inline Weight weight_in(const at::Tensor& bytes) {
  TORCH_CHECK(bytes.scalar_type() == at::kByte && bytes.is_contiguous() && bytes.numel() >= Weight::HEADER_BYTES);
  const char* data = static_cast<const char*>(bytes.const_data_ptr());
  Weight weight;
  std::memcpy(static_cast<WeightHeader*>(&weight), data, sizeof(WeightHeader));
  TORCH_CHECK(weight.mark == WeightHeader::MARK && bytes.numel() == weight.num_bytes(), "this is no packed weight");
  weight.tiles = data + Weight::HEADER_BYTES;
  return weight;
}

// Weights in the dtype T of the vectors.
//
// What every format has: Value, what a matrix is made of before it is packed; Arithmetic; STEP_BYTES, and FETCH_BYTES,
// what a step is of weights in memory; LOADING_IS_WORK, whether many vectors are better off with steps that are loaded
// once; `load`, part number PART of a step, two of its VECTORS; `offset`, where a step has a value, in bytes;
// `tile_bytes`, of a whole tile; `finish`, what becomes of sums when all columns are added up; `value`, one of them as a
// number; `add_scales`, which puts those of a tile's rows into it; `check`, of the tensors that a weight is to be packed
// from.
template <typename T>
struct PlainTiles {
  using Value = T;
  using Arithmetic = typename ArithmeticOf<T>::type;
  static constexpr int64_t STEP_BYTES = TILE * Arithmetic::COLUMNS * sizeof(T), FETCH_BYTES = STEP_BYTES;
  static constexpr bool LOADING_IS_WORK = !std::is_same_v<T, typename Arithmetic::Input>;

  template <int PART>
  static typename Arithmetic::Operand load(const char* step) {
    if constexpr (Arithmetic::COLUMNS == 2) {
      return {Arithmetic::load(step), Arithmetic::load(step + STEP_BYTES / 2)};
    } else {
      auto [first, second] = load_pair(reinterpret_cast<const T*>(step) + PART * PAIR);
      return {first, second};
    }
  }
  static int64_t offset(int64_t row, int64_t column) {
    return (row * Arithmetic::COLUMNS + column) * sizeof(T);
  }
  static int64_t tile_bytes(int64_t columns) {
    return steps_of<Arithmetic>(columns) * STEP_BYTES;
  }
  static void finish(const char*, int64_t, typename Arithmetic::Total&) {}
  static float value(const char*, int64_t, int64_t, T value) {
    return static_cast<float>(value);
  }
  static void add_scales(char*, int64_t, const float*, int64_t) {}
  static void check(const Weight& weight, const at::Tensor& values, const std::optional<at::Tensor>& scales) {
    TORCH_CHECK(values.numel() == weight.experts * weight.rows * weight.columns && !scales.has_value());
  }
};

// Whether a format has a scale for each row and group of columns, and with it functions of its own; see `Int4Tiles`.
template <typename Tiles>
constexpr bool HAS_GROUPS = requires { Tiles::GROUP; };

// Put the matrix `values` [experts, rows, columns] with `scales` [experts, rows, ...], or null, into tiles at `to`.
template <typename Tiles>
  requires(!HAS_GROUPS<Tiles>)
inline void pack_tiles(const typename Tiles::Value* values, const float* scales, const Weight& weight, char* to) {
  constexpr int64_t STEP = Tiles::Arithmetic::COLUMNS;
  int64_t experts = weight.experts, rows = weight.rows, columns = weight.columns;
  int64_t tiles = tiles_of(rows), bytes = Tiles::tile_bytes(columns);
  parallel_tasks(experts * tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      int64_t first = task % tiles * TILE, count = std::min(TILE, rows - first), row = task / tiles * rows + first;
      char* tile = to + task * bytes;
      std::memset(tile, 0, bytes);
      for (int64_t column = 0; column < columns; column++)
        for (int64_t r = 0; r < count; r++)
          std::memcpy(
              tile + column / STEP * Tiles::STEP_BYTES + Tiles::offset(r, column % STEP),
              values + (row + r) * columns + column, sizeof(typename Tiles::Value));
      if (scales != nullptr) Tiles::add_scales(tile, columns, scales + row, count);
    }
  });
}

template <typename Tiles>
  requires HAS_GROUPS<Tiles>
inline void pack_tiles(const typename Tiles::Value* values, const float* scales, const Weight& weight, char* to) {
  Tiles::pack(values, scales, weight, to);
}

// One row of a tile in float32.
template <typename Tiles>
  requires(!HAS_GROUPS<Tiles>)
inline void read_row(const char* tile, int64_t row, int64_t columns, float* to) {
  constexpr int64_t STEP = Tiles::Arithmetic::COLUMNS;
  for (int64_t column = 0; column < columns; column++) {
    typename Tiles::Value value;
    std::memcpy(
        &value, tile + column / STEP * Tiles::STEP_BYTES + Tiles::offset(row, column % STEP), sizeof(value));
    to[column] = Tiles::value(tile, columns, row, value);
  }
}

template <typename Tiles>
  requires HAS_GROUPS<Tiles>
inline void read_row(const char* tile, int64_t row, int64_t columns, float* to) {
  Tiles::read_row(tile, row, columns, to);
}

}  // namespace granite4_neuron
