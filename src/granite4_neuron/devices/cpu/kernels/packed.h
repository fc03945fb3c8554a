// Rows of different lengths side by side: which tokens of a step belong to which sequence.
#pragma once

#include <algorithm>
#include <vector>

#include "checks.h"

namespace granite4_neuron {

// The tokens of each row of a step, [rows], int64: the number of its first token in the step, and how many are real.
// Tokens that belong to no row are padding.
struct PackedRows {
  at::Tensor offsets, lengths;

  int64_t count() const {
    return lengths.numel();
  }
  int64_t offset(int64_t row) const {
    return offsets.const_data_ptr<int64_t>()[row];
  }
  int64_t length(int64_t row) const {
    return lengths.const_data_ptr<int64_t>()[row];
  }
  int64_t longest() const {
    int64_t most = 0;
    for (int64_t row = 0; row < count(); row++) most = std::max(most, length(row));
    return most;
  }
  int64_t real_tokens() const {
    int64_t tokens = 0;
    for (int64_t row = 0; row < count(); row++) tokens += length(row);
    return tokens;
  }
};

// Rows come one after another, with or without padding between them.
inline void check_packed(const PackedRows& rows, int64_t tokens) {
  check_dense(rows.lengths, "lengths", {-1}, at::kLong);
  check_dense(rows.offsets, "offsets", {rows.count()}, at::kLong);
  int64_t end = 0;
  for (int64_t row = 0; row < rows.count(); row++) {
    int64_t offset = rows.offset(row), length = rows.length(row);
    TORCH_CHECK(end <= offset && offset <= tokens, "row ", row, " begins at token ", offset, " of ", tokens);
    TORCH_CHECK(
        0 <= length && length <= tokens - offset, "row ", row, " has length ", length, " of ", tokens - offset,
        " tokens");
    end = offset + length;
  }
}

// Some tokens of a row, from its token `first` on.
struct TokenBlock {
  int64_t row, first, count;
};

}  // namespace granite4_neuron
