// Attention, over the cache of slots and over pages.
#include "attention.h"

#include "block_attention.h"
#include "paged_attention.h"
#include "profile.h"

namespace granite4_neuron {

inline void check_cache_rows(const CacheRows& rows, int64_t tokens, const at::Tensor& cache) {
  check_packed(rows.tokens, tokens);
  check_slots(rows.slots, "slots", rows.tokens.count(), cache.size(0));
  check_starts(rows.starts, rows.tokens.lengths, cache.size(2));
}

void write_rows(at::Tensor cache, const at::Tensor& values, const CacheRows& rows) {
  PartOfStep part(Part::attention);
  check_shape(values, "values", {-1, -1, -1});
  check_dense(values, "values", values.sizes(), cache.scalar_type());
  check_dense(cache, "cache", {-1, values.size(1), -1, values.size(2)}, values.scalar_type());
  check_cache_rows(rows, values.size(0), cache);
  int64_t kv_heads = values.size(1), max_length = cache.size(2), bytes = values.size(2) * values.element_size();
  const auto *slot = rows.slots.const_data_ptr<int64_t>(), *start = rows.starts.const_data_ptr<int64_t>();
  const char* from = static_cast<const char*>(values.const_data_ptr());
  char* to = static_cast<char*>(cache.mutable_data_ptr());
  for (int64_t row = 0; row < rows.tokens.count(); row++)
    for (int64_t token = 0; token < rows.tokens.length(row); token++)
      for (int64_t head = 0; head < kv_heads; head++)
        std::memcpy(
            to + ((slot[row] * kv_heads + head) * max_length + start[row] + token) * bytes,
            from + ((rows.tokens.offset(row) + token) * kv_heads + head) * bytes, bytes);
}

// Blocks of each row's tokens. Late blocks see more keys than early ones, so they alternate from both ends: threads get
// equal shares.
inline std::vector<TokenBlock> blocks_in_turns(const PackedRows& rows, int64_t most) {
  std::vector<TokenBlock> blocks;
  for (int64_t row = 0; row < rows.count(); row++) {
    int64_t length = rows.length(row), count = (length + most - 1) / most;
    for (int64_t nth = 0; nth < count; nth++) {
      int64_t first = (nth % 2 == 0 ? nth / 2 : count - 1 - nth / 2) * most;
      blocks.push_back({row, first, std::min(most, length - first)});
    }
  }
  return blocks;
}

at::Tensor attend_rows(
    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache, const CacheRows& rows,
    double scale) {
  PartOfStep part(Part::attention);
  check_shape(query, "query", {-1, -1, -1});
  check_dense(query, "query", query.sizes(), query.scalar_type());
  check_dense(key_cache, "key_cache", {-1, -1, -1, query.size(2)}, query.scalar_type());
  check_dense(value_cache, "value_cache", key_cache.sizes(), query.scalar_type());
  check_heads(query.size(1), key_cache.size(1), query.size(2));
  check_cache_rows(rows, query.size(0), key_cache);
  int64_t tokens = query.size(0), num_heads = query.size(1), head_dim = query.size(2);
  int64_t kv_heads = key_cache.size(1), max_length = key_cache.size(2), shared = num_heads / kv_heads;
  at::Tensor output = empty(query.sizes(), query.options());
  const auto *slot = rows.slots.const_data_ptr<int64_t>(), *start = rows.starts.const_data_ptr<int64_t>();
  int64_t stride = num_heads * head_dim;
  GRANITE4_DISPATCH(query.scalar_type(), "cached_attention", [&] {
    const auto* q = query.const_data_ptr<scalar_t>();
    const auto* keys = key_cache.const_data_ptr<scalar_t>();
    const auto* values = value_cache.const_data_ptr<scalar_t>();
    auto* to = output.mutable_data_ptr<scalar_t>();
    if (rows.tokens.real_tokens() < tokens) std::fill_n(to, output.numel(), static_cast<scalar_t>(0.0f));
    using Block = BlockAttention<scalar_t>;
    auto blocks = blocks_in_turns(rows.tokens, Block::TOKENS);
    int64_t count = blocks.size(), longest = std::min(rows.tokens.longest(), Block::TOKENS);
    parallel_tasks(count * kv_heads, 1, [&](int64_t begin, int64_t end) {
      Block block(shared, head_dim, longest);
      for (int64_t task = begin; task < end; task++) {
        auto [row, first, queries] = blocks[task / kv_heads];
        int64_t head = task % kv_heads, at = (slot[row] * kv_heads + head) * max_length * head_dim;
        int64_t from = (rows.tokens.offset(row) + first) * stride + head * shared * head_dim;
        MatrixView<const scalar_t> head_keys{keys + at, head_dim}, head_values{values + at, head_dim};
        block.run(
            MatrixView<const scalar_t>{q + from, stride}, [=](int64_t n) { return head_keys.row(n); },
            [=](int64_t n) { return head_values.row(n); }, MatrixView<scalar_t>{to + from, stride}, queries,
            start[row] + first, static_cast<float>(scale));
      }
    });
  });
  return output;
}

// The rows of a rectangle of tokens. positions: [batch, tokens], of which only the first is read; a row without tokens
// needs none.
inline CacheRows rows_of_rectangle(
    const at::Tensor& positions, const at::Tensor& lengths, const at::Tensor& slots, int64_t batch, int64_t tokens) {
  check_dense(lengths, "lengths", {batch}, at::kLong);
  check_shape(positions, "positions", {batch, -1});
  TORCH_CHECK(positions.scalar_type() == at::kLong, "positions are ", positions.scalar_type(), " and should be Long");
  at::Tensor offsets = empty({batch}, lengths.options()), starts = empty({batch}, lengths.options());
  const auto *length = lengths.const_data_ptr<int64_t>(), *position = positions.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < batch; row++) {
    TORCH_CHECK(length[row] <= tokens, "row ", row, " has length ", length[row], " of ", tokens, " tokens");
    TORCH_CHECK(length[row] <= 0 || positions.size(1) > 0, "row ", row, " has no position");
    offsets.mutable_data_ptr<int64_t>()[row] = row * tokens;
    starts.mutable_data_ptr<int64_t>()[row] = positions.size(1) > 0 ? position[row * positions.stride(0)] : 0;
  }
  return {{offsets, lengths}, slots, starts};
}

