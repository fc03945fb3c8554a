// Products of packed weights with any number of vectors.
#pragma once

#include "buffers.h"
#include "formats.h"

namespace granite4_neuron {

// Vectors that a tile is multiplied by at a time: their sums, and a step of weights, fit the registers.
constexpr int64_t AT_ONCE = LANES == 16 ? 12 : 3;
// Bytes that weights are fetched ahead of their use where they are used once.
constexpr int64_t AHEAD = 4096;

// Weights that are fetched into the cache while others are multiplied: each step of these fetches `stride` bytes.
struct Fetch {
  const char* next;
  int64_t stride;

  // In pass number `pass` of `passes` over a tile. With one pass memory is read as fast as it goes. With several it is
  // read evenly: in each of them a part of the next tile.
  template <typename Tiles>
  static Fetch in_pass(const char* tile, int64_t tile_bytes, int64_t pass, int64_t passes) {
    if (passes == 1) return {tile + AHEAD, Tiles::STEP_BYTES};
    return {tile + tile_bytes + pass * tile_bytes / passes, (Tiles::STEP_BYTES + passes - 1) / passes};
  }
  template <int64_t MOST>
  void step() {
    for (int64_t byte = 0; byte < MOST; byte += 64) __builtin_prefetch(next + byte, 0, 2);
    next += stride;
  }
};

// Vectors as products read them: in blocks of `share` at most. A block has a step of all its vectors side by side, with
// room for LANES of them; a block of one is that vector. Behind the last column there are zeros up to a whole step.
template <typename Arithmetic>
struct Vectors {
  using Input = typename Arithmetic::Input;
  static constexpr int64_t PLACES = LANES * Arithmetic::COLUMNS;  // inputs of a step

  const Input* data;
  int64_t count, share;

  static int64_t block_size(int64_t columns) {
    return (steps_of<Arithmetic>(columns) + LANES - 1) / LANES * LANES * PLACES;
  }
  // What `count` vectors take.
  static int64_t size(int64_t count, int64_t columns) {
    int64_t share = share_of(count);
    return (count + share - 1) / share * block_size(columns);
  }
  // How many of `count` vectors are multiplied at a time.
  static int64_t share_of(int64_t count) {
    int64_t blocks = std::max<int64_t>(1, (count + AT_ONCE - 1) / AT_ONCE);
    return std::max<int64_t>(1, (count + blocks - 1) / blocks);
  }
};

// totals[v] = the sum over a tile's steps of weights times x[v], in the order of the columns.
template <typename Steps, int COUNT>
inline void multiply_steps(
    const char* step, const typename Steps::Arithmetic::Input* x, int64_t columns,
    typename Steps::Arithmetic::Total* totals, Fetch& fetch) {
  using Arithmetic = typename Steps::Arithmetic;
  constexpr int VECTORS = Arithmetic::VECTORS;
  constexpr int64_t X_STEP = COUNT == 1 ? Arithmetic::COLUMNS : Vectors<Arithmetic>::PLACES;
  Vec sums[COUNT][VECTORS];
#pragma GCC unroll 12
  for (int v = 0; v < COUNT; v++)
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; i++) sums[v][i] = Vec(0.0f);
  int64_t steps = steps_of<Arithmetic>(columns);
  for (int64_t s = 0; s < steps; s++, step += Steps::STEP_BYTES, x += X_STEP) {
    fetch.template step<Steps::FETCH_BYTES>();
    auto weights = Steps::load(step);
#pragma GCC unroll 12
    for (int v = 0; v < COUNT; v++) {
      auto factor = Arithmetic::broadcast(x + v * Arithmetic::COLUMNS);
#pragma GCC unroll 4
      for (int i = 0; i < VECTORS; i++) sums[v][i] = Arithmetic::add(sums[v][i], weights[i], factor);
    }
  }
#pragma GCC unroll 12
  for (int v = 0; v < COUNT; v++)
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; i++) totals[v][i] = sums[v][i];
}

// The same of weights that have a scale for each row and group of columns: one group's sums after another's.
template <typename Tiles, int COUNT>
inline void multiply_scaled_groups(
    const char* group, const typename Tiles::Arithmetic::Input* x, int64_t columns,
    typename Tiles::Arithmetic::Total* totals, Fetch& fetch) {
  using Arithmetic = typename Tiles::Arithmetic;
  constexpr int64_t STEP = COUNT == 1 ? Arithmetic::COLUMNS : Vectors<Arithmetic>::PLACES;
  for (int v = 0; v < COUNT; v++) totals[v].fill(Vec(0.0f));
  for (int64_t first = 0; first < columns; first += Tiles::GROUP, group += Tiles::GROUP_BYTES) {
    typename Arithmetic::Total sums[COUNT];
    const auto* of_group = x + first / Arithmetic::COLUMNS * STEP;
    multiply_steps<Tiles, COUNT>(group, of_group, std::min(Tiles::GROUP, columns - first), sums, fetch);
    for (int v = 0; v < COUNT; v++) Tiles::add_group(group, sums[v], totals[v]);
  }
}

