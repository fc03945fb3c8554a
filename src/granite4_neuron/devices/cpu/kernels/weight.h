// A packed matrix of weights: tiles of 32 rows, one after another, each contiguous in memory.
//
// A tile is a sequence of steps: a step has the values of all rows in one column, or in a pair of columns. A matmul
// adds up each result in a lane of its own, in an order that depends only on the number of columns. So a sum has the
// same bits for any number of vectors and on any thread. The format defines the bytes of a step, see `PlainTiles`.
#pragma once

#include <type_traits>

#include "common.h"
#include "parallel.h"

namespace granite4_neuron {

constexpr int64_t TILE = 32;  // rows

// The last tile is filled up with rows of zeros, and the last step with columns of zeros.
inline int64_t tiles_of(int64_t rows) {
  return (rows + TILE - 1) / TILE;
}

// Accumulates products of float32 in float32: one column a step.
struct Floats {
  static constexpr int64_t COLUMNS = 1;
  static constexpr int VECTORS = TILE / LANES;
  using Input = float;  // of the vectors, after conversion
  using Operand = std::array<Vec, 2>;
  using Accumulators = std::array<Vec, VECTORS>;

  static Vec load(const char* from) {
    return Vec::loadu(from);
  }
  // Keeps a loaded value in its register; otherwise the compiler would load it again for each use.
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
  static Vec add(Vec acc, Vec weights, Vec factor) {
    return at::vec::fmadd(weights, factor, acc);
  }
};

// Whether AMX multiplies bfloat16: devices/cpu/build.py got the system's permission.
#if defined(GRANITE4_AMX) && defined(__AMX_BF16__) && defined(CPU_CAPABILITY_AVX512)
#define GRANITE4_TILE_SUMS
#endif

// Vectors of 16 pairs of bfloat16 are multiplied by the processor, or turned to float32 by `TilePairs`.
#if defined(CPU_CAPABILITY_AVX512) && (defined(__AVX512BF16__) || defined(GRANITE4_TILE_SUMS))
#define GRANITE4_PAIRS

// to[2 * i] = first[i], to[2 * i + 1] = second[i] for TILE values.
inline void interleave_rows(const at::BFloat16* first, const at::BFloat16* second, at::BFloat16* to) {
  for (int64_t i = 0; i < TILE; i += LANES) {
    auto widen = [&](const at::BFloat16* row) {
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + i)));
    };
    _mm512_storeu_si512(to + 2 * i, _mm512_or_si512(widen(first), _mm512_slli_epi32(widen(second), 16)));
  }
}
#endif

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
// Accumulates pairs of products of bfloat16, which are exact, in float32.
struct Bfloat16Pairs {
  static constexpr int64_t COLUMNS = 2;
  static constexpr int VECTORS = TILE / LANES;
  using Input = at::BFloat16;
  using Operand = std::array<__m512i, 2>;
  using Accumulators = std::array<Vec, VECTORS>;

  static __m512i load(const char* from) {
    return _mm512_loadu_si512(from);
  }
  static __m512i in_register(__m512i loaded) {
    return loaded;
  }
  static __m512i broadcast(const Input* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static Vec add(Vec acc, __m512i weights, __m512i factors) {
    return Vec(_mm512_dpbf16_ps(acc, (__m512bh)weights, (__m512bh)factors));
  }
};
#endif

#if defined(GRANITE4_TILE_SUMS)
// Pairs of products of bfloat16, added up by AMX or in its order; see tile_products.h.
struct TilePairs {
  static constexpr int64_t COLUMNS = 2;
  static constexpr int VECTORS = TILE / LANES;
  using Input = at::BFloat16;
  using Operand = std::array<__m512i, 2>;
  using Accumulators = std::array<Vec, VECTORS>;

