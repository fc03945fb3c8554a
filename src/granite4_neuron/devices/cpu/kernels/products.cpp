// Products of the weights of one format, GRANITE4_FORMAT: devices/cpu/build.py compiles this file for each of them, plain
// ones into the kernels and each other format into a library of its own.
#include "products.h"

#include "formats.h"
#include "matmul.h"
#include "tile_products.h"

namespace granite4_neuron {

// to[i] = factor * acc[i] + bias[i] for `count` rows of a tile. bias: null for none.
template <typename T, typename Out>
inline void store_acc(
    const std::array<Vec, TILE / LANES>& acc, float factor, const T* bias, Out* to, int64_t count) {
  if (count == TILE) {
    for (int v = 0; v < TILE / LANES; v += 2) {
      Vec first = acc[v] * Vec(factor), second = acc[v + 1] * Vec(factor);
      if (bias != nullptr) {
        auto [b_first, b_second] = load_pair(bias + v * LANES);
        first = first + b_first;
        second = second + b_second;
      }
      store_pair(to + v * LANES, first, second);
    }
    return;
  }
  float values[TILE];
  for (int v = 0; v < TILE / LANES; v++) acc[v].store(values + v * LANES);
  for (int64_t i = 0; i < count; i++) {
    float value = values[i] * factor;
    to[i] = static_cast<Out>(bias != nullptr ? value + static_cast<float>(bias[i]) : value);
  }
}

// Prefetches, on idle threads, the weights that followed this one in the previous step. Beyond 1024 weights some are
// forgotten.
inline void prefetch_follower(const Weight& weight) {
  struct Follower {
    const char* tiles;
    int64_t bytes;
  };
  constexpr int BITS = 10;
  thread_local std::array<Follower, 1 << BITS> followers{};
  thread_local Follower* follower = followers.data();
  auto hash = reinterpret_cast<uintptr_t>(weight.tiles) / 64 * uint64_t{0x9E3779B97F4A7C15};
  *follower = {weight.tiles, weight.num_bytes()};
  follower = &followers[hash >> (64 - BITS)];
  ThreadPool::instance().prefetch_when_idle(follower->tiles, follower->bytes);
}

template <typename Tiles, typename T, typename Out>
void multiply_all(const Weight& weight, const T* x, int64_t vectors, const T* bias, float factor, Out* y) {
  using Arithmetic = typename Tiles::Arithmetic;
  Scratch<typename Arithmetic::Input> scratch(ActivationPanel<Arithmetic>::size(vectors, weight.columns));
  auto inputs = as_panel<Arithmetic>(x, vectors, weight.columns, scratch.data());
  prefetch_follower(weight);
  int64_t tiles = tiles_of(weight.rows);
  parallel_tasks(inputs.parts() * tiles, vectors <= SMALL_BATCH ? TILE_UNROLL : 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin, next = 0; task < end; task = next) {
      int64_t part = task / tiles, first = part * tiles;
      next = std::min(end, first + tiles);
      auto store = [&](int64_t number, int64_t v, const auto& acc) {
        int64_t row = number * TILE, count = std::min(TILE, weight.rows - row);
        Out* to = y + (part * inputs.PART + v) * weight.rows + row;
        store_acc(acc, factor, bias ? bias + row : nullptr, to, count);
      };
      multiply_tiles<Tiles>(weight, 0, task - first, next - first, inputs.part(part), store);
    }
  });
}

template <typename Tiles, typename T>
void multiply_groups(
    const std::vector<Group>& groups, const Weight& weight, const T* inputs, int64_t per_input, float* out) {
  using Arithmetic = typename Tiles::Arithmetic;
  using Input = typename Arithmetic::Input;
  using Blocks = ActivationPanel<Arithmetic>;
  int64_t columns = weight.columns, rows = weight.rows, tiles = tiles_of(rows), size = 0;
  std::vector<int64_t> begins;
  for (const auto& group : groups) {
    begins.push_back(size);
    size += Blocks::size(group.choices.size(), columns);
  }
  Scratch<Input> scratch(size);
  std::vector<Blocks> vectors(groups.size());
  parallel_tasks(groups.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; g++) {
      auto row = [&](int64_t v) { return inputs + groups[g].choices[v] / per_input * columns; };
      vectors[g] = fill_panel<Arithmetic>(row, groups[g].choices.size(), columns, scratch.data() + begins[g]);
    }
  });
  parallel_tasks(groups.size() * tiles, TILE_UNROLL, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin, next = 0; task < end; task = next) {
      int64_t g = task / tiles;
      const auto& [expert, choices] = groups[g];
      next = std::min(end, (g + 1) * tiles);
      auto store = [&](int64_t number, int64_t v, const auto& acc) {
        int64_t row = number * TILE, count = std::min(TILE, rows - row);
        store_acc<T>(acc, 1.0f, nullptr, out + choices[v] * rows + row, count);
      };
      multiply_tiles<Tiles>(weight, expert, task - g * tiles, next - g * tiles, vectors[g], store);
    }
  });
}

namespace plain {
template <typename T>
using Tiles = PlainTiles<T>;
}

template <template <typename> typename Tiles, typename T>
void set_products(Format format) {
  products_of<T>(format) = {multiply_all<Tiles<T>, T, T>, multiply_all<Tiles<T>, T, float>, multiply_groups<Tiles<T>, T>};
}

[[maybe_unused]] const bool ARE_SET =
    (set_products<GRANITE4_FORMAT::Tiles, float>(Format::GRANITE4_FORMAT),
     set_products<GRANITE4_FORMAT::Tiles, at::BFloat16>(Format::GRANITE4_FORMAT),
     set_products<GRANITE4_FORMAT::Tiles, at::Half>(Format::GRANITE4_FORMAT), true);

}  // namespace granite4_neuron