template <typename Steps, int COUNT>
constexpr auto multiply_function() {
  if constexpr (HAS_GROUPS<Steps>) {
    return multiply_scaled_groups<Steps, COUNT>;
  } else {
    return multiply_steps<Steps, COUNT>;
  }
}

template <typename Steps>
using MultiplySteps = void (*)(
    const char*, const typename Steps::Arithmetic::Input*, int64_t, typename Steps::Arithmetic::Total*, Fetch&);

template <typename Steps, size_t... NUMBERS>
constexpr auto multiply_steps_table(std::index_sequence<NUMBERS...>) {
  return std::array<MultiplySteps<Steps>, sizeof...(NUMBERS)>{multiply_function<Steps, NUMBERS + 1>()...};
}

// The steps of a tile when they have been loaded once: for many vectors, and weights whose loading is work.
template <typename Tiles>
struct LoadedSteps {
  using Arithmetic = typename Tiles::Arithmetic;
  using Operand = typename Arithmetic::Operand;
  static constexpr int64_t STEP_BYTES = sizeof(Operand), FETCH_BYTES = Tiles::STEP_BYTES;

  static Operand load(const char* step) {
    Operand weights;
    std::memcpy(&weights, step, sizeof(weights));
    return weights;
  }
  static void fill(std::vector<char>& steps, const char* tile, int64_t columns) {
    int64_t count = steps_of<Arithmetic>(columns);
    steps.resize(count * STEP_BYTES);
    for (int64_t s = 0; s < count; s++) {
      Operand weights = Tiles::load(tile + s * Tiles::STEP_BYTES);
      std::memcpy(&steps[s * STEP_BYTES], &weights, sizeof(weights));
    }
  }
};

// finish(v, totals) for all vectors, with totals[v] as in `multiply_steps`. steps: those of `tile`, or what has been made
// of them.
template <typename Tiles, typename Steps, typename Finish>
inline void multiply_vectors(
    const char* tile, const char* steps, Vectors<typename Steps::Arithmetic> x, int64_t columns,
    const Finish& finish) {
  static constexpr auto table = multiply_steps_table<Steps>(std::make_index_sequence<AT_ONCE>());
  typename Steps::Arithmetic::Total totals[AT_ONCE];
  const auto* block = x.data;
  int64_t passes = (x.count + x.share - 1) / x.share, bytes = Tiles::tile_bytes(columns);
  for (int64_t pass = 0; pass < passes; pass++, block += x.block_size(columns)) {
    int64_t first = pass * x.share, count = std::min(x.share, x.count - first);
    Fetch fetch = Fetch::in_pass<Tiles>(tile, bytes, pass, passes);
    table[count - 1](steps, block, columns, totals, fetch);
    for (int64_t v = 0; v < count; v++) finish(first + v, totals[v]);
  }
}

// emit(v, totals) for all vectors, with totals[i] = the tile's row i . x[v]; `loaded` is for its use.
template <typename Tiles, typename Emit>
inline void multiply_tile(
    const char* tile, Vectors<typename Tiles::Arithmetic> x, int64_t columns, std::vector<char>& loaded,
    const Emit& emit) {
  auto finish = [&](int64_t v, auto& totals) {
    Tiles::finish(tile, columns, totals);
    emit(v, totals);
  };
  if constexpr (Tiles::LOADING_IS_WORK) {
    if (x.count > AT_ONCE) {
      LoadedSteps<Tiles>::fill(loaded, tile, columns);
      return multiply_vectors<Tiles, LoadedSteps<Tiles>>(tile, loaded.data(), x, columns, finish);
    }
  }
  multiply_vectors<Tiles, Tiles>(tile, tile, x, columns, finish);
}

// One block of `Vectors` at `to`, of `width` vectors: row(v) is the v-th, of T.
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
  std::fill(rows.data() + width * stride, rows.data() + LANES * stride, static_cast<Input>(0.0f));
  const auto* from = reinterpret_cast<const float*>(rows.data());
  for (int64_t s = 0; s < steps; s += LANES)
    at::vec::transpose_mxn<float>(from + s, steps, reinterpret_cast<float*>(to) + s * LANES, LANES, LANES, LANES);
}