  static __m512i load(const char* from) {
    return _mm512_loadu_si512(from);
  }
};
#endif

// Whether products use tile_products.h rather than matmul.h.
template <typename Arithmetic>
constexpr bool HAS_TILE_SUMS = false;
#if defined(GRANITE4_TILE_SUMS)
template <>
inline constexpr bool HAS_TILE_SUMS<TilePairs> = true;
#endif

// The arithmetic that multiplies vectors of T.
template <typename T>
struct ArithmeticOf {
  using type = Floats;
};

#if defined(GRANITE4_TILE_SUMS)
template <>
struct ArithmeticOf<at::BFloat16> {
  using type = TilePairs;
};
#elif defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
template <>
struct ArithmeticOf<at::BFloat16> {
  using type = Bfloat16Pairs;
};
#endif

template <typename Arithmetic>
inline int64_t steps_of(int64_t columns) {
  return (columns + Arithmetic::COLUMNS - 1) / Arithmetic::COLUMNS;
}

enum class Format : int64_t;  // see formats.h

// The description of a matrix, or of one of each expert.
struct WeightHeader {
  Format format;
  at::ScalarType dtype;  // of the vectors that it is multiplied by
  std::array<char, 7> unused{};  // explicit padding, so that all bytes are written
  int64_t experts, rows, columns, tile_bytes;
  uint64_t mark = MARK;

  static constexpr uint64_t MARK = 0x67346e2d74696c65;
};

// A packed matrix, or one of each expert: a view of the tensor of bytes that operators take, the header followed by the
// tiles of all experts. Torch passes a tensor in a hundredth of the time that an object of a class takes.
struct Weight : WeightHeader {
  const char* tiles = nullptr;

  // The first tile begins with a cache line.
  static constexpr int64_t HEADER_BYTES = 64;
  static_assert(sizeof(WeightHeader) <= HEADER_BYTES);
  static_assert(std::has_unique_object_representations_v<WeightHeader>);

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
  TORCH_CHECK(
      weight.mark == WeightHeader::MARK && bytes.numel() == weight.num_bytes(), "the tensor is not a packed weight");
  weight.tiles = data + Weight::HEADER_BYTES;
  return weight;
}

// Tiles of weights in the dtype T of the vectors. Every format has these members:
//
//   Value            the type of the values of a matrix before it is packed
//   Arithmetic       `Floats`, `Bfloat16Pairs` or `TilePairs`, by T
//   STEP_BYTES       the size of a step
//   PREFETCH_BYTES   the bytes in memory to prefetch for a step
//   LOADING_IS_WORK  whether to load the steps once for many vectors
//   load<PART>       two of a step's VECTORS, numbers 2 * PART and 2 * PART + 1, for Arithmetic
//   offset           where the value of a row and column is in a step, in bytes; a row's columns lie side by side
//   tile_bytes       the size of a tile
//   finish           scales the sums over all columns
//   value            one value of a tile as a number
//   add_scales       copies the scales of a tile's rows into the tile
//   check            refuses tensors of another size than the weight that is to be packed from them
//
// A format with another order within a tile has other members in the place of `offset`, `value` and `add_scales`:
//
//   pack             packs a whole matrix, as `pack_tiles`
//   read_row         reads a row of a tile
//
// One of these formats has a scale for each row and GROUP of columns:
//
//   GROUP_BYTES      the size of a group: its steps, and from the byte SCALES on its scales
//   group_scales     the scales of a group
//
// and another one has a state in the place of `load`:
//
//   Reader           loads the steps of one tile, in their order
//   steps_offset     where the first step is in a tile, in bytes
template <typename T>
struct PlainTiles {
  using Value = T;
  using Arithmetic = typename ArithmeticOf<T>::type;
  static constexpr int64_t STEP_BYTES = TILE * Arithmetic::COLUMNS * sizeof(T), PREFETCH_BYTES = STEP_BYTES;
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
  static void finish(const char*, int64_t, typename Arithmetic::Accumulators&) {}
  static float value(const char*, int64_t, int64_t, T value) {
    return static_cast<float>(value);
  }
  static void add_scales(char*, int64_t, const float*, int64_t) {}
  static void check(const Weight& weight, const at::Tensor& values, const std::optional<at::Tensor>& scales) {
    TORCH_CHECK(values.numel() == weight.experts * weight.rows * weight.columns && !scales.has_value());
  }
};

// Whether a format has a scale for each row and group of columns.
template <typename Tiles>
constexpr bool HAS_GROUPS = requires { Tiles::GROUP; };

// Whether a format packs matrices itself.
template <typename Tiles>
constexpr bool HAS_PACKING = requires { &Tiles::pack; };

// Some columns of all rows of a tile, one row after another. Packing reads them from here: in a matrix whose rows are a
// power of two apart, the rows of a column displace one another in the processor's caches.
template <typename Value>
struct TileColumns {
  static constexpr int64_t COLUMNS = 64;
  Value values[TILE][COLUMNS];

