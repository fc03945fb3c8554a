// Attention over a cache that is kept per slot, for one new token a row and for many; and writing to that cache.
#pragma once

#include "common.h"
#include "gemm.h"
#include "parallel.h"

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

// The query heads that share one key head, over one sequence's keys: softmax(q k) v with a running maximum, in float32.
//
// query: [heads, head_dim], scaled. key, value: [length, head_dim]. out: [heads, head_dim].
template <typename T>
inline void attend(
    const float* query, const T* key, const T* value, float* out, int64_t heads, int64_t head_dim, int64_t length) {
  constexpr int64_t BLOCK = 64;
  std::vector<float> scores(heads * BLOCK), top(heads, -INFINITY), total(heads, 0.0f);
  std::fill(out, out + heads * head_dim, 0.0f);
  for (int64_t start = 0; start < length; start += BLOCK) {
    int64_t count = std::min(BLOCK, length - start);
    for (int64_t s = 0; s < count; s++) {
      const T* k = key + (start + s) * head_dim;
      for (int64_t head = 0; head < heads; head++) {
        const float* q = query + head * head_dim;
        Vec first(0.0f), second(0.0f);
        int64_t d = 0;
        for (; d + PAIR <= head_dim; d += PAIR) {
          auto [k_first, k_second] = load_pair(k + d);
          first = at::vec::fmadd(Vec::loadu(q + d), k_first, first);
          second = at::vec::fmadd(Vec::loadu(q + d + LANES), k_second, second);
        }
        float score = sum(first + second);
        for (; d < head_dim; d++) score += q[d] * static_cast<float>(k[d]);
        scores[head * BLOCK + s] = score;
      }
    }
    for (int64_t head = 0; head < heads; head++) {
      float* weights = &scores[head * BLOCK];
      float new_top = std::max(top[head], *std::max_element(weights, weights + count));
      float rescale = std::exp(top[head] - new_top);
      top[head] = new_top;
      total[head] *= rescale;
      for (int64_t s = 0; s < count; s++) {
        weights[s] = std::exp(weights[s] - new_top);
        total[head] += weights[s];
      }
      float* sums = out + head * head_dim;
      Vec factor(rescale);
      int64_t d = 0;
      for (; d + PAIR <= head_dim; d += PAIR) {
        Vec first = Vec::loadu(sums + d) * factor, second = Vec::loadu(sums + d + LANES) * factor;
        for (int64_t s = 0; s < count; s++) {
          auto [v_first, v_second] = load_pair(value + (start + s) * head_dim + d);
          first = at::vec::fmadd(Vec(weights[s]), v_first, first);
          second = at::vec::fmadd(Vec(weights[s]), v_second, second);
        }
        first.store(sums + d);
        second.store(sums + d + LANES);
      }
      for (; d < head_dim; d++) {
        sums[d] *= rescale;
        for (int64_t s = 0; s < count; s++)
          sums[d] += weights[s] * static_cast<float>(value[(start + s) * head_dim + d]);
      }
    }
  }
  for (int64_t head = 0; head < heads; head++)
    for (int64_t d = 0; d < head_dim; d++) out[head * head_dim + d] /= total[head];
}

// As ops.cached_attention, for one new token a row. query: [batch, 1, num_heads, head_dim]; key_cache, value_cache:
// [slots, kv_heads, max_length, head_dim]; positions: [batch, 1]. Only the entries that a
// row has written are read; rows of length 0 give 0.
inline at::Tensor decode_attention(
    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& positions,
    const at::Tensor& lengths, const at::Tensor& slots, double scale) {
  TORCH_CHECK(query.is_contiguous() && key_cache.is_contiguous() && value_cache.is_contiguous());
  check_rows(lengths, slots, query.size(1), key_cache.size(0));
  TORCH_CHECK(query.size(1) == 1 && query.scalar_type() == key_cache.scalar_type());
  int64_t batch = query.size(0), num_heads = query.size(2), head_dim = query.size(3);
  int64_t kv_heads = key_cache.size(1), max_length = key_cache.size(2), shared = num_heads / kv_heads;
  at::Tensor output = at::empty(query.sizes(), query.options());
  const auto* length = lengths.const_data_ptr<int64_t>();
  const auto* slot = slots.const_data_ptr<int64_t>();
  const auto* position = positions.const_data_ptr<int64_t>();
  int64_t position_stride = positions.stride(0), size = shared * head_dim;
  GRANITE4_DISPATCH(query.scalar_type(), "decode_attention", [&] {
    const auto* q = query.const_data_ptr<scalar_t>();
    const auto* keys = key_cache.const_data_ptr<scalar_t>();
    const auto* values = value_cache.const_data_ptr<scalar_t>();
    auto* to = output.mutable_data_ptr<scalar_t>();
    parallel_tasks(batch * kv_heads, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> scaled(size), result(size);
      for (int64_t task = begin; task < end; task++) {
        int64_t row = task / kv_heads, head = task % kv_heads;
        std::fill(result.begin(), result.end(), 0.0f);
        if (length[row] > 0) {
          for (int64_t i = 0; i < size; i++)
            scaled[i] = static_cast<float>(q[task * size + i]) * static_cast<float>(scale);
          int64_t at = (slot[row] * kv_heads + head) * max_length * head_dim;
          attend(
              scaled.data(), keys + at, values + at, result.data(), shared, head_dim,
              position[row * position_stride] + 1);
        }
        for (int64_t i = 0; i < size; i++) to[task * size + i] = static_cast<scalar_t>(result[i]);
      }
    });
  });
  return output;
}