void write_cache(
    at::Tensor cache, const at::Tensor& values, const at::Tensor& positions, const at::Tensor& lengths,
    const at::Tensor& slots) {
  check_shape(values, "values", {-1, -1, -1, -1});
  CacheRows rows = rows_of_rectangle(positions, lengths, slots, values.size(0), values.size(1));
  write_rows(cache, values.flatten(0, 1), rows);
}

at::Tensor cached_attention(
    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& positions,
    const at::Tensor& lengths, const at::Tensor& slots, double scale) {
  check_shape(query, "query", {-1, -1, -1, -1});
  CacheRows rows = rows_of_rectangle(positions, lengths, slots, query.size(0), query.size(1));
  return attend_rows(query.flatten(0, 1), key_cache, value_cache, rows, scale).view(query.sizes());
}

at::Tensor paged_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor key_pages,
    at::Tensor value_pages, const SequenceRows& rows, double scale) {
  PartOfStep part(Part::attention);
  check_shape(query, "query", {-1, -1});
  check_shape(key_pages, "key_pages", {-1, -1, -1, -1});
  check_shape(value_pages, "value_pages", key_pages.sizes());
  int64_t tokens = query.size(0), kv_heads = key_pages.size(1), head_dim = key_pages.size(3), width = query.size(1);
  check_heads(head_dim > 0 ? width / head_dim : 0, kv_heads, head_dim);
  TORCH_CHECK(width % head_dim == 0, "query has ", width, " values of a token, in heads of ", head_dim);
  TORCH_CHECK(key_pages.size(2) > 0, "key_pages have pages of no positions");
  int64_t num_heads = width / head_dim, shared = num_heads / kv_heads;
  check_shape(key, "key", {tokens, kv_heads * head_dim});
  check_shape(value, "value", {tokens, kv_heads * head_dim});
  for (const at::Tensor& tensor : {query, key, value, key_pages, value_pages}) {
    TORCH_CHECK(tensor.scalar_type() == query.scalar_type(), "query, keys, values and pages have different dtypes");
    check_last_axis(tensor, "query, key, value and pages");
  }
  PagedSequences sequences = check_sequences(rows, tokens, key_pages.size(0), key_pages.size(2));
  at::Tensor output = empty({tokens, width}, query.options());
  GRANITE4_DISPATCH(query.scalar_type(), "paged_attention", [&] {
    using Block = BlockAttention<scalar_t>;
    PagedVectors<scalar_t> keys(key_pages), values(value_pages);
    write_pages<scalar_t>(keys, sequences, {key.const_data_ptr<scalar_t>(), key.stride(0)}, kv_heads, head_dim);
    write_pages<scalar_t>(values, sequences, {value.const_data_ptr<scalar_t>(), value.stride(0)}, kv_heads, head_dim);
    MatrixView<const scalar_t> q{query.const_data_ptr<scalar_t>(), query.stride(0)};
    MatrixView<scalar_t> to{output.mutable_data_ptr<scalar_t>(), width};
    int64_t real = sequences.starts[sequences.count];
    std::fill_n(to.row(real), (tokens - real) * width, static_cast<scalar_t>(0.0f));
    auto blocks = query_blocks(sequences, Block::TOKENS);
    int64_t count = blocks.size();
    parallel_tasks(count * kv_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; task++) {
        // A head's keys stay in cache while one block after another reads them.
        int64_t head = task / count;
        auto [sequence, first, queries] = blocks[task % count];
        int64_t token = sequences.starts[sequence] + first, column = head * shared * head_dim;
        Block(shared, head_dim, queries)
            .run(
                q.from_row(token).from_column(column), PagedReader<scalar_t>(keys, sequences, sequence, head),
                PagedReader<scalar_t>(values, sequences, sequence, head), to.from_row(token).from_column(column),
                queries, sequences.first_position(sequence) + first, static_cast<float>(scale));
      }
    });
  });
  return output;
}

}  // namespace granite4_neuron
