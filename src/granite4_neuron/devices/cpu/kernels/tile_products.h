// Products of weights with bfloat16 vectors by AMX, and by other instructions that add up in the same order.
//
// AMX multiplies 16 vectors by 16 rows of weights, 32 columns at a time. For each pair of a vector and a row it adds up
// the products of the even columns, and separately of the odd columns, each from zero by fused multiply-add; then it
// adds the sum of both to its accumulator. It treats subnormal inputs as zeros, and returns zeros for subnormal
// results. `multiply_pairs` does the same, so that a single vector, for which AMX is slow, gets the same bits as one of
// many. This file can also be compiled for a processor without AMX, with the same bits.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS.
#pragma once

#include "matmul.h"

#if defined(GRANITE4_TILE_SUMS)

namespace granite4_neuron {

constexpr int64_t BLOCK_COLUMNS = 32, BLOCK_PAIRS = BLOCK_COLUMNS / 2;
constexpr int64_t TILE_VECTORS = 16;
// Up to this many vectors a product is memory-bound, so AMX would only wait for memory.
constexpr int64_t FEW_VECTORS = 4;
// The sums of more vectors with several tiles would not fit into registers.
constexpr int64_t UNROLLED_VECTORS = 2;

// Vectors in tiles of `height` vectors at most. A tile has blocks of columns one after another, and a block has these
// columns of all the tile's vectors. After the last column zeros fill a whole block; with several tiles, zeros fill the
// last one after its last vector.
template <>
struct ActivationPanel<TilePairs> {
  using Input = at::BFloat16;

  static constexpr int64_t PART = 256;

  const Input* data;
  int64_t count, height, tile_size;

  static int64_t height_of(int64_t count) {
    return count <= FEW_VECTORS ? std::max<int64_t>(1, count) : TILE_VECTORS;
  }
  static int64_t size(int64_t count, int64_t columns) {
    return (count + TILE_VECTORS - 1) / TILE_VECTORS * tile_size_of(height_of(count), columns);
  }
  static int64_t tile_size_of(int64_t height, int64_t columns) {
    return height * ((columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS * BLOCK_COLUMNS);
  }
  // A thread's part stays in its cache while tiles of weights pass.
  int64_t parts() const {
    return std::max<int64_t>(1, (count + PART - 1) / PART);
  }
  ActivationPanel part(int64_t number) const {
    return {vector(number * PART), std::min(PART, count - number * PART), height, tile_size};
  }
  // The first block of a vector.
  const Input* vector(int64_t number) const {
    return data + number / TILE_VECTORS * tile_size + number % TILE_VECTORS * BLOCK_COLUMNS;
  }};

// A tile at `to`, of `count` vectors: row(v) is the v-th.
template <typename Row>
inline void fill_tile(const Row& row, int64_t count, int64_t height, int64_t columns, at::BFloat16* to) {
  for (int64_t v = 0; v < height; v++)
    for (int64_t first = 0; first < columns; first += BLOCK_COLUMNS) {
      at::BFloat16* block = to + first * height + v * BLOCK_COLUMNS;
      int64_t size = v < count ? std::min(BLOCK_COLUMNS, columns - first) : 0;
      if (size > 0) std::memcpy(block, row(v) + first, size * sizeof(at::BFloat16));
      std::memset(static_cast<void*>(block + size), 0, (BLOCK_COLUMNS - size) * sizeof(at::BFloat16));
    }
}

// A panel without vectors yet.
inline ActivationPanel<TilePairs> empty_panel(int64_t count, int64_t columns, const at::BFloat16* data) {
  using Panel = ActivationPanel<TilePairs>;
  int64_t height = Panel::height_of(count);
  return {data, count, height, Panel::tile_size_of(height, columns)};
}

// `fill_panel` of activation_panel.h.
template <typename Arithmetic, typename Row>
  requires HAS_TILE_SUMS<Arithmetic>
inline ActivationPanel<Arithmetic> fill_panel(
    const Row& row, int64_t count, int64_t columns, typename Arithmetic::Input* scratch) {
  auto panel = empty_panel(count, columns, scratch);
  for (int64_t first = 0; first < count; first += TILE_VECTORS, scratch += panel.tile_size) {
    auto tile_row = [&](int64_t v) { return row(first + v); };
    fill_tile(tile_row, std::min(TILE_VECTORS, count - first), panel.height, columns, scratch);
  }
  return panel;
}

// `as_panel` of activation_panel.h.
template <typename Arithmetic, typename T>
  requires HAS_TILE_SUMS<Arithmetic>
inline ActivationPanel<Arithmetic> as_panel(
    const T* x, int64_t count, int64_t columns, typename Arithmetic::Input* scratch) {
  if (count == 1 && columns % BLOCK_COLUMNS == 0) return empty_panel(count, columns, x);
  auto panel = empty_panel(count, columns, scratch);
  parallel_tasks((count + TILE_VECTORS - 1) / TILE_VECTORS, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; tile++) {
      int64_t first = tile * TILE_VECTORS;
      auto row = [&](int64_t v) { return x + (first + v) * columns; };
      fill_tile(row, std::min(TILE_VECTORS, count - first), panel.height, columns, scratch + tile * panel.tile_size);
    }
  });
  return panel;
}

