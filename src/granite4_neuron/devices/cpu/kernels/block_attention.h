// Attention of a block of tokens over blocks of keys.
#pragma once

#include "tile_products.h"
#include "views.h"

namespace granite4_neuron {

// A block of new tokens of one sequence, all query heads of one key head, over the keys that they see.
//
// Keys come in blocks from the sequence's first on, and the result of one row of queries does not depend on other rows:
// a token has the same bits alone and among many. In bfloat16 products have bfloat16 operands, so the softmax's weights
// are rounded to it.
//
// Source: the online softmax of FlashAttention (Dao et al. 2022, algorithm 1), with blocks that stay in cache.
template <typename T>
class BlockAttention {
 public:
  static constexpr int64_t TOKENS = 32, KEYS = 64;

  // tokens: at most TOKENS.
  BlockAttention(int64_t heads, int64_t head_dim, int64_t tokens)
      : heads_(heads), head_dim_(head_dim), width_(tiles_of(head_dim) * TILE),
        key_steps_((steps_of<Arithmetic>(head_dim) + LANES - 1) / LANES * LANES),
        queries_(Blocks::size(tokens * heads, head_dim)), weights_(Blocks::size(tokens * heads, KEYS)),
        rows_of_keys_(KEYS * key_steps_ * COLUMNS), rows_of_values_(KEYS * width_),
        rows_of_weights_(tokens * heads * KEYS), keys_(KEYS * key_steps_), values_(KEYS / COLUMNS * width_),
        scores_(tokens * heads * KEYS),
        out_(tokens * heads * width_), top_(tokens * heads), total_(tokens * heads), rescale_(tokens * heads) {}

  // q, to: rows are tokens; a token's heads lie one after another, from the first head of this block on.
  // key(position), value(position): [head_dim]. Positions grow; token t sees those up to first_position + t.
  template <typename KeyAt, typename ValueAt>
  void run(
      MatrixView<const T> q, KeyAt key, ValueAt value, MatrixView<T> to, int64_t tokens, int64_t first_position,
      float scale) {
    int64_t rows = tokens * heads_;
    auto query = [&](int64_t row) { return q.row(row / heads_) + row % heads_ * head_dim_; };
    Blocks queries = fill_panel<Arithmetic>(query, rows, head_dim_, queries_.data());
    std::fill(out_.begin(), out_.end(), 0.0f);
    std::fill(total_.begin(), total_.end(), 0.0f);
    std::fill(top_.begin(), top_.end(), -INFINITY);
    int64_t seen = first_position + tokens;
    for (int64_t start = 0; start < seen; start += KEYS) {
      int64_t count = std::min(KEYS, seen - start);
      load_keys(key, start, count);
      load_values(value, start, count);
      auto visible = [&](int64_t row) {
        return std::clamp<int64_t>(first_position + row / heads_ + 1 - start, 0, count);
      };
      score(queries, scale);
      for (int64_t row = 0; row < rows; row++) online_softmax(row, visible(row));
      add_values(rows, visible);
    }
    for (int64_t row = 0; row < rows; row++)
      for (int64_t d = 0; d < head_dim_; d++)
        to.row(row / heads_)[row % heads_ * head_dim_ + d] = static_cast<T>(out_[row * width_ + d] / total_[row]);
  }

 private:
  using Arithmetic = typename ArithmeticOf<T>::type;
  using Input = typename Arithmetic::Input;
  using Blocks = ActivationPanel<Arithmetic>;
  using Tiles = PlainTiles<T>;
  using Steps = LoadedSteps<Tiles>;
  static constexpr int64_t COLUMNS = Arithmetic::COLUMNS;
  static_assert(Steps::STEP_BYTES == TILE * sizeof(float) && KEYS % TILE == 0);

  int64_t heads_, head_dim_, width_, key_steps_;  // width: head_dim in whole tiles
  // Rows are (token, head). Keys and values are tiles: of keys, whose columns are head_dim, and of head_dim, whose
  // columns are keys. A step of a tile has one float per row.
  std::vector<Input> queries_, weights_, rows_of_keys_, rows_of_values_, rows_of_weights_;
  std::vector<float> keys_, values_, scores_, out_, top_, total_, rescale_;

  static const char* tile_of(const std::vector<float>& tiles, int64_t number, int64_t steps) {
    return reinterpret_cast<const char*>(&tiles[number * steps * TILE]);
  }

