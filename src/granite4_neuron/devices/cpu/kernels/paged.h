// The Mamba-2 mixer for a few tokens of each sequence, over states that lie in the pages of a paged cache: decode
// steps, and the verify steps of speculation, which keep the state after each token.
#pragma once

#include "conv.h"
#include "mamba.h"
#include "scan.h"

namespace granite4_neuron {

// Which tokens and pages belong to which sequence. Sequences whose first page is -1 or 0 are padding.
struct PagedRows {
  int64_t sequences, columns;
  const int32_t* starts;    // [sequences + 1]
  const int32_t* pages;     // [sequences, columns], rows page_stride apart
  int64_t page_stride;
  const int32_t* accepted;  // [sequences], or null where nothing is speculative

  int64_t length(int64_t row) const {
    return int64_t{starts[row + 1]} - starts[row];
  }
  int64_t page(int64_t row, int64_t column) const {
    return pages[row * page_stride + column];
  }
  bool is_padding(int64_t row) const {
    return page(row, 0) <= 0 || length(row) == 0;
  }
  // The token of the previous step after which the sequence continues.
  int64_t source_column(int64_t row) const {
    return accepted == nullptr ? 0 : std::max(accepted[row], 1) - 1;
  }
  int64_t state_page(int64_t row, int64_t token) const {
    return page(row, accepted == nullptr ? 0 : token);
  }
};

// The windows of a paged cache; a page is `columns` inputs of each channel at any distances.
template <typename T>
struct PagedWindows {
  T* data;
  int64_t page_stride, channel_stride, column_stride;

  MatrixView<T> page(int64_t number) const {
    return {data + number * page_stride, column_stride, channel_stride};
  }
};

// Channels `first` to `last` of one sequence: convolution and SiLU of its tokens, and its next window.
template <typename T>
inline void convolve_paged(
    const Mixer& m, const ConvViews<T>& views, const PagedWindows<T>& windows, const PagedRows& rows, int64_t row,
    int64_t first, int64_t last) {
  int64_t history = m.width - 1, length = rows.length(row), count = last - first;
  MatrixView<T> page = windows.page(rows.page(row, 0)).from_column(first);
  std::vector<float> inputs((history + length) * count);
  int64_t offset = rows.source_column(row);
  for (int64_t h = 0; h < history; h++)
    for (int64_t c = 0; c < count; c++)
      inputs[h * count + c] = static_cast<float>(page.row(offset + h)[c * page.column_stride]);
  for (int64_t t = 0; t < length; t++)
    to_float(views.token(rows.starts[row] + t) + first, &inputs[(history + t) * count], count);
  for (int64_t t = 0; t < length; t++) {
    auto inputs_of = [&](int64_t tap) { return &inputs[(t + tap) * count] - first; };
    convolve_channels(m, inputs_of, views.activated + (rows.starts[row] + t) * m.channels, first, last);
  }

  // A speculative step keeps all its inputs: the next step knows how many of them were accepted.
  bool speculative = rows.accepted != nullptr;
  int64_t from = speculative ? 1 : length, kept = speculative ? history - 1 + length : history;
  for (int64_t h = 0; h < kept; h++)
    for (int64_t c = 0; c < count; c++)
      page.row(h)[c * page.column_stride] = static_cast<T>(inputs[(from + h) * count + c]);
}

// The states of a paged cache, [pages, heads, head_dim, d_state]; a page's are contiguous.
struct PagedStates {
  float* data;
  int64_t page_stride;
};

// One head of one sequence, token by token; in a speculative step each token's state goes to a page of its own.
inline void advance_paged(
    const Mixer& m, const HeadTokens& tokens, const PagedStates& states, const PagedRows& rows, int64_t row,
    int64_t head) {
  float* head_states = states.data + head * m.head_dim * m.d_state;
  const float* from = head_states + rows.page(row, rows.source_column(row)) * states.page_stride;
  for (int64_t t = 0; t < rows.length(row); t++) {
    float* to = head_states + rows.state_page(row, t) * states.page_stride;
    scan_head(tokens.part(rows.starts[row] + t, 1), {from, to}, m.head_dim, m.d_state, 1);
    from = to;
  }
}

inline void check_paged_rows(const PagedRows& rows, int64_t tokens, int64_t num_pages) {
  TORCH_CHECK(rows.starts[0] == 0 && rows.starts[rows.sequences] == tokens, "starts do not span ", tokens, " tokens");
  for (int64_t row = 0; row < rows.sequences; row++) {
    TORCH_CHECK(rows.length(row) >= 0, "row ", row, " ends before it starts");
    if (rows.is_padding(row)) continue;
    bool speculative = rows.accepted != nullptr;
    int64_t used = speculative ? std::max(rows.length(row), rows.source_column(row) + 1) : 1;
    TORCH_CHECK(used <= rows.columns, "row ", row, " needs ", used, " pages of ", rows.columns);
    for (int64_t column = 0; column < used; column++) {
      int64_t page = rows.page(row, column);
      TORCH_CHECK(0 < page && page < num_pages, "row ", row, " has page ", page, " of ", num_pages);
    }
  }
}

inline PagedRows check_page_rows(const PageRows& rows, int64_t tokens, int64_t num_pages) {
  const auto& [starts, pages, accepted] = rows;
  check_shape(pages, "pages", {-1, -1});
  check_last_axis(pages, "pages");
  TORCH_CHECK(pages.size(0) == 0 || pages.size(1) > 0, "pages have no columns");
  check_dense(starts, "starts", {pages.size(0) + 1}, at::kInt);
  PagedRows paged{pages.size(0), pages.size(1), starts.const_data_ptr<int32_t>(), pages.const_data_ptr<int32_t>(),
                  pages.stride(0), nullptr};
  if (accepted.has_value()) {
    check_dense(*accepted, "accepted", {paged.sequences}, at::kInt);
    paged.accepted = accepted->const_data_ptr<int32_t>();
  }
  check_paged_rows(paged, tokens, num_pages);
  return paged;
}

}  // namespace granite4_neuron
