// Keys and values in the pages of a paged cache, and the blocks of queries that see them.
#pragma once

#include "attention.h"
#include "common.h"
#include "parallel.h"
#include "views.h"

namespace granite4_neuron {

// Which tokens and pages belong to which sequence. Page n of a sequence holds its positions from n * page_size on.
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

}  // namespace granite4_neuron