// Makes the processor flush subnormal numbers to zero, inputs and results, as AMX does.
class WithoutDenormals {
 public:
  WithoutDenormals() : before_(_mm_getcsr()) {
    constexpr unsigned FLUSH_TO_ZERO = 0x8000, DENORMALS_ARE_ZEROS = 0x0040;
    _mm_setcsr(before_ | FLUSH_TO_ZERO | DENORMALS_ARE_ZEROS);
  }
  ~WithoutDenormals() {
    _mm_setcsr(before_);
  }
  WithoutDenormals(const WithoutDenormals&) = delete;
  WithoutDenormals& operator=(const WithoutDenormals&) = delete;

 private:
  unsigned before_;
};

// The bytes of a block of columns in a tile of weights.
template <typename Steps>
constexpr int64_t block_bytes() {
  if constexpr (HAS_GROUPS<Steps>) {
    static_assert(Steps::GROUP == BLOCK_COLUMNS);
    return Steps::GROUP_BYTES;
  } else {
    return BLOCK_PAIRS * Steps::STEP_BYTES;
  }
}

// total + sum, or total + the group's scales * sum.
template <typename Scales>
inline Vec add_block(Vec total, Vec sum, const Scales& scales, int i) {
  if constexpr (std::is_same_v<Scales, std::nullptr_t>) {
    return total + sum;
  } else {
    return at::vec::fmadd(sum, scales[i], total);
  }
}

template <typename Steps>
inline auto block_scales(const char* block) {
  if constexpr (HAS_GROUPS<Steps>) {
    return Steps::group_scales(block);
  } else {
    return nullptr;
  }
}