  // Reads `columns` columns of `rows` rows that are `stride` values apart, and fills up with zeros.
  void read(const Value* from, int64_t rows, int64_t columns, int64_t stride) {
    if (rows < TILE || columns < COLUMNS) std::memset(static_cast<void*>(values), 0, sizeof(values));
    for (int64_t r = 0; r < rows; r++) std::memcpy(values[r], from + r * stride, columns * sizeof(Value));
  }
};

// Packs the matrix `values` [experts, rows, columns] with `scales` [experts, rows, ...], or null, into tiles at `to`.
template <typename Tiles>
  requires(!HAS_PACKING<Tiles>)
inline void pack_tiles(const typename Tiles::Value* values, const float* scales, const Weight& weight, char* to) {
  using Columns = TileColumns<typename Tiles::Value>;
  constexpr int64_t STEP = Tiles::Arithmetic::COLUMNS;
  int64_t experts = weight.experts, rows = weight.rows, columns = weight.columns;
  int64_t tiles = tiles_of(rows), bytes = Tiles::tile_bytes(columns), steps = steps_of<typename Tiles::Arithmetic>(columns);
  parallel_tasks(experts * tiles, 1, [&](int64_t begin, int64_t end) {
    Columns block;
    for (int64_t task = begin; task < end; task++) {
      int64_t first = task % tiles * TILE, count = std::min(TILE, rows - first), row = task / tiles * rows + first;
      char* tile = to + task * bytes;
      std::memset(tile, 0, bytes);
      for (int64_t step = 0; step < steps; step += Columns::COLUMNS / STEP) {
        int64_t column = step * STEP, there = std::min(Columns::COLUMNS, columns - column);
        block.read(values + row * columns + column, count, there, columns);
        char* to_step = tile + step * Tiles::STEP_BYTES;
        for (int64_t c = 0; c < there; c += STEP, to_step += Tiles::STEP_BYTES)
          for (int64_t r = 0; r < TILE; r++)
            std::memcpy(to_step + Tiles::offset(r, 0), &block.values[r][c], STEP * sizeof(typename Tiles::Value));
      }
      if (scales != nullptr) Tiles::add_scales(tile, columns, scales + row, count);
    }
  });
}

template <typename Tiles>
  requires HAS_PACKING<Tiles>
inline void pack_tiles(const typename Tiles::Value* values, const float* scales, const Weight& weight, char* to) {
  Tiles::pack(values, scales, weight, to);
}

// Loads the steps of a tile, for most formats one by one.
template <typename Steps>
struct ReaderOf {
  ReaderOf(const char*, int64_t) {}
  static int64_t steps_offset(int64_t) {
    return 0;
  }
  template <int PART>
  static typename Steps::Arithmetic::Operand load(const char* step) {
    return Steps::template load<PART>(step);
  }
};

template <typename Steps>
  requires requires { typename Steps::Reader; }
struct ReaderOf<Steps> : Steps::Reader {
  using Steps::Reader::Reader;
  static int64_t steps_offset(int64_t columns) {
    return Steps::steps_offset(columns);
  }
};

// Readers of TILES tiles that are `stride` bytes apart.
template <typename Steps, int TILES>
inline auto readers_of(const char* tile, int64_t stride, int64_t columns) {
  return [&]<int... NUMBERS>(std::integer_sequence<int, NUMBERS...>) {
    return std::array<ReaderOf<Steps>, TILES>{ReaderOf<Steps>(tile + NUMBERS * stride, columns)...};
  }(std::make_integer_sequence<int, TILES>());
}

// Reads one row of a tile, in float32.
template <typename Tiles>
  requires(!HAS_PACKING<Tiles>)
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
  requires HAS_PACKING<Tiles>
inline void read_row(const char* tile, int64_t row, int64_t columns, float* to) {
  Tiles::read_row(tile, row, columns, to);
}

}  // namespace granite4_neuron
