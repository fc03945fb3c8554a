// Products of a tile of weights with any number of vectors: sums per row and vector, in an order that depends on the
// number of columns only.
#pragma once

#include "activation_panel.h"

namespace granite4_neuron {

// How many bytes ahead weights are prefetched if they are used once.
constexpr int64_t PREFETCH_DISTANCE = 4096;

// Prefetches weights while others are multiplied: each step prefetches `stride` bytes. With several tiles at a time
// only the first tile's steps count, and `skipped` bytes from `end` on are left out.
struct Prefetch {
  const char* next;
  int64_t stride;
  const char* end = nullptr;
  int64_t skipped = 0;

  // Prefetches the rest of TILES tiles that are multiplied together, and then the memory after them.
  template <typename Tiles, int TILES>
  static Prefetch together(const char* tile, int64_t tile_bytes) {
    Prefetch prefetch{tile, Tiles::STEP_BYTES, tile + tile_bytes, (TILES - 1) * tile_bytes};
    prefetch.advance<TILES>(PREFETCH_DISTANCE);
    return prefetch;
  }
  // For pass number `pass` of `passes` over a tile. With one pass memory is read as fast as possible. With several it
  // is read evenly: each pass prefetches a part of the next tile.
  template <typename Tiles>
  static Prefetch in_pass(const char* tile, int64_t tile_bytes, int64_t pass, int64_t passes) {
    if (passes == 1) return {tile + PREFETCH_DISTANCE, Tiles::STEP_BYTES};
    return {tile + tile_bytes + pass * tile_bytes / passes, (Tiles::STEP_BYTES + passes - 1) / passes};
  }
  template <int TILES>
  void advance(int64_t bytes) {
    next += bytes;
    if constexpr (TILES > 1) {
      if (next < end) return;
      next += skipped;
      skipped = 0;
    }
  }
  template <int64_t BYTES>
  void step(int64_t offset) const {
    for (int64_t byte = 0; byte < BYTES; byte += 64) __builtin_prefetch(next + offset + byte, 0, 2);
  }
};

template <typename Arithmetic, int COUNT>
[[gnu::always_inline]] inline void set_to_zero(typename Arithmetic::Accumulators (&acc)[COUNT]) {
  for_each<COUNT>([&](auto v) { for_each<Arithmetic::VECTORS>([&](auto i) { acc[v][i] = Vec(0.0f); }); });
}

// emit(t, v, the sum over steps of weights times x[v], in the order of the columns) for TILES tiles that are `stride`
// bytes apart, COUNT vectors, and a column at least; t and v are known to the compiler, and sums stay in registers.
// readers: of the tiles; step: of the first tile.
template <typename Steps, int COUNT, int TILES, typename Emit>
[[gnu::always_inline]] inline void sum_steps(
    std::array<ReaderOf<Steps>, TILES>& readers, const char* step, int64_t stride,
    const typename Steps::Arithmetic::Input* x, int64_t columns, Prefetch& prefetch, const Emit& emit) {
  using Arithmetic = typename Steps::Arithmetic;
  constexpr int64_t X_STEP = COUNT == 1 ? Arithmetic::COLUMNS : ActivationPanel<Arithmetic>::PLACES;
  // Besides the sums there is room for all vectors' factors and a register of weights, but not for another operand.
  constexpr bool IS_TIGHT = TILES * COUNT * Arithmetic::VECTORS + COUNT + 2 > REGISTERS;
  typename Arithmetic::Accumulators sums[TILES * COUNT];
  set_to_zero<Arithmetic>(sums);
  int64_t steps = steps_of<Arithmetic>(columns);
  do {
    for_each<TILES>([&](auto t) {
      prefetch.template step<Steps::PREFETCH_BYTES>(t * stride);
      for_each<Arithmetic::VECTORS / 2>([&](auto part) {
        auto weights = readers[t].template load<part>(step + t * stride);
        auto sum = [&](auto v, auto i) -> Vec& { return sums[t * COUNT + v][2 * part + i]; };
        auto factor = [&](auto v) { return Arithmetic::broadcast(x + v * Arithmetic::COLUMNS); };
        if constexpr (COUNT < Arithmetic::VECTORS && IS_TIGHT) {
          for_each<2>([&](auto i) {
            auto weight = Arithmetic::in_register(weights[i]);
            for_each<COUNT>([&](auto v) { sum(v, i) = Arithmetic::add(sum(v, i), weight, factor(v)); });
          });
        } else {
          for_each<COUNT>([&](auto v) {
            auto vector_factor = factor(v);
            for_each<2>([&](auto i) { sum(v, i) = Arithmetic::add(sum(v, i), weights[i], vector_factor); });
          });
        }
      });
    });
    prefetch.template advance<TILES>(prefetch.stride);
    step += Steps::STEP_BYTES;
    x += X_STEP;
  } while (--steps > 0);
  for_each<TILES>([&](auto t) { for_each<COUNT>([&](auto v) { emit(t, v, sums[t * COUNT + v]); }); });
}

// Columns per partial sum; the partial sums are then added up. One sum over all columns would lose more digits: its
// error grows with the square root of their number.
constexpr int64_t SUMMED_COLUMNS = 128;

// Accumulators that do not fit into registers besides the sums are kept in memory: otherwise the compiler would keep
// copies of them there, and write both.
template <typename Arithmetic, int COUNT, int TILES>
inline void add_in_memory() {
  if constexpr (2 * TILES * COUNT * Arithmetic::VECTORS >= REGISTERS) asm volatile("" ::: "memory");
}

// acc[t * COUNT + v] = the sums that `sum_steps` emits for SUMMED_COLUMNS at a time, one after another.
template <typename Steps, int COUNT, int TILES>
inline void multiply_steps(
    const char* tile, int64_t stride, const typename Steps::Arithmetic::Input* x, int64_t columns,
    typename Steps::Arithmetic::Accumulators* acc, Prefetch prefetch) {
  using Arithmetic = typename Steps::Arithmetic;
  constexpr int64_t X_STEP = COUNT == 1 ? Arithmetic::COLUMNS : ActivationPanel<Arithmetic>::PLACES;
  auto readers = readers_of<Steps, TILES>(tile, stride, columns);
  const char* step = tile + ReaderOf<Steps>::steps_offset(columns);
  for (int v = 0; v < TILES * COUNT; v++) acc[v].fill(Vec(0.0f));
  for (int64_t first = 0; first < columns; first += SUMMED_COLUMNS) {
    int64_t steps = first / Arithmetic::COLUMNS;
    sum_steps<Steps, COUNT, TILES>(
        readers, step + steps * Steps::STEP_BYTES, stride, x + steps * X_STEP,
        std::min(SUMMED_COLUMNS, columns - first), prefetch, [&](auto t, auto v, const auto& sum) {
          auto& total = acc[t * COUNT + v];
          for_each<Arithmetic::VECTORS>([&](auto i) { total[i] = total[i] + sum[i]; });
        });
    add_in_memory<Arithmetic, COUNT, TILES>();
  }
}

// The same for weights that have a scale for each row and group of columns: one group's sums after another's.
template <typename Tiles, int COUNT, int TILES>
inline void multiply_scaled_groups(
    const char* group, int64_t stride, const typename Tiles::Arithmetic::Input* x, int64_t columns,
    typename Tiles::Arithmetic::Accumulators* acc, Prefetch prefetch) {
  using Arithmetic = typename Tiles::Arithmetic;
  constexpr int64_t X_STEP = COUNT == 1 ? Arithmetic::COLUMNS : ActivationPanel<Arithmetic>::PLACES;
  constexpr int64_t SCALE_BYTES = Tiles::GROUP_BYTES - Tiles::SCALES;
  auto readers = readers_of<Tiles, TILES>(group, stride, columns);
  for (int v = 0; v < TILES * COUNT; v++) acc[v].fill(Vec(0.0f));
  for (int64_t first = 0; first < columns; first += Tiles::GROUP, group += Tiles::GROUP_BYTES) {
    typename Arithmetic::Accumulators scales[TILES];
    for_each<TILES>([&](auto t) { scales[t] = Tiles::group_scales(group + t * stride); });
    sum_steps<Tiles, COUNT, TILES>(
        readers, group, stride, x + first / Arithmetic::COLUMNS * X_STEP, std::min(Tiles::GROUP, columns - first),
        prefetch, [&](auto t, auto v, const auto& sum) {
          auto& total = acc[t * COUNT + v];
          for_each<Arithmetic::VECTORS>([&](auto i) { total[i] = at::vec::fmadd(sum[i], scales[t][i], total[i]); });
        });
    if (prefetch.stride == Tiles::STEP_BYTES) {  // the whole tile in this pass, so the scales too
      for_each<TILES>([&](auto t) { prefetch.template step<SCALE_BYTES>(t * stride); });
      prefetch.template advance<TILES>(SCALE_BYTES);
    }
    add_in_memory<Arithmetic, COUNT, TILES>();
  }
}

template <typename Steps, int COUNT, int TILES>
constexpr auto multiply_function() {
  if constexpr (HAS_GROUPS<Steps>) {
    return multiply_scaled_groups<Steps, COUNT, TILES>;
  } else {
    return multiply_steps<Steps, COUNT, TILES>;
  }
}

template <typename Steps>
using MultiplySteps = void (*)(
    const char*, int64_t, const typename Steps::Arithmetic::Input*, int64_t, typename Steps::Arithmetic::Accumulators*,
    Prefetch);

template <typename Steps, int TILES, size_t... NUMBERS>
constexpr auto multiply_steps_table(std::index_sequence<NUMBERS...>) {
  return std::array<MultiplySteps<Steps>, sizeof...(NUMBERS)>{multiply_function<Steps, NUMBERS + 1, TILES>()...};
}

// The steps of a tile, loaded once: for many vectors, and weights that are expensive to load.
template <typename Tiles>
struct LoadedSteps {
  using Arithmetic = typename Tiles::Arithmetic;
  static constexpr int64_t VECTOR_BYTES = sizeof(Vec);
  static constexpr int64_t STEP_BYTES = Arithmetic::VECTORS * VECTOR_BYTES, PREFETCH_BYTES = Tiles::STEP_BYTES;