// acc[t * COUNT + v] = tile t of TILES, which are `stride` bytes apart, times vector v. x: the first block of vector 0;
// vectors are BLOCK_COLUMNS apart, and blocks `height` vectors apart.
template <typename Steps, int COUNT, int TILES>
inline void multiply_pairs(
    const char* tile, int64_t stride, const at::BFloat16* x, int64_t height, int64_t columns,
    TilePairs::Accumulators* acc, Prefetch prefetch) {
  auto readers = readers_of<Steps, TILES>(tile, stride, columns);
  const char* block = tile + ReaderOf<Steps>::steps_offset(columns);
  constexpr int PARITIES = 2;
  auto even = [](__m512i pairs) { return Vec(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))); };
  auto odd = [](__m512i pairs) {
    return Vec(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000))));
  };
  for (int v = 0; v < TILES * COUNT; v++) acc[v].fill(Vec(0.0f));
  for (int64_t first = 0; first < columns; first += BLOCK_COLUMNS, x += height * BLOCK_COLUMNS) {
    Vec sums[TILES * COUNT][TilePairs::VECTORS][PARITIES];
    for_each<TILES * COUNT>([&](auto v) {
      for_each<TilePairs::VECTORS>([&](auto i) { sums[v][i][0] = sums[v][i][1] = Vec(0.0f); });
    });
    int64_t pairs = steps_of<TilePairs>(std::min(BLOCK_COLUMNS, columns - first));
    for (int64_t pair = 0; pair < pairs; pair++) {
      for_each<TILES>([&](auto t) {
        const char* step = block + t * stride + pair * Steps::STEP_BYTES;
        prefetch.template step<Steps::PREFETCH_BYTES>(t * stride);
        auto weights = readers[t].template load<0>(step);
        for_each<COUNT>([&](auto v) {
          int32_t factors;
          std::memcpy(&factors, x + v * BLOCK_COLUMNS + 2 * pair, sizeof(factors));
          __m512i factor = _mm512_set1_epi32(factors);
          for_each<TilePairs::VECTORS>([&](auto i) {
            auto& sum = sums[t * COUNT + v][i];
            sum[0] = at::vec::fmadd(even(weights[i]), even(factor), sum[0]);
            sum[1] = at::vec::fmadd(odd(weights[i]), odd(factor), sum[1]);
          });
        });
      });
      prefetch.template advance<TILES>(prefetch.stride);
    }
    for_each<TILES>([&](auto t) {
      auto scales = block_scales<Steps>(block + t * stride);
      for_each<COUNT>([&](auto v) {
        auto& total = acc[t * COUNT + v];
        for_each<TilePairs::VECTORS>([&](auto i) {
          auto& sum = sums[t * COUNT + v][i];
          total[i] = add_block(total[i], sum[0] + sum[1], scales, i);
        });
      });
    });
    if constexpr (HAS_GROUPS<Steps>) {
      constexpr int64_t SCALE_BYTES = Steps::GROUP_BYTES - Steps::SCALES;
      for_each<TILES>([&](auto t) { prefetch.template step<SCALE_BYTES>(t * stride); });
      prefetch.template advance<TILES>(SCALE_BYTES);
    }
    block += block_bytes<Steps>();
  }
}

using MultiplyPairs = void (*)(
    const char*, int64_t, const at::BFloat16*, int64_t, int64_t, TilePairs::Accumulators*, Prefetch);

template <typename Steps, int TILES, size_t... NUMBERS>
constexpr auto multiply_pairs_table(std::index_sequence<NUMBERS...>) {
  return std::array<MultiplyPairs, sizeof...(NUMBERS)>{multiply_pairs<Steps, NUMBERS + 1, TILES>...};
}

// emit(t, v, acc) for TILES consecutive tiles and all vectors, without AMX.
template <typename Tiles, int TILES, typename Emit>
inline void multiply_without_amx(
    const char* tiles, ActivationPanel<TilePairs> x, int64_t columns, const Emit& emit) {
  constexpr int64_t AT_A_TIME = TILES == 1 ? FEW_VECTORS : UNROLLED_VECTORS;
  static constexpr auto table = multiply_pairs_table<Tiles, TILES>(std::make_index_sequence<AT_A_TIME>());
  WithoutDenormals flushed;
  TilePairs::Accumulators acc[TILES * AT_A_TIME];
  int64_t bytes = Tiles::tile_bytes(columns);
  for (int64_t first = 0; first < x.count; first += AT_A_TIME) {
    int64_t count = std::min(AT_A_TIME, x.count - first);
    Prefetch prefetch = Prefetch::together<Tiles, TILES>(tiles, bytes);
    table[count - 1](tiles, bytes, x.vector(first), x.height, columns, acc, prefetch);
    for (int64_t t = 0; t < TILES; t++)
      for (int64_t v = 0; v < count; v++) {
        auto& vector_acc = acc[t * count + v];
        Tiles::finish(tiles + t * bytes, columns, vector_acc);
        emit(t, first + v, vector_acc);
      }
  }
}