  // Memory beyond the `count` keys does not affect the result.
  template <typename KeyAt>
  void load_keys(KeyAt& key, int64_t start, int64_t count) {
    int64_t size = key_steps_ * COLUMNS;
    for (int64_t s = 0; s < count; s++) convert(key(start + s), &rows_of_keys_[s * size], head_dim_);
    std::fill(rows_of_keys_.begin() + count * size, rows_of_keys_.end(), static_cast<Input>(0.0f));
    const auto* from = reinterpret_cast<const float*>(rows_of_keys_.data());
    for (int64_t s = 0; s < KEYS; s += LANES)
      for (int64_t step = 0; step < key_steps_; step += LANES)
        at::vec::transpose_mxn<float>(
            from + s * key_steps_ + step, key_steps_, &keys_[(s / TILE * key_steps_ + step) * TILE + s % TILE], TILE,
            LANES, LANES);
  }

  template <typename ValueAt>
  void load_values(ValueAt& value, int64_t start, int64_t count) {
    for (int64_t s = 0; s < count; s++) convert(value(start + s), &rows_of_values_[s * width_], head_dim_);
    std::fill(rows_of_values_.begin() + count * width_, rows_of_values_.end(), static_cast<Input>(0.0f));
    auto* to = reinterpret_cast<Input*>(values_.data());
    for (int64_t d = 0; d < width_; d += TILE)
      for (int64_t s = 0; s < KEYS; s += COLUMNS, to += TILE * COLUMNS) {
        const Input* row = &rows_of_values_[s * width_ + d];
        if constexpr (COLUMNS == 1) {
          std::copy(row, row + TILE, to);
        } else {
          interleave_rows(row, row + width_, to);
        }
      }
  }

  void score(const Blocks& queries, float scale) {
    for (int64_t first = 0; first < KEYS; first += TILE) {
      const char* tile = tile_of(keys_, first / TILE, key_steps_);
      multiply_vectors<Tiles, Steps>(tile, tile, queries, head_dim_, [&](int64_t row, const auto& acc) {
        for (int v = 0; v < Arithmetic::VECTORS; v++)
          (acc[v] * Vec(scale)).store(&scores_[row * KEYS + first + v * LANES]);
      });
    }
  }

  // Turns a row's scores into weights; only the first `visible` scores count.
  void online_softmax(int64_t row, int64_t visible) {
    float* scores = &scores_[row * KEYS];
    Input* weights = &rows_of_weights_[row * KEYS];
    if (visible == 0) {
      std::fill_n(weights, KEYS, static_cast<Input>(0.0f));
      return;
    }
    std::fill(scores + visible, scores + KEYS, -INFINITY);
    Vec highest = Vec::loadu(scores);
    for (int64_t s = LANES; s < KEYS; s += LANES) highest = at::vec::maximum(highest, Vec::loadu(scores + s));
    float new_top = std::max(top_[row], maximum(highest));
    Vec offset(new_top), weight_sum(0.0f);
    for (int64_t s = 0; s < KEYS; s += PAIR) {
      store_pair(
          weights + s, (Vec::loadu(scores + s) - offset).exp_u20(),
          (Vec::loadu(scores + s + LANES) - offset).exp_u20());
      auto [first, second] = load_pair(weights + s);  // as they were rounded
      weight_sum = weight_sum + first + second;
    }
    rescale_[row] = std::exp(top_[row] - new_top);
    total_[row] = total_[row] * rescale_[row] + sum(weight_sum);
    top_[row] = new_top;
  }

  // Rescales each row's running sums, and adds its weighted values. Rows that see none of the keys are unchanged.
  template <typename Visible>
  void add_values(int64_t rows, const Visible& visible) {
    auto weights = [&](int64_t row) { return &rows_of_weights_[row * KEYS]; };
    Blocks blocks = fill_panel<Arithmetic>(weights, rows, KEYS, weights_.data());
    for (int64_t first = 0; first < width_; first += TILE) {
      const char* tile = tile_of(values_, first / TILE, KEYS / COLUMNS);
      multiply_vectors<Tiles, Steps>(tile, tile, blocks, KEYS, [&](int64_t row, const auto& acc) {
        if (visible(row) == 0) return;
        for (int v = 0; v < Arithmetic::VECTORS; v++) {
          float* out = &out_[row * width_ + first + v * LANES];
          at::vec::fmadd(Vec::loadu(out), Vec(rescale_[row]), acc[v]).store(out);
        }
      });
    }
  }
};

inline void check_heads(int64_t num_heads, int64_t kv_heads, int64_t head_dim) {
  TORCH_CHECK(
      kv_heads > 0 && head_dim > 0 && num_heads % kv_heads == 0, num_heads, " query heads do not share ", kv_heads,
      " key heads of ", head_dim, " values");
}

}  // namespace granite4_neuron
