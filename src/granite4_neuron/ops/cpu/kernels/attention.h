// Attention over a cache that is kept per slot, and writing to that cache.
#pragma once

#include "buffers.h"
#include "common.h"
#include "gemm.h"
#include "parallel.h"
#include "views.h"

namespace granite4_neuron {

// As ops.write_cache, for one cache. cache: [slots, kv_heads, max_length, head_dim]; values: [batch, tokens, kv_heads,
// head_dim]. Padded tokens are written nowhere.
inline void write_cache(
    at::Tensor cache, const at::Tensor& values, const at::Tensor& positions, const at::Tensor& lengths,
    const at::Tensor& slots) {
  TORCH_CHECK(cache.is_contiguous() && values.is_contiguous() && values.scalar_type() == cache.scalar_type());
  check_last_axis(positions, "positions");
  check_rows(lengths, slots, values.size(1), cache.size(0));
  int64_t batch = values.size(0), tokens = values.size(1), kv_heads = values.size(2);
  int64_t max_length = cache.size(2), bytes = values.size(3) * values.element_size();
  const auto* length = lengths.const_data_ptr<int64_t>();
  const auto* slot = slots.const_data_ptr<int64_t>();
  const char* from = static_cast<const char*>(values.const_data_ptr());
  char* to = static_cast<char*>(cache.mutable_data_ptr());
  for (int64_t row = 0; row < batch; row++) {
    const int64_t* position = positions.const_data_ptr<int64_t>() + row * positions.stride(0);
    for (int64_t token = 0; token < length[row]; token++) {
      TORCH_CHECK(
          0 <= position[token] && position[token] < max_length, "position ", position[token], " is beyond the cache");
      for (int64_t head = 0; head < kv_heads; head++)
        std::memcpy(
            to + ((slot[row] * kv_heads + head) * max_length + position[token]) * bytes,
            from + ((row * tokens + token) * kv_heads + head) * bytes, bytes);
    }
  }
}

// A block of new tokens of one sequence, all query heads of one key head, over the keys that they see.
//
// Keys come in blocks from the sequence's first on, and what one row of queries gives does not depend on the others: so
// it is the same bit by bit for a token alone and for one of many.
//
// Source: the online softmax of FlashAttention (Dao et al. 2022, algorithm 1), with blocks that stay in cache.
template <typename T>
struct BlockAttention {
  static constexpr int64_t TOKENS = 32, KEYS = 64;
  int64_t heads, head_dim, columns;
  // Rows are (token, head). keys is [columns, KEYS], values is [KEYS, columns], where columns are head_dim, padded.
  std::vector<float> query, rows_of_keys, keys, values, scores, out, top, total;

  // tokens: at most TOKENS.
  BlockAttention(int64_t heads, int64_t head_dim, int64_t tokens)
      : heads(heads), head_dim(head_dim), columns((head_dim + LANES - 1) / LANES * LANES),
        query(tokens * heads * head_dim), rows_of_keys(KEYS * columns), keys(columns * KEYS), values(KEYS * columns),
        scores(tokens * heads * KEYS), out(tokens * heads * columns), top(tokens * heads), total(tokens * heads) {}

  // q, to: rows are tokens, whose heads lie one behind another, from the first that is meant.
  // key(position), value(position): [head_dim]. Positions grow; token t sees those up to first_position + t.
  template <typename KeyAt, typename ValueAt>
  void run(
      MatrixView<const T> q, KeyAt key, ValueAt value, MatrixView<T> to, int64_t tokens, int64_t first_position,
      float scale) {
    int64_t rows = tokens * heads;
    for (int64_t row = 0; row < rows; row++)
      for (int64_t d = 0; d < head_dim; d++)
        query[row * head_dim + d] = scale * static_cast<float>(q.row(row / heads)[row % heads * head_dim + d]);
    std::fill(out.begin(), out.end(), 0.0f);
    std::fill(total.begin(), total.end(), 0.0f);
    std::fill(top.begin(), top.end(), -INFINITY);
    int64_t seen = first_position + tokens;
    for (int64_t start = 0; start < seen; start += KEYS) {
      int64_t count = std::min(KEYS, seen - start);
      load(key, value, start, count);
      gemm({rows, KEYS, head_dim}, {query.data(), head_dim}, {keys.data(), KEYS}, {scores.data(), KEYS}, false);
      for (int64_t row = 0; row < rows; row++)
        soften(row, std::min(count, std::max<int64_t>(0, first_position + row / heads + 1 - start)));
      gemm({rows, columns, count}, {scores.data(), KEYS}, {values.data(), columns}, {out.data(), columns}, true);
    }
    for (int64_t row = 0; row < rows; row++)
      for (int64_t d = 0; d < head_dim; d++)
        to.row(row / heads)[row % heads * head_dim + d] = static_cast<T>(out[row * columns + d] / total[row]);
  }

