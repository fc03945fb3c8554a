// Attention over keys and values in the pages of a paged cache: all tokens of a step, of several sequences.
#pragma once

#include "attention.h"

namespace granite4_neuron {

// Which tokens and pages are each sequence's. Page n of a sequence holds its positions from n * page_size on.
struct PagedSequences {
  int64_t count, columns, page_size;
  const int32_t* starts;   // [count + 1], where each begins among the tokens
  const int32_t* lengths;  // [count], with the new tokens
  const int32_t* pages;    // [count, columns], rows page_stride apart
  int64_t page_stride;

  int64_t tokens(int64_t sequence) const {
    return int64_t{starts[sequence + 1]} - starts[sequence];
  }
  int64_t first_position(int64_t sequence) const {
    return lengths[sequence] - tokens(sequence);
  }
  int64_t page(int64_t sequence, int64_t number) const {
    return pages[sequence * page_stride + number];
  }
};

// Keys or values, [pages, kv_heads, page_size, head_dim] at any distances.
template <typename T>
struct PagedVectors {
  T* data;
  int64_t page_stride, head_stride, position_stride;

  explicit PagedVectors(const at::Tensor& tensor)
      : data(tensor.mutable_data_ptr<T>()), page_stride(tensor.stride(0)), head_stride(tensor.stride(1)),
        position_stride(tensor.stride(2)) {}

  MatrixView<T> page(int64_t number, int64_t head) const {
    return {data + number * page_stride + head * head_stride, position_stride};
  }
};

// One head's vectors of one sequence, position after position.
template <typename T>
class PagedReader {
 public:
  PagedReader(const PagedVectors<T>& vectors, const PagedSequences& sequences, int64_t sequence, int64_t head)
      : vectors_(vectors), sequences_(sequences), sequence_(sequence), head_(head) {}

  const T* operator()(int64_t position) {
    if (position < begin_ || position >= begin_ + sequences_.page_size) {
      int64_t number = position / sequences_.page_size;
      begin_ = number * sequences_.page_size;
      page_ = vectors_.page(sequences_.page(sequence_, number), head_);
    }
    return page_.row(position - begin_);
  }

 private:
  const PagedVectors<T>& vectors_;
  const PagedSequences& sequences_;
  int64_t sequence_, head_;
  int64_t begin_ = -sequences_.page_size;
  MatrixView<T> page_{nullptr, 0};
};

// The rows of a step, as `PagedSequences` has them; int32.
struct SequenceRows {
  at::Tensor starts, lengths, pages;
};

inline PagedSequences check_sequences(
    const SequenceRows& rows, int64_t tokens, int64_t num_pages, int64_t page_size) {
  const auto& [starts, lengths, pages] = rows;
  int64_t count = lengths.numel();
  check_dense(starts, "starts", {count + 1}, at::kInt);
  check_dense(lengths, "lengths", {count}, at::kInt);
  check_shape(pages, "pages", {count, -1});
  check_last_axis(pages, "pages");
  PagedSequences sequences{count, pages.size(1), page_size, starts.const_data_ptr<int32_t>(),
                           lengths.const_data_ptr<int32_t>(), pages.const_data_ptr<int32_t>(), pages.stride(0)};
  TORCH_CHECK(
      sequences.starts[0] == 0 && sequences.starts[count] <= tokens, "starts go beyond ", tokens, " tokens");
  for (int64_t sequence = 0; sequence < count; sequence++) {
    int64_t length = sequences.lengths[sequence];
    TORCH_CHECK(sequences.tokens(sequence) >= 0, "sequence ", sequence, " ends before it starts");
    if (sequences.tokens(sequence) == 0) continue;
    TORCH_CHECK(sequences.first_position(sequence) >= 0, "sequence ", sequence, " is shorter than its new tokens");
    TORCH_CHECK(length <= sequences.columns * page_size, "sequence ", sequence, " has too few pages");
    for (int64_t number = 0; number * page_size < length; number++) {
      int64_t page = sequences.page(sequence, number);
      TORCH_CHECK(0 <= page && page < num_pages, "sequence ", sequence, " has page ", page, " of ", num_pages);
    }
  }
  return sequences;
}

// A step's new vectors, [tokens, kv_heads * head_dim], to their places.
template <typename T>
inline void write_pages(
    const PagedVectors<T>& vectors, const PagedSequences& sequences, MatrixView<const T> from, int64_t kv_heads,
    int64_t head_dim) {
  for (int64_t sequence = 0; sequence < sequences.count; sequence++) {
    parallel_tasks(sequences.tokens(sequence), 64, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        int64_t position = sequences.first_position(sequence) + t, page_size = sequences.page_size;
        const T* token = from.row(sequences.starts[sequence] + t);
        for (int64_t head = 0; head < kv_heads; head++) {
          T* to = vectors.page(sequences.page(sequence, position / page_size), head).row(position % page_size);
          std::memcpy(to, token + head * head_dim, head_dim * sizeof(T));
        }
      }
    });
  }
}

// A block of queries: tokens `first` and following of a sequence.
struct QueryBlock {
  int64_t sequence, first, count;
};

inline std::vector<QueryBlock> query_blocks(const PagedSequences& sequences, int64_t most) {
  std::vector<QueryBlock> blocks;
  for (int64_t sequence = 0; sequence < sequences.count; sequence++)
    for (int64_t first = 0; first < sequences.tokens(sequence); first += most)
      blocks.push_back({sequence, first, std::min(most, sequences.tokens(sequence) - first)});
  return blocks;
}

// As ops.cpu.paged_attention, which is the Python side.
inline at::Tensor paged_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor key_pages,
    at::Tensor value_pages, const SequenceRows& rows, double scale) {
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
        // A head's keys stay in cache while one block after another looks at them.
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
