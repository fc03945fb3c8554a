// Products of a tile with any number of vectors: one sum for each row and vector, in the order of the columns.
#pragma once

#include "vectors.h"

namespace granite4_neuron {

// Bytes that weights are fetched ahead of their use where they are used once.
constexpr int64_t AHEAD = 4096;

// Weights that are fetched into the cache while others are multiplied: each step of these fetches `stride` bytes. Of
// several tiles at a time it is those of the first, and `skipped` bytes from `end` on are left out.
struct Fetch {
  const char* next;
  int64_t stride;
  const char* end = nullptr;
  int64_t skipped = 0;

  // What is left of TILES tiles that are multiplied together, and then what stands behind them.
  template <typename Tiles, int TILES>
  static Fetch together(const char* tile, int64_t tile_bytes) {
    Fetch fetch{tile, Tiles::STEP_BYTES, tile + tile_bytes, (TILES - 1) * tile_bytes};
    fetch.advance<TILES>(AHEAD);
    return fetch;
  }
  // In pass number `pass` of `passes` over a tile. With one pass memory is read as fast as it goes. With several it is
  // read evenly: in each of them a part of the next tile.
  template <typename Tiles>
  static Fetch in_pass(const char* tile, int64_t tile_bytes, int64_t pass, int64_t passes) {
    if (passes == 1) return {tile + AHEAD, Tiles::STEP_BYTES};
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
  template <int64_t MOST>
  void step(int64_t offset) const {
    for (int64_t byte = 0; byte < MOST; byte += 64) __builtin_prefetch(next + offset + byte, 0, 2);
  }
};

template <typename Arithmetic, int COUNT>
[[gnu::always_inline]] inline void set_to_zero(typename Arithmetic::Accumulators (&totals)[COUNT]) {
  for_each<COUNT>([&](auto v) { for_each<Arithmetic::VECTORS>([&](auto i) { totals[v][i] = Vec(0.0f); }); });
}

// emit(t, v, the sum over steps of weights times x[v], in the order of the columns) for TILES tiles that are `stride`
// bytes apart, COUNT vectors, and a column at least; t and v are known to the compiler, and sums stay in registers.
template <typename Steps, int COUNT, int TILES, typename Emit>
[[gnu::always_inline]] inline void sum_steps(
    const char* step, int64_t stride, const typename Steps::Arithmetic::Input* x, int64_t columns, Fetch& fetch,
    const Emit& emit) {
  using Arithmetic = typename Steps::Arithmetic;
  constexpr int64_t X_STEP = COUNT == 1 ? Arithmetic::COLUMNS : Vectors<Arithmetic>::PLACES;
  // Beside the sums there is room for all vectors' factors and a register of weights, and not for an operand.
  constexpr bool IS_TIGHT = TILES * COUNT * Arithmetic::VECTORS + COUNT + 2 > REGISTERS;
  typename Arithmetic::Accumulators sums[TILES * COUNT];
  set_to_zero<Arithmetic>(sums);
  int64_t steps = steps_of<Arithmetic>(columns);
  do {
    for_each<TILES>([&](auto t) {
      fetch.template step<Steps::PREFETCH_BYTES>(t * stride);
      for_each<Arithmetic::VECTORS / 2>([&](auto part) {
        auto weights = Steps::template load<part>(step + t * stride);
        auto sum = [&](auto v, auto i) -> Vec& { return sums[t * COUNT + v][2 * part + i]; };
        auto factor = [&](auto v) { return Arithmetic::broadcast(x + v * Arithmetic::COLUMNS); };
        if constexpr (COUNT < Arithmetic::VECTORS && IS_TIGHT) {
          for_each<2>([&](auto i) {
            auto weight = Arithmetic::in_register(weights[i]);
            for_each<COUNT>([&](auto v) { sum(v, i) = Arithmetic::add(sum(v, i), weight, factor(v)); });
          });
        } else {
          for_each<COUNT>([&](auto v) {
            auto of_vector = factor(v);
            for_each<2>([&](auto i) { sum(v, i) = Arithmetic::add(sum(v, i), weights[i], of_vector); });
          });
        }
      });
    });
    fetch.template advance<TILES>(fetch.stride);
    step += Steps::STEP_BYTES;
    x += X_STEP;
  } while (--steps > 0);
  for_each<TILES>([&](auto t) { for_each<COUNT>([&](auto v) { emit(t, v, sums[t * COUNT + v]); }); });
}

// totals[t * COUNT + v] = what `sum_steps` emits.
template <typename Steps, int COUNT, int TILES>
inline void multiply_steps(
    const char* step, int64_t stride, const typename Steps::Arithmetic::Input* x, int64_t columns,
    typename Steps::Arithmetic::Accumulators* totals, Fetch fetch) {
  sum_steps<Steps, COUNT, TILES>(
      step, stride, x, columns, fetch, [&](auto t, auto v, const auto& sum) {
        for_each<Steps::Arithmetic::VECTORS>([&](auto i) { totals[t * COUNT + v][i] = sum[i]; });
      });
}

// The same of weights that have a scale for each row and group of columns: one group's sums after another's.
template <typename Tiles, int COUNT, int TILES>
inline void multiply_scaled_groups(
    const char* group, int64_t stride, const typename Tiles::Arithmetic::Input* x, int64_t columns,
    typename Tiles::Arithmetic::Accumulators* totals, Fetch fetch) {
  using Arithmetic = typename Tiles::Arithmetic;
  constexpr int64_t X_STEP = COUNT == 1 ? Arithmetic::COLUMNS : Vectors<Arithmetic>::PLACES;
  constexpr int64_t SCALE_BYTES = Tiles::GROUP_BYTES - Tiles::SCALES;
  for (int v = 0; v < TILES * COUNT; v++) totals[v].fill(Vec(0.0f));
  for (int64_t first = 0; first < columns; first += Tiles::GROUP, group += Tiles::GROUP_BYTES) {
    typename Arithmetic::Accumulators scales[TILES];
    for_each<TILES>([&](auto t) { scales[t] = Tiles::group_scales(group + t * stride); });
    sum_steps<Tiles, COUNT, TILES>(
        group, stride, x + first / Arithmetic::COLUMNS * X_STEP, std::min(Tiles::GROUP, columns - first), fetch,
        [&](auto t, auto v, const auto& sum) {
          auto& total = totals[t * COUNT + v];
          for_each<Arithmetic::VECTORS>([&](auto i) { total[i] = at::vec::fmadd(sum[i], scales[t][i], total[i]); });
        });
    if (fetch.stride == Tiles::STEP_BYTES) {  // all of the tile in this pass, and so the scales too
      for_each<TILES>([&](auto t) { fetch.template step<SCALE_BYTES>(t * stride); });
      fetch.template advance<TILES>(SCALE_BYTES);
    }
    // Totals that do not fit into registers beside the sums are added to in memory: the compiler would keep copies of
    // them there, and write both.
    if constexpr (2 * TILES * COUNT * Arithmetic::VECTORS >= REGISTERS) asm volatile("" ::: "memory");
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
    Fetch);

template <typename Steps, int TILES, size_t... NUMBERS>
constexpr auto multiply_steps_table(std::index_sequence<NUMBERS...>) {
  return std::array<MultiplySteps<Steps>, sizeof...(NUMBERS)>{multiply_function<Steps, NUMBERS + 1, TILES>()...};
}

// The steps of a tile when they have been loaded once: for many vectors, and weights whose loading is work.
template <typename Tiles>
struct LoadedSteps {
  using Arithmetic = typename Tiles::Arithmetic;
  static constexpr int64_t VECTOR_BYTES = sizeof(Vec);
  static constexpr int64_t STEP_BYTES = Arithmetic::VECTORS * VECTOR_BYTES, PREFETCH_BYTES = Tiles::STEP_BYTES;

  template <int PART>
  static typename Arithmetic::Operand load(const char* step) {
    // One register after another: as a whole it would go through memory, in pieces that a load has to wait for.
    return {Arithmetic::load(step + 2 * PART * VECTOR_BYTES), Arithmetic::load(step + (2 * PART + 1) * VECTOR_BYTES)};
  }
  static int64_t tile_bytes(int64_t columns) {
    return steps_of<Arithmetic>(columns) * STEP_BYTES;
  }
  // Those of a tile, at `to`, which has room for `tile_bytes`.
  static void fill(const char* tile, int64_t columns, char* to) {
    for (int64_t count = steps_of<Arithmetic>(columns); count > 0; count--) {
      for_each<Arithmetic::VECTORS / 2>([&](auto part) {
        auto weights = Tiles::template load<part>(tile);
        std::memcpy(to + 2 * part * VECTOR_BYTES, &weights, sizeof(weights));
      });
      tile += Tiles::STEP_BYTES;
      to += STEP_BYTES;
    }
  }
};

// finish(v, totals) for all vectors, with totals[v] as in `multiply_steps`. steps: those of `tile`, or what has been
// made of them.
template <typename Tiles, typename Steps, typename Finish>
inline void multiply_vectors(
    const char* tile, const char* steps, Vectors<typename Steps::Arithmetic> x, int64_t columns,
    const Finish& finish) {
  static constexpr auto table = multiply_steps_table<Steps, 1>(std::make_index_sequence<AT_ONCE>());
  typename Steps::Arithmetic::Accumulators totals[AT_ONCE];
  const auto* block = x.data;
  int64_t passes = (x.count + x.share - 1) / x.share, bytes = Tiles::tile_bytes(columns);
  for (int64_t pass = 0; pass < passes; pass++, block += x.block_size(columns)) {
    int64_t first = pass * x.share, count = std::min(x.share, x.count - first);
    Fetch fetch = Fetch::in_pass<Tiles>(tile, bytes, pass, passes);
    table[count - 1](steps, 0, block, columns, totals, fetch);
    for (int64_t v = 0; v < count; v++) finish(first + v, totals[v]);
  }
}

// More vectors than these are better off with steps that are loaded once, if loading them is work.
constexpr int64_t MANY = 2 * AT_ONCE;

// emit(v, totals) for all vectors, with totals[i] = the tile's row i . x[v].
template <typename Tiles, typename Emit>
inline void multiply_tile(
    const char* tile, Vectors<typename Tiles::Arithmetic> x, int64_t columns, const Emit& emit) {
  auto finish = [&](int64_t v, auto& totals) {
    Tiles::finish(tile, columns, totals);
    emit(v, totals);
  };
  if constexpr (Tiles::LOADING_IS_WORK) {
    if (x.count > MANY) {
      using Steps = LoadedSteps<Tiles>;
      Scratch<char> steps(Steps::tile_bytes(columns));
      Steps::fill(tile, columns, steps.data());
      return multiply_vectors<Tiles, Steps>(tile, steps.data(), x, columns, finish);
    }
  }
  multiply_vectors<Tiles, Tiles>(tile, tile, x, columns, finish);
}

// Tiles that few vectors are multiplied by at a time: they have sums to go on with while others are being added up.
constexpr int TOGETHER = 2;
constexpr int64_t FEW = std::min<int64_t>(4, AT_ONCE);

// As `multiply_tile`, emit(t, v, totals), for TOGETHER tiles, one behind the other, and FEW vectors at most.
template <typename Tiles, typename Emit>
inline void multiply_together(
    const char* tiles, Vectors<typename Tiles::Arithmetic> x, int64_t columns, const Emit& emit) {
  static constexpr auto table = multiply_steps_table<Tiles, TOGETHER>(std::make_index_sequence<FEW>());
  typename Tiles::Arithmetic::Accumulators totals[TOGETHER * FEW];
  int64_t bytes = Tiles::tile_bytes(columns);
  Fetch fetch = Fetch::together<Tiles, TOGETHER>(tiles, bytes);
  table[x.count - 1](tiles, bytes, x.data, columns, totals, fetch);
  for (int64_t t = 0; t < TOGETHER; t++)
    for (int64_t v = 0; v < x.count; v++) {
      auto& of_vector = totals[t * x.count + v];
      Tiles::finish(tiles + t * bytes, columns, of_vector);
      emit(t, v, of_vector);
    }
}

// emit(number, v, totals) for tiles `first` to `last` of an expert's matrix and all vectors, with totals[i] = the
// tile's row i . x[v].
template <typename Tiles, typename Emit>
inline void multiply_tiles(
    const Weight& weight, int64_t expert, int64_t first, int64_t last, Vectors<typename Tiles::Arithmetic> x,
    const Emit& emit) {
  int64_t number = first;
  if (x.count <= FEW)
    for (; number + TOGETHER <= last; number += TOGETHER) {
      auto of_tile = [&](int64_t t, int64_t v, const auto& totals) { emit(number + t, v, totals); };
      multiply_together<Tiles>(weight.tile(expert, number), x, weight.columns, of_tile);
    }
  for (; number < last; number++) {
    auto of_tile = [&](int64_t v, const auto& totals) { emit(number, v, totals); };
    multiply_tile<Tiles>(weight.tile(expert, number), x, weight.columns, of_tile);
  }
}

}  // namespace granite4_neuron