 private:
  // What lies behind the `count` keys takes no part.
  template <typename KeyAt, typename ValueAt>
  void load(KeyAt& key, ValueAt& value, int64_t start, int64_t count) {
    for (int64_t s = 0; s < KEYS; s++) {
      float* of_key = &rows_of_keys[s * columns];
      if (s < count) {
        to_float(key(start + s), of_key, head_dim);
        to_float(value(start + s), &values[s * columns], head_dim);
      } else {
        std::fill(of_key, of_key + head_dim, 0.0f);
      }
    }
    for (int64_t s = 0; s < KEYS; s += LANES)
      for (int64_t d = 0; d < columns; d += LANES)
        at::vec::transpose_mxn<float>(&rows_of_keys[s * columns + d], columns, &keys[d * KEYS + s], KEYS, LANES, LANES);
  }

  // Turn a row's scores into weights, of which the first `visible` count; rescale what the row has so far.
  void soften(int64_t row, int64_t visible) {
    float* weights = &scores[row * KEYS];
    std::fill(weights + visible, weights + KEYS, -INFINITY);
    if (visible == 0) {
      std::fill(weights, weights + KEYS, 0.0f);
      return;
    }
    Vec highest = Vec::loadu(weights);
    for (int64_t s = LANES; s < KEYS; s += LANES) highest = at::vec::maximum(highest, Vec::loadu(weights + s));
    auto larger = [](Vec& a, Vec& b) { return at::vec::maximum(a, b); };
    float new_top = std::max(top[row], at::vec::vec_reduce_all<float>(larger, highest));
    Vec rescale(std::exp(top[row] - new_top)), offset(new_top), weight_sum(0.0f);
    for (int64_t s = 0; s < KEYS; s += LANES) {
      Vec weight = (Vec::loadu(weights + s) - offset).exp_u20();
      weight.store(weights + s);
      weight_sum = weight_sum + weight;
    }
    total[row] = total[row] * std::exp(top[row] - new_top) + sum(weight_sum);
    top[row] = new_top;
    for (int64_t d = 0; d < columns; d += LANES)
      (Vec::loadu(&out[row * columns + d]) * rescale).store(&out[row * columns + d]);
  }
};

// As ops.cached_attention. query: [batch, tokens, num_heads, head_dim]; key_cache, value_cache: [slots, kv_heads,
// max_length, head_dim]; positions: [batch, tokens]. Only the entries that a row has written are read; padding gives 0.
inline at::Tensor cached_attention(
    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& positions,
    const at::Tensor& lengths, const at::Tensor& slots, double scale) {
  TORCH_CHECK(query.is_contiguous() && key_cache.is_contiguous() && value_cache.is_contiguous());
  check_rows(lengths, slots, query.size(1), key_cache.size(0));
  TORCH_CHECK(query.scalar_type() == key_cache.scalar_type());
  int64_t batch = query.size(0), tokens = query.size(1), num_heads = query.size(2), head_dim = query.size(3);
  int64_t kv_heads = key_cache.size(1), max_length = key_cache.size(2), shared = num_heads / kv_heads;
  check_last_axis(positions, "positions");
  at::Tensor output = empty(query.sizes(), query.options());
  const auto* length = lengths.const_data_ptr<int64_t>();
  const auto* slot = slots.const_data_ptr<int64_t>();
  const auto* position = positions.const_data_ptr<int64_t>();
  int64_t position_stride = positions.stride(0), stride = num_heads * head_dim;
  GRANITE4_DISPATCH(query.scalar_type(), "cached_attention", [&] {
    const auto* q = query.const_data_ptr<scalar_t>();
    const auto* keys = key_cache.const_data_ptr<scalar_t>();
    const auto* values = value_cache.const_data_ptr<scalar_t>();
    auto* to = output.mutable_data_ptr<scalar_t>();
    using Block = BlockAttention<scalar_t>;
    int64_t blocks = (tokens + Block::TOKENS - 1) / Block::TOKENS;
    parallel_tasks(batch * kv_heads * blocks, 1, [&](int64_t begin, int64_t end) {
      Block block(shared, head_dim, std::min(tokens, Block::TOKENS));
      for (int64_t task = begin; task < end; task++) {
        int64_t row = task / (kv_heads * blocks), nth = task / kv_heads % blocks, head = task % kv_heads;
        // Late blocks see more keys than early ones: in turns from both ends, so that threads get equal shares.
        int64_t first = (nth % 2 == 0 ? nth / 2 : blocks - 1 - nth / 2) * Block::TOKENS;
        int64_t count = std::clamp<int64_t>(length[row] - first, 0, Block::TOKENS);
        int64_t from = (row * tokens + first) * stride + head * shared * head_dim;
        for (int64_t t = first + count; t < std::min(first + Block::TOKENS, tokens); t++)
          std::fill_n(to + from + (t - first) * stride, shared * head_dim, static_cast<scalar_t>(0.0f));
        if (count == 0) continue;
        int64_t at = (slot[row] * kv_heads + head) * max_length * head_dim;
        MatrixView<const scalar_t> of_keys{keys + at, head_dim}, of_values{values + at, head_dim};
        block.run(
            MatrixView<const scalar_t>{q + from, stride}, [=](int64_t n) { return of_keys.row(n); },
            [=](int64_t n) { return of_values.row(n); }, MatrixView<scalar_t>{to + from, stride}, count,
            position[row * position_stride] + first, static_cast<float>(scale));
      }
    });
  });
  return output;
}

}  // namespace granite4_neuron