  template <int PART>
  static typename Arithmetic::Operand load(const char* step) {
    // One register after another: a whole step would go through memory, in pieces that a load has to wait for.
    return {Arithmetic::load(step + 2 * PART * VECTOR_BYTES), Arithmetic::load(step + (2 * PART + 1) * VECTOR_BYTES)};
  }
  static int64_t tile_bytes(int64_t columns) {
    return steps_of<Arithmetic>(columns) * STEP_BYTES;
  }
  // Writes the steps of a tile to `to`, which has room for `tile_bytes`.
  static void fill(const char* tile, int64_t columns, char* to) {
    ReaderOf<Tiles> reader(tile, columns);
    const char* step = tile + reader.steps_offset(columns);
    for (int64_t count = steps_of<Arithmetic>(columns); count > 0; count--) {
      for_each<Arithmetic::VECTORS / 2>([&](auto part) {
        auto weights = reader.template load<part>(step);
        std::memcpy(to + 2 * part * VECTOR_BYTES, &weights, sizeof(weights));
      });
      step += Tiles::STEP_BYTES;
      to += STEP_BYTES;
    }
  }
};

// The same for weights in groups: each group's steps, and then its scales.
template <typename Tiles>
struct LoadedGroups : LoadedSteps<Tiles> {
  using Steps = LoadedSteps<Tiles>;
  using typename Steps::Arithmetic;
  static constexpr int64_t GROUP = Tiles::GROUP, SCALES = GROUP / Arithmetic::COLUMNS * Steps::STEP_BYTES;
  static constexpr int64_t GROUP_BYTES = SCALES + Steps::STEP_BYTES;