// A block of new tokens of one sequence, all query heads of one key head, over the keys that they see.
//
// Source: the online softmax of FlashAttention (Dao et al. 2022, algorithm 1), with blocks that stay in cache.
template <typename T>
struct BlockAttention {
  static constexpr int64_t TOKENS = 32, KEYS = 64;
  int64_t heads, head_dim, columns;
  // Rows are (token, head). keys is [head_dim, KEYS], values is [KEYS, columns], where columns are padded.
  std::vector<float> query, keys, values, scores, out, top, total;

  BlockAttention(int64_t heads, int64_t head_dim)
      : heads(heads), head_dim(head_dim), columns((head_dim + LANES - 1) / LANES * LANES),
        query(TOKENS * heads * head_dim), keys(head_dim * KEYS), values(KEYS * columns),
        scores(TOKENS * heads * KEYS), out(TOKENS * heads * columns), top(TOKENS * heads), total(TOKENS * heads) {}

  // q, to: the first token's first head; tokens are `stride` apart, heads head_dim.
  // key, value: [.., head_dim], of which token t sees first_position + t + 1.
  void run(
      const T* q, const T* key, const T* value, T* to, int64_t stride, int64_t tokens, int64_t first_position,
      float scale) {
    int64_t rows = tokens * heads;
    for (int64_t row = 0; row < rows; row++)
      for (int64_t d = 0; d < head_dim; d++)
        query[row * head_dim + d] = scale * static_cast<float>(q[row / heads * stride + row % heads * head_dim + d]);
    std::fill(out.begin(), out.end(), 0.0f);
    std::fill(total.begin(), total.end(), 0.0f);
    std::fill(top.begin(), top.end(), -INFINITY);
    int64_t seen = first_position + tokens;
    for (int64_t start = 0; start < seen; start += KEYS) {
      int64_t count = std::min(KEYS, seen - start);
      load(key + start * head_dim, value + start * head_dim, count);
      gemm({rows, KEYS, head_dim}, {query.data(), head_dim}, {keys.data(), KEYS}, {scores.data(), KEYS}, false);
      for (int64_t row = 0; row < rows; row++)
        soften(row, std::min(count, std::max<int64_t>(0, first_position + row / heads + 1 - start)));
      gemm({rows, columns, count}, {scores.data(), KEYS}, {values.data(), columns}, {out.data(), columns}, true);
    }
    for (int64_t row = 0; row < rows; row++)
      for (int64_t d = 0; d < head_dim; d++)
        to[row / heads * stride + row % heads * head_dim + d] = static_cast<T>(out[row * columns + d] / total[row]);
  }

 private:
  void load(const T* key, const T* value, int64_t count) {
    std::vector<float> of_key(head_dim);
    for (int64_t s = 0; s < KEYS; s++) {
      if (s < count) {
        to_float(key + s * head_dim, of_key.data(), head_dim);
        to_float(value + s * head_dim, &values[s * columns], head_dim);
      } else {
        std::fill(of_key.begin(), of_key.end(), 0.0f);
      }
      for (int64_t d = 0; d < head_dim; d++) keys[d * KEYS + s] = of_key[d];
    }
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

// As ops.cached_attention, for many new tokens a row; arguments are those of `decode_attention`. Padding gives 0.
inline at::Tensor prefill_attention(
    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& positions,
    const at::Tensor& lengths, const at::Tensor& slots, double scale) {
  TORCH_CHECK(query.is_contiguous() && key_cache.is_contiguous() && value_cache.is_contiguous());
  check_rows(lengths, slots, query.size(1), key_cache.size(0));
  TORCH_CHECK(query.scalar_type() == key_cache.scalar_type());
  int64_t batch = query.size(0), tokens = query.size(1), num_heads = query.size(2), head_dim = query.size(3);
  int64_t kv_heads = key_cache.size(1), max_length = key_cache.size(2), shared = num_heads / kv_heads;
  at::Tensor output = at::zeros(query.sizes(), query.options());
  const auto* length = lengths.const_data_ptr<int64_t>();
  const auto* slot = slots.const_data_ptr<int64_t>();
  const auto* position = positions.const_data_ptr<int64_t>();
  int64_t position_stride = positions.stride(0), stride = num_heads * head_dim;
  GRANITE4_DISPATCH(query.scalar_type(), "prefill_attention", [&] {
    const auto* q = query.const_data_ptr<scalar_t>();
    const auto* keys = key_cache.const_data_ptr<scalar_t>();
    const auto* values = value_cache.const_data_ptr<scalar_t>();
    auto* to = output.mutable_data_ptr<scalar_t>();
    using Block = BlockAttention<scalar_t>;
    int64_t blocks = (tokens + Block::TOKENS - 1) / Block::TOKENS;
    parallel_tasks(batch * kv_heads * blocks, 1, [&](int64_t begin, int64_t end) {
      Block block(shared, head_dim);
      for (int64_t task = begin; task < end; task++) {
        int64_t row = task / (kv_heads * blocks), nth = task / kv_heads % blocks, head = task % kv_heads;
        // Late blocks see more keys than early ones: in turns from both ends, so that threads get equal shares.
        int64_t first = (nth % 2 == 0 ? nth / 2 : blocks - 1 - nth / 2) * Block::TOKENS;
        int64_t count = std::min(Block::TOKENS, length[row] - first);
        if (count <= 0) continue;
        int64_t from = (row * tokens + first) * stride + head * shared * head_dim;
        int64_t at = (slot[row] * kv_heads + head) * max_length * head_dim;
        block.run(
            q + from, keys + at, values + at, to + from, stride, count, position[row * position_stride] + first,
            static_cast<float>(scale));
      }
    });
  });
  return output;
}

}  // namespace granite4_neuron