// `Vectors` of x, [count, columns], in `scratch`, which has room for them.
template <typename Arithmetic, typename T>
inline Vectors<Arithmetic> as_vectors(
    const T* x, int64_t count, int64_t columns, typename Arithmetic::Input* scratch) {
  int64_t share = Vectors<Arithmetic>::share_of(count), size = Vectors<Arithmetic>::block_size(columns);
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

// to[i] = factor * totals[i] + bias[i] for `count` rows of a tile. bias: null for none.
template <typename T, typename Out>
inline void store_totals(const std::array<Vec, TILE / LANES>& totals, float factor, const T* bias, Out* to, int64_t count) {
  if (count == TILE) {
    for (int v = 0; v < TILE / LANES; v += 2) {
      Vec first = totals[v] * Vec(factor), second = totals[v + 1] * Vec(factor);
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
  for (int v = 0; v < TILE / LANES; v++) totals[v].store(values + v * LANES);
  for (int64_t i = 0; i < count; i++) {
    float value = values[i] * factor;
    to[i] = static_cast<Out>(bias != nullptr ? value + static_cast<float>(bias[i]) : value);
  }
}

// Have the weights fetched, as soon as threads are idle, that followed these the last time: likely they will again. Where
// many are in use some are forgotten.
inline void fetch_follower(const Weight& weight) {
  struct Follower {
    const char* tiles;
    int64_t bytes;
  };
  constexpr int BITS = 10;
  thread_local std::array<Follower, 1 << BITS> followers{};
  thread_local Follower* of_last = followers.data();
  auto hash = reinterpret_cast<uintptr_t>(weight.tiles) / 64 * uint64_t{0x9E3779B97F4A7C15};
  *of_last = {weight.tiles, weight.num_bytes()};
  of_last = &followers[hash >> (64 - BITS)];
  ThreadPool::instance().fetch_when_idle(of_last->tiles, of_last->bytes);
}

// y = factor * (weight . x) + bias. x: [vectors, columns]; bias: [rows], or null; y: [vectors, rows].
template <typename Tiles, typename T, typename Out>
inline void multiply_all(const Weight& weight, const T* x, int64_t vectors, const T* bias, float factor, Out* y) {
  using Arithmetic = typename Tiles::Arithmetic;
  Scratch<typename Arithmetic::Input> scratch(Vectors<Arithmetic>::size(vectors, weight.columns));
  auto inputs = as_vectors<Arithmetic>(x, vectors, weight.columns, scratch.data());
  fetch_follower(weight);
  parallel_tasks(tiles_of(weight.rows), 1, [&](int64_t begin, int64_t end) {
    std::vector<char> loaded;
    for (int64_t number = begin; number < end; number++) {
      int64_t row = number * TILE, count = std::min(TILE, weight.rows - row);
      auto store = [&](int64_t v, const auto& totals) {
        store_totals(totals, factor, bias ? bias + row : nullptr, y + v * weight.rows + row, count);
      };
      multiply_tile<Tiles>(weight.tile(0, number), inputs, weight.columns, loaded, store);
    }
  });
}

inline int64_t rows_of(const at::Tensor& x) {
  return x.numel() / x.size(-1);
}

inline std::vector<int64_t> with_last(const at::Tensor& x, int64_t size) {
  auto shape = x.sizes().vec();
  shape.back() = size;
  return shape;
}

inline void check_product(const at::Tensor& x, const Weight& weight) {
  TORCH_CHECK(x.scalar_type() == weight.dtype, "vectors of ", x.scalar_type(), " and weights for ", weight.dtype);
  TORCH_CHECK(x.size(-1) == weight.columns, x.size(-1), " values of a vector and ", weight.columns, " columns");
}

// As ops.linear. x: [..., columns]; bias: [rows].
inline at::Tensor linear(const at::Tensor& any_x, const Weight& weight, const std::optional<at::Tensor>& bias) {
  check_product(any_x, weight);
  at::Tensor x = any_x.contiguous(), y = empty(with_last(x, weight.rows), x.options());
  GRANITE4_DISPATCH_WEIGHT(weight, "linear", [&] {
    multiply_all<tiles_t>(
        weight, x.const_data_ptr<scalar_t>(), rows_of(x), pointer<scalar_t>(bias), 1.0f,
        y.mutable_data_ptr<scalar_t>());
  });
  return y;
}

// As ops.logits; products are never rounded to the weights' dtype.
inline at::Tensor logits(const at::Tensor& any_x, const Weight& weight, double scaling) {
  check_product(any_x, weight);
  at::Tensor x = any_x.contiguous(), y = empty(with_last(x, weight.rows), x.options().dtype(at::kFloat));
  GRANITE4_DISPATCH_WEIGHT(weight, "logits", [&] {
    multiply_all<tiles_t, scalar_t>(
        weight, x.const_data_ptr<scalar_t>(), rows_of(x), nullptr, static_cast<float>(1.0 / scaling),
        y.mutable_data_ptr<float>());
  });
  return y;
}

}  // namespace granite4_neuron