  static typename Arithmetic::Accumulators group_scales(const char* group) {
    typename Arithmetic::Accumulators scales;
    for_each<Arithmetic::VECTORS>([&](auto i) {
      scales[i] = Vec::loadu(reinterpret_cast<const float*>(group + SCALES) + i * LANES);
    });
    return scales;
  }
  static int64_t tile_bytes(int64_t columns) {
    return (columns + GROUP - 1) / GROUP * GROUP_BYTES;
  }
  static void fill(const char* tile, int64_t columns, char* to) {
    for (int64_t first = 0; first < columns; first += GROUP, tile += Tiles::GROUP_BYTES, to += GROUP_BYTES) {
      Steps::fill(tile, std::min(GROUP, columns - first), to);
      auto scales = Tiles::group_scales(tile);
      std::memcpy(to + SCALES, &scales, sizeof(scales));
    }
  }
};

// finish(v, acc) for all vectors, with acc[v] as in `multiply_steps`. steps: of `tile`, as stored or already loaded.
template <typename Tiles, typename Steps, typename Finish>
  requires(!HAS_TILE_SUMS<typename Tiles::Arithmetic>)
inline void multiply_vectors(
    const char* tile, const char* steps, ActivationPanel<typename Steps::Arithmetic> x, int64_t columns,
    const Finish& finish) {
  static constexpr auto table = multiply_steps_table<Steps, 1>(std::make_index_sequence<MR>());
  typename Steps::Arithmetic::Accumulators acc[MR];
  const auto* block = x.data;
  int64_t passes = (x.count + x.share - 1) / x.share, bytes = Tiles::tile_bytes(columns);
  for (int64_t pass = 0; pass < passes; pass++, block += x.block_size(columns)) {
    int64_t first = pass * x.share, count = std::min(x.share, x.count - first);
    Prefetch prefetch = Prefetch::in_pass<Tiles>(tile, bytes, pass, passes);
    table[count - 1](steps, 0, block, columns, acc, prefetch);
    for (int64_t v = 0; v < count; v++) finish(first + v, acc[v]);
  }
}

// With more vectors than this it pays to load the steps once, if loading them is expensive.
constexpr int64_t LARGE_BATCH = 2 * MR;

// emit(v, acc) for all vectors, with acc[i] = the tile's row i . x[v].
template <typename Tiles, typename Emit>
inline void multiply_tile(
    const char* tile, ActivationPanel<typename Tiles::Arithmetic> x, int64_t columns, const Emit& emit) {
  auto finish = [&](int64_t v, auto& acc) {
    Tiles::finish(tile, columns, acc);
    emit(v, acc);
  };
  if constexpr (Tiles::LOADING_IS_WORK) {
    if (x.count > LARGE_BATCH) {
      using Steps = std::conditional_t<HAS_GROUPS<Tiles>, LoadedGroups<Tiles>, LoadedSteps<Tiles>>;
      Scratch<char> steps(Steps::tile_bytes(columns));
      Steps::fill(tile, columns, steps.data());
      return multiply_vectors<Tiles, Steps>(tile, steps.data(), x, columns, finish);
    }
  }
  multiply_vectors<Tiles, Tiles>(tile, tile, x, columns, finish);
}

// Tiles that a small batch is multiplied by at a time: one tile's multiplications hide the latency of another's
// additions.
constexpr int TILE_UNROLL = 2;
constexpr int64_t SMALL_BATCH = std::min<int64_t>(4, MR);

// As `multiply_tile`, emit(t, v, acc), for TILE_UNROLL consecutive tiles and SMALL_BATCH vectors at most.
template <typename Tiles, typename Emit>
inline void multiply_unrolled(
    const char* tiles, ActivationPanel<typename Tiles::Arithmetic> x, int64_t columns, const Emit& emit) {
  static constexpr auto table = multiply_steps_table<Tiles, TILE_UNROLL>(std::make_index_sequence<SMALL_BATCH>());
  typename Tiles::Arithmetic::Accumulators acc[TILE_UNROLL * SMALL_BATCH];
  int64_t bytes = Tiles::tile_bytes(columns);
  Prefetch prefetch = Prefetch::together<Tiles, TILE_UNROLL>(tiles, bytes);
  table[x.count - 1](tiles, bytes, x.data, columns, acc, prefetch);
  for (int64_t t = 0; t < TILE_UNROLL; t++)
    for (int64_t v = 0; v < x.count; v++) {
      auto& vector_acc = acc[t * x.count + v];
      Tiles::finish(tiles + t * bytes, columns, vector_acc);
      emit(t, v, vector_acc);
    }
}

// emit(number, v, acc) for tiles `first` to `last` of an expert's matrix and all vectors, with acc[i] = the
// tile's row i . x[v].
template <typename Tiles, typename Emit>
  requires(!HAS_TILE_SUMS<typename Tiles::Arithmetic>)
inline void multiply_tiles(
    const Weight& weight, int64_t expert, int64_t first, int64_t last, ActivationPanel<typename Tiles::Arithmetic> x,
    const Emit& emit) {
  int64_t number = first;
  if (x.count <= SMALL_BATCH)
    for (; number + TILE_UNROLL <= last; number += TILE_UNROLL) {
      auto emit_tile = [&](int64_t t, int64_t v, const auto& acc) { emit(number + t, v, acc); };
      multiply_unrolled<Tiles>(weight.tile(expert, number), x, weight.columns, emit_tile);
    }
  for (; number < last; number++) {
    auto emit_tile = [&](int64_t v, const auto& acc) { emit(number, v, acc); };
    multiply_tile<Tiles>(weight.tile(expert, number), x, weight.columns, emit_tile);
  }
}

}  // namespace granite4_neuron