#if defined(GRANITE4_AMX)

// Configures tiles 0 to 7 for 16 rows of 64 bytes each, for the time of a scope.
class TileRegisters {
 public:
  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    _tile_loadconfig(&configuration);
  }
  ~TileRegisters() {
    _tile_release();
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// sums[v][row], of up to 2 tiles of vectors: stored, or added to with the groups' scales.
using BlockSums = float[2 * TILE_VECTORS][TILE];

// Multiplies VECTOR_TILES tiles of vectors, `x_stride` apart, by all blocks of a tile of weights.
template <typename Steps, int VECTOR_TILES>
inline void multiply_blocks(
    const char* block, const at::BFloat16* x, int64_t x_stride, int64_t columns, BlockSums& sums, Prefetch prefetch) {
  constexpr int64_t ROW_BYTES = TILE * TilePairs::COLUMNS * sizeof(at::BFloat16), HALF_ROW = ROW_BYTES / 2;
  constexpr int64_t SUMS_BYTES = TILE * sizeof(float), X_BYTES = BLOCK_COLUMNS * sizeof(at::BFloat16);
  static_assert(Steps::STEP_BYTES == ROW_BYTES);
  // 0 and 1: sums of the first vectors with the first and with the other rows. 2 and 3: sums of the other vectors. 4
  // and 5: vectors. 6 and 7: weights.
  auto clear = [] {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (VECTOR_TILES == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  };
  auto store = [](float* to) {
    _tile_stored(0, to, SUMS_BYTES);
    _tile_stored(1, to + TILE / 2, SUMS_BYTES);
    if constexpr (VECTOR_TILES == 2) {
      _tile_stored(2, to + TILE_VECTORS * TILE, SUMS_BYTES);
      _tile_stored(3, to + TILE_VECTORS * TILE + TILE / 2, SUMS_BYTES);
    }
  };
  if constexpr (HAS_GROUPS<Steps>) std::memset(sums, 0, VECTOR_TILES * TILE_VECTORS * SUMS_BYTES);
  asm volatile("" ::: "memory");  // the instructions below read what was written above, which the compiler cannot see
  clear();
  for (int64_t first = 0; first < columns; first += BLOCK_COLUMNS, x += TILE_VECTORS * BLOCK_COLUMNS) {
    _tile_loadd(6, block, ROW_BYTES);
    _tile_loadd(4, x, X_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, block + HALF_ROW, ROW_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (VECTOR_TILES == 2) {
      _tile_loadd(5, x + x_stride, X_BYTES);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    int64_t bytes = BLOCK_PAIRS * prefetch.stride;
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(prefetch.next + byte, 0, 2);
    prefetch.next += bytes;
    if constexpr (HAS_GROUPS<Steps>) {
      float block_sums[2 * TILE_VECTORS][TILE];
      store(block_sums[0]);
      clear();
      auto scales = Steps::group_scales(block);
      for (int64_t v = 0; v < VECTOR_TILES * TILE_VECTORS; v++)
        for_each<TilePairs::VECTORS>([&](auto i) {
          float* total = sums[v] + i * LANES;
          add_block(Vec::loadu(total), Vec::loadu(block_sums[v] + i * LANES), scales, i).store(total);
        });
    }
    block += block_bytes<Steps>();
  }
  if constexpr (!HAS_GROUPS<Steps>) store(sums[0]);
}

// emit(v, acc) for all vectors. steps: of `tile`, as stored or already loaded.
template <typename Tiles, typename Steps, typename Emit>
inline void multiply_by_amx(
    const char* tile, const char* steps, ActivationPanel<TilePairs> x, int64_t columns, const Emit& emit) {
  constexpr int64_t AT_A_TIME = 2 * TILE_VECTORS;
  alignas(64) BlockSums sums;
  int64_t passes = (x.count + AT_A_TIME - 1) / AT_A_TIME, bytes = Tiles::tile_bytes(columns);
  for (int64_t pass = 0; pass < passes; pass++) {
    int64_t first = pass * AT_A_TIME, count = std::min(AT_A_TIME, x.count - first);
    auto multiply = count > TILE_VECTORS ? multiply_blocks<Steps, 2> : multiply_blocks<Steps, 1>;
    multiply(
        steps, x.vector(first), x.tile_size, columns, sums, Prefetch::in_pass<Tiles>(tile, bytes, pass, passes));
    for (int64_t v = 0; v < count; v++) {
      TilePairs::Accumulators acc;
      for_each<TilePairs::VECTORS>([&](auto i) { acc[i] = Vec::loadu(sums[v] + i * LANES); });
      Tiles::finish(tile, columns, acc);
      emit(first + v, acc);
    }
  }
}

#endif

// `multiply_vectors` of matmul.h, for a plain tile.
template <typename Tiles, typename Steps, typename Finish>
  requires HAS_TILE_SUMS<typename Tiles::Arithmetic>
inline void multiply_vectors(
    const char* tile, const char* steps, ActivationPanel<typename Tiles::Arithmetic> x, int64_t columns,
    const Finish& finish) {
#if defined(GRANITE4_AMX)
  if (x.count > FEW_VECTORS && columns % BLOCK_COLUMNS == 0) {
    TileRegisters registers;
    return multiply_by_amx<Tiles, Steps>(tile, steps, x, columns, finish);
  }
#endif
  multiply_without_amx<Tiles, 1>(tile, x, columns, [&](int64_t, int64_t v, const auto& acc) { finish(v, acc); });
}

// `multiply_tiles` of matmul.h.
template <typename Tiles, typename Emit>
  requires HAS_TILE_SUMS<typename Tiles::Arithmetic>
inline void multiply_tiles(
    const Weight& weight, int64_t expert, int64_t first, int64_t last, ActivationPanel<typename Tiles::Arithmetic> x,
    const Emit& emit) {
  int64_t number = first;
#if defined(GRANITE4_AMX)
  // AMX reads whole blocks of weights.
  if (x.count > FEW_VECTORS && weight.columns % BLOCK_COLUMNS == 0) {
    TileRegisters registers;
    for (; number < last; number++) {
      const char* tile = weight.tile(expert, number);
      auto emit_tile = [&](int64_t v, const auto& acc) { emit(number, v, acc); };
      if constexpr (std::is_same_v<Tiles, PlainTiles<at::BFloat16>>) {
        multiply_by_amx<Tiles, Tiles>(tile, tile, x, weight.columns, emit_tile);
      } else {
        using Steps = std::conditional_t<HAS_GROUPS<Tiles>, LoadedGroups<Tiles>, LoadedSteps<Tiles>>;
        Scratch<char> steps(Steps::tile_bytes(weight.columns));
        Steps::fill(tile, weight.columns, steps.data());
        multiply_by_amx<Tiles, Steps>(tile, steps.data(), x, weight.columns, emit_tile);
      }
    }
    return;
  }
#endif
  if (x.count <= UNROLLED_VECTORS)
    for (; number + TILE_UNROLL <= last; number += TILE_UNROLL)
      multiply_without_amx<Tiles, TILE_UNROLL>(
          weight.tile(expert, number), x, weight.columns,
          [&](int64_t t, int64_t v, const auto& acc) { emit(number + t, v, acc); });
  for (; number < last; number++)
    multiply_without_amx<Tiles, 1>(
        weight.tile(expert, number), x, weight.columns,
        [&](int64_t, int64_t v, const auto& acc) { emit(number, v, acc); });
}

}  // namespace granite4_neuron

#endif
